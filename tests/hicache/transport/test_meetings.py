"""Calls are paired as gloo pairs them, by order and blind to purpose, wherever the ranks live."""

from __future__ import annotations

from typing import Any

import pytest

from hicache.errors import MeetingError
from hicache.loop import PAUSE
from hicache.topology import Topology
from hicache.transport.meetings import LaneTransport
from tests.support.lanes import Lane, meet

pytestmark = pytest.mark.parametrize("mode", ["sim", "threads"])


def reduce(values: list[int], purpose: str = "vote", channel: str = "main") -> Lane:
    return lambda transport: transport.all_reduce("tp", values, op="min", purpose=purpose, channel=channel)


def test_a_minimum_is_taken_place_by_place(mode: str) -> None:
    met = meet(mode, Topology(tp=3), reduce([1, 9]), reduce([5, 2]), reduce([3, 3]))
    assert met.results == [[1, 2]] * 3


def test_a_pipeline_can_reduce_as_well(mode: str) -> None:
    def lane(value: int) -> Lane:
        return lambda transport: transport.all_reduce("pp", [value], op="max", purpose="hit", channel="hits")

    assert meet(mode, Topology(pp=3), lane(4), lane(7), lane(5)).results == [[7]] * 3


def test_calls_of_other_purpose_are_paired_all_the_same(mode: str) -> None:
    met = meet(mode, Topology(tp=2), reduce([1], "event_round"), reduce([7], "prefetch_progress"))
    assert met.results == [[1], [1]]


def test_a_vote_that_meets_a_forward_of_its_length_meets_zeros(mode: str) -> None:
    def forward(transport: LaneTransport) -> Any:
        return transport.rendezvous("tp", numel=2, purpose="forward", channel="main")

    met = meet(mode, Topology(tp=2), reduce([5, -1]), forward)
    assert met.results[0] == [0, -1]
    assert met.stuck == []


def test_calls_of_other_length_never_complete(mode: str) -> None:
    met = meet(mode, Topology(tp=2), reduce([1]), reduce([1, 2]))
    assert (met.results, met.stuck) == ([None, None], [0, 1])


def test_a_skipped_call_shifts_every_later_one(mode: str) -> None:
    async def both(transport: LaneTransport) -> list[list[int]]:
        first = await transport.all_reduce("tp", [10], op="min", purpose="a", channel="main")
        second = await transport.all_reduce("tp", [20], op="min", purpose="b", channel="main")
        return [first, second]

    async def second_only(transport: LaneTransport) -> list[int]:
        return await transport.all_reduce("tp", [3], op="min", purpose="b", channel="main")

    met = meet(mode, Topology(tp=2), both, second_only)
    assert met.results == [None, [3]], "b of rank 1 met a of rank 0; b of rank 0 waits for ever"
    assert met.stuck == [0]


def test_channels_keep_their_own_order(mode: str) -> None:
    async def main_first(transport: LaneTransport) -> list[int]:
        await transport.all_reduce("tp", [1], op="min", purpose="x", channel="main")
        return await transport.all_reduce("tp", [2], op="min", purpose="y", channel="events")

    async def events_first(transport: LaneTransport) -> list[int]:
        await transport.all_reduce("tp", [1], op="min", purpose="y", channel="events")
        return await transport.all_reduce("tp", [2], op="min", purpose="x", channel="main")

    met = meet(mode, Topology(tp=2), main_first, events_first)
    assert met.stuck == [0, 1], "each waits in the collective that the other has not come to"


def test_an_axis_of_one_member_returns_at_once_and_is_not_recorded(mode: str) -> None:
    met = meet(mode, Topology(tp=1), reduce([4]))
    assert (met.results, met.records) == ([[4]], {0: []})


def test_a_broadcast_gives_everybody_the_first_members_message(mode: str) -> None:
    def say(message: bytes | None) -> Lane:
        return lambda transport: transport.broadcast("tp", message, purpose="p", channel="main")

    assert meet(mode, Topology(tp=2), say(b"mine"), say(None)).results == [b"mine", b"mine"]


def test_how_to_reduce_is_each_members_own_affair(mode: str) -> None:
    def reduce_by(op: Any) -> Lane:
        return lambda transport: transport.all_reduce("tp", [3], op=op, purpose="p", channel="main")

    assert meet(mode, Topology(tp=2), reduce_by("min"), reduce_by("sum")).results == [[3], [6]]


def test_a_stage_receives_in_order_and_a_sender_can_wait_until_it_has(mode: str) -> None:
    taken: list[str] = []

    async def first(transport: LaneTransport) -> None:
        for message in ([1], [2]):
            await transport.send_next(message, numel=1, purpose="p", channel="main")
        taken.append("sent")
        await transport.drain_sends("main")
        taken.append("drained")

    async def second(transport: LaneTransport) -> list[list[int]]:
        await PAUSE
        while not taken:
            await PAUSE
        got = [await transport.receive_previous(numel=1, purpose="p", channel="main") for _ in range(2)]
        taken.append("received")
        return got

    met = meet(mode, Topology(pp=2), first, second)
    assert met.results[1] == [[1], [2]]
    assert taken[0] == "sent"
    assert met.stuck == []


def test_a_sender_whose_message_is_not_taken_waits_for_ever(mode: str) -> None:
    async def first(transport: LaneTransport) -> None:
        await transport.send_next([1], numel=1, purpose="p", channel="main")
        await transport.drain_sends("main")

    async def second(transport: LaneTransport) -> None:
        pass

    assert meet(mode, Topology(pp=2), first, second).stuck == [0]


@pytest.mark.parametrize("pauses", [(0, 3), (3, 0)], ids=["sent first", "received first"])
def test_a_message_of_another_length_is_never_received_nor_overtaken(
    mode: str, pauses: tuple[int, int]
) -> None:
    async def first(transport: LaneTransport) -> None:
        for _ in range(pauses[0]):
            await PAUSE
        await transport.send_next(None, numel=3, purpose="p", channel="main")
        await transport.send_next([5] * 5, numel=5, purpose="p", channel="main")

    async def second(transport: LaneTransport) -> Any:
        for _ in range(pauses[1]):
            await PAUSE
        return await transport.receive_previous(numel=5, purpose="p", channel="main")

    met = meet(mode, Topology(pp=2), first, second)
    assert (met.results, met.stuck) == ([None, None], [1])


def test_the_log_says_what_a_call_was_for_and_which_call_it_was(mode: str) -> None:
    async def twice(transport: LaneTransport) -> None:
        await transport.all_reduce("tp", [1, 2], op="min", purpose="a", channel="events")
        await transport.all_reduce("tp", [1, 2], op="max", purpose="b", channel="events")

    met = meet(mode, Topology(tp=2), twice, twice)
    names = ("phase", "purpose", "reduce", "numel", "group", "group_seq")
    assert [tuple(row[name] for name in names) for row in met.records[1]] == [
        ("enter", "a", "min", 2, "tp0/events", 0),
        ("leave", "a", "min", 2, "tp0/events", 0),
        ("enter", "b", "max", 2, "tp0/events", 1),
        ("leave", "b", "max", 2, "tp0/events", 1),
    ]


def test_the_guard_ends_the_first_call_that_is_paired_wrongly_on_every_rank(mode: str) -> None:
    met = meet(
        mode,
        Topology(tp=3),
        reduce([1], "event_round"),
        reduce([2], "timeout_verdict"),
        reduce([3], "event_round"),
        guard=True,
    )
    assert met.results == [None] * 3
    assert {type(error) for error in met.errors.values()} == {MeetingError}
    last = met.records[0][-1]
    assert (last["kind"], last["group"], last["group_seq"], last["purpose"], last["others"]) == (
        "mispaired",
        "tp0/main",
        0,
        "event_round",
        ["rank 1: timeout_verdict #0 all_reduce 1"],
    )
    assert len(met.records[1][-1]["others"]) == 2


def test_the_guard_sees_another_length_where_the_call_would_never_complete(mode: str) -> None:
    met = meet(mode, Topology(tp=2), reduce([1]), reduce([1, 2]), guard=True)
    assert (met.stuck, sorted(met.errors)) == ([], [0, 1])


def test_the_guard_sees_a_message_that_the_receiver_did_not_mean(mode: str) -> None:
    async def first(transport: LaneTransport) -> None:
        await transport.send_next([1], numel=1, purpose="event_round", channel="main")

    async def second(transport: LaneTransport) -> Any:
        return await transport.receive_previous(numel=1, purpose="timeout_verdict", channel="main")

    met = meet(mode, Topology(pp=2), first, second, guard=True)
    assert list(met.errors) == [1]
    assert met.records[1][-1]["others"] == ["rank 0: event_round #0 send 1"]


def test_the_guard_is_silent_where_all_mean_the_same(mode: str) -> None:
    met = meet(mode, Topology(tp=2), reduce([1]), reduce([2]), guard=True)
    assert met.results == [[1], [1]]
