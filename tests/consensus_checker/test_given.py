"""Ranks part in what a call did: it was given different things, which its own record says behind that."""

from __future__ import annotations

import pytest

from consensus_checker.check import check
from consensus_checker.finding import Finding
from tests.support.history import history

EQUAL = "match:r1=64"
SMALL, LARGE = "backup:17=16", "backup:24=144"
OWN, OTHER = "put:r1=17{content=5 tokens=192}", "put:r1=24{content=9 tokens=192}"


def finding(*ranks: str) -> Finding:
    return check(history("\n".join(f"{rank}  {EQUAL}  {text}" for rank, text in enumerate(ranks)))).finding


def test_the_call_around_the_first_difference_says_what_it_was_given() -> None:
    found = finding(f"{SMALL}  {OWN}", f"{LARGE}  {OTHER}", f"{SMALL}  {OWN}")
    assert (found.culprit, found.level) == ((1,), "medium")
    assert found.basis == ("majority 2/3", "the call was given something else")
    assert found.first_divergence is not None and found.first_divergence.call == "write_backup"
    assert found.trigger is not None
    assert (found.trigger.call, found.trigger.fact, found.trigger.values) == (
        "put",
        "content",
        {0: 5, 1: 9, 2: 5},
    )
    assert (
        found.trigger.summary == "the put around it was given other content: 9 on rank 1 and 5 on ranks 0, 2"
    )


def test_so_does_the_record_that_differs_itself() -> None:
    found = finding(OWN, OTHER, OWN)
    assert found.trigger is not None
    assert found.trigger.summary == "it was given other content: 9 on rank 1 and 5 on ranks 0, 2"


def test_in_a_tie_nobody_is_named_for_it() -> None:
    found = finding(f"{SMALL}  {OWN}", f"{LARGE}  {OTHER}")
    assert (found.culprit, found.unknown) == ((), (0, 1))
    assert found.trigger is not None and (found.trigger.rank, found.trigger.values) == (None, {0: 5, 1: 9})


@pytest.mark.parametrize(
    "other",
    [
        # Another length may follow from what was decided before, another request from another order.
        "put:r1=24{content=9 tokens=144}",
        "put:r2=24{content=5 tokens=192}",
        "put:r2=24{content=9 tokens=192}",
        # It was given the same.
        "put:r1=24{content=5 tokens=192}",
        # Not in this step.
        "|  put:r1=24{content=9 tokens=192}",
        "evict:24=1",
        "",
    ],
)
def test_what_may_have_another_reason_explains_nothing(other: str) -> None:
    found = finding(f"{SMALL}  {OWN}", f"{LARGE}  {other}", f"{SMALL}  {OWN}")
    assert (found.culprit, found.trigger) == ((1,), None)
    assert found.basis[-1] == "no local fact in the log explains it"


def test_three_sides_were_not_given_two_things() -> None:
    third = "put:r1=30{content=7 tokens=192}"
    found = finding(f"{SMALL}  {OWN}", f"{LARGE}  {OTHER}", f"backup:30=48  {third}", f"{SMALL}  {OWN}")
    assert found.trigger is None


@pytest.mark.parametrize(
    ("zero", "one"),
    [
        # Left out, one too many, swapped.
        (f"{OWN}  {OTHER}", OTHER),
        (OWN, f"{OTHER}  {OWN}"),
        (f"{OWN}  {OTHER}", f"{OTHER}  {OWN}"),
    ],
)
def test_a_call_that_the_others_make_too_was_not_given_otherwise(zero: str, one: str) -> None:
    found = finding(zero, one, zero)
    assert found.culprit == (1,)
    assert found.trigger is None


def test_values_that_look_alike_in_a_sentence_say_nothing() -> None:
    one, two = (f"put:r1=17{{content={'a' * 40}{last} tokens=192}}" for last in "xy")
    assert finding(one, two, one).trigger is None


def test_a_fact_that_explains_it_goes_before() -> None:
    room, none = "backup:17=16{host_pages_free=5}", "backup:17=0{host_pages_free=0}"
    found = finding(f"{room}  {OWN}", f"{none}  {OTHER}", f"{room}  {OWN}")
    assert found.trigger is not None and found.trigger.fact == "host_pages_free"
