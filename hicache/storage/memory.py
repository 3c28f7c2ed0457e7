"""A store in the memory of one process, which its ranks share. What dies with the process is lost."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.core import SidePool
from hicache.ports import Found
from hicache.storage.backend import KV, Stats, survey
from hicache.storage.names import Names


class MemoryBackend:
    """Pages in a dict. Every rank has its own names in it, as it would have its own files.

    Args:
        store: the same dict for all ranks of the process.
    """

    def __init__(self, store: dict[str, bytes], names: Names) -> None:
        self._store = store
        self._names = names
        self._stats = Stats(
            "pages_read", "pages_absent", "pages_written", "pages_kept", "bytes_read", "bytes_written"
        )

    def open(self) -> None:
        """Nothing to reach."""

    def close(self) -> None:
        """Nothing is held; the pages stay for whoever opens next."""

    def exists(self, page_hash: str) -> bool:
        return self._has(KV, page_hash)

    def get(self, pool: str, page_hash: str) -> bytes | None:
        return self.batch_get(pool, [page_hash], prefix=())[0]

    def set(self, pool: str, page_hash: str, page: bytes) -> bool:
        return self.batch_set(pool, [page_hash], [page], prefix=())[0]

    def batch_exists(self, hashes: Sequence[str], *, prefix: Sequence[str]) -> int:
        return self.batch_exists_v2(hashes, (), prefix=prefix).kv_pages

    def batch_exists_v2(
        self, hashes: Sequence[str], pools: Sequence[SidePool], *, prefix: Sequence[str]
    ) -> Found:
        return survey(hashes, pools, self._has)

    def batch_get(self, pool: str, hashes: Sequence[str], *, prefix: Sequence[str]) -> list[bytes | None]:
        pages = [self._store.get(self._names.stem(pool, page_hash)) for page_hash in hashes]
        found = [page for page in pages if page is not None]
        self._stats.add("pages_read", len(found))
        self._stats.add("pages_absent", len(pages) - len(found))
        self._stats.add("bytes_read", sum(map(len, found)))
        return pages

    def batch_set(
        self, pool: str, hashes: Sequence[str], pages: Sequence[bytes], *, prefix: Sequence[str]
    ) -> list[bool]:
        for page_hash, page in zip(hashes, pages, strict=True):
            stem = self._names.stem(pool, page_hash)
            # A page of another length was made by somebody else's rules; as in a file, it makes room.
            is_kept = len(self._store.get(stem, b"")) == len(page) and stem in self._store
            if not is_kept:
                self._store[stem] = bytes(page)
                self._stats.add("bytes_written", len(page))
            self._stats.add("pages_kept" if is_kept else "pages_written")
        return [True] * len(hashes)

    def clear(self) -> int:
        own = [stem for stem in list(self._store) if self._names.owns(stem)]
        return sum(self._store.pop(stem, None) is not None for stem in own)

    def get_stats(self) -> dict[str, int]:
        return self._stats.read()

    def _has(self, pool: str, page_hash: str) -> bool:
        return self._names.stem(pool, page_hash) in self._store
