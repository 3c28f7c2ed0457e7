"""Roots of the wait-for graph."""

from __future__ import annotations

from consensus_checker.graph import roots


def test_the_rank_that_all_wait_for_is_the_root() -> None:
    assert roots({0: [3], 1: [3], 2: [0]}) == [(3,)]


def test_a_circle_is_one_root() -> None:
    assert roots({0: [1], 1: [0], 2: [0]}) == [(0, 1)]


def test_two_independent_waits_have_two_roots() -> None:
    assert roots({0: [1], 2: [3]}) == [(1,), (3,)]


def test_a_long_chain_needs_no_recursion() -> None:
    assert roots({rank: [rank + 1] for rank in range(5000)}) == [(5000,)]


def test_nobody_waits() -> None:
    assert roots({}) == []
