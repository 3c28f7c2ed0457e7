"""How much a trace takes on disk: a busy run, and a rank to which nothing happens.

    python -m benchmarks.volume

The busy run is the agentic one on tp=4 in ring mode, with a ring that keeps everything, so that all of it is
compressed and nothing is dropped. A rank-hour is 360,000 of its steps, at 100 a second. The idle ranks do six
minutes of steps in the simulator, without a request; ten times that is taken for an hour, headers and all.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.agentic import SPEC, config
from hicache.core import Abort, Request
from hicache.job import Plan, PlanSpec, TraceLimits
from hicache.sim.world import simulate

STEPS_AN_HOUR = 360_000
IDLE_STEPS = 36_000
EVERYTHING = TraceLimits(ring_bytes=64 << 30)
IDLE_BYTES_MAX = 1_000_000


@dataclass
class Quiet:
    """Nothing for so many polls. Implements `workload.Workload`."""

    polls: int
    fraction: float = 1.0

    def poll(self) -> Sequence[Abort]:
        self.polls -= 1
        return ()

    def next(self) -> Request | None:
        return None

    def finished(self, rid: str) -> None:
        """Nobody comes."""

    def aborted(self, rid: str) -> None:
        """Nobody comes."""

    @property
    def is_exhausted(self) -> bool:
        return self.polls <= 0


def bytes_of(folder: Path, rank: int) -> int:
    return sum(path.stat().st_size for path in folder.glob(f"rank{rank:04d}.*"))


def run(plan: Plan, trace: str, ranks: int) -> tuple[float, int, int, int]:
    """Seconds, bytes of the largest rank, steps and requests."""
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
        start = time.perf_counter()
        result = simulate(plan, out=Path(folder), trace=trace, trace_limits=EVERYTHING)  # type: ignore[arg-type]
        seconds = time.perf_counter() - start
        assert result.outcome == "completed", result.error or result.parked
        size = max(bytes_of(Path(folder), rank) for rank in range(ranks))
        return seconds, size, result.steps, result.served


def main() -> int:
    agentic = sys.argv[1] if len(sys.argv) > 1 else SPEC
    plan = PlanSpec(config(tp=4, is_limited=True), agentic=agentic).plan()
    print("| run | bytes a rank | a request | a rank-hour | seconds |")
    print("|---|---:|---:|---:|---:|")
    for trace in ("full", "ring"):
        seconds, size, steps, served = run(plan, trace, 4)
        name = "agentic, tp=4, ring, compressed" if trace == "ring" else "the same, as it is written"
        hour = size * STEPS_AN_HOUR / steps
        print(f"| {name} | {size:,} | {size / served:,.0f} | {hour:,.0f} | {seconds:.1f} |")
    idle_plan = PlanSpec(config(tp=2, is_limited=True), agentic=agentic).plan()
    idle = replace(idle_plan, workload=lambda replica: Quiet(IDLE_STEPS))
    for trace in ("full", "ring"):
        seconds, size, steps, _served = run(idle, trace, 2)
        name = f"an idle rank of tp=2, {trace}"
        print(
            f"| {name} | {size:,} | | {size * STEPS_AN_HOUR / steps:,.0f} (at most {IDLE_BYTES_MAX:,}) "
            f"| {seconds:.1f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
