"""One rank's steps, end to end: what is computed, in which order, and how requests leave."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hicache.config import Config, StorageConfig
from hicache.control import keys, patience
from hicache.control.cache import Cache
from hicache.core import Abort, Arrival, Command, Request
from tests.support.solo import Run, Shelf, prompt, request, run

PLAIN = Config(page_size_tokens=4, device_pages=40, host_pages=40)
CHUNKS_OF_8 = replace(PLAIN, chunked_prefill_tokens=8)
STORED = replace(PLAIN, storage=StorageConfig(backend="memory", prefetch_threshold_tokens=8))
LONG = prompt(1, 2, 3, 4, 5, 6)


def batches(found: Run, mode: str = "extend") -> list[tuple[list[str], list[int]]]:
    return found.column("forward", "rids", "computed_tokens", mode=mode)


def assert_clean(found: Run) -> None:
    """It ended, every page read was right, and the books add up."""
    assert (found.stuck, found.lanes_left) == ("", [])
    assert found.of("wrong_page") == []
    for audit in found.of("pool_audit"):
        assert audit["protected"] == 0
        if audit["total"] is not None:
            assert audit["available"] + audit["evictable"] == audit["total"]


# Chunks


def test_a_long_prompt_is_computed_in_chunks_that_end_with_pages() -> None:
    found = run(CHUNKS_OF_8, {1: [request("a", LONG)]})
    assert batches(found) == [(["a"], [8]), (["a"], [8]), (["a"], [8]), (["a"], [1])]
    assert_clean(found)


def test_each_chunk_takes_its_own_pages_and_the_last_one_all_that_is_left() -> None:
    """25 tokens and 5 of an answer with KV: 8 pages, of which chunks of 2 pages take 2, 2, 2 and 2."""
    found = run(CHUNKS_OF_8, {1: [request("a", LONG, 6)]})
    assert found.column("alloc", "pages", purpose="extend") == [2, 2, 2, 2]


def test_a_chunk_is_in_the_tree_one_step_later() -> None:
    found = run(CHUNKS_OF_8, {1: [request("a", LONG)]})
    calls = [row for row in found.of("insert") if row["phase"] == "call"]
    assert [(row["step"], row["tokens"]) for row in calls] == [(1, 8), (2, 16), (3, 24), (3, 24)]


def test_a_prompt_between_two_chunks_can_be_matched_as_far_as_it_has_come() -> None:
    """b comes at the third step; in the fourth, a's last token leaves room in the batch."""
    found = run(CHUNKS_OF_8, {1: [request("a", LONG)], 3: [request("b", prompt(1, 2, 3, 4, 5, 9))]})
    assert found.column("admit", "step", "device_tokens", rid="b", verdict="admitted") == [(3, 20)]
    assert batches(found)[3] == (["a", "b"], [1, 4])
    assert_clean(found)


def test_what_goes_on_goes_first_and_the_rest_of_the_budget_is_for_others() -> None:
    config = replace(PLAIN, chunked_prefill_tokens=16)
    found = run(config, {1: [request("a", prompt(9)), request("b", LONG), request("c", prompt(8))]})
    assert batches(found) == [(["a", "b"], [5, 8]), (["b"], [16]), (["b", "c"], [1, 5])]


def test_one_request_at_a_time_is_between_two_chunks() -> None:
    found = run(CHUNKS_OF_8, {1: [request("a", LONG), request("b", prompt(7, 7, 7))]})
    assert batches(found) == [
        (["a"], [8]),
        (["a"], [8]),
        (["a"], [8]),
        (["a", "b"], [1, 4]),
        (["b"], [8]),
        (["b"], [1]),
    ]
    assert_clean(found)


def test_prefill_goes_before_decode_also_between_chunks() -> None:
    found = run(CHUNKS_OF_8, {1: [request("d", prompt(9), 6)], 2: [request("a", LONG)]})
    modes = found.column("forward", "mode")
    assert modes == ["extend"] * 5 + ["decode"] * 5


def test_a_request_that_was_promised_its_pages_never_waits_for_its_next_chunk() -> None:
    """15 pages: a needs 7, so b, which needs 9, is not admitted before a has ended."""
    config = replace(CHUNKS_OF_8, device_pages=15)
    found = run(config, {1: [request("a", LONG, 2)], 3: [request("b", prompt(9, 9, 9, 9, 9, 9, 9, 9))]})
    assert [rids for rids, _ in batches(found)][:4] == [["a"]] * 4
    assert found.column("finish", "rid") == ["a", "b"]
    assert_clean(found)


@pytest.mark.parametrize("seed", range(6))
def test_chunks_change_neither_what_hits_nor_what_is_computed(seed: int) -> None:
    chance = random.Random(seed)
    arrivals: dict[int, list[Arrival]] = {}
    for number in range(12):
        pages = [chance.randint(1, 3) for _ in range(chance.randint(1, 9))]
        # Far enough apart that one has ended when the next one comes.
        arrivals[1 + 40 * number] = [request(f"r{number}", prompt(*pages), chance.randint(1, 9))]
    names = ("rid", "device_tokens", "host_tokens", "extend_tokens")
    # Without limits: chunks make more and shorter nodes, so that an eviction would free other pages.
    config = replace(PLAIN, device_pages=0, host_pages=0)
    whole, cut = run(config, arrivals), run(replace(config, chunked_prefill_tokens=8), arrivals)
    assert whole.column("admit", *names) == cut.column("admit", *names)
    assert_clean(cut)


# Aborts


@pytest.fixture
def door() -> dict[int, list[Arrival]]:
    return {1: [request("other", prompt(8, 9), 8)]}


def aborted(config: Config, arrivals: dict[int, list[Arrival]], **options: object) -> Run:
    found = run(config, arrivals, **options)  # type: ignore[arg-type]
    assert_clean(found)
    assert ("other", True) in found.script.ended
    return found


def test_an_abort_ends_a_request_that_waits_for_room(door: dict[int, list[Arrival]]) -> None:
    config = replace(PLAIN, device_pages=6)
    door[2] = [request("a", prompt(1, 2))]
    door[4] = [Abort("a")]
    found = aborted(config, door)
    assert found.column("abort", "rid", "place") == [("a", "waiting")]
    assert found.column("finish", "reason", "output_tokens", rid="a") == [("abort", 0)]
    assert found.column("admit", "verdict", rid="a") == ["no_room", "no_room"]


def test_an_abort_in_the_same_mail_ends_a_request_before_it_is_looked_at(
    door: dict[int, list[Arrival]],
) -> None:
    door[1] += [request("a", prompt(1, 2)), Abort("a")]
    found = aborted(PLAIN, door)
    assert found.column("abort", "place") == ["waiting"]
    assert found.of("admit", rid="a") == []


def test_an_abort_ends_a_request_between_two_chunks() -> None:
    """Two chunks are computed and one of them is in the tree, where it stays."""
    arrivals: dict[int, list[Arrival]] = {1: [request("other", prompt(8), 8)], 2: [request("a", LONG)]}
    arrivals[4] = [Abort("a")]
    found = aborted(CHUNKS_OF_8, arrivals)
    assert found.column("abort", "place") == ["chunked"]
    assert [tokens for rids, tokens in batches(found) if rids == ["a"]] == [[8], [8]]
    assert [row["tokens"] for row in found.of("insert", rid="a") if row["phase"] == "call"] == [8]


def test_an_abort_ends_a_request_that_runs_and_keeps_what_it_has_computed(
    door: dict[int, list[Arrival]],
) -> None:
    """5 tokens of the answer are done, 4 of them have KV: 9 + 4 tokens are 3 pages."""
    door[2] = [request("a", prompt(1, 2), 30)]
    door[7] = [Abort("a")]
    found = aborted(PLAIN, door)
    assert found.column("abort", "place") == ["running"]
    assert found.column("finish", "reason", "output_tokens", rid="a") == [("abort", 5)]
    assert [row["tokens"] for row in found.of("insert", rid="a") if row["phase"] == "call"] == [8, 12]


def test_an_abort_ends_a_request_that_was_retracted() -> None:
    config = Config(page_size_tokens=4, device_pages=9, decode_reserve_percent=0)
    three: list[Arrival] = [
        request("other", prompt(1, 2), 9),
        request("b", prompt(3, 4), 14),
        request("c", prompt(5), 13),
    ]
    found = aborted(config, {1: three, 7: [Abort("b")]})
    assert found.column("retract", "rid", "step") == [("b", 4)]
    assert found.column("abort", "rid", "place") == [("b", "waiting")]
    assert found.column("finish", "reason", "output_tokens", rid="b") == [("abort", 4)]


@pytest.mark.parametrize("delay", [0, 1, 3, 30])
@pytest.mark.parametrize("step", range(2, 9))
def test_an_abort_ends_a_request_wherever_its_prefetch_is(step: int, delay: int) -> None:
    config = replace(STORED, storage=replace(STORED.storage, prefetch_policy="wait_complete", batch_pages=2))
    shelf = Shelf()
    run(config, {1: [request("before", LONG)]}, storage=shelf)
    shelf.delay = delay
    arrivals: dict[int, list[Arrival]] = {1: [request("other", prompt(8, 9), 8)], step: [Abort("a")]}
    arrivals[1].append(request("a", LONG, 20))
    found = aborted(config, arrivals, storage=shelf)
    assert found.column("finish", "reason", rid="a") == ["abort"]


def test_an_abort_of_a_request_that_has_ended_is_recorded_and_nothing_else(
    door: dict[int, list[Arrival]],
) -> None:
    door[30] = [Abort("other"), Abort("never seen")]
    found = aborted(PLAIN, door)
    assert found.column("abort", "rid", "place") == [("other", ""), ("never seen", "")]
    assert found.script.ended == [("other", True)]


# Order


def by_priority(is_on: bool) -> list[str]:
    config = replace(PLAIN, device_pages=6, priority_scheduling=is_on)
    waiting: list[Arrival] = [
        request(rid, prompt(page, page), priority=priority)
        for rid, page, priority in (("low", 1, 0), ("high", 2, 5), ("middle", 3, 2), ("high2", 4, 5))
    ]
    found = run(config, {1: [request("first", prompt(8, 9), 8)], 2: waiting})
    assert_clean(found)
    return found.column("admit", "rid", verdict="admitted")


def test_higher_priorities_are_admitted_first_where_the_scheduler_heeds_them() -> None:
    assert by_priority(True) == ["first", "high", "high2", "middle", "low"]


def test_requests_are_admitted_as_they_came_where_it_does_not() -> None:
    assert by_priority(False) == ["first", "low", "high", "middle", "high2"]


def test_nobody_who_runs_is_pushed_out_by_a_higher_priority() -> None:
    config = replace(PLAIN, device_pages=6, priority_scheduling=True)
    found = run(
        config, {1: [request("low", prompt(8, 9), 8)], 2: [request("high", prompt(1, 2), priority=9)]}
    )
    assert found.column("finish", "rid") == ["low", "high"]


def test_a_chunked_request_goes_on_before_a_higher_priority_is_asked() -> None:
    config = replace(CHUNKS_OF_8, priority_scheduling=True)
    found = run(config, {1: [request("low", LONG)], 2: [request("high", prompt(8, 9), priority=9)]})
    assert [rids for rids, _ in batches(found)] == [["low"], ["low"], ["low"], ["low", "high"], ["high"]]


# Commands

IDLE = 60


@pytest.mark.parametrize("verb", ["flush", "attach", "detach"])
def test_a_command_is_refused_while_a_request_is_at_work(verb: str) -> None:
    arrivals: dict[int, list[Arrival]] = {1: [request("a", LONG, 9)], 4: [Command(verb)]}  # type: ignore[arg-type]
    found = run(STORED, arrivals)
    assert found.column("command", "verb", "reason", "verdict") == [(verb, "not_idle", "refused")]
    assert_clean(found)


def test_a_command_is_refused_while_a_copy_is_in_flight() -> None:
    """The answer is complete in the first step; its backup takes five polls more."""
    found = run(PLAIN, {1: [request("a", LONG)], 3: [Command("flush")]}, transfer_polls=5)
    assert found.column("command", "reason") == ["not_idle"]


def test_a_request_in_the_same_mail_makes_the_rank_busy_only_for_what_follows_it() -> None:
    found = run(PLAIN, {1: [Command("flush"), request("a", LONG), Command("flush")]})
    assert found.column("command", "verdict") == ["done", "refused"]


def test_a_flush_forgets_every_prefix_on_both_tiers() -> None:
    found = run(PLAIN, {1: [request("a", LONG)], IDLE: [Command("flush"), request("b", LONG)]})
    assert found.column("command", "reason", "verdict") == [("", "done")]
    assert found.column("admit", "device_tokens", "host_tokens", "extend_tokens", rid="b") == [(0, 0, 25)]
    assert_clean(found)


def test_a_flush_leaves_the_external_tier_alone() -> None:
    found = run(STORED, {1: [request("a", LONG)], IDLE: [Command("flush"), request("b", LONG)]})
    assert found.column("admit", "storage_tokens", "extend_tokens", rid="b") == [(24, 1)]
    assert_clean(found)


def test_storage_is_detached_and_attached_again_between_requests() -> None:
    arrivals: dict[int, list[Arrival]] = {
        1: [request("a", LONG)],
        IDLE: [Command("detach"), Command("flush"), request("b", LONG)],
        2 * IDLE: [Command("attach"), Command("flush"), request("c", LONG)],
    }
    found = run(STORED, arrivals)
    assert found.column("command", "verb", "verdict") == [
        ("detach", "done"),
        ("flush", "done"),
        ("attach", "done"),
        ("flush", "done"),
    ]
    assert found.column("admit", "rid", "storage_tokens") == [("a", 0), ("b", 0), ("c", 24)]
    assert_clean(found)


def test_commands_without_an_external_tier_or_a_change_are_refused() -> None:
    found = run(PLAIN, {1: [Command("attach"), Command("detach")]})
    assert found.column("command", "reason") == ["no_storage_backend"] * 2
    found = run(STORED, {1: [Command("attach"), Command("detach"), Command("detach")]})
    assert found.column("command", "reason") == ["attached_already", "", "not_attached"]


def test_an_attach_that_does_not_reach_the_store_changes_nothing() -> None:
    config = replace(STORED, storage=replace(STORED.storage, attached=False))
    shelf = Shelf(is_reachable=False)
    found = run(config, {1: [Command("attach"), request("a", LONG)]}, storage=shelf)
    assert found.column("command", "reason", "verdict", "is_ready", "error") == [
        ("unreachable", "refused", False, "nobody there")
    ]
    assert found.of("prefetch_submit") == []
    assert_clean(found)


# Prefetches, as the scheduler sees them


def fetched(policy: str, *, delay: int | None, **options: object) -> Run:
    storage = replace(STORED.storage, prefetch_policy=policy, **options)  # type: ignore[arg-type]
    config = replace(STORED, storage=storage)
    shelf = Shelf()
    run(config, {1: [request("before", LONG)]}, storage=shelf)
    shelf.delay = delay
    return run(config, {1: [request("a", LONG, 2), request("b", prompt(9), 3)]}, storage=shelf)


def test_a_request_waits_for_its_prefetch_and_lets_others_pass() -> None:
    found = fetched("wait_complete", delay=6)
    assert found.column("admit", "rid", verdict="admitted") == ["b", "a"]
    assert found.column("admit", "storage_tokens", "extend_tokens", rid="a") == [(24, 1)]
    assert_clean(found)


def test_best_effort_takes_what_has_come_when_it_is_asked() -> None:
    found = fetched("best_effort", delay=6)
    assert found.column("admit", "rid", "storage_tokens") == [("a", 0), ("b", 0)]
    assert_clean(found)


def test_a_deadline_ends_the_wait_for_a_store_that_is_slow() -> None:
    """1 ms a step that nothing happens in; the deadline is 20 ms from the first question."""
    found = fetched("timeout", delay=400, prefetch_timeout_base_s=0.02, prefetch_timeout_per_ki_token_s=0.0)
    assert found.column("admit", "rid", "storage_tokens", verdict="admitted") == [("b", 0), ("a", 0)]
    assert_clean(found)


def test_steps_before_a_deadline_are_no_sign_of_being_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 s at 1 ms a step are more steps than this rank waits for anything else."""
    monkeypatch.setattr(patience, "STORAGE_IDLE_STEPS_MAX", 500)
    found = fetched("timeout", delay=None, prefetch_timeout_base_s=2.0, prefetch_timeout_per_ki_token_s=0.0)
    assert found.column("finish", "rid", "reason") == [("b", "stop"), ("a", "stop")]
    assert "prefetch 1 has not come back, though a waits for it no more" in found.stuck


def test_a_store_that_never_answers_is_named_with_the_request_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patience, "STORAGE_IDLE_STEPS_MAX", 500)
    found = fetched("wait_complete", delay=None)
    assert "nothing for 500 steps: 1 requests waiting" in found.stuck
    assert "a (attempt 0) waits for prefetch 1, 0 of 6 pages read" in found.stuck


def test_a_retracted_request_asks_the_store_again_under_another_handle() -> None:
    config = replace(STORED, device_pages=9, decode_reserve_percent=0)
    three = [request("a", prompt(1, 2), 9), request("b", prompt(3, 4), 14), request("c", prompt(5), 13)]
    found = run(config, {1: three})
    assert found.column("prefetch_submit", "attempt", rid="b")[:2] == [0, 1]
    assert_clean(found)


# Ends


def test_a_request_that_can_never_fit_is_refused_by_its_whole_answer() -> None:
    config = replace(PLAIN, device_pages=5, decode_reserve_percent=0)
    found = run(config, {1: [request("fits", prompt(1, 2), 12), request("long", prompt(3, 4), 13)]})
    assert sorted(found.column("finish", "rid", "reason")) == [("fits", "stop"), ("long", "too_long")]
    assert sorted(found.script.ended) == [("fits", True), ("long", False)]
    assert_clean(found)


def test_a_prompt_without_tokens_is_refused() -> None:
    found = run(PLAIN, {1: [Request("a", b"", b"", 1)]})
    assert found.column("finish", "rid", "reason") == [("a", "empty_prompt")]


def test_the_last_one_left_waits_for_what_is_in_flight_and_is_then_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tree says that there is no page, which does not happen as long as its counters are right."""
    monkeypatch.setattr(Cache, "can_hold", lambda self, page_count: page_count != 1)
    config = replace(PLAIN, decode_reserve_percent=0)
    found = run(config, {1: [request("a", prompt(1, 2), 30)]}, transfer_polls=3)
    assert found.column("finish", "reason", "output_tokens") == [("out_of_memory", 4)]
    (end,) = found.of("finish")
    (ack,) = found.of("transfer_ack")
    assert ack["step"] <= end["step"]
    assert_clean(found)


def test_a_rank_that_waits_for_clients_is_not_stuck() -> None:
    found = run(PLAIN, {1: [request("a", LONG)], patience.IDLE_STEPS_MAX + 500: [request("b", LONG)]})
    assert found.script.ended == [("a", True), ("b", True)]


# Requests


def test_a_namespace_shows_in_the_log_as_a_keyed_digest() -> None:
    arrivals: dict[int, list[Arrival]] = {
        1: [request("a", LONG), request("b", LONG, extra_key="x"), request("c", LONG, cache_salt="x")],
        IDLE: [request("d", LONG, extra_key="x")],
    }
    found = run(PLAIN, arrivals)
    plain, first, second, again = found.column("request", "namespace")
    assert plain == "" and first == again and first != second
    assert len(first) == 16 and first not in keys.namespace("x", "").hex()


def test_prompts_of_two_namespaces_never_share_a_page() -> None:
    arrivals: dict[int, list[Arrival]] = {1: [request("a", LONG)]}
    arrivals[IDLE] = [
        request("b", LONG, extra_key="x"),
        request("c", LONG),
        request("d", LONG, cache_salt="x"),
    ]
    found = run(PLAIN, arrivals)
    assert found.column("admit", "rid", "device_tokens") == [("a", 0), ("b", 0), ("c", 24), ("d", 0)]
    assert_clean(found)


def test_the_answer_becomes_a_node_of_its_own() -> None:
    """Prompt 25 tokens, 10 of the answer with KV: 6 pages of the prompt, 2 behind them."""
    found = run(PLAIN, {1: [request("a", LONG, 11)]})
    nodes = list(found.rank.scheduler._cache.tree.walk())
    assert sorted(node.page_count for node in nodes) == [2, 6]
