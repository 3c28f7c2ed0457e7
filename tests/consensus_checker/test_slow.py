"""Runs that went on, and were slow by their own measure when their logs end."""

from __future__ import annotations

from consensus_checker.finding import Finding
from consensus_checker.history import History
from consensus_checker.slow import slow
from tests.support.hearts import Pauses, beating

# Four records a step: a decision, a vote, and what follows.
STEP = "match:r1=64 events! events. admit:r1=1 | "
STEPS = 40
RECORDS = 4


def run(pauses: Pauses) -> Finding | None:
    text = "\n".join(f"{rank} {STEP * STEPS}#killed" for rank in range(3))
    return slow(History.of(beating(text, {}, pauses=pauses)))


def last(count: int, record: int, seconds: float) -> dict[int, float]:
    """A pause before the given record of each of the last steps that are there in full."""
    return {step * RECORDS + record: seconds for step in range(STEPS - 1 - count, STEPS)}


def test_a_rank_that_is_slow_outside_of_meetings_is_what_the_others_wait_for() -> None:
    waits = {(rank, "scheduler"): last(5, 3, 2.0) for rank in (0, 1)}
    finding = run({**waits, (2, "scheduler"): last(5, 2, 2.0)})
    assert finding is not None
    assert (finding.kind, finding.code, finding.rule) == ("slow", 17, "slow")
    assert (finding.culprit, finding.victims, finding.level) == ((2,), (0, 1), "medium")
    assert finding.summary == (
        "the last 5 steps took 2 s each, 51 times as long as usual; the others wait for rank 2"
    )


def test_where_all_ranks_are_slow_alike_nobody_is_named() -> None:
    finding = run({(rank, "scheduler"): last(5, 2, 2.0) for rank in range(3)})
    assert finding is not None
    assert (finding.culprit, finding.unknown, finding.level) == ((), (0, 1, 2), "low")


def test_one_slow_step_is_none() -> None:
    assert run({(rank, "scheduler"): last(1, 2, 2.0) for rank in range(3)}) is None


def test_a_run_that_was_slow_before_and_is_not_any_more_is_fine() -> None:
    assert run({(rank, "scheduler"): {9: 30.0, 60: 30.0} for rank in range(3)}) is None


def test_a_run_that_was_always_as_slow_is_its_own_measure() -> None:
    always = {step * RECORDS + 2: 2.0 for step in range(STEPS)}
    assert run({(rank, "scheduler"): always for rank in range(3)}) is None


def test_too_few_steps_say_nothing() -> None:
    text = "\n".join(f"{rank} {STEP * 10}#killed" for rank in range(3))
    assert slow(History.of(beating(text, {}))) is None
