"""Each thing that can be left over at the end is found, and named."""

from __future__ import annotations

import pytest

from hicache.control import locks
from hicache.control.audit import audit
from hicache.core import SIDE_POOLS
from tests.support.bench import Bench, run


def settled(**options: object) -> Bench:
    """Two prefixes, one on both tiers, one on the host alone."""
    bench = Bench(**options)  # type: ignore[arg-type]
    bench.on_host(1, 2)
    bench.add(3)
    bench.write_all()
    bench.acknowledge_all()
    return bench


def test_books_that_add_up_are_recorded_pool_by_pool() -> None:
    bench = settled()
    audit(bench.cache, bench.probes)
    names = ("pool", "available", "evictable", "protected", "total")
    assert [tuple(row[name] for name in names) for row in bench.written("pool_audit")] == [
        ("device", 19, 1, 0, 20),
        ("host", 17, 3, 0, 20),
    ]


def test_states_are_a_pool_of_their_own() -> None:
    bench = settled(pools=(SIDE_POOLS["mamba"],), state_slots=4)
    audit(bench.cache, bench.probes)
    row = bench.written("pool_audit")[-1]
    assert (row["pool"], row["available"], row["evictable"], row["total"]) == ("mamba", 2, 2, 4)


def test_a_pool_without_a_limit_has_no_total() -> None:
    bench = settled(host_pages=0)
    audit(bench.cache, bench.probes)
    row = bench.written("pool_audit")[-1]
    assert (row["available"], row["evictable"], row["total"]) == (None, 3, None)


def test_a_lock_that_is_left_is_found() -> None:
    bench = settled()
    locks.lock(bench.tree, bench.find(3).node)
    with pytest.raises(AssertionError, match="is still held at the end: locks 1, host locks 0"):
        audit(bench.cache, bench.probes)


def test_a_host_lock_that_is_left_is_found() -> None:
    bench = settled()
    locks.lock_host(bench.tree, bench.find(1, 2).node)
    with pytest.raises(AssertionError, match="locks 0, host locks 1"):
        audit(bench.cache, bench.probes)


def test_a_page_that_nobody_owns_is_found() -> None:
    bench = settled()
    run(bench.cache.alloc_device(1, "test"))
    with pytest.raises(AssertionError, match="device: 2 pages in use on this rank, the tree has 1"):
        audit(bench.cache, bench.probes)


def test_a_host_page_that_only_this_rank_has_lost_is_found() -> None:
    bench = settled()
    bench.host.alloc(1)
    with pytest.raises(AssertionError, match="host: 4 pages in use on this rank, the tree has 3"):
        audit(bench.cache, bench.probes)


def test_a_count_that_the_group_has_lost_is_found() -> None:
    bench = settled()
    bench.tiers.host_room.take(1)
    with pytest.raises(AssertionError, match=r"host: 16 available \+ 3 used != 20"):
        audit(bench.cache, bench.probes)


def test_the_end_comes_only_when_nothing_is_queued() -> None:
    bench = settled()
    bench.add(7)
    with pytest.raises(AssertionError, match="something queued or in flight"):
        audit(bench.cache, bench.probes)
