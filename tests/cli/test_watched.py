"""Runs with a watcher beside each rank: switched by the environment, told once, else silent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SWITCH = "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER"
WORLD = ["--tp", "3", "--agentic", "conversations=8,rounds=4,max-context=8192,output=40"]
WORLD += ["--device-pages", "300", "--host-pages", "600"]
BUG = ["--bug", "local_host_room_decides_backup", "--fault", "alloc_fail:rank=2,pool=host,nth=5"]


def run(out: Path, *words: str, switch: str = "1", **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli.app", "run", "--out", str(out), *words]
    env = {**os.environ, SWITCH: switch, **environment}
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def verdict(out: Path) -> dict[str, object]:
    words = [sys.executable, "-m", "cli.app", "check", str(out), "--json"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    document: dict[str, object] = json.loads(said.stdout)
    return document


def calls(text: str) -> Sequence[str]:
    return [line for line in text.splitlines() if line.startswith(">")]


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("mode", ["threads", "gloo"])
def test_a_divergence_is_told_once_while_the_run_goes_on(tmp_path: Path, mode: str) -> None:
    said = run(tmp_path / "r", "--mode", mode, *WORLD, *BUG)
    assert said.returncode == 0
    assert said.stdout.startswith("COMPLETED")
    assert said.stderr.count("DIVERGED  scope dp0: rank 2 left the majority (2 of 3)") == 1, said.stderr
    # The same call that the whole logs name, with its fact.
    first = verdict(tmp_path / "r")["first_divergence"]
    assert isinstance(first, dict)
    (marked,) = calls(said.stderr)
    assert marked.startswith(f"> {first['index']} ")
    assert "host_pages_free was 0 on rank 2" in said.stderr


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("mode", ["threads", "gloo"])
def test_a_healthy_run_is_watched_without_a_word(tmp_path: Path, mode: str) -> None:
    said = run(tmp_path / "r", "--mode", mode, *WORLD, "--hicache-storage-backend", "memory")
    assert (said.returncode, said.stderr) == (0, "")


def test_without_the_switch_nothing_is_watched(tmp_path: Path) -> None:
    said = run(tmp_path / "r", "--mode", "threads", *WORLD, *BUG, switch="0")
    assert (said.returncode, said.stderr) == (0, "")


def test_the_simulator_is_not_watched_and_a_run_without_logs_says_so(tmp_path: Path) -> None:
    assert run(tmp_path / "sim", *WORLD, *BUG).stderr == ""
    said = run(tmp_path / "off", "--mode", "threads", "--trace", "off", *WORLD)
    assert said.stderr == "nothing is watched with --trace off: --trace ring costs least\n"


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_the_policy_abort_ends_the_ranks(tmp_path: Path) -> None:
    said = run(tmp_path / "r", "--mode", "gloo", *WORLD, *BUG, HICACHE_CHECKER_POLICY="abort")
    assert said.stdout.startswith("CRASHED")
    assert "exit code 1" in said.stdout
    assert said.stderr.count("DIVERGED") == 1
    assert verdict(tmp_path / "r")["ranks"]["culprit"] == [2]  # type: ignore[index]
