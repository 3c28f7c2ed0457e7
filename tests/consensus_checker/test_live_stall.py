"""Ranks that are watched while one of them is silent: threads whose calls really hang."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.support.live import Rank, started, stop, until

SILENCE_S = 0.4


@pytest.fixture
def running() -> Iterator[list[Rank]]:
    ranks: list[Rank] = []
    yield ranks
    stop(ranks, "stopped")


def have_verdict(ranks: list[Rank]) -> bool:
    return until(lambda: all(rank.watcher.verdict is not None for rank in ranks))


def finding(rank: Rank) -> Any:
    assert rank.watcher.verdict is not None
    return rank.watcher.verdict.finding


def held(ranks: list[Rank], who: list[int], rid: str) -> list[Any]:
    """Ranks that hang in a call, each in a thread of its own; what lets each of them go on."""
    releases = []
    for rank in ranks:
        if rank.rank in who:
            enter, release = rank.held(rid)
            Thread(target=enter, daemon=True).start()
            releases.append(release)
    return releases


def test_ranks_that_wait_in_a_call_tell_who_did_not_come_and_when_it_is_over(
    tmp_path: Path, running: list[Rank]
) -> None:
    running += started(4, tmp_path, silence_s=SILENCE_S)
    for rank in running:
        rank.calls(0, 30)
    releases = held(running, [0, 1, 3], "r30")
    assert have_verdict(running)
    found = finding(running[2])
    assert (found.kind, found.code, found.culprit, found.victims) == ("stall", 11, (2,), (0, 1, 3))
    assert "rank 2 is in no call, its last: match r29, step 0" in found.summary
    assert found.summary.endswith("ranks 0-1, 3 wait in load back r30")
    assert all(len(rank.told) == 1 and rank.told[0].startswith("STALLED   rank 2") for rank in running)
    releases += held(running, [2], "r30")
    for release in releases:
        release.set()
    assert until(lambda: all("it is over: rank 2 goes on (stall)" in rank.told for rank in running))


def test_a_rank_that_hangs_in_what_the_others_are_through_with_is_named(
    tmp_path: Path, running: list[Rank]
) -> None:
    running += started(3, tmp_path, silence_s=SILENCE_S)
    for rank in running:
        rank.calls(0, 30)
    for release in held(running, [0, 2], "r30"):
        release.set()
    held(running, [1], "r30")
    assert have_verdict(running)
    found = finding(running[0])
    assert (found.kind, found.code, found.culprit) == ("frozen", 15, (1,))
    assert "rank 1 is in load back r30; ranks 0, 2 are 1 call further on" in found.summary


def test_an_idle_rank_that_skipped_a_call_is_named(tmp_path: Path, running: list[Rank]) -> None:
    running += started(3, tmp_path, silence_s=SILENCE_S)
    for rank in running:
        rank.calls(0, 30 if rank.rank == 1 else 31)
    assert have_verdict(running)
    assert (finding(running[0]).code, finding(running[0]).culprit) == (15, (1,))


def test_ranks_that_are_idle_or_all_in_one_call_are_quiet(tmp_path: Path, running: list[Rank]) -> None:
    running += started(3, tmp_path, silence_s=SILENCE_S / 2)
    for rank in running:
        rank.calls(0, 30)
    first = running[0].watcher
    assert until(lambda: first._own.beat > 60)
    releases = held(running, [0, 1, 2], "r30")
    before = first._own.beat
    assert until(lambda: first._own.beat > before + 60)
    assert [rank.told for rank in running] == [[], [], []]
    for release in releases:
        release.set()


def test_a_divergence_before_the_stall_is_the_verdict(tmp_path: Path, running: list[Rank]) -> None:
    running += started(4, tmp_path, silence_s=SILENCE_S)
    for rank in running:
        rank.calls(0, 30, backup=(1, 0 if rank.rank == 2 else 64, 5, 1))
    held(running, [0, 1, 3], "r30")
    assert have_verdict(running)
    assert [finding(rank).kind for rank in running] == ["divergence"] * 4
    assert all(len(rank.told) == 1 for rank in running)


def test_a_meeting_that_one_rank_never_entered_is_told_by_its_group_and_number(
    tmp_path: Path, running: list[Rank]
) -> None:
    running += started(4, tmp_path, silence_s=SILENCE_S)
    for rank in running:
        rank.calls(0, 10)
        if rank.rank != 3:
            rank.enter("tp0/main", 412, "all_reduce", 1, "drain")
    assert have_verdict(running)
    found = finding(running[0])
    assert (found.code, found.culprit, found.victim.where) == (11, (3,), "all_reduce tp0/main #412")


def test_a_background_lane_that_never_came_back_is_told_once(tmp_path: Path, running: list[Rank]) -> None:
    running += started(2, tmp_path, lanes=("scheduler", "io"), silence_s=0.1)
    from tests.support.live import STATE

    running[1].lanes["io"].emitter(STATE)("backend", 17)
    assert have_verdict(running)
    assert "rank 1: its io lane has been in the backend with op 17 for" in finding(running[0]).summary
    before = running[0].watcher._own.beat
    assert until(lambda: running[0].watcher._own.beat > before + 50)
    assert [len(rank.told) for rank in running] == [1, 1]


def test_memory_is_flat_while_ranks_stall(tmp_path: Path, running: list[Rank]) -> None:
    running += started(3, tmp_path, silence_s=0.2)
    for rank in running:
        rank.calls(0, 30)
    held(running, [0, 1], "r30")
    assert have_verdict(running)
    beats = running[0].watcher._own

    def after(turns: int) -> int:
        end = beats.beat + turns
        assert until(lambda: beats.beat >= end, 30)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        after(20)
        first = after(20)
        assert after(80) - first < 64 << 10
    finally:
        tracemalloc.stop()
