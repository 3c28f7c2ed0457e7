"""Ranks are compared step by step, however few of their steps each of their logs holds in full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from consensus_checker.check import check
from consensus_checker.history import History, MemoryLane
from consensus_checker.steps import LATEST, WRITTEN_OUT_MAX, Gaps, Plan, in_full
from consensus_checker.verdict import Verdict
from tests.support.logs import place
from tracer import segments
from tracer.log import find_logs
from tracer.record import Kind, Outcome, header
from tracer.segments import SegmentSink
from tracer.sinks import MemorySink
from tracer.throttle import LOOK_NS, Throttle
from tracer.tracer import Tracer

AXES = ("tp", "cp", "pp")
ROUND = Kind("round", "decision", agree=AXES, compared=("agreed",), info=("number",), counters=("number",))
MATCH = Kind("match", "decision", agree=AXES, compared=("rid", "tokens"), local=("host_pages_free",))
NOTE = Kind("note", "note", info=("text",))
KINDS = (ROUND, MATCH, NOTE)

# A step: the tokens of its match, or None where nothing happened.
Steps = Sequence[int | None]


def write(tracing: Tracer, steps: Steps, *, notes: int = 0, agreed_at: dict[int, int] | None = None) -> None:
    """A scheduler's loop; `notes` make this rank's busy steps longer than the others'."""
    round_, match, note = (tracing.emitter(kind) for kind in KINDS)
    for step, tokens in enumerate(steps):
        tracing.begin_step(step)
        round_("before", 2 * step)
        if tokens is not None:
            for number in range(notes):
                note("x" * number)
            match(f"r{step}", tokens, 5)
        round_((agreed_at or {}).get(step, 0), 2 * step + 1)
        tracing.end_step(is_idle=tokens is None)


def head(rank: int, size: int) -> dict[str, Any]:
    return header(place(rank, {"tp": size}), KINDS, lane="scheduler", run_id="run-a", tool_version="test")


def on_disk(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: Sequence[Steps],
    *,
    outcomes: dict[int, Outcome | None] | None = None,
    limits: dict[int, int] | None = None,
    agreed_at: dict[int, dict[int, int]] | None = None,
) -> Verdict:
    """What a check says of ranks whose blocks end at different places."""
    for rank, steps in enumerate(ranks):
        monkeypatch.setattr(segments, "BLOCK_BYTES", 700 + 517 * rank)
        sink = SegmentSink(folder, rank, "scheduler", limit_bytes=(limits or {}).get(rank))
        tracing = Tracer(sink, head(rank, len(ranks)), lambda: 7, has_steps=True)
        write(tracing, steps, notes=rank, agreed_at=(agreed_at or {}).get(rank))
        outcome = (outcomes or {}).get(rank, "completed")
        if outcome is not None:
            tracing.close(outcome)
    return check(find_logs(folder))


MIXED = [64 if step % 50 == 7 else None for step in range(400)]


def test_ranks_that_counted_at_different_places_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = on_disk(tmp_path, monkeypatch, [MIXED] * 3)
    idle = [
        [(record["first_step"], record["count"]) for record in lane.records() if record["kind"] == "idle"]
        for lane in find_logs(tmp_path).lanes
    ]
    assert idle[0] != idle[1] != idle[2]
    assert (verdict.kind, verdict.code, verdict.finding.level) == ("consistent", 0, "high")


@pytest.mark.parametrize("step", [57, 60, 83, 106, 230, 399])
def test_a_rank_that_did_something_while_the_others_were_idle_is_named_at_its_step(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = [*MIXED]
    odd[step] = 64 if odd[step] is None else 63
    verdict = on_disk(tmp_path, monkeypatch, [MIXED, odd, MIXED])
    first = verdict.finding.first_divergence
    assert first is not None
    assert (verdict.kind, verdict.finding.culprit, first.step) == ("divergence", (1,), step)


@pytest.mark.parametrize("step", [58, 99, 250])
def test_a_rank_that_was_idle_with_another_outcome_is_named_at_its_step(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = on_disk(tmp_path, monkeypatch, [MIXED] * 3, agreed_at={2: {step: 1}})
    first = verdict.finding.first_divergence
    assert first is not None
    assert (verdict.kind, verdict.finding.culprit, first.step) == ("divergence", (2,), step)


def test_a_rank_that_was_cut_in_an_idle_period_accuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = on_disk(tmp_path, monkeypatch, [MIXED, MIXED[:130], MIXED], outcomes={1: None})
    assert (verdict.kind, verdict.finding.culprit) == ("incomplete", ())
    assert verdict.coverage.truncated == (1,)


@pytest.mark.parametrize("limits", [{1: 20_000}, {0: 20_000, 1: 33_000}, {0: 20_000, 1: 28_000, 2: 24_000}])
def test_rings_that_start_in_or_behind_idle_periods_are_aligned(
    limits: dict[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [64 if step % 9 == 7 else None for step in range(3000)]
    verdict = on_disk(tmp_path, monkeypatch, [steps] * 3, limits=limits)
    assert set(verdict.coverage.dropped_up_to) == set(limits)
    assert (verdict.kind in ("consistent", "incomplete"), verdict.finding.culprit) == (True, ())
    odd = [*steps]
    odd[2998] = 1
    (tmp_path / "odd").mkdir()
    verdict = on_disk(tmp_path / "odd", monkeypatch, [steps, odd, steps], limits=limits)
    first = verdict.finding.first_divergence
    assert first is not None
    assert (verdict.finding.culprit, first.step) == ((1,), 2998)


# By hand: what a log says that no tracer has written.


def lane(
    rank: int, entries: Sequence[dict[str, Any]], *, size: int = 3, outcome: str | None = "completed"
) -> MemoryLane:
    numbered = [{"seq": seq, "time_ns": 0, **entry} for seq, entry in enumerate(entries, 1)]
    kinds = {kind.name: kind for kind in KINDS}
    trailer = {"kind": "trailer", "outcome": outcome} if outcome else None
    return MemoryLane(rank, "scheduler", head(rank, size), kinds, numbered, trailer)


def step(number: int, *, agreed: int = 0, tokens: int | None = None) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = [
        {"step": number, "kind": "round", "agreed": agreed, "number": 10 * number}
    ]
    if tokens is not None:
        entries.append({"step": number, "kind": "match", "rid": f"r{number}", "tokens": tokens})
    return entries


def idle(first: Any, last: int, **changes: Any) -> dict[str, Any]:
    count = last - first + 1 if type(first) is int else 1
    said = {"step": last, "kind": "idle", "first_step": first, "count": count, "records": 1, "advance": [10]}
    return said | changes


FULL = [entry for number in range(21) for entry in step(number, tokens=64 if number == 20 else None)]
COUNTED = [*step(0), idle(1, 19), *step(20, tokens=64)]


@pytest.mark.parametrize(
    "ranks",
    [
        [COUNTED, COUNTED, COUNTED],
        [FULL, COUNTED, FULL],
        [COUNTED, FULL, FULL],
        [[*step(0), idle(1, 9), *step(10), idle(11, 19), *step(20, tokens=64)], COUNTED, FULL],
        [[*step(0), idle(1, 9), idle(10, 19), *step(20, tokens=64)], COUNTED, FULL],
        [[*step(0), idle(1, 1), *step(2), idle(3, 19), *step(20, tokens=64)], COUNTED, COUNTED],
    ],
)
def test_the_same_steps_are_equal_however_they_are_told(ranks: list[list[dict[str, Any]]]) -> None:
    verdict = check([lane(rank, entries) for rank, entries in enumerate(ranks)])
    assert (verdict.kind, verdict.code) == ("consistent", 0)


@pytest.mark.parametrize("number", [1, 7, 19])
@pytest.mark.parametrize("is_counted", [False, True])
def test_a_difference_in_a_step_that_others_counted_is_found_there(number: int, is_counted: bool) -> None:
    odd = [*FULL]
    odd[number] = {**odd[number], "agreed": 1}
    others = COUNTED if is_counted else FULL
    verdict = check([lane(0, others), lane(1, odd), lane(2, COUNTED)])
    first = verdict.finding.first_divergence
    assert first is not None
    assert (verdict.finding.culprit, first.step) == ((1,), number)


def test_steps_that_are_written_out_have_their_counters_and_the_number_of_what_counted_them() -> None:
    kinds = {kind.name: kind for kind in KINDS}
    gaps = Gaps([(1, 3)])
    plan = Plan.of([(gaps, None), (Gaps(), None)])
    entries = lane(0, [*step(0), idle(1, 3), *step(4)]).entries
    found = [(one["seq"], one["step"], one.get("number")) for one in in_full(entries, plan, kinds)]
    assert found == [(1, 0, 0), (2, 1, 10), (2, 2, 20), (2, 3, 30), (2, 3, None), (3, 4, 40)]


HOSTILE = [
    {"count": 10**18},
    {"count": 0},
    {"count": -1},
    {"count": "19"},
    {"count": None},
    {"count": True},
    {"count": 19.0},
    {"count": 18},
    {"first_step": -(10**18), "count": 10**18 + 20},
    {"first_step": "1"},
    {"first_step": None},
    {"first_step": 0, "count": 20},
    {"records": 0},
    {"records": 2},
    {"records": "1"},
    {"records": 10**30},
    {"advance": []},
    {"advance": [10, 10]},
    {"advance": ["10"]},
    {"advance": [None]},
    {"advance": [1.5]},
    {"advance": {}},
    {"advance": 10},
    {"advance": None},
    {"step": 10**18, "count": 10**18},
    {"step": -5, "first_step": -10, "count": 6},
]


@pytest.mark.parametrize("changes", HOSTILE)
@pytest.mark.parametrize("others", [FULL, COUNTED])
def test_an_idle_record_that_cannot_be_believed_makes_no_rank_consistent_and_accuses_no_other(
    changes: dict[str, Any], others: list[dict[str, Any]]
) -> None:
    hostile = [*step(0), idle(1, 19, **changes), *step(20, tokens=64)]
    verdict = check([lane(0, others), lane(1, hostile), lane(2, others)])
    assert verdict.kind != "consistent"
    assert set(verdict.finding.culprit) <= {1}


@pytest.mark.parametrize("advance", [[0], [-7], [10**30], [11]])
def test_counters_that_went_on_otherwise_are_not_compared(advance: list[int]) -> None:
    odd = [*step(0), idle(1, 19, advance=advance), *step(20, tokens=64)]
    verdict = check([lane(0, FULL), lane(1, odd), lane(2, FULL)])
    assert (verdict.kind, verdict.code) == ("consistent", 0)


def test_an_idle_record_in_front_of_everything_stands_for_nothing_that_is_known() -> None:
    verdict = check([lane(0, FULL), lane(1, [idle(1, 19), *step(20, tokens=64)]), lane(2, FULL)])
    assert verdict.kind != "consistent"
    assert set(verdict.finding.culprit) <= {1}


def test_more_steps_than_anybody_waits_for_are_not_written_out() -> None:
    kinds = {kind.name: kind for kind in KINDS}
    plan = Plan.of([(Gaps(), None)])
    entries = lane(0, [*step(0), idle(1, WRITTEN_OUT_MAX + 1), *step(WRITTEN_OUT_MAX + 2)]).entries
    assert list(in_full(entries, replace(plan, idle=()), kinds)) == [entries[0], {}]


def test_many_idle_records_together_do_not_stand_for_more_than_one_may() -> None:
    kinds = {kind.name: kind for kind in KINDS}
    length = WRITTEN_OUT_MAX // 2
    counted = [idle(1 + number * length, (number + 1) * length) for number in range(3)]
    entries = lane(0, [*step(0), *counted]).entries
    found = 0
    for record in in_full(entries, Plan((), (((-1, 64),),)), kinds):
        found += 1
        last = record
    assert last == {}
    assert found < WRITTEN_OUT_MAX


def test_runs_of_idle_steps_are_intersected_whatever_order_and_overlap_they_come_in() -> None:
    one = Gaps([(5, 9), (1, 3), (20, 40), (25, 30), (9, 12)])
    two = Gaps([(2, 6), (8, 8), (29, 100)])
    plan = Plan.of([(one, None), (two, None)])
    both = {
        number
        for number in range(200)
        if all(any(first <= number <= last for first, last in gaps.idle) for gaps in (one, two))
    }
    assert {number for first, last in plan.idle for number in range(first, last + 1)} == both
    for first, last in product(range(0, 45, 4), range(0, 120, 7)):
        found = [number for run in plan.written_out(first, last) for number in range(run[0], run[1] + 1)]
        assert found == [number for number in range(first, last + 1) if number not in both]


def test_as_many_runs_as_a_long_log_has_are_intersected_in_one_pass() -> None:
    # Each against each would be ten thousand million.
    runs = [(10 * number, 10 * number + 5) for number in range(100_000)]
    plan = Plan.of([(Gaps([*runs]), None), (Gaps([*runs]), None), (Gaps([*runs]), 999_990)])
    assert plan.idle == tuple(runs)


def test_behind_a_cut_everything_may_have_been_idle() -> None:
    plan = Plan.of([(Gaps([(1, 3)]), 7), (Gaps([(2, 9), (12, 13)]), None)])
    assert plan.idle == ((2, 3), (8, 9), (12, 13))
    assert Plan.of([(Gaps(), 7)]).idle == ((8, LATEST),)


# Steps that were left out because recording took too much time.


def throttled(
    rank: int, records: int, steps: range, *, size: int = 3, odd: dict[int, int] | None = None
) -> MemoryLane:
    """A rank whose records cost forty microseconds each, of steps of a millisecond."""
    now = [0]
    sink = MemorySink()
    throttle = Throttle(0.05, record_ns=40_000, clock=lambda: now[0])
    tracing = Tracer(sink, head(rank, size), lambda: now[0], has_steps=True, throttle=throttle)
    match, note = tracing.emitter(MATCH), tracing.emitter(NOTE)
    for number in steps:
        tracing.begin_step(number)
        match(f"r{number}", (odd or {}).get(number, 64), 5)
        for _ in range(records - 1):
            note("x")
        now[0] += 1_000_000
        tracing.end_step(is_idle=False)
    tracing.close("completed")
    return in_memory(rank, sink)


def in_memory(rank: int, sink: MemorySink) -> MemoryLane:
    import json

    first, *entries, last = [json.loads(line) for line in sink.lines]
    return MemoryLane(rank, "scheduler", first, {kind.name: kind for kind in KINDS}, entries, last)


STEPS = range(2 * LOOK_NS // 1_000_000 + 300)


def test_steps_that_some_rank_left_out_are_compared_on_none_and_the_verdict_says_so() -> None:
    lanes = [throttled(0, 1, STEPS), throttled(1, 2, STEPS), throttled(2, 5, STEPS)]
    written = [sum(entry["kind"] == "match" for entry in one.entries) for one in lanes]
    assert written[0] > written[1] > written[2]
    verdict = check(lanes)
    assert (verdict.kind, verdict.code, verdict.finding.level) == ("consistent", 0, "medium")
    assert verdict.coverage.compared_calls == written[2]
    assert verdict.coverage.throttled == {1: 499, 2: 499}
    assert verdict.to_json()["coverage"]["throttled"] == {"1": 499, "2": 499}
    assert "ranks 1-2 left out from step 499 on" in verdict.finding.summary


@pytest.mark.parametrize("where", ["written", "left out"])
def test_a_difference_is_found_where_all_have_the_step_and_nobody_is_accused_elsewhere(where: str) -> None:
    full, held = throttled(0, 1, STEPS), throttled(2, 5, STEPS)
    there = {entry["step"] for entry in held.entries if entry["kind"] == "match"}
    number = max(there if where == "written" else set(STEPS) - there)
    verdict = check([full, throttled(1, 1, STEPS, odd={number: 63}), held])
    if where == "written":
        first = verdict.finding.first_divergence
        assert first is not None
        assert (verdict.finding.culprit, first.step) == ((1,), number)
    else:
        assert (verdict.kind, verdict.finding.culprit) == ("consistent", ())


@pytest.mark.parametrize("one_in", [0, -1, 65, 10**30, "2", None, True, [2]])
def test_a_throttle_record_that_cannot_be_believed_changes_nothing(one_in: Any) -> None:
    said = {"step": 3, "kind": "throttle", "window": 64, "one_in": one_in, "share": 1, "share_max": 1}
    entries = [*FULL[:4], said, *FULL[4:]]
    history = History.of([lane(0, FULL), lane(1, entries), lane(2, FULL)])
    verdict = check(history)
    assert (verdict.kind, history.throttled) == ("consistent", {})
