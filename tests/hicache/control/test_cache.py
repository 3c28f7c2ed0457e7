"""The cache piece by piece: a literal tree, memories of known size, copies that finish when told to."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest

from hicache.control import locks
from hicache.control.agreement import Counts, ReserveThenVote
from hicache.control.cache import Cache, Tiers
from hicache.control.event_round import EventRound
from hicache.control.keys import chain_digests, pack
from hicache.control.node import Node
from hicache.control.pools import Room, SlotMemory
from hicache.control.tree import Tree
from hicache.core import Slot, Transfer
from hicache.errors import AckError, PoolError
from hicache.probes import Probes
from tests.support.runs import of_kind, records
from tracer.sinks import MemorySink
from tracer.tracer import Tracer

PAGE_BYTES = 16


class ToldEngine:
    """Copies are done when their op is in `done`."""

    def __init__(self) -> None:
        self.done: set[int] = set()
        self.polled: list[int] = []

    def submit(self, transfer: Transfer) -> None:
        pass

    def ready(self, transfer: Transfer) -> bool:
        self.polled.append(transfer.op)
        transfer.is_done = transfer.op in self.done
        return transfer.is_done

    async def wait(self, transfer: Transfer) -> None:
        assert self.ready(transfer), f"op {transfer.op} is waited for and never done"


class Moody(SlotMemory):
    """Memory that fails as often as told, then works."""

    failures = 0

    def alloc(self, page_count: int) -> list[Slot] | None:
        if self.failures:
            self.failures -= 1
            return None
        return super().alloc(page_count)


class Bench:
    """A cache on a bench, with everything it has written."""

    def __init__(self, *, device_pages: int = 20, host_pages: int = 20) -> None:
        self.sink = MemorySink()
        self.tracer = Tracer(self.sink, {}, lambda: 0)
        self.engine = ToldEngine()
        self.device, self.host = Moody(device_pages), Moody(host_pages)
        tiers = Tiers(self.device, Room(device_pages), self.host, Room(host_pages))
        self.cache = Cache(Tree(PAGE_BYTES), tiers, self.engine, Probes(self.tracer), ReserveThenVote())

    def add(self, *pages: int) -> Node:
        """Insert a prompt of these pages; backups are queued as the tree asks for them."""
        tokens = b"".join(pack([page] * 4) for page in pages)
        digests = chain_digests(tokens, first_page=0, page_size_bytes=PAGE_BYTES, previous=b"", key=b"k")
        slots = self.cache.alloc_device(len(pages))
        done = self.cache.insert(tokens, slots, digests, owned_pages=0, counted_pages=0)
        self.cache.apply(done.actions)
        return done.node

    def write_all(self) -> None:
        run(self.cache.start_writing(len(self.cache.write_queue)))

    def acknowledge_all(self) -> None:
        self.engine.done.update(moving.transfer.op for moving in self.cache.writes)
        run(self.cache.apply_writes(len(self.cache.writes)))

    def written(self, kind: str) -> list[dict[str, Any]]:
        return of_kind(records([*self.sink.lines, b'{"kind":"trailer"}']), kind)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never really waits."""
    with pytest.raises(StopIteration) as stop:
        coroutine.send(None)
    return stop.value.value


def finish(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Resume a coroutine until it ends, whatever it waits for."""
    while True:
        coroutine.send(None)


def on_host(bench: Bench, *pages: int) -> Node:
    """A node that only the host holds."""
    node = bench.add(*pages)
    bench.write_all()
    bench.acknowledge_all()
    bench.cache.free_device(bench.cache.tree.clear_device(node))
    return node


def test_an_insert_queues_a_backup_and_locks_its_node_until_the_ack() -> None:
    bench = Bench()
    node = bench.add(1, 2)
    assert (node.lock_count, node.write_pending, len(node.host or [])) == (1, True, 2)
    bench.write_all()
    assert node.lock_count == 1, "the copy still reads it"
    bench.acknowledge_all()
    assert (node.lock_count, node.write_pending, len(node.host or [])) == (0, False, 2)


def test_a_merged_copy_has_one_ack_for_all_its_nodes() -> None:
    bench = Bench()
    first, second = bench.add(1), bench.add(2)
    bench.write_all()
    (moving,) = bench.cache.writes
    assert moving.nodes == [first, second]
    assert bench.written("transfer_enqueue")[0]["nodes"] == [first.id, second.id]


def test_only_leading_finished_copies_count() -> None:
    bench = Bench()
    for page in (1, 2, 3):
        bench.add(page)
        bench.write_all()
    bench.engine.done = {2, 3}
    assert bench.cache.count_done(bench.cache.writes) == 0
    assert bench.engine.polled == [1], "what stands behind an unfinished one is not even asked"
    bench.engine.done = {1, 2}
    assert bench.cache.count_done(bench.cache.writes) == 2


def test_more_acks_than_transfers_is_an_error_with_both_numbers() -> None:
    bench = Bench()
    bench.add(1)
    bench.write_all()
    with pytest.raises(AckError, match=r"2 acks agreed on, 1 transfers in flight"):
        run(bench.cache.apply_writes(2))


def test_a_chain_stops_at_the_first_node_without_room_and_goes_on_next_time() -> None:
    """Host room for two of three: the third is refused, and asked for again when it is next hit."""
    bench = Bench(host_pages=2)
    a = bench.add(1)
    b = bench.add(1, 2)
    c = bench.add(1, 2, 3)
    assert [node.host is not None for node in (a, b, c)] == [True, True, False]
    assert [row["tokens"] for row in bench.written("write_backup")] == [4, 4, 0]
    bench.write_all()
    bench.acknowledge_all()
    bench.add(1, 2, 3)
    assert [row["node"] for row in bench.written("write_backup")][-1] == c.id


def test_what_does_not_stand_everywhere_is_cancelled_children_first() -> None:
    bench = Bench()
    parent = bench.add(1)
    child = bench.add(1, 2)
    run(bench.cache.start_writing(0))
    assert [row["node"] for row in bench.written("backup_cancel")] == [child.id, parent.id]
    for node in (parent, child):
        assert (node.host, node.write_pending, node.lock_count) == (None, False, 0)
    assert bench.host.pages_used == 0
    assert bench.cache.tiers.host_room.pages_free == 20


def test_a_split_of_a_queued_backup_copies_both_halves_under_one_lock() -> None:
    bench = Bench()
    node = bench.add(1, 2, 3)
    match = bench.cache.match(pack([1] * 4), 1)
    front = match.node
    bench.write_all()
    (moving,) = bench.cache.writes
    assert moving.nodes == [front, node]
    assert moving.transfer.source == [*(front.device or []), *(node.device or [])]
    assert moving.transfer.target == [*(front.host or []), *(node.host or [])]
    bench.acknowledge_all()
    assert (front.lock_count, node.lock_count, front.write_pending) == (0, 0, False)


def test_a_later_stage_gives_each_half_its_own_late_slots() -> None:
    """Stage 0 has agreed; here the reservation had failed, and the node was split since."""
    bench = Bench()
    bench.host.failures = 1
    node = bench.add(1, 2, 3)
    assert node.host == []
    front = bench.cache.match(pack([1] * 4), 1).node
    bench.write_all()
    assert (len(front.host or []), len(node.host or [])) == (1, 2)
    assert set(front.host or []).isdisjoint(node.host or [])


def test_memory_that_never_comes_back_on_a_later_stage_is_an_error() -> None:
    bench = Bench()
    bench.host.failures = 2000
    bench.add(1)
    with pytest.raises(PoolError, match="after 1000 tries"):
        finish(bench.cache.start_writing(1))


def test_device_memory_smaller_than_agreed_is_an_error() -> None:
    bench = Bench()
    bench.device.failures = 1
    with pytest.raises(PoolError, match="3 pages were agreed on"):
        bench.cache.alloc_device(3)


def test_an_eviction_stops_when_exactly_enough_is_free() -> None:
    bench = Bench(device_pages=4)
    old, new = bench.add(1, 2), bench.add(3, 4)
    bench.write_all()
    bench.acknowledge_all()
    bench.cache.evict(2)
    assert (old.device, len(new.device or [])) == (None, 2)
    (row,) = bench.written("evict")
    assert (row["pages_freed"], row["nodes"]) == (2, [old.id])


def test_a_host_eviction_stops_when_exactly_enough_is_free() -> None:
    bench = Bench()
    old, new = on_host(bench, 1, 2), on_host(bench, 3, 4)
    bench.cache.evict_host(2)
    assert (old.is_alive, new.is_alive) == (False, True)
    (row,) = bench.written("evict_host")
    assert (row["pages_freed"], row["nodes"]) == (2, [old.id])


def test_a_leaf_that_the_host_holds_is_demoted_and_another_is_dropped() -> None:
    bench = Bench(host_pages=2)
    kept, lost = bench.add(1, 2), bench.add(3)
    bench.write_all()
    bench.acknowledge_all()
    bench.cache.evict(3)
    assert (kept.is_alive, lost.is_alive) == (True, False)
    (row,) = bench.written("evict")
    assert row["demoted_digests"] == kept.digests.hex()
    assert row["dropped_digests"] == lost.digests.hex()


def test_unlocking_a_node_that_only_the_host_holds_makes_it_evictable_there() -> None:
    bench = Bench()
    node = on_host(bench, 1)
    tree = bench.cache.tree
    assert tree.host_leaves.pop() is node
    locks.lock(tree, node)
    assert tree.host_leaves.pop() is None
    locks.unlock(tree, node)
    assert tree.host_leaves.pop() is node


def test_a_node_that_had_left_the_device_is_not_counted_as_hit_when_it_is_computed_again() -> None:
    bench = Bench()
    node = on_host(bench, 1)
    before = node.hit_count
    bench.add(1)
    assert (node.hit_count, node.device is not None) == (before, True)


class ToldAgreement:
    def __init__(self, agreed: Counts, calls: list[str]) -> None:
        self.agreed = agreed
        self.calls = calls

    async def agree(self, local: Counts, *, transfers_in_flight: int) -> Counts:
        self.calls.append("agree")
        return self.agreed


class CallsOnly:
    """A transport that writes down what it was asked."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    async def drain_sends(self, channel: str) -> None:
        self.calls.append(f"drain {channel}")


def test_a_round_waits_for_the_last_ones_sends_then_agrees_copies_and_applies() -> None:
    bench = Bench()
    bench.add(1)
    bench.write_all()
    bench.engine.done = {1}
    bench.add(2)
    calls: list[str] = []
    event_round = EventRound(
        bench.cache,
        CallsOnly(calls),  # type: ignore[arg-type]
        ToldAgreement(Counts(writes=1, loads=0, backups=1), calls),
        bench.cache.probes,
        is_decider=True,
    )
    assert run(event_round.run()) is True
    assert calls == ["drain events", "agree"]
    kinds = [row["kind"] for row in records([*bench.sink.lines, b'{"kind":"trailer"}'])]
    at_call = kinds.index("event_round")
    assert kinds[at_call:] == ["event_round", "event_round", "transfer_enqueue", "transfer_ack"]
