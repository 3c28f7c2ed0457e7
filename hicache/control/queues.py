"""What lanes of one rank hand to each other: prefetches, what came of them, and backups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache.control.active import Active
from hicache.control.keys import hash_names
from hicache.control.locks import HostLock
from hicache.control.node import Node
from hicache.control.pools import HostSlots
from hicache.core import DIGEST_BYTES, HASH_BYTES, NodeId, OpId, Slot
from hicache.loop import Mailbox, Signal


@dataclass(slots=True, eq=False)
class Prefetch:
    """One span of a prompt on its way from the external tier to the host.

    Attributes:
        op: number of its submission, counted alike on every rank.
        anchor: node that the span hangs below, kept on the host by `lock`.
        first_page: of the span, counted from the start of the prompt.
        tokens, digests, hashes: of the span; cut to what was allocated.
        known_pages: leading pages that an earlier try has proved to be there; they are not asked for again.
        is_terminated: nothing more of it is wanted; lanes stop reading and keep publishing.
        slots: this rank's host slots; None before they are allocated, and where this rank had none.
        page_count: pages the group counts as allocated; 0 before.
        state_count: states likewise.
        agreed_pages: what every rank can have; known at the hit.
        completed_pages: pages read on every rank, as far as drained.
        has_state: every rank has read the recurrent state.
        given_pages: leading pages that are no longer its own: in the tree, or freed.
    """

    op: OpId
    active: Active
    handle: tuple[str, int]
    anchor: Node
    lock: HostLock
    first_page: int
    tokens: bytes
    digests: bytes
    hashes: bytes
    pages_asked: int
    prefix: Sequence[str]
    known_pages: int = 0
    is_terminated: bool = False
    slots: HostSlots | None = None
    page_count: int = 0
    state_count: int = 0
    agreed_pages: int = 0
    completed_pages: int = 0
    is_kv_complete: bool = False
    has_state: bool = False
    given_pages: int = 0

    def names(self, first: int, count: int) -> list[str]:
        """Hash names of pages `first`.. of the span."""
        return hash_names(self.hashes[first * HASH_BYTES : (first + count) * HASH_BYTES])

    def cut(self, page_count: int, page_size_bytes: int) -> None:
        self.tokens = self.tokens[: page_count * page_size_bytes]
        self.digests = self.digests[: page_count * DIGEST_BYTES]
        self.hashes = self.hashes[: page_count * HASH_BYTES]


@dataclass(frozen=True, slots=True)
class Hit:
    """What the prefetch lane publishes: how much of the span every rank can have."""

    prefetch: Prefetch
    agreed_pages: int
    publish_seq: int


@dataclass(frozen=True, slots=True)
class Progress:
    """What the io lane measures, and behind the sync lane what the group agreed on.

    Attributes:
        ack: `progress`, `pool_hits` or `completed`.
        pages: of the whole span, read so far; for `pool_hits` 1 where the state is there.
    """

    prefetch: Prefetch
    ack: str
    pages: int
    publish_seq: int = 0


@dataclass(slots=True, eq=False)
class StorageBackup:
    """Pages of a node on their way from the host to the external tier."""

    op: OpId
    node_id: NodeId
    lock: HostLock
    digests: bytes
    names: list[str]
    slots: list[Slot]
    has_state: bool
    prefix: Sequence[str]
    written_pages: int = 0


class Queues:
    """What lanes of one rank hand to each other. None in a queue ends the lane that reads it."""

    def __init__(self, signal: Callable[[str], Signal]) -> None:
        self.prefetch: Mailbox[Prefetch | None] = Mailbox(signal, "prefetch_queue")
        self.hits: Mailbox[Hit] = Mailbox(signal, "prefetch_hit_queue")
        self.buffer: Mailbox[Prefetch | None] = Mailbox(signal, "prefetch_buffer")
        self.sync: Mailbox[Progress | None] = Mailbox(signal, "prefetch_sync_queue")
        self.acks: Mailbox[Progress] = Mailbox(signal, "ack_prefetch_queue")
        self.backup: Mailbox[StorageBackup | None] = Mailbox(signal, "backup_queue")
        self.backup_acks: Mailbox[StorageBackup] = Mailbox(signal, "ack_backup_queue")
        # One page a piece; None where this rank has no slot for what the group counts.
        self.releases: Mailbox[Slot | None] = Mailbox(signal, "host_mem_release_queue")
        self.state_releases: Mailbox[Slot | None] = Mailbox(signal, "extra_host_mem_release_queue")

    def close(self) -> None:
        for queue in (self.prefetch, self.buffer, self.backup):
            queue.put(None)
        self.sync.put(None)
