"""The radix tree over pages: structure, where each node's pages are, and what may be evicted.

    root -- [system prompt] -- [turn 1] -- [turn 2]      one edge = one segment, a multiple of a page
                            `- [other turn 1]

A segment is kept as packed bytes; a lookup walks with `tokens.startswith(segment, offset)`. A node is
on the device, on the host, on both, or (having lost both) gone. Devices lose leaves first, so the
nodes of a path that are on the device are always its front:

    0           device             host                end of match
    |- on device -|- on host only -|- not here ...

The tree never allocates, frees or copies: it returns actions (`actions.py`), and the cache applies
them. Node ids count creations, so equal histories give equal ids on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hicache.control.actions import Action, BackUp, FreeDevice, SplitNotice
from hicache.control.eviction import LeafQueue
from hicache.control.node import Node
from hicache.core import DIGEST_BYTES, Slot

# One lookup touches a whole path; the deeper node counts as the newer one.
TICK_DEPTH = 1e-5


@dataclass(frozen=True, slots=True)
class Match:
    """The longest usable prefix of a prompt.

    Attributes:
        node: deepest node reached, on either tier; the root when nothing matched.
        device_node: deepest node of the path that is on the device.
        device_pages, host_pages: pages up to `device_node`, and from there to `node`.
    """

    node: Node
    device_node: Node
    device_pages: int
    host_pages: int
    actions: list[Action] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Insert:
    """What an insert did.

    Attributes:
        node: the node at the end of the inserted key.
        new_pages: pages that the tree did not have on the device before.
        duplicate_pages: the request's own copies of pages the tree already had.
        new_digests: digests of pages that were on neither tier before.
    """

    node: Node
    new_pages: int
    duplicate_pages: int
    new_digests: bytes
    actions: list[Action] = field(default_factory=list)


class Tree:
    """One rank's radix tree.

    Args:
        page_size_bytes: bytes of packed tokens a page.
        backup_threshold: requests that must have inserted a node before it is backed up; 0 never.
    """

    def __init__(self, page_size_bytes: int, *, backup_threshold: int = 1) -> None:
        self.page_size_bytes = page_size_bytes
        self.backup_threshold = backup_threshold
        self.root = Node(0, None, b"", 0, b"")
        self.root.device = []
        self.root.lock_count = 1
        self.nodes_created = 1
        # Device pages in the tree: an unlocked node's can be evicted, sooner or later.
        self.evictable_pages = 0
        self.protected_pages = 0
        self.host_pages = 0
        self.device_leaves = LeafQueue("is_device_leaf")
        self.host_leaves = LeafQueue("is_host_leaf")
        self._ticks = 0.0

    # Lookup

    def match(self, tokens: bytes, page_limit: int) -> Match:
        """The longest prefix of at most `page_limit` pages on either tier; cuts a node that ends behind."""
        size = self.page_size_bytes
        end = page_limit * size
        node = device_node = self.root
        at = device_end = 0
        actions: list[Action] = []
        self._ticks = tick = self._ticks + 1.0
        startswith = tokens.startswith
        while at < end:
            child = node.only_child or node.children.get(tokens[at : at + size])
            if child is None:
                break
            key = child.key
            stop = at + len(key)
            if stop > end or not startswith(key, at):
                pages = self._common_pages(tokens, at, end, key)
                if pages == 0:
                    break
                child = self.split(child, pages, actions)
                end = stop = at + len(child.key)
            node = child
            at = stop
            node.last_access = tick
            tick += TICK_DEPTH
            if node.device is not None:
                device_node = node
                device_end = stop
        return Match(node, device_node, device_end // size, (at - device_end) // size, actions)

    def _common_pages(self, tokens: bytes, at: int, end: int, key: bytes) -> int:
        """Whole pages that `key` shares with `tokens[at:end]`, by halving."""
        size = self.page_size_bytes
        low, high = 0, min(len(key), end - at) // size
        while low < high:
            middle = (low + high + 1) // 2
            if tokens.startswith(key[: middle * size], at):
                low = middle
            else:
                high = middle - 1
        return low

    def path(self, node: Node) -> list[Node]:
        """From the root's child down to `node`."""
        found = []
        while node.parent is not None:
            found.append(node)
            node = node.parent
        found.reverse()
        return found

    def device_slots(self, node: Node) -> list[Slot]:
        """The page slots of the whole path, every node of which is on the device."""
        slots: list[Slot] = []
        for step in self.path(node):
            assert step.device is not None, f"{step} is not on the device, on the path to {node}"
            slots += step.device
        return slots

    def path_digests(self, node: Node) -> bytes:
        return b"".join(step.digests for step in self.path(node))

    def walk(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # Growth

    def insert(
        self, tokens: bytes, slots: list[Slot], digests: bytes, *, owned_pages: int, counted_pages: int
    ) -> Insert:
        """Make `slots` the tree's, page by page; pages it already has come back as duplicates.

        Args:
            slots: the request's page slots, one for each page to insert.
            digests: 8 bytes a page, from the start of the prompt.
            owned_pages: leading pages whose slots already are the tree's.
            counted_pages: leading pages that this request has inserted before: it counts a node once.
        """
        size = self.page_size_bytes
        end = len(slots) * size
        node = self.root
        at = 0
        duplicates: list[Slot] = []
        actions: list[Action] = []
        new_pages = 0
        threshold = self.backup_threshold
        backup_from: Node | None = None
        self._ticks = tick = self._ticks + 1.0
        # The same walk as in `match`, written out: a call for each node would cost as much as the rest.
        while at < end:
            child = node.only_child or node.children.get(tokens[at : at + size])
            if child is None:
                break
            key = child.key
            stop = at + len(key)
            if stop > end or not tokens.startswith(key, at):
                pages = self._common_pages(tokens, at, end, key)
                if pages == 0:
                    break
                child = self.split(child, pages, actions)
                stop = at + len(child.key)
            child.last_access = tick
            tick += TICK_DEPTH
            first, last = at // size, stop // size
            if child.device is None:
                # The request has just computed what the device had lost: its slots take the place.
                self.set_device(child, slots[first:last])
                new_pages += last - first
            else:
                if last > owned_pages:
                    duplicates += slots[max(first, owned_pages) : last]
                if last > counted_pages:
                    child.hit_count += 1
                    if threshold and child.hit_count >= threshold and child.host is None:
                        backup_from = child
            node = child
            at = stop
        new_digests = b""
        if at < end:
            first = at // size
            new_digests = digests[first * DIGEST_BYTES : len(slots) * DIGEST_BYTES]
            leaf = Node(self.nodes_created, node, tokens[at:end], len(slots) - first, new_digests)
            leaf.last_access = tick
            self.nodes_created += 1
            self._adopt(node, leaf)
            self.set_device(leaf, slots[first:])
            new_pages += leaf.page_count
            leaf.hit_count = 1
            if threshold and leaf.hit_count >= threshold:
                backup_from = leaf
            node = leaf
        if duplicates:
            actions.append(FreeDevice(duplicates))
        if backup_from is not None:
            chain = [step for step in self.path(backup_from) if step.host is None]
            actions.append(BackUp(chain))
        return Insert(node, new_pages, len(duplicates), new_digests, actions)

    def split(self, child: Node, page_count: int, actions: list[Action]) -> Node:
        """Cut `child` after `page_count` pages; returns the new node that holds the front.

        The back keeps its id: locks, acks and heaps that name it stay right. The front inherits its
        locks, since whoever holds the back holds the path to it.
        """
        assert 0 < page_count < child.page_count, f"split of {child} after {page_count} pages"
        size = self.page_size_bytes
        cut = page_count * size
        parent = child.parent
        assert parent is not None
        front = Node(
            self.nodes_created,
            parent,
            child.key[:cut],
            page_count,
            child.digests[: page_count * DIGEST_BYTES],
        )
        self.nodes_created += 1
        front.hit_count = child.hit_count
        front.last_access = child.last_access
        front.lock_count = child.lock_count
        front.host_lock_count = child.host_lock_count
        front.write_pending = child.write_pending
        if child.device is not None:
            front.device, child.device = child.device[:page_count], child.device[page_count:]
            front.device_children = 1
        if child.host is not None:
            front.host, child.host = child.host[:page_count], child.host[page_count:]
        # The front takes the child's place under the same first page.
        parent.children[front.key[:size]] = front
        if parent.only_child is child:
            parent.only_child = front
        child.parent = front
        child.key = child.key[cut:]
        child.digests = child.digests[page_count * DIGEST_BYTES :]
        child.page_count -= page_count
        self._adopt(front, child)
        if front.write_pending or front.host_lock_count:
            actions.append(SplitNotice(front, child))
        return front

    def _adopt(self, parent: Node, child: Node) -> None:
        parent.children[child.key[: self.page_size_bytes]] = child
        parent.only_child = child if len(parent.children) == 1 else None

    # Residency

    def set_device(self, node: Node, slots: list[Slot]) -> None:
        assert node.device is None and len(slots) == node.page_count, f"{node}: {len(slots)} slots"
        assert node.parent is not None
        node.device = slots
        node.parent.device_children += 1
        if node.lock_count:
            self.protected_pages += node.page_count
        else:
            self.evictable_pages += node.page_count
            self.device_leaves.offer(node)

    def clear_device(self, node: Node) -> list[Slot]:
        """Take the device pages of an unlocked leaf away and return their slots."""
        assert node.is_device_leaf, f"{node} can't leave the device: {node.device_children} children there"
        assert node.device is not None and node.parent is not None
        slots, node.device = node.device, None
        self.evictable_pages -= node.page_count
        parent = node.parent
        parent.device_children -= 1
        self.device_leaves.offer(parent)
        self.host_leaves.offer(node)
        return slots

    def set_host(self, node: Node, slots: list[Slot]) -> None:
        assert node.host is None, f"{node} is on the host already"
        node.host = slots
        self.host_pages += node.page_count

    def clear_host(self, node: Node) -> list[Slot]:
        assert node.host is not None, f"{node} is not on the host"
        slots, node.host = node.host, None
        self.host_pages -= node.page_count
        return slots

    def remove(self, node: Node) -> None:
        """Forget a node that is on no tier."""
        assert node.device is None and node.host is None and not node.children, f"{node} is still in use"
        parent = node.parent
        assert parent is not None
        del parent.children[node.key[: self.page_size_bytes]]
        parent.only_child = next(iter(parent.children.values())) if len(parent.children) == 1 else None
        node.is_alive = False
        self.host_leaves.offer(parent)
