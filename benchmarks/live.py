"""The live watch: how soon ranks that part or fall silent are told, what it costs, and whether it keeps up.

    python -m benchmarks.live

Processes over a TCPStore. Times are from the call at which a rank does otherwise, or stands still, to the
moment at which the last rank is told.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT, free_port

MODULE = "tests.support.live_rank"
RANKS, RATE = 4, 1_000
DIVERGENCES, SILENCES = 20, 4
FAST_RATE, FAST_S = 20_000, 10
STALL_S = 60.0
RUN_S_MAX = 180.0
# The budgets.
DETECTION_S_MAX, SILENCE_S_MAX = 0.25, 2.5
GROWN_BYTES_MAX = 1 << 20

Line = dict[str, Any]


def ran(size: int, plan: Line) -> list[list[Line]]:
    """What each rank has printed."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        command = [sys.executable, "-W", "ignore", "-m", MODULE]
        server = subprocess.Popen(
            [*command, f"serve:{port}"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert server.stdin is not None and server.stdout is not None
        server.stdout.readline()
        # Into files: a rank that waits for a full pipe to be read keeps the others waiting.
        files = [Path(folder, f"rank{rank}.out") for rank in range(size)]
        ranks = []
        for rank, file in enumerate(files):
            with file.open("w") as out:
                ranks.append(
                    subprocess.Popen(
                        [*command, f"tcp:{port}", str(Path(folder, "logs")), json.dumps(plan)],
                        cwd=ROOT,
                        env={
                            **os.environ,
                            "RANK": str(rank),
                            "WORLD_SIZE": str(size),
                            "OMP_NUM_THREADS": "1",
                        },
                        stdout=out,
                        stderr=subprocess.DEVNULL,
                    )
                )
        try:
            for process in ranks:
                process.wait(timeout=RUN_S_MAX)
        finally:
            for process in ranks:
                process.kill()
            server.kill()
        outputs = [file.read_text() for file in files]
        server.stdin.close()
        server.wait(timeout=60)
    return [[json.loads(line) for line in output.splitlines()] for output in outputs]


def delays(outputs: list[list[Line]], rounds: int) -> list[float]:
    """For each round, from its act to the last rank that was told; whoever holds its interpreter can't be."""
    found = []
    for number in range(rounds):
        acted_s, told_s = 0.0, 0.0
        for lines in outputs:
            begins = [at for at, line in enumerate(lines) if line.get("started")]
            own = lines[begins[number] : [*begins[1:], len(lines)][number]]
            act = next((line for line in own if "acted" in line), None)
            if act is not None:
                acted_s = act["at"]
            if act is None or not act["acted"].startswith("hold"):
                told = [line["at"] for line in own if "told" in line]
                told_s = max(told_s, told[0] if told else float("inf"))
        found.append(told_s - acted_s)
    return found


def detection() -> list[float]:
    chance = random.Random(7)
    rounds = []
    for number in range(DIVERGENCES):
        at, rank = chance.randrange(500, 900), chance.randrange(RANKS)
        act = ("value", "skip")[number % 2]
        rounds.append({"calls": 2_000, "rate": RATE, "acts": {str(rank): {str(at): act}}})
    return delays(ran(RANKS, {"rounds": rounds}), DIVERGENCES)


def silence() -> list[float]:
    rounds = [
        {"calls": 4_000, "rate": RATE, "acts": {str(number % RANKS): {"500": "hold:3"}}}
        for number in range(SILENCES)
    ]
    return delays(ran(RANKS, {"rounds": rounds}), SILENCES)


def ended(lines: list[Line]) -> Line:
    return next(line for line in lines if "ended" in line)


def shown(name: str, values: list[float], most: float) -> None:
    median = statistics.median(values)
    print(
        f"  {name:<34} median {median:6.3f} s   {min(values):.3f} to {max(values):.3f} s   "
        f"budget {most} s   {'ok' if median < most else 'MISSED'}"
    )


def main() -> None:
    print(f"the live watch: {RANKS} processes, TCPStore, {RATE:,} calls a second each")
    shown(f"{DIVERGENCES} divergences, told by all", detection(), DETECTION_S_MAX)
    shown(f"{SILENCES} ranks that hold the interpreter", silence(), SILENCE_S_MAX)
    for size, rate in ((RANKS, RATE), (2, FAST_RATE)):
        ends = [ended(lines) for lines in ran(size, {"calls": FAST_S * rate, "rate": rate})]
        shares = [end["watch_share"] for end in ends]
        print(
            f"  {size} ranks at {min(end['calls_per_s'] for end in ends):8,.0f} calls a second: "
            f"the watch takes {max(shares):.1%} of a core where it compares, {min(shares):.1%} elsewhere; "
            f"{max(end['compared'] for end in ends):,} of {FAST_S * rate:,} compared, "
            f"{sum(end['lost'] for end in ends):,} lost"
        )
    plan = {"calls": 500, "rate": RATE, "acts": {"1": {"400": "die"}}, "rest_s": STALL_S}
    ends = [ended(lines) for rank, lines in enumerate(ran(RANKS, plan)) if rank != 1]
    grown = max(end["grown_bytes"] for end in ends)
    print(
        f"  {STALL_S:.0f} s of a stall: a process grows by {grown / 1024:,.0f} KiB   "
        f"budget {GROWN_BYTES_MAX / 1024:,.0f} KiB   {'ok' if grown < GROWN_BYTES_MAX else 'MISSED'}"
    )


if __name__ == "__main__":
    main()
