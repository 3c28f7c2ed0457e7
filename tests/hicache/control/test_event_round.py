"""Event rounds: what is counted, what is agreed, and what a later stage does with it."""

from __future__ import annotations

from typing import Any

import pytest

from hicache.config import StorageConfig
from hicache.control.agreement import MinThenChain
from hicache.control.digest import RunningDigest
from hicache.control.event_round import Counts, EventRound
from hicache.control.locks import HostLock
from hicache.control.pools import HostSlots
from hicache.control.queues import Hit, Prefetch, Progress
from hicache.errors import ForkError
from hicache.loop import Loop
from hicache.probes import Probes
from hicache.schedule import Schedule
from hicache.topology import Topology
from hicache.transport.sim import SimNetwork, SimTransport, VirtualClock
from tests.support.bench import Bench, OwnAnswer, ToldEngine, run
from tracer.sinks import MemorySink
from tracer.tracer import Tracer

STORAGE = StorageConfig("memory")


class Network:
    """A simulated job's groups, with a transport for each rank; what a stage sends is written down."""

    def __init__(self, topology: Topology) -> None:
        self.loop = Loop(Schedule(answers=[]))
        self.topology = topology
        self._network = SimNetwork(topology, self.loop)
        self.sent: list[list[int]] = []

    def transport(self, rank: int) -> SimTransport:
        probes = Probes(Tracer(MemorySink(), {}, lambda: 0))
        network = self

        class Spying(SimTransport):
            async def send_next(self, message: Any, **rest: Any) -> None:
                if network.topology.coordinates(rank).pp < network.topology.pp - 1:
                    network.sent.append(message)
                await super().send_next(message, **rest)

        return Spying(self._network, rank, probes, VirtualClock())

    def event_round(self, rank: int, bench: Bench, digest: RunningDigest | None = None) -> EventRound:
        transport = self.transport(rank)
        pp_rank = self.topology.coordinates(rank).pp
        agreement = MinThenChain(transport, pp_rank=pp_rank)
        return EventRound(
            bench.cache, transport, agreement, bench.probes, is_decider=pp_rank == 0, digest=digest
        )


class WaitingEngine(ToldEngine):
    """Copies that are waited for park their lane until `finish`."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop = loop
        self.waits: dict[int, Any] = {}

    async def wait(self, transfer: Any) -> None:
        if transfer.op not in self.done:
            self.waits[transfer.op] = self.loop.signal(f"copy {transfer.op}")
            await self.waits[transfer.op]
        transfer.is_done = True

    def finish(self, op: int) -> None:
        self.done.add(op)
        if op in self.waits:
            self.waits.pop(op).fire()


def stale_prefetch(bench: Bench, op: int) -> Prefetch:
    """A prefetch that counts for nobody any more: draining it changes nothing."""
    prefetch = Prefetch(
        op=op,
        active=bench.request(1),
        handle=(f"gone{op}", 0),
        anchor=bench.tree.root,
        lock=HostLock(bench.tree.root, 0),
        first_page=0,
        tokens=b"",
        digests=b"",
        hashes=b"",
        pages_asked=1,
        prefix=(),
    )
    bench.fetching._unfinished[op] = prefetch
    return prefetch


def test_d1_stage_1_adopts_the_counts_and_waits_for_what_it_is_behind_with() -> None:
    """Appendix D.1: the vector, and a later stage that consumes exactly that.

        stage 0   4 writes, 3 done; 1 load, not done; hits 2, prefetch acks 5, backups 0, releases 7
        stage 1   4 writes, 1 done;                   hits 1, prefetch acks 5,            releases 7

    One more number than SGLang's lies before the digests: backups reserved, see decision 0001.
    """
    network = Network(Topology(pp=2))
    engines = [WaitingEngine(network.loop) for _ in range(2)]
    benches = [Bench(storage=STORAGE, engine=engine, host_pages=40) for engine in engines]
    for bench in benches:
        bench.queues = bench.fetching.queues
        for page in (1, 2, 3, 4):
            bench.add(page)
            bench.write_all()
        host = bench.cache.host
        assert host is not None
        bench.queues.hits._signal = network.loop.signal
        for _ in range(5):
            bench.queues.acks.put(Progress(stale_prefetch(bench, 50), "progress", 1))
        host.take(7)
        slots = host.reserve(7)
        assert isinstance(slots, HostSlots)
        for slot in slots.pages:
            bench.queues.releases.put(slot)
    first, second = benches
    for op in (100, 101):
        first.queues.hits.put(Hit(stale_prefetch(first, op), 0, op))
    second.queues.hits.put(Hit(stale_prefetch(second, 100), 0, 100))
    late = stale_prefetch(second, 101)
    engines[0].done = {1, 2, 3}
    engines[1].done = {1}
    for rank, bench in enumerate(benches):
        network.loop.spawn(f"rank {rank}", network.event_round(rank, bench).run())  # type: ignore[arg-type]

    network.loop.run()
    assert network.sent == [[3, 0, 2, 5, 0, 7, 0, 0, 0]]
    tasks = network.loop.tasks
    assert (tasks[0].is_finished, tasks[1].is_finished) == (True, False)
    assert engines[1].polled == [], "a later stage does not look at its own copies"
    assert tasks[1].waits_for is not None and tasks[1].waits_for.reason == "copy 2"
    engines[1].finish(2)
    network.loop.run()
    engines[1].finish(3)
    network.loop.run()
    assert tasks[1].waits_for is not None and tasks[1].waits_for.reason.startswith("prefetch_hit_queue")
    second.queues.hits.put(Hit(late, 0, 101))
    network.loop.run()
    assert tasks[1].is_finished
    for bench in benches:
        assert len(bench.cache.writes) == 1
        assert (bench.queues.hits.taken_count, bench.queues.acks.taken_count) == (2, 5)
        assert bench.written("release") == [{**bench.written("release")[0], "pool": "kv", "slots": 7}]


def test_backup_a_is_complete_and_b_in_flight_on_stage_0_while_stage_1_has_finished_both() -> None:
    """The figure of docs/lockstep.md: stage 1 keeps B, which stage 0 has not counted.

    stage 0   A done, B in flight   writes_done 1 -> agreed 1 --> A unlocked, B locked
    stage 1   A done, B done        not asked        adopts 1 --> A unlocked, B locked
    """
    network = Network(Topology(pp=2))
    engines = [WaitingEngine(network.loop) for _ in range(2)]
    benches = [Bench(engine=engine) for engine in engines]
    nodes = []
    for bench in benches:
        a = bench.add(1)
        bench.write_all()
        b = bench.add(2)
        bench.write_all()
        nodes.append((a, b))
    engines[0].done = {1}
    engines[1].done = {1, 2}
    rounds = [network.event_round(rank, bench) for rank, bench in enumerate(benches)]
    for rank in (0, 1):
        network.loop.spawn(f"rank {rank}", rounds[rank].run())  # type: ignore[arg-type]
    network.loop.run()
    assert [(a.lock_count, b.lock_count) for a, b in nodes] == [(0, 1), (0, 1)]
    facts = [(row["writes_done"], row["writes_in_flight"]) for row in calls(benches)]
    assert facts == [(1, 2), (None, 2)]
    engines[0].done = {1, 2}
    for rank in (0, 1):
        network.loop.spawn(f"rank {rank}", rounds[rank].run())  # type: ignore[arg-type]
    network.loop.run()
    assert [(a.lock_count, b.lock_count) for a, b in nodes] == [(0, 0), (0, 0)]


def calls(benches: list[Bench]) -> list[dict[str, Any]]:
    return [next(row for row in bench.written("event_round") if row["phase"] == "call") for bench in benches]


def test_tensor_ranks_apply_what_the_slowest_has_finished() -> None:
    network = Network(Topology(tp=2))
    benches = [Bench(engine=WaitingEngine(network.loop)) for _ in range(2)]
    for bench in benches:
        for page in (1, 2):
            bench.add(page)
            bench.write_all()
    benches[0].engine.done, benches[1].engine.done = {1, 2}, {1}
    for rank, bench in enumerate(benches):
        network.loop.spawn(f"rank {rank}", network.event_round(rank, bench).run())  # type: ignore[arg-type]
    network.loop.run()
    assert [len(bench.cache.writes) for bench in benches] == [1, 1]


def test_a_round_counts_then_agrees_copies_and_applies() -> None:
    bench = Bench()
    bench.add(1)
    bench.write_all()
    bench.engine.done = {1}
    bench.add(2)
    agreement = OwnAnswer([[1, 0, 1, 0, 0]])
    transport = Network(Topology()).transport(0)
    event_round = EventRound(bench.cache, transport, agreement, bench.probes, is_decider=True)
    assert run(event_round.run()) is True
    assert agreement.asked == [("event_round", [1, 0, 1, 0, 0])]
    kinds = [row["kind"] for row in bench.rows]
    at_call = kinds.index("event_round")
    assert kinds[at_call:] == ["event_round", "event_round", "transfer_enqueue", "transfer_ack"]


def test_a_later_stage_puts_zeros_into_a_vector_of_the_same_length() -> None:
    bench = Bench(storage=STORAGE)
    bench.add(1)
    agreement = OwnAnswer([[0] * 9])
    transport = Network(Topology()).transport(0)
    event_round = EventRound(bench.cache, transport, agreement, bench.probes, is_decider=False)
    run(event_round.run())
    assert agreement.asked == [("event_round", [0] * 9)]


def test_d4_two_orders_of_reclaims_are_a_fork_for_both() -> None:
    """Appendix D.4: 17 then 9 gives 18000064, 9 then 17 gives 10000048; MIN over [d, -d] shows both ends."""
    mine, others = 18_000_064, 10_000_048
    agreed = [min(mine, others), min(-mine, -others)]
    assert agreed == [10_000_048, -18_000_064]
    for own in (mine, others):
        with pytest.raises(ForkError, match="have come apart"):
            Counts.of([0, 0, 0, *agreed], own)
    assert Counts.of([0, 0, 0, mine, -mine], mine).digest == mine


def test_in_band_a_decision_that_differs_shows_in_the_next_round_on_every_rank() -> None:
    network = Network(Topology(tp=2))
    benches = [Bench() for _ in range(2)]
    digests = [RunningDigest() for _ in range(2)]
    for bench, digest in zip(benches, digests, strict=True):
        digest.watch(bench.probes)
        bench.probes.finish("r1", "stop", 5)
    benches[1].probes.finish("r2", "stop", 5)
    for rank, bench in enumerate(benches):
        network.loop.spawn(f"rank {rank}", network.event_round(rank, bench, digests[rank]).run())  # type: ignore[arg-type]
    network.loop.run()
    assert sum(isinstance(task.error, ForkError) for task in network.loop.tasks) >= 1


def test_in_band_what_only_this_rank_sees_does_not_count() -> None:
    digests = []
    for host_pages_free in (3, 0):
        bench, digest = Bench(), RunningDigest()
        digest.watch(bench.probes)
        bench.probes.write_backup(1, "threshold", 2, 8, host_pages_free, None, 0)
        digests.append(digest.value)
    assert digests[0] == digests[1] != RunningDigest().value
