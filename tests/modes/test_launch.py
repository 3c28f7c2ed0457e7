"""The launcher itself is told to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

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
    _, said = launcher.communicate(timeout=30)
    assert launcher.returncode == 143
    assert said.decode() == f"stopped by SIGTERM; the logs up to here are in {out}\n"
    assert json.loads((out / "run.json").read_text())["outcome"] == "stopped"
    assert list(temporary.iterdir()) == []
    assert not (out / ".hicache.lock").exists()
