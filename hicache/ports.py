"""All of the outside world on one screen.

Whatever is not behind one of these is a pure function of what came through one: no wall clock, no
thread, no network and no chance in the control plane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from hicache.core import Request, Slot, Transfer

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

    def poll(self) -> list[Request]:
        """Requests that arrived since the last poll."""
        ...

    def finished(self, rid: str, *, is_served: bool) -> None:
        """`rid` has its whole answer, or was refused; a client may send its next request."""
        ...

    @property
    def is_exhausted(self) -> bool:
        """No request will ever come again."""
        ...


class Clock(Protocol):
    """Nanoseconds, for records only. No decision reads it."""

    def now_ns(self) -> int: ...
