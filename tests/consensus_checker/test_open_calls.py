"""Logs with calls and no collectives that nobody closed: who did not come to where the others stand."""

from __future__ import annotations

from consensus_checker import skip
from consensus_checker.finding import Finding
from consensus_checker.hearts import last_beats
from consensus_checker.history import History
from consensus_checker.open_calls import behind_in_calls
from tests.support.hearts import beating

BEFORE = "match:r1=64 match:r2=64 "
AHEAD = f"{BEFORE}insert? #killed"
LATE = f"{BEFORE}#killed"
TWO_TO_ONE = f"0 {AHEAD}\n1 {AHEAD}\n2 {LATE}"


def judged(text: str, **still_s: float) -> Finding | None:
    made = beating(text, {int(rank.removeprefix("r")): seconds for rank, seconds in still_s.items()})
    history = History.of(made)
    return behind_in_calls(history, skip.ending(history), last_beats(made))


def brief(finding: Finding | None) -> tuple[object, ...]:
    assert finding is not None
    return finding.code, finding.level, finding.culprit, finding.victims, finding.unknown


def test_a_rank_that_stands_in_front_of_the_call_in_which_all_others_are_did_not_come() -> None:
    finding = judged(TWO_TO_ONE, r0=40, r1=40, r2=40)
    assert brief(finding) == (11, "medium", (2,), (0, 1), ())
    assert finding is not None
    assert finding.summary == (
        "rank 2 did not come to insert, in which ranks 0-1 had been for 40.0 s: rank 2 is in no call, its "
        "last: match"
    )
    assert {one.supports for one in finding.evidence} == {"culprit 2", "victim 0", "victim 1"}


def test_a_rank_whose_heart_stopped_while_the_others_stood_is_dead_or_out_of_reach() -> None:
    finding = judged(TWO_TO_ONE, r0=40, r1=40, r2=0.001)
    assert brief(finding) == (14, "medium", (2,), (0, 1), ())


def test_a_heart_whose_next_beat_may_not_have_been_due_is_not_silent() -> None:
    assert judged(TWO_TO_ONE, r0=2, r1=2, r2=0.001) is None


def test_of_two_ranks_nobody_is_accused() -> None:
    finding = judged(f"0 {AHEAD}\n1 {LATE}", r0=40, r1=40)
    assert brief(finding) == (11, "undetermined", (), (), (0, 1))


def test_a_call_that_was_open_for_a_moment_is_no_stall() -> None:
    assert judged(TWO_TO_ONE, r0=0.02, r1=0.02, r2=0.02) is None


def test_a_rank_that_nobody_has_a_beat_of_may_be_anywhere() -> None:
    assert judged(TWO_TO_ONE, r0=40, r1=40) is None


def test_ranks_that_stand_in_different_calls_wait_for_nobody_that_is_known() -> None:
    assert (
        judged(f"0 {AHEAD}\n1 {BEFORE}round?{{writes_done=1}} #killed\n2 {LATE}", r0=40, r1=40, r2=40) is None
    )


def test_ranks_that_all_stand_in_one_call_only_take_long_as_far_as_anybody_knows() -> None:
    assert judged(f"0 {AHEAD}\n1 {AHEAD}\n2 {AHEAD}", r0=40, r1=40, r2=40) is None


def test_a_log_that_was_closed_says_by_itself_how_it_ended() -> None:
    assert judged(f"0 {AHEAD}\n1 {AHEAD}\n2 {BEFORE}#hung", r0=40, r1=40, r2=40) is None


def test_where_there_are_collectives_they_say_more() -> None:
    assert (
        judged(f"0 {BEFORE}events! #killed\n1 {BEFORE}events! #killed\n2 {LATE}", r0=40, r1=40, r2=40) is None
    )
