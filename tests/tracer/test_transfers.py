"""Transfer queues rebuilt from logs, of this runtime and of SGLang's plugin; and other agreements on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cli.app import main
from tests.support.logs import write_lane, write_run
from tracer.log import find_logs
from tracer.record import Kind
from tracer.transfers import QUEUES, Replay, replay
from tracer.what_if import what_if

NAMES = (
    "transfer_enqueue transfer_done transfer_ack event_round prefetch_submit query prefetch_hit progress "
    "prefetch_ack storage_backup storage_write storage_ack prefetch_insert prefetch_outcome"
)
KINDS = tuple(Kind(name, "note") for name in NAMES.split())
# SGLang tells how many acks were applied, oldest first, and gives a copy no number.
COUNTED = (*KINDS, Kind("acks", "note"))
ROUND = {"kind": "event_round"}


def enqueue(step: int, op: int | None, *nodes: int, queue: str = "write") -> dict[str, Any]:
    return {
        "kind": "transfer_enqueue",
        "step": step,
        "op": op,
        "queue": queue,
        "nodes": [*nodes],
        "pages": len(nodes),
    }


def done(step: int, op: int, queue: str = "write") -> dict[str, Any]:
    return {"kind": "transfer_done", "step": step, "op": op, "queue": queue}


def ack(step: int, op: int, queue: str = "write") -> dict[str, Any]:
    return {"kind": "transfer_ack", "step": step, "op": op, "queue": queue, "nodes": [op], "pages": 1}


def counted(step: int, saw: int | None, applied: int | None, queue: str = "write") -> list[dict[str, Any]]:
    call = {**ROUND, "phase": "call", "step": step, "round": step, f"{queue}s_done": saw}
    back = {**ROUND, "phase": "return", "step": step, "round": step, f"{queue}s_agreed": applied}
    return [call, back]


def of(
    folder: Path, ranks: Mapping[int, Sequence[Mapping[str, Any]]], queue: str = "write", **more: Any
) -> Replay:
    more.setdefault("kinds", KINDS)
    return replay(find_logs(write_run(folder, ranks, **more)), queue)


def states(found: Replay, step: int, rank: int = 0) -> dict[int | None, str]:
    return {each.op: each.state(step) for each in found.ranks[rank].at(step)}


def test_a_copy_is_in_flight_then_done_then_gone(tmp_path: Path) -> None:
    found = of(tmp_path, {0: [enqueue(1, 1, 7), enqueue(2, 2, 8, 9), done(4, 1), ack(5, 1), done(6, 2)]})
    assert states(found, 0) == {}
    assert states(found, 1) == {1: "in flight"}
    assert states(found, 3) == {1: "in flight", 2: "in flight"}
    assert states(found, 4) == {1: "done", 2: "in flight"}
    assert states(found, 5) == {2: "in flight"}
    assert states(found, 6) == {2: "done"}
    assert found.steps == (1, 2, 4, 5, 6)
    assert [(word, each.op) for word, each in found.ranks[0].moves_in(4)] == [("done", 1)]
    assert [(word, each.op) for word, each in found.ranks[0].moves_in(5)] == [("acked", 1)]


def test_loads_do_not_stand_in_the_write_queue(tmp_path: Path) -> None:
    records = [enqueue(1, 1, 7), enqueue(1, 2, 8, queue="load"), ack(2, 2, "load")]
    found = of(tmp_path, {0: records})
    assert states(found, 2) == {1: "in flight"}
    assert states(replay(find_logs(tmp_path), "load"), 2) == {}


def test_sglang_counts_acks_oldest_first_and_says_what_is_left(tmp_path: Path) -> None:
    records = [
        enqueue(1, None, 7),
        enqueue(2, None, 8),
        enqueue(3, None, 9),
        {**ROUND, "phase": "return", "step": 4, "round": 4, "writes_done": 2, "writes_agreed": 1},
        {"kind": "acks", "step": 4, "queue": "write", "count": 1, "left": 2},
    ]
    found = of(tmp_path, {0: records}, kinds=COUNTED)
    assert [(each.nodes, each.state(4)) for each in found.ranks[0].at(4)] == [
        ((8,), "done"),
        ((9,), "in flight"),
    ]
    assert found.ranks[0].rounds[0].saw == (2,)
    assert found.ranks[0].rounds[0].applied == (1,)


def test_what_is_left_puts_a_queue_right_whose_beginning_a_ring_has_dropped(tmp_path: Path) -> None:
    records = [
        enqueue(3, None, 9),
        # Three were there before the first record; the oldest two go, then one more.
        {"kind": "acks", "step": 4, "queue": "write", "count": 2, "left": 2},
        {"kind": "acks", "step": 5, "queue": "write", "count": 1, "left": 1},
        enqueue(6, None, 10),
    ]
    found = of(tmp_path, {0: records}, kinds=COUNTED)
    own = found.ranks[0]
    # Whose acks those were can't be told, so the first one is believed to be the oldest that is known.
    assert [each.nodes for each in own.at(6)] == [(10,)]
    assert own.unknown == 2
    assert "rank 0: 2 transfers ended whose beginning is not in the log" in own.limits


def test_a_prefetch_is_asked_answered_read_and_applied(tmp_path: Path) -> None:
    submit = {"kind": "prefetch_submit", "step": 1, "op": 3, "rid": "r7", "attempt": 0, "node": 5}
    scheduler = [
        {**submit, "outcome": "issued"},
        {**submit, "op": 4, "outcome": "declined_too_short"},
        {"kind": "prefetch_hit", "step": 3, "op": 3, "rid": "r7", "outcome": "allocated", "tokens": 640},
        {"kind": "prefetch_ack", "step": 6, "op": 3, "ack": "progress"},
        {"kind": "prefetch_ack", "step": 7, "op": 3, "ack": "completed"},
    ]
    query = {"kind": "query", "step": 2, "op": 3, "local_pages": 12, "agreed_pages": 10}
    completed = {"kind": "progress", "step": 5, "op": 3, "ack": "completed"}
    one = {"kinds": KINDS, "sizes": {"tp": 1}}
    write_lane(tmp_path, scheduler, **one)
    write_lane(tmp_path, [query], lane="prefetch", **one)
    write_lane(tmp_path, [completed], lane="sync", **one)
    found = replay(find_logs(tmp_path), "prefetch")
    told = [states(found, step).get(3) for step in range(8)]
    assert told == [None, "asking", "answered", "reading", "reading", "done", "done", None]
    assert found.ranks[0].transfers[0].to_json(7)["local_pages"] == 12
    assert [each.op for each in found.ranks[0].transfers] == [3]


@pytest.mark.parametrize(
    ("outcome", "tokens", "state"),
    [("partial", 64, "reading"), ("host_capacity", 0, None), ("miss", 0, None)],
)
def test_an_answer_is_read_where_it_was_given_room_for_some_of_it(
    tmp_path: Path, outcome: str, tokens: int, state: str | None
) -> None:
    records = [
        {"kind": "prefetch_submit", "step": 1, "op": 3, "rid": "r7", "attempt": 0, "outcome": "issued"},
        {"kind": "prefetch_hit", "step": 2, "op": 3, "rid": "r7", "outcome": outcome, "tokens": tokens},
    ]
    assert states(of(tmp_path, {0: records}, "prefetch"), 2).get(3) == state


def test_sglangs_progress_is_joined_by_request(tmp_path: Path) -> None:
    scheduler = [
        {"kind": "prefetch_submit", "step": 1, "op": 3, "rid": "r7", "attempt": 0, "outcome": "issued"},
        {"kind": "prefetch_hit", "step": 2, "op": 3, "rid": "r7", "outcome": "allocated", "tokens": 64},
        {"kind": "prefetch_insert", "step": 5, "op": 3, "rid": "r7", "outcome": "loaded"},
        {"kind": "prefetch_submit", "step": 5, "op": 4, "rid": "r8", "attempt": 0, "outcome": "issued"},
        {"kind": "prefetch_outcome", "step": 6, "rid": "r8", "attempt": 0, "outcome": "revoked"},
    ]
    progress = {"kind": "progress", "step": 4, "rid": "r7", "attempt": 0, "ack": "completed"}
    write_lane(tmp_path, scheduler, kinds=COUNTED)
    write_lane(tmp_path, [progress], lane="sync", kinds=COUNTED)
    found = replay(find_logs(tmp_path), "prefetch")
    assert [states(found, step)[3] for step in (3, 4)] == ["reading", "done"]
    assert [each.end for each in found.ranks[0].transfers] == ["acked", "ended"]


def test_a_backup_is_written_in_the_order_in_which_it_was_decided(tmp_path: Path) -> None:
    scheduler = [
        {"kind": "storage_backup", "step": 1, "node": 5, "storage_backups_in_flight": 1},
        {"kind": "storage_backup", "step": 2, "node": 6, "storage_backups_in_flight": 2},
        {**ROUND, "phase": "return", "step": 4, "storage_acks_ready": 1, "storage_acks_agreed": 1},
    ]
    written = [{"kind": "storage_write", "step": 3, "op": 900, "pages": 8, "written_pages": 7}]
    write_lane(tmp_path, scheduler, kinds=COUNTED)
    write_lane(tmp_path, written, lane="backup", kinds=COUNTED)
    first, second = replay(find_logs(tmp_path), "backup").ranks[0].transfers
    assert (first.pages, first.done_step, first.end_step, first.told) == (8, 3, 4, {"written_pages": 7})
    assert second.state(9) == "in flight"


def test_a_round_that_was_never_left_says_what_the_rank_had_counted(tmp_path: Path) -> None:
    found = of(tmp_path, {0: counted(3, 1, 1)[:1], 1: counted(3, 0, 0)})
    assert [own.rounds[0].saw for own in found.ranks] == [(1,), (0,)]
    assert [own.rounds[0].applied for own in found.ranks] == [(None,), (0,)]
    # Who has not left it has applied nothing that could differ.
    assert found.parts_at() is None


def test_the_first_step_at_which_ranks_applied_different_counts_is_found(tmp_path: Path) -> None:
    found = of(
        tmp_path, {0: [*counted(1, 1, 1), *counted(2, 1, 1)], 1: [*counted(1, 1, 1), *counted(2, 0, 0)]}
    )
    assert found.parts_at() == 2


@pytest.mark.parametrize(("policy", "step"), [("local", 2), ("min", None), ("pp-sync", None)])
def test_ranks_that_count_for_themselves_part_where_they_first_saw_different_things(
    tmp_path: Path, policy: str, step: int | None
) -> None:
    # Rank 1 sees the second copy a round later; the least was applied on both.
    ranks = {
        0: [*counted(1, 1, 1), *counted(2, 1, 0), *counted(3, 1, 1)],
        1: [*counted(1, 1, 1), *counted(2, 0, 0), *counted(3, 1, 1)],
    }
    found = what_if(of(tmp_path, ranks), policy)
    assert step == (found.parting.step if found.parting else None)
    if found.parting is not None:
        assert found.parting.counts == {0: 2, 1: 1}
    assert (policy != "local") == found.is_own


def test_local_polling_by_stages_parts_and_pp_sync_does_not(tmp_path: Path) -> None:
    # Each stage has drained what it saw itself: rank 1 is stage 1.
    ranks = {
        0: [*counted(1, 1, 1), *counted(2, 1, 1), *counted(3, 0, 0)],
        1: [*counted(1, 1, 1), *counted(2, 0, 0), *counted(3, 1, 1)],
    }
    found = of(tmp_path, ranks, sizes={"pp": 2})
    assert found.parts_at() == 2
    local, by_stage, synced = (what_if(found, policy) for policy in ("local", "min", "pp-sync"))
    assert local.parting is not None and by_stage.parting is not None
    assert [local.parting.step, by_stage.parting.step] == [2, 2]
    assert local.is_own
    assert synced.parting is None
    # Stage 1 would have waited for the copy that stage 0 had seen done.
    assert synced.waits == {1: 1}


def test_a_stage_that_never_counts_is_said_to_be_unknown(tmp_path: Path) -> None:
    ranks = {0: counted(1, 1, 1), 1: counted(1, None, 1)}
    found = what_if(of(tmp_path, ranks, sizes={"pp": 2}), "local")
    assert found.blind == (1,)
    assert found.parting is None


def test_wrong_types_in_a_line_are_nothing(tmp_path: Path) -> None:
    records = [
        {"kind": "transfer_enqueue", "step": 1, "op": "x", "queue": "write", "nodes": {"a": 1}, "pages": -3},
        {"kind": "transfer_done", "step": 1, "op": [1], "queue": "write"},
        {"kind": "transfer_ack", "step": 1, "op": None, "queue": "write"},
        {"kind": "event_round", "step": 1, "round": "no", "writes_done": 1.5, "writes_agreed": [2]},
        {"kind": "acks", "step": 1, "queue": "write", "count": "many", "left": True},
    ]
    for queue in QUEUES:
        found = of(tmp_path, {0: records}, queue, kinds=KINDS)
        assert queue != "write" or len(found.ranks[0].at(1)) == 1


def test_more_acks_than_anybody_can_count_are_counted_at_once(tmp_path: Path) -> None:
    records = [enqueue(1, None, 7), {"kind": "acks", "step": 2, "queue": "write", "count": 2**61, "left": 0}]
    (own,) = of(tmp_path, {0: records}, kinds=COUNTED).ranks
    assert (own.transfers[0].end_step, own.unknown) == (2, 2**61 - 1)


def test_a_second_call_ends_a_round_that_was_never_left(tmp_path: Path) -> None:
    call, back = counted(4, 2, 1)
    rounds = of(tmp_path, {0: [*counted(3, 1, 1)[:1], call, back]}).ranks[0].rounds
    assert [(each.step, each.saw, each.applied) for each in rounds] == [(3, (1,), (None,)), (4, (2,), (1,))]


def test_a_round_told_in_one_record_counts_as_well(tmp_path: Path) -> None:
    both = {**ROUND, "step": 3, "round": 3, "hits_ready": 2, "hits_agreed": 1, "prefetch_acks_agreed": 0}
    (found,) = of(tmp_path, {0: [both]}, "prefetch").ranks[0].rounds
    assert (found.saw, found.applied) == ((2, None), (1, 0))


def test_every_transfer_of_a_healthy_run_begins_and_ends_alike_on_all_ranks(tmp_path: Path) -> None:
    words = ["--tp", 2, "--pp", 2, "--device-pages", 200, "--host-pages", 300, "--page-size", 16]
    words += ["--agentic", "conversations=4,rounds=4,max-context=2000", "--hicache-storage-backend", "memory"]
    assert main(["run", *map(str, words), "--out", str(tmp_path), "--quiet"]) == 0
    for queue in QUEUES:
        found = replay(find_logs(tmp_path), queue)
        shapes = {
            tuple((each.op, each.nodes, each.begin_step, each.end_step, each.end) for each in own.transfers)
            for own in found.ranks
        }
        assert len(shapes) == 1, queue
        assert [each for own in found.ranks for each in own.at(own.last_step)] == [], queue
        assert found.parts_at() is None
        assert found.ranks[0].transfers or queue == "load"
