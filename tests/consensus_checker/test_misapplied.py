"""Breaking a tie by what the agreed count had to be."""

from __future__ import annotations

import pytest

from consensus_checker.check import check
from consensus_checker.finding import Finding
from tests.support.history import history

BEFORE = "  ".join(f"round?{{hits_ready={count}}}  round=0:{count}  |" for count in (1, 0, 2, 1, 0, 1, 3, 1))


def finding(zero: str, one: str, before: str = BEFORE) -> Finding:
    return check(history(f"\n0  {before}  {zero}\n1  {before}  {one}\n")).finding


def test_the_rank_that_went_by_less_than_the_least_count_is_odd() -> None:
    found = finding("round?{hits_ready=3}  round=0:2", "round?{hits_ready=2}  round=0:1")
    assert (found.culprit, found.level) == ((1,), "medium")
    assert found.basis == (
        "not the least count, against tie 1:1",
        "rank 1 went by 1, the least hits_ready was 2",
    )
    assert found.trigger is not None
    assert (found.trigger.rank, found.trigger.fact, found.trigger.values) == (1, "hits_ready", {0: 3, 1: 2})


def test_so_is_one_that_went_by_its_own() -> None:
    found = finding("round?{hits_ready=3}  round=0:3", "round?{hits_ready=2}  round=0:2")
    assert (found.culprit, found.basis[0]) == ((0,), "not the least count, against tie 1:1")


def test_where_both_went_by_something_else_nobody_is_named() -> None:
    found = finding("round?{hits_ready=3}  round=0:1", "round?{hits_ready=2}  round=0:0")
    assert (found.culprit, found.unknown) == ((), (0, 1))


@pytest.mark.parametrize(
    "before",
    [
        # Too few rounds to know that the least is what is agreed on, or rounds in which it was not.
        "round?{hits_ready=1}  round=0:1  |",
        BEFORE.replace("round=0:3", "round=0:1"),
    ],
)
def test_that_the_least_is_what_counts_must_be_seen_in_the_log(before: str) -> None:
    found = finding("round?{hits_ready=3}  round=0:2", "round?{hits_ready=2}  round=0:1", before)
    assert (found.culprit, found.unknown) == ((), (0, 1))


def test_a_rank_that_wrote_no_count_of_its_own_leaves_it_open() -> None:
    found = finding("round?  round=0:2", "round?{hits_ready=2}  round=0:1")
    assert (found.culprit, found.unknown) == ((), (0, 1))
