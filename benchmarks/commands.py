"""Whole commands, as a person waits for them: a process each, the median of a few."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time


def seconds(*words: str, folder: str) -> float:
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "cli.app", *words], cwd=folder, check=True, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - start


def main(runs: int = 5) -> None:
    with tempfile.TemporaryDirectory() as folder:
        help_s = statistics.median(seconds("--help", folder=folder) for _ in range(runs))
        demo_s = statistics.median(seconds("demo", folder=folder) for _ in range(runs))
    print(f"commands, whole process, median of {runs}")
    print(f"  hicache --help     {help_s:6.2f} s   budget 0.4 s")
    print(f"  hicache demo       {demo_s:6.2f} s   budget 60 s")
