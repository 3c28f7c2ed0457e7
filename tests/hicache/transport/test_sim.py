"""The simulator pairs calls as gloo does: by order, blind to purpose."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from hicache.loop import PAUSE, Loop
from hicache.probes import Probes
from hicache.schedule import Schedule
from hicache.topology import Topology
from hicache.transport.sim import SimNetwork, SimTransport, VirtualClock
from tracer.sinks import NullSink
from tracer.tracer import Tracer

Lane = Callable[[SimTransport], Awaitable[Any]]


def meet(topology: Topology, *lanes: Lane) -> tuple[list[Any], Loop]:
    """Each rank's result, None where it never came back."""
    loop = Loop(Schedule())
    network = SimNetwork(topology, loop)
    results: list[Any] = [None] * len(lanes)

    async def run(rank: int, lane: Lane) -> None:
        clock = VirtualClock()
        probes = Probes(Tracer(NullSink(), {}, clock.now_ns))
        results[rank] = await lane(SimTransport(network, rank, probes, clock))

    for rank, lane in enumerate(lanes):
        loop.spawn(str(rank), run(rank, lane))
    loop.run()
    loop.close()
    return results, loop


def reduce(values: list[int], purpose: str = "vote", channel: str = "main") -> Lane:
    return lambda transport: transport.all_reduce("tp", values, op="min", purpose=purpose, channel=channel)


def test_a_minimum_is_taken_place_by_place() -> None:
    results, _ = meet(Topology(tp=3), reduce([1, 9]), reduce([5, 2]), reduce([3, 3]))
    assert results == [[1, 2]] * 3


def test_calls_of_other_purpose_are_paired_all_the_same() -> None:
    results, _ = meet(Topology(tp=2), reduce([1], "event_round"), reduce([7], "prefetch_progress"))
    assert results == [[1], [1]]


def test_calls_of_other_length_never_complete() -> None:
    results, loop = meet(Topology(tp=2), reduce([1]), reduce([1, 2]))
    assert results == [None, None]
    assert len(loop.parked) == 2


def test_a_skipped_call_shifts_every_later_one() -> None:
    async def both(transport: SimTransport) -> list[list[int]]:
        first = await transport.all_reduce("tp", [10], op="min", purpose="a", channel="main")
        second = await transport.all_reduce("tp", [20], op="min", purpose="b", channel="main")
        return [first, second]

    async def second_only(transport: SimTransport) -> list[int]:
        return await transport.all_reduce("tp", [3], op="min", purpose="b", channel="main")

    results, loop = meet(Topology(tp=2), both, second_only)
    assert results == [None, [3]], "b of rank 1 met a of rank 0; b of rank 0 waits for ever"
    assert [task.name for task in loop.parked] == ["0"]


def test_channels_keep_their_own_order() -> None:
    async def main_first(transport: SimTransport) -> list[int]:
        await transport.all_reduce("tp", [1], op="min", purpose="x", channel="main")
        return await transport.all_reduce("tp", [2], op="min", purpose="y", channel="events")

    async def events_first(transport: SimTransport) -> list[int]:
        await transport.all_reduce("tp", [1], op="min", purpose="y", channel="events")
        return await transport.all_reduce("tp", [2], op="min", purpose="x", channel="main")

    results, loop = meet(Topology(tp=2), main_first, events_first)
    assert results == [None, None], "each waits in the collective that the other has not come to"
    assert len(loop.parked) == 2


def test_an_axis_of_one_member_returns_at_once() -> None:
    results, _ = meet(Topology(tp=1), reduce([4]))
    assert results == [[4]]


def test_a_broadcast_gives_everybody_the_first_members_message() -> None:
    def say(message: str) -> Lane:
        return lambda transport: transport.broadcast("tp", message, purpose="p", channel="main")

    results, _ = meet(Topology(tp=2), say("mine"), say("yours"))
    assert results == ["mine", "mine"]


def test_a_stage_receives_in_order_and_a_sender_can_wait_until_it_has() -> None:
    order: list[str] = []

    async def first(transport: SimTransport) -> None:
        for message in (1, 2):
            await transport.send_next(message, numel=1, purpose="p", channel="main")
        order.append("sent")
        await transport.drain_sends("main")
        order.append("drained")

    async def second(transport: SimTransport) -> list[int]:
        await PAUSE
        await PAUSE
        got = [await transport.receive_previous(numel=1, purpose="p", channel="main") for _ in range(2)]
        order.append("received")
        return got

    results, _ = meet(Topology(pp=2), first, second)
    assert results[1] == [1, 2]
    assert order == ["sent", "received", "drained"]


@pytest.mark.parametrize("pauses", [(0, 3), (3, 0)], ids=["sent first", "received first"])
def test_a_message_of_another_length_is_never_received_nor_overtaken(pauses: tuple[int, int]) -> None:
    async def first(transport: SimTransport) -> None:
        for _ in range(pauses[0]):
            await PAUSE
        await transport.send_next("three", numel=3, purpose="p", channel="main")
        await transport.send_next("five", numel=5, purpose="p", channel="main")

    async def second(transport: SimTransport) -> Any:
        for _ in range(pauses[1]):
            await PAUSE
        return await transport.receive_previous(numel=5, purpose="p", channel="main")

    results, loop = meet(Topology(pp=2), first, second)
    assert results == [None, None]
    assert [task.name for task in loop.parked] == ["1"]


def test_how_to_reduce_is_each_members_own_affair() -> None:
    def reduce_by(op: Any) -> Lane:
        return lambda transport: transport.all_reduce("tp", [3], op=op, purpose="p", channel="main")

    results, _ = meet(Topology(tp=2), reduce_by("min"), reduce_by("sum"))
    assert results == [[3], [6]]


def test_two_lanes_of_a_rank_share_the_order_of_a_group() -> None:
    """The second lane's call is the rank's second call, not its own first."""
    loop = Loop(Schedule())
    network = SimNetwork(Topology(tp=2), loop)
    got: dict[str, list[int]] = {}

    async def call(name: str, rank: int, value: int) -> None:
        clock = VirtualClock()
        transport = SimTransport(network, rank, Probes(Tracer(NullSink(), {}, clock.now_ns)), clock)
        got[name] = await transport.all_reduce("tp", [value], op="sum", purpose="p", channel="main")

    for name, rank, value in (("a", 0, 1), ("b", 0, 10), ("c", 1, 100), ("d", 1, 1000)):
        loop.spawn(name, call(name, rank, value))
    loop.run()
    assert got == {"a": [101], "b": [1010], "c": [101], "d": [1010]}


def test_nobody_leaves_a_meeting_before_the_last_has_come() -> None:
    loop = Loop(Schedule())
    network = SimNetwork(Topology(tp=2), loop)
    left: list[int] = []

    async def call(rank: int, time_ns: int) -> None:
        clock = VirtualClock()
        clock.time_ns = time_ns
        transport = SimTransport(network, rank, Probes(Tracer(NullSink(), {}, clock.now_ns)), clock)
        await transport.all_reduce("tp", [1], op="min", purpose="p", channel="main")
        left.append(clock.time_ns)

    loop.spawn("early", call(0, 1_000))
    loop.spawn("late", call(1, 9_000))
    loop.run()
    assert left == [9_000, 9_000]
