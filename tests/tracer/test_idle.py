"""Idle steps are counted where they are alike, and nothing else is: not a byte of what differs is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.logs import place
from tracer.chain import LINKS
from tracer.log import find_logs
from tracer.record import IDLE_STEPS, Kind, header
from tracer.segments import BLOCK_BYTES, BLOCK_LINE_BYTES, SEGMENT_BYTES_MIN, SegmentSink
from tracer.sinks import MemorySink
from tracer.tracer import Tracer

ROOT = Path(__file__).resolve().parents[2]
ROUND = Kind("round", "decision", agree=("tp",), compared=("agreed",), info=("number",), counters=("number",))
MEET = Kind(
    "meet", "meeting", agree=("tp",), compared=("purpose",), info=("group_seq",), counters=("group_seq",)
)
NOTE = Kind("note", "note", info=("text",))
KINDS = (ROUND, MEET, NOTE)
HEADER = header(place(), KINDS, lane="scheduler", run_id="run-a", tool_version="test")

Step = Callable[[Tracer, int], None]


class Loop:
    """A scheduler's loop over one lane."""

    def __init__(self, sink: Any, clock: Callable[[], int] = lambda: 7) -> None:
        self.tracer = Tracer(sink, HEADER, clock, has_steps=True)
        self.round = self.tracer.emitter(ROUND)
        self.enter = self.tracer.emitter(MEET, phase="enter")
        self.leave = self.tracer.emitter(MEET, phase="leave")
        self.note = self.tracer.emitter(NOTE)
        self.step = 0
        self.meeting = 0

    def idle(self, count: int = 1, agreed: Any = 0) -> None:
        for _ in range(count):
            self.tracer.begin_step(self.step)
            self.enter("events", self.meeting)
            self.leave("events", self.meeting)
            self.round(agreed, 3 * self.step)
            self.meeting += 1
            self.tracer.end_step(is_idle=True)
            self.step += 1

    def busy(self, text: str = "work") -> None:
        self.tracer.begin_step(self.step)
        self.note(text)
        self.tracer.end_step(is_idle=False)
        self.step += 1


def loop() -> tuple[Loop, MemorySink]:
    sink = MemorySink()
    return Loop(sink), sink


def told(lines: list[bytes]) -> list[tuple[Any, ...]]:
    """Step, kind and what it says, of each record."""
    records = [json.loads(line) for line in lines if not line.startswith(b'{"kind":"block"')]
    assert [record["seq"] for record in records] == list(range(len(records)))
    found: list[tuple[Any, ...]] = []
    for record in records:
        if record["kind"] == IDLE_STEPS.name:
            found.append((record["step"], "idle", record["first_step"], record["count"]))
        elif record["kind"] in {kind.name for kind in KINDS}:
            found.append((record["step"], record["kind"]))
    return found


FULL = ["meet", "meet", "round"]


def in_full(step: int) -> list[tuple[Any, ...]]:
    return [(step, kind) for kind in FULL]


def test_idle_steps_are_one_in_full_and_a_count() -> None:
    here, sink = loop()
    here.idle(20)
    here.busy()
    assert told(sink.lines) == [*in_full(0), (19, "idle", 1, 19), (20, "note")]


def test_a_count_tells_by_how_much_each_counter_went_up() -> None:
    here, sink = loop()
    here.idle(5)
    (record,) = [json.loads(line) for line in sink.lines if b'"kind":"idle"' in line]
    assert record["records"] == 3
    assert record["advance"] == [1, 1, 3]


def test_two_idle_periods_are_two_counts() -> None:
    here, sink = loop()
    here.idle(3)
    here.busy()
    here.idle(3)
    assert told(sink.lines) == [
        *in_full(0),
        (2, "idle", 1, 2),
        (3, "note"),
        *in_full(4),
        (6, "idle", 5, 2),
    ]


@pytest.mark.parametrize(
    "values", [(0, 1), (0, None), (None, "x"), ("x", "y"), ([1], [2]), ({"a": 1}, {"a": 2})]
)
def test_steps_that_differ_in_what_is_no_counter_are_both_there(values: tuple[Any, Any]) -> None:
    here, sink = loop()
    here.idle(1, agreed=values[0])
    here.idle(1, agreed=values[1])
    assert told(sink.lines) == [*in_full(0), *in_full(1)]


@pytest.mark.parametrize("number", ["a", None, 1.5, True, [1]])
def test_a_counter_that_is_no_number_is_compared_like_any_other_field(number: Any) -> None:
    here, sink = loop()
    for value in (number, number, "other"):
        here.tracer.begin_step(here.step)
        here.round(0, value)
        here.tracer.end_step(is_idle=True)
        here.step += 1
    assert told(sink.lines) == [(0, "round"), (1, "idle", 1, 1), (2, "round")]


def test_a_counter_that_goes_up_by_another_number_ends_a_count() -> None:
    here, sink = loop()
    here.idle(3)
    here.meeting += 5
    here.idle(3)
    assert told(sink.lines) == [*in_full(0), (2, "idle", 1, 2), *in_full(3), (5, "idle", 4, 2)]


def test_a_step_with_another_number_of_records_ends_a_count() -> None:
    here, sink = loop()
    here.idle(3)
    here.tracer.begin_step(here.step)
    here.enter("events", here.meeting)
    here.tracer.end_step(is_idle=True)
    assert told(sink.lines) == [*in_full(0), (2, "idle", 1, 2), (3, "meet")]


def test_idle_steps_without_any_record_are_counted_too() -> None:
    here, sink = loop()
    for step in range(4):
        here.tracer.begin_step(step)
        here.tracer.end_step(is_idle=True)
    here.tracer.close("completed")
    assert told(sink.lines[:-1]) == [(3, "idle", 1, 3)]
    assert json.loads(sink.lines[-1])["seq"] == len(sink.lines) - 1


def test_a_record_between_two_steps_stays_where_it_was() -> None:
    here, sink = loop()
    here.idle(3)
    here.note("between")
    here.idle(3)
    assert told(sink.lines) == [
        *in_full(0),
        (2, "idle", 1, 2),
        (2, "note"),
        *in_full(3),
        (5, "idle", 4, 2),
    ]


def test_a_record_behind_the_first_idle_step_stays_where_it_was() -> None:
    here, sink = loop()
    here.idle(1)
    here.note("between")
    here.idle(2)
    assert told(sink.lines) == [*in_full(0), (0, "note"), *in_full(1), (2, "idle", 2, 1)]


def test_a_checkpoint_breaks_no_run_of_idle_steps() -> None:
    here, sink = loop()
    here.idle(LINKS)
    assert sum(b'"kind":"checkpoint"' in line for line in sink.lines) == 2
    assert told(sink.lines) == [*in_full(0), (LINKS - 1, "idle", 1, LINKS - 1)]


def test_checkpoints_are_over_all_steps_that_were_counted_or_not() -> None:
    chains = []
    for is_idle in (True, False):
        here, sink = loop()
        for _ in range(LINKS):
            here.tracer.begin_step(here.step)
            here.round(0, here.step)
            here.tracer.end_step(is_idle=is_idle)
            here.step += 1
        records = [json.loads(line) for line in sink.lines if b'"kind":"checkpoint"' in line]
        chains.append([[record[name] for name in ("count", "digest", "records_of")] for record in records])
        assert records[-1]["notes"] == ({"idle": 1} if is_idle else {})
    assert chains[0] == chains[1] != []


@pytest.mark.parametrize("start_ns", [0, 10**18])
def test_a_count_that_outgrows_its_room_begins_another_one(start_ns: int, tmp_path: Path) -> None:
    now = [start_ns]
    here = Loop(SegmentSink(tmp_path, 0, "scheduler"), lambda: now[0])
    steps = [10**exponent for exponent in range(18)]
    for number, step in enumerate(steps):
        now[0] = start_ns + step
        here.tracer.begin_step(step)
        here.round(0, number)
        here.tracer.end_step(is_idle=True)
    here.tracer.close("completed")
    (lane,) = find_logs(tmp_path).lanes
    records = list(lane.records())
    assert lane.is_complete
    assert [record["kind"] for record in records] == ["round"] + ["idle"] * (len(records) - 1)
    assert 1 < len(records) < 6
    assert [records[0]["step"], records[-1]["step"]] == [steps[0], steps[-1]]
    assert sum(record["count"] for record in records[1:]) == len(steps) - 1


def files(folder: Path) -> list[bytes]:
    lines = []
    for number, path in enumerate(sorted(folder.iterdir())):
        found = path.read_bytes().rstrip(b"\0").split(b"\n")[:-1]
        lines += found if number == 0 else found[1:]
    return lines


def test_files_and_memory_hold_the_same_lines(tmp_path: Path) -> None:
    sinks: list[Any] = [MemorySink(), SegmentSink(tmp_path, 0, "scheduler")]
    for sink in sinks:
        here = Loop(sink)
        for number in range(40):
            here.idle(number % 7)
            here.busy(f"work {number}")
        here.tracer.close("completed")
    in_file = [line.rstrip(b" ") for line in files(tmp_path) if not line.startswith(b'{"kind":"block"')]
    assert in_file == [line.rstrip(b" ") for line in sinks[0].lines]


def test_each_block_of_a_file_has_an_idle_step_in_full(tmp_path: Path) -> None:
    here = Loop(SegmentSink(tmp_path, 0, "scheduler"))
    for number in range(3000):
        here.idle(3)
        here.busy(f"work {number}" * (number % 9))
    here.tracer.close("completed")
    has_step = False
    blocks = 0
    for line in files(tmp_path):
        if line.startswith(b'{"kind":"block"'):
            blocks += 1
            has_step = False
        elif b'"kind":"meet"' in line:
            has_step = True
        elif b'"kind":"idle"' in line:
            assert has_step
    assert blocks > 3
    (lane,) = find_logs(tmp_path).lanes
    assert list(lane.records()) and lane.is_complete


def test_a_log_with_counts_is_gapless_and_whole_over_many_blocks(tmp_path: Path) -> None:
    here = Loop(SegmentSink(tmp_path, 0, "scheduler"))
    steps: set[int] = set()
    for number in range(2000):
        here.idle(number % 5)
        here.busy("x" * (number % 90))
    here.tracer.close("completed")
    (lane,) = find_logs(tmp_path).lanes
    for record in lane.records():
        if record["kind"] == IDLE_STEPS.name:
            covered = set(range(record["first_step"], record["step"] + 1))
            assert len(covered) == record["count"]
            assert not covered & steps
            steps |= covered
        else:
            steps.add(record["step"])
    assert steps == set(range(here.step))
    assert lane.is_complete


def test_a_file_that_ends_at_any_byte_of_idle_steps_is_gone_on_with_at_the_right_record(
    tmp_path: Path,
) -> None:
    file_counts = set()
    for left in range(0, 1500, 13):
        sink = SegmentSink(tmp_path / str(left), 0, "scheduler")
        here = Loop(sink)
        while sink.window.used < 63_000:
            here.busy("x" * 500)
        here.busy("x" * (SEGMENT_BYTES_MIN - BLOCK_LINE_BYTES - sink.window.used - 80 - left))
        assert sink.segment_count == 1
        for number in range(9):
            # A step that takes less room than the record that counts it.
            here.tracer.begin_step(here.step)
            here.round(0, number)
            here.tracer.end_step(is_idle=True)
            here.step += 1
        here.busy()
        here.tracer.close("completed")
        (lane,) = find_logs(tmp_path / str(left)).lanes
        records = list(lane.records())
        assert lane.is_complete
        file_counts.add(len(lane.files))
        counted = sum(record["count"] for record in records if record["kind"] == IDLE_STEPS.name)
        rounds = sum(record["kind"] == ROUND.name for record in records)
        assert counted + rounds == 9
    assert 2 in file_counts


def test_a_ring_counts_the_records_of_steps_that_were_counted(tmp_path: Path) -> None:
    here = Loop(SegmentSink(tmp_path, 0, "scheduler", limit_bytes=4 * BLOCK_BYTES))
    for number in range(6000):
        here.idle(3)
        here.busy("x" * (number % 90))
    here.tracer.close("completed")
    (lane,) = find_logs(tmp_path).lanes
    first = next(iter(lane.records()))
    assert lane.counts_before is not None
    first_step = first["step"] - (first["count"] if first["kind"] == IDLE_STEPS.name else 0)
    # Of every four steps three were idle, each with one round.
    before = lane.counts_before["round"]
    assert abs(before - first_step * 3 // 4) <= 3
    assert lane.counts_before["meet"] >= 2 * before


KILLED = """
import os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.tracer.test_idle import Loop, SegmentSink
here = Loop(SegmentSink(Path({folder!r}), 0, "scheduler"))
here.idle(50)
here.tracer.begin_step(here.step)
here.enter("hits", here.meeting)
os.write(1, b"entered\\n")
os.read(0, 1)
"""


def test_a_process_killed_in_an_idle_step_is_seen_in_the_meeting_that_it_was_in(tmp_path: Path) -> None:
    script = KILLED.format(root=str(ROOT), folder=str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"entered\n"
        child.send_signal(signal.SIGKILL)
    (lane,) = find_logs(tmp_path).lanes
    records = list(lane.records())
    last = records[-1]
    assert (last["step"], last["kind"], last["phase"], last["purpose"]) == (50, "meet", "enter", "hits")
    assert [(one["first_step"], one["count"]) for one in records if one["kind"] == "idle"] == [(1, 49)]


KILLED_BETWEEN = """
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.tracer.test_idle import Loop, SegmentSink
count = 0
class Killed(SegmentSink):
    def rewind(self, position):
        die()
        super().rewind(position)
        die()
    def rewrite(self, position, line):
        done = super().rewrite(position, line)
        die()
        return done
def die():
    global count
    count += 1
    if count == {nth}:
        os.kill(os.getpid(), signal.SIGKILL)
here = Loop(Killed(Path({folder!r}), 0, "scheduler"))
here.idle(6)
"""


@pytest.mark.parametrize("nth", range(1, 12))
def test_a_process_killed_while_it_takes_a_step_back_leaves_a_gapless_log(nth: int, tmp_path: Path) -> None:
    script = KILLED_BETWEEN.format(root=str(ROOT), folder=str(tmp_path), nth=nth)
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL
    (lane,) = find_logs(tmp_path).lanes
    records = list(lane.records())
    assert [record["seq"] for record in records] == list(range(1, len(records) + 1))
    assert [record["kind"] for record in records[:3]] == FULL
    assert "zero bytes" in (lane.torn or "")
    assert os.listdir(tmp_path) == ["rank0000.scheduler.000.jsonl"]
