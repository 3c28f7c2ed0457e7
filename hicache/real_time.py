"""What the modes `threads` and `gloo` have in common: a rank outside of the simulator.

Chance still comes from a schedule, but each rank has one of its own, and who is first is for the operating
system to say.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hicache.job import Outside, Plan
from hicache.ports import Transport
from hicache.probes import Probes
from hicache.schedule import Schedule
from hicache.sim.faults import NEVER, Call, StorageFaults
from hicache.sim.storage import FaultyBackend
from hicache.storage.backend import Backend
from hicache.topology import WORLD_SIZE_MAX
from hicache.transport.drive import DriveLoop, RealClock, ThreadedStorage, Watch

# A wait for another rank, or for storage, that is older ends the run as hung.
TIMEOUT_S = 60.0
# A turn of the simulator, when something has to be as late as a fault says.
TURN_S = 0.001


def real_outside(
    plan: Plan,
    rank: int,
    loop: DriveLoop,
    watch: Watch,
    transport: Callable[[Probes], Transport],
    shared: dict[str, bytes],
) -> Outside:
    """What is outside of one rank in real time, but for its way to the others."""
    config = plan.config
    schedule = _schedule(plan, rank)

    def storage(backend: Backend, faults: StorageFaults) -> ThreadedStorage:
        def hold(call: Call) -> float | None:
            polls_max = config.storage.polls_max
            turns = schedule.choose(polls_max + 1, "storage") if polls_max else 0
            extra = faults.turns(call)
            return None if extra == NEVER else (turns + extra) * TURN_S

        return ThreadedStorage(FaultyBackend(backend, faults), config.pools, loop, watch, hold=hold)

    return Outside(
        loop=loop,
        clock=RealClock(loop),
        schedule=schedule,
        signal=loop.signal,
        transport=transport,
        storage=storage,
        shared=shared,
    )


def _schedule(plan: Plan, rank: int) -> Schedule:
    """This rank's own chance: other ranks must neither wait for it nor draw the same."""
    own = Schedule.parse(plan.schedule.given)
    return Schedule(seed=own.seed * WORLD_SIZE_MAX + rank) if own.seed is not None else own


@contextmanager
def switching_often() -> Iterator[None]:
    """Threads that hand each other values must not wait five milliseconds for the interpreter."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
