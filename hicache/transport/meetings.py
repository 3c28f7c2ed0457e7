"""What every transport has in common: who meets whom, in which order, what the log says of it, the guard.

The k-th call of a rank on a group meets the k-th call of the others, **blind to purpose**; only the log
knows the purposes. How the bytes get there is a `Wire`'s: within the simulator (`sim`), between threads
(`threads`), between processes (`gloo`).

    control --Transport--> LaneTransport --Call--> Wire
                             |  meeting records      |  rendezvous of all members
                             |  group_seq            |  the guard's comparison

With `Config.meeting_guard` every call also says what it means, and the first that meets another meaning
ends the run before anybody uses what came of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hicache.core import vector_digest
from hicache.errors import HiCacheError, MeetingError
from hicache.ports import Axis, Reduce
from hicache.probes import Probes
from hicache.topology import Coordinates, Topology

# How the error of a rank begins that only suffers from another one's end.
LOST = "lost another rank: "
# The channel on which stages hand on vectors of counts.
VECTORS = "events"
REDUCTIONS: dict[str, Callable[..., int]] = {"min": min, "max": max, "sum": lambda *values: sum(values)}


class LostPeerError(HiCacheError):
    """Another rank is gone, or a call to it failed: this rank can't go on, through no fault of its own."""


class MispairedError(Exception):
    """What a wire raises when the guard has seen another meaning; `others` are those of the other members."""

    def __init__(self, others: Sequence[str]) -> None:
        super().__init__(", ".join(others))
        self.others = list(others)


@dataclass(slots=True, eq=False)
class Group:
    """One group as one rank sees it; the rank's lanes share it.

    Attributes:
        calls_made: by any lane of this rank; the next call's `group_seq`.
    """

    name: str
    members: tuple[int, ...]
    calls_made: int = 0


@dataclass(slots=True, eq=False)
class Link:
    """One direction between two neighbouring stages, as one of them sees it."""

    name: str
    peer: int
    calls_made: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one rank, as it goes to the wire.

    Attributes:
        seq: which call of this rank on that group or link.
        op: all_reduce, broadcast, send or recv.
        reduce: min, max, sum, or "" where nothing is reduced.
        meaning: what the guard compares; "" without it.
    """

    seq: int
    op: str
    reduce: str
    numel: int
    meaning: str


class Wire(Protocol):
    """How one rank's values get to the others.

    Raises:
        MispairedError: from `meet` and `receive`, where the calls have meanings and these differ.
        LostPeerError: from any of them; the other side is gone.
    """

    async def meet(self, group: Group, call: Call, value: Any) -> Any:
        """One collective call; returns the reduced list, or the first member's message.

        A value of None stands for `call.numel` zeros, and what came of it is nobody's to read.
        """
        ...

    def send(self, link: Link, call: Call, message: Any) -> None: ...

    async def receive(self, link: Link, call: Call) -> Any: ...

    async def drain(self, link: Link) -> None:
        """Return when the other side has taken all that was sent."""
        ...


class Seat:
    """One rank's groups and links, counted for all its lanes together."""

    def __init__(self, topology: Topology, rank: int) -> None:
        self.topology = topology
        self.rank = rank
        self.at = topology.coordinates(rank)
        self._groups: dict[tuple[str, str], Group | None] = {}
        self._links: dict[tuple[str, int], Link | None] = {}

    def group(self, axis: Axis, channel: str) -> Group | None:
        """The group through this rank, or None where the axis has one member."""
        key = (axis, channel)
        if key not in self._groups:
            members = self.topology.members(axis, self.at)
            name = self.topology.group_name(axis, channel, self.at)
            self._groups[key] = Group(name, members) if len(members) > 1 else None
        return self._groups[key]

    def to_next(self, channel: str) -> Link | None:
        """The way to the next stage; None on the last."""
        return self._link(channel, self.at, self.at.pp + 1)

    def from_previous(self, channel: str) -> Link | None:
        """The way from the stage before; None on the first."""
        at = self.at
        sender = Coordinates(dp=at.dp, pp=at.pp - 1, cp=at.cp, tp=at.tp)
        return self._link(channel, sender, at.pp - 1)

    def _link(self, channel: str, sender: Coordinates, peer_pp: int) -> Link | None:
        """A link is named by its sender; None where there is no stage `peer_pp`."""
        key = (channel, peer_pp)
        if key not in self._links:
            self._links[key] = None
            if 0 <= peer_pp < self.topology.pp:
                name = f"{self.topology.group_name('pp', channel, sender)}:{sender.pp}"
                at = self.at
                self._links[key] = Link(name, self.topology.rank_at(dp=at.dp, pp=peer_pp, cp=at.cp, tp=at.tp))
        return self._links[key]


class LaneTransport:
    """One lane's way to the others. Implements `ports.Transport`."""

    def __init__(self, seat: Seat, wire: Wire, probes: Probes, *, guard: bool = False) -> None:
        self._seat = seat
        self._wire = wire
        self._probes = probes
        self._guard = guard

    async def all_reduce(
        self, axis: Axis, values: Sequence[int], *, op: Reduce, purpose: str, channel: str
    ) -> list[int]:
        group = self._seat.group(axis, channel)
        if group is None:
            return list(values)
        reduced = await self._meet(group, axis, purpose, "all_reduce", op, len(values), list(values))
        assert isinstance(reduced, list)
        return reduced

    async def rendezvous(self, axis: Axis, *, numel: int, purpose: str, channel: str) -> None:
        group = self._seat.group(axis, channel)
        if group is not None:
            await self._meet(group, axis, purpose, "all_reduce", "sum", numel, None)

    async def broadcast(self, axis: Axis, message: Any, *, purpose: str, channel: str) -> Any:
        group = self._seat.group(axis, channel)
        if group is None:
            return message
        return await self._meet(group, axis, purpose, "broadcast", "", 1, message)

    async def _meet(
        self, group: Group, axis: Axis, purpose: str, op: str, reduce: str, numel: int, value: Any
    ) -> Any:
        seq = group.calls_made
        group.calls_made += 1
        self._probes.meeting_enter(axis, purpose, op, reduce, numel, group.name, seq, None)
        call = Call(seq, op, reduce, numel, self._meaning(purpose, seq, op, numel))
        try:
            outcome = await self._wire.meet(group, call, value)
        except MispairedError as error:
            raise self._told(group.name, seq, purpose, error) from None
        self._probes.meeting_leave(axis, purpose, op, reduce, numel, group.name, seq, None)
        return outcome

    async def send_next(self, message: Any, *, numel: int, purpose: str, channel: str) -> None:
        link = self._seat.to_next(channel)
        if link is None:
            return
        seq = link.calls_made
        link.calls_made += 1
        self._probes.meeting_enter("pp", purpose, "send", "", numel, link.name, seq, link.peer)
        call = Call(seq, "send", "", numel, self._meaning(purpose, seq, "send", numel))
        self._wire.send(link, call, message)
        self._left(channel, message, purpose, "send", numel, link, seq)

    async def receive_previous(self, *, numel: int, purpose: str, channel: str) -> Any:
        link = self._seat.from_previous(channel)
        assert link is not None, "the first stage has no previous one"
        seq = link.calls_made
        link.calls_made += 1
        self._probes.meeting_enter("pp", purpose, "recv", "", numel, link.name, seq, link.peer)
        # Both sides say the same words.
        call = Call(seq, "recv", "", numel, self._meaning(purpose, seq, "send", numel))
        try:
            message = await self._wire.receive(link, call)
        except MispairedError as error:
            raise self._told(link.name, seq, purpose, error) from None
        self._left(channel, message, purpose, "recv", numel, link, seq)
        return message

    def _left(
        self, channel: str, message: Any, purpose: str, op: str, numel: int, link: Link, seq: int
    ) -> None:
        """The end of one side's part of a hop; of a vector, what it was."""
        told = "pp", purpose, op, "", numel, link.name, seq, link.peer
        if channel == VECTORS and type(message) is list:
            self._probes.meeting_leave_value(*told, vector_digest(message))
        else:
            self._probes.meeting_leave(*told)

    async def drain_sends(self, channel: str) -> None:
        link = self._seat.to_next(channel)
        if link is not None:
            await self._wire.drain(link)

    def _meaning(self, purpose: str, seq: int, op: str, numel: int) -> str:
        return f"{purpose} #{seq} {op} {numel}" if self._guard else ""

    def _told(self, group: str, seq: int, purpose: str, error: MispairedError) -> MeetingError:
        """Write the anomaly; returns what to raise."""
        self._probes.mispaired(group, seq, purpose, error.others)
        return MeetingError(
            f"meeting guard: in call {seq} on {group} this rank means {purpose}, others {error} "
            f"(step {self._probes.tracer.step})"
        )


def reduced(rows: Sequence[Sequence[int] | None], call: Call) -> list[int] | None:
    """Place by place over all members' values; None when nobody gave any.

    How to reduce is the caller's own affair; members that disagree on it each get their own answer.
    """
    if all(row is None for row in rows):
        return None
    reduce = REDUCTIONS[call.reduce]
    zeros = [0] * call.numel
    return [reduce(*column) for column in zip(*(row or zeros for row in rows), strict=True)]


def differing(meanings: Sequence[tuple[int, str]], rank: int) -> list[str]:
    """What the other members meant that meant something else than `rank`; empty when all agree.

    Args:
        meanings: rank and its meaning, for all members.
    """
    own = dict(meanings)[rank]
    return [f"rank {other}: {meaning}" for other, meaning in meanings if meaning != own]
