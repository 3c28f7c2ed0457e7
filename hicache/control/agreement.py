"""How ranks come to one answer: MIN over context and tensor ranks, then down the pipeline.

    stage 0   cp MIN -> tp MIN --send--> stage 1 --send--> stage 2       one hop a stage

Stage 0 decides; a later stage receives and adopts, without a look at its own counts. A transfer counted by
stage 0 was submitted at the same logical step on every stage, so a later stage may have to wait for its
own copy, never for a decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hicache.core import Slot
from hicache.ports import Transport

PURPOSE = "event_round"
CHANNEL = "events"


@dataclass(frozen=True, slots=True)
class Counts:
    """The vector of an event round: what one rank could apply, or what the group will.

    Attributes:
        writes, loads: leading transfers of a queue whose bytes have moved.
        backups: leading queued backups for which host slots are reserved.
    """

    writes: int
    loads: int
    backups: int

    def vector(self) -> list[int]:
        return [self.writes, self.loads, self.backups]


class Agreement(Protocol):
    """Turns local counts into the group's."""

    async def agree(self, local: Counts, *, transfers_in_flight: int) -> Counts: ...


class MinThenChain:
    """The right way: every rank of stage 0 takes part in every round, whatever it has to report."""

    def __init__(self, transport: Transport, *, pp_rank: int) -> None:
        self._transport = transport
        self._pp_rank = pp_rank

    async def agree(self, local: Counts, *, transfers_in_flight: int) -> Counts:
        transport = self._transport
        if self._pp_rank == 0:
            values = await self.reduce(local, transfers_in_flight=transfers_in_flight)
        else:
            numel = len(local.vector())
            values = await transport.receive_previous(numel=numel, purpose=PURPOSE, channel=CHANNEL)
        await transport.send_next(values, numel=len(values), purpose=PURPOSE, channel=CHANNEL)
        return Counts(*values)

    async def reduce(self, local: Counts, *, transfers_in_flight: int) -> list[int]:
        """Stage 0's part: the minimum over its context ranks, then over its tensor ranks."""
        transport = self._transport
        values = local.vector()
        values = await transport.all_reduce("cp", values, op="min", purpose=PURPOSE, channel=CHANNEL)
        return await transport.all_reduce("tp", values, op="min", purpose=PURPOSE, channel=CHANNEL)


class Reservations(Protocol):
    """What a rank does when its own host memory could not give the slots of a backup."""

    def stands(self, slots: list[Slot] | None) -> bool:
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

    def stands(self, slots: list[Slot] | None) -> bool:
        return True

    def ballot(self, reserved: Sequence[bool]) -> int:
        return reserved.index(False) if False in reserved else len(reserved)

    def committed(self, queue_len: int, agreed: int) -> int:
        assert agreed <= queue_len, f"{agreed} backups agreed, {queue_len} queued here"
        return agreed
