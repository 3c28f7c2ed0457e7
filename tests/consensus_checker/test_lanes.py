"""Ranks of several lanes: each lane is compared with its own kind, and none is accused for being idle."""

from __future__ import annotations

import pytest

from consensus_checker.check import check
from consensus_checker.finding import Finding
from tests.support.history import history, lanes


def finding_of(text: str, *, pp: int = 1) -> Finding:
    return check(history(text, pp=pp)).finding


def drawn(ranks: int, **lanes: str) -> str:
    """The same lanes on each of so many ranks."""
    return "\n".join(f"{rank}/{name}  {text}" for rank in range(ranks) for name, text in lanes.items())


HEALTHY = {
    "scheduler": "submit:r1=128 round? events! events. round=0 hit:1=128 | poll:r1=end match:r1=128",
    "prefetch": "state:idle state:backend=1 state:collective=1 hits! hits. query:1=2 state:idle state:ended",
    "io": "state:idle state:backend=1 read:1=2 state:idle state:ended",
    "sync": "state:idle state:collective=1 progress! progress. progress:1=128 state:idle state:ended",
    "backup": "state:idle state:ended",
}


def test_a_run_of_five_lanes_on_four_ranks_is_consistent() -> None:
    verdict = check(history(drawn(4, **HEALTHY)))
    assert (verdict.kind, verdict.code, verdict.coverage.truncated) == ("consistent", 0, ())
    assert verdict.coverage.decisions_compared_fraction == 1.0


def test_lanes_that_were_stopped_while_they_were_idle_have_done_their_work() -> None:
    stopped = {name: text if name == "scheduler" else f"{text} #stopped" for name, text in HEALTHY.items()}
    assert check(history(drawn(4, **stopped))).kind == "consistent"
    busy = {**stopped, "io": "state:idle state:backend=1 #stopped"}
    assert check(history(drawn(4, **busy))).kind == "incomplete"


def test_the_lane_that_decides_is_compared_first() -> None:
    told = history(drawn(2, **HEALTHY))
    assert told.lane_names == ("scheduler", "backup", "io", "prefetch", "sync")
    assert [lane.name for lane in told.lanes[:5]] == ["scheduler", "backup", "io", "prefetch", "sync"]


# Ranks 0, 1 and 3 wait for rank 2's progress, which a read holds up that never ends.
STUCK = """
    0            submit:r1=128 round? events! events. round=0 poll:r1=wait #hung
    0/io         state:idle state:backend=1 read:1=2 state:idle #hung
    0/sync       state:idle state:collective=1 progress! #hung
    1            submit:r1=128 round? events! events. round=0 poll:r1=wait #hung
    1/io         state:idle state:backend=1 read:1=2 state:idle #hung
    1/sync       state:idle state:collective=1 progress! #hung
    2            submit:r1=128 round? events! events. round=0 poll:r1=wait #hung
    2/io         state:idle state:backend=1 #hung
    2/sync       state:idle #hung
    3            submit:r1=128 round? events! events. round=0 poll:r1=wait #hung
    3/io         state:idle state:backend=1 read:1=2 state:idle #hung
    3/sync       state:idle state:collective=1 progress! #hung
"""


def test_a_lane_that_a_store_holds_up_is_named_and_not_the_one_that_waits_for_its_work() -> None:
    finding = finding_of(STUCK)
    assert (finding.code, finding.culprit, finding.victims) == (11, (2,), (0, 1, 3))
    assert finding.summary == (
        "rank 2 did not join all_reduce tp0/progress #0 "
        "(its sync lane is idle, its io lane is in the backend with op 1)"
    )
    (culprit,) = [entry for entry in finding.evidence if entry.supports == "culprit 2"]
    assert (culprit.file, culprit.record) == ("rank0002.io.000.jsonl", 2)


def test_how_long_a_lane_is_in_a_store_is_told_by_its_own_ranks_clock() -> None:
    found = lanes(STUCK)
    for lane in found:
        for record in lane.entries:
            record["time_ns"] = 1_000_000_000  # type: ignore[index]
        if (lane.rank, lane.lane) == (2, "scheduler"):
            lane.entries[-1]["time_ns"] = 4_250_000_000  # type: ignore[index]
    assert "in the backend with op 1 for 3.2 s" in check(found).finding.summary


# As above, with schedulers that went on until the run was cut: rank 0's stands outside of any meeting.
TURNING = """
    0            match:r1=1 | events! events. poll:r1=wait #hung
    0/io         state:idle #hung
    0/sync       state:collective=1 progress! #hung
    1            match:r1=1 | events! events. poll:r1=wait main! #hung
    1/io         state:backend=7 #hung
    1/sync       state:idle #hung
    2            match:r1=1 | events! events. poll:r1=wait main! #hung
    2/io         state:idle #hung
    2/sync       state:collective=1 progress! #hung
"""


def turning(text: str, *, end_s: float, silent_s: float = 0.0) -> Finding:
    """The finding where all lanes but the schedulers stood still from 1 s on, and these until `end_s`."""
    found = lanes(text)
    for lane in found:
        is_late = lane.lane == "scheduler"
        for record in lane.entries:
            record["time_ns"] = int((end_s if is_late else 1.0) * 1e9)  # type: ignore[index]
        assert lane.trailer is not None
        lane.trailer["time_ns"] = int((end_s + silent_s) * 1e9)  # type: ignore[index]
    return check(found).finding


def test_where_a_lane_that_went_on_stands_at_the_cut_is_no_root() -> None:
    finding = turning(TURNING, end_s=9.2)
    assert (finding.code, finding.culprit, finding.victims, finding.level) == (11, (1,), (0, 2), "high")
    assert finding.summary == (
        "rank 1 did not join all_reduce tp0/progress #0 "
        "(its sync lane is idle, its io lane is in the backend with op 7 for 8.2 s)"
    )


def test_a_young_wait_of_a_rank_that_was_silent_since_is_none_of_a_moment() -> None:
    # By its trailer, rank 1 may have stood in that meeting for half of the time or longer.
    assert turning(TURNING, end_s=9.2, silent_s=5.0).culprit == (1,)
    free = TURNING.replace("state:backend=7", "state:idle")
    assert turning(free, end_s=9.2, silent_s=5.0).culprit == (0,)


def test_short_waits_alone_tell_no_lane_from_another() -> None:
    assert turning(TURNING, end_s=1.5).culprit == (0, 1)


def test_idle_lanes_that_were_stopped_can_be_asked_where_they_are() -> None:
    text = STUCK.replace("read:1=2 state:idle #hung", "read:1=2 state:idle #stopped")
    finding = finding_of(text.replace("2/sync       state:idle #hung", "2/sync       state:idle #stopped"))
    assert (finding.code, finding.culprit) == (11, (2,))


def test_a_lane_that_nothing_holds_up_waits_for_the_one_that_gives_it_work() -> None:
    text = """
        0           submit:r1=128 round? events! events. round=0 #hung
        0/prefetch  state:collective=1 hits! #hung
        1           submit:r1=128 round? events! events. round=0 #hung
        1/prefetch  state:collective=1 hits! #hung
        2           submit:r1=128 round? events! events. round=0 #hung
        2/prefetch  state:idle #hung
    """
    finding = finding_of(text)
    assert (finding.code, finding.culprit) == (11, (2,))
    assert "its prefetch lane is idle, last seen in event_round" in finding.summary


def test_an_idle_lane_is_not_accused_where_its_rank_waits_for_somebody_else() -> None:
    text = """
        0           match:r1=1 events! #hung
        0/prefetch  state:collective=1 hits! #hung
        1           match:r1=1 events! #hung
        1/prefetch  state:idle #hung
        2           match:r1=1 #hung
        2/prefetch  state:idle #hung
    """
    finding = finding_of(text)
    assert (finding.code, finding.culprit, finding.victims) == (11, (2,), (0, 1))


def test_a_scheduler_that_stands_outside_of_any_meeting_waits_for_its_own_store() -> None:
    text = """
        0           match:r1=1 events! #hung
        0/prefetch  state:idle #hung
        1           match:r1=1 #hung
        1/prefetch  state:backend=4 #hung
        2           match:r1=1 events! #hung
        2/prefetch  state:idle #hung
    """
    finding = finding_of(text)
    assert (finding.culprit, finding.victims) == ((1,), (0, 2))
    assert "its prefetch lane is in the backend with op 4" in finding.summary


@pytest.mark.parametrize(("ranks", "culprit", "unknown"), [((1,), (1,), ()), ((0, 1), (), (0, 1))])
def test_a_store_alone_holds_up_a_run_in_which_nobody_waits_in_a_meeting(
    ranks: tuple[int, ...], culprit: tuple[int, ...], unknown: tuple[int, ...]
) -> None:
    text = "\n".join(
        f"{rank} match:r1=1 #hung\n{rank}/io state:{'backend=3' if rank in ranks else 'idle'} #hung"
        for rank in range(2)
    )
    finding = finding_of(text)
    assert (finding.kind, finding.code, finding.culprit, finding.unknown) == ("frozen", 15, culprit, unknown)
    assert f"rank {ranks[0]}: its io lane is in the backend with op 3" in finding.summary


def test_of_two_lanes_that_part_the_one_that_decides_comes_first() -> None:
    text = "\n".join(
        f"{rank}  match:r1=1 submit:r1={64 if rank == 2 else 128}\n{rank}/io  read:1={1 if rank == 2 else 2}"
        for rank in range(3)
    )
    verdict = check(history(text))
    assert [
        (finding.first_divergence.lane, finding.culprit)
        for finding in (verdict.finding, *verdict.findings)
        if finding.first_divergence
    ] == [("scheduler", (2,)), ("io", (2,))]


def test_a_lane_that_parted_earlier_by_its_ranks_clock_goes_before_the_one_that_decides() -> None:
    found = lanes(
        "\n".join(
            f"{rank}  match:r1=1 match:r2={64 if rank == 2 else 128}\n"
            f"{rank}/io  read:1={1 if rank == 2 else 2}"
            for rank in range(3)
        )
    )
    for lane in found:
        for number, record in enumerate(lane.entries):
            record["time_ns"] = 5 + 10 * number  # type: ignore[index]
    first = check(found).finding.first_divergence
    assert first is not None
    assert first.lane == "io"


MISPAIRED = """
    0  match:r1=1 round? events! mispaired:events{purpose=event_round} #crashed
    1  match:r1=1 round? events! mispaired:events{purpose=event_round} #crashed
    2  match:r1=1 round? events! mispaired:events{purpose=poll} #crashed
"""


def test_a_note_of_a_call_that_meant_different_things_is_a_mismatch_that_names_the_few() -> None:
    verdict = check(history(MISPAIRED))
    finding = verdict.finding
    assert (finding.kind, finding.code, finding.rule) == ("mismatch", 16, "mispaired")
    assert (finding.culprit, finding.victims, finding.consequence) == ((2,), (0, 1), ("invariant", 18))
    assert finding.summary == (
        "ranks met in tp0/events #0, step 0, and meant different calls: "
        "event_round on ranks 0-1, poll on rank 2"
    )
    assert verdict.findings == ()


def test_one_against_one_in_a_call_accuses_nobody() -> None:
    finding = finding_of(
        "\n".join(MISPAIRED.strip().splitlines()[1:]).replace("1  ", "0  ").replace("2  ", "1  ")
    )
    assert (finding.code, finding.culprit, finding.unknown, finding.level) == (16, (), (0, 1), "undetermined")
