"""What was always done before, against what most ranks do now."""

from __future__ import annotations

from consensus_checker.check import check
from consensus_checker.finding import Finding
from tests.support.history import history

ROUND = "round?{writes_done=0} events! events. round=0 | "
SKIPS = "round?{writes_done=0} round=0 main! #hung"
ENTERS = "round?{writes_done=1} events! #hung"


def finding_of(*last: str, rounds: int = 4) -> Finding:
    return check(
        history("\n".join(f"{rank}  {ROUND * rounds}{text}" for rank, text in enumerate(last)))
    ).finding


def test_a_majority_that_does_what_was_never_done_accuses_nobody() -> None:
    finding = finding_of(SKIPS, SKIPS, ENTERS, SKIPS)
    assert (finding.code, finding.culprit, finding.unknown, finding.level) == (
        10,
        (),
        (0, 1, 2, 3),
        "undetermined",
    )
    assert finding.basis == ("majority 3/4", "precedent 4 rounds against it")
    assert [entry.summary for entry in finding.alternatives[:2]] == [
        "ranks 0-1, 3 did what was never done before: event round (call) was followed by enter events "
        "(tp all_reduce) 4 times before, never by what the others did",
        "rank 2 left the majority (3/4)",
    ]


def test_one_precedent_is_enough_to_take_an_accusation_back() -> None:
    assert finding_of(SKIPS, SKIPS, ENTERS, SKIPS, rounds=1).culprit == ()


def test_a_majority_that_does_what_was_always_done_is_confirmed() -> None:
    finding = finding_of(ENTERS, ENTERS, SKIPS, ENTERS)
    assert (finding.culprit, finding.basis[:2]) == ((2,), ("majority 3/4", "precedent 4 rounds"))


def test_a_tie_goes_against_the_side_that_does_what_was_never_done() -> None:
    finding = finding_of(ENTERS, SKIPS, ENTERS, SKIPS)
    assert (finding.culprit, finding.level, finding.basis[:2]) == (
        (1, 3),
        "medium",
        ("tie 2:2", "precedent 4 rounds"),
    )
    assert finding.summary.startswith("ranks 1, 3 did what was never done before, at call 17 (event round)")


def test_the_larger_numbers_do_not_matter_in_a_tie() -> None:
    finding = finding_of(SKIPS, ENTERS, SKIPS, ENTERS)
    assert finding.culprit == (0, 2)


def test_two_precedents_name_nobody_in_a_tie() -> None:
    finding = finding_of(ENTERS, SKIPS, ENTERS, SKIPS, rounds=2)
    assert (finding.culprit, finding.unknown) == ((), (0, 1, 2, 3))


def test_what_was_done_both_ways_before_is_no_precedent() -> None:
    both = ROUND * 3 + "round?{writes_done=0} round=0 | "
    text = "\n".join(f"{rank}  {both}{last}" for rank, last in enumerate((SKIPS, SKIPS, ENTERS)))
    finding = check(history(text)).finding
    assert (finding.culprit, finding.basis[0]) == ((2,), "majority 2/3")


def test_a_log_that_ended_is_no_shape() -> None:
    begun = "match:r1=1 evict:1=1 " * 4
    text = f"0  {begun} match:r1=1 evict:1=1\n1  {begun} match:r1=1\n2  {begun} match:r1=1"
    assert check(history(text)).finding.culprit == (0,)


def test_a_skipped_collective_needs_an_empty_container_on_those_who_stay_away() -> None:
    assert finding_of(ENTERS, ENTERS, SKIPS, ENTERS).resembles == ("HC01",)
    busy = SKIPS.replace("writes_done=0", "writes_done=2")
    assert finding_of(ENTERS, ENTERS, busy, ENTERS).resembles == ()


def test_a_meeting_of_one_purpose_by_another_operation_is_another_shape() -> None:
    # The skipped reduction and the message to the next stage have one purpose.
    begun = "round? chain! chain. recv<9! recv<9. round=0 | " * 4
    text = f"0 {begun} round? chain! #hung\n1 {begun} round? recv<9! #hung"
    finding = check(history(text)).finding
    assert (finding.culprit, finding.basis) == (
        (1,),
        ("tie 1:1", "precedent 4 rounds", "no local fact in the log explains it"),
    )


POLLED = "finish:r9=1 admit:r1=1 | "
# Polled, as never before after a finish, which three ranks of four do.
POLLS = "finish:r9=1 poll:r1=wait admit:r1=1 match:r8=1"
ADMITS = "finish:r9=1 admit:r1=1 match:r8=1"


def test_a_vote_of_the_replica_goes_before_a_precedent_in_one_stage() -> None:
    text = "\n".join(f"{rank}  {POLLED * 3}{last}" for rank, last in enumerate((POLLS, POLLS, POLLS, ADMITS)))
    verdict = check(history(text, pp=2))
    finding = verdict.finding
    assert finding.first_divergence is not None
    assert (finding.culprit, finding.first_divergence.scope, finding.basis[:2]) == (
        (3,),
        "dp0",
        ("majority 3/4", "precedent 3 rounds against it"),
    )
    assert verdict.findings == ()


def test_which_decision_came_next_before_accuses_nobody_in_a_tie_of_two() -> None:
    text = "\n".join(f"{rank}  {POLLED * 3}{last}" for rank, last in enumerate((POLLS, ADMITS)))
    assert check(history(text)).finding.culprit == ()


def test_a_tie_in_a_stage_is_settled_by_the_replicas_vote_in_the_same_step() -> None:
    # The second stage alone compares meetings, and sees rank 2 part first.
    good = "match:r1=1 | main! main. events! events. match:r2=1 | match:r3=1"
    bad = "match:r1=1 | events! events. match:r2=0 | match:r3=1"
    text = f"0 {good}\n1 {good}\n2 {bad}\n3 {good}"
    verdict = check(history(text, pp=2))
    assert (verdict.finding.culprit, verdict.finding.basis[0]) == ((2,), "majority 3/4")
    assert [finding.culprit for finding in verdict.findings] == []
