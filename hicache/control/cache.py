"""One rank's cache: applies the tree's actions to slots, queues and copies.

The tree knows structure, the memories know slots, the engine moves bytes; only this module knows all
three. Its state changes at three places alone: when a request is admitted, when its pages are inserted,
and when an event round says how many acks to apply.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hicache.control import locks
from hicache.control.actions import Action, BackUp, FreeDevice, SplitNotice
from hicache.control.agreement import Reservations
from hicache.control.node import Node
from hicache.control.pools import Room
from hicache.control.tree import Insert, Match, Tree
from hicache.core import TOKEN_BYTES, Queue, Slot, Transfer
from hicache.errors import AckError, PoolError
from hicache.loop import PAUSE
from hicache.ports import Engine, Memory
from hicache.probes import Probes

# Tries of a later stage to get host memory that stage 0 has.
LATE_TRIES_MAX = 1000


@dataclass(frozen=True, slots=True)
class Tiers:
    """The memories of one rank and the agreed counts over them. Without a host tier `host` is None."""

    device: Memory
    device_room: Room
    host: Memory | None
    host_room: Room


@dataclass(slots=True, eq=False)
class QueuedBackup:
    """A backup decided but not yet copied.

    Attributes:
        anchor: the node that was decided on; it holds the device lock.
        nodes: what a split has left of it, root first.
        slots: host slots for all its pages, or None where this rank could not reserve them.
    """

    anchor: Node
    nodes: list[Node]
    slots: list[Slot] | None
    page_count: int


@dataclass(slots=True, eq=False)
class QueuedLoad:
    """A load back decided but not yet copied: host pages of `nodes`, under a lock on `anchor`."""

    anchor: Node
    nodes: list[Node]


@dataclass(slots=True, eq=False)
class InFlight:
    """A submitted copy, what it carries, and the nodes whose device locks its ack releases."""

    transfer: Transfer
    nodes: list[Node]
    anchors: list[Node]


class Cache:
    """Device and host tiers under one tree."""

    def __init__(
        self, tree: Tree, tiers: Tiers, engine: Engine, probes: Probes, reservations: Reservations
    ) -> None:
        self.tree = tree
        self.tiers = tiers
        self.engine = engine
        self.probes = probes
        self.reservations = reservations
        self.write_queue: list[QueuedBackup] = []
        self.load_queue: list[QueuedLoad] = []
        # Oldest first: submitted alike on every rank, acknowledged by agreed counts.
        self.writes: deque[InFlight] = deque()
        self.loads: deque[InFlight] = deque()
        self._ops = 0

    # Facts of this rank alone, for records

    @property
    def device_pages_free(self) -> int | None:
        return self.tiers.device.pages_free

    @property
    def host_pages_free(self) -> int | None:
        return self.tiers.host.pages_free if self.tiers.host is not None else 0

    @property
    def is_idle(self) -> bool:
        """Nothing queued and nothing in flight."""
        return not (self.writes or self.loads or self.write_queue or self.load_queue)

    # Lookup and growth

    def match(self, tokens: bytes, page_limit: int) -> Match:
        found = self.tree.match(tokens, page_limit)
        if found.actions:
            self.apply(found.actions)
        return found

    def insert(
        self, tokens: bytes, slots: list[Slot], digests: bytes, *, owned_pages: int, counted_pages: int
    ) -> Insert:
        """Hand a request's pages to the tree; the caller records it, then calls `apply` on its actions."""
        return self.tree.insert(tokens, slots, digests, owned_pages=owned_pages, counted_pages=counted_pages)

    def apply(self, actions: Sequence[Action]) -> None:
        """Carry out what the tree asked for, in order."""
        for action in actions:
            if isinstance(action, FreeDevice):
                self.free_device(action.slots)
            elif isinstance(action, BackUp):
                self.back_up(action.nodes)
            else:
                self._follow_split(action)

    def _follow_split(self, notice: SplitNotice) -> None:
        """Whatever carries the node that was cut carries its front as well."""
        carriers: list[QueuedBackup | QueuedLoad | InFlight] = [
            *self.write_queue,
            *self.load_queue,
            *self.writes,
            *self.loads,
        ]
        for carrier in carriers:
            if notice.child in carrier.nodes:
                carrier.nodes.insert(carrier.nodes.index(notice.child), notice.parent)

    # Device memory

    def can_hold(self, page_count: int) -> bool:
        """Would `page_count` device pages fit if everything unlocked were evicted?"""
        return self.tiers.device_room.shortage(page_count) <= self.tree.evictable_pages

    def alloc_device(self, page_count: int) -> list[Slot]:
        """Device slots, evicting unlocked leaves if need be. The caller has asked `can_hold`.

        Raises:
            PoolError: the agreed room was there, this rank's own memory was not.
        """
        room = self.tiers.device_room
        if shortage := room.shortage(page_count):
            self.evict(shortage)
        room.take(page_count)
        slots = self.tiers.device.alloc(page_count)
        if slots is None:
            raise PoolError(
                f"device memory: {page_count} pages were agreed on, this rank has {self.device_pages_free} "
                "free: its pool is smaller than its peers'"
            )
        return slots

    def free_device(self, slots: Sequence[Slot]) -> None:
        self.tiers.device.free(slots)
        self.tiers.device_room.give_back(len(slots))

    def evict(self, pages_wanted: int) -> None:
        """Take leaves off the device, least recently used first, until `pages_wanted` pages are free.

        A leaf that the host holds stays in the tree there; one that it does not hold is gone.
        """
        tree = self.tree
        pages_freed = 0
        victims: list[int] = []
        demoted: list[bytes] = []
        dropped: list[bytes] = []
        facts = (self.device_pages_free, tree.evictable_pages, self.host_pages_free)
        while pages_freed < pages_wanted:
            node = tree.device_leaves.pop()
            if node is None:
                break
            slots = tree.clear_device(node)
            self.free_device(slots)
            pages_freed += len(slots)
            victims.append(node.id)
            if node.host is not None:
                demoted.append(node.digests)
            else:
                dropped.append(node.digests)
                tree.remove(node)
        self.probes.evict(
            pages_wanted, pages_freed, victims, *facts, b"".join(demoted).hex(), b"".join(dropped).hex()
        )

    # Backup: device to host

    def back_up(self, nodes: Sequence[Node]) -> None:
        """Queue copies of `nodes` to the host, root first; stops at the first that finds no room.

        Room is the agreed count, so the answer is the same on every rank. Whether this rank's own
        memory could give the slots is another question, put to the vote in the next event round.
        """
        host = self.tiers.host
        if host is None:
            return
        room = self.tiers.host_room
        page_tokens = self.tree.page_size_bytes // TOKEN_BYTES
        for node in nodes:
            page_count = node.page_count
            if shortage := room.shortage(page_count):
                self.evict_host(shortage)
            facts = (host.pages_free, self.device_pages_free, len(self.write_queue))
            slots = None
            is_queued = room.shortage(page_count) == 0
            if is_queued:
                slots = host.alloc(page_count)
                is_queued = self.reservations.stands(slots)
            self.probes.write_backup(
                node.id, page_count, page_count * page_tokens if is_queued else 0, *facts
            )
            if not is_queued:
                return
            room.take(page_count)
            # The host pages are published before the copy has run. The device lock, held until the
            # ack, is what keeps this node from being evicted under the copy.
            self.tree.set_host(node, slots if slots is not None else [])
            node.write_pending = True
            locks.lock(self.tree, node)
            self.write_queue.append(QueuedBackup(node, [node], slots, page_count))

    def backups_ballot(self) -> int:
        """What this rank reports of its queued backups."""
        return self.reservations.ballot([queued.slots is not None for queued in self.write_queue])

    async def start_writing(self, agreed: int) -> None:
        """Copy the first `agreed` queued backups in one merged transfer; cancel the rest everywhere."""
        queue = self.write_queue
        if not queue:
            return
        committed = self.reservations.committed(len(queue), agreed)
        for queued in reversed(queue[committed:]):
            self._cancel(queued)
        self.write_queue = []
        if not committed:
            return
        source: list[Slot] = []
        target: list[Slot] = []
        nodes: list[Node] = []
        for queued in queue[:committed]:
            target += queued.slots if queued.slots is not None else await self._reserve_late(queued)
            for node in queued.nodes:
                assert node.device is not None, f"{node} left the device before its backup"
                source += node.device
                nodes.append(node)
        anchors = [queued.anchor for queued in queue[:committed]]
        self.writes.append(self._submit("write", source, target, nodes, anchors))

    async def _reserve_late(self, queued: QueuedBackup) -> list[Slot]:
        """Slots for a backup that stage 0 has decided on while this stage's memory had failed.

        Stage 0 never hears of it, so this stage waits for its memory as it waits for its copies.

        Raises:
            PoolError: memory does not come back; this stage's pool is smaller than stage 0's.
        """
        host = self.tiers.host
        assert host is not None
        slots = None
        for _ in range(LATE_TRIES_MAX):
            slots = host.alloc(queued.page_count)
            if slots is not None:
                break
            await PAUSE
        if slots is None:
            raise PoolError(
                f"host memory: backup of node {queued.anchor.id} was agreed on and needs {queued.page_count} "
                f"pages, this rank has {host.pages_free} free after {LATE_TRIES_MAX} tries: "
                "its pool is smaller than stage 0's"
            )
        at = 0
        for node in queued.nodes:
            node.host = slots[at : at + node.page_count]
            at += node.page_count
        return slots

    def _cancel(self, queued: QueuedBackup) -> None:
        host = self.tiers.host
        assert host is not None
        self.probes.backup_cancel(
            queued.anchor.id,
            queued.page_count,
            queued.slots is not None,
            host.pages_free,
            len(self.write_queue),
        )
        for node in queued.nodes:
            self.tree.clear_host(node)
            node.write_pending = False
        if queued.slots is not None:
            host.free(queued.slots)
        self.tiers.host_room.give_back(queued.page_count)
        locks.unlock(self.tree, queued.anchor)

    def evict_host(self, pages_wanted: int) -> None:
        """Forget nodes that only the host holds, least recently used first."""
        tree, host = self.tree, self.tiers.host
        assert host is not None
        pages_freed = 0
        victims: list[int] = []
        dropped: list[bytes] = []
        facts = (host.pages_free, self.device_pages_free, len(self.writes))
        while pages_freed < pages_wanted:
            node = tree.host_leaves.pop()
            if node is None:
                break
            host.free(tree.clear_host(node))
            self.tiers.host_room.give_back(node.page_count)
            pages_freed += node.page_count
            victims.append(node.id)
            dropped.append(node.digests)
            tree.remove(node)
        self.probes.evict_host(pages_wanted, pages_freed, victims, *facts, b"".join(dropped).hex())

    # Load back: host to device

    def load_back(self, match: Match) -> None:
        """Give the host part of a match device pages and queue the copy. The caller holds its lock.

        The pages are in the tree at once: a later request may match them, and waits for the same copy.
        """
        tree = self.tree
        nodes = [node for node in tree.path(match.node) if node.device is None]
        slots = self.alloc_device(match.host_pages)
        at = 0
        for node in nodes:
            tree.set_device(node, slots[at : at + node.page_count])
            at += node.page_count
            locks.lock_host(node)
        locks.lock(tree, match.node)
        self.load_queue.append(QueuedLoad(match.node, nodes))

    def start_loading(self) -> None:
        """Submit every queued load as one merged transfer with one ack."""
        queue = self.load_queue
        if not queue:
            return
        self.load_queue = []
        source: list[Slot] = []
        target: list[Slot] = []
        nodes = [node for queued in queue for node in queued.nodes]
        for node in nodes:
            assert node.host is not None and node.device is not None
            source += node.host
            target += node.device
        anchors = [queued.anchor for queued in queue]
        self.loads.append(self._submit("load", source, target, nodes, anchors))

    async def wait_for_loads(self) -> None:
        """Return when every load in flight has moved its bytes; a forward may then read them."""
        for loading in self.loads:
            if not loading.transfer.is_done:
                await self.engine.wait(loading.transfer)

    # Transfers and their acks

    def _submit(
        self, queue: Queue, source: list[Slot], target: list[Slot], nodes: list[Node], anchors: list[Node]
    ) -> InFlight:
        self._ops += 1
        transfer = Transfer(self._ops, queue, source, target)
        self.probes.transfer_enqueue(transfer.op, queue, [node.id for node in nodes], len(source))
        self.engine.submit(transfer)
        return InFlight(transfer, nodes, anchors)

    def count_done(self, queue: deque[InFlight]) -> int:
        """Leading transfers whose bytes have moved, polled now, on this rank."""
        count = 0
        for moving in queue:
            if not self.engine.ready(moving.transfer):
                break
            count += 1
        return count

    async def apply_writes(self, agreed: int) -> None:
        """Apply the oldest `agreed` write acks: the host copy stands, the device lock goes."""
        for moving in await self._take(self.writes, agreed):
            for node in moving.nodes:
                node.write_pending = False
            self._acknowledge(moving)

    async def apply_loads(self, agreed: int) -> None:
        """Apply the oldest `agreed` load acks: the host lock and the device lock go."""
        for moving in await self._take(self.loads, agreed):
            for node in moving.nodes:
                locks.unlock_host(self.tree, node)
            self._acknowledge(moving)

    async def _take(self, queue: deque[InFlight], agreed: int) -> list[InFlight]:
        if agreed > len(queue):
            raise AckError(
                f"{agreed} acks agreed on, {len(queue)} transfers in flight here: "
                "this rank has taken other decisions than its peers before"
            )
        taken = [queue.popleft() for _ in range(agreed)]
        for moving in taken:
            # Stage 0 has seen its own copy done; a later stage's may still run.
            if not moving.transfer.is_done:
                await self.engine.wait(moving.transfer)
        return taken

    def _acknowledge(self, moving: InFlight) -> None:
        transfer = moving.transfer
        for anchor in moving.anchors:
            locks.unlock(self.tree, anchor)
        self.probes.transfer_ack(
            transfer.op, transfer.queue, [node.id for node in moving.nodes], len(transfer.source)
        )
