"""Agents' conversations at production length through the whole control plane.

32 conversations of 86 rounds grow to 160,000 tokens each: 2,752 requests, 223 million prompt tokens. With
equal growth, a cold start and nothing shared at most 97.7 % of them can be hits. Each line is a process of
its own, so that its memory is its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache.config import Config, StorageConfig
from hicache.job import PlanSpec
from hicache.sim.world import simulate
from hicache.topology import Topology
from tracer.hits import hits
from tracer.log import find_logs

SPEC = "conversations=32,rounds=86,max-context=160000,output=20,shared-prefix=0"
PAGE_TOKENS = 64
# All conversations end with 80,000 pages between them.
DEVICE_PAGES = 20_000
HOST_PAGES = 50_000


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table: a world, how it is traced, and what it may cost."""

    name: str
    tp: int
    trace: str
    is_limited: bool
    budget: str


CASES = (
    Case("1 rank, no limits", 1, "off", False, "120 s, 4 GB"),
    Case("1 rank, no limits", 1, "full", False, "120 s, 4 GB"),
    Case("1 rank, all three tiers", 1, "off", True, "120 s, 4 GB"),
    Case("1 rank, all three tiers", 1, "full", True, "120 s, 4 GB"),
    Case("tp=8, all three tiers", 8, "ring", True, "15 min"),
)


def config(*, tp: int, is_limited: bool) -> Config:
    """With limits, a device for a quarter of all pages, a host for more than half, and a store for all."""
    if not is_limited:
        return Config(topology=Topology(tp=tp), page_size_tokens=PAGE_TOKENS)
    return Config(
        topology=Topology(tp=tp),
        page_size_tokens=PAGE_TOKENS,
        device_pages=DEVICE_PAGES,
        host_pages=HOST_PAGES,
        storage=StorageConfig(backend="memory"),
    )


def measure(*, tp: int, trace: str, is_limited: bool) -> dict[str, Any]:
    """Run once in this process; seconds are the run's alone."""
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
        plan = PlanSpec(config(tp=tp, is_limited=is_limited), agentic=SPEC).plan()
        start = time.perf_counter()
        result = simulate(plan, out=Path(folder), trace=trace)  # type: ignore[arg-type]
        seconds = time.perf_counter() - start
        peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        assert result.outcome == "completed", result.error or result.parked
        found: dict[str, Any] = {"seconds": seconds, "peak_gb": peak_gb, "requests": result.served}
        if trace == "full":
            document = hits(find_logs(folder)).to_json()
            found["input_tokens"] = document["input_tokens"]
            found["cached_tokens"] = document["cached_tokens"]
    return found


def in_a_process(case: Case) -> dict[str, Any]:
    words = ["--tp", str(case.tp), "--trace", case.trace, *(["--limited"] if case.is_limited else [])]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.agentic", *words], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def line(case: Case, found: dict[str, Any]) -> str:
    text = (
        f"  {case.name:<24} {case.trace:<5} {found['seconds']:7.1f} s  {found['peak_gb']:5.2f} GB   "
        f"budget {case.budget}"
    )
    if "cached_tokens" not in found:
        return text
    shares = (
        f"{tier} {100 * tokens / found['input_tokens']:.1f} %"
        for tier, tokens in found["cached_tokens"].items()
    )
    return f"{text}\n{'':27}of {found['input_tokens']:,} tokens: {', '.join(shares)}"


def main() -> None:
    print("agents, page 64: 32 conversations x 86 rounds to 160,000 tokens, 2,752 requests")
    for case in CASES:
        print(line(case, in_a_process(case)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int)
    parser.add_argument("--trace", default="off")
    parser.add_argument("--limited", action="store_true")
    given = parser.parse_args()
    if given.tp is None:
        main()
    else:
        print(json.dumps(measure(tp=given.tp, trace=given.trace, is_limited=given.limited)))
