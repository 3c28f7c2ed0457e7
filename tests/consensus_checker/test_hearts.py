"""Logs that nobody closed: what the hearts beside them make of a wait."""

from __future__ import annotations

from dataclasses import replace

from consensus_checker.check import check
from consensus_checker.finding import Finding
from consensus_checker.hearts import last_beats, tell
from consensus_checker.history import History, MemoryLane
from tests.support.hearts import beating

ROUND = "events! events. match:r1=64 "
STALL = f"0 {ROUND * 3}events! #killed\n1 {ROUND * 3}events! #killed\n2 {ROUND * 3}done:9 #killed"
ONE_GOES_ON = f"0 {ROUND * 3}events! #killed\n1 {ROUND * 3}events! #killed\n2 {ROUND * 3}#killed"
TWO_REPLICAS = (
    f"0 {ROUND}events! #killed\n1 {ROUND}done:9 #killed\n2 {ROUND * 2}#killed\n3 {ROUND * 2}#killed"
)


def told(made: list[MemoryLane]) -> tuple[tuple[int, ...], Finding]:
    history = History.of(made)
    hung = tell(history, last_beats(made))
    return hung, check(history).finding


def brief(finding: Finding) -> tuple[object, ...]:
    return finding.kind, finding.code, finding.culprit, finding.victims


def test_a_run_that_stood_still_until_it_was_killed_is_a_stall() -> None:
    hung, finding = told(beating(STALL, {0: 40.0, 1: 40.0, 2: 40.0}))
    assert hung == (0, 1, 2)
    assert brief(finding) == ("stall", 11, (2,), (0, 1))


def test_a_run_that_was_killed_in_the_middle_of_a_vote_is_no_stall() -> None:
    hung, finding = told(beating(STALL, {0: 0.02, 1: 0.02, 2: 0.02}))
    assert hung == ()
    assert brief(finding) == ("incomplete", 4, (), ())


def test_a_wait_is_only_long_if_it_is_several_times_as_long_as_ever_before() -> None:
    # The second vote of rank 0 had taken 20 s: 40 s are nothing that it had not nearly seen before.
    slow_before = {(0, "scheduler"): {5: 20.0}, (1, "scheduler"): {5: 20.0}, (2, "scheduler"): {5: 20.0}}
    assert told(beating(STALL, {0: 40.0, 1: 40.0, 2: 40.0}, pauses=slow_before))[0] == ()
    assert told(beating(STALL, {0: 70.0, 1: 70.0, 2: 70.0}, pauses=slow_before))[0] == (0, 1, 2)


def test_where_a_lane_has_never_waited_before_seconds_are_needed() -> None:
    first = "0 match:r1=64 events! #killed\n1 match:r1=64 done:9 #killed"
    assert told(beating(first, {0: 3.0, 1: 3.0}))[0] == ()
    assert told(beating(first, {0: 6.0, 1: 6.0}))[0] == (0, 1)


def test_a_rank_whose_heart_stopped_while_the_others_waited_is_dead_or_out_of_reach() -> None:
    hung, finding = told(beating(ONE_GOES_ON, {0: 40.0, 1: 40.0, 2: 0.0}))
    assert hung == (0, 1)
    assert brief(finding) == ("dead", 14, (2,), (0, 1))
    assert finding.level == "medium"
    assert finding.summary == "rank 2 said nothing more in step 0; every other rank still lived"
    assert [one.summary for one in finding.alternatives] == [
        "it still runs, and can't be reached: it is stopped, or something holds its interpreter"
    ]


def test_a_rank_that_goes_on_elsewhere_while_the_others_wait_has_not_joined() -> None:
    far = f"0 {ROUND}events! #killed\n1 {ROUND}" + "done:9 " * 300 + "#killed"
    hung, finding = told(beating(far, {0: 3.0, 1: 0.0}))
    assert hung == (0, 1)
    assert brief(finding) == ("stall", 11, (1,), (0,))


def test_a_replica_that_was_fine_is_not_accused_for_the_stall_of_another() -> None:
    hung, finding = told(beating(TWO_REPLICAS, {0: 40.0, 1: 40.0, 2: 0.0, 3: 0.0}, dp=2))
    assert hung == (0, 1)
    assert brief(finding) == ("stall", 11, (1,), (0,))


def test_clocks_that_are_minutes_apart_change_nothing() -> None:
    still = {0: 40.0, 1: 40.0, 2: 40.0}
    one, two = told(beating(STALL, still)), told(beating(STALL, still, clocks_s={0: 420.0, 2: 3600.0}))
    assert one == two


def test_a_rank_without_a_heart_is_not_said_to_have_waited() -> None:
    hung, finding = told(beating(STALL, {}))
    assert (hung, finding.kind) == ((), "incomplete")


def test_a_divergence_before_the_stall_is_what_led_to_it() -> None:
    text = (
        f"0 {ROUND * 3}backup:17=64 events! #killed\n"
        f"1 {ROUND * 3}backup:17=64 events! #killed\n"
        f"2 {ROUND * 3}backup:17=0 main! #killed"
    )
    _, finding = told(beating(text, {0: 40.0, 1: 40.0, 2: 40.0}))
    assert brief(finding) == ("divergence", 10, (2,), (0, 1))
    assert finding.consequence == ("stall", 11)
    # Nobody closed a log, so that a death is not ruled out.
    assert [name for name, _ in finding.ruled_out] == ["the collective library"]


def test_a_log_that_breaks_off_before_what_its_heart_counted_does_not_say_where_it_stood() -> None:
    made = beating(STALL, {0: 40.0, 1: 40.0, 2: 40.0})
    spoilt = [
        replace(lane, entries=lane.entries[:4], is_unsealed=False, torn="a line is no JSON object")
        if (lane.rank, lane.lane) == (0, "scheduler")
        else lane
        for lane in made
    ]
    hung, finding = told(spoilt)
    assert hung == (1, 2)
    assert finding.culprit == (2,)
    assert 0 not in (*finding.culprit, *finding.victims)
