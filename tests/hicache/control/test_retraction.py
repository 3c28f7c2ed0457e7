from __future__ import annotations

import pytest

from hicache.config import Config
from hicache.control.active import Active
from hicache.control.keys import pack
from hicache.control.retraction import by_worth, kv_tokens_at_end, pages_missing, start_again
from hicache.core import Request
from tests.support.solo import Run, answer, prompt, request, run


def running(rid: str, input_tokens: int, done: int, *, output_tokens: int = 10, slots: int = 0) -> Active:
    own = Request(rid, pack(range(input_tokens)), answer(output_tokens), output_tokens)
    active = Active(own, 0, own.tokens, slots=list(range(slots)))
    active.output_tokens_done = done
    active.decode_steps_left = output_tokens - done
    return active


def test_the_last_token_of_an_answer_has_no_kv() -> None:
    ends = [kv_tokens_at_end(running("a", 8, 0, output_tokens=count)) for count in (0, 1, 2, 10)]
    assert ends == [8, 8, 9, 17]


@pytest.mark.parametrize(
    ("done", "slots", "missing"), [(1, 2, 1), (1, 3, 0), (4, 3, 0), (5, 3, 1), (9, 5, 0)]
)
def test_a_step_needs_a_page_where_its_token_begins_one(done: int, slots: int, missing: int) -> None:
    """Prompt 8, pages of 4: the step behind `done` tokens writes the token at place 8 + done - 1."""
    assert pages_missing([running("a", 8, done, slots=slots)], 4) == [missing]


def test_a_step_that_stands_for_a_whole_answer_needs_all_its_pages() -> None:
    active = running("a", 8, 1, output_tokens=10, slots=2)
    active.decode_steps_left = 1
    assert pages_missing([active], 4) == [3]


def test_who_has_the_shortest_answer_so_far_goes_first() -> None:
    batch = [running("a", 8, 3), running("b", 8, 1), running("c", 8, 2)]
    assert [active.rid for active in by_worth(batch)] == ["a", "c", "b"]


def test_of_equal_answers_the_longer_prompt_goes_first_and_then_who_came_last() -> None:
    batch = [running("a", 8, 2), running("b", 12, 2), running("c", 8, 2), running("d", 4, 2)]
    assert [active.rid for active in by_worth(batch)] == ["d", "a", "c", "b"]


def test_an_answer_so_far_joins_the_prompt() -> None:
    active = running("a", 8, 3)
    start_again(active)
    assert active.tokens == pack(range(8)) + answer(3)
    assert (active.attempt, active.output_tokens_done, active.prompt_tokens) == (1, 3, 11)


def test_an_answer_whose_tokens_are_not_known_is_given_again() -> None:
    active = Active(Request("a", pack(range(8)), b"", 10), 0, pack(range(8)))
    active.output_tokens_done = 3
    start_again(active)
    assert (active.prompt_tokens, active.output_tokens_done) == (8, 0)


# Three answers that together need more than the device has; nothing is set aside for them.
TIGHT = Config(page_size_tokens=4, device_pages=9, decode_reserve_percent=0)
THREE = [request("a", prompt(1, 2), 9), request("b", prompt(3, 4), 14), request("c", prompt(5), 13)]


@pytest.fixture(scope="module")
def tight() -> Run:
    return run(TIGHT, {1: THREE})


def test_a_decode_that_finds_no_page_retracts_whoever_is_worth_least(tight: Run) -> None:
    """All have 4 tokens; a and b have the longer prompts, and b came last."""
    assert tight.column("retract", "rid", "attempt", "output_tokens") == [("b", 0, 4)]


def test_everybody_gets_their_whole_answer_in_the_end(tight: Run) -> None:
    assert sorted(tight.column("finish", "rid", "reason", "output_tokens")) == [
        ("a", "stop", 9),
        ("b", "stop", 14),
        ("c", "stop", 13),
    ]


def test_a_retracted_request_computes_its_prompt_and_its_answer_so_far(tight: Run) -> None:
    (_, again) = tight.column(
        "admit", "device_tokens", "host_tokens", "extend_tokens", rid="b", verdict="admitted"
    )
    assert sum(again) == 9 + 4


def test_nobody_is_admitted_between_a_retraction_and_the_next_end(tight: Run) -> None:
    (retraction,) = tight.of("retract")
    (end, *_) = [row for row in tight.of("finish") if row["seq"] > retraction["seq"]]
    between = [row for row in tight.of("admit") if retraction["seq"] < row["seq"] < end["seq"]]
    assert between == []


def test_no_page_is_wrong_and_none_is_lost_after_a_retraction(tight: Run) -> None:
    assert tight.of("wrong_page") == []
    assert tight.column("pool_audit", "available", "evictable", "protected", "total", pool="device") == [
        (3, 6, 0, 9)
    ]


def test_a_full_reserve_never_retracts() -> None:
    config = Config(page_size_tokens=4, device_pages=9, decode_reserve_percent=100)
    assert run(config, {1: THREE}).of("retract") == []


def test_one_step_for_a_whole_answer_may_retract_as_well() -> None:
    config = Config(page_size_tokens=4, device_pages=9, decode_reserve_percent=0, decode_steps="one")
    found = run(config, {1: THREE})
    assert found.of("retract")
    assert set(found.column("finish", "reason")) == {"stop"}


def test_answers_without_pages_never_retract() -> None:
    config = Config(page_size_tokens=4, device_pages=9, decode_reserve_percent=0, cache_output=False)
    assert run(config, {1: THREE}).of("retract") == []


def test_a_retracted_request_counts_again_for_the_nodes_it_inserts() -> None:
    """Its prompt was counted once by each of its two lives: selective write through backs it up then."""
    config = Config(
        page_size_tokens=4, device_pages=9, decode_reserve_percent=0, write_policy="write_through_selective"
    )
    found = run(config, {1: THREE})
    counted = [row["nodes_counted"] for row in found.of("insert", rid="b") if row["phase"] == "return"]
    assert counted[0] > 0 and any(counted[1:])
    assert found.of("write_backup")
