"""A process that stands still in Python with our recorder in it, or without it.

    python -m tests.support.sleepers RANK FOLDER      with a log, a heart and a signal for its stacks
    python -m tests.support.sleepers RANK -           nothing of ours
    python -m tests.support.sleepers RANK FOLDER hold     as the first, and no thread of Python gets a turn

It says `ready` once it stands, and ends when its input is closed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.logs import DECIDE, SMALL_KINDS, place
from tests.support.processes import ROOT
from tracer.heart import Heart
from tracer.record import HEART_LANE, header
from tracer.segments import SegmentSink
from tracer.sinks import write_meta
from tracer.snapshot.armed import arm
from tracer.tracer import Tracer

PR_SET_PDEATHSIG = 1
MUTEX_BYTES = 64
SIZES = {"dp": 1, "pp": 1, "cp": 1, "tp": 8}
MODULE = "tests.support.sleepers"


def start(rank: int, folder: Path | None, *words: str, log: Path | None = None) -> subprocess.Popen[str]:
    """One such process, which may not stand yet; without a folder there is nothing of ours in it."""
    with open(os.devnull if log is None else log, "w") as said:
        return subprocess.Popen(
            [sys.executable, "-m", MODULE, str(rank), "-" if folder is None else str(folder), *words],
            cwd=ROOT,
            env={**os.environ, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )


def stand(process: subprocess.Popen[str]) -> None:
    """Wait until it does."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@contextmanager
def asleep(rank: int, folder: Path | None, *words: str) -> Iterator[subprocess.Popen[str]]:
    """One such process for the block's time."""
    process = start(rank, folder, *words)
    try:
        stand(process)
        yield process
    finally:
        end(process)


def record(folder: Path, rank: int) -> None:
    """A log with one decision in it, and what a snapshot asks."""
    lanes = {}
    for lane in ("scheduler", HEART_LANE):
        head = header(place(rank, SIZES), SMALL_KINDS, lane=lane, run_id="sleepers", tool_version="test")
        sink = SegmentSink(folder, rank, lane)
        lanes[lane] = (sink, Tracer(sink, head, time.monotonic_ns))
    write_meta(folder, rank)
    tracer = lanes["scheduler"][1]
    tracer.emitter(DECIDE)(1, 1, 64, 5)
    sink, beats = lanes[HEART_LANE]
    Heart(beats, sink, {"scheduler": tracer}, folder, rank, clock=time.monotonic_ns, main="scheduler").start()
    assert arm(folder, rank) is not None


def wait_for_pages() -> None:
    """Where the main thread stands."""
    say_ready()
    threading.Event().wait()


def hold_interpreter(before: Callable[[], None] = lambda: None) -> None:
    """Wait in C for a mutex that is locked twice: no signal ends that, and no other thread gets a turn."""
    mutex = ctypes.create_string_buffer(MUTEX_BYTES)
    before()
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def say_ready() -> None:
    print("ready", flush=True)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    rank, folder = int(sys.argv[1]), sys.argv[2]
    if folder != "-":
        record(Path(folder), rank)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    if sys.argv[3:] == ["hold"]:
        hold_interpreter(say_ready)
    wait_for_pages()


if __name__ == "__main__":
    main()
