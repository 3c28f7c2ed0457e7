"""The host's two counts: what the group has taken, and what this rank has."""

from __future__ import annotations

from hicache.control import locks
from hicache.control.host_memory import HostMemory, fold_reclaim
from hicache.core import SIDE_POOLS
from tests.support.bench import Bench, EagerEngine, run


def host_of(bench: Bench) -> HostMemory:
    assert bench.cache.host is not None
    return bench.cache.host


def test_d4_the_digest_of_reclaims_depends_on_their_order() -> None:
    """Appendix D.4."""
    assert (fold_reclaim(0, 17), fold_reclaim(fold_reclaim(0, 17), 9)) == (18, 18_000_064)
    assert (fold_reclaim(0, 9), fold_reclaim(fold_reclaim(0, 9), 17)) == (10, 10_000_048)


def test_the_digest_stays_below_two_to_the_42() -> None:
    digest = 0
    for node in range(1, 2000):
        digest = fold_reclaim(digest, node)
    assert 0 <= digest < 1 << 42


def test_what_this_rank_never_had_is_given_back_to_the_group_alone() -> None:
    bench = Bench(host_pages=10)
    host = host_of(bench)
    bench.host.failures = 1
    host.take(4)
    slots = host.reserve(4)
    assert slots is None
    host.give_back(slots, 4, 0)
    assert (bench.tiers.host_room.pages_free, bench.host.pages_used) == (10, 0)


def test_a_node_under_a_host_lock_is_not_evicted() -> None:
    bench = Bench(host_pages=2)
    old, new = bench.on_host(1), bench.on_host(2)
    held = locks.lock_host(bench.tree, old)
    assert host_of(bench).make_room(1)
    assert (old.is_alive, new.is_alive) == (True, False)
    assert not host_of(bench).make_room(2)
    locks.unlock_host(bench.tree, held)
    assert host_of(bench).make_room(2)


def test_states_of_inner_nodes_are_given_up_oldest_first_and_pages_stay() -> None:
    """No leaf ever frees them: one long conversation would end all backups."""
    bench = Bench(device_pages=40, host_pages=40, pools=[SIDE_POOLS["mamba"]], state_slots=2)
    turns = []
    for end in range(1, 5):
        turns.append(bench.add(*range(end)))
        bench.write_all()
        bench.acknowledge_all()
    assert [row["tokens"] for row in bench.written("write_backup")] == [4, 4, 4, 4]
    assert [node.host_state is not None for node in turns] == [False, False, True, True]
    assert all(node.host is not None for node in turns)
    assert [row["states_freed"] for row in bench.written("evict_host")] == [1, 1]


def test_the_only_copy_of_a_state_is_not_given_up_as_redundant() -> None:
    bench = Bench(
        write_policy="write_back",
        engine=EagerEngine(),
        host_pages=2,
        pools=[SIDE_POOLS["mamba"]],
        state_slots=4,
    )
    node = bench.add(1)
    run(bench.cache.evict(1))
    match = bench.find(1)
    lock = bench.cache.lock(match.node)
    run(bench.cache.load_back(match))
    bench.engine.done = set(range(9))
    bench.cache.start_loading()
    run(bench.cache.apply_loads(1))
    node.device_state = False
    assert not host_of(bench).make_room(2)
    assert node.host_state is not None
    node.device_state = True
    assert host_of(bench).make_room(2)
    assert (node.host, node.host_state) == (None, None)
    bench.cache.unlock(lock)


def test_both_halves_of_a_split_node_are_redundant_copies() -> None:
    bench = Bench(write_policy="write_back", engine=EagerEngine(), host_pages=4)
    bench.add(1, 2)
    run(bench.cache.evict(2))
    match = bench.find(1, 2)
    lock = bench.cache.lock(match.node)
    run(bench.cache.load_back(match))
    bench.engine.done = set(range(9))
    bench.cache.start_loading()
    run(bench.cache.apply_loads(1))
    bench.find(1)
    assert host_of(bench).make_room(4)
    assert [row["pages"] for row in bench.written("reclaim")] == [1, 1]
    bench.cache.unlock(lock)
