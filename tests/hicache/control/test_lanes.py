"""Background lanes on real simulated groups: what they publish, and that they publish it whatever happens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hicache.config import StorageConfig
from hicache.control.lanes import BackupLane, IoLane, PrefetchLane, SyncLane
from hicache.control.locks import HostLock
from hicache.control.pools import HostSlots
from hicache.control.queues import Hit, Prefetch, Progress, Queues, StorageBackup
from hicache.core import SIDE_POOLS, SidePool
from hicache.errors import StorageError
from hicache.ledger import Ledger
from hicache.loop import Loop
from hicache.ports import Found
from hicache.probes import Probes
from hicache.schedule import Schedule
from hicache.topology import Topology
from hicache.transport.sim import SimNetwork, SimTransport, VirtualClock
from tests.support.bench import Bench
from tracer.sinks import MemorySink
from tracer.tracer import Tracer

PAGE_TOKENS = 64
TAG = b"pagetag8"


class ToldStorage:
    """A store that has so many leading pages, and whose reads fail from one page on."""

    def __init__(
        self,
        kv_pages: int = 0,
        *,
        restorable: Sequence[int] = (),
        good_pages: int | None = None,
        boundaries: dict[str, int] | None = None,
    ) -> None:
        self.found = Found(kv_pages, boundaries or {}, restorable)
        self.good_pages = kv_pages if good_pages is None else good_pages
        self.read_pages = 0
        self.error = ""
        self.calls: list[tuple[str, int]] = []
        self.refused = 0

    async def exists(self, hashes: Sequence[str], *, pools: Sequence[str], prefix: Sequence[str]) -> Found:
        if self.error:
            raise StorageError(self.error)
        return self.found

    async def get(self, pool: str, hashes: Sequence[str], *, prefix: Sequence[str]) -> list[bytes | None]:
        if self.error:
            raise StorageError(self.error)
        self.calls.append((pool, len(hashes)))
        pages: list[bytes | None] = []
        for _ in hashes:
            pages.append(TAG if self.read_pages < self.good_pages else None)
            self.read_pages += 1
        return pages

    async def set(
        self, pool: str, hashes: Sequence[str], pages: Sequence[bytes], *, prefix: Sequence[str]
    ) -> list[bool]:
        if self.error:
            raise StorageError(self.error)
        self.calls.append((pool, len(hashes)))
        return [index >= self.refused for index in range(len(hashes))]


class Lanes:
    """The lanes of two tensor ranks, each with a store of its own."""

    def __init__(self, *storages: ToldStorage, pools: Sequence[SidePool] = ()) -> None:
        self.loop = Loop(Schedule(answers=[]))
        network = SimNetwork(Topology(tp=len(storages)), self.loop)
        self.queues = [Queues(self.loop.signal) for _ in storages]
        self.sinks = [MemorySink() for _ in storages]
        config = StorageConfig("memory")
        self.ledgers = [Ledger() for _ in storages]
        for rank, storage in enumerate(storages):
            probes = Probes(Tracer(self.sinks[rank], {}, lambda: 0))
            hits, progress = (SimTransport(network, rank, probes, VirtualClock()) for _ in range(2))
            queues, port = self.queues[rank], storage
            host = self.ledgers[rank].host
            lanes = (
                PrefetchLane(queues, port, hits, probes, pools=pools, page_tokens=PAGE_TOKENS),  # type: ignore[arg-type]
                IoLane(queues, port, host, probes, config, pools=pools, page_tokens=PAGE_TOKENS),  # type: ignore[arg-type]
                SyncLane(queues, progress, probes, page_tokens=PAGE_TOKENS),
                BackupLane(queues, port, host, probes, config, pools=pools),  # type: ignore[arg-type]
            )
            for lane in lanes:
                self.loop.spawn(f"{type(lane).__name__} {rank}", lane.run())

    def hits(self) -> list[list[int]]:
        """Agreed pages of the hits that each rank has published."""
        return [[hit.agreed_pages for hit in taken(queues.hits)] for queues in self.queues]

    def acks(self) -> list[list[tuple[str, int]]]:
        return [[(ack.ack, ack.pages) for ack in taken(queues.acks)] for queues in self.queues]


def taken(queue: Any) -> list[Hit | Progress | Any]:
    return list(queue._items)


def prefetch(pages: int, *, allocated: int = 0, states: int = 0) -> Prefetch:
    bench = Bench()
    found = Prefetch(
        op=1,
        active=bench.request(1),
        handle=("r1", 0),
        anchor=bench.tree.root,
        lock=HostLock(bench.tree.root, 0),
        first_page=0,
        tokens=bytes(4 * PAGE_TOKENS * pages),
        digests=bytes(8 * pages),
        hashes=bytes(32 * pages),
        pages_asked=pages,
        prefix=(),
    )
    if allocated:
        found.page_count = allocated
        found.slots = HostSlots(list(range(allocated)), [0] * states)
    return found


def test_d2_the_agreed_hit_is_the_least() -> None:
    """Appendix D.2: 390 pages asked for; one rank sees 300 leading pages, the other 310."""
    lanes = Lanes(ToldStorage(300), ToldStorage(310))
    for queues in lanes.queues:
        queues.prefetch.put(prefetch(390))
    lanes.loop.run()
    assert lanes.hits() == [[300], [300]]


def test_d2_reads_come_in_batches_and_progress_is_the_least_of_the_ranks() -> None:
    """Appendix D.2: 128, 128 and 44 pages; rank B fails at page 101 of the second batch; 4 acks a rank."""
    a, b = ToldStorage(300), ToldStorage(300, good_pages=228)
    lanes = Lanes(a, b)
    for queues in lanes.queues:
        queues.buffer.put(prefetch(390, allocated=300))
    lanes.loop.run()
    tokens = [[(ack, pages * PAGE_TOKENS) for ack, pages in acks] for acks in lanes.acks()]
    expected = [("progress", 8192), ("progress", 14592), ("progress", 14592), ("completed", 19200)]
    assert tokens == [expected, expected]
    assert [count for _, count in a.calls] == [128, 128, 44]
    assert [count for _, count in b.calls] == [128, 128], "what comes after a failure is not read"


def test_d3_ranks_intersect_the_lengths_at_which_a_state_exists() -> None:
    """Appendix D.3: {4, 8, 16} and {4, 12} of 16 pages give 4; the least of the longest, 12, nobody has."""
    lanes = Lanes(
        ToldStorage(16, restorable=[4, 8, 16], boundaries={"mamba": 16}),
        ToldStorage(13, restorable=[4, 12], boundaries={"mamba": 12}),
        pools=[SIDE_POOLS["mamba"]],
    )
    for queues in lanes.queues:
        queues.prefetch.put(prefetch(16))
    lanes.loop.run()
    assert lanes.hits() == [[4], [4]]


def test_a_query_that_fails_on_one_rank_is_a_miss_on_all_and_the_next_one_is_paired_rightly() -> None:
    failing = ToldStorage(10)
    failing.error = "unreachable"
    lanes = Lanes(ToldStorage(10), failing)
    for queues in lanes.queues:
        queues.prefetch.put(prefetch(10))
    lanes.loop.run()
    failing.error = ""
    for queues in lanes.queues:
        queues.prefetch.put(prefetch(10))
    lanes.loop.run()
    assert lanes.hits() == [[0, 10], [0, 10]]


def test_a_terminated_prefetch_still_takes_part_and_publishes_as_many_acks() -> None:
    lanes = Lanes(ToldStorage(300), ToldStorage(300))
    for rank, queues in enumerate(lanes.queues):
        ended = prefetch(300, allocated=300)
        ended.is_terminated = rank == 1
        queues.buffer.put(ended)
    lanes.loop.run()
    (first, second) = lanes.acks()
    assert first == second == [("progress", 0)] * 3 + [("completed", 300)]


def test_a_rank_without_slots_reports_nothing_read() -> None:
    lanes = Lanes(ToldStorage(10), ToldStorage(10))
    for rank, queues in enumerate(lanes.queues):
        own = prefetch(10, allocated=10)
        if rank == 0:
            own.slots = None
        queues.buffer.put(own)
    lanes.loop.run()
    assert lanes.acks() == [[("progress", 0), ("completed", 10)]] * 2


def test_a_side_pool_is_read_with_the_pages_and_clamps_them() -> None:
    """Draft pages share the KV's slots: a page counts when both are there."""
    storage = ToldStorage(4, good_pages=7)
    lanes = Lanes(storage, pools=[SIDE_POOLS["draft"]])
    lanes.queues[0].buffer.put(prefetch(4, allocated=4))
    lanes.loop.run()
    assert storage.calls == [("kv", 4), ("draft", 4)]
    assert lanes.acks() == [[("progress", 3), ("completed", 4)]]


@pytest.mark.parametrize(("good_pages", "hits"), [(5, 1), (4, 0), (3, 0)])
def test_the_state_at_the_end_is_read_once_all_pages_are_there(good_pages: int, hits: int) -> None:
    lanes = Lanes(ToldStorage(4, good_pages=good_pages), pools=[SIDE_POOLS["mamba"]])
    lanes.queues[0].buffer.put(prefetch(4, allocated=4, states=1))
    lanes.loop.run()
    assert lanes.acks()[0][1:] == [("pool_hits", hits), ("completed", 4)]


class OddStorage(ToldStorage):
    """A store that breaks its word: claims too much, answers too little, raises what it likes."""

    async def exists(self, hashes: Sequence[str], *, pools: Sequence[str], prefix: Sequence[str]) -> Found:
        if self.error:
            raise OSError(self.error)
        return Found(len(hashes) + 5)

    async def get(self, pool: str, hashes: Sequence[str], *, prefix: Sequence[str]) -> list[bytes | None]:
        return (await super().get(pool, hashes, prefix=prefix))[:2]


def test_a_store_that_breaks_its_word_costs_pages_and_never_a_rank() -> None:
    odd = OddStorage(9)
    lanes = Lanes(odd)
    lanes.queues[0].prefetch.put(prefetch(3))
    lanes.queues[0].buffer.put(prefetch(3, allocated=3))
    lanes.loop.run()
    odd.error = "EIO"
    lanes.queues[0].prefetch.put(prefetch(3))
    lanes.loop.run()
    assert lanes.hits() == [[3, 0]]
    assert lanes.acks() == [[("progress", 2), ("completed", 3)]]


def test_pages_that_were_read_are_in_their_slots() -> None:
    lanes = Lanes(ToldStorage(3, good_pages=2))
    lanes.queues[0].buffer.put(prefetch(3, allocated=3))
    lanes.loop.run()
    assert lanes.ledgers[0].host.read([0, 1, 2]) == [TAG, TAG, bytes(8)]


def backup(pages: int, *, has_state: bool = False) -> StorageBackup:
    lock = HostLock(Bench().tree.root, 0)
    names = ["00" * 32] * pages
    return StorageBackup(1, 7, lock, bytes(8 * pages), names, list(range(pages)), has_state, ())


def test_a_backup_writes_side_pools_first_and_the_state_of_the_last_page() -> None:
    storage = ToldStorage()
    lanes = Lanes(storage, pools=[SIDE_POOLS["draft"], SIDE_POOLS["mamba"]])
    lanes.queues[0].backup.put(backup(130, has_state=True))
    lanes.loop.run()
    assert storage.calls == [("draft", 130), ("mamba", 1), ("kv", 128), ("kv", 2)]
    (acked,) = taken(lanes.queues[0].backup_acks)
    assert acked.written_pages == 130


@pytest.mark.parametrize("error", ["", "unreachable"])
def test_a_backup_is_acknowledged_whatever_came_of_it(error: str) -> None:
    storage = ToldStorage()
    storage.error, storage.refused = error, 3
    lanes = Lanes(storage)
    lanes.queues[0].backup.put(backup(200))
    lanes.loop.run()
    (acked,) = taken(lanes.queues[0].backup_acks)
    assert acked.written_pages == (0 if error else 125), "the batch that failed ends it"


def test_lanes_end_when_their_queues_are_closed() -> None:
    lanes = Lanes(ToldStorage(), ToldStorage())
    for queues in lanes.queues:
        queues.close()
    lanes.loop.run()
    assert all(task.is_finished for task in lanes.loop.tasks)
