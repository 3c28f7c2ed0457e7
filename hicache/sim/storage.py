"""The external tier in simulated time, and one that goes wrong on one rank.

    control --ports.Storage--> SimStorage --turns--> FaultyBackend --> memory or file backend

Time and failure are apart: `FaultyBackend` is an ordinary backend and serves every mode, what a call takes
is for whoever can wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from hicache.core import SidePool
from hicache.loop import PAUSE, never
from hicache.ports import Found
from hicache.schedule import Schedule
from hicache.sim.faults import NEVER, Call, StorageFaults
from hicache.storage.backend import KV, Backend


class FaultyBackend:
    """A backend whose calls fail or fall short where the plan says. Implements `storage.backend.Backend`.

    Raises:
        StorageError: from any call that the plan lets fail.
    """

    def __init__(self, backend: Backend, faults: StorageFaults) -> None:
        self._backend = backend
        self._faults = faults
        # KV pages that have lost this rank's shard.
        self._lost: set[str] = set()

    def open(self) -> None:
        self._faults.open()
        self._backend.open()

    def close(self) -> None:
        self._backend.close()

    def exists(self, page_hash: str) -> bool:
        return self.batch_exists([page_hash], prefix=()) == 1

    def get(self, pool: str, page_hash: str) -> bytes | None:
        return self.batch_get(pool, [page_hash], prefix=())[0]

    def set(self, pool: str, page_hash: str, page: bytes) -> bool:
        return self.batch_set(pool, [page_hash], [page], prefix=())[0]

    def batch_exists(self, hashes: Sequence[str], *, prefix: Sequence[str]) -> int:
        short = self._faults.begin("exists")
        return self._seen(hashes, self._backend.batch_exists(hashes, prefix=prefix), short)

    def batch_exists_v2(
        self, hashes: Sequence[str], pools: Sequence[SidePool], *, prefix: Sequence[str]
    ) -> Found:
        short = self._faults.begin("exists")
        found = self._backend.batch_exists_v2(hashes, pools, prefix=prefix)
        kv_pages = self._seen(hashes, found.kv_pages, short)
        restorable = [pages for pages in found.restorable if pages <= kv_pages]
        return Found(kv_pages, found.boundaries, restorable)

    def batch_get(self, pool: str, hashes: Sequence[str], *, prefix: Sequence[str]) -> list[bytes | None]:
        short = self._faults.begin("get")
        pages = self._backend.batch_get(pool, hashes, prefix=prefix)
        whole = max(0, len(pages) - short)
        return [
            None if index >= whole or (pool == KV and name in self._lost) else page
            for index, (name, page) in enumerate(zip(hashes, pages, strict=True))
        ]

    def batch_set(
        self, pool: str, hashes: Sequence[str], pages: Sequence[bytes], *, prefix: Sequence[str]
    ) -> list[bool]:
        short = self._faults.begin("set")
        whole = max(0, len(hashes) - short)
        done = self._backend.batch_set(pool, hashes[:whole], pages[:whole], prefix=prefix)
        if pool == KV:
            self._lost.difference_update(
                name for name, is_there in zip(hashes, done, strict=False) if is_there
            )
        return [*done, *[False] * (len(hashes) - whole)]

    def clear(self) -> int:
        return self._backend.clear()

    def get_stats(self) -> dict[str, int]:
        return self._backend.get_stats()

    def _seen(self, hashes: Sequence[str], pages: int, short: int) -> int:
        """Of `pages` leading pages that are there, how many this lookup sees."""
        pages = max(0, pages - short)
        if pages and self._faults.loses_shard():
            name = hashes[pages // 2]
            self._lost.add(name)
            self._faults.lost(name)
        return next((index for index in range(pages) if hashes[index] in self._lost), pages)


class SimStorage:
    """One rank's way to the external tier in simulated time. Implements `ports.Storage`.

    Args:
        pools: the run's side pools.
        polls_max: a call takes up to this many turns, as the schedule says.
        faults: what this rank's calls suffer.
    """

    def __init__(
        self,
        backend: Backend,
        pools: Sequence[SidePool],
        schedule: Schedule,
        polls_max: int,
        faults: StorageFaults,
    ) -> None:
        self._backend = FaultyBackend(backend, faults)
        self._pools = {pool.name: pool for pool in pools}
        self._schedule = schedule
        self._polls_max = polls_max
        self._faults = faults

    async def exists(self, hashes: Sequence[str], *, pools: Sequence[str], prefix: Sequence[str]) -> Found:
        await self._take_time("exists")
        if not pools:
            return Found(self._backend.batch_exists(hashes, prefix=prefix))
        return self._backend.batch_exists_v2(hashes, [self._pools[name] for name in pools], prefix=prefix)

    async def get(self, pool: str, hashes: Sequence[str], *, prefix: Sequence[str]) -> list[bytes | None]:
        await self._take_time("get")
        return self._backend.batch_get(pool, hashes, prefix=prefix)

    async def set(
        self, pool: str, hashes: Sequence[str], pages: Sequence[bytes], *, prefix: Sequence[str]
    ) -> list[bool]:
        await self._take_time("set")
        return self._backend.batch_set(pool, hashes, pages, prefix=prefix)

    async def open(self) -> None:
        self._backend.open()

    async def close(self) -> None:
        self._backend.close()

    async def _take_time(self, call: Call) -> None:
        turns = self._schedule.choose(self._polls_max + 1, "storage") if self._polls_max else 0
        extra = self._faults.turns(call)
        if extra == NEVER:
            await never(f"storage {call} that does not return")
        for _ in range(turns + extra):
            await PAUSE
