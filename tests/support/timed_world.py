"""The simulator with tiers that have speeds: copies, storage and forwards take virtual time.

The simulator itself counts polls and turns; here every copy of a queue goes over one link, every call of the
store takes its time, and a rank's clock goes on in slices, so that lanes see each other's work end in the
middle of a forward. What a what-if says of a trace can so be held against the run that really has that speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hicache.core import Transfer
from hicache.job import PlanSpec
from hicache.loop import PAUSE
from hicache.ports import Axis, Found
from hicache.sim.engine import SimEngine
from hicache.sim.storage import SimStorage
from hicache.sim.world import simulate
from hicache.transport.sim import SimTransport, VirtualClock

SLICE_NS = 400_000
MS = 1_000_000
# Turns in which a rank's clock stands.
STILL_MAX = 20


@dataclass(frozen=True, slots=True)
class Costs:
    """What things take at speed 1, in nanoseconds: a call, and each page or token of it."""

    d2h: tuple[int, int] = (1 * MS, MS // 10)
    h2d: tuple[int, int] = (1 * MS, MS // 10)
    storage_read: tuple[int, int] = (4 * MS, MS)
    storage_write: tuple[int, int] = (2 * MS, MS // 2)
    forward: tuple[int, int] = (2 * MS, MS // 100)
    speeds: Mapping[str, float] = field(default_factory=dict)

    def of(self, tier: str, count: int) -> int:
        call, each = getattr(self, tier)
        return round((call + each * count) / self.speeds.get(tier, 1.0))


class _Clock(VirtualClock):
    """The last one that was made is that of the rank whose parts are being made."""

    __slots__ = ()
    last: VirtualClock

    def __init__(self) -> None:
        super().__init__()
        _Clock.last = self

    async def idle(self) -> None:
        await _pass(self, MS)


async def _pass(clock: VirtualClock, took_ns: int) -> None:
    end = clock.time_ns + took_ns
    while clock.time_ns < end:
        clock.time_ns = min(end, clock.time_ns + SLICE_NS)
        await PAUSE


@contextmanager
def timed(costs: Costs) -> Iterator[None]:
    """Runs of the simulator that are made in here take these times."""

    class Engine(SimEngine):
        def __init__(self, *words: Any, **more: Any) -> None:
            super().__init__(*words, **more)
            self._clock = _Clock.last
            self._free_at = {"write": 0, "load": 0}
            self._ends: dict[int, int] = {}

        def submit(self, transfer: Transfer) -> None:
            super().submit(transfer)
            queue = transfer.queue
            tier = "d2h" if queue == "write" else "h2d"
            begin = max(self._clock.time_ns, self._free_at[queue])
            self._free_at[queue] = self._ends[transfer.op] = begin + costs.of(tier, len(transfer.source))

        def ready(self, transfer: Transfer) -> bool:
            return self._clock.time_ns >= self._ends[transfer.op] and super().ready(transfer)

        async def wait(self, transfer: Transfer) -> None:
            await _pass(self._clock, self._ends[transfer.op] - self._clock.time_ns)
            while not super().ready(transfer):
                await PAUSE

    class Storage(SimStorage):
        def __init__(self, *words: Any, **more: Any) -> None:
            super().__init__(*words, **more)
            self._clock = _Clock.last

        async def exists(self, hashes: Sequence[str], **more: Any) -> Found:
            await self._wait("storage_read", 0)
            return await super().exists(hashes, **more)

        async def get(self, pool: str, hashes: Sequence[str], **more: Any) -> list[bytes | None]:
            await self._wait("storage_read", len(hashes))
            return await super().get(pool, hashes, **more)

        async def set(self, pool: str, hashes: Sequence[str], *words: Any, **more: Any) -> list[bool]:
            await self._wait("storage_write", len(hashes))
            return await super().set(pool, hashes, *words, **more)

        async def _wait(self, tier: str, pages: int) -> None:
            clock = self._clock
            end = clock.time_ns + costs.of(tier, pages)
            seen, still = clock.time_ns, 0
            while clock.time_ns < end:
                await PAUSE
                still = still + 1 if clock.time_ns == seen else 0
                if still == STILL_MAX:
                    # The scheduler waits for a rank that waits for this lane: nobody else makes time pass.
                    clock.time_ns += SLICE_NS
                    still = 0
                seen = clock.time_ns

    async def rendezvous(self: SimTransport, axis: Axis, *, numel: int, purpose: str, channel: str) -> None:
        if axis == "tp":
            await _pass(self._clock, costs.of("forward", numel))
        await super(SimTransport, self).rendezvous(axis, numel=numel, purpose=purpose, channel=channel)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hicache.job.SimEngine", Engine)
        patch.setattr("hicache.sim.world.SimStorage", Storage)
        patch.setattr("hicache.sim.world.VirtualClock", _Clock)
        patch.setattr(SimTransport, "rendezvous", rendezvous)
        yield


def timed_run(spec: PlanSpec, out: Path, costs: Costs) -> Path:
    """The run of a plan at these speeds, recorded in `out`."""
    with timed(costs):
        assert simulate(spec.plan(), out=out).outcome == "completed"
    return out
