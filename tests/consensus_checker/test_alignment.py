"""The five ways in which two sequences part, on bare keys."""

from __future__ import annotations

from consensus_checker.rules.agreement import Key
from consensus_checker.rules.alignment import classify

MEETINGS = frozenset({"meeting"})
A: Key = ("a", None, 1)
B: Key = ("b", None, 1)
C: Key = ("c", None, 1)
MEET: Key = ("meeting", "enter", "events")


def test_one_kind_with_two_results_is_a_value() -> None:
    assert classify([A, B], [("a", None, 2), B], MEETINGS) == "value"


def test_one_more_call_before_going_on_alike_is_missing_or_extra() -> None:
    assert classify([A, B, C], [B, C], MEETINGS) == "missing"
    assert classify([B, C], [A, B, C], MEETINGS) == "extra"


def test_a_hang_right_after_the_missing_call_is_enough_to_see_it() -> None:
    assert classify([A, MEET], [MEET], MEETINGS) == "missing"


def test_a_meeting_against_anything_is_collective() -> None:
    assert classify([MEET], [A, B], MEETINGS) == "collective"
    assert classify([A, B], [MEET], MEETINGS) == "collective"
    assert classify([MEET], [("meeting", "enter", "main")], MEETINGS) == "collective"


def test_one_record_alike_far_away_proves_nothing() -> None:
    assert classify([MEET], [A, B, C, MEET], MEETINGS) == "collective"


def test_a_closed_log_is_an_end() -> None:
    assert classify([A], [], MEETINGS) == "missing"
    assert classify([], [A], MEETINGS) == "extra"


def test_anything_else_is_order() -> None:
    assert classify([A, B], [B, A], MEETINGS) == "order"
