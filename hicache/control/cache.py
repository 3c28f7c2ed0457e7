"""One rank's cache: applies the tree's actions to slots, queues and copies.

The tree knows structure, the memories know slots, the engine moves bytes; only this module knows all
three. Its state changes when a request is admitted, when its pages are inserted, and when an event
round says how many acks to apply; under write_back also when the device runs out.

    insert -> write_queue -> (vote) -> writes in flight -> ack -> external tier
    match  -> load_queue  -----------> loads in flight  -> ack
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from hicache.control import keys, locks
from hicache.control.actions import Action, BackUp, FreeDevice, SplitNotice
from hicache.control.active import Active
from hicache.control.agreement import Reservations
from hicache.control.host_memory import HostMemory
from hicache.control.locks import DeviceLock, HostLock
from hicache.control.node import Node
from hicache.control.pools import HostSlots, Tiers
from hicache.control.prefetch import Prefetches
from hicache.control.tree import Insert, Match, Tree
from hicache.core import DIGEST_BYTES, HASH_BYTES, TOKEN_BYTES, Queue, Slot, Transfer
from hicache.errors import AckError, PoolError
from hicache.loop import PAUSE
from hicache.ports import Engine
from hicache.probes import Probes

# Tries of a later stage to get host memory that stage 0 has.
LATE_TRIES_MAX = 1000


@dataclass(slots=True, eq=False)
class QueuedBackup:
    """A backup decided but not yet copied.

    Attributes:
        lock: on the node that was decided on.
        nodes: what a split has left of it, root first.
        slots: host slots for all of it, or None where this rank could not reserve them.
        page_count, state_count: what the group counts as taken for it.
    """

    lock: DeviceLock
    nodes: list[Node]
    slots: HostSlots | None
    page_count: int
    state_count: int


@dataclass(slots=True, eq=False)
class QueuedLoad:
    """A load back decided but not yet copied: host pages of `nodes`, each under a host lock."""

    lock: DeviceLock
    nodes: list[Node]
    host_locks: list[HostLock]


@dataclass(slots=True, eq=False)
class InFlight:
    """A submitted copy, what it carries, and the locks that its ack releases."""

    transfer: Transfer
    nodes: list[Node]
    device_locks: list[DeviceLock]
    host_locks: list[HostLock]


async def _let_others_run() -> None:
    await PAUSE


class Cache:
    """Device and host tiers under one tree, and the external tier's queues where there is one.

    Args:
        host: the host tier's bookkeeping; None without one.
        is_write_back: nodes are copied to the host when they leave the device, not before.
        load_back_min_tokens: a shorter host hit is computed again.
        digest_key: key of the run's page digests.
        pause: lets a moment pass, for memory to come back.
    """

    def __init__(
        self,
        tree: Tree,
        tiers: Tiers,
        engine: Engine,
        probes: Probes,
        reservations: Reservations,
        *,
        host: HostMemory | None = None,
        prefetches: Prefetches | None = None,
        is_write_back: bool = False,
        load_back_min_tokens: int = 10,
        digest_key: bytes = b"",
        pause: Callable[[], Awaitable[None]] = _let_others_run,
    ) -> None:
        self.tree = tree
        self.tiers = tiers
        self.engine = engine
        self.probes = probes
        self.reservations = reservations
        self.host = host
        self.prefetches = prefetches
        self.is_write_back = is_write_back
        self.load_back_min_tokens = load_back_min_tokens
        self.digest_key = digest_key
        self.page_tokens = tree.page_size_bytes // TOKEN_BYTES
        self.write_queue: list[QueuedBackup] = []
        self.load_queue: list[QueuedLoad] = []
        # Oldest first: submitted alike on every rank, acknowledged by agreed counts.
        self.writes: deque[InFlight] = deque()
        self.loads: deque[InFlight] = deque()
        self._ops = 0
        self._pause = pause
        if prefetches is not None:
            prefetches.bind(
                self.apply, lambda active: self.match(active, active.usable_pages(self.page_tokens), "submit")
            )

    # Facts of this rank alone, for records

    @property
    def device_pages_free(self) -> int | None:
        return self.tiers.device.pages_free

    @property
    def host_pages_free(self) -> int | None:
        return self.host.pages_free if self.host is not None else 0

    @property
    def is_idle(self) -> bool:
        """Nothing queued, in flight, being fetched or being written on. Agreed state: equal on every rank."""
        if self.writes or self.loads or self.write_queue or self.load_queue:
            return False
        return self.prefetches is None or self.prefetches.is_idle

    # Lookup and growth

    def match(self, active: Active, page_limit: int, purpose: Literal["submit", "admit"]) -> Match:
        """The longest usable prefix of at most `page_limit` pages; completes the request's digests."""
        match = self.tree.match(active.tokens, page_limit, active.namespace)
        if match.actions:
            self.apply(match.actions)
        self._name_pages(active, match.node)
        found_pages = match.device_pages + match.host_pages
        at = found_pages * DIGEST_BYTES
        kv_end = match.kv_pages * DIGEST_BYTES
        missed = active.digests[at : at + DIGEST_BYTES].hex() if found_pages < page_limit else ""
        page_tokens = self.page_tokens
        self.probes.match(
            active.rid,
            purpose,
            match.node.id,
            match.kv_pages * page_tokens,
            match.host_pages * page_tokens,
            match.device_pages * page_tokens,
            self.device_pages_free,
            self.host_pages_free,
            len(self.writes),
            missed,
            page_limit * page_tokens,
            active.digests[max(0, at - DIGEST_BYTES) : at].hex(),
            active.digests[kv_end - DIGEST_BYTES : kv_end].hex() if kv_end > at else "",
        )
        return match

    def _name_pages(self, active: Active, known: Node | None) -> None:
        """Digests, and hashes while storage is attached, of all whole pages; a known prefix is the tree's.

        A page is named once: nothing of a prefix that the tree or the request already has.
        """
        tree = self.tree
        size = tree.page_size_bytes
        total = len(active.tokens) // size
        if known is not None and not active.digests:
            active.digests = tree.path_digests(known)
        have = len(active.digests) // DIGEST_BYTES
        if have < total:
            active.digests += keys.chain_digests(
                active.tokens,
                first_page=have,
                page_size_bytes=size,
                previous=active.digests[-DIGEST_BYTES:] or active.namespace,
                key=self.digest_key,
            )
        if self.prefetches is None or not self.prefetches.is_attached:
            return
        if known is not None and not active.hashes:
            active.hashes = tree.path_hashes(known)
        have = len(active.hashes) // HASH_BYTES
        if have < total:
            active.hashes += keys.chain_hashes(
                active.tokens,
                first_page=have,
                page_size_bytes=size,
                previous=active.hashes[-HASH_BYTES:] or active.namespace,
            )

    def name_answer(self, active: Active) -> None:
        """Digests and hashes of pages that `active.tokens` has gained."""
        self._name_pages(active, None)

    def insert(self, active: Active, page_count: int, *, prompt_pages: int = 0) -> Insert:
        """Hand the first `page_count` pages of a request to the tree and move its lock to them.

        Its own copies of pages that the tree had already are freed, and its row then names the tree's.
        """
        tree = self.tree
        self.probes.insert_call(
            active.rid,
            active.owned_pages,
            page_count * self.page_tokens,
            self.device_pages_free,
            self.host_pages_free,
            len(self.writes),
        )
        done = tree.insert(
            active.tokens,
            active.slots[:page_count],
            active.digests,
            owned_pages=active.owned_pages,
            counted_pages=active.inserted_pages,
            namespace=active.namespace,
            priority=active.request.priority,
            prompt_pages=prompt_pages,
            hashes=active.hashes,
        )
        self.apply(done.actions)
        while not done.is_finished:
            done = tree.resume()
            self.apply(done.actions)
        known = page_count * DIGEST_BYTES - len(done.new_digests)
        self.probes.insert_return(
            active.rid,
            done.node.id,
            done.nodes_counted,
            done.duplicate_pages,
            done.new_pages * self.page_tokens,
            done.new_digests.hex(),
            active.digests[max(0, known - DIGEST_BYTES) : known].hex(),
        )
        if done.unevicted_pages and self.host is not None:
            for node in tree.path(done.node):
                self.host.note_duplicate(node)
        assert active.lock is not None, f"{active.rid} inserts without a lock"
        lock = locks.lock(tree, done.node)
        locks.unlock(tree, active.lock)
        active.lock = lock
        active.slots[:page_count] = tree.device_slots(done.node)
        active.owned_pages = active.inserted_pages = page_count
        return done

    def release(self, active: Active) -> None:
        """The one way out of a request that holds pages: its own go, the tree's stay and are unlocked."""
        self.free_device(active.slots[active.owned_pages :])
        active.slots = []
        active.owned_pages = active.inserted_pages = 0
        if active.lock is not None:
            locks.unlock(self.tree, active.lock)
            active.lock = None

    def lock(self, node: Node) -> DeviceLock:
        return locks.lock(self.tree, node)

    def unlock(self, receipt: DeviceLock) -> None:
        locks.unlock(self.tree, receipt)

    def apply(self, actions: Sequence[Action]) -> None:
        """Carry out what the tree asked for, in order."""
        for action in actions:
            if isinstance(action, FreeDevice):
                self.free_device(action.slots)
            elif isinstance(action, BackUp):
                self.back_up(action.nodes, action.reason)
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

    async def make_room(self, page_count: int) -> bool:
        """Can `page_count` device pages be taken, now or by evicting when they are? If so, they will be.

        Under write_back nobody can say before trying: a leaf stays where it is while the host is full and
        something below it is locked. There the eviction is done at once.
        """
        if not self.can_hold(page_count):
            return False
        room = self.tiers.device_room
        if self.is_write_back and (shortage := room.shortage(page_count)):
            await self.evict(shortage)
            return room.shortage(page_count) == 0
        return True

    async def alloc_device(self, page_count: int, purpose: str) -> list[Slot]:
        """Device slots, evicting unlocked leaves if need be. The caller has asked `make_room`.

        Raises:
            PoolError: the agreed room was there, this rank's own memory was not.
        """
        room, tree = self.tiers.device_room, self.tree
        if shortage := room.shortage(page_count):
            await self.evict(shortage)
        if page_count:
            self.probes.alloc(
                purpose,
                tree.evictable_pages,
                tree.protected_pages,
                page_count,
                self.device_pages_free,
                self.host_pages_free,
                len(self.writes),
            )
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

    async def evict(self, pages_wanted: int) -> None:
        """Take leaves off the device in the policy's order until `pages_wanted` pages are free.

        A leaf that the host holds stays in the tree there; one that it does not hold is copied first
        under write_back, and gone otherwise.
        """
        tree = self.tree
        pages_freed = 0
        victims: list[int] = []
        demoted: list[bytes] = []
        dropped: list[bytes] = []
        kept: list[Node] = []
        facts = (self.device_pages_free, tree.evictable_pages, self.host_pages_free)
        drop_reason = ""
        while pages_freed < pages_wanted:
            node = tree.device_leaves.pop()
            if node is None:
                break
            is_copied = self.is_write_back and await self._write_back(node)
            if self.is_write_back and not is_copied and node.host is None:
                lost = tree.drop_subtree(node)
                if lost is None:
                    kept.append(node)
                    continue
                drop_reason = "host_pressure"
                for each in lost:
                    dropped.append(each.digests)
                    pages_freed += self._free_dropped(each)
                victims.append(node.id)
                continue
            slots = tree.clear_device(node)
            self.free_device(slots)
            pages_freed += len(slots)
            victims.append(node.id)
            if node.host is not None:
                demoted.append(node.digests)
            else:
                drop_reason = "write_through_unbacked_eviction"
                dropped.append(node.digests)
                tree.remove(node)
        for node in kept:
            tree.device_leaves.offer(node)
        self.probes.evict(
            pages_wanted,
            drop_reason,
            pages_freed,
            victims,
            *facts,
            b"".join(demoted).hex(),
            b"".join(dropped).hex(),
        )

    def _free_dropped(self, node: Node) -> int:
        """Slots of a node that the tree has let go of; returns the device pages among them."""
        if node.host is not None:
            assert self.host is not None
            self.host.free(node.host, node.host_state)
        if node.device is None:
            return 0
        self.free_device(node.device)
        return len(node.device)

    async def _write_back(self, node: Node) -> bool:
        """Copy what the host lacks of a leaf and wait for it; False where the host has no room for that.

        Every write in flight is applied with it, which is the same on every rank: all that was submitted.
        """
        host = self.host
        if host is None:
            return False
        page_count = node.page_count if node.host is None else 0
        state_count = self._states_missing(node)
        if not (page_count or state_count):
            return True
        has_room = host.make_room(page_count, state_count)
        self._record_backup(node, "eviction", page_count, has_room, self._backup_facts())
        if not has_room:
            return False
        host.take(page_count, state_count)
        lock = locks.lock(self.tree, node)
        slots = await self._reserve_late(node, page_count, state_count)
        node.write_pending = True
        source, target = self._publish([node], slots)
        self.writes.append(self._submit("write", source, target, [node], [lock], []))
        await self.apply_writes(len(self.writes))
        return True

    # Backup: device to host

    def back_up(self, nodes: Sequence[Node], reason: str) -> None:
        """Queue copies of `nodes` to the host, root first; stops at the first that finds no room.

        Room is the agreed count, so the answer is the same on every rank. Whether this rank's own
        memory could give the slots is another question, put to the vote in the next event round. Only
        then are the host pages published.
        """
        host = self.host
        if host is None:
            return
        for node in nodes:
            if node.write_pending:
                continue
            page_count = node.page_count if node.host is None else 0
            state_count = self._states_missing(node)
            has_room = host.make_room(page_count, state_count)
            # What this rank saw when it decided, before it took anything.
            facts = self._backup_facts()
            slots = host.reserve(page_count, state_count) if has_room else None
            is_queued = has_room and self.reservations.stands(slots)
            self._record_backup(node, reason, page_count, is_queued, facts)
            if not is_queued:
                return
            host.take(page_count, state_count)
            # The device lock, held until the ack, is what keeps this node from being evicted under
            # the copy.
            lock = locks.lock(self.tree, node)
            node.write_pending = True
            self.write_queue.append(QueuedBackup(lock, [node], slots, page_count, state_count))

    def _states_missing(self, node: Node) -> int:
        """1 where the node's recurrent state is on the device and not on the host."""
        return int(self.tree.has_state and node.device_state and node.host_state is None)

    def _backup_facts(self) -> tuple[int | None, int | None, int]:
        return self.host_pages_free, self.device_pages_free, len(self.write_queue)

    def _record_backup(
        self,
        node: Node,
        reason: str,
        page_count: int,
        is_queued: bool,
        facts: tuple[int | None, int | None, int],
    ) -> None:
        tokens = page_count * self.page_tokens if is_queued else 0
        self.probes.write_backup(node.id, reason, page_count, tokens, *facts)

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
            slots = queued.slots
            if slots is None:
                slots = await self._reserve_late(queued.lock.node, queued.page_count, queued.state_count)
            own_source, own_target = self._publish(queued.nodes, slots)
            source += own_source
            target += own_target
            nodes += queued.nodes
        device_locks = [queued.lock for queued in queue[:committed]]
        self.writes.append(self._submit("write", source, target, nodes, device_locks, []))

    def _publish(self, nodes: Sequence[Node], slots: HostSlots) -> tuple[list[Slot], list[Slot]]:
        """Put host slots into the tree before the copy has run; returns what to copy from and to.

        A prefetch may have given a node its host pages since the backup was decided; then there is
        nothing to copy, and the slots go back.
        """
        tree, host = self.tree, self.host
        assert host is not None
        source: list[Slot] = []
        at = 0
        for node in nodes:
            assert node.device is not None, f"{node} left the device before its backup"
            if node.host is None:
                source += node.device
                tree.set_host(node, slots.pages[at : at + node.page_count])
                at += node.page_count
        # The state belongs to the end of what was cut: to the last node.
        if slots.states and nodes[-1].host_state is None:
            tree.set_host_state(nodes[-1], slots.states[0])
        elif slots.states:
            host.free([], slots.states[0])
        if at < len(slots.pages):
            host.free(slots.pages[at:])
        return source, slots.pages[:at]

    async def _reserve_late(self, node: Node, page_count: int, state_count: int) -> HostSlots:
        """Slots for a backup that the group has decided on while this rank's memory had failed.

        Nobody else hears of it, so this rank waits for its memory as it waits for its copies.

        Raises:
            PoolError: memory does not come back; this rank's pool is smaller than its peers'.
        """
        host = self.host
        assert host is not None
        for _ in range(LATE_TRIES_MAX):
            slots = host.reserve(page_count, state_count)
            if slots is not None:
                return slots
            await self._pause()
        raise PoolError(
            f"host memory: backup of node {node.id} was agreed on and needs {page_count} "
            f"pages, this rank has {self.host_pages_free} free after {LATE_TRIES_MAX} tries: "
            "its pool is smaller than its peers'"
        )

    def _cancel(self, queued: QueuedBackup) -> None:
        self.probes.backup_cancel(
            queued.lock.node.id,
            queued.page_count,
            queued.slots is not None,
            self.host_pages_free,
            len(self.write_queue),
        )
        for node in queued.nodes:
            node.write_pending = False
        assert self.host is not None
        self.host.give_back(queued.slots, queued.page_count, queued.state_count)
        locks.unlock(self.tree, queued.lock)

    # Load back: host to device

    def load_back_size(self, match: Match, quota_pages: int | None) -> tuple[int, str]:
        """Host pages to load, and why not if none.

        Args:
            quota_pages: device pages that this request may take at once; None is no limit.
        """
        pages = match.host_pages
        if not pages:
            return 0, ""
        needs_state = self.tree.has_state and not match.node.device_state
        if pages * self.page_tokens < self.load_back_min_tokens and not needs_state:
            return 0, "too_short"
        if quota_pages is not None and pages_to_load(match) > quota_pages:
            return 0, "quota"
        return pages, ""

    async def load_back(self, match: Match) -> None:
        """Give the host part of a match device pages and queue the copy. The caller holds its lock.

        The pages are in the tree at once: a later request may match them, and waits for the same copy.
        """
        tree = self.tree
        nodes = [node for node in tree.path(match.node) if node.device is None]
        # Before anything is evicted: under write_back that may ask the host for room. What is missing may
        # be the state alone, and then only the last node is read.
        read = nodes if nodes and nodes[-1] is match.node else [*nodes, match.node]
        host_locks = [locks.lock_host(tree, node) for node in read]
        slots = await self.alloc_device(sum(node.page_count for node in nodes), "load_back")
        at = 0
        for node in nodes:
            tree.set_device(node, slots[at : at + node.page_count])
            at += node.page_count
        for node in read:
            node.device_state = node.host_state is not None
        self.load_queue.append(QueuedLoad(locks.lock(tree, match.node), nodes, host_locks))

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
        device_locks = [queued.lock for queued in queue]
        host_locks = [lock for queued in queue for lock in queued.host_locks]
        self.loads.append(self._submit("load", source, target, nodes, device_locks, host_locks))

    async def wait_for_loads(self) -> None:
        """Return when every load in flight has moved its bytes; a forward may then read them."""
        for loading in self.loads:
            if not loading.transfer.is_done:
                await self.engine.wait(loading.transfer)

    # Transfers and their acks

    def _submit(
        self,
        queue: Queue,
        source: list[Slot],
        target: list[Slot],
        nodes: list[Node],
        device_locks: list[DeviceLock],
        host_locks: list[HostLock],
    ) -> InFlight:
        self._ops += 1
        transfer = Transfer(self._ops, queue, source, target)
        self.probes.transfer_enqueue(transfer.op, queue, [node.id for node in nodes], len(source))
        self.engine.submit(transfer)
        return InFlight(transfer, nodes, device_locks, host_locks)

    def count_done(self, queue: deque[InFlight]) -> int:
        """Leading transfers whose bytes have moved, polled now, on this rank."""
        count = 0
        for moving in queue:
            if not self.engine.ready(moving.transfer):
                break
            count += 1
        return count

    async def apply_writes(self, agreed: int) -> None:
        """Apply the oldest `agreed` write acks: the host copy stands, the device lock goes, L3 may follow."""
        for moving in await self._take(self.writes, agreed):
            for node in moving.nodes:
                node.write_pending = False
            self._acknowledge(moving)
            if self.prefetches is not None:
                for node in moving.nodes:
                    self.prefetches.back_up(node)

    async def apply_loads(self, agreed: int) -> None:
        """Apply the oldest `agreed` load acks: the host locks and the device lock go."""
        for moving in await self._take(self.loads, agreed):
            for host_lock in moving.host_locks:
                locks.unlock_host(self.tree, host_lock)
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
        for device_lock in moving.device_locks:
            locks.unlock(self.tree, device_lock)
        if self.host is not None:
            for node in moving.nodes:
                self.host.note_duplicate(node)
        self.probes.transfer_ack(
            transfer.op,
            transfer.queue,
            [node.id for node in moving.nodes],
            [lock.node.lock_count for lock in moving.device_locks],
            len(transfer.source),
        )

    # Flush

    def flush(self) -> None:
        """Forget everything on device and host. Only when idle; the external tier keeps what it has."""
        assert self.is_idle, "flush of a cache that is at work"
        for node in list(self.tree.walk()):
            if node.device is not None:
                self.free_device(node.device)
            if node.host is not None:
                assert self.host is not None
                self.host.free(node.host, node.host_state)
        if self.host is not None:
            self.host.duplicates.clear()
        self.tree.reset()


def pages_to_load(match: Match) -> int:
    """Pages of the host part that the device lacks: all of them, unless only states are missing there."""
    pages = 0
    node = match.node
    while node is not match.device_node:
        if node.device is None:
            pages += node.page_count
        assert node.parent is not None
        node = node.parent
    return pages
