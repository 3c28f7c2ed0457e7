"""How long it takes to find the first divergence in large logs, by what is read of them and by ranks.

    python -m benchmarks.check_scale               8 ranks of 1.25 million decisions; 64 and 256 of 100,000
    python -m benchmarks.check_scale --ranks 8     one size

The logs are synthetic, and written by the recorder itself. One rank leaves the others in the middle, at the
last call, or nowhere. Each check is a process of its own, from the folder to the first screen; its imports
are not counted. On a busy machine the processor's time says more than the clock's.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tracer.record import Kind, Place, header
from tracer.segments import SegmentSink
from tracer.tracer import Tracer

STEP_DECISIONS = 8
ODD_RANK = 1
WHERE = ("middle", "last", "none")
BACKUP = Kind(
    "write_backup",
    "decision",
    agree=("tp",),
    compared=("node", "tokens"),
    local=("pages_free",),
    result="tokens",
)


@dataclass(frozen=True)
class Size:
    """So many ranks and decisions, and the most that a check may take, by way; and memory."""

    ranks: int
    decisions: int
    budgets_s: dict[str, float]
    budget_bytes: int = 1 << 30


SIZES = (
    Size(
        8, 1_250_000, {"checkpoints in the logs": 1.5, "checkpoint files": 0.15, "every line verified": 4.0}
    ),
    Size(64, 100_000, {"checkpoints in the logs": 5.0, "checkpoint files": 5.0, "every line verified": 5.0}),
    Size(256, 100_000, {"checkpoints in the logs": 5.0, "checkpoint files": 5.0, "every line verified": 5.0}),
)


def write_lane(folder: Path, rank: int, size: Size, odd_at: int) -> None:
    """A rank's log, in which the decision `odd_at` differs; nowhere if there is no such one."""
    sink = SegmentSink(folder, rank, "scheduler")
    place = Place(rank, {"tp": rank}, {"tp": size.ranks}, {})
    head = header(place, (BACKUP,), lane="scheduler", run_id="bench", tool_version="bench")
    tracer = Tracer(sink, head, time.monotonic_ns, has_steps=True)
    backup = tracer.emitter(BACKUP)
    for step in range(size.decisions // STEP_DECISIONS):
        tracer.begin_step(step)
        for node in range(step * STEP_DECISIONS, (step + 1) * STEP_DECISIONS):
            if node == odd_at:
                backup(node, 0, 0)
            else:
                backup(node, 64, 5 + (node + rank) % 7)
        tracer.end_step(is_idle=False)
    tracer.close("completed")


def written(folder: Path, size: Size) -> dict[str, Path]:
    """A folder for each place of the difference; what is the same in all of them is on disk once."""
    total = size.decisions // STEP_DECISIONS * STEP_DECISIONS
    odd_at = {"middle": total // 2, "last": total - 1, "none": -1}
    for rank in range(size.ranks):
        write_lane(folder / "none", rank, size, -1)
    for where in WHERE[:2]:
        write_lane(folder / where, ODD_RANK, size, odd_at[where])
        for path in (folder / "none").iterdir():
            if not path.name.startswith(f"rank{ODD_RANK:04d}."):
                os.link(path, folder / where / path.name)
    return {where: folder / where for where in WHERE}


def without_lists(folder: Path) -> Path:
    """The same logs without the files of checkpoints."""
    target = folder.with_name(f"{folder.name}-logs")
    target.mkdir()
    for path in folder.glob("*.jsonl"):
        os.link(path, target / path.name)
    return target


def child(folder: Path, way: str) -> None:
    """Check and report, in this process."""
    from consensus_checker.check import check
    from consensus_checker.history import History
    from consensus_checker.screen import first_screen
    from tracer.log import find_logs

    start, start_cpu = time.perf_counter(), time.process_time()
    history = History.of(find_logs(folder))
    verdict = check(history, every_line=way == "every line verified")
    first_screen(verdict, history)
    spent_s, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
    first = verdict.finding.first_divergence
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    index = -1 if first is None else first.index
    print(json.dumps([spent_s, cpu_s, peak_kib << 10, verdict.kind, index, verdict.finding.culprit]))


def measured(size: Size, folders: dict[str, Path]) -> Iterator[str]:
    total = size.decisions // STEP_DECISIONS * STEP_DECISIONS
    index_of = {"middle": total // 2, "last": total - 1, "none": -1}
    file_bytes = sum(path.stat().st_size for path in folders["none"].glob("*.jsonl"))
    for where, folder in folders.items():
        bare = without_lists(folder)
        for way, budget_s in size.budgets_s.items():
            words = [sys.executable, "-m", "benchmarks.check_scale", "--child", way]
            words.append(str(folder if way == "checkpoint files" else bare))
            done = subprocess.run(words, check=True, capture_output=True, text=True)
            spent_s, cpu_s, peak_bytes, kind, index, culprit = json.loads(done.stdout)
            expected = ("consistent", []) if where == "none" else ("divergence", [ODD_RANK])
            assert (kind, culprit, index) == (*expected, index_of[where]), done.stdout
            yield (
                f"| {size.ranks} x {total:,} | {file_bytes >> 20:,} | {where} | {way} | "
                f"{spent_s:.2f} (at most {budget_s:g}) | {cpu_s:.2f} | {peak_bytes >> 20:,} |"
            )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, help="only the size with so many ranks")
    parser.add_argument("--child", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args([] if argv is None else argv)
    if options.child:
        child(Path(options.child[1]), options.child[0])
        return 0
    print("| ranks x decisions | MiB of logs | difference | read | s | processor s | peak MiB |")
    print("|---|---:|---|---|---:|---:|---:|")
    for size in SIZES:
        if options.ranks not in (None, size.ranks):
            continue
        folder = Path(tempfile.mkdtemp())
        try:
            for line in measured(size, written(folder, size)):
                print(line, flush=True)
        finally:
            shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
