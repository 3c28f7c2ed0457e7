"""What a store of pages must do, and what all of them share.

A page is named by its pool and its chained hash; what is stored for it is bytes. A call never raises: what
can't be read is not there, what can't be written was not written. Only `open` may refuse. Calls come
from several lanes of a rank, so a backend must stand being called from several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Protocol

from hicache.core import SidePool
from hicache.ports import Found

KV = "kv"


class Backend(Protocol):
    """Pages on one rank. The names are those of SGLang's backends, without what is about tensors.

    `prefix` names the pages before the first of `hashes`, or is empty; a backend may place a chain
    together by it, and need not look at it.
    """

    def open(self) -> None:
        """Get ready, before the first call and again after `close`.

        Raises:
            StorageError: this rank can't reach the store.
        """
        ...

    def close(self) -> None: ...

    def exists(self, page_hash: str, /) -> bool:
        """Whether the page's KV is there."""
        ...

    def get(self, pool: str, page_hash: str, /) -> bytes | None: ...

    def set(self, pool: str, page_hash: str, page: bytes, /) -> bool: ...

    def batch_exists(self, hashes: Sequence[str], *, prefix: Sequence[str]) -> int:
        """Leading pages of KV that are there."""
        ...

    def batch_exists_v2(
        self, hashes: Sequence[str], pools: Sequence[SidePool], *, prefix: Sequence[str]
    ) -> Found:
        """How much of this chain is there, in KV and in each of `pools`; see `survey`."""
        ...

    def batch_get(self, pool: str, hashes: Sequence[str], *, prefix: Sequence[str]) -> list[bytes | None]:
        """Each page's bytes, None where it is not there or damaged. A missing page does not end the batch."""
        ...

    def batch_set(
        self, pool: str, hashes: Sequence[str], pages: Sequence[bytes], *, prefix: Sequence[str]
    ) -> list[bool]:
        """Whether each page is there now. A page that was there already is kept as it is."""
        ...

    def clear(self) -> int:
        """Remove this rank's pages and nobody else's; how many there were."""
        ...

    def get_stats(self) -> dict[str, int]:
        """Counts since the backend was made. Always the same keys."""
        ...


def survey(hashes: Sequence[str], pools: Sequence[SidePool], has: Callable[[str, str], bool]) -> Found:
    """How much of a chain `has(pool, page_hash)` can give.

    ```
    page           0  1  2  3  4  5
    kv             x  x  x  x  x  .      kv_pages 5
    indexer        x  x  x  x  .  x      all_pages: boundary 4
    mamba          .  x  .  .  x  x      trailing: states at the ends of 2 and 5 pages, boundary 5
    restorable     {2}                   5 pages lack an indexer page
    ```

    A recurrent state restores exactly the prefix at whose end it was taken, so ranks must intersect the
    restorable lengths; the minimum of each rank's longest could be a length that nobody can restore.
    """
    kv_pages = _leading(KV, hashes, has)
    boundaries = {pool.name: 0 for pool in pools}
    common = kv_pages
    for pool in pools:
        if pool.policy == "all_pages":
            boundary = _leading(pool.name, hashes[:kv_pages], has)
            boundaries[pool.name] = boundary
            common = min(common, boundary)
    trailing = [pool.name for pool in pools if pool.policy == "trailing"]
    if not trailing:
        return Found(kv_pages, boundaries)
    restorable = set(range(1, common + 1))
    for name in trailing:
        ends = [index + 1 for index in range(kv_pages) if has(name, hashes[index])]
        boundaries[name] = max(ends, default=0)
        restorable &= set(ends)
    return Found(kv_pages, boundaries, sorted(restorable))


def _leading(pool: str, hashes: Sequence[str], has: Callable[[str, str], bool]) -> int:
    for index, page_hash in enumerate(hashes):
        if not has(pool, page_hash):
            return index
    return len(hashes)


class Stats:
    """Named counts that several threads may add to."""

    __slots__ = ("_counts", "_lock")

    def __init__(self, *names: str) -> None:
        self._counts = dict.fromkeys(names, 0)
        self._lock = Lock()

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def read(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
