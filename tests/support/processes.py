"""Processes of a test: started with what torchrun sets, and read when they have ended.

Ranks are forked from a server that has imported torch once for all tests of a session (`hicache.forks`);
each is a process of its own all the same.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hicache.forks import Forked, Forks
from tracer.snapshot import procfs

ROOT = Path(__file__).parent.parent.parent
# Whoever is killed has ended by then.
KILLED_S = 20.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank_environment() -> dict[str, str]:
    """What every rank of a test has in its environment."""
    return {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


class Process:
    """One rank, with what `subprocess.Popen[str]` has of it."""

    def __init__(self, forked: Forked) -> None:
        self._forked = forked
        self.pid = forked.pid
        self.stdin = io.TextIOWrapper(forked.stdin, line_buffering=True)
        self.stdout = io.TextIOWrapper(forked.stdout)
        self.stderr = io.TextIOWrapper(forked.stderr)

    @property
    def returncode(self) -> int | None:
        return self._forked.returncode

    def poll(self) -> int | None:
        return self._forked.poll()

    def send_signal(self, number: signal.Signals) -> None:
        self._forked.send_signal(number)

    def kill(self) -> None:
        self._forked.send_signal(signal.SIGKILL)

    def wait(self) -> int | None:
        return self._forked.wait(KILLED_S)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """All that it says from here on; its input is closed, and it must end in time."""
        self.stdin.close()
        found: dict[str, str] = {}

        def read(name: str) -> None:
            with getattr(self, name) as stream:
                found[name] = stream.read()

        readers = [threading.Thread(target=read, args=(name,)) for name in ("stdout", "stderr")]
        for reader in readers:
            reader.start()
        is_late = self._forked.wait(timeout) is None
        if is_late:
            self.kill()
        for reader in readers:
            reader.join()
        assert not is_late, f"process {self.pid} has not ended in {timeout} seconds: {found}"
        return found["stdout"], found["stderr"]


def start_rank(forks: Forks, rank: int, count: int, module: str, *words: str, **more: str) -> Process:
    """`python -m module` as one of so many ranks, with more in its environment."""
    own = {**rank_environment(), "RANK": str(rank), "WORLD_SIZE": str(count), **more}
    return Process(forks.start(module, words, own, folder=ROOT))


def start_ranks(forks: Forks, count: int, module: str, *words: str) -> list[Process]:
    """`python -m module` once a rank."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [start_rank(forks, rank, count, module, *words, **meeting) for rank in range(count)]


def links(pid: int, kind: str = "pipe:") -> set[str]:
    """What of this kind a process holds open."""
    folder = Path(f"/proc/{pid}/fd")
    return {link for fd in folder.iterdir() if (link := os.readlink(fd)).startswith(kind)}


def children(pid: int) -> list[int]:
    """Those of its main thread."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until_ended(pid: int, *, timeout_s: float = 20) -> None:
    """Until there is no such process, or nobody has asked yet how it ended."""
    until = time.monotonic() + timeout_s
    while procfs.state(pid) not in ("", "Z"):
        assert time.monotonic() < until, f"process {pid} is still there"
        time.sleep(0.01)


def outputs(
    processes: Sequence[Process | subprocess.Popen[str]], *, timeout_s: float = 120
) -> list[tuple[str, str]]:
    """What each has said on stdout and stderr; none outlives this call."""
    try:
        return [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
