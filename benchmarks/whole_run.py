"""What recording costs a whole run: nanoseconds a record, beside the same run with tracing off.

    python -m benchmarks.whole_run [AGENTIC]

Rounds of all modes alternate in one process; the best of each counts.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.agentic import config
from benchmarks.volume import EVERYTHING
from hicache.job import PlanSpec
from hicache.sim.world import simulate
from tracer.log import find_logs

SPEC = "conversations=32,rounds=20,max-context=40000,output=20,shared-prefix=0"
ROUNDS = 3
RECORD_NS_MAX = 1000
MODES = ("off", "full", "ring")


def main() -> int:
    agentic = sys.argv[1] if len(sys.argv) > 1 else SPEC
    print("| world | trace | seconds | to off | records | a step | ns a record |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for is_limited in (False, True):
        best: dict[str, float] = {}
        records = steps = 0
        for _ in range(ROUNDS):
            for mode in MODES:
                with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
                    plan = PlanSpec(config(tp=1, is_limited=is_limited), agentic=agentic).plan()
                    gc.collect()
                    start = time.perf_counter()
                    result = simulate(plan, out=Path(folder), trace=mode, trace_limits=EVERYTHING)  # type: ignore[arg-type]
                    seconds = time.perf_counter() - start
                    best[mode] = min(seconds, best.get(mode, seconds))
                    if mode == "full" and not records:
                        lanes = find_logs(folder).lanes
                        records, steps = sum(sum(1 for _ in lane.records()) for lane in lanes), result.steps
        world = "three tiers" if is_limited else "no limits"
        for mode in MODES:
            cost = (best[mode] - best["off"]) / records * 1e9
            told = (
                f"{cost:,.0f} (at most {RECORD_NS_MAX:,})"
                if mode == "full"
                else f"{cost:,.0f}"
                if mode == "ring"
                else ""
            )
            print(
                f"| {world} | {mode} | {best[mode]:.2f} | {best[mode] / best['off']:.2f} | {records:,} | "
                f"{records / steps:.1f} | {told} |"
            )
        del best
    return 0


if __name__ == "__main__":
    sys.exit(main())
