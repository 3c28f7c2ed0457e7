"""Recording takes at most its share of the loop's time, and says what it left out for that."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.logs import DECIDE, NOTE, SMALL_KINDS, place
from tracer.record import THROTTLE, header
from tracer.sinks import MemorySink
from tracer.throttle import LOOK_NS, ONE_IN_MAX, WINDOW_STEPS, Throttle, is_written, measured_ns
from tracer.tracer import Tracer

HEADER = header(place(), SMALL_KINDS, lane="scheduler", run_id="run-a", tool_version="test")
RECORD_NS = 10_000
STEP_NS = 1_000_000


@dataclass
class Loop:
    """A loop whose steps take a millisecond, in which a record costs ten microseconds."""

    throttle: Throttle
    now: list[int]
    step: int = 0

    def run(self, rounds: int, records: int) -> list[int]:
        """So many times `LOOK_NS`; `one_in` wherever it has changed."""
        changes = []
        for _ in range(rounds * LOOK_NS // STEP_NS):
            self.now[0] += STEP_NS
            is_here = self.throttle.is_written(self.step)
            if self.throttle.look(records if is_here else 0):
                changes.append(self.throttle.one_in)
            self.step += 1
        return changes


def loop(share_max: float = 0.05) -> Loop:
    now = [0]
    return Loop(Throttle(share_max, record_ns=RECORD_NS, clock=lambda: now[0]), now)


def test_a_loop_within_the_share_is_left_alone() -> None:
    here = loop()
    assert here.run(20, records=4) == []
    assert (here.throttle.one_in, here.throttle.has_throttled) == (1, False)
    assert here.throttle.share == pytest.approx(0.04)


def test_a_loop_over_the_share_is_halved_until_it_is_within_and_then_stays_there() -> None:
    here = loop()
    # 50 records are half of a step: 1 in 16 is the first that is below a twentieth.
    assert here.run(60, records=50) == [2, 4, 8, 16]
    assert here.run(200, records=50) == []
    assert here.throttle.share <= 0.05


@pytest.mark.parametrize("records", [6, 9, 11, 20, 21, 37, 50, 90])
def test_a_steady_loop_never_goes_to_and_fro(records: int) -> None:
    here = loop()
    changes = here.run(120, records=records)
    assert changes == sorted(set(changes))
    assert here.run(200, records=records) == []


def test_a_loop_that_has_calmed_down_is_written_in_full_again_a_step_at_a_time() -> None:
    here = loop()
    here.run(60, records=50)
    assert here.run(100, records=1) == [8, 4, 2, 1]
    assert here.throttle.has_throttled


def test_there_is_a_least_that_is_written_whatever_it_takes() -> None:
    here = loop()
    assert max(here.run(200, records=100_000)) == ONE_IN_MAX


def test_a_clock_that_stands_still_changes_nothing() -> None:
    throttle = Throttle(0.05, record_ns=RECORD_NS, clock=lambda: 0)
    assert [throttle.look(1000) for _ in range(1000)] == [False] * 1000


def test_ranks_that_have_come_to_different_parts_share_the_windows_of_the_smaller_one() -> None:
    for few, many in ((4, 2), (64, 8), (2, 1)):
        assert all(is_written(step, many) for step in range(10_000) if is_written(step, few))
        assert sum(is_written(step, few) for step in range(WINDOW_STEPS * 64)) == WINDOW_STEPS * 64 // few


@pytest.mark.parametrize("share", [0, 1, -1, 2])
def test_a_share_that_is_none_is_the_programmers_error(share: float) -> None:
    with pytest.raises(AssertionError, match="not between 0 and 1"):
        Throttle(share, record_ns=1)


def test_what_a_record_costs_is_measured_once() -> None:
    assert 0 < measured_ns() == measured_ns()


def drive(tracing: Tracer, now: list[int], steps: range, records: int) -> None:
    emit = tracing.emitter(DECIDE)
    for step in steps:
        tracing.begin_step(step)
        for node in range(records):
            emit(node, 1, 64, 5)
        now[0] += STEP_NS
        tracing.end_step(is_idle=False)


def throttled(*, lanes: int = 1) -> tuple[list[Tracer], list[MemorySink], list[int]]:
    now = [0]
    sinks = [MemorySink() for _ in range(lanes)]
    tracers = [
        Tracer(
            sink,
            HEADER,
            lambda: now[0],
            has_steps=True,
            throttle=Throttle(0.05, record_ns=4 * RECORD_NS, clock=lambda: now[0]),
        )
        for sink in sinks
    ]
    return tracers, sinks, now


def records(sink: MemorySink) -> list[dict[str, Any]]:
    return [json.loads(line) for line in sink.lines[1:]]


def test_the_log_says_from_which_step_on_which_windows_are_left_out() -> None:
    (tracing,), (sink,), now = throttled()
    drive(tracing, now, range(3000), 12)
    tracing.close("completed")
    told = [record for record in records(sink) if record["kind"] == THROTTLE.name]
    assert [record["one_in"] for record in told] == [2, 4, 8, 16]
    assert {(record["window"], record["share_max"]) for record in told} == {(WINDOW_STEPS, 50)}
    assert told[0]["share"] == 480
    one_in, changes = 1, {record["step"]: record["one_in"] for record in told}
    expected = []
    for step in range(3000):
        expected += [step] * 12 * is_written(step, one_in)
        one_in = changes.get(step, one_in)
    assert [record["step"] for record in records(sink) if record["kind"] == DECIDE.name] == expected
    assert [record["seq"] for record in records(sink)] == list(range(1, len(sink.lines)))


def test_the_same_run_leaves_the_same_log() -> None:
    logs = []
    for _ in range(2):
        (tracing,), (sink,), now = throttled()
        drive(tracing, now, range(2000), 30)
        tracing.close("completed")
        logs.append(sink.lines)
    assert logs[0] == logs[1]


def test_another_lane_is_not_affected() -> None:
    (busy, calm), (_, sink), now = throttled(lanes=2)
    drive(busy, now, range(1500), 12)
    drive(calm, now, range(1500), 1)
    assert (busy.is_quiet or busy._throttle.one_in > 1) and not calm.is_quiet  # type: ignore[union-attr]
    assert len([record for record in records(sink) if record["kind"] == DECIDE.name]) == 1500


def test_a_kind_that_was_dropped_stays_dropped_behind_a_quiet_window() -> None:
    (tracing,), (sink,), now = throttled()
    note = tracing.emitter(NOTE)
    note(object())
    drive(tracing, now, range(3000), 12)
    while tracing.is_quiet:
        drive(tracing, now, range(tracing.step + 1, tracing.step + 2), 12)
    note("x")
    assert not [record for record in records(sink) if record["kind"] == NOTE.name]
    assert tracing.dropped[NOTE.name] >= 2


def test_an_emitter_that_is_made_in_a_quiet_window_is_quiet_until_its_end() -> None:
    (tracing,), (sink,), now = throttled()
    drive(tracing, now, range(1500), 12)
    step = 1500
    while not tracing.is_quiet:
        drive(tracing, now, range(step, step + 1), 12)
        step += 1
    note = tracing.emitter(NOTE)
    note("quiet")
    while tracing.is_quiet:
        drive(tracing, now, range(step, step + 1), 12)
        step += 1
    note("heard")
    assert [record["text"] for record in records(sink) if record["kind"] == NOTE.name] == ["heard"]
