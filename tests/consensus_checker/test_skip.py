"""A run that is read from its checkpoints has the verdict that it has when every line is read."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from consensus_checker import context, skip
from consensus_checker.check import check
from consensus_checker.history import History
from consensus_checker.verdict import Verdict
from hicache.sim.world import simulate
from hicache.zoo import SCENARIOS
from tracer import segments, tracer
from tracer.calls import traced
from tracer.log import find_logs
from tracer.record import Kind, Outcome, Place, header
from tracer.segments import SegmentSink
from tracer.tracer import Tracer

# Of these few records a lane of some hundred has many windows, and of these few bytes many files.
LINKS = 16
SEGMENT_BYTES = 1 << 13

DECIDE = Kind(
    "decide",
    "decision",
    agree=("tp", "pp"),
    compared=("node", "tokens"),
    local=("pages_free",),
    result="tokens",
)
MEET = Kind(
    "meet", "meeting", agree=("tp",), compared=("purpose", "op"), info=("group", "group_seq", "numel", "axis")
)
WRONG = Kind("wrong_page", "anomaly", info=("page_index",))
NOTE = Kind("note", "note", info=("text",))
KINDS = (DECIDE, MEET, WRONG, NOTE)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "LINKS", LINKS)
    monkeypatch.setattr(skip, "TAIL_BYTES", 1 << 10)
    # All of the past, so that what it tells is the same too.
    monkeypatch.setattr(context, "PAST_RECORDS", 1 << 30)
    monkeypatch.setattr(context, "PAST_MAX", 1 << 30)
    monkeypatch.setattr(segments, "SEGMENT_BYTES_MIN", SEGMENT_BYTES)
    monkeypatch.setattr(segments, "SEGMENT_BYTES_MAX", SEGMENT_BYTES)


class Rank:
    """One rank's scheduler: steps of one meeting and some decisions."""

    def __init__(self, folder: Path, rank: int, tp: int, pp: int, *, limit_bytes: int | None = None) -> None:
        self.rank = rank
        stage, tp_rank = divmod(rank, tp)
        self.group = f"pp{stage}/main"
        members = [stage * tp + other for other in range(tp)]
        where = Place(rank, {"pp": stage, "tp": tp_rank}, {"pp": pp, "tp": tp}, {self.group: members})
        head = header(where, KINDS, lane="scheduler", run_id="run-a", tool_version="test")
        self.sink = SegmentSink(folder, rank, "scheduler", limit_bytes=limit_bytes)
        self.tracer = Tracer(self.sink, head, lambda: 7, has_steps=True)
        self.decide = self.tracer.emitter(DECIDE)
        fields = ("purpose", "op", "group", "group_seq", "numel")
        self.enter = self.tracer.emitter(MEET, phase="enter", fields=fields)
        self.leave = self.tracer.emitter(MEET, phase="leave", fields=("purpose", "op", "group", "group_seq"))
        self.wrong = self.tracer.emitter(WRONG)
        self.note = self.tracer.emitter(NOTE)

    def meet(self, step: int, *, leaves: bool = True) -> None:
        self.enter("events", "all_reduce", self.group, step, 4)
        if leaves:
            self.leave("events", "all_reduce", self.group, step)

    def step(self, step: int, *, tokens: int = 64, free: int = 5, decisions: int = 2) -> None:
        self.tracer.begin_step(step)
        self.meet(step)
        for number in range(decisions):
            is_odd = number == decisions - 1
            self.decide(step * 8 + number, tokens if is_odd else 64, free if is_odd else 5 + step % 3)
        # Every rank has records of its own, so that one place is at another byte on each.
        for _ in range((step + self.rank) % 3):
            self.note("x" * self.rank)
        self.tracer.end_step(is_idle=False)


def ranks(folder: Path, tp: int = 3, pp: int = 1, **options: Any) -> list[Rank]:
    return [Rank(folder, rank, tp, pp, **options) for rank in range(tp * pp)]


def close(lanes: Sequence[Rank], outcome: Outcome = "completed") -> None:
    for lane in lanes:
        lane.tracer.close(outcome)


def both(folder: Path, **options: Any) -> tuple[Verdict, Verdict]:
    """From every line, and from checkpoints."""
    lines = check(find_logs(folder), skip_bytes_min=1 << 60)
    return lines, check(find_logs(folder), skip_bytes_min=0, **options)


def told(verdict: Verdict) -> dict[str, Any]:
    """What must be the same, however it was read."""
    document = verdict.to_json()
    del document["coverage"]["read"]
    basis = document["verdict"]["confidence"]["basis"]
    basis[:] = [part for part in basis if "checkpoint" not in part and "checksum" not in part]
    return document


def text(verdict: Verdict) -> list[str]:
    return json.dumps(told(verdict), indent=1).splitlines()


def demand_same(folder: Path, *, read: str | None = "checkpoints", kind: str | None = None) -> Verdict:
    lines, skipped = both(folder)
    assert set(text(skipped)) ^ set(text(lines)) == set()
    assert told(skipped) == told(lines)
    assert lines.coverage.read == "lines"
    assert read in (None, skipped.coverage.read)
    assert kind in (None, lines.kind)
    return skipped


def test_a_healthy_run_is_consistent(tmp_path: Path) -> None:
    lanes = ranks(tmp_path)
    for step in range(200):
        for lane in lanes:
            lane.step(step)
    close(lanes)
    verdict = demand_same(tmp_path, kind="consistent")
    assert verdict.coverage.compared_calls == 200 * 4
    assert verdict.finding.basis == ("all logs complete", "compared by their checkpoints")


@pytest.mark.parametrize("at", [0, 1, 7, 100, 198, 199])
@pytest.mark.parametrize("is_listed", [True, False])
def test_a_rank_that_leaves_the_others_is_found_wherever_it_does(
    tmp_path: Path, at: int, is_listed: bool
) -> None:
    lanes = ranks(tmp_path)
    for step in range(200):
        for lane in lanes:
            is_odd = lane.rank == 1 and step >= at
            lane.step(step, tokens=0 if is_odd else 64, free=0 if is_odd else 5)
    close(lanes)
    if not is_listed:
        for path in tmp_path.glob("*.checkpoints"):
            path.unlink()
    verdict = demand_same(tmp_path, kind="divergence")
    assert verdict.finding.culprit == (1,)
    assert verdict.finding.first_divergence is not None
    assert verdict.finding.first_divergence.index == at * 4 + 3


def test_of_what_led_to_it_one_window_may_be_all_that_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = ranks(tmp_path)
    for step in range(200):
        for lane in lanes:
            lane.step(step, tokens=0 if (lane.rank, step) == (1, 150) else 64, free=step % 2)
    close(lanes)
    monkeypatch.setattr(context, "PAST_RECORDS", 0)
    monkeypatch.setattr(context, "PAST_MIN", LINKS // 2)
    lines, skipped = both(tmp_path)
    assert skipped.finding.first_divergence == lines.finding.first_divergence
    assert skipped.finding.culprit == lines.finding.culprit == (1,)


@pytest.mark.parametrize("at", [3, 150])
def test_a_rank_that_makes_a_call_more_hangs_the_others(tmp_path: Path, at: int) -> None:
    lanes = ranks(tmp_path)
    for step in range(200):
        for lane in lanes:
            lane.step(step, decisions=3 if (lane.rank, step) == (2, at) else 2)
    for lane in lanes[:2]:
        lane.tracer.begin_step(200)
        lane.meet(200, leaves=False)
    close(lanes, "hung")
    verdict = demand_same(tmp_path, kind="divergence")
    victim = verdict.finding.victim
    assert victim is not None
    assert victim.calls_later == 800 - at * 4 - 4


def test_a_run_that_hung_and_did_not_diverge_is_a_stall(tmp_path: Path) -> None:
    lanes = ranks(tmp_path)
    for step in range(100):
        for lane in lanes:
            lane.step(step)
    for lane in lanes[:2]:
        lane.meet(100, leaves=False)
    close(lanes, "hung")
    demand_same(tmp_path, kind="stall")


def test_a_group_that_is_rarely_used_is_looked_for_further_back(tmp_path: Path) -> None:
    lanes = ranks(tmp_path)
    for step in range(200):
        for lane in lanes:
            lane.step(step)
            if step == 2:
                lane.enter("rare", "barrier", lane.group + "/rare", 0, 4)
                lane.leave("rare", "barrier", lane.group + "/rare", 0)
    for lane in lanes[:2]:
        lane.enter("rare", "barrier", lane.group + "/rare", 1, 4)
    close(lanes, "hung")
    demand_same(tmp_path, kind="stall")


@pytest.mark.parametrize("killed_at", [5, 90, 150])
def test_a_killed_rank_is_compared_up_to_its_end_and_the_others_behind_it(
    tmp_path: Path, killed_at: int
) -> None:
    lanes = ranks(tmp_path)
    for step in range(200):
        for lane in lanes:
            if lane.rank != 2 or step < killed_at:
                lane.step(step, tokens=0 if (lane.rank, step) == (0, 180) else 64)
    lanes[2].sink._unmap()
    close(lanes[:2])
    verdict = demand_same(tmp_path, kind="divergence")
    assert verdict.coverage.truncated == (2,)


def test_of_a_killed_rank_what_comes_behind_its_last_checkpoint_is_compared_too(tmp_path: Path) -> None:
    lanes = ranks(tmp_path)
    for step in range(200):
        for lane in lanes:
            if lane.rank != 2 or step < 102:
                lane.step(step, tokens=0 if (lane.rank, step) == (2, 101) else 64)
    lanes[2].sink._unmap()
    close(lanes[:2])
    assert demand_same(tmp_path, kind="divergence").finding.culprit == (2,)


def test_all_but_one_may_be_killed(tmp_path: Path) -> None:
    lanes = ranks(tmp_path, tp=2)
    for step in range(100):
        for lane in lanes:
            if lane.rank == 0 or step < 20:
                lane.step(step)
    lanes[1].sink._unmap()
    close(lanes[:1], "stopped")
    lines, skipped = both(tmp_path)
    documents = [told(verdict) for verdict in (lines, skipped)]
    parts = [document["coverage"].pop("decisions_compared_fraction") for document in documents]
    assert documents[0] == documents[1]
    assert parts[0] == pytest.approx(parts[1], abs=0.05)


def test_a_rank_that_ends_before_the_others_differs_there(tmp_path: Path) -> None:
    lanes = ranks(tmp_path)
    for step in range(200):
        for lane in lanes:
            if lane.rank or step < 120:
                lane.step(step)
    close(lanes)
    verdict = demand_same(tmp_path, kind="divergence")
    assert verdict.finding.culprit == (0,)


@pytest.mark.parametrize("odd", [None, 0, 3, 5])
def test_stages_of_a_pipeline_are_compared_each_and_together(tmp_path: Path, odd: int | None) -> None:
    lanes = ranks(tmp_path, tp=2, pp=3)
    for step in range(200):
        for lane in lanes:
            lane.step(step, tokens=0 if (lane.rank, step) == (odd, 130) else 64)
            if lane.group == "pp1/main":
                # A stage has meetings of its own.
                lane.meet(1000 + step)
    close(lanes)
    demand_same(tmp_path, kind="consistent" if odd is None else "divergence")


@pytest.mark.parametrize("step_at", [2, 120, 199])
def test_another_order_of_records_of_two_scopes_is_seen(tmp_path: Path, step_at: int) -> None:
    """Each of the two is the same on both ranks, and only their order is not."""
    lanes = ranks(tmp_path, tp=2, pp=2)
    for step in range(200):
        for lane in lanes:
            lane.tracer.begin_step(step)
            if (lane.rank, step) == (3, step_at):
                lane.decide(step, 64, 5)
                lane.meet(step)
            else:
                lane.meet(step)
                lane.decide(step, 64, 5)
            lane.tracer.end_step(is_idle=False)
    close(lanes)
    demand_same(tmp_path, kind="divergence")


def test_what_a_ring_has_kept_is_read_from_its_checkpoints_too(tmp_path: Path) -> None:
    lanes = ranks(tmp_path, limit_bytes=4 * SEGMENT_BYTES)
    for step in range(600):
        for lane in lanes:
            lane.step(step, tokens=0 if (lane.rank, step) == (1, 590) else 64)
    close(lanes)
    assert find_logs(tmp_path).lanes[0].last_dropped_seq > 0
    lines, skipped = both(tmp_path)
    assert (lines.coverage.read, skipped.coverage.read) == ("lines", "checkpoints")
    # Of what is not read nobody counts how many of the records were decisions.
    fields = [dict(told(one)["coverage"]) for one in (lines, skipped)]
    parts = [one.pop("decisions_compared_fraction") for one in fields]
    assert parts == [pytest.approx(0.7, abs=0.05)] * 2
    assert fields[0] == fields[1]
    assert (lines.finding, lines.findings) == (skipped.finding, skipped.findings)


@pytest.mark.parametrize("who", [(0, 1, 2), (0,), (1, 2)])
@pytest.mark.parametrize("odd", [(1, 550), None], ids=["odd", "equal"])
def test_idle_steps_of_rings_are_written_out_where_they_are_read(
    tmp_path: Path, who: tuple[int, ...], odd: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracer.checkpoints.SETTLED_RECORDS", 4)
    lanes = ranks(tmp_path, limit_bytes=4 * SEGMENT_BYTES)
    step = 0
    for number in range(600):
        for lane in lanes:
            lane.step(step, tokens=0 if (lane.rank, number) == odd else 64)
            for idle in range(10 if number % 90 == 70 else 0):
                lane.tracer.begin_step(step + 1 + idle)
                lane.meet(0)
                lane.tracer.end_step(is_idle=lane.rank in who)
        step += 11 if number % 90 == 70 else 1
    close(lanes)
    lines, skipped = both(tmp_path)
    assert (lines.coverage.read, skipped.coverage.read) == ("lines", "checkpoints")
    assert (lines.kind, lines.finding.culprit) == (skipped.kind, skipped.finding.culprit)
    first, other = lines.finding.first_divergence, skipped.finding.first_divergence
    if first is not None and other is not None:
        # Steps that were idle on all ranks count here, and there they do not.
        assert replace(first, index=0) == replace(other, index=0)
    else:
        assert (first, other, lines.code) == (None, None, skipped.code)


def test_where_rings_differ_before_what_they_have_kept_every_line_is_compared(tmp_path: Path) -> None:
    lanes = ranks(tmp_path, limit_bytes=4 * SEGMENT_BYTES)
    for step in range(600):
        for lane in lanes:
            lane.step(step, tokens=0 if (lane.rank, step) in ((1, 3), (2, 590)) else 64)
    close(lanes)
    lines, skipped = both(tmp_path)
    assert (lines.finding.culprit, lines.finding) == ((2,), skipped.finding)


@pytest.mark.parametrize("who", [(0, 1, 2), (0,), (1, 2)])
@pytest.mark.parametrize("idle_at", [0, 70, 199])
def test_idle_steps_are_compared_as_if_every_line_were_read(
    tmp_path: Path, who: tuple[int, ...], idle_at: int
) -> None:
    lanes = ranks(tmp_path)
    step = 0
    for number in range(200):
        for lane in lanes:
            lane.step(step, tokens=0 if (lane.rank, number) == (1, 150) else 64)
            for idle in range(10 if number == idle_at else 0):
                lane.tracer.begin_step(step + 1 + idle)
                lane.meet(0)
                lane.tracer.end_step(is_idle=lane.rank in who)
        step += 11 if number == idle_at else 1
    close(lanes)
    assert any(lane.gaps.idle for lane in History.of(find_logs(tmp_path)).lanes)
    demand_same(tmp_path, read="lines" if not idle_at and len(who) > 2 else None)


def test_a_rank_that_is_idle_while_the_others_hang_is_read_behind_its_idle_steps_too(tmp_path: Path) -> None:
    lanes = ranks(tmp_path)
    for step in range(150):
        for lane in lanes:
            lane.step(step, decisions=3 if (lane.rank, step) == (2, 100) else 2)
    for lane in lanes[:2]:
        lane.meet(150, leaves=False)
    for step in range(150, 400):
        lanes[2].tracer.begin_step(step)
        lanes[2].meet(0)
        lanes[2].tracer.end_step(is_idle=True)
    close(lanes, "hung")
    assert demand_same(tmp_path, kind="divergence").finding.consequence == ("stall", 11)


@pytest.mark.parametrize("step_at", [10, 199])
def test_a_note_that_something_is_wrong_is_seen_wherever_it_is(tmp_path: Path, step_at: int) -> None:
    lanes = ranks(tmp_path)
    for step in range(200):
        for lane in lanes:
            lane.step(step)
            if (lane.rank, step) == (1, step_at):
                lane.wrong(7)
    close(lanes)
    demand_same(tmp_path, kind="invariant")


def test_where_a_kind_was_dropped_every_line_is_read(tmp_path: Path) -> None:
    lanes = ranks(tmp_path)
    for step in range(200):
        for lane in lanes:
            lane.step(step)
            if (lane.rank, step) == (1, 100):
                lane.decide({1, 2}, 1, 1)
    close(lanes)
    demand_same(tmp_path, read="lines")


def test_where_ranks_declare_a_kind_differently_every_line_is_read(tmp_path: Path) -> None:
    lanes = ranks(tmp_path)
    for step in range(200):
        for lane in lanes:
            lane.step(step)
    close(lanes)
    for path in tmp_path.glob("rank0001.*.jsonl"):
        path.write_bytes(
            path.read_bytes().replace(b'"compared":["node","tokens"]', b'"compared":["tokens","node"]')
        )
    demand_same(tmp_path, read="lines")


def test_a_small_run_is_read_line_by_line(tmp_path: Path) -> None:
    lanes = ranks(tmp_path)
    for step in range(200):
        for lane in lanes:
            lane.step(step)
    close(lanes)
    assert check(find_logs(tmp_path)).coverage.read == "lines"


SOME_SLOW = [pytest.param(seed, marks=[pytest.mark.slow] if seed >= 8 else []) for seed in range(40)]


@pytest.mark.parametrize("seed", SOME_SLOW)
def test_runs_with_anything_in_them(tmp_path: Path, seed: int) -> None:
    random_of = random.Random(seed)
    tp, pp = random_of.choice([(2, 1), (3, 1), (4, 1), (2, 2)])
    lanes = ranks(tmp_path, tp=tp, pp=pp)
    steps = random_of.randrange(20, 160)
    odd = {
        random_of.randrange(tp * pp): random_of.randrange(2 * steps) for _ in range(random_of.randrange(3))
    }
    ends = {
        rank: random_of.choice([steps, steps, steps, random_of.randrange(steps)]) for rank in range(tp * pp)
    }
    for step in range(steps):
        decisions = random_of.randrange(5)
        free = [random_of.randrange(4) for _ in lanes]
        for lane in lanes:
            if step < ends[lane.rank]:
                tokens = 0 if odd.get(lane.rank) == step else 64
                lane.step(step, decisions=decisions, tokens=tokens, free=free[lane.rank])
    for lane in lanes:
        if ends[lane.rank] < steps and random_of.random() < 0.7:
            lane.sink._unmap()
        else:
            lane.tracer.close(random_of.choice(["completed", "completed", "hung", "stopped"]))
    lines, skipped = both(tmp_path)
    one, two = told(lines), told(skipped)
    for document in (one, two):
        del document["coverage"]["decisions_compared_fraction"]
    assert one == two, f"seed {seed}"


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", SCENARIOS)
def test_runs_of_the_zoo(tmp_path: Path, name: str, seed: int) -> None:
    simulate(SCENARIOS[name].plan(seed, twin=False), out=tmp_path)
    demand_same(tmp_path, read=None)


def healthy(folder: Path) -> list[Path]:
    lanes = ranks(folder)
    for step in range(200):
        for lane in lanes:
            lane.step(step)
    close(lanes)
    return sorted(folder.glob("rank0001.*.jsonl"))


def test_every_block_is_held_against_its_checksum_where_that_is_asked_for(tmp_path: Path) -> None:
    healthy(tmp_path)
    lines, skipped = both(tmp_path, every_line=True)
    assert (told(skipped), skipped.coverage.read) == (told(lines), "checksums")
    assert skipped.finding.basis[1:] == ("compared by their checkpoints", "every block has its checksum")


@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_flipped_bit_is_found_then_and_every_line_is_read(tmp_path: Path, number: int) -> None:
    path = healthy(tmp_path)[number]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    lines, skipped = both(tmp_path, every_line=True)
    assert (told(skipped), skipped.coverage.read, skipped.kind) == (told(lines), "lines", "incomplete")


def test_a_log_of_an_older_version_is_read_line_by_line(tmp_path: Path) -> None:
    healthy(tmp_path)
    for path in tmp_path.glob("*.jsonl"):
        data = path.read_bytes()
        assert b'"version":[1,3]' in data
        path.write_bytes(data.replace(b'"version":[1,3]', b'"version":[1,1]'))
    assert both(tmp_path)[1].coverage.read == "lines"


CALL = Kind("call", "decision", agree=("tp", "pp"), compared=("n", "result"), local=("fact",))
LOUD = Kind("loud", "decision", agree=("tp",), compared=("n", "result", "error"))
SINGLE = Kind("single", "event", agree=("tp",), compared=("n",))


class Caller:
    """One rank's lane without steps: calls in calls, and records between them.

    A program is a list of `(what, number, inside)`.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.sink = SegmentSink(folder, rank, "io")
        where = Place(rank, {"pp": 0, "tp": rank}, {"pp": 1, "tp": size}, {})
        head = header(where, (CALL, LOUD, SINGLE), lane="io", run_id="run-a", tool_version="test")
        self.tracer = Tracer(self.sink, head, lambda: 7)
        self.single = self.tracer.emitter(SINGLE)
        self.does: dict[str, Any] = {
            "call": traced(self.tracer, CALL, params=["n"], result=["result"])(self._call),
            "loud": traced(self.tracer, LOUD, params=["n"], result=["result"])(self._loud),
            "single": lambda n, inside: self.single(n),
        }

    def run(self, program: Sequence[Any]) -> None:
        for what, n, inside in program:
            with contextlib.suppress(ZeroDivisionError):
                self.does[what](n, inside)

    def _call(self, n: int, inside: Sequence[Any]) -> int:
        self.run(inside)
        return n + 1

    def _loud(self, n: int, inside: Sequence[Any]) -> float:
        self.run(inside)
        return 1 // (n % 5)


def a_program(random_of: random.Random, depth: int = 0) -> list[Any]:
    whats = ["call", "loud", "single"]
    return [
        (
            random_of.choice(whats),
            random_of.randrange(100),
            a_program(random_of, depth + 1) if depth < 3 and random_of.random() < 0.3 else [],
        )
        for _ in range(random_of.randrange(400 if not depth else 5))
    ]


def changed(random_of: random.Random, program: list[Any]) -> list[Any]:
    """The same with one thing left out, done twice, done with another number, or done before its time."""
    if not program:
        return program
    at = random_of.randrange(len(program))
    what, n, inside = program[at]
    if inside and random_of.random() < 0.5:
        # What was done inside of a call is done in front of it.
        own = [*inside, (what, n, [])]
    else:
        own = random_of.choice([[], [program[at], program[at]], [(what, n + 1, inside)]])
    return [*program[:at], *own, *program[at + 1 :]]


@pytest.mark.parametrize("seed", SOME_SLOW)
def test_recorded_calls_of_a_lane_without_steps(tmp_path: Path, seed: int) -> None:
    random_of = random.Random(seed)
    program = a_program(random_of)
    others = changed(random_of, program) if seed % 4 else program
    lanes = [Caller(tmp_path, rank, 3) for rank in range(3)]
    for rank, lane in enumerate(lanes):
        lane.run(others if rank == 1 else program)
        lane.tracer.close("completed")
    demand_same(tmp_path, read=None)


def test_calls_in_calls_are_read_from_checkpoints_too(tmp_path: Path) -> None:
    lanes = [Caller(tmp_path, rank, 3) for rank in range(3)]
    for number in range(200):
        for rank, lane in enumerate(lanes):
            inside: list[Any] = [("call", number, [("single", 1, [])]), ("loud", 5, [])]
            lane.run([("call", number, inside), ("single", 7 if (rank, number) == (1, 150) else 8, [])])
    for lane in lanes:
        lane.tracer.close("completed")
    verdict = demand_same(tmp_path, kind="divergence")
    assert verdict.finding.first_divergence is not None
    assert verdict.finding.first_divergence.index == 150 * 8 + 7
