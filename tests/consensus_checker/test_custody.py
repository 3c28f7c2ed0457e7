"""A leader is not acquitted by leading: whoever changes a value in its hands is named, whatever the count."""

from __future__ import annotations

from consensus_checker.check import check
from consensus_checker.finding import Finding
from tests.support.history import history

TWO = 2
FOUR = 4


def finding(text: str, *, pp: int) -> Finding:
    return check(history(text, pp=pp)).finding


def test_a_leader_that_goes_by_another_value_than_it_sent_is_named() -> None:
    found = finding(
        """
        0  send>1! send>1.=7  adopt:chain=8  round=2
        1  recv<0! recv<0.=7  send>2! send>2.=7  adopt:chain=7  round=1
        2  recv<1! recv<1.=7  send>3! send>3.=7  adopt:chain=7  round=1
        3  recv<2! recv<2.=7  adopt:chain=7  round=1
        """,
        pp=FOUR,
    )
    assert (found.culprit, found.victims, found.level) == ((0,), (), "high")
    assert "rank 0 sent on another value than it goes by" in found.summary


def test_a_leader_that_sends_one_chain_another_value_is_named_and_not_who_adopted_it() -> None:
    found = finding(
        """
        0  send>2! send>2.=7  adopt:chain=7  round=1
        1  send>3! send>3.=8  adopt:chain=7  round=1
        2  recv<0! recv<0.=7  adopt:chain=7  round=1
        3  recv<1! recv<1.=8  adopt:chain=8  round=2
        """,
        pp=TWO,
    )
    assert (found.culprit, found.victims) == ((1,), (3,))
    assert found.basis[0] == "custody along pp"
    assert [
        (diff.field, diff.majority, dict(diff.values))
        for diff in (found.first_divergence.field_diff if found.first_divergence else ())
    ] == [("writes_agreed", 1, {3: 2})]


def test_a_stage_that_goes_by_another_value_than_it_was_sent_is_named() -> None:
    found = finding(
        """
        0  send>1! send>1.=7  adopt:chain=7  round=1
        1  recv<0! recv<0.=7  send>2! send>2.=8  adopt:chain=8  round=2
        2  recv<1! recv<1.=8  adopt:chain=8  round=2
        """,
        pp=3,
    )
    assert (found.culprit, found.victims) == ((1,), (2,))
    assert "goes by another value than it was sent" in found.summary


def test_where_every_value_left_as_it_came_the_count_decides() -> None:
    found = finding(
        """
        0  send>1! send>1.=7  adopt:chain=7  round=1
        1  recv<0! recv<0.=7  adopt:chain=7  round=2
        """,
        pp=TWO,
    )
    assert (found.culprit, found.basis[0]) == ((1,), "leader pp0")


def test_values_of_an_earlier_step_say_nothing() -> None:
    found = finding(
        """
        0  send>1! send>1.=7  adopt:chain=8  |  round=1
        1  recv<0! recv<0.=7  adopt:chain=7  |  round=2
        """,
        pp=TWO,
    )
    assert found.basis[0] == "leader pp0"
