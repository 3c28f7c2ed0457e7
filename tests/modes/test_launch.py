"""The launcher itself is told to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from hicache.job import Ending, Warnings
from hicache.launch import _Crew, _Process

LONG = "conversations=30,rounds=60,max-context=90000"


def test_sigterm_to_the_launcher_ends_its_ranks_and_leaves_a_summary(tmp_path: Path) -> None:
    out, temporary = tmp_path / "out", tmp_path / "tmp"
    temporary.mkdir()
    words = ["run", "--mode", "gloo", "--tp", "2", "--agentic", LONG, "--out", str(out)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    launcher = subprocess.Popen(
        [sys.executable, "-m", "cli.app", *words], env=environment, stderr=subprocess.PIPE
    )
    while not any(out.glob("rank*.jsonl")):
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=100)
    assert launcher.returncode == 143
    assert said.decode() == f"stopped by SIGTERM; the logs up to here are in {out}\n"
    assert json.loads((out / "run.json").read_text())["outcome"] == "stopped"
    assert list(temporary.iterdir()) == []
    assert not (out / ".hicache.lock").exists()


def test_a_killed_rank_is_named_although_a_peer_that_lost_it_was_heard_first() -> None:
    crew = _Crew(2, Warnings(), None)
    killed, peer = (_Process(rank, SimpleNamespace(returncode=-9)) for rank in (0, 1))  # type: ignore[arg-type]
    crew._ended(peer, Ending(1, "stopped", "lost rank 0"))
    crew._bury(killed)
    assert killed.ending == Ending(0, "crashed", "its process died, killed by SIGKILL")


def test_a_rank_that_was_ended_from_here_is_not_called_dead() -> None:
    crew = _Crew(2, Warnings(), None)
    ended = _Process(0, SimpleNamespace(returncode=-9), sent={15, 9})  # type: ignore[arg-type]
    crew._bury(ended)
    assert ended.ending == Ending(0, "stopped", "it did not end by itself")
