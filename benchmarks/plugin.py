"""What the plugin costs a real SGLang: one match of a long prompt, and the steps of the rig.

    HICACHE_PEERS=VENV HICACHE_RIG=KIT python -m benchmarks.plugin

A match is called with SGLang's own parameters and key, over a function that only returns a result: the
difference is what the hook takes. Steps are counted in processor time of the scheduler's thread, beside the
rig's 4 ms for the forward pass.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 40_000
ROUNDS, CALLS = 40, 1000
PAIRS = 3
STEPS = 300
FORWARD_S = 0.004
# The budgets.
MATCH_NS_MAX = 5_000
STEP_RATIO_MAX = 1.02
START_S_MAX = 2.0
MEMORY_MB_MAX = 64

# A plugin of its own: processor time of the scheduler's thread, from the 20th step to the last.
CLOCK = """
import os, resource, time

def entry():
    import sys
    scheduler = sys.modules["sglang.srt.managers.scheduler"].Scheduler
    own, state = scheduler._process_hicache_events, {"step": 0}

    def counted(self, *args, **kwargs):
        state["step"] += 1
        if state["step"] == 20:
            state["cpu"] = time.thread_time()
        if state["step"] == int(os.environ["BENCH_STEPS"]):
            cpu = (time.thread_time() - state["cpu"]) / (state["step"] - 20)
            with open(os.environ["BENCH_OUT"] + f".{os.getpid()}", "w") as file:
                file.write(f"{cpu} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}")
        return own(self, *args, **kwargs)

    scheduler._process_hicache_events = counted
"""


def match_ns() -> dict[str, float]:
    """Nanoseconds that the hook of `match_prefix` takes, while it records and while it does not."""
    base = import_module("sglang.srt.mem_cache.base_prefix_cache")
    key_of = import_module("sglang.srt.mem_cache.radix_cache").RadixKey

    from consensus_checker.sglang_hooks import Hook
    from consensus_checker.sglang_points import POINTS

    class Request:
        rid = "r1"
        origin_input_ids = array("q", range(TOKENS))
        priority = 0
        extra_key = None
        cache_salt = None

    found = base.MatchResult(TOKENS - 64, 17, 17, 17, full_kv_hit_length=TOKENS - 64)

    class Cache:
        def match_prefix(self, params: Any) -> Any:
            return found

    key = key_of(Request.origin_input_ids, limit=TOKENS - 1)
    params = base.MatchPrefixParams(key=key, req=Request())
    point = next(point for point in POINTS if point.name == "match_prefix")
    # A ring packs its last file in a thread, which may still be at it.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        lanes, see = _recording(folder)
        hook = Hook(point, print)
        hooked = hook.wrapper(Cache.match_prefix, see)
        sides: dict[str, Callable[..., Any]] = {"undecorated": Cache.match_prefix, "idle": hooked}
        best = {name: _best_ns(side, Cache(), params) for name, side in sides.items()}
        import threading

        hook.bind("scheduler", threading.get_ident(), lanes["scheduler"], lambda error: None)
        best["recording"] = _best_ns(hooked, Cache(), params)
        for lane in lanes.values():
            lane.close("completed")
    assert not hook.error, hook.error
    return {name: best[name] - best["undecorated"] for name in ("idle", "recording")}


def _best_ns(side: Callable[..., Any], cache: Any, params: Any) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter_ns()
        for _ in range(CALLS):
            side(cache, params)
        best = min(best, (time.perf_counter_ns() - begin) / CALLS)
    return best


def _recording(folder: str) -> tuple[Any, Any]:
    os.environ |= {"HICACHE_TRACE": "ring", "HICACHE_TRACE_DIR": folder}
    from consensus_checker.consensus_ranks import alone
    from consensus_checker.sglang_paths import LANES
    from consensus_checker.sglang_place import place_of
    from consensus_checker.sglang_recorder import ServerRecording
    from consensus_checker.sglang_see import See
    from consensus_checker.sglang_session import KINDS
    from tracer.keyed import best_algorithm, keyed_digest

    place = place_of(0, {"tp": (0, 1)}, (0, 1), 2)
    agreed = alone([[0, 1]], 0, has_logs=False)
    recording = ServerRecording(place, agreed, KINDS, LANES, world_size=2, config={}, warn=print)
    see = See()
    see.begin(recording.lanes, place, keyed_digest(best_algorithm(), 1))
    return recording.lanes, see


def start_s() -> float:
    """Seconds that the hooks take at a scheduler's start, beyond the server's own imports."""
    os.environ["HICACHE_TRACE"] = "ring"
    import_module("sglang.srt.managers.scheduler")
    from consensus_checker import sglang_plugin as plugin

    begin = time.perf_counter()
    plugin.entry()
    assert plugin._hooks is not None
    plugin._hooks.install(is_last=True)
    return time.perf_counter() - begin


def pairs_of_runs(folder: Path) -> tuple[list[float], list[float]]:
    """Of pairs of runs how long a step takes, recorded over not, and the megabytes more that a rank had."""
    from tests.peers.rig import installed, run

    site = installed(folder)
    clock = folder / "clock"
    about = clock / "step_clock-0.1.dist-info"
    about.mkdir(parents=True)
    (clock / "step_clock.py").write_text(CLOCK)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: step-clock\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[sglang.srt.plugins]\nstep_clock = step_clock:entry\n")
    ratios, more_mb = [], []
    for pair in range(PAIRS):
        sides: dict[str, list[float]] = {}
        # Which of the two comes first alternates.
        for trace in ("ring", "") if pair % 2 else ("", "ring"):
            out = folder / f"times{pair}{trace}"
            run(
                f"{clock}:{site}",
                folder / "run",
                ["--ranks", "2", "--scenario", "healthy", "--steps", str(STEPS), "--no-checker"],
                trace=trace,
                environment={"BENCH_OUT": str(out), "BENCH_STEPS": str(STEPS)},
            )
            told = [path.read_text().split() for path in folder.glob(f"{out.name}.*")]
            sides[trace] = [statistics.mean(map(float, column)) for column in zip(*told, strict=True)]
        (off_s, off_kb), (on_s, on_kb) = sides[""], sides["ring"]
        ratios.append((on_s + FORWARD_S) / (off_s + FORWARD_S))
        more_mb.append((on_kb - off_kb) / 1024)
        print(f"  a step: {1e3 * off_s:.3f} ms of processor time, recorded {1e3 * on_s:.3f}")
    return ratios, more_mb


def main() -> int:
    peers, kit = os.environ.get("HICACHE_PEERS", ""), os.environ.get("HICACHE_RIG", "")
    if not peers or not kit:
        print("not run: HICACHE_PEERS and HICACHE_RIG name no SGLang and no kit", file=sys.stderr)
        return 0
    stubs = Path(kit) / "stubs"
    done = subprocess.run(
        [str(Path(peers) / "bin" / "python"), __file__, "match"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{stubs}", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        check=True,
        cwd=ROOT,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    is_good = found["recording"] <= MATCH_NS_MAX
    print(f"match_prefix, {TOKENS:,} tokens: {found['recording'] / 1e3:.2f} us recorded, ", end="")
    print(f"{found['idle'] / 1e3:.2f} us while nothing is; budget {MATCH_NS_MAX / 1e3:.0f} us")
    print(f"start of a scheduler: {found['start_s']:.2f} s; budget {START_S_MAX:.0f} s")
    is_good = is_good and found["start_s"] <= START_S_MAX
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
        ratios, more_mb = pairs_of_runs(Path(folder))
    ratio, mb = statistics.median(ratios), statistics.median(more_mb)
    shown = ", ".join(f"{one:.3f}" for one in ratios)
    print(f"steps of the rig: {ratio:.3f} of those without us (pairs: {shown}); budget {STEP_RATIO_MAX}")
    print(f"memory: {mb:.0f} MB more a rank; budget {MEMORY_MB_MAX}")
    is_good = is_good and ratio <= STEP_RATIO_MAX and mb <= MEMORY_MB_MAX
    return int(not is_good)


if __name__ == "__main__":
    if sys.argv[1:] == ["match"]:
        print(json.dumps({"start_s": start_s(), **match_ns()}))
        sys.exit(0)
    sys.exit(main())
