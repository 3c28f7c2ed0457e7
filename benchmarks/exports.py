"""What an export of a run costs: CPU time and bytes an event, and memory beside the size of the logs.

The budget is 10 µs an event of the timeline. Reading alone is the floor: every export decodes every record.
"""

from __future__ import annotations

import gzip
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hicache.config import Config
from hicache.job import PlanSpec
from hicache.sim.world import simulate
from hicache.topology import Topology
from tracer.fr_json import write_flight_recorder
from tracer.log import Run, find_logs
from tracer.perfetto import write_perfetto
from tracer.spans import ExportCount

SPEC = "conversations=16,rounds=12,max-context=20000,output=40"
BUDGET_US = 10
MB = 1e6

Export = Callable[[Run, Path], ExportCount]


@dataclass(frozen=True, slots=True)
class Cost:
    """One export of one run."""

    seconds: float
    count: ExportCount
    plain_bytes: int
    packed_bytes: int
    peak_bytes: int


def read(run: Run, _folder: Path) -> ExportCount:
    """The records and nothing else."""
    count = sum(1 for lane in run.lanes for _ in lane.records())
    return ExportCount(count, count)


def perfetto(run: Run, folder: Path) -> ExportCount:
    with (folder / "trace.json").open("wb") as out:
        return write_perfetto(run, out)


def measure(logs: Path, export: Export) -> Cost:
    """Timed once without and then once with the memory counted, which costs time of its own."""
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as name:
        folder = Path(name)
        start = time.process_time()
        count = export(find_logs(logs), folder)
        seconds = time.process_time() - start
        files = [path.read_bytes() for path in sorted(folder.iterdir())]
        tracemalloc.start()
        export(find_logs(logs), folder)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    packed = sum(len(gzip.compress(file, 6, mtime=0)) for file in files)
    return Cost(seconds, count, sum(map(len, files)), packed, peak_bytes)


def main(tp: int = 4) -> None:
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as name:
        logs = Path(name)
        result = simulate(PlanSpec(Config(topology=Topology(tp=tp)), agentic=SPEC).plan(), out=logs)
        assert result.outcome == "completed", result.error or result.parked
        log_bytes = sum(path.stat().st_size for path in logs.glob("rank*.jsonl*"))
        print(f"{log_bytes / MB:.1f} MB of logs, {tp} ranks; budget {BUDGET_US} µs an event (perfetto)")
        exports = {"reading alone": read, "perfetto": perfetto, "fr-json": write_flight_recorder}
        for title, export in exports.items():
            show(title, measure(logs, export), log_bytes)


def show(title: str, cost: Cost, log_bytes: int) -> None:
    events, records = cost.count.events, cost.count.records
    print(
        f"  {title:14} {events:9,} events {cost.seconds / events * 1e6:6.2f} µs an event "
        f"{cost.seconds / records * 1e6:6.2f} µs a record "
        f"{cost.plain_bytes / events:5.0f} B an event, {cost.packed_bytes / events:5.1f} B gzip; "
        f"peak {cost.peak_bytes / MB:5.1f} MB, {cost.peak_bytes / log_bytes:.2f} of the logs"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
