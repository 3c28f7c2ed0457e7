"""What a run is in every mode: its plan, one rank's logs and lanes, how they ended, the summary.

    PlanSpec --plan()--> Plan --+--> sim      all ranks on one loop           hicache/sim/world.py
    (plain, one file)           +--> threads  a rank a thread                 hicache/threads.py
                                +--> gloo     a rank a process                hicache/worker.py, launch.py

A mode supplies what is outside of a rank (`Outside`); everything else is here, so that a rank is the same
code wherever it runs.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from hicache.agentic import Agentic, AgenticSpec
from hicache.config import Config, StorageConfig
from hicache.control.pools import SlotMemory
from hicache.core import Command
from hicache.errors import (
    AckError,
    ConfigError,
    ForkError,
    HiCacheError,
    MeetingError,
    PoolError,
    PromiseError,
    WorkloadError,
)
from hicache.ledger import Ledger
from hicache.loop import Loop, Signal, Task
from hicache.plain_values import demand_annotated
from hicache.ports import Clock, Source, Storage, Transport
from hicache.probes import KINDS, Probes
from hicache.rank import SCHEDULER, Parts, Ports, build_rank, lane_names
from hicache.schedule import Schedule
from hicache.sim.bugs import Wire, find_bugs, load_plugin
from hicache.sim.engine import SimEngine
from hicache.sim.faults import Fault, FaultPlan, StorageFaults
from hicache.storage.backend import Backend
from hicache.storage.limits import Limits
from hicache.storage.make import make_backend
from hicache.topology import Topology
from hicache.transport.meetings import LOST, LostPeerError
from hicache.workload import FrontDoor, TraceFile, Workload, parse_commands
from tracer.heart import Heart
from tracer.pack import PackAtOnce, Packer
from tracer.record import HEART_LANE, Outcome, header
from tracer.segments import SegmentSink
from tracer.sinks import SUMMARY_NAME, MemorySink, NullSink, Sink, write_meta
from tracer.throttle import Throttle
from tracer.tracer import Tracer

TOOL_VERSION = "0.1.0"
# Ranks that have come apart end like this; anything else is the workload's fault or ours.
RANK_ERRORS = (AckError, AssertionError, ForkError, MeetingError, PoolError, PromiseError)
# How a lane's wait begins that is for other ranks; any other wait is for work, or for a copy.
MEETINGS = ("all_reduce ", "broadcast ", "recv ", "taken ", "storage ")
# How long an end waits for sealed files to be compressed.
PACKING_S = 20.0

Trace = Literal["full", "ring", "memory", "off"]
Mode = Literal["sim", "threads", "gloo"]
Progress = Callable[[int, float], None]


@dataclass(frozen=True, slots=True)
class Observed:
    """One rank as somebody beside it may look at it while it runs.

    Attributes:
        members: ranks of its replica, which it must agree with.
        lanes: name -> the lane's tracer, never to be written to.
        header: of its scheduler's log.
        folder: where its logs are; None when they are nowhere.
        store: where ranks may leave each other words: `set` and `get`; None: every rank is of this process.
        say: text for whoever started the run.
    """

    rank: int
    members: tuple[int, ...]
    lanes: Mapping[str, Tracer]
    header: Mapping[str, Any]
    folder: Path | None
    store: Any
    say: Callable[[str], None]


class Observer(Protocol):
    """Somebody who looks at a rank while it runs. What goes wrong with it is never the rank's trouble."""

    def stop(self, outcome: Outcome) -> None:
        """The rank has ended so; its logs are closed."""
        ...


# Made once a rank's lanes are open and before the first of them runs.
Observe = Callable[[Observed], Observer]


@dataclass(frozen=True, slots=True)
class TraceLimits:
    """What recording may take.

    Attributes:
        ring_bytes: a rank, of disk, under `ring`.
        ring_age_s: under `ring`, sealed files older than this go too; None: only size counts.
        share: of the loop's time, in real time; beyond, some steps are left out. None: as much as it needs.
    """

    ring_bytes: int = 64 << 20
    ring_age_s: float | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """Everything that makes a run what it is, in plain values, so that it can go to another process.

    Attributes:
        workload: path of a trace file, or "".
        agentic: seeded conversations, as `AgenticSpec.parse` reads them; used when `workload` is "".
        limit: only the first so many requests.
        schedule: as `Schedule.parse` reads it; "" is the configuration's seed.
        faults, bugs, plugins: texts, names and paths.
        commands: an operator's, as `parse_commands` reads them.
        storage_limits: fields of `storage.limits.Limits`.
    """

    config: Config
    workload: str = ""
    agentic: str = ""
    limit: int | None = None
    schedule: str = ""
    faults: tuple[str, ...] = ()
    bugs: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    commands: str = ""
    storage_limits: Mapping[str, Any] = field(default_factory=dict)

    def plan(self) -> Plan:
        """The run itself. A trace file is opened when a replica's workload is asked for.

        Raises:
            ConfigError: one of the texts can't be read, or a plugin can't be run.
        """
        config = self.config
        name, workload = self._requests()
        return Plan(
            config=config,
            workload_name=name,
            workload=workload,
            schedule=Schedule.parse(self.schedule) if self.schedule else Schedule(seed=config.seed),
            faults=FaultPlan([Fault.parse(text, config.topology) for text in self.faults]),
            fault_texts=self.faults,
            bug_names=(*self.bugs, *(f"plugin {path}" for path in self.plugins)),
            wires=(*find_bugs(self.bugs), *(load_plugin(Path(path)) for path in self.plugins)),
            commands=tuple(parse_commands(self.commands)),
            storage_limits=Limits(**self.storage_limits) if self.storage_limits else None,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> PlanSpec:
        """Read what `to_json` wrote.

        Raises:
            ConfigError: it is something else.
        """
        try:
            parts = json.loads(text)
            config = parts.pop("config")
            config["topology"] = Topology(**config["topology"])
            config["storage"] = StorageConfig(**config["storage"])
            config["side_pools"] = tuple(config["side_pools"])
            for name in ("faults", "bugs", "plugins"):
                if not isinstance(parts[name], list):
                    raise TypeError(f"{name} is no list")
                parts[name] = tuple(parts[name])
            spec = cls(config=Config(**config), **parts)
            demand_annotated(spec)
            if spec.limit is not None and spec.limit < 1:
                raise ValueError(f"limit is {spec.limit}, expected 1 or more requests")
            if spec.storage_limits:
                demand_annotated(Limits(**spec.storage_limits), "storage_limits.")
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ConfigError(f"not a plan of this version: {type(error).__name__}: {error}") from None
        return spec

    def _requests(self) -> tuple[str, Callable[[int], Workload]]:
        """The workload's name, and replica -> its requests."""
        config, limit = self.config, self.limit
        replicas = config.topology.dp
        limited = f" limit={limit}" if limit else ""
        if self.workload:
            path = Path(self.workload)
            # Opened once: it may be a pipe.
            files: dict[int, Workload] = {}

            def lines(replica: int) -> Workload:
                if replica not in files:
                    files[replica] = TraceFile(
                        path, config.page_size_tokens, limit=limit, replica=replica, replicas=replicas
                    )
                return files[replica]

            return f"file {path}{limited}", lines
        has_own_seed = any(part.startswith("seed=") for part in self.agentic.split(","))
        spec = AgenticSpec.parse(self.agentic if has_own_seed else f"{self.agentic},seed={config.seed}")
        return f"agentic {spec.text()}{limited}", lambda replica: Agentic(spec, replica, replicas, limit)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that makes a run what it is, ready to be run.

    Attributes:
        workload_name: what `run.json` and the run id say about the workload.
        workload: replica number -> its requests.
        bug_names, wires: substitutions, by name for `run.json` and as functions.
        commands: an operator's, and the poll of the front door at which each is given.
    """

    config: Config
    workload_name: str
    workload: Callable[[int], Workload]
    schedule: Schedule
    faults: FaultPlan = field(default_factory=FaultPlan)
    fault_texts: Sequence[str] = ()
    bug_names: Sequence[str] = ()
    wires: Sequence[Wire] = ()
    commands: Sequence[tuple[int, Command]] = ()
    storage_limits: Limits | None = None

    @property
    def run_id(self) -> str:
        return self.config.digest(
            self.workload_name,
            self.schedule.given,
            *self.fault_texts,
            "bugs",
            *self.bug_names,
            *(f"{command.verb}@{poll}" for poll, command in self.commands),
        )

    @property
    def digest_key(self) -> bytes:
        """Not from the run id: a run, its replay and its healthy twin must be comparable page by page."""
        text = "digests " + self.config.digest(self.workload_name)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def parts(self, rank: int) -> Parts:
        """What this rank is wired from, substitutions made."""
        parts = Parts(rank)
        for wire in self.wires:
            wire(parts)
        return parts

    def front_door(self, rank: int) -> FrontDoor | None:
        """The replica's front door, on its first rank."""
        at = self.config.topology.coordinates(rank)
        if (at.pp, at.cp, at.tp) != (0, 0, 0):
            return None
        return FrontDoor(self.workload(at.dp), self.config.concurrency, self.commands)


@dataclass(frozen=True, slots=True)
class Ending:
    """How one rank's part of a run ended; plain, as it travels between processes.

    Attributes:
        outcome: `completed`; `hung`; `crashed` (it raised, or its process died); `stopped` (it was well, and
            the run ended elsewhere).
        error: what was raised, or why it hung.
        parked: what it waited for.
        served, refused, aborted: requests, where this rank has the front door.
        fired: faults that struck on this rank.
        commands: what became of the commands that were given, where this rank has the front door.
    """

    rank: int
    outcome: Outcome
    error: str = ""
    parked: str = ""
    steps: int = 0
    served: int = 0
    refused: int = 0
    aborted: int = 0
    fired: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended.

    Attributes:
        outcome: `completed`, `hung` (nobody could go on, or nothing happened any more), `crashed` (a
            rank raised or died), or `stopped` (somebody ended it).
        error: what the rank that raised said, or "".
        parked: rank -> what it waits for, where the run did not complete.
        served, refused, aborted: requests that got their whole answer; those that could never fit; those
            whose client went away.
        lines: rank -> log lines of its scheduler, where the run was traced to memory.
        lane_lines: (rank, lane) -> log lines, all lanes.
        endings: rank -> how its part ended.
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
    aborted: int = 0
    lane_lines: dict[tuple[int, str], list[bytes]] = field(default_factory=dict)
    endings: dict[int, Ending] = field(default_factory=dict)


class Warnings:
    """One warning on stderr, however many ranks have the same trouble."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, text: str) -> None:
        self.count += 1
        if self.count == 1:
            print(f"hicache: warning: {text}", file=sys.stderr)


class Logs:
    """The logs of a run, as far as this process writes them.

    Args:
        out: folder; None writes no file.
        trace: `full`, `ring` (the newest of each lane), `memory`, or `off`.
        is_real: the run is in real time: lanes have a heart, and files are compressed in a thread of its own.
    """

    def __init__(
        self,
        plan: Plan,
        out: Path | None,
        trace: Trace,
        *,
        limits: TraceLimits | None = None,
        is_real: bool = False,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._plan = plan
        self._out = out
        self.trace = trace
        self._limits = limits or TraceLimits()
        self._is_real = is_real
        self._packer = (Packer() if is_real else PackAtOnce()) if trace == "ring" else None
        self._hearts: list[Heart] = []
        self._warn = warn or Warnings()
        self._kept: dict[tuple[int, str], MemorySink] = {}
        self._sinks: list[Sink] = []

    def tracer(self, rank: int, lane: str, clock: Callable[[], int]) -> Tracer:
        return self._tracer(self._sink(rank, lane), rank, lane, clock)

    def observed(
        self, rank: int, tracers: Mapping[str, Tracer], store: Any, say: Callable[[str], None]
    ) -> Observed:
        """What somebody beside the rank may see of it."""
        topology = self._plan.config.topology
        replica = topology.coordinates(rank).dp
        members = [one for one in range(topology.world_size) if topology.coordinates(one).dp == replica]
        top = self._header(rank, SCHEDULER)
        return Observed(rank, tuple(members), tracers, top, self._out, store, say)

    def heart(self, rank: int, tracers: Mapping[str, Tracer], clock: Callable[[], int]) -> Heart | None:
        """What beats beside these lanes, started; None where nothing is written, or time is not real."""
        if not self._is_real or self._out is None or self.trace not in ("full", "ring"):
            return None
        sink = self._sink(rank, HEART_LANE)
        tracer = self._tracer(sink, rank, HEART_LANE, clock)
        heart = Heart(tracer, sink, tracers, self._out, rank, clock=clock, main=SCHEDULER)
        self._hearts.append(heart)
        heart.start()
        return heart

    def _header(self, rank: int, lane: str) -> dict[str, Any]:
        config = self._plan.config
        return header(
            config.topology.place(rank),
            KINDS,
            lane=lane,
            run_id=self._plan.run_id,
            tool_version=TOOL_VERSION,
            config=config.describe(),
            config_digest=config.digest(),
        )

    def _tracer(self, sink: Sink, rank: int, lane: str, clock: Callable[[], int]) -> Tracer:
        top = self._header(rank, lane)
        self._sinks.append(sink)
        share = self._limits.share if self._is_real and lane == SCHEDULER else None
        throttle = Throttle(share) if share is not None else None
        return Tracer(sink, top, clock, has_steps=lane == SCHEDULER, throttle=throttle)

    def settle(self) -> None:
        """Wait, but not for ever, until what was sealed is compressed."""
        if isinstance(self._packer, Packer):
            self._packer.drain(PACKING_S)

    def abandon(self) -> None:
        """Let go of all files without a last line: a lane without a trailer is what a cut log is."""
        for heart in self._hearts:
            heart.abandon()
        for sink in self._sinks:
            sink.close()

    @property
    def lines(self) -> dict[tuple[int, str], list[bytes]]:
        return {place: sink.lines for place, sink in self._kept.items()}

    def _sink(self, rank: int, lane: str) -> Sink:
        if self.trace == "memory":
            return self._kept.setdefault((rank, lane), MemorySink())
        if self.trace == "off" or self._out is None:
            return NullSink()
        if lane == SCHEDULER:
            write_meta(self._out, rank, warn=self._warn)
        if self.trace == "full":
            return SegmentSink(self._out, rank, lane, warn=self._warn)
        return SegmentSink(
            self._out,
            rank,
            lane,
            warn=self._warn,
            limit_bytes=self._share(lane),
            age_s=self._limits.ring_age_s,
            packer=self._packer,
        )

    def _share(self, lane: str) -> int:
        """A lane's part of what a rank may keep: the scheduler, which says most, gets half."""
        limit_bytes = self._limits.ring_bytes
        others = len(lane_names(self._plan.config)) - 1 + self._is_real
        if not others:
            return limit_bytes
        return limit_bytes // 2 if lane == SCHEDULER else limit_bytes // 2 // others


@dataclass(frozen=True, slots=True)
class Outside:
    """What a mode supplies to one rank.

    Attributes:
        schedule: of how long copies and storage calls take.
        signal: makes what a lane parks on.
        transport: a lane's probes -> its way to the others.
        storage: backend, what its calls suffer -> the external tier.
        shared: where the memory backends of all ranks of this process keep their pages.
    """

    loop: Loop
    clock: Clock
    schedule: Schedule
    signal: Callable[[str], Signal]
    transport: Callable[[Probes], Transport]
    storage: Callable[[Backend, StorageFaults], Storage]
    shared: dict[str, bytes]


class RankJob:
    """One rank of a run: its logs are open, its lanes are in line on the mode's loop.

    Attributes:
        tasks: lane -> its task.
        door: the replica's front door, on its first rank.

    Args:
        observe: who looks at the rank while it runs, given its lanes; None: nobody.
    """

    def __init__(
        self,
        plan: Plan,
        parts: Parts,
        logs: Logs,
        outside: Outside,
        observe: Callable[[Mapping[str, Tracer]], Observer] | None = None,
    ) -> None:
        config, rank = plan.config, parts.rank
        self.rank = rank
        self.door = plan.front_door(rank)
        self._faults = plan.faults
        lanes = lane_names(config)
        self.tracers = {lane: logs.tracer(rank, lane, outside.clock.now_ns) for lane in lanes}
        self._heart = logs.heart(rank, self.tracers, outside.clock.now_ns)
        self._observer = observe(self.tracers) if observe is not None else None
        probes = {lane: Probes(tracer) for lane, tracer in self.tracers.items()}
        ledger = Ledger()
        ports = _ports(plan, rank, self.door, outside, probes, ledger)
        built = build_rank(config, parts, ports, probes, ledger, digest_key=plan.digest_key)
        self.tasks: dict[str, Task] = {
            lane: outside.loop.spawn(f"rank {rank} {lane}", coroutine)
            for lane, coroutine in built.lanes.items()
        }

    @property
    def failure(self) -> BaseException | None:
        """What one of the lanes has raised."""
        return next((task.error for task in self.tasks.values() if task.error is not None), None)

    @property
    def steps(self) -> int:
        return self.tracers[SCHEDULER].step + 1

    @property
    def parked(self) -> str:
        """What the rank waits for: its scheduler, and whoever of the others waits for somebody outside."""
        waits = []
        for lane, task in self.tasks.items():
            reason = task.waits_for.reason if task.waits_for is not None and not task.is_finished else ""
            if lane == SCHEDULER:
                waits.append(reason)
            elif reason.startswith(MEETINGS):
                waits.append(f"{lane}: {reason}")
        return "; ".join(filter(None, waits))

    def end(self, otherwise: Outcome, reason: str = "") -> Ending:
        """Close the logs and say how it went.

        Args:
            otherwise: how it ended, and `reason` why, where no lane raised and some have not finished.
        """
        for task in self.tasks.values():
            task.coroutine.close()
        for lane, tracer in self.tracers.items():
            tracer.close(_lane_outcome(self.tasks[lane], otherwise))
        lane, error = next(
            ((lane, task.error) for lane, task in self.tasks.items() if task.error is not None), ("", None)
        )
        outcome: Outcome = otherwise
        if error is not None:
            outcome = otherwise if isinstance(error, LostPeerError) else "crashed"
            where = "" if lane == SCHEDULER else f"{lane}: "
            reason = f"{where}{describe(error)}"
        elif all(task.is_finished for task in self.tasks.values()):
            outcome, reason = "completed", ""
        if self._heart is not None:
            self._heart.stop(outcome)
        if self._observer is not None:
            self._observer.stop(outcome)
        door = self.door
        return Ending(
            rank=self.rank,
            outcome=outcome,
            error=reason,
            parked="" if outcome == "completed" else self.parked,
            steps=self.steps,
            served=door.served if door is not None else 0,
            refused=door.refused if door is not None else 0,
            aborted=door.aborted if door is not None else 0,
            fired=tuple(self._faults.fired),
            commands=tuple(door.carried) if door is not None else (),
        )


def _ports(
    plan: Plan,
    rank: int,
    source: Source | None,
    outside: Outside,
    probes: Mapping[str, Probes],
    ledger: Ledger,
) -> Ports:
    config, faults = plan.config, plan.faults
    host = None
    if config.hierarchical_cache:
        host = faults.memory(rank, "host", SlotMemory(config.host_pages))
    storage = None
    if config.storage.backend != "none":
        backend = make_backend(config, rank, shared=outside.shared, limits=plan.storage_limits)
        storage = outside.storage(backend, faults.storage(rank))
    return Ports(
        transports={lane: outside.transport(own) for lane, own in probes.items()},
        engine=SimEngine(
            ledger,
            outside.schedule,
            probes[SCHEDULER],
            polls_max=config.transfer_polls_max,
            delay=faults.delay(rank),
        ),
        device=faults.memory(rank, "device", SlotMemory(config.device_pages)),
        host=host,
        side={
            pool.name: faults.memory(rank, pool.name, SlotMemory(config.side_pool_slots))
            for pool in config.pools
            if not pool.shares_slots
        },
        storage=storage,
        clock=outside.clock,
        source=source,
        signal=outside.signal,
    )


def _lane_outcome(task: Task, otherwise: Outcome) -> Outcome:
    """What one lane's trailer says: only the lane that raised says that it crashed."""
    if task.is_finished:
        return "completed"
    if task.error is not None and not isinstance(task.error, (LostPeerError, WorkloadError)):
        return "crashed"
    return otherwise


def describe(error: BaseException) -> str:
    """An error as one line; by its type, where that is not one of ours."""
    text = " ".join(str(error).split())
    is_own = isinstance(error, (HiCacheError, *RANK_ERRORS)) and text
    return text if is_own else f"{type(error).__name__}{': ' if text else ''}{text}"


def result_of(plan: Plan, endings: Mapping[int, Ending], logs: Logs | None = None) -> Result:
    """All ranks' endings together. The worst counts; the lowest rank that crashed is quoted."""
    ordered = [endings[rank] for rank in sorted(endings)]
    outcomes = {ending.outcome for ending in ordered}
    worst: tuple[Outcome, ...] = ("crashed", "hung", "stopped", "completed")
    outcome = next(outcome for outcome in worst if outcome in outcomes)
    # Those that only suffer from another rank's end come last.
    telling = [ending for ending in ordered if ending.outcome == outcome and ending.error]
    told = min(telling, key=lambda ending: ending.error.startswith(LOST), default=None)
    lines = logs.lines if logs is not None else {}
    return Result(
        outcome=outcome,
        error=f"rank {told.rank}: {told.error}" if told is not None else "",
        parked={ending.rank: ending.parked for ending in ordered if ending.parked},
        served=sum(ending.served for ending in ordered),
        refused=sum(ending.refused for ending in ordered),
        aborted=sum(ending.aborted for ending in ordered),
        steps=max((ending.steps for ending in ordered), default=0),
        run_id=plan.run_id,
        schedule=str(plan.schedule),
        lines={rank: own for (rank, lane), own in lines.items() if lane == SCHEDULER},
        lane_lines=lines,
        endings=dict(endings),
    )


def write_summary(
    out: Path | None, plan: Plan, result: Result, *, trace: str, outcome: str = "", mode: Mode = "sim"
) -> str:
    """Write run.json; returns what went wrong with that, or "".

    Args:
        trace: how it was traced.
        outcome: instead of the result's, for a run that was interrupted.
    """
    if out is None:
        return ""
    summary: dict[str, Any] = {
        "run_id": result.run_id,
        "mode": mode,
        "trace": trace,
        "outcome": outcome or result.outcome,
        "error": result.error,
        "config": plan.config.describe(),
        "workload": plan.workload_name,
        "schedule": result.schedule,
        "bugs": list(plan.bug_names),
        "faults": list(plan.fault_texts),
        "faults_fired": list(plan.faults.fired),
        "commands": [f"{command.verb}@{poll}" for poll, command in plan.commands],
        "commands_carried_out": [text for ending in result.endings.values() for text in ending.commands],
        "counts": {
            "requests_served": result.served,
            "requests_refused": result.refused,
            "requests_aborted": result.aborted,
            "steps": result.steps,
        },
        "parked": {str(rank): reason for rank, reason in sorted(result.parked.items())},
        "ranks": {str(rank): ending.outcome for rank, ending in sorted(result.endings.items())},
    }
    path = out / SUMMARY_NAME
    try:
        path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        return f"{path} was not written: {error.strerror}"
    return ""
