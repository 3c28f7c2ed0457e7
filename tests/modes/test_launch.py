"""The launcher itself is told to end."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hicache.config import Config
from hicache.errors import ConfigError
from hicache.forks import LOST
from hicache.job import Ending, PlanSpec, Warnings
from hicache.launch import _Crew, _Process, run_gloo
from hicache.topology import Topology
from tests.support.processes import children, wait_until_ended
from tracer.blocks import last_line

# Not `importorskip`: every worker of a test run would import torch for it.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

LONG = "conversations=30,rounds=60,max-context=90000"


@pytest.mark.parametrize(
    ("number", "code", "said", "outcome"),
    [
        (signal.SIGTERM, 143, "stopped by SIGTERM; the logs up to here are in {out}", "stopped"),
        # Ctrl-C: to all processes of the terminal's group, of which its ranks are none.
        (signal.SIGINT, 130, "interrupted; the logs up to here are in {out}", "interrupted"),
    ],
    ids=["sigterm", "ctrl_c"],
)
def test_a_signal_to_the_launcher_ends_its_ranks_and_leaves_a_summary(
    number: signal.Signals, code: int, said: str, outcome: str, tmp_path: Path
) -> None:
    """Where every warning is an error, in the ranks as well."""
    out, temporary = tmp_path / "out", tmp_path / "tmp"
    temporary.mkdir()
    words = ["run", "--mode", "gloo", "--tp", "2", "--agentic", LONG, "--out", str(out)]
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONWARNINGS": "error"}
    launcher = subprocess.Popen(
        [sys.executable, "-m", "cli.app", *words],
        env=environment,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    while len(list(out.glob("rank*.scheduler.*.jsonl"))) < 2:
        assert launcher.poll() is None
        time.sleep(0.05)
    (server,) = children(launcher.pid)
    ranks = children(server)
    os.killpg(launcher.pid, number)
    _, told = launcher.communicate(timeout=100)
    assert (launcher.returncode, told.decode()) == (code, said.format(out=out) + "\n")
    assert json.loads((out / "run.json").read_text())["outcome"] == outcome
    # They were told by the launcher, and had the time to close them.
    assert [closed(out, rank) for rank in range(2)] == ["stopped"] * 2
    for pid in (*ranks, server):
        wait_until_ended(pid)
    assert list(temporary.iterdir()) == []
    assert not (out / ".hicache.lock").exists()


def closed(out: Path, rank: int) -> str:
    """How a rank's log says that it ended."""
    last = last_line(max(out.glob(f"rank{rank:04d}.scheduler.*.jsonl")), 1 << 16)
    outcome: str = json.loads(last)["outcome"]
    return outcome


def test_ctrl_c_twice_leaves_a_summary_all_the_same(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["run", "--mode", "gloo", "--tp", "2", "--agentic", LONG, "--out", str(out)]
    launcher = subprocess.Popen([sys.executable, "-m", "cli.app", *words], stderr=subprocess.PIPE)
    while not any(out.glob("rank*.jsonl")):
        assert launcher.poll() is None
        time.sleep(0.05)
    for _ in range(2):
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.1)
    _, said = launcher.communicate(timeout=100)
    # The second one may come when all is done and the interpreter is ending.
    assert launcher.returncode in (130, -signal.SIGINT), said
    assert json.loads((out / "run.json").read_text())["outcome"] == "interrupted"


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


def test_a_rank_that_went_with_the_process_that_forked_it_is_told_so() -> None:
    crew = _Crew(1, Warnings(), None)
    process = _Process(0, SimpleNamespace(returncode=LOST))  # type: ignore[arg-type]
    crew._bury(process)
    assert process.ending == Ending(0, "crashed", "its process died, and the one that forked it")


@pytest.mark.parametrize(
    ("torch", "expected"),
    [
        ("raise ImportError('no libgomp')", r"needs torch, which can't be imported \(no libgomp\)"),
        (
            "import os; print('SIGILL', flush=True); os._exit(132)",
            "process 0 of 2 can't be started: the process that forks them died, exit code 132: SIGILL",
        ),
    ],
    ids=["can't be imported", "dies at import"],
)
def test_a_torch_that_does_not_work_is_one_error(
    torch: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(torch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    spec = PlanSpec(Config(topology=Topology(tp=2)), agentic="conversations=1,rounds=1")
    with pytest.raises(ConfigError, match=expected):
        run_gloo(spec, spec.plan(), out=tmp_path / "out")
