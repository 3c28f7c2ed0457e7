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
from hicache.loop import Loop
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
        outcome: `completed`, `hung` (nobody could go on) or `crashed` (a rank raised).
        error: what the rank that raised said, or "".
        parked: rank -> what it waits for, where the run did not complete.
        lines: rank -> log lines, where the run was traced to memory.
    """

    outcome: Outcome
    error: str
    parked: dict[int, str]
    completed_requests: int
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
        progress: called now and then with requests completed and the fraction of the workload sent.

    Raises:
        WorkloadError: the workload turned out to be unreadable; logs up to there are closed properly.
    """
    config, topology = plan.config, plan.config.topology
    run_id = config.digest(plan.workload_name, str(plan.schedule), *plan.fault_texts, "bugs", *plan.bug_names)
    # Not from the run id: a run and its healthy twin must be comparable page by page.
    key_text = "digests " + config.digest(plan.workload_name, str(plan.schedule))
    digest_key = hashlib.blake2b(key_text.encode(), digest_size=16).digest()
    loop = Loop(plan.schedule)
    network = SimNetwork(topology, loop)
    doors = [FrontDoor(plan.workload(dp), config.concurrency) for dp in range(topology.dp)]
    warnings = Warnings()
    ranks: list[_Rank] = []
    for rank in range(topology.world_size):
        sink = _sink(rank, out, trace, warnings)
        ranks.append(_start(rank, plan, loop, network, doors, sink, run_id, digest_key))
    if out is not None and trace == "full":
        for rank in range(topology.world_size):
            write_meta(out, rank, warn=warnings)
    try:
        _run(loop, doors, progress)
    except BaseException:
        # Interrupted: a lane without a trailer is what a cut log is.
        for traced in ranks:
            traced.sink.close()
        loop.close()
        raise

    failed = next(((rank, task.error) for rank, task in enumerate(loop.tasks) if task.error), None)
    outcome: Outcome = "crashed" if failed else "hung" if loop.parked else "completed"
    parked = {
        rank: task.waits_for.reason
        for rank, task in enumerate(loop.tasks)
        if not task.is_finished and task.waits_for is not None
    }
    loop.close()
    for traced in ranks:
        traced.tracer.close(outcome)
    error = f"rank {failed[0]}: {failed[1]}" if failed is not None else ""
    result = Result(
        outcome,
        error,
        parked,
        sum(door.completed for door in doors),
        max(traced.tracer.step for traced in ranks) + 1,
        run_id,
        str(plan.schedule),
        {rank: traced.sink.lines for rank, traced in enumerate(ranks) if isinstance(traced.sink, MemorySink)},
    )
    if out is not None:
        _write_summary(out, plan, result, warnings)
    # A crash of the runtime is an outcome; a workload that can't be read, or a fault of ours, is an error.
    if failed is not None and not isinstance(failed[1], AckError | AssertionError | PoolError):
        raise failed[1]
    return result


@dataclass(frozen=True, slots=True)
class _Rank:
    tracer: Tracer
    sink: Sink


def _sink(rank: int, out: Path | None, trace: str, warnings: Warnings) -> Sink:
    if trace == "memory":
        return MemorySink()
    if trace == "off" or out is None:
        return NullSink()
    return SegmentSink(out, rank, LANE, warn=warnings)


def _start(
    rank: int,
    plan: Plan,
    loop: Loop,
    network: SimNetwork,
    doors: list[FrontDoor],
    sink: Sink,
    run_id: str,
    digest_key: bytes,
) -> _Rank:
    """Wire one rank and put its lane in line."""
    config, topology = plan.config, plan.config.topology
    clock = VirtualClock()
    first_line = header(
        topology.place(rank),
        KINDS,
        lane=LANE,
        run_id=run_id,
        tool_version=TOOL_VERSION,
        config=config.describe(),
        config_digest=config.digest(),
    )
    tracer = Tracer(sink, first_line, clock.now_ns)
    probes = Probes(tracer)
    ledger = Ledger()
    parts = Parts(rank)
    for wire in plan.wires:
        wire(parts)
    at = topology.coordinates(rank)
    host = None
    if config.hierarchical_cache:
        host = plan.faults.memory(rank, "host", SlotMemory(config.host_pages))
    ports = Ports(
        transport=SimTransport(network, rank, probes, clock),
        engine=SimEngine(
            ledger,
            plan.schedule,
            probes,
            polls_max=config.transfer_polls_max,
            delay=plan.faults.delay(rank),
        ),
        device=SlotMemory(config.device_pages),
        host=host,
        source=doors[at.dp] if (at.pp, at.cp, at.tp) == (0, 0, 0) else None,
    )
    scheduler = build_rank(config, parts, ports, probes, ledger, digest_key=digest_key)
    loop.spawn(f"rank {rank} {LANE}", scheduler.run())
    return _Rank(tracer, sink)


def _run(loop: Loop, doors: list[FrontDoor], progress: Progress | None) -> None:
    if progress is None:
        loop.run()
        return
    count = 0

    def look() -> bool:
        nonlocal count
        count += 1
        if count % PROGRESS_INTERVAL == 0:
            fraction = sum(door.workload.fraction for door in doors) / len(doors)
            progress(sum(door.completed for door in doors), fraction)
        return False

    loop.run(is_stopped=look)


def _write_summary(out: Path, plan: Plan, result: Result, warnings: Warnings) -> None:
    summary: dict[str, Any] = {
        "run_id": result.run_id,
        "outcome": result.outcome,
        "error": result.error,
        "config": plan.config.describe(),
        "workload": plan.workload_name,
        "schedule": result.schedule,
        "bugs": list(plan.bug_names),
        "faults": list(plan.fault_texts),
        "faults_fired": plan.faults.fired,
        "counts": {"requests_completed": result.completed_requests, "steps": result.steps},
        "parked": {str(rank): reason for rank, reason in result.parked.items()},
    }
    try:
        (out / "run.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        warnings(f"{out / 'run.json'} was not written: {error.strerror}")
