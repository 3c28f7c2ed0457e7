"""Breaking a tie by the room that a refused rank had."""

from __future__ import annotations

import pytest

from consensus_checker.check import check
from consensus_checker.finding import Finding
from consensus_checker.refused_with_room import find_refusal
from tests.support.history import history
from tracer.record import Kind

ALLOC = Kind(
    "alloc_host",
    "decision",
    agree=("tp",),
    compared=("pages_wanted", "pages"),
    local=("host_pages_free", "rows_free"),
    result="pages",
    needs={"host_pages_free": "pages_wanted", "rows_free": "pages_wanted"},
)


def finding(text: str) -> Finding:
    return check(history(text)).finding


def test_the_rank_that_was_refused_although_it_had_room_is_the_odd_one() -> None:
    found = finding("""
        0  match:r1=64  backup:7=64{host_pages_free=5}
        1  match:r1=64  backup:7=0{host_pages_free=5}
    """)
    assert (found.culprit, found.level) == ((1,), "medium")
    assert found.basis == (
        "refused with room, against tie 1:1",
        "rank 1 had host_pages_free 5, needed 1",
    )
    assert found.summary == (
        "rank 1 was refused what it had room for, at call 1 (write backup), step 0, scope dp0: "
        "tokens 0 instead of 64"
    )
    assert found.trigger is not None
    assert (found.trigger.rank, found.trigger.fact, found.trigger.need) == (1, "host_pages_free", 1)
    assert found.trigger.summary == "rank 1 had host_pages_free 5, needed 1, and got nothing"


def test_it_is_odd_also_where_the_other_had_to_make_room_first() -> None:
    found = finding("""
        0  backup:7=0{host_pages_free=5}
        1  backup:7=64{host_pages_free=0}
    """)
    assert found.culprit == (0,)


def test_a_rank_that_lacked_room_follows_from_what_it_had_and_the_tie_stays() -> None:
    found = finding("""
        0  backup:7=64{host_pages_free=5}
        1  backup:7=0{host_pages_free=0}
    """)
    assert (found.culprit, found.unknown, found.basis[0]) == ((), (0, 1), "tie 1:1")
    assert found.trigger is not None
    assert (found.trigger.fact, found.trigger.rank) == ("host_pages_free", None)


def test_two_that_were_refused_with_room_against_two_that_were_not_are_both_odd() -> None:
    found = finding("""
        0  backup:7=64{host_pages_free=5}
        1  backup:7=0{host_pages_free=4}
        2  backup:7=64{host_pages_free=5}
        3  backup:7=0{host_pages_free=5}
    """)
    assert (found.culprit, found.basis[0]) == ((1, 3), "refused with room, against tie 2:2")
    assert found.summary.startswith("ranks 1, 3 were refused what they had room for, at call 0")


def test_one_of_two_refused_that_lacked_room_leaves_it_open() -> None:
    found = finding("""
        0  backup:7=64{host_pages_free=5}
        1  backup:7=0{host_pages_free=5}
        2  backup:7=64{host_pages_free=5}
        3  backup:7=0{host_pages_free=0}
    """)
    assert (found.culprit, found.level) == ((), "undetermined")


def test_a_majority_needs_no_such_evidence() -> None:
    found = finding("""
        0  backup:7=64{host_pages_free=5}
        1  backup:7=0{host_pages_free=5}
        2  backup:7=0{host_pages_free=5}
    """)
    assert (found.culprit, found.basis[0]) == ((0,), "majority 2/3")


def test_a_decision_taken_again_goes_before_it() -> None:
    text = "0 backup:7=64{host_pages_free=5}\n1 backup:7=0{host_pages_free=5}"
    found = check(history(text), reenact=lambda question: {0: False, 1: True}).finding
    assert (found.culprit, found.basis[0]) == ((0,), "reenact, against tie 1:1")
    found = check(history(text), reenact=lambda question: {0: True, 1: True}).finding
    assert (found.culprit, found.basis[0]) == ((), "tie 1:1")


@pytest.mark.parametrize(
    "own",
    [
        {"pages_wanted": 2, "pages": 0, "host_pages_free": 9},
        {"pages_wanted": 2, "pages": 0, "host_pages_free": 9, "rows_free": None},
        {"pages_wanted": 2, "pages": 0, "host_pages_free": 9, "rows_free": 1},
        {"pages_wanted": 3, "pages": 0, "host_pages_free": 9, "rows_free": 9},
        {"pages_wanted": 2, "pages": None, "host_pages_free": 9, "rows_free": 9},
        {"pages_wanted": 2, "pages": 1, "host_pages_free": 9, "rows_free": 9},
    ],
    ids=["unknown", "null", "other need unmet", "another need", "no result", "a part"],
)
def test_nothing_is_said_where_the_record_does_not_say_it(own: dict[str, int | None]) -> None:
    other = {"pages_wanted": 2, "pages": 2, "host_pages_free": 9, "rows_free": 9}
    records = {rank: {"kind": "alloc_host", "step": 3, **one} for rank, one in enumerate((other, own))}
    assert find_refusal({"alloc_host": ALLOC}, records) is None


def test_every_declared_need_is_told() -> None:
    got = {"kind": "alloc_host", "step": 3, "pages_wanted": 2, "host_pages_free": 9, "rows_free": 4}
    found = find_refusal({"alloc_host": ALLOC}, {0: {**got, "pages": 2}, 1: {**got, "pages": 0}})
    assert found is not None
    assert (found.odd, found.others) == ((1,), (0,))
    assert found.text == "rank 1 had host_pages_free 9, needed 2; rows_free 4, needed 2"


def test_a_rank_whose_log_ends_before_is_not_judged() -> None:
    got = {"kind": "alloc_host", "step": 3, "pages_wanted": 2, "pages": 0, "host_pages_free": 9}
    assert find_refusal({"alloc_host": ALLOC}, {0: None, 1: {**got, "rows_free": 9}}) is None
