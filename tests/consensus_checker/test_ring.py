"""Rings start where they start: what is left is aligned by what the headers have counted."""

from __future__ import annotations

import pytest

from consensus_checker.check import check
from consensus_checker.explain import proof
from consensus_checker.history import History, MemoryLane
from consensus_checker.screen import first_screen
from tests.support.history import history, lanes, ring

# A transfer is done in each rank's own time, so equal decisions lie at other places of each log.
STEP = (
    "match:r{0}=64{{host_pages_free=5}} backup:{0}=64{{host_pages_free=5}} round? events! events. round=1 | "
)
EARLY = "done:1 " + "".join(STEP.format(number) + "done:2 " * (number % 2) for number in range(20))
LATE = "".join(STEP.format(number) + "done:2 done:3 " * (number % 3 == 0) for number in range(20))
PLENTY = f"0  {EARLY}\n1  {LATE}\n2  {EARLY}"


def some(text: str, *, start: int, seed: int) -> list[MemoryLane]:
    """The same lanes, each without about `start` of its oldest records."""
    drawn = lanes(text)
    return ring(drawn, {lane.rank: start + (seed * (lane.rank + 3)) % 11 for lane in drawn})


@pytest.mark.parametrize("start", range(1, 90, 7))
@pytest.mark.parametrize("seed", range(3))
def test_rings_that_start_anywhere_accuse_nobody(start: int, seed: int) -> None:
    verdict = check(some(PLENTY, start=start, seed=seed))
    assert (verdict.kind in ("consistent", "incomplete"), verdict.finding.culprit) == (True, ())
    assert set(verdict.coverage.dropped_up_to) == {0, 1, 2}
    assert verdict.coverage.compared_from["dp0 scheduler"] > 0


def test_what_rings_have_kept_is_consistent_where_all_of_it_could_be_compared() -> None:
    # Six lockstep records a step; the first four steps are gone, and with them what was done meanwhile.
    verdict = check(ring(lanes(PLENTY), {0: 1 + 4 * 6 + 2, 1: 4 * 6 + 4, 2: 1 + 4 * 6 + 2}))
    assert (verdict.kind, verdict.code) == ("consistent", 0)
    assert verdict.coverage.compared_from == {"dp0 scheduler": 24}
    assert verdict.finding.summary == (
        "no rank diverged: 96 calls compared on 3 ranks, of ranks 0-2 only what a ring has kept: "
        "dp0 scheduler from call 24 on"
    )
    assert verdict.finding.level == "medium"
    assert verdict.to_json()["coverage"]["dropped_up_to"] == {
        "0": {"scheduler": 27},
        "1": {"scheduler": 28},
        "2": {"scheduler": 27},
    }


def test_a_ring_that_has_kept_much_more_than_another_was_not_compared_with_it() -> None:
    verdict = check(ring(lanes(PLENTY), {0: 10, 1: 80}))
    assert (verdict.kind, verdict.code) == ("incomplete", 4)
    assert "% of the decisions were compared" in verdict.finding.summary


def test_records_that_nobody_counted_are_not_compared() -> None:
    whole = lanes(PLENTY)
    gone = ring(whole, {1: 30}, is_counted=False)
    verdict = check(gone)
    assert (verdict.kind, verdict.finding.culprit) == ("incomplete", ())
    assert "the oldest records of rank 1 are gone, and nobody has counted them" in verdict.finding.summary
    assert verdict.coverage.compared_calls == 120


DIVERGENT = f"""
    0  {EARLY}  match:r7=64{{host_pages_free=5}}  backup:77=64{{host_pages_free=5}}  match:r8=1
    1  {LATE}   match:r7=64{{host_pages_free=5}}  backup:77=64{{host_pages_free=5}}  match:r8=1
    2  {EARLY}  match:r7=64{{host_pages_free=5}}  backup:77=0{{host_pages_free=0}}   match:r8=1
"""


@pytest.mark.parametrize("seed", range(5))
def test_a_divergence_in_what_is_left_is_found_at_its_place_in_the_whole(seed: int) -> None:
    whole = check(history(DIVERGENT)).finding
    drawn = History.of(some(DIVERGENT, start=40, seed=seed))
    verdict = check(drawn)
    finding = verdict.finding
    assert whole.first_divergence is not None
    assert finding.first_divergence is not None
    assert (finding.culprit, finding.level, finding.first_divergence.index) == (
        whole.culprit,
        whole.level,
        whole.first_divergence.index,
    )
    assert (finding.trigger and finding.trigger.values) == {0: 5, 1: 5, 2: 0}
    screen = first_screen(verdict, drawn)
    assert [" ".join(line.split()) for line in screen[4:8]] == [
        "rank 0 rank 1 rank 2 <<",
        "120 match 64 match 64 match 64 r7",
        "> 121 write backup 64 write backup 64 write backup 0 node 77",
        "122 match 1 match 1 match 1 r8",
    ]
    assert proof(finding, drawn)


def test_ranks_that_differ_where_the_records_begin_may_have_parted_before() -> None:
    drawn = lanes(DIVERGENT)
    # Rank 2 had one record more, which the ring has dropped: everything after is shifted by one.
    drawn[2].entries.insert(3, {**drawn[2].entries[1], "rid": "r0"})  # type: ignore[attr-defined]
    finding = check(ring(drawn, {0: 40, 1: 40, 2: 40})).finding
    assert (finding.code, finding.culprit, finding.level) == (10, (2,), "medium")
    assert finding.basis[-1] == "the records before it are gone"


def test_lanes_are_aligned_each_for_itself() -> None:
    text = "\n".join(
        f"{rank}/{name}  {' '.join(f'{call}:{number}=64' for number in range(20))}"
        for rank in range(2)
        for name, call in (("scheduler", "match"), ("io", "read"))
    )
    drawn = [
        one
        for lane in lanes(text)
        for one in ring([lane], {lane.rank: 5 + lane.rank} if lane.lane == "io" else {})
    ]
    verdict = check(drawn)
    assert verdict.finding.culprit == ()
    assert verdict.coverage.compared_from == {"dp0 io": 6}
    assert verdict.coverage.dropped_up_to == {0: {"io": 5}, 1: {"io": 6}}


def test_a_rank_whose_ring_ends_before_the_others_begin_has_no_voice() -> None:
    drawn = ring(lanes(PLENTY), {0: 90, 1: 100})
    short = [
        MemoryLane(lane.rank, lane.lane, lane.header, lane.kinds, lane.entries[:30])
        if lane.rank == 2
        else lane
        for lane in drawn
    ]
    verdict = check(short)
    assert (verdict.code, verdict.finding.culprit) == (4, ())
