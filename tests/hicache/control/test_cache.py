"""The cache piece by piece: what is queued, copied, acknowledged, evicted and given back."""

from __future__ import annotations

import pytest

from hicache.control import keys, locks
from hicache.control.keys import pack
from hicache.core import SIDE_POOLS
from hicache.errors import AckError, PoolError
from tests.support.bench import Bench, EagerEngine, finish, run


def test_an_insert_queues_a_backup_and_locks_its_node_until_the_ack() -> None:
    bench = Bench()
    node = bench.add(1, 2)
    assert (node.lock_count, node.write_pending, node.host) == (1, True, None)
    bench.write_all()
    assert (node.lock_count, node.write_pending, len(node.host or [])) == (1, True, 2), "published, not done"
    bench.acknowledge_all()
    assert (node.lock_count, node.write_pending, len(node.host or [])) == (0, False, 2)


def test_a_merged_copy_has_one_ack_for_all_its_nodes() -> None:
    bench = Bench()
    first, second = bench.add(1), bench.add(2)
    bench.write_all()
    (moving,) = bench.cache.writes
    assert moving.nodes == [first, second]
    assert bench.written("transfer_enqueue")[0]["nodes"] == [first.id, second.id]


def test_an_ack_says_which_locks_are_left_on_its_nodes() -> None:
    bench = Bench()
    node = bench.add(1)
    running = bench.cache.lock(node)
    bench.write_all()
    bench.acknowledge_all()
    assert bench.written("transfer_ack")[0]["locks"] == [1]
    bench.cache.unlock(running)


def test_only_leading_finished_copies_count() -> None:
    bench = Bench()
    for page in (1, 2, 3):
        bench.add(page)
        bench.write_all()
    bench.engine.done = {2, 3}
    assert bench.cache.count_done(bench.cache.writes) == 0
    assert bench.engine.polled == [1], "what stands behind an unfinished one is not even asked"
    bench.engine.done = {1, 2}
    assert bench.cache.count_done(bench.cache.writes) == 2


def test_more_acks_than_transfers_is_an_error_with_both_numbers() -> None:
    bench = Bench()
    bench.add(1)
    bench.write_all()
    with pytest.raises(AckError, match=r"2 acks agreed on, 1 transfers in flight"):
        run(bench.cache.apply_writes(2))


def test_a_chain_stops_at_the_first_node_without_room_and_goes_on_next_time() -> None:
    """Host room for two of three: the third is refused, and asked for again when it is next hit."""
    bench = Bench(host_pages=2)
    a = bench.add(1)
    b = bench.add(1, 2)
    c = bench.add(1, 2, 3)
    assert [node.write_pending for node in (a, b, c)] == [True, True, False]
    assert [row["tokens"] for row in bench.written("write_backup")] == [4, 4, 0]
    bench.write_all()
    bench.acknowledge_all()
    bench.add(1, 2, 3)
    assert [row["node"] for row in bench.written("write_backup")][-1] == c.id


def test_d5_a_chain_is_copied_root_first_under_one_ack() -> None:
    """Appendix D.5: root -> A (128 tokens) -> B (64), neither backed up; C is new below B; room for A and B.

    Pages of 4 tokens, 32 for A and 16 for B; the request has inserted A and B before, and counts C alone.
    """
    bench = Bench(device_pages=100, host_pages=48)
    bench.tree.backup_threshold = 0
    a_pages, b_pages = [1] * 32, [2] * 16
    a = bench.add(*a_pages)
    b = bench.add(*a_pages, *b_pages)
    a.hit_count = b.hit_count = 0
    bench.tree.backup_threshold = 1
    active = bench.request(*a_pages, *b_pages, 3)
    bench.cache.name_answer(active)
    active.lock = bench.cache.lock(b)
    active.slots = [*bench.tree.device_slots(b), *run(bench.cache.alloc_device(1, "test"))]
    active.owned_pages = active.inserted_pages = 48
    c = bench.cache.insert(active, 49).node
    assert (a.hit_count, b.hit_count, c.hit_count) == (0, 0, 1)
    decided = [(row["node"], row["tokens"]) for row in bench.written("write_backup")]
    assert decided == [(a.id, 128), (b.id, 64), (c.id, 0)]
    bench.write_all()
    (moving,) = bench.cache.writes
    assert moving.nodes == [a, b]
    bench.acknowledge_all()
    room = bench.tiers.host_room
    room.page_count, room.pages_free = 49, 1
    again = bench.add(*a_pages, *b_pages, 3)
    assert again is c
    assert bench.written("write_backup")[-1] == {
        **bench.written("write_backup")[-1],
        "node": c.id,
        "tokens": 4,
    }


def test_what_does_not_stand_everywhere_is_cancelled_children_first() -> None:
    bench = Bench()
    parent = bench.add(1)
    child = bench.add(1, 2)
    run(bench.cache.start_writing(0))
    assert [row["node"] for row in bench.written("backup_cancel")] == [child.id, parent.id]
    for node in (parent, child):
        assert (node.host, node.write_pending, node.lock_count) == (None, False, 0)
    assert bench.host.pages_used == 0
    assert bench.tiers.host_room.pages_free == 20


def test_a_split_of_a_queued_backup_copies_both_halves_under_one_lock() -> None:
    bench = Bench()
    node = bench.add(1, 2, 3)
    front = bench.find(1).node
    bench.write_all()
    (moving,) = bench.cache.writes
    assert moving.nodes == [front, node]
    assert moving.transfer.source == [*(front.device or []), *(node.device or [])]
    assert moving.transfer.target == [*(front.host or []), *(node.host or [])]
    bench.acknowledge_all()
    assert (front.lock_count, node.lock_count, front.write_pending) == (0, 0, False)


def test_a_split_of_a_copy_in_flight_is_acknowledged_as_two_nodes() -> None:
    bench = Bench()
    node = bench.add(1, 2, 3)
    bench.write_all()
    front = bench.find(1).node
    bench.acknowledge_all()
    assert bench.written("transfer_ack")[0]["nodes"] == [front.id, node.id]
    assert not front.write_pending and not node.write_pending


def test_a_later_stage_gives_each_half_its_own_late_slots() -> None:
    """Stage 0 has agreed; here the reservation had failed, and the node was split since."""
    bench = Bench()
    bench.host.failures = 1
    node = bench.add(1, 2, 3)
    front = bench.find(1).node
    bench.write_all()
    assert (len(front.host or []), len(node.host or [])) == (1, 2)
    assert set(front.host or []).isdisjoint(node.host or [])


def test_memory_that_never_comes_back_on_a_later_stage_is_an_error() -> None:
    bench = Bench()
    bench.host.failures = 2000
    bench.add(1)
    with pytest.raises(PoolError, match="after 1000 tries"):
        finish(bench.cache.start_writing(1))


def test_device_memory_smaller_than_agreed_is_an_error() -> None:
    bench = Bench()
    bench.device.failures = 1
    with pytest.raises(PoolError, match="3 pages were agreed on"):
        run(bench.cache.alloc_device(3, "test"))


def test_an_eviction_stops_when_exactly_enough_is_free() -> None:
    bench = Bench(device_pages=4)
    old, new = bench.add(1, 2), bench.add(3, 4)
    bench.write_all()
    bench.acknowledge_all()
    run(bench.cache.evict(2))
    assert (old.device, len(new.device or [])) == (None, 2)
    (row,) = bench.written("evict")
    assert (row["pages_freed"], row["nodes"], row["drop_reason"]) == (2, [old.id], "")


def test_a_host_eviction_stops_when_exactly_enough_is_free() -> None:
    bench = Bench(host_pages=4)
    old, new = bench.on_host(1, 2), bench.on_host(3, 4)
    assert bench.cache.host is not None and bench.cache.host.make_room(2)
    assert (old.is_alive, new.is_alive) == (False, True)
    (row,) = bench.written("evict_host")
    assert (row["pages_freed"], row["nodes"]) == (2, [old.id])


def test_a_leaf_that_the_host_holds_is_demoted_and_another_is_dropped() -> None:
    bench = Bench(host_pages=2)
    kept, lost = bench.add(1, 2), bench.add(3)
    bench.write_all()
    bench.acknowledge_all()
    run(bench.cache.evict(3))
    assert (kept.is_alive, lost.is_alive) == (True, False)
    (row,) = bench.written("evict")
    assert row["demoted_digests"] == kept.digests.hex()
    assert row["dropped_digests"] == lost.digests.hex()
    assert row["drop_reason"] == "write_through_unbacked_eviction"


def test_unlocking_a_node_that_only_the_host_holds_makes_it_evictable_there() -> None:
    bench = Bench()
    node = bench.on_host(1)
    assert bench.tree.host_leaves.pop() is node
    lock = bench.cache.lock(node)
    assert bench.tree.host_leaves.pop() is None
    bench.cache.unlock(lock)
    assert bench.tree.host_leaves.pop() is node


# write_back


def test_under_write_back_an_insert_copies_nothing_and_an_eviction_waits_for_its_copy() -> None:
    bench = Bench(write_policy="write_back", engine=EagerEngine())
    node = bench.add(1, 2)
    assert bench.written("write_backup") == []
    run(bench.cache.evict(2))
    assert (node.device, len(node.host or []), node.is_alive) == (None, 2, True)
    kinds = [row["kind"] for row in bench.rows]
    assert kinds[kinds.index("write_backup") :] == [
        "write_backup",
        "transfer_enqueue",
        "transfer_ack",
        "evict",
    ]
    assert bench.written("write_backup")[0]["reason"] == "eviction"


def test_under_write_back_a_victim_for_which_the_host_has_no_room_is_lost() -> None:
    bench = Bench(write_policy="write_back", engine=EagerEngine(), device_pages=8, host_pages=1)
    kept = bench.add(1)
    run(bench.cache.evict(1))
    held = locks.lock_host(bench.tree, kept)
    lost = bench.add(2)
    run(bench.cache.evict(1))
    assert (kept.is_alive, lost.is_alive) == (True, False)
    assert bench.written("evict")[-1]["drop_reason"] == "host_pressure"
    assert (bench.host.pages_used, bench.device.pages_used, bench.tree.host_pages) == (1, 0, 1)
    locks.unlock_host(bench.tree, held)


def test_under_write_back_a_leaf_with_something_locked_below_it_stays_on_the_device() -> None:
    bench = Bench(write_policy="write_back", engine=EagerEngine(), device_pages=8, host_pages=1)
    parent = bench.add(1)
    child = bench.add(1, 2)
    run(bench.cache.evict(1))
    held = locks.lock_host(bench.tree, child)
    run(bench.cache.evict(1))
    assert parent.is_alive and parent.device is not None
    locks.unlock_host(bench.tree, held)
    assert bench.tree.device_leaves.pop() is parent, "it is in line again"


def test_under_write_back_the_host_gives_up_copies_of_what_the_device_has_before_anything_else() -> None:
    bench = Bench(write_policy="write_back", engine=EagerEngine(), device_pages=8, host_pages=2)
    first, second = bench.add(1), bench.add(2)
    run(bench.cache.evict(2))
    match = bench.find(1)
    bench.engine.done = set(range(10))
    lock = bench.cache.lock(match.node)
    run(bench.cache.load_back(match))
    bench.cache.start_loading()
    run(bench.cache.apply_loads(1))
    assert first.device is not None and first.host is not None
    bench.add(3)
    run(bench.cache.evict(1))
    bench.cache.unlock(lock)
    (row,) = bench.written("reclaim")
    assert (row["node"], row["pages"]) == (first.id, 1)
    assert second.host is not None, "what only the host has stays"


# Recurrent states


def test_a_backup_takes_a_state_slot_and_both_or_neither() -> None:
    bench = Bench(pools=[SIDE_POOLS["mamba"]], state_slots=1)
    first = bench.add(1)
    second = bench.add(2)
    assert [row["tokens"] for row in bench.written("write_backup")] == [4, 0], "no state slot for the second"
    bench.write_all()
    bench.acknowledge_all()
    assert (first.host_state is not None, second.host) == (True, None)
    assert (bench.host.pages_used, bench.states.pages_used) == (1, 1)


def test_a_failing_state_pool_rolls_back_the_pages() -> None:
    bench = Bench(pools=[SIDE_POOLS["mamba"]], state_slots=4)
    bench.states.failures = 1
    bench.add(1)
    assert bench.cache.backups_ballot() == 0
    assert bench.host.pages_used == 0
    run(bench.cache.start_writing(0))
    assert (bench.tiers.host_room.pages_free, bench.tiers.states_room.pages_free) == (20, 4)


def test_the_state_of_a_split_node_stays_at_its_end() -> None:
    bench = Bench(pools=[SIDE_POOLS["mamba"]], state_slots=4)
    node = bench.add(1, 2)
    match = bench.cache.match(bench.request(1, 9), 2, "admit")
    assert (match.kv_pages, match.device_pages) == (1, 0), "KV for one page, and no state at its end"
    bench.write_all()
    bench.acknowledge_all()
    assert node.host_state is not None and node.parent is not None and node.parent.host_state is None


# Load back


def test_a_load_back_publishes_its_device_pages_at_once_and_holds_both_tiers_until_the_ack() -> None:
    bench = Bench()
    node = bench.on_host(1, 2)
    match = bench.find(1, 2)
    lock = bench.cache.lock(match.node)
    run(bench.cache.load_back(match))
    assert (len(node.device or []), node.host_lock_count, node.lock_count) == (2, 1, 2)
    bench.cache.start_loading()
    bench.engine.done = {1, 2}
    run(bench.cache.apply_loads(1))
    assert (node.host_lock_count, node.lock_count) == (0, 1)
    bench.cache.unlock(lock)


@pytest.mark.parametrize(
    ("pages", "quota", "size"),
    [(2, None, (0, "too_short")), (3, None, (3, "")), (3, 2, (0, "quota")), (3, 3, (3, ""))],
)
def test_a_load_back_is_declined_when_it_is_short_or_over_its_quota(
    pages: int, quota: int | None, size: tuple[int, str]
) -> None:
    """The least is 10 tokens: 3 pages of 4."""
    bench = Bench()
    bench.on_host(*range(pages))
    assert bench.cache.load_back_size(bench.find(*range(pages)), quota) == size


def test_flush_forgets_both_tiers_and_balances_the_books() -> None:
    bench = Bench()
    bench.on_host(1, 2)
    bench.add(3)
    bench.write_all()
    bench.acknowledge_all()
    bench.cache.flush()
    assert (bench.device.pages_used, bench.host.pages_used) == (0, 0)
    assert (bench.tree.evictable_pages, bench.tree.host_pages) == (0, 0)
    assert bench.tree.match(pack([3] * 4), 1).device_pages == 0


def test_a_prefix_that_the_tree_has_is_not_digested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.add(1, 2, 3)
    digested: list[int] = []
    original = keys.chain_digests

    def counting(tokens: bytes, *, first_page: int, **rest: object) -> bytes:
        digested.append(first_page)
        return original(tokens, first_page=first_page, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(keys, "chain_digests", counting)
    active = bench.request(1, 2, 3, 4)
    bench.cache.match(active, 4, "admit")
    bench.cache.match(active, 4, "admit")
    assert digested == [3]
    assert len(active.digests) == 4 * 8
