"""The host tier's room and slots: what cache and prefetches take from it, and what it evicts for them.

Two counts of the same thing, on purpose: `Room` is what the group counts and decisions read; the
memories are this rank's own and may fail alone. Every slot that is counted as taken is given back
through here, whether or not this rank ever had it.
"""

from __future__ import annotations

from hicache.control.node import Node
from hicache.control.pools import HostSlots, Tiers
from hicache.control.tree import Tree
from hicache.core import Slot
from hicache.probes import Probes

# The digest of reclaims: (digest * factor + node + 1) modulo 2**42, so that it and its negative fit a
# vector.
RECLAIM_FACTOR = 1_000_003
RECLAIM_MODULUS = 1 << 42


def fold_reclaim(digest: int, node_id: int) -> int:
    """The running digest after one more reclaim. Order matters: it is what ranks must agree on."""
    return (digest * RECLAIM_FACTOR + node_id + 1) % RECLAIM_MODULUS


class HostMemory:
    """Slots of host pages and states, as the group counts them and as this rank has them.

    Args:
        is_write_back: copies of what the device holds as well are given up first.
    """

    def __init__(self, tree: Tree, tiers: Tiers, probes: Probes, *, is_write_back: bool) -> None:
        assert tiers.host is not None
        self._tree = tree
        self._tiers = tiers
        self._memory = tiers.host
        self._probes = probes
        self._is_write_back = is_write_back
        # Under write_back: nodes on both tiers, in the order in which they came to be.
        self.duplicates: dict[int, Node] = {}
        self.reclaim_digest = 0

    @property
    def page_count(self) -> int:
        """Agreed capacity; 0 is no limit."""
        return self._tiers.host_room.page_count

    @property
    def pages_free(self) -> int | None:
        """This rank's own; a fact, never a reason."""
        return self._memory.pages_free

    def has_room(self, page_count: int, state_count: int = 0) -> bool:
        tiers = self._tiers
        return not (tiers.host_room.shortage(page_count) or tiers.states_room.shortage(state_count))

    def pages_available(self) -> int | None:
        """Free pages as the group counts them; None where there is no limit."""
        return self._tiers.host_room.available

    def make_room(self, page_count: int, state_count: int = 0) -> bool:
        """Evict until so many pages and states are free, as the group counts them; False if it can't."""
        tiers = self._tiers
        if self._is_write_back and tiers.host_room.shortage(page_count):
            self._reclaim(page_count)
        pages_wanted = tiers.host_room.shortage(page_count)
        if pages_wanted or tiers.states_room.shortage(state_count):
            self._evict(page_count, state_count, pages_wanted)
        return self.has_room(page_count, state_count)

    def take(self, page_count: int, state_count: int = 0) -> None:
        """Count them as taken. The caller has made room."""
        self._tiers.host_room.take(page_count)
        self._tiers.states_room.take(state_count)

    def reserve(self, page_count: int, state_count: int = 0) -> HostSlots | None:
        """This rank's slots in every pool that is needed, or None and nothing taken in any."""
        pages = self._memory.alloc(page_count) if page_count else []
        if pages is None:
            return None
        states: list[Slot] | None = []
        if state_count:
            assert self._tiers.states is not None
            states = self._tiers.states.alloc(state_count)
        if states is None:
            self._memory.free(pages)
            return None
        return HostSlots(pages, states)

    def give_back(self, slots: HostSlots | None, page_count: int, state_count: int) -> None:
        """Uncount what was taken, and free it where this rank had it."""
        if slots is not None:
            self._memory.free(slots.pages)
            if slots.states:
                assert self._tiers.states is not None
                self._tiers.states.free(slots.states)
        self._tiers.host_room.give_back(page_count)
        self._tiers.states_room.give_back(state_count)

    def free(self, pages: list[Slot], state: Slot | None = None) -> None:
        """Give back slots that this rank has and the group counts."""
        states = [] if state is None else [state]
        self.give_back(HostSlots(pages, states), len(pages), len(states))

    def note_duplicate(self, node: Node) -> None:
        """A node has come to be on both tiers."""
        if self._is_write_back and _is_duplicate(node):
            self.duplicates.setdefault(node.id, node)

    def _evict(self, page_count: int, state_count: int, pages_wanted: int) -> None:
        """Forget nodes that only the host holds, in the policy's order."""
        tree = self._tree
        pages_freed = 0
        victims: list[int] = []
        dropped: list[bytes] = []
        states_freed = 0
        facts = (self.pages_free, self._tiers.device.pages_free, self._memory.pages_used)
        states_room = self._tiers.states_room
        while states_room.shortage(state_count) and (holder := self._oldest_state()) is not None:
            self.free([], tree.clear_host_state(holder))
            states_freed += 1
        while not self.has_room(page_count, state_count):
            node = tree.host_leaves.pop()
            if node is None:
                break
            self.free(*tree.clear_host(node))
            pages_freed += node.page_count
            victims.append(node.id)
            dropped.append(node.digests)
            tree.remove(node)
        self._probes.evict_host(
            pages_wanted, states_freed, pages_freed, victims, *facts, b"".join(dropped).hex()
        )

    def _oldest_state(self) -> Node | None:
        """The node whose state the host gives up next: states stay at inner nodes, where no leaf frees them.

        Its pages stay; a prefix just can't end there any more.
        """
        free = [
            node
            for node in self._tree.walk()
            if node.host_state is not None
            and not (node.host_lock_count or node.lock_count or node.write_pending)
        ]
        return min(free, key=lambda node: (node.last_access, node.id), default=None)

    def _reclaim(self, page_count: int) -> None:
        """Give up copies of what the device holds too, in order of registration, in two passes.

        The first pass spares leaves, which are about to be demoted and would have to be copied again.
        Source: sglang 0.5.23, FULL host pressure under write_back.
        """
        room = self._tiers.host_room
        for spares_leaves in (True, False):
            for node in self._candidates():
                if not room.shortage(page_count):
                    return
                if node.host_lock_count or node.write_pending or (spares_leaves and node.is_device_leaf):
                    continue
                if node.host_state is not None and not node.device_state:
                    # The only copy of the state that a request may start from.
                    continue
                self.duplicates.pop(node.id, None)
                slots, state = self._tree.clear_host(node)
                self.free(slots, state)
                self.reclaim_digest = fold_reclaim(self.reclaim_digest, node.id)
                self._probes.reclaim(
                    node.id,
                    self.reclaim_digest,
                    len(slots),
                    self.pages_free,
                    self._tiers.device.pages_free,
                    self._memory.pages_used,
                )

    def _candidates(self) -> list[Node]:
        """Registered nodes, each with what splits have cut off its front; those on one tier are forgotten."""
        found: dict[int, Node] = {}
        for node in list(self.duplicates.values()):
            if not _is_duplicate(node):
                del self.duplicates[node.id]
                continue
            step: Node | None = node
            while step is not None and step.id not in found and _is_duplicate(step):
                found[step.id] = step
                step = step.parent
        return list(found.values())


def _is_duplicate(node: Node) -> bool:
    return node.is_alive and node.parent is not None and node.host is not None and node.device is not None
