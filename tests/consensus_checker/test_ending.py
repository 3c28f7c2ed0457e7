"""Processes that died: what their files show, what their peers waited for, and when nobody may be named."""

from __future__ import annotations

import pytest

from consensus_checker.check import check
from consensus_checker.finding import Finding
from tests.support.history import history, lanes

KILLED = "0 match:r1=64 events! #stopped\n1 match:r1=64 events! #stopped\n2 match:r1=64 #killed"


def finding_of(text: str, *, pp: int = 1) -> Finding:
    return check(history(text, pp=pp)).finding


def named(text: str) -> tuple[object, ...]:
    finding = finding_of(text)
    return finding.kind, finding.code, finding.culprit, finding.unknown, finding.level


def test_a_rank_whose_log_was_never_closed_while_all_others_were_is_dead() -> None:
    finding = finding_of(KILLED)
    assert (finding.kind, finding.code, finding.rule) == ("dead", 14, "dead")
    assert (finding.culprit, finding.victims, finding.level) == ((2,), (0, 1), "high")
    assert finding.summary == (
        "rank 2 ended in step 0 without closing its log; every other rank closed its own"
    )
    assert finding.victim is not None
    assert (finding.victim.ranks, finding.victim.where) == ((0, 1), "all_reduce tp0/events #0")
    assert [entry.supports for entry in finding.evidence] == ["culprit 2", "victim 0", "victim 1"]


def test_beside_a_rank_without_any_log_who_ended_first_is_only_a_guess() -> None:
    # Rank 3 may have sent too much, and gloo have ended rank 2 for it.
    finding = check(history(KILLED, world_size=4)).finding
    assert (finding.culprit, finding.level, finding.code) == ((2,), "low", 14)
    assert finding.summary == (
        "rank 2 ended in step 0 without closing its log; every other rank that is here closed its own"
    )
    assert [one.summary for one in finding.alternatives][1:] == ["rank 3, without any log, ended first"]


@pytest.mark.parametrize("end", ["#hung", "#crashed"])
def test_peers_of_a_dead_rank_may_hang_or_fail_in_the_call_in_which_they_miss_it(end: str) -> None:
    assert named(KILLED.replace("#stopped", end)) == ("dead", 14, (2,), (), "high")


def test_without_anybody_who_waits_for_it_a_dead_rank_is_less_sure() -> None:
    assert named(KILLED.replace(" events!", "")) == ("dead", 14, (2,), (), "medium")


def test_a_log_that_was_cut_and_closed_says_nothing_of_its_process() -> None:
    assert named(KILLED.replace("#killed", "#cut"))[:3] == ("incomplete", 4, ())
    hung = KILLED.replace("#killed", "#cut").replace("#stopped", "#hung")
    assert named(hung)[:3] == ("undetermined", 20, ())


def test_where_everybody_was_killed_nobody_is_named() -> None:
    assert named(KILLED.replace("#stopped", "#killed"))[:3] == ("incomplete", 4, ())


def test_where_the_others_completed_a_log_without_an_end_is_only_incomplete() -> None:
    assert named("0 match:r1=64\n1 match:r1=64\n2 match:r1=64 #killed")[:3] == ("incomplete", 4, ())


def test_of_several_killed_ranks_those_that_still_waited_were_not_the_first() -> None:
    text = "0 match:r1=64 events! #stopped\n1 match:r1=64 events! #killed\n2 match:r1=64 #killed"
    assert named(text) == ("dead", 14, (2,), (1,), "high")


def test_a_rank_that_failed_by_itself_may_have_had_the_others_killed() -> None:
    text = "0 match:r1=64 #crashed\n1 match:r1=64 events! #killed\n2 match:r1=64 events! #killed"
    finding = finding_of(text)
    assert (finding.rule, finding.victims, finding.culprit) == ("crashed", (0,), ())


def test_a_process_is_alive_while_one_of_its_lanes_was_closed() -> None:
    text = KILLED + "\n2/io state:idle #stopped\n0/io state:idle #stopped\n1/io state:idle #stopped"
    assert finding_of(text).kind != "dead"
    assert finding_of(text.replace("2/io state:idle #stopped", "2/io state:idle #killed")).kind == "dead"


def test_a_death_after_a_divergence_is_where_that_led_to() -> None:
    text = KILLED.replace("2 match:r1=64", "2 match:r1=0")
    finding = finding_of(text)
    assert (finding.code, finding.culprit, finding.consequence) == (10, (2,), ("dead", 14))
    assert finding.victims == (0, 1)


def test_a_killed_rank_in_another_replica_is_another_finding() -> None:
    text = "0 match:r1=64\n1 match:r1=0\n2 match:r9=64 events! #stopped\n3 match:r9=64 #killed"
    verdict = check(lanes(text, dp=2))
    assert [finding.code for finding in (verdict.finding, *verdict.findings)] == [10, 14]


WAITED = "0 match:r1=64 events! #killed\n1 match:r1=64 events! #stopped\n2 match:r1=64 #stopped"


def test_a_single_killed_rank_is_named_wherever_it_stood() -> None:
    assert named(WAITED) == ("dead", 14, (0,), (), "high")


def test_a_single_killed_rank_that_waited_for_one_that_hung_is_not_named() -> None:
    assert named(WAITED.replace("#stopped", "#hung"))[2:] == ((), (0,), "undetermined")


def test_only_the_lane_that_decides_says_that_a_killed_rank_still_waited() -> None:
    text = """
        0           match:r1=64 events! #stopped
        0/prefetch  state:idle #stopped
        1           match:r1=64 events! #killed
        1/prefetch  state:idle #killed
        2           match:r1=64 #killed
        2/prefetch  hits! #killed
    """
    assert named(text)[:4] == ("dead", 14, (2,), (1,))


def test_whoever_waits_for_a_dead_rank_through_others_is_a_victim_too() -> None:
    # Ranks 2 and 3 are the second stage: 3 waits for 2, and 2 for what the dead rank 0 has sent.
    text = """
        0  match:r1=64 send>2! send>2. #killed
        1  match:r1=64 send>3! send>3. events! #hung
        2  match:r1=64 recv<0! #hung
        3  match:r1=64 recv<1! recv<1. main! #hung
    """
    verdict = check(lanes(text, pp=2))
    assert (verdict.finding.kind, verdict.finding.culprit) == ("dead", (0,))
    assert verdict.finding.victims == (1, 2, 3)
    assert {entry.supports for entry in verdict.finding.evidence} == {
        "culprit 0",
        "victim 1",
        "victim 2",
        "victim 3",
    }
    assert verdict.findings == ()


def test_a_crash_begins_with_the_lane_that_the_error_ended() -> None:
    text = """
        0      match:r1=64 events! #stopped
        1      match:r1=64 events! #stopped
        1/io   state:backend=5 | state:idle #crashed
        0/io   state:idle #stopped
    """
    finding = finding_of(text)
    assert (finding.rule, finding.victims) == ("crashed", (1,))
    assert finding.summary == "rank 1 stopped on an error in its io lane, step 1"
    assert finding.victim is not None
    assert finding.victim.where == "crash, io lane of rank 1"
    (entry,) = finding.evidence
    assert (entry.file, entry.record) == ("rank0001.io.000.jsonl", 2)
