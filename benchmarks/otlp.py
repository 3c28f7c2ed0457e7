"""What an export to OTLP/JSON costs a record that it reads, beside reading alone.

Four ranks of agents' conversations, as `hicache run --tp 4 --agentic conversations=8,rounds=6` makes them,
without storage and with it. The best of several passes over files that are in memory; the budget is 10 us.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

from hicache.config import Config, StorageConfig
from hicache.job import PlanSpec
from hicache.sim.world import simulate
from hicache.topology import Topology
from tracer.log import Run, find_logs
from tracer.metrics import prometheus_text
from tracer.otel import write_otlp
from tracer.spans import ExportCount, spans

SPEC = "conversations=8,rounds=6"
PASSES = 7
US_PER_S = 1_000_000

CASES = {
    "two tiers": Config(topology=Topology(tp=4), page_size_tokens=64),
    "all three tiers": Config(
        topology=Topology(tp=4),
        page_size_tokens=64,
        device_pages=200,
        host_pages=400,
        storage=StorageConfig(backend="memory", prefetch_threshold_tokens=64),
    ),
}


def best_s(work: Callable[[], object]) -> float:
    """Processor seconds of the fastest pass."""
    seconds = []
    for _ in range(PASSES):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def read(run: Run) -> int:
    return sum(1 for lane in run.lanes for _record in lane.records())


def make_spans(run: Run) -> int:
    return sum(1 for _origin, _lane, found in spans(run) for _span in found)


def export(run: Run) -> tuple[ExportCount, int]:
    out = BytesIO()
    return write_otlp(run, out), len(out.getvalue())


def report(name: str, run: Run) -> str:
    count, size_bytes = export(run)
    per_record = {
        what: US_PER_S * best_s(lambda work=work: work(run)) / count.records  # type: ignore[misc]
        for what, work in (
            ("read", read),
            ("spans", make_spans),
            ("OTLP/JSON", export),
            ("Prometheus", prometheus_text),
        )
    }
    shown = "  ".join(f"{what} {us:5.2f}" for what, us in per_record.items())
    per_span = per_record["OTLP/JSON"] * count.records / count.events
    return (
        f"  {name:<16} {count.records:7,} records {count.events:6,} spans   {shown}   us a record\n"
        f"  {'':<16} {per_span:.1f} us and {size_bytes / count.events:,.0f} bytes a span"
    )


def main() -> None:
    print(f"export, tp=4, {SPEC}: processor time")
    for name, config in CASES.items():
        with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
            result = simulate(PlanSpec(config, agentic=SPEC).plan(), out=Path(folder), trace="full")
            assert result.outcome == "completed", result.error or result.parked
            print(report(name, find_logs(folder)), flush=True)


if __name__ == "__main__":
    main()
