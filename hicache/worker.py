"""One rank as a process of its own, started by torchrun or by `hicache run --mode gloo`.

    torchrun --nproc-per-node 4 -m hicache.worker --plan plan.json --out DIR
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-endpoint HOST:29500 ... -m hicache.worker ...

Rank, world size and address come from the environment that torchrun sets. Each rank writes its own logs;
rank 0 writes run.json. When another rank dies, this one ends by itself with its logs closed.

Exits 0 when its part of the run was made, however it ended; 2 for what can't be started, 3 for a workload
that can't be read.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hicache.errors import ConfigError, WorkloadError
from hicache.job import (
    RANK_ERRORS,
    Ending,
    Logs,
    Observe,
    Observer,
    Plan,
    PlanSpec,
    RankJob,
    TraceLimits,
    result_of,
    write_summary,
)
from hicache.probes import Probes
from hicache.real_time import TIMEOUT_S, real_outside, switching_often
from hicache.transport.drive import DriveLoop, End, Watch
from hicache.transport.gloo import GlooWorld
from hicache.transport.meetings import LaneTransport, LostPeerError, Seat
from tracer.record import Outcome
from tracer.snapshot.armed import arm
from tracer.tracer import Tracer

USAGE, UNREADABLE = 2, 3
# How long a rank that hangs stays, so that its peers find out by themselves where they hang.
LINGER_S = 2.0
# How long rank 0 waits for the others' endings.
ENDINGS_S = 5.0
PROGRESS_S = 0.2
# What whoever started this process writes on its stdin to end it; a closed stdin ends it as well.
HUNG = "hung"
CHANNELS = ("main", "events")
STORAGE_CHANNELS = ("hits", "progress")


def main(words: Sequence[str] | None = None, *, observe: Observe | None = None) -> int:
    """One rank from its command line to its exit code; `observe` makes somebody who looks at it."""
    options = _options(words)
    reports = Reports(is_on=options.report)
    try:
        return _Worker(options, reports, observe).run()
    except (ConfigError, LostPeerError) as error:
        reports.refuse(str(error), USAGE)
        return USAGE
    except WorkloadError as error:
        reports.refuse(str(error), UNREADABLE)
        return UNREADABLE


class Reports:
    """What a worker tells whoever started it: one JSON object a line on stdout, or words for a person."""

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self._last_progress = time.monotonic()

    def say(self, what: str, value: Any) -> None:
        if self.is_on:
            print(json.dumps({"hicache": what, "value": value}), flush=True)

    def refuse(self, text: str, code: int) -> None:
        self.say("refused", [text, code])
        if not self.is_on:
            print(f"error: {text}", file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        self.say("warning", text)
        if not self.is_on:
            print(f"hicache: warning: {text}", file=sys.stderr, flush=True)

    def observe(self, text: str) -> None:
        """What somebody who looks at this rank has to say, in lines of its own."""
        self.say("observed", text)
        if not self.is_on:
            print(text, file=sys.stderr, flush=True)

    def progress(self, job: RankJob) -> None:
        now = time.monotonic()
        if job.door is not None and now - self._last_progress > PROGRESS_S:
            self._last_progress = now
            self.say("progress", [job.door.served, job.door.workload.fraction])


class _Worker:
    """One rank from the plan to its ending."""

    def __init__(self, options: argparse.Namespace, reports: Reports, observe: Observe | None) -> None:
        self._options = options
        self._observe = observe
        self._reports = reports
        self._out: Path = options.out
        self._plan = _read_plan(options.plan)
        self._watch = Watch()
        self._loop = DriveLoop(self._watch, timeout_s=options.timeout, tell=reports.warn)
        # Has it found the other ranks? Before that there is nothing to close, and nobody can be interrupted.
        self._is_joined = False

    def run(self) -> int:
        plan, options = self._plan, self._options
        has_storage = plan.config.storage.backend != "none"
        self._listen()
        world = GlooWorld(
            plan.config.topology,
            channels=(*CHANNELS, *STORAGE_CHANNELS) if has_storage else CHANNELS,
            timeout_s=options.timeout,
        )
        self._is_joined = True
        if options.trace != "off":
            refuse_own_logs(self._out, world.rank)
        limits = TraceLimits(**json.loads(options.trace_limits))
        logs = Logs(plan, self._out, options.trace, limits=limits, is_real=True, warn=self._reports.warn)
        job = self._job(world, logs)
        armed = arm(self._out, world.rank) if options.trace != "off" else None
        with switching_often():
            self._loop.run(on_switch=lambda: self._reports.progress(job))
        if armed is not None:
            armed.disarm()
        ending = self._end(job, world)
        logs.settle()
        self._reports.say("ending", asdict(ending))
        world.publish(json.dumps(asdict(ending)))
        self._summarise(ending, world)
        if isinstance(job.failure, WorkloadError):
            raise job.failure
        self._leave(ending, world)
        return 0

    def _job(self, world: GlooWorld, logs: Logs) -> RankJob:
        plan, rank = self._plan, world.rank
        seat = Seat(plan.config.topology, rank)
        wire = world.wire(self._loop, self._watch)

        def transport(probes: Probes) -> LaneTransport:
            return LaneTransport(seat, wire, probes, guard=plan.config.meeting_guard)

        outside = real_outside(plan, rank, self._loop, self._watch, transport, {})
        return RankJob(plan, plan.parts(rank), logs, outside, self._observer(world, logs))

    def _observer(self, world: GlooWorld, logs: Logs) -> Callable[[Mapping[str, Tracer]], Observer] | None:
        observe = self._observe
        if observe is None:
            return None
        return lambda lanes: observe(logs.observed(world.rank, lanes, world.store, self._reports.observe))

    def _end(self, job: RankJob, world: GlooWorld) -> Ending:
        """Close the logs. Whoever has lost a rank that hangs hangs as well."""
        otherwise: Outcome = self._loop.end or "stopped"
        failure = job.failure
        if isinstance(failure, LostPeerError):
            others = [json.loads(text)["outcome"] for text in world.endings(wait_s=1.0).values()]
            if "hung" in others and "crashed" not in others:
                otherwise = "hung"
        elif failure is not None and not isinstance(failure, (*RANK_ERRORS, WorkloadError)):
            traceback.print_exception(failure)
        return job.end(otherwise, self._loop.end_reason)

    def _summarise(self, own: Ending, world: GlooWorld) -> None:
        """Rank 0 writes run.json, unless somebody started the processes who sees more."""
        if self._reports.is_on or own.rank != 0:
            return
        endings = {0: own}
        for rank, text in world.endings(wait_s=ENDINGS_S).items():
            endings[rank] = read_ending(json.loads(text))
        for rank in range(self._plan.config.topology.world_size):
            endings.setdefault(rank, Ending(rank, "crashed", "it ended without a word"))
        collect_faults(self._plan, endings)
        result = result_of(self._plan, endings)
        if trouble := write_summary(self._out, self._plan, result, trace=self._options.trace, mode="gloo"):
            self._reports.warn(trouble)
        error = f"  {result.error}" if result.error else ""
        print(f"{result.outcome.upper()}  {result.served:,} requests served in {result.steps:,} steps{error}")

    def _leave(self, ending: Ending, world: GlooWorld) -> None:
        if ending.outcome == "completed":
            world.part()
        elif ending.outcome == "hung":
            time.sleep(LINGER_S)

    def _listen(self) -> None:
        """From here on a signal, or whoever started this process, ends it with its logs closed."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop("stopped", "told to end by a signal"))
        if self._reports.is_on:
            threading.Thread(target=self._read_stdin, name="stdin", daemon=True).start()

    def _read_stdin(self) -> None:
        for line in sys.stdin:
            if line.strip() == HUNG:
                self._stop("hung", "another rank hangs")
        self._stop("stopped", "whoever started this rank is gone")

    def _stop(self, end: End, reason: str) -> None:
        if not self._is_joined:
            # Still looking for the others, who may never come, and deep in the library.
            os._exit(USAGE)
        self._loop.stop(end, reason)


def refuse_own_logs(out: Path, rank: int) -> None:
    """Never over somebody's logs.

    Raises:
        ConfigError: this rank's log is there already.
    """
    if any(out.glob(f"rank{rank:04d}.*.jsonl*")):
        raise ConfigError(f"--out {out} holds logs of rank {rank} already; another folder is needed")


def collect_faults(plan: Plan, endings: dict[int, Ending]) -> None:
    """Faults that struck in other processes, by rank, into the plan that the summary is written from."""
    plan.faults.fired[:] = [text for rank in sorted(endings) for text in endings[rank].fired]


def read_ending(parts: dict[str, Any]) -> Ending:
    """An ending that has travelled as JSON."""
    lists = {name: tuple(parts[name]) for name in ("fired", "commands")}
    return Ending(**{**parts, **lists})


def _read_plan(path: Path) -> Plan:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(f"--plan {path}: {reason}") from None
    return PlanSpec.from_json(text).plan()


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hicache.worker", description="One rank of a run.")
    parser.add_argument("--plan", type=Path, required=True, help="written by hicache run --plan-out")
    parser.add_argument("--out", type=Path, required=True, help="folder for logs")
    parser.add_argument("--trace", choices=("full", "ring", "off"), default="full")
    parser.add_argument("--trace-limits", default="{}", help="fields of job.TraceLimits, as JSON")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds of a wait that hangs")
    parser.add_argument("--report", action="store_true", help="for hicache run: JSON lines on stdout")
    return parser.parse_args(words)


def run_process(observe: Observe | None = None) -> None:
    """The whole process: `main` and its exit code. Does not return."""
    code = 1
    try:
        code = main(observe=observe)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        # Threads may still stand in a call of gloo that never returns; nothing of ours is left to be done.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    run_process()
