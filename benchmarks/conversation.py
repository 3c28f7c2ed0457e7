"""A production trace through four ranks with full tracing, and what came of it.

Needs the public conversation trace: HICACHE_DATA names the folder (README, section Data).
"""

from __future__ import annotations

import resource
import shutil
import tempfile
import time
from pathlib import Path

from hicache.config import Config
from hicache.schedule import Schedule
from hicache.sim.world import Plan, simulate
from hicache.topology import Topology
from hicache.workload import TraceFile
from tracer.hits import hits
from tracer.log import find_logs

PAGE_TOKENS = 512


def plan(path: Path, config: Config) -> Plan:
    return Plan(config, path.name, lambda replica: TraceFile(path, PAGE_TOKENS), Schedule(seed=1))


def config(*, tp: int = 1, device_pages: int = 0, hierarchical_cache: bool = True) -> Config:
    """One request after the other; answers are not kept, as the trace does not know their tokens."""
    return Config(
        topology=Topology(tp=tp),
        page_size_tokens=PAGE_TOKENS,
        device_pages=device_pages,
        hierarchical_cache=hierarchical_cache,
        concurrency=1,
        cache_output=False,
        decode_steps="one",
    )


def main(path: Path) -> None:
    from consensus_checker.check import check

    folder = Path(tempfile.mkdtemp(prefix="hicache-bench-"))
    try:
        seconds: dict[str, float] = {}
        start = time.perf_counter()
        result = simulate(plan(path, config(tp=4)), out=folder / "full")
        seconds["traced"] = time.perf_counter() - start
        start = time.perf_counter()
        simulate(plan(path, config(tp=4)), trace="off")
        seconds["off"] = time.perf_counter() - start

        run = find_logs(folder / "full")
        size = sum(file.stat().st_size for lane in run.lanes for file in lane.files)
        start = time.perf_counter()
        found = hits(run)
        seconds["hits"] = time.perf_counter() - start
        start = time.perf_counter()
        verdict = check(run)
        seconds["check"] = time.perf_counter() - start
        records = sum(lane.count or 0 for lane in run.lanes)
    finally:
        shutil.rmtree(folder)
    per_step = records / result.steps / 4
    print(f"conversation trace, 4 ranks: {result.served:,} requests, {result.steps:,} steps")
    print(f"  run, full tracing  {seconds['traced']:6.1f} s   budget 90 s")
    print(f"  run, tracing off   {seconds['off']:6.1f} s   ratio {seconds['traced'] / seconds['off']:.2f}")
    print(f"  records            {records:>9,}   {size / 1e6:.0f} MB, {per_step:.1f} a step and rank")
    print(f"  hits by request    {seconds['hits']:6.1f} s   token hit rate {100 * found.hit_rate:.1f} %")
    print(f"  check              {seconds['check']:6.1f} s   {verdict.kind}")
    print(f"  peak memory        {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:6.2f} GB")
