"""Meetings inside one process: the simulator's, and what `threads` shares with it.

They pair calls as gloo pairs them. The k-th call of a rank on a group meets the k-th call of the others,
**blind to purpose**. Same operation, element type and length: it completes, silently, whatever the
callers meant. Otherwise it never completes. Only the log knows the purposes, which is how the checker
knows better.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from hicache.loop import PAUSE, Loop, Signal
from hicache.ports import Axis
from hicache.probes import Probes
from hicache.topology import Topology
from hicache.transport.meetings import (
    Call,
    Group,
    LaneTransport,
    Link,
    MispairedError,
    Seat,
    differing,
    reduced,
)

# Virtual time: what a model's forward costs, so that a trace's times have a shape. No decision but a
# prefetch's deadline reads it.
FORWARD_NS = 2_000_000
FORWARD_TOKEN_NS = 10_000
RECORD_NS = 1_000
IDLE_NS = 1_000_000


class VirtualClock:
    """One rank's virtual time. Implements `ports.Clock`: each look costs a microsecond."""

    __slots__ = ("time_ns",)

    is_real = False

    def __init__(self) -> None:
        self.time_ns = 0

    def now_ns(self) -> int:
        self.time_ns += RECORD_NS
        return self.time_ns

    async def idle(self) -> None:
        self.time_ns += IDLE_NS
        await PAUSE


@dataclass(frozen=True, slots=True)
class _Arrival:
    """One member of a call, waiting for the others."""

    call: Call
    value: Any
    signal: Signal

    @property
    def shape(self) -> tuple[str, int]:
        """What both sides must have in common. How to reduce is each member's own affair."""
        return self.call.op, self.call.numel


@dataclass(slots=True)
class _Queue:
    """Messages from one stage's rank to the next, oldest first."""

    sender: int
    messages: deque[_Arrival] = field(default_factory=deque)
    receive: _Arrival | None = None
    last_taken: Signal | None = None


class Network:
    """All groups and links of a job whose ranks live in one process.

    Args:
        lock: held for a moment at each call; needed where ranks have threads of their own.
    """

    def __init__(self, topology: Topology, lock: AbstractContextManager[Any] | None = None) -> None:
        self.topology = topology
        self._seats: dict[int, Seat] = {}
        # A call nobody can complete stays here for ever.
        self._calls: dict[tuple[str, int], dict[int, _Arrival]] = {}
        self._queues: dict[str, _Queue] = {}
        self._lock = lock if lock is not None else nullcontext()

    def seat(self, rank: int) -> Seat:
        with self._lock:
            return self._seats.setdefault(rank, Seat(self.topology, rank))

    def meet(self, group: Group, rank: int, arrival: _Arrival) -> None:
        """Everybody's signal fires with all arrivals, in order of members, once all have come alike."""
        key = (group.name, arrival.call.seq)
        with self._lock:
            arrived = self._calls.setdefault(key, {})
            arrived[rank] = arrival
            if len(arrived) < len(group.members):
                return
            members = [(member, arrived[member]) for member in group.members]
            if any(each.call.meaning != arrival.call.meaning for _, each in members):
                meanings = [(member, each.call.meaning) for member, each in members]
                for member, each in members:
                    each.signal.fire(MispairedError(differing(meanings, member)))
            elif all(each.shape == arrival.shape for _, each in members):
                del self._calls[key]
                rows = [each.value for _, each in members]
                for _, each in members:
                    each.signal.fire(rows)

    def send(self, link: Link, rank: int, message: _Arrival) -> None:
        """Queue a message; its signal fires when the other side takes it."""
        with self._lock:
            queue = self._queues.setdefault(link.name, _Queue(rank))
            queue.messages.append(message)
            queue.last_taken = message.signal
            self._deliver(queue)

    def receive(self, link: Link, receive: _Arrival) -> None:
        """The signal fires with the oldest message, if that is as long as the receive expects.

        A receive of another length never completes, as on a real pair of sockets; what comes later
        does not overtake.
        """
        with self._lock:
            queue = self._queues.setdefault(link.name, _Queue(link.peer))
            assert queue.receive is None, f"two lanes receive on {link.name}"
            queue.receive = receive
            self._deliver(queue)

    def last_taken(self, link: Link) -> Signal | None:
        with self._lock:
            queue = self._queues.get(link.name)
            return queue.last_taken if queue is not None else None

    def _deliver(self, queue: _Queue) -> None:
        if queue.receive is None or not queue.messages:
            return
        receive, message = queue.receive, queue.messages[0]
        if receive.call.meaning != message.call.meaning:
            queue.receive = None
            receive.signal.fire(MispairedError([f"rank {queue.sender}: {message.call.meaning}"]))
        elif receive.call.numel == message.call.numel:
            queue.receive = None
            queue.messages.popleft().signal.fire()
            receive.signal.fire(message.value)


class LocalWire:
    """One rank's way to the others within the process. Implements `meetings.Wire`.

    Args:
        signal: makes what a lane of this rank waits for, and any rank may fire.
        clock: of the rank in virtual time, None in real time.
    """

    def __init__(
        self, network: Network, rank: int, signal: Callable[[str], Signal], clock: VirtualClock | None = None
    ) -> None:
        self._network = network
        self._rank = rank
        self._signal = signal
        self._clock = clock

    async def meet(self, group: Group, call: Call, value: Any) -> Any:
        clock = self._clock
        signal = self._signal(f"{call.op} {group.name} #{call.seq}")
        timed = (clock.time_ns if clock is not None else 0, value)
        self._network.meet(group, self._rank, _Arrival(call, timed, signal))
        rows = await _outcome(signal)
        if clock is not None:
            # Nobody leaves before the last has come.
            clock.time_ns = max(clock.time_ns, *(time_ns for time_ns, _ in rows))
        values = [value for _, value in rows]
        return values[0] if call.op == "broadcast" else reduced(values, call)

    def send(self, link: Link, call: Call, message: Any) -> None:
        signal = self._signal(f"taken {link.name} #{call.seq}")
        self._network.send(link, self._rank, _Arrival(call, message, signal))

    async def receive(self, link: Link, call: Call) -> Any:
        signal = self._signal(f"recv {link.name} #{call.seq}")
        self._network.receive(link, _Arrival(call, None, signal))
        return await _outcome(signal)

    async def drain(self, link: Link) -> None:
        while (last := self._network.last_taken(link)) is not None and not last.is_fired:
            await last


async def _outcome(signal: Signal) -> Any:
    value = await signal
    if isinstance(value, MispairedError):
        raise value
    return value


class SimNetwork(Network):
    """The network of a simulated job: one loop runs all ranks."""

    def __init__(self, topology: Topology, loop: Loop) -> None:
        super().__init__(topology)
        self.loop = loop


class SimTransport(LaneTransport):
    """One lane's way to the others in virtual time. Implements `ports.Transport`."""

    def __init__(
        self, network: SimNetwork, rank: int, probes: Probes, clock: VirtualClock, *, guard: bool = False
    ) -> None:
        wire = LocalWire(network, rank, network.loop.signal, clock)
        super().__init__(network.seat(rank), wire, probes, guard=guard)
        self._clock = clock

    async def rendezvous(self, axis: Axis, *, numel: int, purpose: str, channel: str) -> None:
        if axis == "tp":
            self._clock.time_ns += FORWARD_NS + numel * FORWARD_TOKEN_NS
        await super().rendezvous(axis, numel=numel, purpose=purpose, channel=channel)
