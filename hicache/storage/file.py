"""Pages as files in a folder that ranks, runs and machines may share.

What is damaged, cut short, of another configuration or no page at all is a miss, and the next `set` writes
over it. A page is verified before it counts as there already. Nothing is remembered between calls but how
many bytes are used, so a file that another process removes is gone for everybody at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hicache.core import SidePool
from hicache.ports import Found
from hicache.storage.backend import KV, Stats, survey
from hicache.storage.folder import Folder, OwnFile
from hicache.storage.limits import Limits, Room
from hicache.storage.names import Names
from hicache.storage.page_file import FOOTER


class FileBackend:
    """One rank's pages in a folder.

    Args:
        identity: 16 bytes that differ between configurations that can't read each other's pages.
        fsync: `batch_set` returns only when the pages would survive a power failure.
        now_ns: when a page is used, for the order of eviction; only read when there are limits.
    """

    def __init__(
        self,
        path: str,
        names: Names,
        identity: bytes,
        *,
        limits: Limits | None = None,
        fsync: bool = False,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._folder = Folder(path, names, identity)
        self._names = names
        self._room = Room(self._folder, limits or Limits())
        self._fsync = fsync
        self._now_ns = now_ns
        self._stats = Stats(
            "pages_read",
            "pages_absent",
            "pages_unknown",
            "pages_damaged",
            "pages_written",
            "pages_kept",
            "pages_refused",
            "pages_failed",
            "bytes_read",
            "bytes_written",
            "left_overs_removed",
        )

    @property
    def path(self) -> str:
        return self._folder.path

    def open(self) -> None:
        self._folder.make()
        self._stats.add("left_overs_removed", self._folder.remove_left_overs())
        self._room.measure()

    def close(self) -> None:
        """Nothing is held open between calls; the pages stay for whoever opens next."""

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
        stems = [self._names.stem(pool, page_hash) for page_hash in hashes]
        return [self._get(stem, date) for stem, date in zip(stems, self._dates(len(stems)), strict=True)]

    def batch_set(
        self, pool: str, hashes: Sequence[str], pages: Sequence[bytes], *, prefix: Sequence[str]
    ) -> list[bool]:
        stems = [self._names.stem(pool, page_hash) for page_hash in hashes]
        keep = frozenset(stems)
        is_full = False
        results: list[bool] = []
        written = []
        for stem, page, date in zip(stems, pages, self._dates(len(stems)), strict=True):
            is_there = self._keep(stem, page, date)
            if not is_there:
                is_full = is_full or not self._room.reserve(len(page) + FOOTER.size, keep=keep)
                if is_full:
                    self._stats.add("pages_refused")
                elif self._write(stem, page, date):
                    is_there = True
                    written.append(len(results))
            results.append(is_there)
        if self._fsync and written and not self._folder.sync():
            for index in written:
                results[index] = False
        return results

    def clear(self) -> int:
        removed = sum(self._folder.remove(file) for file in self._folder.own_files())
        self._stats.add("left_overs_removed", self._folder.remove_left_overs())
        self._room.measure()
        return removed

    def get_stats(self) -> dict[str, int]:
        return {**self._stats.read(), "pages_evicted": self._room.pages_evicted}

    def _has(self, pool: str, page_hash: str) -> bool:
        """By size and footer: what only the page's own bytes could show is found by `get`."""
        return self._folder.look(self._names.stem(pool, page_hash)).state == "there"

    def _dates(self, count: int) -> list[int | None]:
        """When the pages of a batch were used, in nanoseconds; None where nothing is ever evicted.

        Each page is a nanosecond older than the one before, so that a chain is evicted from its end: what
        would be left behind a gap could not be found again.
        """
        if not self._room.limits.is_set:
            return [None] * count
        now_ns = self._now_ns()
        return [now_ns - index for index in range(count)]

    def _get(self, stem: str, date_ns: int | None) -> bytes | None:
        seen, page = self._folder.load(stem)
        if seen.state != "there":
            self._stats.add(f"pages_{seen.state}")
            if seen.state == "damaged":
                # The next query must not promise it again.
                self._folder.remove(OwnFile(stem, seen))
            return None
        self._stats.add("pages_read")
        self._stats.add("bytes_read", len(page))
        if date_ns is not None:
            self._folder.date(stem, date_ns)
        return page

    def _keep(self, stem: str, page: bytes, date_ns: int | None) -> bool:
        """Whether the page is there already, read and checked, and of the same length."""
        seen, found = self._folder.load(stem)
        if seen.state != "there" or len(found) != len(page):
            return False
        if date_ns is not None:
            self._folder.date(stem, date_ns)
        self._stats.add("pages_kept")
        return True

    def _write(self, stem: str, page: bytes, date_ns: int | None) -> bool:
        """Write a page that has its room."""
        try:
            self._folder.store(stem, page, mtime_ns=date_ns, fsync=self._fsync)
        except OSError:
            # A full disk, a read-only one, a folder in the page's place: not written, and the caller knows.
            self._stats.add("pages_failed")
            return False
        self._stats.add("pages_written")
        self._stats.add("bytes_written", len(page))
        return True
