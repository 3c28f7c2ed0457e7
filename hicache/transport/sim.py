"""The simulator's transport: pairs calls as gloo pairs them.

The k-th call of a rank on a group meets the k-th call of the others, **blind to purpose**. Same
operation, element type and length: it completes, silently, whatever the callers meant. Otherwise it
never completes. Only the log knows the purposes, which is how the checker knows better.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hicache.loop import Loop, Signal
from hicache.ports import Axis, Reduce
from hicache.probes import Probes
from hicache.topology import Coordinates, Topology

# Virtual time: what a model's forward costs, so that a trace's times have a shape. Nothing reads them
# to decide.
FORWARD_NS = 2_000_000
FORWARD_TOKEN_NS = 10_000
RECORD_NS = 1_000

REDUCTIONS: dict[str, Callable[..., int]] = {"min": min, "max": max, "sum": lambda *values: sum(values)}
# What a collective's two sides must have in common: the operation and the number of elements. How
# to reduce is each member's own affair, and nobody compares it.
Shape = tuple[str, int]


class VirtualClock:
    """One rank's virtual time. Implements `ports.Clock`: each look costs a microsecond."""

    __slots__ = ("time_ns",)

    def __init__(self) -> None:
        self.time_ns = 0

    def now_ns(self) -> int:
        self.time_ns += RECORD_NS
        return self.time_ns


@dataclass(slots=True)
class _Call:
    """The k-th call on a group, while its members arrive."""

    shape: Shape
    arrived: dict[int, tuple[Any, Signal]] = field(default_factory=dict)
    is_mismatched: bool = False


@dataclass(slots=True)
class _Group:
    """Calls in progress on one group. A call nobody can complete stays here for ever."""

    name: str
    members: tuple[int, ...]
    # rank -> calls it has made; whatever lane of it makes one, it is the next of that rank.
    made: Counter[int] = field(default_factory=Counter)
    calls: dict[int, _Call] = field(default_factory=dict)

    def next_seq(self, rank: int) -> int:
        seq = self.made[rank]
        self.made[rank] += 1
        return seq


@dataclass(slots=True)
class _Channel:
    """Messages from one stage's rank to the next, oldest first."""

    name: str
    messages: deque[tuple[int, Any]] = field(default_factory=deque)
    receiver: tuple[int, Signal] | None = None
    unread: deque[Signal] = field(default_factory=deque)
    sent: int = 0
    received: int = 0

    def deliver(self) -> None:
        """Hand the oldest message to the receive that waits, if it is as long as that expects.

        A receive of another length never completes, as on a real pair of sockets; what comes later
        does not overtake.
        """
        if self.receiver is None or not self.messages:
            return
        numel, signal = self.receiver
        if self.messages[0][0] == numel:
            self.receiver = None
            self.unread.popleft().fire()
            signal.fire(self.messages.popleft()[1])


class SimNetwork:
    """All groups and channels of a simulated job."""

    def __init__(self, topology: Topology, loop: Loop) -> None:
        self.topology = topology
        self.loop = loop
        self._groups: dict[str, _Group] = {}
        self._channels: dict[str, _Channel] = {}

    def group(self, axis: Axis, channel: str, at: Coordinates) -> _Group | None:
        """The group through `at`, or None where the axis has one member."""
        members = self.topology.members(axis, at)
        if len(members) == 1:
            return None
        name = self.topology.group_name(axis, channel, at)
        return self._groups.setdefault(name, _Group(name, members))

    def channel(self, channel: str, sender: Coordinates) -> _Channel:
        name = f"{self.topology.group_name('pp', channel, sender)}:{sender.pp}"
        return self._channels.setdefault(name, _Channel(name))

    async def meet(self, group: _Group, seq: int, rank: int, shape: Shape, value: Any) -> list[Any]:
        """Everybody's values, in order of members, once all have come with the same shape."""
        call = group.calls.setdefault(seq, _Call(shape))
        signal = self.loop.signal(f"{shape[0]} {group.name} #{seq}")
        if call.shape != shape:
            call.is_mismatched = True
        call.arrived[rank] = (value, signal)
        if len(call.arrived) == len(group.members) and not call.is_mismatched:
            del group.calls[seq]
            values = [call.arrived[member][0] for member in group.members]
            for member in group.members:
                call.arrived[member][1].fire(values)
        values = await signal
        assert isinstance(values, list)
        return values


class SimTransport:
    """One lane's way to the others. Implements `ports.Transport`."""

    def __init__(self, network: SimNetwork, rank: int, probes: Probes, clock: VirtualClock) -> None:
        self._network = network
        self._rank = rank
        self._clock = clock
        self._at = network.topology.coordinates(rank)
        self._probes = probes
        self._found: dict[tuple[str, str], _Group | None] = {}

    def _group(self, axis: Axis, channel: str) -> _Group | None:
        key = (axis, channel)
        if key not in self._found:
            self._found[key] = self._network.group(axis, channel, self._at)
        return self._found[key]

    async def _meet(
        self, group: _Group, axis: Axis, purpose: str, op: str, reduce: str, numel: int, value: Any
    ) -> list[Any]:
        seq = group.next_seq(self._rank)
        self._probes.meeting_enter(axis, purpose, op, reduce, numel, group.name, seq, None)
        rows = await self._network.meet(group, seq, self._rank, (op, numel), (self._clock.time_ns, value))
        # Nobody leaves before the last has come.
        self._clock.time_ns = max(time_ns for time_ns, _ in rows)
        self._probes.meeting_leave(axis, purpose, op, reduce, numel, group.name, seq, None)
        return [value for _, value in rows]

    async def all_reduce(
        self, axis: Axis, values: Sequence[int], *, op: Reduce, purpose: str, channel: str
    ) -> list[int]:
        group = self._group(axis, channel)
        if group is None:
            return list(values)
        rows = await self._meet(group, axis, purpose, "all_reduce", op, len(values), list(values))
        reduce = REDUCTIONS[op]
        return [reduce(*column) for column in zip(*rows, strict=True)]

    async def rendezvous(self, axis: Axis, *, numel: int, purpose: str, channel: str) -> None:
        if axis == "tp":
            self._clock.time_ns += FORWARD_NS + numel * FORWARD_TOKEN_NS
        group = self._group(axis, channel)
        if group is not None:
            await self._meet(group, axis, purpose, "all_reduce", "sum", numel, None)

    async def broadcast(self, axis: Axis, message: Any, *, purpose: str, channel: str) -> Any:
        group = self._group(axis, channel)
        if group is None:
            return message
        rows = await self._meet(group, axis, purpose, "broadcast", "", 1, message)
        return rows[0]

    async def send_next(self, message: Any, *, numel: int, purpose: str, channel: str) -> None:
        topology, at = self._network.topology, self._at
        if at.pp == topology.pp - 1:
            return
        out = self._network.channel(channel, at)
        peer = topology.rank_at(dp=at.dp, pp=at.pp + 1, cp=at.cp, tp=at.tp)
        self._probes.meeting_enter("pp", purpose, "send", "", numel, out.name, out.sent, peer)
        out.unread.append(self._network.loop.signal(f"taken {out.name} #{out.sent}"))
        out.sent += 1
        out.messages.append((numel, message))
        out.deliver()
        self._probes.meeting_leave("pp", purpose, "send", "", numel, out.name, out.sent - 1, peer)

    async def receive_previous(self, *, numel: int, purpose: str, channel: str) -> Any:
        topology, at = self._network.topology, self._at
        assert at.pp > 0, "the first stage has no previous one"
        sender = Coordinates(dp=at.dp, pp=at.pp - 1, cp=at.cp, tp=at.tp)
        inbox = self._network.channel(channel, sender)
        peer = topology.rank_at(dp=at.dp, pp=at.pp - 1, cp=at.cp, tp=at.tp)
        seq = inbox.received
        inbox.received += 1
        self._probes.meeting_enter("pp", purpose, "recv", "", numel, inbox.name, seq, peer)
        signal = self._network.loop.signal(f"recv {inbox.name} #{seq}")
        inbox.receiver = (numel, signal)
        inbox.deliver()
        message = await signal
        self._probes.meeting_leave("pp", purpose, "recv", "", numel, inbox.name, seq, peer)
        return message

    async def drain_sends(self, channel: str) -> None:
        topology, at = self._network.topology, self._at
        if at.pp == topology.pp - 1:
            return
        out = self._network.channel(channel, at)
        while out.unread:
            await out.unread[-1]
