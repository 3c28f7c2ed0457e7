"""Where two ranks' logs part, and what a test has to do otherwise on one of them."""

from __future__ import annotations

from typing import Any

import pytest

from consensus_checker import sglang_kinds
from consensus_checker.sglang_case.parting import Parting, parting
from tests.support.server_log import (
    Record,
    arrival,
    event_round,
    flush,
    joined,
    match,
    poll,
    prefill,
    run_of_two,
)
from tracer.record import Kind

COMPARED = {
    kind.name: kind.compared for kind in vars(sglang_kinds).values() if isinstance(kind, Kind) and kind.agree
}


def found(ours: list[Record], theirs: list[Record]) -> Parting:
    parted = parting((0, ours), (1, theirs), COMPARED, has_storage=True)
    assert parted is not None
    return parted


def odd_steps(parted: Parting) -> list[Any]:
    return [(index, step["odd"]) for index, step in enumerate(parted.steps) if "odd" in step]


def test_logs_that_are_alike_do_not_part() -> None:
    assert parting((0, run_of_two()), (1, run_of_two()), COMPARED, has_storage=True) is None


def test_what_may_differ_does_not_part_them() -> None:
    other = [{**record, "host_pages_free": 3} for record in run_of_two()]
    assert parting((0, run_of_two()), (1, other), COMPARED, has_storage=True) is None


def test_a_refused_allocation_is_refused_again() -> None:
    before = joined(event_round(1), arrival("r1", 0), match("r1"))
    parted = found(joined(before, prefill("r1")), joined(before, prefill("r1", pages=0)))
    assert parted.call == ("alloc_host", "alloc_host")
    assert parted.cause == "rank 1: the host pool refused 2 pages"
    assert odd_steps(parted) == [(3, {"1": {"refuse_host_alloc": 0}})]


def test_a_refusal_on_the_rank_that_was_held_for_right_is_its_own() -> None:
    before = joined(event_round(1), arrival("r1", 0), match("r1"))
    parted = found(joined(before, prefill("r1", pages=0)), joined(before, prefill("r1")))
    assert odd_steps(parted) == [(3, {"0": {"refuse_host_alloc": 0}})]


def test_a_refusal_of_which_the_rank_died_is_made_in_the_step_that_it_did_not_end() -> None:
    before = joined(event_round(1), arrival("r1", 0), match("r1"))
    refused = {**prefill("r1")[0], "pages": 0}
    parted = found(joined(before, prefill("r1")), joined(before, refused))
    assert parted.call == ("alloc", "alloc")
    assert parted.cause == "rank 1: the device's pool refused 3 pages"
    assert odd_steps(parted) == [(3, {"1": {"refuse_alloc": 0}})]


def test_lower_counts_than_were_agreed_on_are_gone_by_again() -> None:
    before = joined(event_round(1), arrival("r1", 0))
    call, back = event_round(2, writes=1, hits=1)
    parted = found([*before, call, back], [*before, call, {**back, "writes_agreed": 0}])
    assert odd_steps(parted) == [(2, {"1": {"counts": [0, 0, 1, 0, 0]}})]


def test_a_prefetch_that_was_not_asked_for_is_left_out() -> None:
    parted = found(
        joined(event_round(1), arrival("r1", 0)), joined(event_round(1), arrival("r1", 0, outcome="ongoing"))
    )
    assert odd_steps(parted) == [(1, {"1": {"skip_prefetch": 0}})]


def test_other_tokens_are_inserted_again_behind_what_both_trees_had() -> None:
    before = joined(event_round(1), arrival("r1", 0), match("r1"))
    ours, theirs = prefill("r1"), prefill("r1", content="other")
    # The tree has split a node for it, and asked for less: that is written first.
    theirs[3] = {**theirs[3], "pages_wanted": 1, "pages": 1}
    theirs[5] = {**theirs[5], "prefix_tokens": 16}
    ours[5] = {**ours[5], "prefix_tokens": 32}
    parted = found(joined(before, ours), joined(before, theirs))
    assert parted.call == ("alloc_host", "alloc_host")
    assert odd_steps(parted) == [(3, {"1": {"other_token": [0, 16]}})]


def test_a_write_that_goes_off_in_a_backup_goes_off_there_again() -> None:
    before = joined(event_round(1), arrival("r1", 0), match("r1"))
    ours = prefill("r1")
    parted = found(joined(before, ours), joined(before, ours[:4], flush(2), ours[4:]))
    assert parted.call == ("write_backup", "transfer_enqueue")
    assert odd_steps(parted) == [(3, {"1": {"flush_in_backup": 0}})]


def test_a_page_that_is_missing_is_taken_from_the_step_on_in_which_it_was_first_missed() -> None:
    evict = {"kind": "evict", "pages_wanted": 2, "pages_freed": 2}
    before = joined(event_round(1), arrival("r1", 0), match("r1"))
    ours = joined(before, prefill("r1", room=10), event_round(2), evict, prefill("r2"))
    theirs = joined(
        before, prefill("r1", room=9), event_round(2), {**evict, "pages_wanted": 3}, prefill("r2")
    )
    parted = found(ours, theirs)
    assert parted.call == ("evict", "evict")
    assert parted.cause == "rank 1: of the device's pool 1 pages were missing"
    assert odd_steps(parted) == [(3, {"1": {"hold_pages": 1}})]


def test_one_that_nobody_has_missed_yet_is_seen_by_what_is_asked_for_instead() -> None:
    evict = {"kind": "evict", "pages_wanted": 2, "pages_freed": 2}
    before = joined(event_round(1), arrival("r1", 0), match("r1"), prefill("r1", room=10), event_round(2))
    ours = joined(before, evict, prefill("r2"))
    theirs = joined(before, {**evict, "pages_wanted": 4}, prefill("r2"))
    parted = found(ours, theirs)
    assert parted.cause == "rank 1: of the device's pool 2 pages were missing"
    assert odd_steps(parted) == [(5, {"1": {"hold_pages": 2}})]
    # On the other rank, if that asks for more.
    assert found(theirs, ours).cause == "rank 0: of the device's pool 2 pages were missing"


def test_another_order_of_waiting_is_that_in_which_the_rank_looks_next() -> None:
    before = joined(event_round(1), arrival("r1", 0), arrival("r2", 1))
    ours = joined(before, event_round(2, waiting=2, of="12"), poll("r1"), poll("r2"), event_round(3))
    theirs = joined(before, event_round(2, waiting=2, of="21"), poll("r2"), poll("r1"), event_round(3))
    assert odd_steps(found(ours, theirs)) == [(3, {"1": {"order": ["r2", "r1"]}})]


def test_a_rank_that_takes_another_step_takes_it_alone() -> None:
    before = joined(event_round(1), arrival("r1", 0))
    parted = found(joined(before, event_round(2, waiting=1), poll("r1")), joined(before, poll("r1")))
    assert parted.cause == "rank 1 took the step poll r1 where rank 0 took the step round"
    assert [(step["do"], step.get("ranks")) for step in parted.steps] == [
        ("round", None),
        ("arrive", None),
        ("round", [0]),
        ("poll", [1]),
    ]


def test_a_rank_whose_log_goes_on_alone_takes_its_steps_alone() -> None:
    before = joined(event_round(1), arrival("r1", 0))
    parted = found(joined(before, event_round(2, waiting=1)), before)
    assert (parted.call, parted.steps[-1]["ranks"]) == (("event_round call", ""), [0])


def test_what_no_log_tells_has_no_cause() -> None:
    victim = {"kind": "evict_node", "component": "full", "node": 3, "has_progressed": True}
    before = joined(event_round(1), arrival("r1", 0), match("r1"))
    parted = found(
        joined(before, victim, prefill("r1")), joined(before, {**victim, "node": 4}, prefill("r1"))
    )
    assert (parted.cause, odd_steps(parted)) == ("", [])
    assert [step["do"] for step in parted.steps] == ["round", "arrive", "match", "prefill"]


@pytest.mark.parametrize("is_before", [True, False])
def test_what_no_test_can_do_again_is_told_only_where_it_comes_first(is_before: bool) -> None:
    retracted = {"kind": "retract", "rid": "r1", "output_tokens": 3}
    before = joined(event_round(1), arrival("r1", 0), match("r1"))
    ours, theirs = prefill("r1"), prefill("r1", pages=0)
    if is_before:
        parted = found(joined(retracted, before, ours), joined(retracted, before, theirs))
    else:
        parted = found(joined(before, ours, retracted), joined(before, theirs, retracted))
    assert parted.stop == ("a request was retracted" if is_before else "")
