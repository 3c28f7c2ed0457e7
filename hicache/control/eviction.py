"""Which leaf goes next: the one with the smallest key of the policy, ties by node id.

    lru       least recently used               mru    most recently used
    lfu       fewest inserting requests         fifo   oldest        filo   youngest
    priority  lowest priority                   slru   inserted by one request only
    tlru      what a conversation's next prompt can do without

What a policy holds equal goes by last access, the older first.

A lazy heap: a leaf is offered when it becomes one, under the key it then has. Most keys only grow, so a
stale entry comes up too early, never too late, and is put back under its present key. Where a key may
fall, whoever lowers it offers the leaf again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Literal

from hicache.config import EvictionPolicy
from hicache.control.node import Node
from hicache.core import NodeId

Key = tuple[float, ...]
Policy = Callable[[Node], Key]

# Inserting requests from which on slru protects a node.
SLRU_HITS_MIN = 2
# Stale entries that a queue may hold beside the valid ones before it is swept.
STALE_MAX = 1024


def lru(node: Node) -> Key:
    return (node.last_access,)


def mru(node: Node) -> Key:
    return (-node.last_access,)


def lfu(node: Node) -> Key:
    return (node.hit_count, node.last_access)


def fifo(node: Node) -> Key:
    return (node.created, node.last_access)


def filo(node: Node) -> Key:
    return (-node.created, node.last_access)


def priority(node: Node) -> Key:
    return (node.priority, node.last_access)


def slru(node: Node) -> Key:
    return (node.hit_count >= SLRU_HITS_MIN, node.last_access)


def tail_lru(threshold_pages: int = 0, next_prompt_pages: int = 0) -> Policy:
    """Least recently used, but first what the latency target does not need (arXiv 2510.15152).

    A conversation that has been `history_pages` long and will grow by `next_prompt_pages` meets its target
    when all but `threshold_pages` of that are cached. A node behind that point goes first. With both at 0,
    as servers have it by default, no node lies behind it and this is lru.
    """

    def key(node: Node) -> Key:
        needed_pages = max(node.history_pages + next_prompt_pages - threshold_pages, 0)
        return (node.first_page < needed_pages, node.last_access)

    return key


POLICIES: dict[EvictionPolicy, Policy] = {
    "lru": lru,
    "lfu": lfu,
    "fifo": fifo,
    "filo": filo,
    "mru": mru,
    "priority": priority,
    "slru": slru,
    "tlru": tail_lru(),
}
# Policies under which an access lowers a leaf's key.
FALLING: tuple[EvictionPolicy, ...] = ("mru",)


class LeafQueue:
    """Leaves of one tier in the order of a policy.

    Args:
        test: the property of a node that says whether it may be evicted now.
    """

    __slots__ = ("_heap", "_policy", "_queued", "_test")

    def __init__(self, test: Literal["is_device_leaf", "is_host_leaf"], policy: Policy) -> None:
        self._test = test
        self._policy = policy
        self._heap: list[tuple[Key, NodeId]] = []
        # Node id -> the key of its one valid entry, and the node. Other entries of it are passed over.
        self._queued: dict[NodeId, tuple[Key, Node]] = {}

    def offer(self, node: Node) -> None:
        """Take note of a leaf that has just become evictable, or whose key has fallen; ignore others."""
        if not getattr(node, self._test):
            return
        key = self._policy(node)
        queued = self._queued.get(node.id)
        if queued is None or key < queued[0]:
            self._queued[node.id] = (key, node)
            heapq.heappush(self._heap, (key, node.id))
            if len(self._heap) > 2 * len(self._queued) + STALE_MAX:
                self._sweep()

    def _sweep(self) -> None:
        self._heap = [(key, node_id) for node_id, (key, _) in self._queued.items()]
        heapq.heapify(self._heap)

    def pop(self) -> Node | None:
        """The leaf that goes next, or None when nothing can go. It is out of line until offered again."""
        heap = self._heap
        while heap:
            offered, node_id = heap[0]
            queued = self._queued.get(node_id)
            if queued is None or queued[0] != offered:
                heapq.heappop(heap)
                continue
            node = queued[1]
            if not getattr(node, self._test):
                heapq.heappop(heap)
                del self._queued[node_id]
                continue
            key = self._policy(node)
            if key == offered:
                heapq.heappop(heap)
                del self._queued[node_id]
                return node
            heapq.heapreplace(heap, (key, node_id))
            self._queued[node_id] = (key, node)
        return None

    def __contains__(self, node: Node) -> bool:
        """Is it in line? It may have ceased to be evictable since."""
        return node.id in self._queued
