"""Prefetches on the scheduler's side; the test plays the background lanes through the queues."""

from __future__ import annotations

from typing import Any

import pytest

from hicache.config import StorageConfig
from hicache.control.active import Active
from hicache.control.node import Node
from hicache.control.queues import Hit, Prefetch, Progress
from hicache.core import SIDE_POOLS
from tests.support.bench import PAGE_TOKENS, Bench, OwnAnswer, run

SMALL = StorageConfig("memory", prefetch_threshold_tokens=2 * PAGE_TOKENS, prefetch_policy="wait_complete")


def bench_with(policy: Any = "wait_complete", **options: Any) -> Bench:
    storage = {"prefetch_threshold_tokens": 2 * PAGE_TOKENS, "prefetch_policy": policy}
    own = {name: options.pop(name) for name in list(options) if hasattr(SMALL, name)}
    return Bench(storage=StorageConfig("memory", **storage | own), **options)


def submit(bench: Bench, *pages: int, rid: str = "") -> tuple[Active, str]:
    active = bench.request(*pages, rid=rid)
    match = bench.cache.match(active, len(pages), "submit")
    return active, bench.fetching.submit(active, match)


def asked(bench: Bench) -> Prefetch:
    """What the prefetch lane would take next."""
    prefetch = run(bench.fetching.queues.prefetch.get())
    assert isinstance(prefetch, Prefetch)
    return prefetch


def answer(bench: Bench, prefetch: Prefetch, pages: int) -> str:
    """The prefetch lane publishes a hit and the event round drains it; returns the outcome."""
    queues = bench.fetching.queues
    queues.hits.put(Hit(prefetch, pages, queues.hits.put_count + 1))
    run(bench.fetching.drain_hits(1))
    return str(bench.written("prefetch_hit")[-1]["outcome"])


def acknowledge(bench: Bench, prefetch: Prefetch, *acks: tuple[str, int]) -> None:
    for ack, pages in acks:
        bench.fetching.queues.acks.put(Progress(prefetch, ack, pages))
    run(bench.fetching.drain_acks(len(acks)))


def release_all(bench: Bench) -> None:
    queues = bench.fetching.queues
    run(bench.fetching.drain_releases(len(queues.releases), len(queues.state_releases)))


def assert_nothing_is_lost(bench: Bench) -> None:
    release_all(bench)
    assert bench.fetching.is_idle
    assert bench.fetching.occupied_tokens == 0
    assert bench.host.pages_used == bench.tree.host_pages
    assert bench.tiers.host_room.pages_free == bench.tiers.host_room.page_count - bench.tree.host_pages
    assert all(node.host_lock_count == 0 for node in bench.tree.walk())


def test_a_span_that_the_store_has_comes_to_the_host_below_the_anchor() -> None:
    bench = bench_with()
    active, outcome = submit(bench, 1, 2, 3)
    assert (outcome, bench.fetching.occupied_tokens) == ("issued", 3 * PAGE_TOKENS)
    prefetch = asked(bench)
    assert answer(bench, prefetch, 3) == "allocated"
    acknowledge(bench, prefetch, ("progress", 3), ("completed", 3))
    match = bench.find(1, 2, 3)
    assert (match.device_pages, match.host_pages, active.storage_pages) == (0, 3, 3)
    assert_nothing_is_lost(bench)


def test_what_is_short_goes_back_page_by_page() -> None:
    """D.2 in small: 5 pages allocated, 3 read on every rank, 2 pages to the release queue."""
    bench = bench_with()
    active, _ = submit(bench, 1, 2, 3, 4, 5)
    prefetch = asked(bench)
    answer(bench, prefetch, 5)
    acknowledge(bench, prefetch, ("progress", 3), ("progress", 3), ("completed", 5))
    assert len(bench.fetching.queues.releases) == 2
    assert bench.written("prefetch_outcome")[-1]["reason"] == "storage_transfer"
    assert active.storage_pages == 3
    assert_nothing_is_lost(bench)


@pytest.mark.parametrize(("pages", "outcome"), [(0, "miss"), (1, "below_threshold")])
def test_a_miss_takes_no_slot_and_is_tried_again(pages: int, outcome: str) -> None:
    bench = bench_with()
    active, _ = submit(bench, 1, 2, 3)
    assert answer(bench, asked(bench), pages) == outcome
    assert active.handle in bench.fetching._retries
    assert_nothing_is_lost(bench)


def test_a_span_that_is_too_short_is_not_asked_for_and_not_tried_again() -> None:
    bench = bench_with()
    active, outcome = submit(bench, 1)
    assert (outcome, active.handle in bench.fetching._retries) == ("declined_too_short", False)


def test_the_rate_limit_is_half_of_the_host() -> None:
    bench = bench_with(host_pages=8)
    assert submit(bench, 1, 2, 3)[1] == "issued"
    assert submit(bench, 4, 5)[1] == "issued", "3 of 4 pages were occupied"
    active, outcome = submit(bench, 6, 7)
    assert outcome == "declined_rate_limited"
    assert active.handle in bench.fetching._retries


def test_nothing_is_hung_below_a_node_that_the_host_lacks() -> None:
    bench = bench_with()
    bench.tree.backup_threshold = 0
    bench.add(1)
    assert submit(bench, 1, 2, 3)[1] == "declined_anchor"


def test_the_anchor_stays_on_the_host_until_the_prefetch_has_ended() -> None:
    bench = bench_with(host_pages=8)
    anchor = bench.on_host(1)
    submit(bench, 1, 2, 3)
    prefetch = asked(bench)
    assert anchor.host_lock_count == 1
    answer(bench, prefetch, 2)
    acknowledge(bench, prefetch, ("progress", 2), ("completed", 2))
    assert anchor.host_lock_count == 0
    assert bench.find(1, 2, 3).host_pages == 3


def test_a_full_host_gives_what_it_has_in_whole_pages_if_that_is_worth_it() -> None:
    """D.2: 300 pages agreed on, 281 free."""
    bench = bench_with(host_pages=4)
    held = keep_on_host(bench, 9)
    submit(bench, 1, 2, 3, 4, 5)
    prefetch = asked(bench)
    assert answer(bench, prefetch, 5) == "partial"
    assert prefetch.page_count == 3
    assert bench.written("prefetch_outcome")[-1] == {
        **bench.written("prefetch_outcome")[-1],
        "reason": "host_capacity",
        "tokens": 2 * PAGE_TOKENS,
    }
    acknowledge(bench, prefetch, ("progress", 3), ("completed", 3))
    assert held.is_alive


def keep_on_host(bench: Bench, *pages: int) -> Node:
    from hicache.control import locks

    node = bench.on_host(*pages)
    locks.lock_host(bench.tree, node)
    return node


def test_a_host_without_room_is_tried_again_with_what_is_known_to_be_there() -> None:
    bench = bench_with(host_pages=2)
    keep_on_host(bench, 8, 9)
    submit(bench, 7)
    active, _ = submit(bench, 1, 2, 3)
    assert answer(bench, asked(bench), 3) == "host_capacity"
    assert bench.fetching._retries[active.handle].known_end == 3


def test_memory_that_fails_on_this_rank_alone_is_taken_all_the_same() -> None:
    """The group counts the pages; this rank has none and its io lane will report nothing read."""
    bench = bench_with()
    submit(bench, 1, 2, 3)
    prefetch = asked(bench)
    bench.host.failures = 1
    assert answer(bench, prefetch, 3) == "allocated"
    assert (prefetch.slots, prefetch.page_count) == (None, 3)
    acknowledge(bench, prefetch, ("progress", 0), ("completed", 3))
    assert bench.written("prefetch_insert")[-1]["outcome"] == "nothing_completed"
    assert_nothing_is_lost(bench)


def test_g4_a_late_hit_of_an_older_try_does_not_touch_the_newer_one() -> None:
    """SGLang looks the handle up and revokes whatever is registered (appendix C, G4)."""
    bench = bench_with("best_effort")
    active, _ = submit(bench, 1, 2, 3)
    older = asked(bench)
    assert run(bench.fetching.check(active)) is True
    match = bench.cache.match(active, 3, "submit")
    assert bench.fetching.submit(active, match) == "issued"
    newer = asked(bench)
    assert answer(bench, older, 3) == "stale"
    assert bench.fetching.ongoing(active) is newer
    assert answer(bench, newer, 3) == "allocated"


def test_best_effort_takes_what_every_rank_has_by_now() -> None:
    bench = bench_with("best_effort")
    active, _ = submit(bench, 1, 2, 3, 4)
    prefetch = asked(bench)
    answer(bench, prefetch, 4)
    acknowledge(bench, prefetch, ("progress", 2))
    assert run(bench.fetching.check(active)) is True
    assert (active.storage_pages, bench.find(1, 2, 3, 4).host_pages) == (2, 2)
    assert prefetch.is_terminated
    acknowledge(bench, prefetch, ("progress", 4), ("completed", 4))
    assert bench.find(1, 2, 3, 4).host_pages == 2, "what comes later is not inserted"
    assert_nothing_is_lost(bench)


def test_wait_complete_waits_for_the_completion() -> None:
    bench = bench_with("wait_complete")
    active, _ = submit(bench, 1, 2)
    prefetch = asked(bench)
    assert run(bench.fetching.check(active)) is False
    answer(bench, prefetch, 2)
    acknowledge(bench, prefetch, ("progress", 2))
    assert run(bench.fetching.check(active)) is False
    acknowledge(bench, prefetch, ("completed", 2))
    assert run(bench.fetching.check(active)) is True


def test_d2_the_deadline_counts_the_pages_that_were_asked_for() -> None:
    """Appendix D.2: 1 + 390 x (64/1024 x 0.25) s with pages of 64 tokens."""
    bench = Bench(storage=StorageConfig("memory"))
    bench.fetching._page_tokens = 64
    assert bench.fetching.timeout_ns(390) == 7_093_750_000


def test_a_deadline_runs_from_the_first_blocked_admission_and_ends_the_prefetch() -> None:
    bench = bench_with("timeout", prefetch_timeout_base_s=1.0, prefetch_timeout_per_ki_token_s=0.0)
    active, _ = submit(bench, 1, 2)
    asked(bench)
    bench.clock.time_ns = 5_000_000_000
    assert run(bench.fetching.check(active)) is False, "the clock starts now"
    bench.clock.time_ns += 999_999_999
    assert run(bench.fetching.check(active)) is False
    bench.clock.time_ns += 1
    assert run(bench.fetching.check(active)) is True
    assert submit_again(bench, active) == "declined_deadline", "never again for this request"


def submit_again(bench: Bench, active: Active) -> str:
    return bench.fetching.submit(active, bench.cache.match(active, 2, "submit"))


def test_one_late_rank_ends_it_for_all() -> None:
    agreement = OwnAnswer([[1]])
    bench = bench_with("timeout", agreement=agreement)
    active, _ = submit(bench, 1, 2)
    asked(bench)
    assert run(bench.fetching.check(active)) is True
    assert agreement.asked == [("prefetch_timeout", [0])]


def test_a_later_stage_does_not_look_at_its_clock() -> None:
    bench = bench_with("timeout", prefetch_timeout_base_s=0.0, decides_deadline=False)
    active, _ = submit(bench, 1, 2)
    asked(bench)
    bench.clock.time_ns = 10**15
    assert run(bench.fetching.check(active)) is False
    assert bench.written("prefetch_poll")[0]["elapsed_ns"] is None


def test_there_is_no_deadline_once_all_kv_has_come() -> None:
    bench = bench_with("timeout", prefetch_timeout_base_s=0.0, prefetch_timeout_per_ki_token_s=0.0)
    active, _ = submit(bench, 1, 2)
    prefetch = asked(bench)
    answer(bench, prefetch, 2)
    acknowledge(bench, prefetch, ("progress", 2))
    assert run(bench.fetching.check(active)) is False


def test_an_abort_frees_what_was_read_at_once_and_the_rest_at_the_completion() -> None:
    bench = bench_with()
    active, _ = submit(bench, 1, 2, 3, 4)
    prefetch = asked(bench)
    answer(bench, prefetch, 4)
    acknowledge(bench, prefetch, ("progress", 3))
    bench.fetching.cancelled(active)
    assert (bench.host.pages_used, bench.fetching.is_idle) == (1, False)
    acknowledge(bench, prefetch, ("progress", 4), ("completed", 4))
    assert len(bench.fetching.queues.releases) == 1
    assert_nothing_is_lost(bench)


def test_an_abort_before_the_hit_leaves_nothing_behind() -> None:
    bench = bench_with()
    active, _ = submit(bench, 1, 2, 3)
    prefetch = asked(bench)
    bench.fetching.cancelled(active)
    assert answer(bench, prefetch, 3) == "stale"
    assert_nothing_is_lost(bench)


def test_kv_without_the_state_at_its_end_is_given_up() -> None:
    bench = bench_with(pools=[SIDE_POOLS["mamba"]], state_slots=4)
    submit(bench, 1, 2)
    prefetch = asked(bench)
    answer(bench, prefetch, 2)
    acknowledge(bench, prefetch, ("progress", 2), ("pool_hits", 0), ("completed", 2))
    assert bench.written("prefetch_insert")[-1]["outcome"] == "hybrid_discard"
    assert_nothing_is_lost(bench)
    assert bench.states.pages_used == 0
    assert bench.tiers.states_room.pages_free == 4


def test_a_state_comes_with_its_pages() -> None:
    bench = bench_with(pools=[SIDE_POOLS["mamba"]], state_slots=4)
    submit(bench, 1, 2)
    prefetch = asked(bench)
    answer(bench, prefetch, 2)
    acknowledge(bench, prefetch, ("progress", 2), ("pool_hits", 1), ("completed", 2))
    match = bench.find(1, 2)
    assert (match.host_pages, match.node.host_state is not None) == (2, True)
    assert_nothing_is_lost(bench)
    assert bench.states.pages_used == bench.tree.states_host == 1


# Retries


def waiting_behind(bench: Bench, active: Active) -> list[Active]:
    return [bench.request(99), active]


def test_d9_a_miss_is_issued_again_at_the_first_pass_at_or_after_its_step() -> None:
    """Appendix D.9: the first pass that sees the request fixes due = that step + 8."""
    bench = bench_with()
    active, _ = submit(bench, 1, 2, 3)
    answer(bench, asked(bench), 0)
    queue = waiting_behind(bench, active)
    bench.fetching._step = 99
    for _ in range(8):
        bench.fetching.process_retries(queue)
    assert len(bench.fetching.queues.prefetch) == 0
    bench.fetching.process_retries(queue)
    assert bench.fetching._step == 108
    assert len(bench.fetching.queues.prefetch) == 1
    verdicts = [(row["verdict"], row["due_step"]) for row in bench.written("prefetch_retry")]
    assert verdicts == [("armed", 108), ("issued", 108)]


def test_d9_the_head_of_the_queue_does_not_wait_for_a_miss() -> None:
    bench = bench_with()
    active, _ = submit(bench, 1, 2, 3)
    answer(bench, asked(bench), 0)
    bench.fetching.process_retries([active])
    assert bench.written("prefetch_retry")[-1]["verdict"] == "cancelled"
    assert active.handle not in bench.fetching._retries


def test_a_request_is_tried_again_so_many_times_and_no_more() -> None:
    bench = bench_with(retry_poll_interval=1, retry_max_attempts=2)
    active, _ = submit(bench, 1, 2, 3)
    queue = waiting_behind(bench, active)
    for _ in range(12):
        while len(bench.fetching.queues.prefetch):
            answer(bench, asked(bench), 0)
        bench.fetching.process_retries(queue)
    verdicts = [row["verdict"] for row in bench.written("prefetch_retry")]
    assert verdicts.count("issued") == 2
    assert verdicts[-1] == "cap_reached"


def test_a_retry_interval_of_zero_never_tries_again() -> None:
    bench = bench_with(retry_poll_interval=0)
    active, _ = submit(bench, 1, 2, 3)
    answer(bench, asked(bench), 0)
    assert active.handle not in bench.fetching._retries


def test_a_prefix_that_the_device_has_lost_is_asked_for_again() -> None:
    bench = bench_with(host_pages=8)
    node = bench.on_host(1, 2)
    active = bench.request(1, 2)
    match = bench.cache.match(active, 2, "submit")
    bench.fetching.submit(active, match)
    assert active.matched_pages_at_submit == 2
    bench.cache.host.free(*bench.tree.clear_host(node))  # type: ignore[union-attr]
    bench.tree.remove(node)
    again = bench.cache.match(active, 2, "admit")
    assert bench.fetching.is_lost(active, again) is True
    assert bench.fetching.ongoing(active) is not None
    assert bench.written("prefetch_retry")[-1]["cause"] == "device_loss"


# Backup to the external tier


def test_an_acknowledged_write_goes_on_to_the_store_under_a_host_lock() -> None:
    bench = bench_with()
    node = bench.add(1, 2)
    bench.write_all()
    bench.acknowledge_all()
    assert (node.lock_count, node.host_lock_count) == (0, 1)
    backup = run(bench.fetching.queues.backup.get())
    assert backup is not None and backup.slots == node.host
    assert len(backup.names) == 2 and all(len(name) == 64 for name in backup.names)
    bench.fetching.queues.backup_acks.put(backup)
    run(bench.fetching.drain_backups(1))
    assert node.host_lock_count == 0
    assert bench.fetching.is_idle


def test_a_split_under_a_backup_unlocks_both_halves() -> None:
    bench = bench_with()
    node = bench.add(1, 2)
    bench.write_all()
    bench.acknowledge_all()
    front = bench.find(1).node
    backup = run(bench.fetching.queues.backup.get())
    assert (front.host_lock_count, node.host_lock_count) == (1, 1)
    bench.fetching.queues.backup_acks.put(backup)
    run(bench.fetching.drain_backups(1))
    assert (front.host_lock_count, node.host_lock_count) == (0, 0)


def test_pages_that_were_there_before_the_store_was_attached_get_their_hashes_then() -> None:
    bench = bench_with(attached=False)
    node = bench.add(1, 2)
    assert node.hashes is None
    bench.write_all()
    bench.acknowledge_all()
    assert len(bench.fetching.queues.backup) == 0
    assert run(bench.fetching.attach()) == (True, "")
    assert node.hashes is not None and len(node.hashes) == 64
    assert run(bench.fetching.attach())[0] is False
    assert run(bench.fetching.detach()) == (True, "")


# What became of tokens that were asked for


def reasons(bench: Bench) -> list[tuple[str, int]]:
    rows = bench.written("prefetch_outcome")
    return [(row["reason"], row["tokens"] // PAGE_TOKENS) for row in rows]


@pytest.mark.parametrize(("policy", "reason"), [("best_effort", "not_waited_for"), ("timeout", "deadline")])
def test_a_prefetch_that_is_ended_before_its_hit_is_accounted_for(policy: str, reason: str) -> None:
    bench = bench_with(policy, prefetch_timeout_base_s=0.0, prefetch_timeout_per_ki_token_s=0.0)
    active, _ = submit(bench, 1, 2, 3)
    assert run(bench.fetching.check(active)) is True
    assert reasons(bench) == [(reason, 3)]


def test_what_is_discarded_for_want_of_a_state_is_accounted_for() -> None:
    bench = bench_with(pools=[SIDE_POOLS["mamba"]], state_slots=4)
    submit(bench, 1, 2)
    prefetch = asked(bench)
    answer(bench, prefetch, 2)
    acknowledge(bench, prefetch, ("progress", 2), ("pool_hits", 0), ("completed", 2))
    assert reasons(bench) == [("storage_transfer", 2)]


def test_what_the_host_has_got_meanwhile_is_an_overlap() -> None:
    bench = bench_with()
    submit(bench, 1, 2, 3)
    prefetch = asked(bench)
    answer(bench, prefetch, 3)
    bench.on_host(1)
    acknowledge(bench, prefetch, ("progress", 3), ("completed", 3))
    assert reasons(bench) == [("device_overlap", 1)]
    assert (prefetch.active.storage_first_page, prefetch.active.storage_pages) == (1, 2)


def test_fetched_pages_that_admission_did_not_use_are_a_shortfall() -> None:
    bench = bench_with()
    active, _ = submit(bench, 1, 2, 3)
    prefetch = asked(bench)
    answer(bench, prefetch, 3)
    acknowledge(bench, prefetch, ("progress", 3), ("completed", 3))
    bench.fetching.admitted(active, used_pages=1)
    assert reasons(bench) == [("cache_admission_shortfall", 2)]
    assert active.storage_pages == 0


def test_nobody_waits_for_a_deadline_once_all_kv_is_there() -> None:
    """Else a store that never gives a side pool's state would let ranks idle for ever."""
    bench = bench_with("timeout")
    submit(bench, 1, 2)
    prefetch = asked(bench)
    assert bench.fetching.has_timed_waits
    answer(bench, prefetch, 2)
    acknowledge(bench, prefetch, ("progress", 2))
    assert not bench.fetching.has_timed_waits
