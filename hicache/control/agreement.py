"""How ranks come to one answer: reduced over context and tensor ranks, then down the pipeline.

    stage 0   cp MIN -> tp MIN --send--> stage 1 --send--> stage 2       one hop a stage

Stage 0 decides; a later stage receives and adopts, without a look at its own counts. A transfer counted by
stage 0 was submitted at the same logical step on every stage, so a later stage may have to wait for its
own copy, never for a decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from hicache.control.pools import HostSlots
from hicache.ports import Transport

CHANNEL = "events"
EVENT_ROUND = "event_round"
PREFETCH_TIMEOUT = "prefetch_timeout"


class Agreement(Protocol):
    """Turns one rank's numbers into the group's."""

    async def agree(
        self, local: Sequence[int], *, op: Literal["min", "max"], purpose: str, transfers_in_flight: int
    ) -> list[int]: ...


class MinThenChain:
    """The right way: every rank of stage 0 takes part in every round, whatever it has to report."""

    def __init__(self, transport: Transport, *, pp_rank: int) -> None:
        self._transport = transport
        self._pp_rank = pp_rank

    async def agree(
        self, local: Sequence[int], *, op: Literal["min", "max"], purpose: str, transfers_in_flight: int
    ) -> list[int]:
        transport, numel = self._transport, len(local)
        if self._pp_rank == 0:
            values = await self.reduce(local, op=op, purpose=purpose, transfers_in_flight=transfers_in_flight)
        else:
            values = await transport.receive_previous(numel=numel, purpose=purpose, channel=CHANNEL)
        await transport.send_next(values, numel=numel, purpose=purpose, channel=CHANNEL)
        return values

    async def reduce(
        self, local: Sequence[int], *, op: Literal["min", "max"], purpose: str, transfers_in_flight: int
    ) -> list[int]:
        """Stage 0's part: over its context ranks, then over its tensor ranks."""
        transport = self._transport
        values = await transport.all_reduce("cp", local, op=op, purpose=purpose, channel=CHANNEL)
        return await transport.all_reduce("tp", values, op=op, purpose=purpose, channel=CHANNEL)


async def vote(transport: Transport, is_ready: bool, *, purpose: str, channel: str) -> bool:
    """Is every rank of the replica ready? Over all three axes; every rank takes part whatever it says."""
    values = [int(is_ready)]
    for axis in ("cp", "tp", "pp"):
        values = await transport.all_reduce(axis, values, op="min", purpose=purpose, channel=channel)
    return values == [1]


class Reservations(Protocol):
    """What a rank does when its own host memory could not give the slots of a backup."""

    def stands(self, slots: HostSlots | None) -> bool:
        """Is the backup queued?"""
        ...

    def ballot(self, reserved: Sequence[bool]) -> int:
        """What this rank reports for its queue of backups."""
        ...

    def committed(self, queue_len: int, agreed: int) -> int:
        """How many of the queue are then copied; the rest is cancelled."""
        ...


class ReserveThenVote:
    """The right way: queue it on every rank, report how many stand, copy what stands everywhere.

    The decision to back up is taken from agreed room, so it is the same everywhere; memory that fails
    on one rank only is a fact that the others must hear before anything is copied.
    """

    def stands(self, slots: HostSlots | None) -> bool:
        return True

    def ballot(self, reserved: Sequence[bool]) -> int:
        return reserved.index(False) if False in reserved else len(reserved)

    def committed(self, queue_len: int, agreed: int) -> int:
        assert agreed <= queue_len, f"{agreed} backups agreed, {queue_len} queued here"
        return agreed
