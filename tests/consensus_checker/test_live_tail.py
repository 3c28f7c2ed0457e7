"""Logs that are still written, watched from their folder."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from consensus_checker.live_tail import LogWatcher, Told, _Lane, _silent_s
from tests.support.live import Rank, started, stop
from tracer.errors import LogError
from tracer.record import Kind, Place, header
from tracer.segments import SegmentSink
from tracer.tracer import Tracer

DUE_S = 15.0


@pytest.fixture
def running(tmp_path: Path) -> Iterator[list[Rank]]:
    """Ranks that write, in steps, and that nobody watches from inside."""
    ranks = started(3, tmp_path / "logs", has_steps=True)
    stop(ranks, "stopped")
    yield ranks
    for rank in ranks:
        rank.close()


def polled(watcher: LogWatcher, is_so: Callable[[list[Told]], bool]) -> list[Told]:
    """All that is told until it is so."""
    told: list[Told] = []
    end_s = time.monotonic() + DUE_S
    while not is_so(told) and time.monotonic() < end_s:
        told += watcher.poll()
        time.sleep(0.02)
    assert is_so(told), (told, watcher.states())
    return told


def steps(rank: Rank, first: int, last: int, *, odd: int = -1) -> None:
    for step in range(first, last):
        rank.tracer.begin_step(step)
        rank.match(f"r{step}", 0 if step == odd else 64, 5)
        rank.tracer.end_step(is_idle=False)


def test_a_folder_without_logs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError):
        LogWatcher(tmp_path / "none")


def test_states_say_how_far_each_rank_is(tmp_path: Path, running: list[Rank]) -> None:
    watcher = LogWatcher(tmp_path / "logs")
    for rank in running:
        steps(rank, 0, 100 + 20 * rank.rank)
    # The newest step may still be taken back, so that it waits.
    polled(watcher, lambda _: [one.step for one in watcher.states()] == [98, 118, 138])
    assert [one.behind for one in watcher.states()] == [40, 20, 0]
    assert [one.last for one in watcher.states()] == ["match r98", "match r118", "match r138"]
    watcher.close()


def test_a_divergence_is_told_once_while_the_run_goes_on(tmp_path: Path, running: list[Rank]) -> None:
    watcher = LogWatcher(tmp_path / "logs")
    for rank in running:
        steps(rank, 0, 300, odd=200 if rank.rank == 1 else -1)
    told = polled(watcher, lambda told: bool(told))
    assert len(told) == 1
    found = told[0].verdict.finding
    assert (found.kind, found.culprit, found.first_divergence is not None) == ("divergence", (1,), True)
    assert told[0].lines[0].startswith("DIVERGED  scope world: rank 1 left the majority")
    for rank in running:
        steps(rank, 300, 400)
    more = polled(watcher, lambda _: watcher.states()[0].step >= 398)
    assert [one for one in more if one.verdict.kind == "divergence"] == []
    watcher.close()


def test_two_of_four_accuse_nobody_as_long_as_the_last_is_on_its_way(tmp_path: Path) -> None:
    ranks = started(4, tmp_path / "logs", has_steps=True)
    stop(ranks, "stopped")
    for rank, last in zip(ranks, (300, 300, 150, 300), strict=True):
        steps(rank, 0, last, odd=200 if rank.rank in (0, 3) else -1)
    watcher = LogWatcher(tmp_path / "logs", silence_s=DUE_S)
    # It is seen, and kept for later.
    assert polled(watcher, lambda _: bool(watcher._held)) == []
    steps(ranks[2], 150, 300)
    told = polled(watcher, lambda told: bool(told))
    assert [(one.verdict.kind, one.verdict.finding.culprit) for one in told] == [("divergence", ())]
    watcher.close()
    for rank in ranks:
        rank.close()


def test_of_logs_that_were_removed_nobody_is_called_dead(tmp_path: Path, running: list[Rank]) -> None:
    for rank in running:
        steps(rank, 0, 20)
    watcher = LogWatcher(tmp_path / "logs", silence_s=0.2)
    polled(watcher, lambda _: len(watcher.states()) == 3)
    shutil.rmtree(tmp_path / "logs")
    with pytest.raises(LogError, match="was removed, or its logs were, while it was watched"):
        watcher.poll()
    watcher.close()


@pytest.mark.parametrize(
    ("heart_s", "scheduler_s", "silent_s"),
    [(1.0, 9.0, 0.0), (1.5, 9.0, 0.5), (9.0, 0.2, 0.2), (9.0, 3.0, 3.0)],
)
def test_a_rank_between_two_beats_is_not_silent_and_nor_is_one_that_writes(
    heart_s: float, scheduler_s: float, silent_s: float
) -> None:
    heart, scheduler = _Lane(0, "heart", still_s=heart_s), _Lane(0, "scheduler", still_s=scheduler_s)
    assert _silent_s(heart, [scheduler, heart]) == silent_s


def test_a_run_that_was_killed_is_over_and_checked_to_its_end(tmp_path: Path) -> None:
    ranks = started(2, tmp_path / "logs", has_steps=True, lanes=("scheduler", "heart"))
    stop(ranks, "stopped")
    for rank in ranks:
        steps(rank, 0, 20)
    watcher = LogWatcher(tmp_path / "logs", silence_s=0.2)
    # Nobody closes them, and no heart beats.
    told = polled(watcher, lambda _: watcher.is_over)
    assert [one.verdict.kind for one in told] == ["dead", "incomplete"]
    watcher.close()
    for rank in ranks:
        rank.close()


def test_who_never_comes_is_not_waited_for(tmp_path: Path) -> None:
    ranks = started(4, tmp_path / "logs", has_steps=True)
    stop(ranks, "stopped")
    for rank, last in zip(ranks, (300, 300, 150, 300), strict=True):
        steps(rank, 0, last, odd=200 if rank.rank == 1 else -1)
    watcher = LogWatcher(tmp_path / "logs", silence_s=0.5)
    told = polled(watcher, lambda told: any(one.verdict.kind == "divergence" for one in told))
    (found,) = (one.verdict.finding for one in told if one.verdict.kind == "divergence")
    assert (found.culprit, found.level) == ((1,), "low")
    watcher.close()
    for rank in ranks:
        rank.close()


def test_a_rank_that_others_wait_for_is_told(tmp_path: Path, running: list[Rank]) -> None:
    watcher = LogWatcher(tmp_path / "logs", silence_s=0.8)
    for rank in running:
        steps(rank, 0, 50)
        rank.tracer.begin_step(50)
        if rank.rank != 2:
            rank.enter("tp0/main", 9, "all_reduce", 1, "drain")
    (told,) = polled(watcher, lambda told: bool(told))
    assert (told.verdict.kind, told.verdict.finding.silent) == ("stall", (2,))
    assert {one.rank: one.state for one in watcher.states()} == {
        0: "waits in tp0/main #9",
        1: "waits in tp0/main #9",
        2: "still",
    }
    watcher.close()


def test_idle_steps_that_are_taken_back_keep_a_rank_alive(tmp_path: Path, running: list[Rank]) -> None:
    watcher = LogWatcher(tmp_path / "logs", silence_s=0.6)
    for rank in running:
        steps(rank, 0, 10)
    end_s = time.monotonic() + 1.5
    step = 10
    told: list[Told] = []
    while time.monotonic() < end_s:
        for rank in running:
            rank.tracer.begin_step(step)
            rank.match("idle", 0, 5)
            rank.tracer.end_step(is_idle=True)
        step += 1
        told += watcher.poll()
        time.sleep(0.01)
    assert told == []
    watcher.close()


def test_at_the_end_all_of_it_is_checked(tmp_path: Path) -> None:
    ranks = started(2, tmp_path / "logs")
    watcher = LogWatcher(tmp_path / "logs")
    stop(ranks, "stopped")
    for rank in ranks:
        rank.calls(0, 40)
        rank.close()
    looks = list(watcher.watch(0.02))
    told = [one for _, found in looks for one in found]
    assert [one.verdict.kind for one in told] == ["consistent"]
    assert {state.state for state in looks[-1][0]} == {"ended"}
    watcher.close()


def test_stages_of_a_pipeline_are_not_behind_each_other(tmp_path: Path) -> None:
    wide = Kind("step", "decision", agree=("tp", "pp"), compared=("number",))
    narrow = Kind("shard", "decision", agree=("tp",), compared=("number",))
    lanes = []
    for rank in range(2):
        place = Place(rank, {"pp": rank, "tp": 0}, {"pp": 2, "tp": 1}, {})
        head = header(place, (wide, narrow), lane="scheduler", run_id="stages", tool_version="test")
        lane = Tracer(SegmentSink(tmp_path, rank, "scheduler"), head, time.monotonic_ns)
        for number in range(100):
            lane.emitter(wide)(number)
        # The first stage has more of its own.
        for number in range(50 * (2 - rank)):
            lane.emitter(narrow)(number)
        lanes.append(lane)
    for lane in lanes:
        lane.close("completed")
    watcher = LogWatcher(tmp_path)
    polled(watcher, lambda _: watcher.is_over)
    assert [one.behind for one in watcher.states()] == [0, 0]
    watcher.close()
