"""A simulated job from end to end: ranks in one thread, a workload at the front door, logs on disk.

    Config + Workload + Schedule + faults + bugs  ->  one log a lane of a rank, and run.json

Equal arguments give equal bytes in every log: host, pid and wall clock go to a side file.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from hicache.job import (
    RANK_ERRORS,
    Ending,
    Logs,
    Outside,
    Plan,
    Progress,
    RankJob,
    Result,
    Trace,
    TraceLimits,
    Warnings,
    result_of,
    write_summary,
)
from hicache.loop import Loop
from hicache.probes import Probes
from hicache.rank import Parts
from hicache.sim.faults import StorageFaults
from hicache.sim.storage import SimStorage
from hicache.storage.backend import Backend
from hicache.transport.sim import SimNetwork, SimTransport, VirtualClock
from tracer.record import Outcome

__all__ = ["Plan", "Result", "simulate"]

# Resumptions of a lane between two calls of `progress`.
PROGRESS_INTERVAL = 256


def simulate(
    plan: Plan,
    *,
    out: Path | None = None,
    trace: Trace = "full",
    trace_limits: TraceLimits | None = None,
    progress: Progress | None = None,
) -> Result:
    """Run `plan` to its end.

    Args:
        out: folder for logs and `run.json`; None writes no file.
        trace: `full` writes a log for each lane of a rank to `out`, `ring` the newest bytes of
            each rank, `memory` keeps the lines, `off` writes nothing.
        progress: called now and then with requests served and the fraction of the workload sent.

    Raises:
        WorkloadError: the workload turned out to be unreadable; logs up to there are closed properly.
        ConfigError: a substitution could not be wired in; no file has been made.
    """
    parts = [plan.parts(rank) for rank in range(plan.config.topology.world_size)]
    world = _World(plan, out, trace, trace_limits)
    for own in parts:
        world.start(own)
    try:
        world.run(progress)
    except BaseException:
        world.abandon()
        raise
    return world.end()


class _World:
    """The ranks of one simulated run, from start to summary."""

    def __init__(self, plan: Plan, out: Path | None, trace: Trace, trace_limits: TraceLimits | None) -> None:
        self._plan = plan
        self._out = out
        self._warnings = Warnings()
        self._logs = Logs(plan, out, trace, limits=trace_limits, warn=self._warnings)
        self._loop = Loop(plan.schedule)
        self._network = SimNetwork(plan.config.topology, self._loop)
        self._stored: dict[str, bytes] = {}
        self._jobs: list[RankJob] = []
        self._resumptions = 0

    def start(self, parts: Parts) -> None:
        """Open one rank's logs, wire it, and put its lanes in line."""
        config, schedule = self._plan.config, self._plan.schedule
        clock = VirtualClock()

        def transport(probes: Probes) -> SimTransport:
            return SimTransport(self._network, parts.rank, probes, clock, guard=config.meeting_guard)

        def storage(backend: Backend, faults: StorageFaults) -> SimStorage:
            return SimStorage(backend, config.pools, schedule, config.storage.polls_max, faults)

        outside = Outside(
            loop=self._loop,
            clock=clock,
            schedule=schedule,
            signal=self._loop.signal,
            transport=transport,
            storage=storage,
            shared=self._stored,
        )
        self._jobs.append(RankJob(self._plan, parts, self._logs, outside))

    def run(self, progress: Progress | None) -> None:
        self._loop.run(on_switch=partial(self._look, progress) if progress is not None else None)

    def _look(self, progress: Progress) -> None:
        self._resumptions += 1
        if self._resumptions % PROGRESS_INTERVAL == 0:
            doors = [job.door for job in self._jobs if job.door is not None]
            fractions = [door.workload.fraction for door in doors]
            progress(sum(door.served for door in doors), sum(fractions) / len(fractions))

    def end(self) -> Result:
        """Close the logs and say how it went.

        Raises:
            Exception: what a rank raised, unless that is an outcome of the run.
        """
        failure = next((job.failure for job in self._jobs if job.failure is not None), None)
        # Its peers stay where they are when a rank has raised.
        otherwise: Outcome = "stopped" if failure is not None else "hung"
        result = self._result(otherwise)
        self._summarise(result)
        if failure is not None and not isinstance(failure, RANK_ERRORS):
            raise failure
        return result

    def abandon(self) -> None:
        """Interrupted: a lane without a trailer is what a cut log is."""
        self._loop.close()
        self._logs.abandon()
        self._summarise(self._result("stopped"), outcome="interrupted")

    def _result(self, otherwise: Outcome) -> Result:
        endings: dict[int, Ending] = {job.rank: job.end(otherwise) for job in self._jobs}
        return result_of(self._plan, endings, self._logs)

    def _summarise(self, result: Result, *, outcome: str = "") -> None:
        if trouble := write_summary(self._out, self._plan, result, trace=self._logs.trace, outcome=outcome):
            self._warnings(trouble)
