"""The host's two counts: what the group has taken, and what this rank has."""

from __future__ import annotations

from hicache.control.host_memory import HostMemory, fold_reclaim
from tests.support.bench import Bench


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
    from hicache.control import locks

    bench = Bench(host_pages=2)
    old, new = bench.on_host(1), bench.on_host(2)
    held = locks.lock_host(bench.tree, old)
    assert host_of(bench).make_room(1)
    assert (old.is_alive, new.is_alive) == (True, False)
    assert not host_of(bench).make_room(2)
    locks.unlock_host(bench.tree, held)
    assert host_of(bench).make_room(2)
