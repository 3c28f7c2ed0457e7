"""What is true of one rank between two steps, recomputed from scratch.

Locks, pending flags, leaf queues, slots, tags and counters are all kept up to date in small changes;
here each is derived again from who holds what.
"""

from __future__ import annotations

from collections import Counter

from hicache.control.node import Node
from hicache.control.scheduler import Scheduler


def assert_invariants(scheduler: Scheduler) -> None:
    cache = scheduler._cache
    tree = cache.tree
    running = scheduler._running
    in_flight = [*cache.writes, *cache.loads]

    locks: Counter[int] = Counter()
    anchors = [active.node for active in running]
    anchors += [queued.anchor for queued in (*cache.write_queue, *cache.load_queue)]
    anchors += [anchor for moving in in_flight for anchor in moving.anchors]
    for anchor in anchors:
        assert anchor is not None
        for node in tree.path(anchor):
            locks[node.id] += 1
    host_locks = Counter(node.id for carrier in (*cache.load_queue, *cache.loads) for node in carrier.nodes)
    pending = {node.id for carrier in (*cache.write_queue, *cache.writes) for node in carrier.nodes}
    loading = set(host_locks)

    evictable = protected = on_host = 0
    device_slots: list[int] = [slot for active in running for slot in active.slots[active.owned_pages :]]
    host_slots: list[int] = []
    for node in tree.walk():
        _assert_shape(scheduler, node)
        assert node.lock_count == locks[node.id], f"{node}: {locks[node.id]} holders"
        assert node.host_lock_count == host_locks[node.id], f"{node}: {host_locks[node.id]} loads of it"
        assert node.write_pending == (node.id in pending), f"{node}: pending {node.write_pending}"
        if node.device is not None:
            device_slots += node.device
            if node.lock_count:
                protected += node.page_count
            else:
                evictable += node.page_count
            if node.id not in loading:
                assert scheduler._ledger.device.check(node.device, node.digests) is None, node
        if node.host is not None:
            host_slots += node.host
            on_host += node.page_count
            if node.id not in pending:
                assert scheduler._ledger.host.check(node.host, node.digests) is None, node
        assert not node.is_device_leaf or node in tree.device_leaves, f"{node} would never be evicted"
        assert not node.is_host_leaf or node in tree.host_leaves, f"{node} would never leave the host"

    assert (evictable, protected) == (tree.evictable_pages, tree.protected_pages)
    assert on_host == tree.host_pages
    for slots, memory in ((device_slots, cache.tiers.device), (host_slots, cache.tiers.host)):
        assert len(set(slots)) == len(slots), "one slot, two owners"
        if memory is not None:
            assert len(slots) == memory.pages_used, f"{memory.pages_used} pages in use, {len(slots)} owned"
    room = cache.tiers.device_room
    if room.page_count:
        assert room.pages_free == room.page_count - len(device_slots)
    host_room = cache.tiers.host_room
    if cache.tiers.host is not None and host_room.page_count:
        assert host_room.pages_free == host_room.page_count - on_host


def _assert_shape(scheduler: Scheduler, node: Node) -> None:
    tree = scheduler._cache.tree
    parent = node.parent
    assert parent is not None
    assert node.is_alive
    assert len(node.key) == node.page_count * tree.page_size_bytes
    assert len(node.digests) == 8 * node.page_count
    assert parent.children[node.key[: tree.page_size_bytes]] is node
    assert node.device is not None or node.host is not None, f"{node} is nowhere"
    assert node.device is None or parent.device is not None, f"{node} is cut off from the device's prefix"
    assert node.host is None or parent is tree.root or parent.host is not None, f"{node}: a hole above it"
    assert node.device_children == sum(child.device is not None for child in node.children.values())
    children = list(node.children.values())
    assert node.only_child is (children[0] if len(children) == 1 else None)
    assert node.device is None or len(node.device) == node.page_count
    # A backup whose slots this rank could not reserve has none until the vote.
    assert node.host is None or len(node.host) in (
        (node.page_count, 0) if node.write_pending else (node.page_count,)
    )
