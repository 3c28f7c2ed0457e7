"""Who waits for whom, and who may be blamed for it."""

from __future__ import annotations

import pytest

from consensus_checker.check import check
from consensus_checker.finding import Finding
from tests.support.history import history, lanes


def finding_of(text: str, *, pp: int = 1, world_size: int | None = None) -> Finding:
    return check(history(text, pp=pp, world_size=world_size)).finding


def test_a_rank_that_completed_is_never_the_one_that_did_not_join() -> None:
    finding = finding_of("0 match:r1=1\n1 match:r1=1\n2 match:r1=1\n3 match:r1=1 events! #hung")
    assert (finding.code, finding.culprit) == (10, (3,))
    assert finding.first_divergence is not None
    assert finding.first_divergence.kind == "extra"


def test_one_completed_and_one_that_waits_are_a_tie() -> None:
    finding = finding_of("0 match:r1=1\n1 match:r1=1 events! #hung")
    assert (finding.culprit, finding.unknown, finding.level) == ((), (0, 1), "undetermined")


def test_a_wait_across_stages_for_ranks_that_completed_accuses_none_of_them() -> None:
    finding = finding_of("0 match:r1=1\n1 match:r1=1 recv<0! #hung", pp=2)
    assert (finding.kind, finding.code, finding.culprit, finding.unknown) == ("undetermined", 20, (), (0, 1))


def test_most_members_of_a_group_that_completed_make_the_waiting_rank_odd() -> None:
    drawn = lanes("0 match:r1=1\n1 match:r1=1\n2 match:r1=1 recv<0! #hung", pp=3)
    # A group over all three stages, which no scope compares.
    for record in drawn[2].entries[-1:]:
        record.update(group="pp/all", op="all_reduce", peer=None)  # type: ignore[attr-defined]
    drawn[2].header["groups"]["pp/all"] = [0, 1, 2]
    finding = check(drawn).finding
    assert (finding.code, finding.culprit, finding.level) == (11, (2,), "medium")


def test_a_shutdown_in_the_middle_of_a_vote_is_no_difference() -> None:
    text = "0 match:r1=1 round? events!\n1 match:r1=1 round? events!\n2 match:r1=1"
    assert check(history(text)).kind == "consistent"


def test_own_decisions_before_a_vote_are_a_difference_even_at_a_shutdown() -> None:
    text = "0 match:r1=1 evict:3=1 events!\n1 match:r1=1 evict:3=1 events!\n2 match:r1=1"
    finding = finding_of(text)
    assert (finding.code, finding.culprit) == (10, (2,))


@pytest.mark.parametrize(
    ("end", "silence"),
    [("#cut", "left no whole log"), ("#stopped", "stopped before")],
    ids=["cut", "stopped"],
)
def test_nobody_knows_whether_a_rank_with_an_early_end_joined(end: str, silence: str) -> None:
    finding = finding_of(f"0 match:r1=1 events! #hung\n1 match:r1=1 events! #hung\n2 match:r1=1 {end}")
    assert (finding.kind, finding.code, finding.culprit, finding.unknown) == ("undetermined", 20, (), (2,))
    assert finding.summary == f"ranks 0-1 hung in all_reduce tp0/events #0, and rank 2 {silence}"


def test_a_rank_that_did_not_join_is_less_sure_where_another_left_no_log() -> None:
    finding = finding_of(
        "0 match:r1=1 events! #hung\n1 match:r1=1 events! #hung\n2 match:r1=1 #hung", world_size=4
    )
    assert (finding.code, finding.culprit, finding.silent, finding.level) == (11, (2,), (3,), "medium")


def test_stopped_logs_without_a_finding_are_incomplete() -> None:
    verdict = check(history("0 match:r1=1 #stopped\n1 match:r1=1"))
    assert (verdict.kind, verdict.code) == ("incomplete", 4)
    assert "rank 0 stopped before the end" in verdict.finding.summary


def test_a_call_that_some_members_have_left_is_not_one_that_none_left() -> None:
    finding = finding_of("0 events! #hung\n1 events! events. #hung\n2 events! events. #hung")
    assert (finding.kind, finding.code, finding.unknown) == ("undetermined", 20, (0,))
    assert finding.summary == "ranks 1-2 left all_reduce tp0/events #0, and rank 0 did not"


def test_two_receives_that_face_each_other_are_not_joined() -> None:
    finding = finding_of("0 recv<1! #hung\n1 recv<0! #hung", pp=2)
    assert (finding.code, finding.culprit, finding.unknown) == (11, (), (0, 1))
    assert finding.summary.startswith("ranks 0-1 wait for each other")


def test_a_meeting_whose_leave_was_lost_is_not_waited_in() -> None:
    finding = finding_of("0 main! events! #hung\n1 main! events! #hung\n2 main! #hung")
    assert (finding.culprit, finding.victims) == ((2,), (0, 1))
    frozen = finding_of("0 events! match:r1=1 #hung\n1 events! match:r1=1 #hung")
    assert (frozen.kind, frozen.code) == ("frozen", 15)


TWO_REPLICAS = """
    0  match:r1=64 events! #hung
    1  match:r1=0  #hung
    2  match:r9=64 events! #hung
    3  match:r9=64 #hung
"""


def test_a_stall_in_another_replica_is_not_a_divergences_consequence() -> None:
    verdict = check(history(TWO_REPLICAS, dp=2))
    assert verdict.finding.first_divergence is not None
    assert verdict.finding.first_divergence.scope == "dp0"
    assert verdict.finding.victim is not None
    assert verdict.finding.victim.ranks == (0,)
    (other,) = verdict.findings
    assert (other.code, other.culprit, other.victims) == (11, (3,), (2,))


def test_a_divergence_without_a_stall_of_its_own_has_none() -> None:
    text = TWO_REPLICAS.replace("events! #hung\n    1", "\n    1").replace("r1=0  #hung", "r1=0")
    verdict = check(history(text, dp=2))
    assert (verdict.finding.code, verdict.finding.consequence) == (10, None)
    assert [finding.culprit for finding in verdict.findings] == [(3,)]


def test_only_lanes_that_say_so_have_crashed() -> None:
    finding = finding_of(
        "0 match:r1=1 events! #crashed\n1 match:r1=1 #stopped\n2 match:r1=1 events! #stopped"
    )
    assert (finding.rule, finding.victims, finding.culprit) == ("crashed", (0,), ())


def test_where_all_logs_say_crashed_only_who_was_outside_is_told() -> None:
    text = "0 match:r1=1 events! #crashed\n1 match:r1=1 #crashed\n2 match:r1=1 events! #crashed"
    finding = finding_of(text)
    assert (finding.rule, finding.victims, finding.level) == ("crashed", (1,), "low")
    assert finding.summary == "every rank's log says crashed, and rank 1 was not in a collective"
    alike = finding_of("0 match:r1=1 #crashed\n1 match:r1=1 #crashed")
    assert (alike.victims, alike.unknown, alike.level) == ((), (0, 1), "low")


def test_a_wrong_page_on_several_ranks_names_all_of_them_as_victims() -> None:
    finding = finding_of("0 match:r1=1 wrong_page\n1 match:r1=1\n2 match:r1=1 wrong_page")
    assert (finding.rule, finding.culprit, finding.victims) == ("wrong_page", (), (0, 2))
