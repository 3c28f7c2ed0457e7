"""The books at the end: every page is free or in the tree, as this rank and the group count."""

from __future__ import annotations

from hicache.control.cache import Cache
from hicache.control.pools import Room
from hicache.ports import Memory
from hicache.probes import Probes


def audit(cache: Cache, probes: Probes) -> None:
    """Assert that nothing is held and nothing is lost, and record the counts of each pool."""
    tree, tiers = cache.tree, cache.tiers
    assert cache.is_idle, "the end, with something queued or in flight"
    _assert_nothing_is_held(cache)
    states = tree.states_host if tree.has_state else 0
    pools: tuple[tuple[str, Memory | None, Room, int, int], ...] = (
        ("device", tiers.device, tiers.device_room, tree.evictable_pages, tree.protected_pages),
        ("host", tiers.host, tiers.host_room, tree.host_pages, 0),
        ("mamba", tiers.states, tiers.states_room, states, 0),
    )
    for pool, memory, room, evictable, protected in pools:
        if memory is not None:
            available, total = _balance(pool, memory, room, evictable + protected)
            probes.pool_audit(pool, available, evictable, protected, total)


def _assert_nothing_is_held(cache: Cache) -> None:
    for node in cache.tree.walk():
        held = node.lock_count or node.host_lock_count or node.write_pending
        assert not held, (
            f"{node} is still held at the end: locks {node.lock_count}, host locks {node.host_lock_count}, "
            f"write pending {node.write_pending}"
        )
        assert node.device is not None or node.host is not None, f"{node} is on neither tier"
        for tier, slots in (("device", node.device), ("host", node.host)):
            assert slots is None or len(slots) == node.page_count, (
                f"{node}: {len(slots or ())} {tier} slots for {node.page_count} pages"
            )
    assert cache.tree.host_locks == 0, f"{cache.tree.host_locks} host locks are held at the end"


def _balance(pool: str, memory: Memory, room: Room, used: int) -> tuple[int | None, int | None]:
    """Agreed free pages and capacity, or None where there is no limit."""
    assert memory.pages_used == used, (
        f"{pool}: {memory.pages_used} pages in use on this rank, the tree has {used}"
    )
    if not room.page_count:
        return None, None
    assert room.pages_free + used == room.page_count, (
        f"{pool}: {room.pages_free} available + {used} used != {room.page_count}"
    )
    return room.pages_free, room.page_count
