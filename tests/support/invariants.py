"""What is true of one rank between two steps, recomputed from scratch.

Locks, pending flags, leaf queues, slots, states, tags and counters are all kept up to date in small changes;
here each is derived again from who holds what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from hicache.control import keys
from hicache.control.active import Active
from hicache.control.cache import Cache
from hicache.control.locks import DeviceLock, HostLock
from hicache.control.node import Node
from hicache.control.pools import Room
from hicache.control.scheduler import Scheduler
from hicache.core import HASH_BYTES, Slot
from hicache.loop import Mailbox
from hicache.ports import Memory


def assert_invariants(scheduler: Scheduler) -> None:
    cache = scheduler._cache
    nodes = list(cache.tree.walk())
    _assert_locks(scheduler, nodes)
    _assert_tree(cache, nodes)
    _assert_device_slots(scheduler, nodes)
    _assert_host_slots(cache, nodes)
    _assert_tags(scheduler, nodes)
    _assert_prefetches(scheduler)


def holders(scheduler: Scheduler) -> list[Active]:
    """Requests that hold pages: those that run, and the one between two chunks."""
    chunked = [scheduler._chunked] if scheduler._chunked is not None else []
    return [*scheduler._running, *chunked]


def waiting_on(mailbox: Mailbox[Slot | None]) -> list[Slot | None]:
    return list(mailbox._items)


# Locks and flags


def _device_locks(scheduler: Scheduler) -> Iterator[DeviceLock]:
    cache = scheduler._cache
    for active in holders(scheduler):
        assert active.lock is not None, f"{active.rid} runs without a lock"
        yield active.lock
    for queued in (*cache.write_queue, *cache.load_queue):
        yield queued.lock
    for moving in (*cache.writes, *cache.loads):
        yield from moving.device_locks


def _host_locks(cache: Cache) -> Iterator[HostLock]:
    for carrier in (*cache.load_queue, *cache.loads):
        yield from carrier.host_locks
    if cache.prefetches is not None:
        for prefetch in cache.prefetches._ongoing.values():
            yield prefetch.lock
        for backup in cache.prefetches.backups:
            yield backup.lock


def _covered(lock: HostLock) -> Iterator[Node]:
    """What splits have made of the node that was locked."""
    node = lock.node
    while node.parent is not None:
        yield node
        if node.first_page == lock.first_page:
            return
        node = node.parent


def _assert_locks(scheduler: Scheduler, nodes: list[Node]) -> None:
    cache = scheduler._cache
    tree = cache.tree
    on_device: Counter[int] = Counter()
    for lock in _device_locks(scheduler):
        assert lock.is_held
        on_device.update(node.id for node in tree.path(lock.node))
    on_host: Counter[int] = Counter()
    for host_lock in _host_locks(cache):
        assert host_lock.is_held
        on_host.update(node.id for node in _covered(host_lock))
    pending = {node.id for carrier in (*cache.write_queue, *cache.writes) for node in carrier.nodes}
    for node in nodes:
        assert node.lock_count == on_device[node.id], f"{node}: {on_device[node.id]} holders"
        assert node.host_lock_count == on_host[node.id], (
            f"{node}: {node.host_lock_count} host locks, {on_host[node.id]} holders"
        )
        assert node.write_pending == (node.id in pending), f"{node}: pending {node.write_pending}"
    for waiting in scheduler._waiting:
        assert waiting.lock is None and not waiting.slots, f"{waiting.rid} waits and holds pages"


# Shape and counters


def _assert_tree(cache: Cache, nodes: list[Node]) -> None:
    tree = cache.tree
    evictable = protected = on_host = states = 0
    for node in nodes:
        _assert_shape(cache, node)
        _assert_hashes(cache, node)
        if node.device is not None and node.lock_count:
            protected += node.page_count
        elif node.device is not None:
            evictable += node.page_count
        on_host += node.page_count if node.host is not None else 0
        states += node.host_state is not None
        assert not node.is_device_leaf or node in tree.device_leaves, f"{node} would never be evicted"
        assert not node.is_host_leaf or node in tree.host_leaves, f"{node} would never leave the host"
    assert (evictable, protected) == (tree.evictable_pages, tree.protected_pages)
    assert on_host == tree.host_pages
    assert states == (tree.states_host if tree.has_state else 0)


def _assert_shape(cache: Cache, node: Node) -> None:
    tree = cache.tree
    parent = node.parent
    assert parent is not None
    assert node.is_alive
    assert node.end_page == parent.end_page + node.page_count
    assert len(node.key) == node.page_count * tree.page_size_bytes
    assert len(node.digests) == 8 * node.page_count
    assert node in parent.children.values()
    assert node.device is not None or node.host is not None, f"{node} is nowhere"
    assert node.device is None or parent.device is not None, f"{node} is cut off from the device's prefix"
    is_reachable = cache.is_write_back or parent is tree.root or parent.host is not None
    assert node.host is None or is_reachable, f"{node}: a hole above it"
    children = list(node.children.values())
    assert node.device_children == len([child for child in children if child.device is not None])
    assert node.only_child is (children[0] if len(children) == 1 else None)
    for slots in (node.device, node.host):
        assert slots is None or len(slots) == node.page_count
    assert not node.device_state or node.device is not None, f"{node}: a state without its pages"
    assert node.host_state is None or node.host is not None, f"{node}: a state without its pages"


def _assert_hashes(cache: Cache, node: Node) -> None:
    if node.hashes is None:
        return
    assert node.parent is not None
    above = node.parent.hashes or b""
    previous = above[-HASH_BYTES:] or node.namespace
    expected = _chain(node.key, cache.tree.page_size_bytes, previous)
    assert node.hashes == expected, f"{node}: hashes of other pages"


@lru_cache(maxsize=4096)
def _chain(key: bytes, page_size_bytes: int, previous: bytes) -> bytes:
    # A node's pages seldom change between two steps, and all ranks of a world have the same.
    return keys.chain_hashes(key, first_page=0, page_size_bytes=page_size_bytes, previous=previous)


# Slots: each has one owner, on this rank and in the group's count


def _assert_device_slots(scheduler: Scheduler, nodes: list[Node]) -> None:
    tiers = scheduler._cache.tiers
    slots = [slot for active in holders(scheduler) for slot in active.slots[active.owned_pages :]]
    for node in nodes:
        slots += node.device or []
    _assert_owned("device", slots, tiers.device, tiers.device_room, len(slots))


def _assert_host_slots(cache: Cache, nodes: list[Node]) -> None:
    tiers = cache.tiers
    if tiers.host is None:
        return
    pages: list[Slot] = []
    states: list[Slot] = []
    # What the group counts and this rank could not get.
    pages_missing = states_missing = 0
    for node in nodes:
        pages += node.host or []
        states += [] if node.host_state is None else [node.host_state]
    for queued in cache.write_queue:
        if queued.slots is None:
            pages_missing += queued.page_count
            states_missing += queued.state_count
        else:
            assert (len(queued.slots.pages), len(queued.slots.states)) == (
                queued.page_count,
                queued.state_count,
            )
            pages += queued.slots.pages
            states += queued.slots.states
    if cache.prefetches is not None:
        for prefetch in cache.prefetches.unfinished:
            if prefetch.slots is None:
                pages_missing += prefetch.page_count - prefetch.given_pages
                states_missing += prefetch.state_count
            else:
                pages += prefetch.slots.pages[prefetch.given_pages : prefetch.page_count]
                states += prefetch.slots.states
        for slot in waiting_on(cache.prefetches.queues.releases):
            pages_missing += slot is None
            pages += [] if slot is None else [slot]
        for slot in waiting_on(cache.prefetches.queues.state_releases):
            states_missing += slot is None
            states += [] if slot is None else [slot]
    _assert_owned("host", pages, tiers.host, tiers.host_room, len(pages) + pages_missing)
    if tiers.states is not None:
        _assert_owned("states", states, tiers.states, tiers.states_room, len(states) + states_missing)


def _assert_owned(name: str, slots: list[Slot], memory: Memory, room: Room, counted: int) -> None:
    assert len(set(slots)) == len(slots), f"{name}: one slot, two owners"
    assert len(slots) == memory.pages_used, f"{name}: {memory.pages_used} in use, {len(slots)} owned"
    if room.page_count:
        assert room.pages_free == room.page_count - counted, (
            f"{name}: {room.pages_free} free of {room.page_count} as the group counts, {counted} taken"
        )


# Tags


def _assert_tags(scheduler: Scheduler, nodes: list[Node]) -> None:
    """Pages hold what they should, but where a copy to them is under way."""
    cache = scheduler._cache
    ledger = scheduler._model._ledger
    loading = {node.id for carrier in (*cache.load_queue, *cache.loads) for node in carrier.nodes}
    writing = {node.id for moving in cache.writes for node in moving.nodes}
    for node in nodes:
        if node.device is not None and node.id not in loading:
            assert ledger.device.check(node.device, node.digests) is None, f"{node}: wrong page on the device"
        if node.host is not None and node.id not in writing:
            assert ledger.host.check(node.host, node.digests) is None, f"{node}: wrong page on the host"


# The external tier


def _assert_prefetches(scheduler: Scheduler) -> None:
    prefetches = scheduler._cache.prefetches
    if prefetches is None:
        return
    ongoing = prefetches._ongoing
    assert prefetches.books.occupied_pages == sum(prefetch.pages_asked for prefetch in ongoing.values())
    waiting = {active.handle for active in scheduler._waiting}
    assert set(ongoing) <= waiting, "a prefetch for somebody who does not wait"
    for name, handles in (
        ("retries", prefetches._retries),
        ("waits", prefetches._waits),
        ("expired", prefetches._expired),
        ("tries", prefetches.books.tries),
    ):
        assert set(handles) <= waiting, f"{name} of somebody who does not wait"
    for prefetch in ongoing.values():
        assert prefetch.op in prefetches._unfinished
        assert 0 <= prefetch.given_pages <= max(prefetch.completed_pages, 0) <= max(prefetch.page_count, 0)
