"""All of the outside world on one screen.

Whatever is not behind one of these is a pure function of what came through one: no wall clock, no
thread, no network and no chance in the control plane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from hicache.core import Arrival, Command, Slot, Transfer

Axis = Literal["tp", "cp", "pp"]
Reduce = Literal["min", "max", "sum"]


class Transport(Protocol):
    """Meetings with other ranks. Calls on a group are paired by order alone, blind to `purpose`.

    `axis` names the group through this rank along tp, cp or pp; on an axis of size 1 a call returns at
    once and is not recorded. `channel` picks between groups with the same members (`main`, `events`).
    """

    async def all_reduce(
        self, axis: Axis, values: Sequence[int], *, op: Reduce, purpose: str, channel: str
    ) -> list[int]:
        """Elementwise reduction over the group; the same list on every member."""
        ...

    async def rendezvous(self, axis: Axis, *, numel: int, purpose: str, channel: str) -> None:
        """An all-reduce of `numel` elements whose values nobody reads: a model's forward."""
        ...

    async def broadcast(self, axis: Axis, message: Any, *, purpose: str, channel: str) -> Any:
        """The message of the group's member 0, on every member."""
        ...

    async def send_next(self, message: Any, *, numel: int, purpose: str, channel: str) -> None:
        """Queue a message for the next pipeline stage; the last stage sends nothing."""
        ...

    async def receive_previous(self, *, numel: int, purpose: str, channel: str) -> Any:
        """The oldest unread message of the previous pipeline stage, on stages after the first."""
        ...

    async def drain_sends(self, channel: str) -> None:
        """Wait until the next stage has taken all that was sent on `channel`."""
        ...


class Engine(Protocol):
    """Copies of page bytes between tiers, in submission order per queue."""

    def submit(self, transfer: Transfer) -> None:
        """Start a copy. Its slots belong to it until its ack."""
        ...

    def ready(self, transfer: Transfer) -> bool:
        """Poll: have the bytes moved? True once and for ever after."""
        ...

    async def wait(self, transfer: Transfer) -> None:
        """Return when the bytes have moved."""
        ...


class Memory(Protocol):
    """Page slots of one tier on one rank: physical, so it may fail on this rank alone."""

    @property
    def page_count(self) -> int:
        """Pages there are; 0 where there is no limit."""
        ...

    @property
    def pages_free(self) -> int | None:
        """Pages this rank could allocate now, or None where there is no limit."""
        ...

    @property
    def pages_used(self) -> int: ...

    def alloc(self, page_count: int) -> list[Slot] | None:
        """`page_count` slots, or None and nothing taken."""
        ...

    def free(self, slots: Sequence[Slot]) -> None: ...


class Source(Protocol):
    """The front door: where requests come from. Only the first rank of a replica has one."""

    def poll(self, *, is_idle: bool) -> list[Arrival]:
        """What arrived since the last poll: requests, aborts of earlier ones, an operator's commands.

        Args:
            is_idle: whether the replica has nothing to do and nothing under way.
        """
        ...

    def carried_out(self, command: Command, reason: str) -> None:
        """What became of a command: done where `reason` is empty, else why it was refused."""
        ...

    def finished(self, rid: str, *, is_served: bool) -> None:
        """`rid` has its whole answer, or was refused; a client may send its next request."""
        ...

    @property
    def is_exhausted(self) -> bool:
        """No request will ever come again."""
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """What an external store has of a prefix, as one rank sees it.

    Attributes:
        kv_pages: leading pages of KV that are there.
        boundaries: side pool -> leading pages for which it has what it needs.
        restorable: prefix lengths in pages, ascending, that every pool could give. Without a trailing
            pool that is every length up to the shortest boundary, and the list is left empty.
    """

    kv_pages: int
    boundaries: Mapping[str, int] = field(default_factory=dict)
    restorable: Sequence[int] = ()


class Storage(Protocol):
    """The external tier as one rank reaches it. Calls take time and may fail on this rank alone.

    A page is named by its chained hash, 64 hex characters; what is stored for it is bytes. A call that
    raises `StorageError` counts as a miss, or as pages not written.
    """

    async def exists(self, hashes: Sequence[str], *, pools: Sequence[str], prefix: Sequence[str]) -> Found:
        """How much of this chain of pages is there. `prefix` names the pages before it, or is empty."""
        ...

    async def get(self, pool: str, hashes: Sequence[str], *, prefix: Sequence[str]) -> list[bytes | None]:
        """Each page's bytes, None where it is not there, too short or damaged."""
        ...

    async def set(
        self, pool: str, hashes: Sequence[str], pages: Sequence[bytes], *, prefix: Sequence[str]
    ) -> list[bool]:
        """Whether each page is there now."""
        ...

    async def open(self) -> None:
        """Get ready, before the first call and again after `close`.

        Raises:
            StorageError: this rank can't reach it.
        """
        ...

    async def close(self) -> None: ...


class Clock(Protocol):
    """Nanoseconds. One decision reads it, the deadline of a prefetch, and only stage 0 takes that."""

    @property
    def is_real(self) -> bool:
        """Does it go on by itself? Then waits have limits in seconds, not in steps."""
        ...

    def now_ns(self) -> int: ...

    async def idle(self) -> None:
        """A step in which nothing happened: let a little time pass, and let others run."""
        ...
