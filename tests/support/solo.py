"""One rank by itself: real scheduler, cache and lanes; a script at the front door, peers and bytes made up.

A test says at which poll what arrives and reads the records of the run. Polls count from 1, one a step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hicache.config import Config
from hicache.control.keys import pack
from hicache.control.pools import SlotMemory
from hicache.core import Arrival, Command, Request, Transfer
from hicache.errors import StorageError
from hicache.ledger import Ledger
from hicache.loop import PAUSE, Loop, Signal
from hicache.ports import Found
from hicache.probes import Probes
from hicache.rank import SCHEDULER, Parts, Ports, Rank, build_rank, lane_names
from hicache.schedule import Schedule
from tracer.sinks import MemorySink
from tracer.tracer import Tracer

MS = 1_000_000


def prompt(*pages: int, page_tokens: int = 4, more: int = 1) -> bytes:
    """A prompt of these pages, each one token repeated, and `more` tokens of another page."""
    return b"".join(pack([page] * page_tokens) for page in pages) + pack([0] * more)


def answer(tokens: int, *, first: int = 1_000) -> bytes:
    return pack(range(first, first + tokens))


class Script:
    """A front door that hands in what it was told, poll by poll. Implements `ports.Source`."""

    def __init__(self, arrivals: Mapping[int, Sequence[Arrival]]) -> None:
        self._arrivals = dict(arrivals)
        self._polls = 0
        self.ended: list[tuple[str, bool]] = []
        self.carried: list[tuple[str, str]] = []

    def carried_out(self, command: Command, reason: str) -> None:
        self.carried.append((command.verb, reason))

    def poll(self, *, is_idle: bool) -> list[Arrival]:
        self._polls += 1
        return list(self._arrivals.pop(self._polls, ()))

    def finished(self, rid: str, *, is_served: bool) -> None:
        self.ended.append((rid, is_served))

    @property
    def is_exhausted(self) -> bool:
        return not self._arrivals


class Alone:
    """The transport of a rank without peers."""

    async def all_reduce(self, axis: str, values: Sequence[int], **_: Any) -> list[int]:
        return list(values)

    async def rendezvous(self, axis: str, **_: Any) -> None:
        pass

    async def broadcast(self, axis: str, message: Any, **_: Any) -> Any:
        return message

    async def send_next(self, message: Any, **_: Any) -> None:
        pass

    async def receive_previous(self, **_: Any) -> Any:
        raise AssertionError("there is no previous stage")

    async def drain_sends(self, channel: str) -> None:
        pass


class SlowEngine:
    """Copies tags at once and says so at the `polls`-th question."""

    def __init__(self, ledger: Ledger, polls: int) -> None:
        self._ledger = ledger
        self._polls = polls
        self._asked: dict[int, int] = {}

    def submit(self, transfer: Transfer) -> None:
        source, target = self._ledger.device, self._ledger.host
        if transfer.queue == "load":
            source, target = target, source
        target.write(transfer.target, source.read(transfer.source), writer=transfer.op)

    def ready(self, transfer: Transfer) -> bool:
        asked = self._asked[transfer.op] = self._asked.get(transfer.op, 0) + 1
        transfer.is_done = transfer.is_done or asked >= self._polls
        return transfer.is_done

    async def wait(self, transfer: Transfer) -> None:
        transfer.is_done = True


class IdleClock:
    """A millisecond passes in every idle step, and nothing else takes time."""

    is_real = False

    def __init__(self) -> None:
        self.idle_steps = 0

    def now_ns(self) -> int:
        return self.idle_steps * MS

    async def idle(self) -> None:
        self.idle_steps += 1
        await PAUSE


class Shelf:
    """An external tier in a dict. Implements `ports.Storage`.

    Args:
        delay: turns that a call takes; None never comes back.
        is_reachable: whether `open` works.
    """

    def __init__(self, *, delay: int | None = 0, is_reachable: bool = True) -> None:
        self.pages: dict[tuple[str, str], bytes] = {}
        self.delay = delay
        self.is_reachable = is_reachable
        self.is_open = False

    async def _take_time(self) -> None:
        if self.delay is None:
            await Signal(None, "storage that never answers")
        for _ in range(self.delay or 0):
            await PAUSE

    async def exists(self, hashes: Sequence[str], *, pools: Sequence[str], prefix: Sequence[str]) -> Found:
        await self._take_time()
        count = 0
        while count < len(hashes) and ("kv", hashes[count]) in self.pages:
            count += 1
        return Found(count)

    async def get(self, pool: str, hashes: Sequence[str], *, prefix: Sequence[str]) -> list[bytes | None]:
        await self._take_time()
        return [self.pages.get((pool, name)) for name in hashes]

    async def set(
        self, pool: str, hashes: Sequence[str], pages: Sequence[bytes], *, prefix: Sequence[str]
    ) -> list[bool]:
        await self._take_time()
        self.pages.update({(pool, name): page for name, page in zip(hashes, pages, strict=True)})
        return [True] * len(hashes)

    async def open(self) -> None:
        if not self.is_reachable:
            raise StorageError("nobody there")
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False


@dataclass(slots=True)
class Run:
    """A run that has ended, one way or the other.

    Attributes:
        stuck: why the scheduler waits for ever, or "".
    """

    rank: Rank
    script: Script
    clock: IdleClock
    ledger: Ledger
    rows: list[dict[str, Any]]
    stuck: str
    lanes_left: list[str] = field(default_factory=list)

    def of(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        return [
            row
            for row in self.rows
            if row["kind"] == kind and all(row[name] == value for name, value in fields.items())
        ]

    def column(self, kind: str, *names: str, **fields: Any) -> list[Any]:
        """One field of each such record, or a tuple of several."""
        rows = self.of(kind, **fields)
        return [row[names[0]] if len(names) == 1 else tuple(row[name] for name in names) for row in rows]


def run(
    config: Config,
    arrivals: Mapping[int, Sequence[Arrival]],
    *,
    storage: Shelf | None = None,
    transfer_polls: int = 1,
    seed: int = 1,
) -> Run:
    """Run one rank until its scheduler has ended or is stuck."""
    loop = Loop(Schedule(seed=seed))
    script, clock, ledger = Script(arrivals), IdleClock(), Ledger()
    sinks = {lane: MemorySink() for lane in lane_names(config)}
    probes = {
        lane: Probes(Tracer(sink, {}, lambda: 0, has_steps=lane == SCHEDULER)) for lane, sink in sinks.items()
    }
    alone: Any = Alone()
    if config.storage.backend != "none" and storage is None:
        storage = Shelf()
    has_state = any(not pool.shares_slots for pool in config.pools)
    ports = Ports(
        transports=dict.fromkeys(lane_names(config), alone),
        engine=SlowEngine(ledger, transfer_polls),
        device=SlotMemory(config.device_pages),
        host=SlotMemory(config.host_pages) if config.hierarchical_cache else None,
        source=script,
        clock=clock,
        signal=loop.signal,
        storage=storage,
        side={"mamba": SlotMemory(config.side_pool_slots)} if has_state else {},
    )
    rank = build_rank(config, Parts(0), ports, probes, ledger, digest_key=b"k" * 16)
    for lane, coroutine in rank.lanes.items():
        loop.spawn(lane, coroutine)
    loop.run()
    for task in loop.tasks:
        if task.error is not None:
            raise task.error
    scheduler = loop.tasks[0]
    stuck = "" if scheduler.is_finished or scheduler.waits_for is None else scheduler.waits_for.reason
    left = [task.name for task in loop.parked]
    loop.close()
    rows = [json.loads(line) for line in sinks["scheduler"].lines[1:]]
    return Run(rank, script, clock, ledger, rows, stuck, left)


def request(rid: str, tokens: bytes, output_tokens: int = 1, **fields: Any) -> Request:
    """A request with an answer of its own."""
    first = 1_000 + 100 * sum(rid.encode())
    return Request(rid, tokens, answer(output_tokens, first=first), output_tokens, **fields)
