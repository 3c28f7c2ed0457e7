"""What comes of a verdict in the process that is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from consensus_checker.live_policy import Case, _run, act, known_policy
from consensus_checker.live_posts import Published
from tests.support.live import Rank, started, stop, until

ROOT = Path(__file__).parents[2]
PUBLISHED = Published(1, 0, "DIVERGED", b"{}", True, True, 1_700_000_000_000_000_000)


@pytest.fixture
def running() -> Iterator[list[Rank]]:
    ranks: list[Rank] = []
    yield ranks
    stop(ranks, "stopped")


def parted(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.calls(0, 20, backup=(1, 5 + (rank.rank == 1), 5, 1))
    assert until(lambda: all(rank.watcher.verdict is not None for rank in ranks))


def test_an_unknown_policy_is_log_with_one_warning_that_names_the_others() -> None:
    told: list[str] = []
    assert known_policy("explode", told.append) == "log"
    assert told == ["unknown policy 'explode': log it is; allowed are log, snapshot, command, abort"]
    assert known_policy("abort", told.append) == "abort" and len(told) == 1


def test_a_snapshot_has_the_verdict_the_stacks_of_each_rank_and_its_files(
    tmp_path: Path, running: list[Rank]
) -> None:
    running += started(3, tmp_path, policy="snapshot")
    parted(running)
    names = [f"rank{rank:04d}.stacks.txt" for rank in range(3)]
    assert until(lambda: all((tmp_path / name).is_file() for name in names))
    document = json.loads((tmp_path / "verdict.json").read_text())
    assert (document["schema"], document["ranks"]["culprit"]) == ("hicache.verdict.v1", [1])
    assert "live.py" in (tmp_path / names[2]).read_text()
    (frozen,) = tmp_path.glob("frozen-*")
    kept = [f"rank{rank:04d}.scheduler.000.jsonl" for rank in range(3)]
    assert until(lambda: set(kept) <= {path.name for path in frozen.iterdir()})


def test_the_command_is_run_once_with_the_verdict_on_its_input_and_in_a_file(
    tmp_path: Path, running: list[Rank]
) -> None:
    out = tmp_path / "out"
    script = tmp_path / "page me.py"
    script.write_text(
        "import os, sys, json\n"
        f"file = open({str(out)!r}, 'a')\n"
        "given = json.load(sys.stdin)\n"
        "same = json.load(open(os.environ['HICACHE_VERDICT'])) == given\n"
        "file.write(f\"{sys.argv[1:]} {given['verdict']['kind']} {same}\\n\")\n"
    )
    command = f"{sys.executable} '{script}' 'a b' $HOME"
    running += started(3, tmp_path / "logs", policy="command", command=command)
    parted(running)
    assert until(lambda: out.is_file() and out.read_text().endswith("\n"))
    # No shell: what looks like a variable is a word.
    assert out.read_text() == "['a b', '$HOME'] divergence True\n"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("", "policy command: there is none; set HICACHE_CHECKER_COMMAND"),
        ("'open", 'policy command: "\'open" is no command: No closing quotation'),
        ("/no/such/program", "policy command: /no/such/program: No such file or directory"),
        ("false", "policy command: false ended with 1"),
    ],
)
def test_a_command_that_can_t_be_run_is_told(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HICACHE_CHECKER_COMMAND", raising=False)
    told: list[str] = []
    _run(Case(PUBLISHED, "{}", 0, tmp_path, True), command, told.append)
    assert told == [said]


def test_only_the_process_that_found_it_runs_the_command(tmp_path: Path) -> None:
    told: list[str] = []
    act("command", Case(PUBLISHED, "{}", 1, tmp_path, False), "false", told.append)
    assert told == [] and not list(tmp_path.iterdir())


def test_a_snapshot_without_a_folder_says_what_to_set() -> None:
    told: list[str] = []
    act("snapshot", Case(PUBLISHED, "{}", 1, None, False), None, told.append)
    assert told == ["policy snapshot: there is no folder to keep it in; set HICACHE_TRACE_DIR"]


ABORT = """
import sys, time
from tests.support.live import started, until
ranks = started({size}, None, policy={policy!r}, silence_s=0.2)
for rank in ranks:
    rank.calls(0, 50)
assert until(lambda: ranks[0].watcher.compared == 50)
{act}
print("goes on")
"""
PART = """
for rank in ranks:
    rank.backup(1, 5 + (rank.rank == 1), 5, 1)
time.sleep(20)
"""
NOTHING_WRONG = """
for rank in ranks:
    rank.watcher.stop("completed")
"""


@pytest.mark.parametrize(("policy", "act_code", "code"), [("abort", PART, 1), ("abort", NOTHING_WRONG, 0)])
def test_abort_ends_the_process_with_1_for_a_divergence_and_for_nothing_else(
    policy: str, act_code: str, code: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ABORT.format(size=3, policy=policy, act=act_code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ),
    )
    assert (done.returncode, done.stdout) == (code, "" if code else "goes on\n"), done.stderr
