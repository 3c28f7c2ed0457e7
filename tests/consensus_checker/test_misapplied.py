"""Breaking a tie by what the agreed count had to be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from consensus_checker.check import check
from consensus_checker.context import look
from consensus_checker.finding import Finding
from consensus_checker.misapplied import find_misapplied
from tests.support.history import history

BEFORE = "  ".join(f"round?{{hits_ready={count}}}  round=0:{count}  |" for count in (1, 0, 2, 1, 0, 1, 3, 1))
# The same, but that rank 1 counted more in one round, and went by what rank 0 counted.
MORE = BEFORE.replace("hits_ready=2", "hits_ready=4")


def finding(zero: str, one: str, before: str = BEFORE, other: str | None = MORE) -> Finding:
    return check(history(f"\n0  {before}  {zero}\n1  {other or before}  {one}\n")).finding


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
        # Rounds in which all counted alike: the greatest is the least.
        BEFORE,
    ],
)
def test_that_the_least_is_what_counts_must_be_seen_in_the_log(before: str) -> None:
    found = finding("round?{hits_ready=3}  round=0:2", "round?{hits_ready=2}  round=0:1", before, None)
    assert (found.culprit, found.unknown) == ((), (0, 1))


def test_a_rank_that_wrote_no_count_of_its_own_leaves_it_open() -> None:
    found = finding("round?  round=0:2", "round?{hits_ready=2}  round=0:1")
    assert (found.culprit, found.unknown) == ((), (0, 1))


def own_word(last: tuple[str, str]) -> tuple[int, ...] | None:
    """Who is named where two fields of a round differ, each fed by a count."""
    before = MORE.replace("{", "{writes_done=0 ")
    drawn = history(
        f"\n0  {before}  {last[0]}\n1  {before.replace('hits_ready=4', 'hits_ready=2')}  {last[1]}\n"
    )
    feeds = {"hits_ready": "queued", "writes_done": "writes_agreed"}
    kinds = {**drawn.kinds, "event_round": replace(drawn.kinds["event_round"], feeds=feeds)}
    found = find_misapplied(kinds, look(drawn, drawn.scopes[0], "scheduler", 17))
    return found.odd if found is not None else None


def test_fields_that_accuse_different_ranks_accuse_nobody() -> None:
    right = "round?{writes_done=2 hits_ready=2}  round=1:2"
    other = "round?{writes_done=1 hits_ready=3}  "
    assert own_word((right, other + "round=0:1")) == (1,)
    # Rank 0 went by another count of writes, rank 1 of hits.
    assert own_word((right.replace("=1:", "=2:"), other + "round=1:3")) is None
    # Of the hits both did.
    assert own_word((right.replace(":2", ":1"), other + "round=0:0")) is None
