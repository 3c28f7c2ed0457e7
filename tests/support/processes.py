"""Processes of a test: started with what torchrun sets, and read when they have ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_ranks(count: int, module: str, *words: str) -> list[subprocess.Popen[str]]:
    """`python -m module` once a rank."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=ROOT,
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def outputs(processes: Sequence[subprocess.Popen[str]], *, timeout_s: float = 120) -> list[tuple[str, str]]:
    """What each has said on stdout and stderr; none outlives this call."""
    try:
        return [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
