"""A simulated job from end to end: ranks in one thread, a workload at the front door, logs on disk.

    Config + Workload + Schedule + faults + bugs  ->  one log a rank, and run.json

Equal arguments give equal bytes in every log: host, pid and wall clock go to a side file.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hicache.config import Config
from hicache.control.pools import SlotMemory
from hicache.errors import AckError, PoolError
from hicache.ledger import Ledger
from hicache.loop import Loop, Task
from hicache.probes import KINDS, Probes
from hicache.rank import Parts, Ports, build_rank
from hicache.schedule import Schedule
from hicache.sim.bugs import Wire
from hicache.sim.engine import SimEngine
from hicache.sim.faults import FaultPlan
from hicache.transport.sim import SimNetwork, SimTransport, VirtualClock
from hicache.workload import FrontDoor, Workload
from tracer.record import Outcome, header
from tracer.sinks import MemorySink, NullSink, SegmentSink, Sink, write_meta
from tracer.tracer import Tracer

TOOL_VERSION = "0.1.0"
LANE = "scheduler"
# Resumptions of a lane between two calls of `progress`.
PROGRESS_INTERVAL = 256

Progress = Callable[[int, float], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that makes a run what it is.

    Attributes:
        workload_name: what `run.json` and the run id say about the workload.
        workload: replica number -> its requests.
        bug_names, wires: substitutions, by name for `run.json` and as functions.
    """

    config: Config
    workload_name: str
    workload: Callable[[int], Workload]
    schedule: Schedule
    faults: FaultPlan = field(default_factory=FaultPlan)
    fault_texts: Sequence[str] = ()
    bug_names: Sequence[str] = ()
    wires: Sequence[Wire] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended.

    Attributes:
        outcome: `completed`, `hung` (nobody could go on, or nothing happened any more) or `crashed` (a
            rank raised).
        error: what the rank that raised said, or "".
        parked: rank -> what it waits for, where the run did not complete.
        served, refused: requests that got their whole answer, and those that could never fit.
        lines: rank -> log lines, where the run was traced to memory.
    """

    outcome: Outcome
    error: str
    parked: dict[int, str]
    served: int
    refused: int
    steps: int
    run_id: str
    schedule: str
    lines: dict[int, list[bytes]]


class Warnings:
    """One warning on stderr, however many ranks have the same trouble."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, text: str) -> None:
        self.count += 1
        if self.count == 1:
            print(f"hicache: warning: {text}", file=sys.stderr)


def simulate(
    plan: Plan,
    *,
    out: Path | None = None,
    trace: Literal["full", "memory", "off"] = "full",
    progress: Progress | None = None,
) -> Result:
    """Run `plan` to its end.

    Args:
        out: folder for logs and `run.json`; None writes no file.
        trace: `full` writes one log a rank to `out`, `memory` keeps the lines, `off` writes nothing.
        progress: called now and then with requests served and the fraction of the workload sent.

    Raises:
        WorkloadError: the workload turned out to be unreadable; logs up to there are closed properly.
        ConfigError: a substitution could not be wired in; no file has been made.
    """
    parts = [Parts(rank) for rank in range(plan.config.topology.world_size)]
    for own in parts:
        for wire in plan.wires:
            wire(own)
    job = _Job(plan, out, trace)
    for own in parts:
        job.start(own)
    try:
        job.run(progress)
    except BaseException:
        job.abandon()
        raise
    return job.end()


def _lane_outcome(task: Task, *, is_hung: bool) -> Outcome:
    """What one lane's trailer says: only the rank that raised says that it crashed."""
    if task.is_finished:
        return "completed"
    if isinstance(task.error, AckError | AssertionError | PoolError):
        return "crashed"
    return "hung" if is_hung else "stopped"


class _Job:
    """The ranks of one run, their logs and the front doors, from start to summary."""

    def __init__(self, plan: Plan, out: Path | None, trace: str) -> None:
        config = plan.config
        self._plan = plan
        self._out = out
        self._trace = trace
        self._warnings = Warnings()
        self._loop = Loop(plan.schedule)
        self._network = SimNetwork(config.topology, self._loop)
        self._doors = [
            FrontDoor(plan.workload(replica), config.concurrency) for replica in range(config.topology.dp)
        ]
        self._tracers: list[Tracer] = []
        self._sinks: list[Sink] = []
        self._run_id = config.digest(
            plan.workload_name, plan.schedule.given, *plan.fault_texts, "bugs", *plan.bug_names
        )
        # Not from the run id: a run, its replay and its healthy twin must be comparable page by page.
        key_text = "digests " + config.digest(plan.workload_name)
        self._digest_key = hashlib.blake2b(key_text.encode(), digest_size=16).digest()

    def start(self, parts: Parts) -> None:
        """Open one rank's log, wire it, and put its lane in line."""
        plan, rank = self._plan, parts.rank
        config, topology = plan.config, plan.config.topology
        clock = VirtualClock()
        tracer = Tracer(self._open_sink(rank), self._header(rank), clock.now_ns)
        self._tracers.append(tracer)
        probes = Probes(tracer)
        ledger = Ledger()
        host = None
        if config.hierarchical_cache:
            host = plan.faults.memory(rank, "host", SlotMemory(config.host_pages))
        at = topology.coordinates(rank)
        ports = Ports(
            transport=SimTransport(self._network, rank, probes, clock),
            engine=SimEngine(
                ledger,
                plan.schedule,
                probes,
                polls_max=config.transfer_polls_max,
                delay=plan.faults.delay(rank),
            ),
            device=SlotMemory(config.device_pages),
            host=host,
            source=self._doors[at.dp] if (at.pp, at.cp, at.tp) == (0, 0, 0) else None,
        )
        scheduler = build_rank(config, parts, ports, probes, ledger, digest_key=self._digest_key)
        self._loop.spawn(f"rank {rank} {LANE}", scheduler.run())

    def run(self, progress: Progress | None) -> None:
        count = 0

        def look() -> None:
            nonlocal count
            count += 1
            if progress is not None and count % PROGRESS_INTERVAL == 0:
                fractions = [door.workload.fraction for door in self._doors]
                progress(sum(door.served for door in self._doors), sum(fractions) / len(fractions))

        self._loop.run(on_switch=look if progress is not None else None)

    def end(self) -> Result:
        """Close the logs and say how it went.

        Raises:
            Exception: what a rank raised, unless that is an outcome of the run.
        """
        tasks = self._loop.tasks
        failed = next(((rank, task.error) for rank, task in enumerate(tasks) if task.error), None)
        error = failed[1] if failed is not None else None
        outcome: Outcome = "crashed" if error is not None else "hung" if self._loop.parked else "completed"
        parked = {
            rank: task.waits_for.reason
            for rank, task in enumerate(tasks)
            if not task.is_finished and task.waits_for is not None
        }
        self._loop.close()
        for tracer, task in zip(self._tracers, tasks, strict=True):
            tracer.close(_lane_outcome(task, is_hung=outcome == "hung"))
        result = self._result(outcome, f"rank {failed[0]}: {error}" if failed is not None else "", parked)
        self._write_summary(result.outcome, result)
        # Ranks that have come apart end like this. Anything else is the workload's fault or ours.
        if error is not None and not isinstance(error, AckError | AssertionError | PoolError):
            raise error
        return result

    def abandon(self) -> None:
        """Interrupted: a lane without a trailer is what a cut log is."""
        self._loop.close()
        for sink in self._sinks:
            sink.close()
        self._write_summary("interrupted", self._result("hung", "", {}))

    def _result(self, outcome: Outcome, error: str, parked: dict[int, str]) -> Result:
        return Result(
            outcome=outcome,
            error=error,
            parked=parked,
            served=sum(door.served for door in self._doors),
            refused=sum(door.refused for door in self._doors),
            steps=max(tracer.step for tracer in self._tracers) + 1,
            run_id=self._run_id,
            schedule=str(self._plan.schedule),
            lines={rank: sink.lines for rank, sink in enumerate(self._sinks) if isinstance(sink, MemorySink)},
        )

    def _open_sink(self, rank: int) -> Sink:
        sink: Sink
        if self._trace == "memory":
            sink = MemorySink()
        elif self._trace == "off" or self._out is None:
            sink = NullSink()
        else:
            sink = SegmentSink(self._out, rank, LANE, warn=self._warnings)
            write_meta(self._out, rank, warn=self._warnings)
        self._sinks.append(sink)
        return sink

    def _header(self, rank: int) -> dict[str, Any]:
        config = self._plan.config
        return header(
            config.topology.place(rank),
            KINDS,
            lane=LANE,
            run_id=self._run_id,
            tool_version=TOOL_VERSION,
            config=config.describe(),
            config_digest=config.digest(),
        )

    def _write_summary(self, outcome: str, result: Result) -> None:
        if self._out is None:
            return
        plan = self._plan
        summary: dict[str, Any] = {
            "run_id": result.run_id,
            "outcome": outcome,
            "error": result.error,
            "config": plan.config.describe(),
            "workload": plan.workload_name,
            "schedule": result.schedule,
            "bugs": list(plan.bug_names),
            "faults": list(plan.fault_texts),
            "faults_fired": plan.faults.fired,
            "counts": {
                "requests_served": result.served,
                "requests_refused": result.refused,
                "steps": result.steps,
            },
            "parked": {str(rank): reason for rank, reason in result.parked.items()},
        }
        path = self._out / "run.json"
        try:
            path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            self._warnings(f"{path} was not written: {error.strerror}")
