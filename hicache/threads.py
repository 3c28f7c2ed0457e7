"""A job whose ranks are threads of this process: the same ranks, in an order that is the system's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hicache.job import (
    RANK_ERRORS,
    Ending,
    Logs,
    Observe,
    Observer,
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
from hicache.probes import Probes
from hicache.rank import Parts
from hicache.real_time import TIMEOUT_S, real_outside, switching_often
from hicache.transport.drive import DriveLoop, Watch
from hicache.transport.meetings import LaneTransport
from hicache.transport.threads import thread_network, thread_wire
from tracer.tracer import Tracer

# Between two looks at how far the run is.
LOOK_S = 0.2


def run_threads(
    plan: Plan,
    *,
    out: Path | None = None,
    trace: Trace = "full",
    trace_limits: TraceLimits | None = None,
    timeout_s: float = TIMEOUT_S,
    progress: Progress | None = None,
    observe: Observe | None = None,
    say: Callable[[str], None] = print,
) -> Result:
    """Run `plan` to its end, each rank on a thread of its own.

    Args:
        out, trace, trace_limits, progress: as of `sim.world.simulate`.
        timeout_s: a wait for another rank or for storage that is older ends the run as hung.
        observe: makes somebody who looks at a rank while it runs; what that has to say goes to `say`.

    Raises:
        WorkloadError: the workload turned out to be unreadable; logs up to there are closed properly.
        ConfigError: a substitution could not be wired in; no file has been made.
    """
    parts = [plan.parts(rank) for rank in range(plan.config.topology.world_size)]
    job = _ThreadsJob(plan, out, trace, trace_limits, timeout_s)
    job.watch_with(observe, say)
    for own in parts:
        job.add(own)
    try:
        with switching_often():
            job.run(progress)
    except BaseException:
        job.abandon()
        raise
    return job.end()


class _ThreadsJob:
    """The ranks of one run, their loops and their threads."""

    def __init__(
        self,
        plan: Plan,
        out: Path | None,
        trace: Trace,
        trace_limits: TraceLimits | None,
        timeout_s: float,
    ) -> None:
        self._plan = plan
        self._out = out
        self._timeout_s = timeout_s
        self._warnings = Warnings()
        self._logs = Logs(plan, out, trace, limits=trace_limits, is_real=True, warn=self._warnings)
        self._watch = Watch()
        self._network = thread_network(plan.config.topology)
        self._stored: dict[str, bytes] = {}
        self._ranks: list[tuple[RankJob, DriveLoop, threading.Thread]] = []
        # What ended a thread that no lane has raised, an interrupt in the middle of one above all.
        self._broken: list[BaseException] = []
        self._observe: Observe | None = None
        self._say: Callable[[str], None] = print

    def watch_with(self, observe: Observe | None, say: Callable[[str], None]) -> None:
        """Have every rank that is added from here on looked at."""
        self._observe = observe
        self._say = say

    def _observer(self, rank: int) -> Callable[[Mapping[str, Tracer]], Observer] | None:
        observe = self._observe
        if observe is None:
            return None
        return lambda lanes: observe(self._logs.observed(rank, lanes, None, self._say))

    def add(self, parts: Parts) -> None:
        plan, rank = self._plan, parts.rank
        loop = DriveLoop(self._watch, timeout_s=self._timeout_s, tell=self._warnings)
        seat = self._network.seat(rank)
        wire = thread_wire(self._network, rank, loop)

        def transport(probes: Probes) -> LaneTransport:
            return LaneTransport(seat, wire, probes, guard=plan.config.meeting_guard)

        outside = real_outside(plan, rank, loop, self._watch, transport, self._stored)
        job = RankJob(plan, parts, self._logs, outside, self._observer(rank))
        thread = threading.Thread(target=self._work, args=(loop,), name=f"rank {rank}", daemon=True)
        self._ranks.append((job, loop, thread))

    def _work(self, loop: DriveLoop) -> None:
        try:
            loop.run()
        except BaseException as error:
            self._broken.append(error)
            self._stop("another rank's thread has ended")

    def run(self, progress: Progress | None) -> None:
        for _, _, thread in self._ranks:
            thread.start()
        for _, _, thread in self._ranks:
            while thread.is_alive():
                thread.join(LOOK_S)
                if progress is not None:
                    self._look(progress)
        if self._broken:
            raise self._broken[0]

    def _look(self, progress: Progress) -> None:
        doors = [job.door for job, _, _ in self._ranks if job.door is not None]
        fractions = [door.workload.fraction for door in doors]
        progress(sum(door.served for door in doors), sum(fractions) / len(fractions))

    def _stop(self, reason: str) -> None:
        for _, loop, _ in self._ranks:
            loop.stop("stopped", reason)

    def end(self) -> Result:
        """Close the logs and say how it went.

        Raises:
            Exception: what a rank raised, unless that is an outcome of the run.
        """
        result = self._result()
        self._logs.settle()
        self._summarise(result)
        for job, _, _ in self._ranks:
            if job.failure is not None and not isinstance(job.failure, RANK_ERRORS):
                raise job.failure
        return result

    def abandon(self) -> None:
        """Interrupted: a lane without a trailer is what a cut log is."""
        self._stop("interrupted")
        for _, _, thread in self._ranks:
            if thread.ident is not None:
                thread.join()
        self._logs.abandon()
        self._summarise(self._result(), outcome="interrupted")

    def _result(self) -> Result:
        def end(each: tuple[RankJob, DriveLoop, threading.Thread]) -> Ending:
            job, loop, _ = each
            return job.end(loop.end or "stopped", loop.end_reason)

        # All at once: whoever watches a rank waits at its end for the ends of the others.
        with ThreadPoolExecutor(len(self._ranks)) as pool:
            endings = {ending.rank: ending for ending in pool.map(end, self._ranks)}
        return result_of(self._plan, endings, self._logs)

    def _summarise(self, result: Result, *, outcome: str = "") -> None:
        if trouble := write_summary(
            self._out, self._plan, result, trace=self._logs.trace, outcome=outcome, mode="threads"
        ):
            self._warnings(trouble)
