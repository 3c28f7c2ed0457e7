"""The radix tree over pages: structure, where each node's pages are, and what may be evicted.

    root -- [system prompt] -- [turn 1] -- [turn 2]      one edge = one segment, a multiple of a page
                            `- [other turn 1]

A segment is kept as packed bytes; a lookup walks with `tokens.startswith(segment, offset)`. A node is
on the device, on the host, on both, or (having lost both) gone. Devices lose leaves first, so the
nodes of a path that are on the device are always its front:

    0           device             host                end of match
    |- on device -|- on host only -|- not here ...

Under write_through the host's nodes are the front of each path too (`requires_backed_parent`). Under
write_back the host gets a node when the device gives it up, so there may be nodes above it that it lacks.

One root serves every namespace: its children are found under namespace and first page, so prompts of two
namespaces part at the root.

An access gives all of a path the same time: of two nodes of one path, only the deeper can be a leaf, so
no queue ever compares them.

The tree never allocates, frees or copies: it returns actions (`actions.py`), and the cache applies
them. Node ids count creations, so equal histories give equal ids on every rank.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from hicache.config import EvictionPolicy
from hicache.control.actions import Action, BackUp, FreeDevice, SplitNotice
from hicache.control.eviction import FALLING, POLICIES, LeafQueue
from hicache.control.keys import chain_hashes
from hicache.control.node import Node
from hicache.core import DIGEST_BYTES, HASH_BYTES, PLAIN, Slot

# The root's priority until a request with a priority has come: what storage brings then goes first.
PRIORITY_MIN = -(1 << 63)
# A backup threshold that no node ever reaches; small, as Python compares small numbers faster.
NEVER = 1 << 29


@dataclass(frozen=True, slots=True)
class Match:
    """The longest usable prefix of a prompt.

    Attributes:
        node: deepest node that can be used, on either tier; the root when nothing matched.
        device_node: deepest node of the path that can be used without a copy from the host.
        device_pages, host_pages: pages up to `device_node`, and from there to `node`. Where nodes carry a
            recurrent state, both nodes end where one is (on the device, or anywhere), and of `host_pages`
            some, even all, may be on the device already: what is missing there is then the state.
        kv_pages: pages that either tier has, whether or not a state makes them usable.
    """

    node: Node
    device_node: Node
    device_pages: int
    host_pages: int
    kv_pages: int
    actions: list[Action] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Insert:
    """What an insert has done so far.

    Attributes:
        node: the node at the end of what has been inserted.
        new_pages: pages that the tree did not have on the device before.
        unevicted_pages: those of them that the host had: the device gets them back without a copy.
        duplicate_pages: the request's own copies of pages the tree already had.
        nodes_counted: nodes whose hit count has risen.
        new_digests: digests of pages that were on neither tier before.
        actions: what to apply now, in order; never one that an earlier part of this insert has returned.
        is_finished: else apply the actions and call `Tree.resume`.
    """

    node: Node
    new_pages: int
    unevicted_pages: int
    duplicate_pages: int
    nodes_counted: int
    new_digests: bytes
    actions: list[Action]
    is_finished: bool


@dataclass(frozen=True, slots=True)
class HostInsert:
    """What became of pages that came from storage.

    Attributes:
        node: the deepest node that they have reached.
        matched_pages: leading pages that the tree had; their fetched copies are `duplicate_slots`.
        loaded_pages: pages whose slots are the tree's now.
        duplicate_slots, dropped_slots: slots to give back.
        new_digests: digests of pages that were on neither tier before.
        outcome: `loaded` some, `dropped` all that was not matched, or "" where all was matched.
    """

    node: Node
    matched_pages: int
    loaded_pages: int
    duplicate_slots: list[Slot]
    dropped_slots: list[Slot]
    new_digests: bytes
    outcome: Literal["loaded", "dropped", ""]
    actions: list[Action]


@dataclass(slots=True)
class _Tally:
    """What an insert has done, and what its owner has not been told yet."""

    new_pages: int = 0
    unevicted_pages: int = 0
    duplicate_pages: int = 0
    new_digests: bytes = b""
    is_new_leaf_counted: bool = False
    duplicates: list[Slot] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)

    def report(self, node: Node, nodes_counted: int, backup: BackUp | None, *, is_finished: bool) -> Insert:
        actions, self.actions = self.actions, []
        if self.duplicates:
            actions.append(FreeDevice(self.duplicates))
            self.duplicate_pages += len(self.duplicates)
            self.duplicates = []
        if backup is not None:
            actions.append(backup)
        return Insert(
            node,
            self.new_pages,
            self.unevicted_pages,
            self.duplicate_pages,
            nodes_counted,
            self.new_digests,
            actions,
            is_finished,
        )


class Tree:
    """One rank's radix tree.

    Args:
        page_size_bytes: bytes of packed tokens a page.
        backup_threshold: requests that must have inserted a node before it is backed up; 0 never.
        has_state: a recurrent state belongs to the end of each node at which an insert has ended.
        requires_backed_parent: the host has a node only with all its ancestors. Without it (write_back)
            inserts do not count hits either, as nothing is backed up for being hit.
    """

    def __init__(
        self,
        page_size_bytes: int,
        *,
        backup_threshold: int = 1,
        eviction_policy: EvictionPolicy = "lru",
        has_state: bool = False,
        requires_backed_parent: bool = True,
    ) -> None:
        self.page_size_bytes = page_size_bytes
        self.backup_threshold = backup_threshold
        self.eviction_policy = eviction_policy
        self.has_state = has_state
        self.requires_backed_parent = requires_backed_parent
        self.root = Node(0, None, b"", 0, hashes=b"", priority=PRIORITY_MIN)
        self.root.device = []
        self.root.lock_count = 1
        self.nodes_created = 1
        self._ticks = 0.0
        # The insert that waits for its actions to be applied.
        self._growth: Generator[Insert, None, None] | None = None
        self._start_empty()

    def _start_empty(self) -> None:
        # Device pages in the tree: an unlocked node's can be evicted, sooner or later.
        self.evictable_pages = 0
        self.protected_pages = 0
        self.host_pages = 0
        self.states_host = 0
        # Host locks held, those on the root included.
        self.host_locks = 0
        policy = POLICIES[self.eviction_policy]
        self.device_leaves = LeafQueue("is_device_leaf", policy)
        self.host_leaves = LeafQueue("is_host_leaf", policy)

    # Lookup

    def match(self, tokens: bytes, page_limit: int, namespace: bytes = PLAIN) -> Match:
        """The longest prefix of at most `page_limit` pages on either tier; cuts a node that ends behind."""
        size = self.page_size_bytes
        end = page_limit * size
        node = self.root
        at = 0
        actions: list[Action] = []
        startswith = tokens.startswith
        child = node.children.get(namespace + tokens[:size]) if end else None
        while child is not None:
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
            if at >= end:
                break
            child = node.only_child or node.children.get(tokens[at : at + size])
        kv_pages = node.end_page
        if self.has_state:
            while node.parent is not None and not node.device_state and node.host_state is None:
                node = node.parent
        self._ticks = now = self._ticks + 1.0
        step = node
        while step.parent is not None:
            step.last_access = now
            step = step.parent
        device_node = node
        while device_node.parent is not None and (
            device_node.device is None or (self.has_state and not device_node.device_state)
        ):
            device_node = device_node.parent
        if self.eviction_policy in FALLING:
            for step in self.path(node):
                self._note_access(step)
        device_pages = device_node.end_page
        return Match(node, device_node, device_pages, node.end_page - device_pages, kv_pages, actions)

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

    def path_hashes(self, node: Node) -> bytes:
        """Hashes of all pages from the root to the end of `node`."""
        found = []
        for step in self.path(node):
            assert step.hashes is not None, f"{step} has no hashes, on the path to {node}"
            found.append(step.hashes)
        return b"".join(found)

    def last_hash(self, node: Node) -> bytes:
        """Hash of the last page of `node`; empty at the root, where a namespace takes its place."""
        assert node.hashes is not None, f"{node} has no hashes"
        return node.hashes[-HASH_BYTES:]

    def can_anchor(self, node: Node) -> bool:
        """May pages from storage be inserted below it?"""
        return node.parent is None or node.host is not None

    def walk(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # Growth

    def insert(
        self,
        tokens: bytes,
        slots: list[Slot],
        digests: bytes,
        *,
        owned_pages: int,
        counted_pages: int,
        namespace: bytes = PLAIN,
        priority: int = 0,
        prompt_pages: int = 0,
        hashes: bytes = b"",
    ) -> Insert:
        """Make `slots` the tree's, page by page; pages it already has come back as duplicates.

        Args:
            slots: the request's page slots, one for each page to insert.
            digests: 8 bytes a page, from the start of the prompt.
            owned_pages: leading pages whose slots already are the tree's.
            counted_pages: leading pages that this request has inserted before: it counts a node once.
            prompt_pages: pages of the prompt where an answer follows, else 0. A node ends there, and all up
                to it gets the next higher priority, so that the answer can be evicted without the prompt.
                Not where nodes carry a state: it is at the end of the answer.
            hashes: 32 bytes a page, from the start of the prompt; empty without storage.
        """
        assert self._growth is None, "an insert begins while another one waits for its actions"
        page_count = len(slots)
        stretches = [(page_count, priority)]
        if 0 < prompt_pages < page_count and not self.has_state:
            stretches = [(prompt_pages, priority + 1), (page_count, priority)]
        self._growth = self._grow(
            tokens, slots, digests, owned_pages, counted_pages, namespace, stretches, hashes
        )
        return self.resume()

    def resume(self) -> Insert:
        """Go on with an insert whose actions have been applied."""
        assert self._growth is not None, "no insert waits for its actions"
        done = next(self._growth)
        if done.is_finished:
            self._growth = None
        return done

    def _grow(
        self,
        tokens: bytes,
        slots: list[Slot],
        digests: bytes,
        owned_pages: int,
        counted_pages: int,
        namespace: bytes,
        stretches: list[tuple[int, int]],
        hashes: bytes,
    ) -> Generator[Insert, None, None]:
        """The walk of an insert; stops where a backup has to run before it goes on.

        Args:
            stretches: page -> least priority of the nodes up to it; a node ends at each of these pages.
        """
        size = self.page_size_bytes
        owned_end = owned_pages * size
        # Where nothing is ever counted, no page lies behind those that have been.
        counted_end = (counted_pages if self.requires_backed_parent else len(slots)) * size
        threshold = self.backup_threshold or NEVER
        startswith = tokens.startswith
        node = root = self.root
        root.priority = max(root.priority, stretches[0][1])
        at = 0
        nodes_counted = 0
        tally = _Tally()
        self._ticks = now = tick = self._ticks + 1.0
        # The same walk as in `match`, written out: a call for each node would cost as much as the rest.
        child = root.children.get(namespace + tokens[:size]) if slots else None
        for end_page, priority in stretches:
            end = end_page * size
            while child is not None and at < end:
                key = child.key
                stop = at + len(key)
                if stop > end or not startswith(key, at):
                    pages = self._common_pages(tokens, at, end, key)
                    if pages == 0:
                        break
                    child = self.split(child, pages, tally.actions)
                    stop = at + len(child.key)
                    tick = self._ticks = self._ticks + 1.0
                child.last_access = tick
                if child.priority < priority:
                    child.priority = priority
                if stop > owned_end:
                    if child.device is None:
                        # The request has just computed what the device had lost: its slots take the place.
                        self.set_device(child, slots[at // size : stop // size])
                        tally.new_pages += child.page_count
                        tally.unevicted_pages += child.page_count
                    else:
                        tally.duplicates += slots[max(at, owned_end) // size : stop // size]
                if stop > counted_end:
                    nodes_counted += 1
                    child.hit_count = hits = child.hit_count + 1
                    if hits >= threshold and child.host is None and not child.write_pending:
                        yield tally.report(
                            child,
                            nodes_counted,
                            BackUp(self._unbacked(child), "threshold"),
                            is_finished=False,
                        )
                node = child
                at = stop
                # The next one is looked up only now: a backup may have made the host forget it.
                child = node.only_child or node.children.get(tokens[at : at + size])
            if at < end:
                first = at // size
                leaf = self._new_node(
                    node,
                    tokens[at:end],
                    digests[first * DIGEST_BYTES : end_page * DIGEST_BYTES],
                    hashes[first * HASH_BYTES : end_page * HASH_BYTES] if hashes else None,
                    namespace,
                    priority,
                    now,
                )
                leaf.last_access = tick
                self.set_device(leaf, slots[first:end_page])
                tally.new_pages += leaf.page_count
                tally.new_digests += leaf.digests
                node = leaf
                at = end
                child = None
                if at > counted_end:
                    nodes_counted += 1
                    leaf.hit_count = 1
                    tally.is_new_leaf_counted = True
        self._note_access(node)
        yield tally.report(node, nodes_counted, self._last_backup(node, tally, threshold), is_finished=True)

    def _last_backup(self, node: Node, tally: _Tally, threshold: int) -> BackUp | None:
        """What an insert that ends at `node` has to back up because it ends there."""
        if self.has_state and node is not self.root:
            node.device_state = True
        if tally.is_new_leaf_counted:
            return BackUp(self._unbacked(node), "threshold") if node.hit_count >= threshold else None
        is_state_missing = node.device_state and node.host_state is None
        if is_state_missing and node.host is not None and not node.write_pending and threshold < NEVER:
            return BackUp([node], "side_pool")
        return None

    def _unbacked(self, node: Node) -> list[Node]:
        """`node` and its ancestors up to the first that the host has or is about to get, root first."""
        chain = []
        while node.parent is not None and node.host is None and not node.write_pending:
            chain.append(node)
            node = node.parent
        chain.reverse()
        return chain

    def _new_node(
        self,
        parent: Node,
        key: bytes,
        digests: bytes,
        hashes: bytes | None,
        namespace: bytes,
        priority: int,
        now: float,
    ) -> Node:
        """A new leaf of the tree, on no tier yet."""
        node = Node(
            self.nodes_created,
            parent,
            key,
            len(key) // self.page_size_bytes,
            digests=digests,
            hashes=hashes,
            namespace=namespace,
            priority=priority,
            now=now,
        )
        self.nodes_created += 1
        parent.children[self._key_in_parent(node)] = node
        self._note_only_child(parent)
        if self.eviction_policy == "tlru":
            step: Node | None = parent
            while step is not None and step.history_pages < node.end_page:
                step.history_pages = node.end_page
                step = step.parent
        return node

    def host_insert(
        self,
        anchor: Node,
        tokens: bytes,
        slots: list[Slot],
        digests: bytes,
        hashes: bytes,
        *,
        namespace: bytes = PLAIN,
    ) -> HostInsert:
        """Make host pages that came from storage the tree's, below `anchor`.

        Where only the device has a page, the host gets it now (not under write_back, whose copies are made
        at eviction). Nothing is inserted below a node that the host lacks, if it requires parents.

        Args:
            tokens, slots, digests, hashes: of the pages behind the anchor alone.
            namespace: heeded where the anchor is the root; below, it is the anchor's.
        """
        if self.requires_backed_parent and not self.can_anchor(anchor):
            return HostInsert(anchor, 0, 0, [], slots, b"", "dropped", [])
        size = self.page_size_bytes
        end = len(slots) * size
        node = anchor
        at = 0
        actions: list[Action] = []
        duplicates: list[Slot] = []
        new_digests = b""
        prefix = PLAIN
        if anchor is self.root:
            prefix = namespace
        else:
            namespace = anchor.namespace
        self._touch(anchor)
        while at < end:
            child = node.children.get(prefix + tokens[at : at + size])
            if child is None:
                break
            prefix = PLAIN
            pages = self._common_pages(tokens, at, end, child.key)
            if pages < child.page_count:
                child = self.split(child, pages, actions)
            first = at // size
            last = first + pages
            if child.host is None and self.requires_backed_parent:
                self.set_host(child, slots[first:last])
                if child.hashes is None:
                    child.hashes = hashes[first * HASH_BYTES : last * HASH_BYTES]
            else:
                duplicates += slots[first:last]
            self._touch(child)
            node = child
            at = last * size
        if at < end:
            first = at // size
            new_digests = digests[first * DIGEST_BYTES : len(slots) * DIGEST_BYTES]
            new_hashes = hashes[first * HASH_BYTES : len(slots) * HASH_BYTES]
            self._ticks += 1.0
            # It is worth what the prefix is that it continues.
            node = self._new_node(
                node, tokens[at:end], new_digests, new_hashes, namespace, node.priority, self._ticks
            )
            self.set_host(node, slots[first:])
            self.host_leaves.offer(node)
        loaded_pages = len(slots) - len(duplicates)
        outcome: Literal["loaded", ""] = "loaded" if loaded_pages else ""
        return HostInsert(node, len(duplicates), loaded_pages, duplicates, [], new_digests, outcome, actions)

    def _touch(self, node: Node) -> None:
        self._ticks += 1.0
        node.last_access = self._ticks
        self._note_access(node)

    def _note_access(self, node: Node) -> None:
        """Where an access makes a leaf the next to go, the queues have to hear of it."""
        if self.eviction_policy in FALLING:
            self.device_leaves.offer(node)
            self.host_leaves.offer(node)

    def split(self, child: Node, page_count: int, actions: list[Action]) -> Node:
        """Cut `child` after `page_count` pages; returns the new node that holds the front.

        The back keeps its id: locks, acks and heaps that name it stay right. The front inherits its
        locks, since whoever holds the back holds the path to it, and whoever holds the whole of it on the
        host holds both. A recurrent state is at the end and stays there. Both halves count as just used.
        """
        assert 0 < page_count < child.page_count, f"split of {child} after {page_count} pages"
        cut = page_count * self.page_size_bytes
        parent = child.parent
        assert parent is not None
        self._ticks = now = self._ticks + 1.0
        front = Node(
            self.nodes_created,
            parent,
            child.key[:cut],
            page_count,
            digests=child.digests[: page_count * DIGEST_BYTES],
            namespace=child.namespace,
            priority=child.priority,
            now=now,
        )
        self.nodes_created += 1
        front.created = child.created
        front.hit_count = child.hit_count
        front.history_pages = child.history_pages
        front.lock_count = child.lock_count
        front.host_lock_count = child.host_lock_count
        front.write_pending = child.write_pending
        if child.hashes is not None:
            front.hashes = child.hashes[: page_count * HASH_BYTES]
            child.hashes = child.hashes[page_count * HASH_BYTES :]
        if child.device is not None:
            front.device, child.device = child.device[:page_count], child.device[page_count:]
            front.device_children = 1
        if child.host is not None:
            front.host, child.host = child.host[:page_count], child.host[page_count:]
        # The front takes the child's place under the same first page.
        parent.children[self._key_in_parent(front)] = front
        self._note_only_child(parent)
        child.parent = front
        child.key = child.key[cut:]
        child.digests = child.digests[page_count * DIGEST_BYTES :]
        child.page_count -= page_count
        child.last_access = now
        front.children[self._key_in_parent(child)] = child
        self._note_only_child(front)
        # It begins later now, and has just been used: some policies want it sooner.
        self.device_leaves.offer(child)
        self.host_leaves.offer(child)
        if front.write_pending or front.host_lock_count:
            actions.append(SplitNotice(front, child))
        return front

    def _key_in_parent(self, node: Node) -> bytes:
        first = node.key[: self.page_size_bytes]
        return node.namespace + first if node.parent is self.root else first

    def _note_only_child(self, parent: Node) -> None:
        children = parent.children
        is_only = len(children) == 1 and parent is not self.root
        parent.only_child = next(iter(children.values())) if is_only else None

    def backfill_hashes(self) -> int:
        """Hash every node that was made before storage was attached; returns how many.

        Parents first: a chain that began at a node in the middle would name its pages as if they began
        a prompt.
        """
        count = 0
        for node in self.walk():
            if node.hashes is None:
                parent = node.parent
                assert parent is not None
                node.hashes = chain_hashes(
                    node.key,
                    first_page=0,
                    page_size_bytes=self.page_size_bytes,
                    previous=node.namespace if parent is self.root else self.last_hash(parent),
                )
                count += 1
        return count

    # Residency

    def set_device(self, node: Node, slots: list[Slot]) -> None:
        assert node.device is None and len(slots) == node.page_count, f"{node}: {len(slots)} slots"
        parent = node.parent
        assert parent is not None and parent.device is not None, f"{node}: the device lacks its parent"
        node.device = slots
        parent.device_children += 1
        if node.lock_count:
            self.protected_pages += node.page_count
        else:
            self.evictable_pages += node.page_count
            self.device_leaves.offer(node)

    def clear_device(self, node: Node) -> list[Slot]:
        """Take the device pages of an unlocked leaf away, its state with them, and return their slots."""
        assert node.is_device_leaf, f"{node} can't leave the device: {node.device_children} children there"
        assert node.device is not None and node.parent is not None
        slots, node.device = node.device, None
        node.device_state = False
        self.evictable_pages -= node.page_count
        parent = node.parent
        parent.device_children -= 1
        self.device_leaves.offer(parent)
        self.host_leaves.offer(node)
        return slots

    def set_host(self, node: Node, slots: list[Slot], state: Slot | None = None) -> None:
        assert node.host is None and len(slots) == node.page_count, f"{node}: {len(slots)} slots"
        assert node.parent is not None
        assert self.can_anchor(node.parent) or not self.requires_backed_parent, (
            f"{node}: the host lacks its parent"
        )
        node.host = slots
        self.host_pages += node.page_count
        if state is not None:
            self.set_host_state(node, state)

    def set_host_state(self, node: Node, state: Slot) -> None:
        """Give a node that the host has its recurrent state there."""
        assert node.host is not None and node.host_state is None, f"{node} can't take a state on the host"
        node.host_state = state
        self.states_host += 1

    def clear_host_state(self, node: Node) -> Slot:
        """Take a node's recurrent state off the host, and leave its pages there."""
        assert node.host_state is not None and node.host_lock_count == 0, f"{node} keeps its state"
        state, node.host_state = node.host_state, None
        self.states_host -= 1
        return state

    def clear_host(self, node: Node) -> tuple[list[Slot], Slot | None]:
        """Take a node off the host; returns the slots of its pages and of its state, if it has one there."""
        assert node.host is not None, f"{node} is not on the host"
        assert node.host_lock_count == 0, f"{node} can't leave the host: {node.host_lock_count} locks"
        slots, node.host = node.host, None
        self.host_pages -= node.page_count
        state, node.host_state = node.host_state, None
        if state is not None:
            self.states_host -= 1
        return slots, state

    def remove(self, node: Node) -> None:
        """Forget a node that is on no tier."""
        assert node.device is None and node.host is None, f"{node} is still in use"
        self._detach(node)

    def drop_subtree(self, node: Node) -> list[Node] | None:
        """Forget a device leaf that the host has no room for, and what only the host has below it.

        Returns:
            What is gone, children first, their slots still on them for the caller to free. None, and
            nothing has changed, where anything in it is locked or being copied.
        """
        assert node.is_device_leaf and node.host is None, f"{node} can't be dropped"
        found = [node]
        for step in found:
            if step.lock_count or step.host_lock_count or step.write_pending:
                return None
            found.extend(step.children.values())
        found.reverse()
        for step in found:
            if step.host is not None:
                self.host_pages -= step.page_count
            if step.host_state is not None:
                self.states_host -= 1
            self._detach(step)
        self.evictable_pages -= node.page_count
        assert node.parent is not None
        node.parent.device_children -= 1
        self.device_leaves.offer(node.parent)
        return found

    def _detach(self, node: Node) -> None:
        assert not node.children and not node.lock_count and not node.host_lock_count, (
            f"{node} is still in use"
        )
        parent = node.parent
        assert parent is not None
        del parent.children[self._key_in_parent(node)]
        self._note_only_child(parent)
        node.is_alive = False
        self.host_leaves.offer(parent)

    def reset(self) -> None:
        """Forget everything; ids go on where they were. Nothing may be locked: the slots are the caller's."""
        assert self._growth is None, "reset while an insert waits for its actions"
        for node in self.walk():
            assert not node.lock_count and not node.host_lock_count, f"reset while {node} is locked"
            node.is_alive = False
        self.root.children = {}
        self.root.device_children = 0
        self.root.history_pages = 0
        self.root.priority = PRIORITY_MIN
        self._start_empty()
