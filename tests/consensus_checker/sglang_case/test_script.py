"""Steps of a scheduler, read out of the records of its functions."""

from __future__ import annotations

from consensus_checker.sglang_case.script import script_of
from tests.support.server_log import (
    arrival,
    event_round,
    finish,
    flush,
    joined,
    match,
    poll,
    prefill,
    run_of_two,
)

Names = list[str]


def names(records: list[dict[str, object]], *, has_storage: bool = True) -> Names:
    script = script_of(records, has_storage=has_storage)
    assert script.stop is None
    return [" ".join(filter(None, step.name)) for step in script.steps]


def test_each_record_that_ends_a_step_says_what_it_was() -> None:
    assert names(run_of_two()) == [
        "round",
        "arrive r1",
        "round",
        "poll r1",
        "round",
        "match r1",
        "prefill r1",
        "flush",
        "arrive r2",
        "round",
        "poll r2",
        "finish r1",
        "round",
    ]


def test_a_round_takes_what_was_agreed_on_in_it() -> None:
    (step,) = script_of(event_round(1, writes=2, hits=3), has_storage=True).steps
    assert step.more == {"agreed": [2, 0, 3, 0, 0, 0], "done": [2, 0]}


def test_a_later_stage_goes_by_the_counts_that_it_is_sent() -> None:
    call, back = event_round(1, writes=2)
    (step,) = script_of([call, {**back, "writes_done": None, "loads_done": None}], has_storage=True).steps
    assert step.more == {"agreed": [2, 0, 0, 0, 0, 0], "done": [2, 0]}


def test_without_a_store_a_request_is_first_seen_where_it_is_admitted() -> None:
    request = arrival("r1", 0)[0]
    records = joined(event_round(1), request, match("r1"), prefill("r1"))
    assert names(records, has_storage=False) == ["round", "arrive r1", "match r1", "prefill r1"]


def test_only_the_look_before_its_prefill_admits_a_request() -> None:
    records = joined(
        arrival("r1", 0), event_round(1), match("r1"), event_round(2), match("r1"), prefill("r1")
    )
    looks = [step.more for step in script_of(records, has_storage=True).steps if step.do == "match"]
    assert looks == [{"admit": False}, {"admit": True}]


def test_a_look_that_is_due_again_is_a_part_of_the_round() -> None:
    again = [match("r1"), arrival("r1", 0)[2], {"kind": "prefetch_retry", "rid": "r1", "cause": "due"}]
    records = joined(arrival("r1", 0), event_round(1), again, poll("r1"))
    assert names(records) == ["arrive r1", "round", "poll r1"]


def test_what_a_round_sends_off_by_itself_is_no_step() -> None:
    call, back = event_round(2)
    assert names(joined(event_round(1), call, flush(3), back)) == ["round", "round"]


def test_an_allocation_behind_a_round_belongs_to_what_comes_next() -> None:
    script = script_of(joined(event_round(1), prefill("r1")), has_storage=True)
    assert [(step.do, step.begin, step.end) for step in script.steps] == [("round", 0, 1), ("prefill", 2, 8)]


def test_a_step_that_no_test_can_take_ends_the_script_and_is_named() -> None:
    retracted = {"kind": "retract", "rid": "r1", "output_tokens": 3}
    script = script_of(joined(event_round(1), retracted, event_round(2)), has_storage=True)
    assert ([step.do for step in script.steps], script.stop) == (["round"], (2, "a request was retracted"))


def test_a_prompt_that_is_computed_in_parts_is_named_too() -> None:
    parts = prefill("r1")
    parts[2] = {**parts[2], "tokens": 16}
    script = script_of(joined(arrival("r1", 0), match("r1"), parts, finish("r1")), has_storage=True)
    assert script.stop is not None
    assert script.stop[1] == "a prompt was computed in parts"
