"""What recording costs: one decorated call, beside SGLang's own checker and an OpenTelemetry span.

    python -m benchmarks.recorder                       the recorder and the span
    HICACHE_PEERS=VENV python -m benchmarks.recorder    and SGLang's decorator, in that environment's Python

SGLang's numbers come from the same script in its own environment, which has msgspec too: this project is put
on the path there. Rounds of all sides alternate, and the best of each counts.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROUNDS = 40
CALLS = 500
LONG_CALLS = 20
ROOT = Path(__file__).resolve().parents[1]
TOKENS = 40_000
# The budgets of the recorder.
CALL_SHARE_MAX = 0.2
LONG_CALL_NS_MAX = 5_000
SPAN_SHARE_MAX = 0.1


@dataclass
class Request:
    """What a scheduler hands around: a long prompt among other things."""

    rid: str
    tokens: list[int]


Side = Callable[[], None]


def plain(node: int, pages: int, tokens: int) -> int:
    return node


def match(request: Request, limit: int) -> int:
    return limit


def recorder_sides(folder: Path) -> dict[str, Side]:
    from tracer.calls import traced
    from tracer.record import Kind, Place, header
    from tracer.segments import SegmentSink
    from tracer.tracer import Tracer

    axes = ("tp", "cp", "pp")
    backup = Kind("write_backup", "decision", agree=axes, compared=("node", "pages", "tokens", "result"))
    walk = Kind("match", "decision", agree=axes, compared=("rid", "length", "limit", "result"))
    place = Place(0, {"tp": 0}, {"tp": 1}, {})
    head = header(place, [backup, walk], lane="scheduler", run_id="bench", tool_version="bench")
    sink = SegmentSink(folder, 0, "scheduler")
    tracer = Tracer(sink, head, time.monotonic_ns, has_steps=True)
    call = traced(tracer, backup, params=["node", "pages", "tokens"], result=["result"])(plain)
    long_call = traced(
        tracer,
        walk,
        params={"rid": "request.rid", "length": "len(request.tokens)", "limit": "limit"},
        result=["result"],
    )(match)
    request = Request("r0", list(range(TOKENS)))

    def stepped(loop: Side) -> Side:
        def step() -> None:
            tracer.begin_step(tracer.step + 1)
            loop()
            tracer.end_step(is_idle=False)

        return step

    return {
        "undecorated": lambda: loop3(plain),
        "recorder": stepped(lambda: loop3(call)),
        "recorder, 40,000-token request": stepped(lambda: loop_request(long_call, request)),
    }


def sglang_sides() -> dict[str, Side]:
    os.environ["SGLANG_ENABLE_RANK_CONSENSUS_CHECKER"] = "1"
    # Only in that environment is it there.
    checker: Any = importlib.import_module("sglang.srt.utils.rank_consensus_checker")
    decorated = checker.rank_consensus(same_params=True, same_results=True)(plain)
    request = Request("r0", list(range(TOKENS)))
    walked = checker.rank_consensus(same_params=True, same_results=True)(match)
    # Its queue and its thread's name are set as `configure` sets them; nobody compares, which costs it more.
    checker._q = queue.Queue()
    checker._scheduler_thread = threading.current_thread()

    def forgetting(side: Side) -> Side:
        def call_and_forget() -> None:
            side()
            checker._q.queue.clear()

        return call_and_forget

    return {
        "sglang": forgetting(lambda: loop3(decorated)),
        "sglang, 40,000-token request": forgetting(lambda: loop_request(walked, request, LONG_CALLS)),
    }


def span_sides() -> dict[str, Side]:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    class Nowhere(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    otel = provider.get_tracer("bench")

    def spanned(node: int, pages: int, tokens: int) -> int:
        with otel.start_as_current_span("write_backup") as span:
            span.set_attribute("node", node)
            span.set_attribute("pages", pages)
            span.set_attribute("tokens", tokens)
            span.set_attribute("hicache.op", "write_backup")
            result = plain(node, pages, tokens)
            span.set_attribute("result", result)
            return result

    return {"opentelemetry span": lambda: loop3(spanned)}


def loop3(function: Callable[[int, int, int], int], count: int = CALLS) -> None:
    for node in range(count):
        function(node, 1, 64)


def loop_request(function: Callable[[Request, int], int], request: Request, count: int = CALLS) -> None:
    for limit in range(count):
        function(request, limit)


def best_ns(sides: dict[str, Side], rounds: int = ROUNDS) -> dict[str, float]:
    """Nanoseconds a call, the best round of each; rounds of all sides alternate."""
    found: dict[str, float] = {}
    for _ in range(rounds):
        for name, side in sides.items():
            calls = LONG_CALLS if name.startswith("sglang,") else CALLS
            # Once before, for the caches: another side has just had them.
            side()
            start = time.perf_counter_ns()
            side()
            spent = (time.perf_counter_ns() - start) / calls
            found[name] = min(spent, found.get(name, spent))
    return found


def measure(*, has_sglang: bool) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp())
    try:
        sides = recorder_sides(folder)
        sides |= sglang_sides() if has_sglang else span_sides()
        return best_ns(sides)
    finally:
        shutil.rmtree(folder)


def main() -> int:
    if "--in-peers" in sys.argv:
        print(json.dumps(measure(has_sglang=True)))
        return 0
    own = measure(has_sglang=False)
    base = own["undecorated"]
    call = own["recorder"] - base
    print("| one call of three ints, params and result compared | ns | of it, the recorder takes |")
    print("|---|---:|---:|")
    print(f"| recorder | {call:,.0f} | |")
    span = own["opentelemetry span"] - base
    part = f"{call / span:.3f} (at most {SPAN_SHARE_MAX})"
    print(f"| OpenTelemetry span with five attributes | {span:,.0f} | {part} |")
    print(
        f"| recorder, a 40,000-token request among the arguments | "
        f"{own['recorder, 40,000-token request']:,.0f} | (at most {LONG_CALL_NS_MAX:,}) |"
    )
    peers = os.environ.get("HICACHE_PEERS", "")
    python = Path(peers) / "bin" / "python"
    if not peers or not python.is_file():
        print("not run: SGLang's decorator; HICACHE_PEERS names no environment with SGLang", file=sys.stderr)
        return 0
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    words = [str(python), "-m", "benchmarks.recorder", "--in-peers"]
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=ROOT)
    if done.returncode:
        print(f"not run: SGLang's decorator: {done.stderr.splitlines()[-1:]}", file=sys.stderr)
        return 0
    theirs = json.loads(done.stdout.splitlines()[-1])
    base = theirs["undecorated"]
    call, sglang = theirs["recorder"] - base, theirs["sglang"] - base
    print(f"| recorder, in SGLang's environment | {call:,.0f} | |")
    print(
        f"| SGLang 0.5.23 `rank_consensus` | {sglang:,.0f} | {call / sglang:.3f} (at most {CALL_SHARE_MAX}) |"
    )
    print(f"| the same, a 40,000-token request | {theirs['sglang, 40,000-token request']:,.0f} | |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
