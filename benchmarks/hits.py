"""`hits` over as many requests as a day has: from an export, and from a server's own request metrics.

    .venv/bin/python -m benchmarks.hits [REQUESTS]

A million take the budgets below; what an export is made from takes minutes, and is not what is measured.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from cli.app import main as hicache
from tests.support.logs import write_lane
from tracer.log import find_logs
from tracer.parquet import export_parquet
from tracer.record import Kind

REQUESTS = 100_000
PAGE_TOKENS = 64
PROMPT_TOKENS = 60 * PAGE_TOKENS + 7
KINDS = tuple(Kind(name, "note") for name in ("request", "match", "admit", "forward", "finish"))
BUDGET_S = 3.0


def records(requests: int) -> Iterator[dict[str, Any]]:
    """Requests of which each finds some of its prompt on the device and computes the rest."""
    for at in range(requests):
        rid, device = f"r{at}", PAGE_TOKENS * (at % 50)
        found = {"device_tokens": device, "host_tokens": 0}
        computed = PROMPT_TOKENS - device
        own: tuple[dict[str, Any], ...] = (
            {"kind": "request", "rid": rid, "input_tokens": PROMPT_TOKENS, "conversation": f"c{at % 1000}"},
            {"kind": "match", "rid": rid, **found, "miss_digest": f"{at:016x}"},
            {"kind": "admit", "rid": rid, "verdict": "admitted", **found, "storage_tokens": 0},
            {"kind": "forward", "mode": "extend", "rids": [rid], "computed_tokens": [computed]},
            {"kind": "finish", "rid": rid, "reason": "stop", "output_tokens": 4},
        )
        for each in own:
            yield {"step": at, "time_ns": at * 1000, **each}


def write_metrics(path: Path, requests: int) -> None:
    """As SGLang writes them, with a prompt of a few hundred characters in each line."""
    parameters = json.dumps({"text": "some words of a prompt " * 10, "sampling_params": {"temperature": 0.7}})
    with path.open("w", encoding="utf-8") as file:
        for at in range(requests):
            device, host = at % 2000, at % 500
            line = {
                "request_parameters": parameters,
                "id": f"{at:032x}",
                "finish_reason": {"type": "stop", "matched": 2},
                "prompt_tokens": 4000,
                "completion_tokens": 100,
                "cached_tokens": device + host,
                "cached_tokens_details": {"device": device, "host": host},
                "e2e_latency": 1.23,
                "request_received_ts": 1_790_000_000 + at / 100,
            }
            file.write(json.dumps(line) + "\n")


def seconds(*words: object) -> float:
    """How long the command takes in this process, its output thrown away."""
    with Path("/dev/null").open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        start = time.perf_counter()
        code = hicache([str(word) for word in words])
    assert code == 0, f"hicache {words} ended with {code}"
    return time.perf_counter() - start


def main(requests: int = REQUESTS) -> None:
    budget = BUDGET_S * requests / 1_000_000
    print(f"hits by request, {requests:,} requests, in one process")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        metrics = folder / "metrics.log"
        write_metrics(metrics, requests)
        run = find_logs(write_lane(folder / "logs", records(requests), kinds=KINDS).parent)
        export_parquet(run, folder / "export")
        for what, path in (("export", folder / "export"), ("request metrics", metrics), ("logs", run.path)):
            for how in ("--quiet", "--json"):
                took = seconds("hits", path, "--by", "request", how)
                told = f"   budget {budget:.2f} s" if what == "export" else ""
                print(f"  {what:<16} {how:<8} {took:6.2f} s{told}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
