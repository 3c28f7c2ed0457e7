"""Which leaf goes next: least recently used first, ties by node id.

A lazy heap: a leaf is offered once when it becomes one, under the time it had then. Times only grow,
so a stale entry comes up too early, never too late, and is put back under its present time.
"""

from __future__ import annotations

import heapq
from typing import Literal

from hicache.control.node import Node


class LeafQueue:
    """Leaves of one tier, oldest access first.

    Args:
        test: the property of a node that says whether it may be evicted now.
    """

    __slots__ = ("_heap", "_queued", "_test")

    def __init__(self, test: Literal["is_device_leaf", "is_host_leaf"]) -> None:
        self._test = test
        self._heap: list[tuple[float, int, Node]] = []
        # One entry a node is enough: it is put right when it comes up.
        self._queued: set[int] = set()

    def offer(self, node: Node) -> None:
        """Take note of a node that has just become evictable; others are passed over."""
        if node.id not in self._queued and getattr(node, self._test):
            self._queued.add(node.id)
            heapq.heappush(self._heap, (node.last_access, node.id, node))

    def pop(self) -> Node | None:
        """The least recently used leaf, or None when nothing can go."""
        heap = self._heap
        while heap:
            offered, _, node = heap[0]
            if not getattr(node, self._test):
                heapq.heappop(heap)
                self._queued.discard(node.id)
            elif node.last_access != offered:
                heapq.heapreplace(heap, (node.last_access, node.id, node))
            else:
                heapq.heappop(heap)
                self._queued.discard(node.id)
                return node
        return None

    def __contains__(self, node: Node) -> bool:
        """Is it in line? It may have ceased to be evictable since."""
        return node.id in self._queued
