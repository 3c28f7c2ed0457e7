"""What recording takes of a step of the rig, told apart from what else differs between two runs.

    HICACHE_PEERS=VENV HICACHE_RIG=KIT python -m benchmarks.plugin_steps [--where]

Two runs of the rig differ by more than what is looked for. So here it is one run: in every second block of
steps the hooks record, in the others each looks at one dictionary and calls the function. What differs
between them is what recording takes, with its 95 % interval. With `--where` each hook times itself, which
makes all of them slower: a table by hook.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

STEPS, BLOCK, WARM_UP = 1500, 5, 40
FORWARD_MS = 4.0
DRAWS = 1000
SHOWN = 20

# A plugin of its own. Where hooks are to time themselves, that goes into the text that they are made of.
CLOCK = """
import json, os, sys, time

BLOCK, WARM_UP = int(os.environ["BENCH_BLOCK"]), int(os.environ["BENCH_WARM_UP"])
STEPS, OUT = int(os.environ["BENCH_STEPS"]), os.environ["BENCH_OUT"]
spent = {}

def put(text, old, new):
    assert text.count(old) == 1, old
    return text.replace(old, new)

def timed(text):
    text = put(text, "    def _h_wrapper(", "    _h_own = _h_spent(_h_function)\\n    def _h_wrapper(")
    text = put(text, "        try:\\n{before}", "        _h_t0 = _h_clock()\\n        try:\\n{before}")
    text = put(text, "{called}", "        _h_t1 = _h_clock()\\n{called}\\n        _h_t2 = _h_clock()")
    after = "        _h_own[0] += 1\\n        _h_own[1] += _h_clock() - _h_t2 + _h_t1 - _h_t0\\n"
    text = put(text, "        return {returned}", after + "        return {returned}")
    imports = "from step_clock import spent_of as _h_spent\\nfrom time import thread_time_ns as _h_clock\\n"
    return imports + text

def spent_of(function):
    return spent.setdefault(function.__qualname__, [0, 0])

def clock_ns():
    # What asking the clock twice takes.
    pairs = [(time.thread_time_ns(), time.thread_time_ns()) for _ in range(2000)]
    return sorted(after - before for before, after in pairs)[1000]

def entry():
    from consensus_checker import sglang_hooks, sglang_plugin

    if os.environ.get("BENCH_WHERE"):
        sglang_hooks.MAKE = timed(sglang_hooks.MAKE)
    scheduler = sys.modules["sglang.srt.managers.scheduler"].Scheduler
    own = scheduler._process_hicache_events
    at = {"step": 0, "on": True, "began": None, "kept": []}
    rows = []

    def switch(on):
        if on != at["on"]:
            at["on"] = on
            hooks = list(sglang_plugin._hooks.found.values())
            if on:
                for hook, emits in at["kept"]:
                    hook._emits.update(emits)
            else:
                at["kept"] = [(hook, dict(hook._emits)) for hook in hooks]
                for hook in hooks:
                    hook._emits.clear()

    def counted(self, *args, **kwargs):
        cpu, wall = time.thread_time(), time.perf_counter()
        step = at["step"]
        # The first step of a block has its caches still to fill.
        if at["began"] is not None and step >= WARM_UP and step % BLOCK:
            rows.append((at["on"], cpu - at["began"][0], wall - at["began"][1]))
        at["step"] = step = step + 1
        switch(step < WARM_UP or step // BLOCK % 2 == 0)
        if step == STEPS:
            switch(True)
            with open(f"{OUT}.{os.getpid()}", "w") as file:
                json.dump({"rows": rows, "spent": spent, "clock_ns": clock_ns()}, file)
        at["began"] = time.thread_time(), time.perf_counter()
        return own(self, *args, **kwargs)

    scheduler._process_hicache_events = counted
"""


def of_the_mean(on: Sequence[float], off: Sequence[float]) -> tuple[float, float, float]:
    """How much more the mean is, and the 95 % interval of that, by drawing again from both."""
    draw = random.Random(0)
    found = sorted(
        statistics.fmean(draw.choices(on, k=len(on))) - statistics.fmean(draw.choices(off, k=len(off)))
        for _ in range(DRAWS)
    )
    low, high = found[round(0.025 * DRAWS)], found[round(0.975 * DRAWS)]
    return statistics.fmean(on) - statistics.fmean(off), low, high


def main(words: Sequence[str]) -> int:
    from tests.peers.rig import has_rig, installed, run

    if not has_rig():
        print("not run: HICACHE_PEERS and HICACHE_RIG name no SGLang and no kit", file=sys.stderr)
        return 0
    has_table = list(words) == ["--where"]
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as name:
        folder = Path(name)
        site = installed(folder)
        about = folder / "clock" / "step_clock-0.1.dist-info"
        about.mkdir(parents=True)
        (about.parent / "step_clock.py").write_text(CLOCK)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: step-clock\nVersion: 0.1\n")
        # Ahead of ours by its name: what it changes of the hooks must be there when they are made.
        (about / "entry_points.txt").write_text("[sglang.srt.plugins]\na_step_clock = step_clock:entry\n")
        environment = {
            "BENCH_OUT": str(folder / "times"),
            "BENCH_STEPS": str(STEPS),
            "BENCH_BLOCK": str(BLOCK),
            "BENCH_WARM_UP": str(WARM_UP),
            "BENCH_WHERE": "1" if has_table else "",
        }
        options = ["--ranks", "2", "--scenario", "healthy", "--steps", str(STEPS), "--no-checker"]
        ran = run(f"{about.parent}:{site}", folder / "run", options, trace="ring", environment=environment)
        told = [json.loads(path.read_text()) for path in sorted(folder.glob("times.*"))]
    if not ran.is_healthy or len(told) != 2:
        print(f"the rig did not run to its end:\n{ran.report}", file=sys.stderr)
        return 1
    for rank, found in enumerate(told):
        for column, what, beside_ms in ((1, "processor time", FORWARD_MS), (2, "wall clock", 0.0)):
            on = [1e3 * row[column] for row in found["rows"] if row[0]]
            off = [1e3 * row[column] for row in found["rows"] if not row[0]]
            more, low, high = of_the_mean(on, off)
            whole = statistics.fmean(off) + beside_ms
            print(
                f"rank {rank}, {what} of {len(on)} and {len(off)} steps: {whole:.2f} ms not recorded, "
                f"{more:.2f} more recorded [{low:.2f}, {high:.2f}]: {1 + more / whole:.3f}"
            )
    if has_table:
        found = told[0]
        steps = STEPS / 2
        net = {
            name: (count, ns - 2 * count * found["clock_ns"])
            for name, (count, ns) in found["spent"].items()
            if count
        }
        print(
            f"all lanes of rank 0, us a recorded step: {sum(ns for _, ns in net.values()) / steps / 1e3:.0f}"
        )
        for name, (count, ns) in sorted(net.items(), key=lambda pair: -pair[1][1])[:SHOWN]:
            print(f"  {ns / steps / 1e3:6.1f}  {name}, {count / steps:.2f} calls of {ns / count / 1e3:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
