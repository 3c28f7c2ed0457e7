"""What recording costs a whole run: nanoseconds a record, beside the same run with tracing off.

    python -m benchmarks.whole_run [AGENTIC]

A run takes far longer than its records, and repeats to some per cent only. So the run's own calls of the
recorder are kept, in their order and with their values, and made again: by functions that do nothing, and
by those that write. Rounds of both alternate; the best of each counts. Whole runs are timed beside that.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.agentic import config
from benchmarks.volume import EVERYTHING
from hicache.job import Logs, Plan, PlanSpec
from hicache.probes import KINDS
from hicache.rank import SCHEDULER
from hicache.sim import world
from tracer.pack import Packer
from tracer.record import Kind, header
from tracer.segments import SegmentSink
from tracer.sinks import NullSink, Sink
from tracer.tracer import Emit, Tracer, silent

SPEC = "conversations=32,rounds=20,max-context=40000,output=20,shared-prefix=0"
ROUNDS = 5
RECORD_NS_MAX = 1000
MODES = ("off", "full", "ring")

# Number of an emitter, or one of these two; and what it was given.
Call = tuple[int, tuple[Any, ...]]
BEGIN, END = -1, -2


class Kept:
    """One lane's calls of the recorder. Implements `probes.Emitters`.

    Attributes:
        makers: kind, phase and fields of each emitter.
    """

    def __init__(self) -> None:
        self.step = 0
        self.seq = 0
        self.calls: list[Call] = []
        self.makers: list[tuple[Kind, str, Sequence[str] | None]] = []

    def emitter(self, kind: Kind, *, phase: str = "", fields: Sequence[str] | None = None) -> Emit:
        number = len(self.makers)
        self.makers.append((kind, phase, fields))
        keep = self.calls.append

        def emit(*values: Any) -> None:
            keep((number, tuple(list(value) if type(value) is list else value for value in values)))

        return emit

    def begin_step(self, step: int) -> None:
        self.step = step
        self.calls.append((BEGIN, (step,)))

    def end_step(self, *, is_idle: bool) -> None:
        self.calls.append((END, (is_idle,)))

    def close(self, outcome: str) -> None:
        """Nothing to close."""


def calls_of(plan: Plan) -> list[Kept]:
    """The calls of every lane of a run, the scheduler's first."""
    found: list[Kept] = []

    class Keeping(Logs):
        def tracer(self, rank: int, lane: str, clock: Callable[[], int]) -> Any:
            found.append(Kept())
            return found[-1]

    setattr(world, "Logs", Keeping)  # noqa: B010
    try:
        result = world.simulate(plan, trace="off")
    finally:
        setattr(world, "Logs", Logs)  # noqa: B010
    assert result.outcome == "completed", result.error
    return found


def again_ns(plan: Plan, lanes: Sequence[Kept], folder: Path | None, *, is_ring: bool) -> int:
    """Make all calls again, by functions that do nothing where there is no folder; nanoseconds."""
    spent = 0
    packer = Packer() if is_ring else None
    for number, kept in enumerate(lanes):
        sink: Sink = NullSink()
        lane = SCHEDULER if number == 0 else f"lane{number}"
        if folder is not None:
            sink = SegmentSink(folder, 0, lane, limit_bytes=64 << 30 if is_ring else None, packer=packer)
        place = plan.config.topology.place(0)
        head = header(place, KINDS, lane=lane, run_id="bench", tool_version="bench")
        tracer = Tracer(sink, head, time.monotonic_ns, has_steps=number == 0)
        emits = [tracer.emitter(kind, phase=phase, fields=fields) for kind, phase, fields in kept.makers]
        # Negative numbers count from the end.
        emits += [partial(ended, tracer), tracer.begin_step] if number == 0 else [silent, silent]
        todo = [(emits[call], values) for call, values in kept.calls]
        gc.collect()
        start = time.perf_counter_ns()
        for emit, values in todo:
            emit(*values)
        spent += time.perf_counter_ns() - start
        tracer.close("completed")
    if packer is not None:
        packer.drain(60)
    return spent


def ended(tracer: Tracer, is_idle: bool) -> None:
    """`Tracer.end_step`, with what it was given by position."""
    tracer.end_step(is_idle=is_idle)


def main() -> int:
    agentic = sys.argv[1] if len(sys.argv) > 1 else SPEC
    print("| world | trace | run, s | to off | records | a step | ns a record |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for is_limited in (False, True):
        spec = PlanSpec(config(tp=1, is_limited=is_limited), agentic=agentic)
        lanes = calls_of(spec.plan())
        records = sum(number >= 0 for kept in lanes for number, _ in kept.calls)
        steps = sum(number == END for number, _ in lanes[0].calls)
        seconds: dict[str, float] = {}
        spent: dict[str, int] = {}
        for _ in range(ROUNDS):
            for mode in MODES:
                with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
                    plan = spec.plan()
                    gc.collect()
                    start = time.perf_counter()
                    world.simulate(plan, out=Path(folder), trace=mode, trace_limits=EVERYTHING)  # type: ignore[arg-type]
                    took = time.perf_counter() - start
                    seconds[mode] = min(took, seconds.get(mode, took))
                with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
                    place = Path(folder) if mode != "off" else None
                    took_ns = again_ns(plan, lanes, place, is_ring=mode == "ring")
                    spent[mode] = min(took_ns, spent.get(mode, took_ns))
        name = "three tiers" if is_limited else "no limits"
        for mode in MODES:
            cost = (spent[mode] - spent["off"]) / records
            told = f"{cost:,.0f}" + (f" (at most {RECORD_NS_MAX:,})" if mode == "full" else "")
            ratio = seconds[mode] / seconds["off"]
            print(
                f"| {name} | {mode} | {seconds[mode]:.2f} | {ratio:.2f} | {records:,} | "
                f"{records / max(1, steps):.1f} | {told if mode != 'off' else ''} |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
