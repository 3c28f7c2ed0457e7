from __future__ import annotations

import random

import pytest

from hicache.control.chunks import Budget


def test_without_a_limit_everybody_fits() -> None:
    budget = Budget(0, 64)
    assert [budget.take(10), budget.take(160_000)] == [10, 160_000]
    assert not budget.is_spent


def test_a_request_is_charged_whole_pages() -> None:
    """100 tokens are 2 pages of 64, so 128 of 256 are left."""
    budget = Budget(256, 64)
    assert [budget.take(100), budget.take(128)] == [100, 128]
    assert budget.is_spent


def test_who_does_not_fit_is_cut_where_a_page_ends() -> None:
    budget = Budget(300, 64)
    assert budget.take(1_000) == 256
    assert budget.is_spent, "44 tokens are left, less than a page: nobody else is even asked"


def test_who_does_not_fit_takes_what_others_have_left() -> None:
    budget = Budget(256, 64)
    assert [budget.take(60), budget.take(1_000)] == [60, 192]


def test_a_prompt_that_would_fit_by_tokens_but_not_by_pages_is_cut() -> None:
    """130 tokens are 3 pages; a batch of 150 tokens holds 2."""
    budget = Budget(150, 64)
    assert budget.take(130) == 128


def test_nothing_can_be_taken_from_a_spent_budget() -> None:
    budget = Budget(64, 64)
    budget.take(64)
    with pytest.raises(AssertionError, match="nothing to take"):
        budget.take(1)


def test_chunks_of_any_prompt_add_up_and_end_with_pages() -> None:
    chance = random.Random(3)
    for _ in range(500):
        page_tokens = chance.choice([1, 4, 64])
        batch_tokens = chance.randint(page_tokens, 20 * page_tokens)
        tokens = chance.randint(1, 100 * page_tokens)
        done = 0
        while done < tokens:
            taken = Budget(batch_tokens, page_tokens).take(tokens - done)
            assert 0 < taken <= batch_tokens
            done += taken
            assert done == tokens or done % page_tokens == 0
        assert done == tokens
