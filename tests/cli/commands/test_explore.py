"""`hicache explore`: a schedule that brings ranks apart, made as dull as it can be, and a test of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Hicache

WORLD = ["--tp", "2", "--page-size", "16", "--device-pages", "60", "--host-pages", "100"]
WORLD += ["--agentic", "conversations=3,rounds=3,max-context=600,output=8"]


@pytest.fixture
def plan(hicache: Hicache, tmp_path: Path) -> Path:
    """Ranks that stay away from a reduction when their own copies are late; by chance they are."""
    words = ["run", *WORLD, "--bug", "skip_collective_when_empty", "--out", tmp_path / "none"]
    assert hicache(*words, "--plan-out", tmp_path / "plan.json").code == 0
    return tmp_path / "plan.json"


def test_a_deadlock_shrinks_to_the_one_copy_that_was_late(hicache: Hicache, plan: Path) -> None:
    test = plan.with_name("test_found.py")
    said = hicache("explore", plan, "--json", "--test", test)
    document = json.loads(said.out)
    assert said.code == 10
    assert document["broken"] == "divergence agreement event_round"
    assert document["choices"] == 1
    assert document["verdict"]["consequence"]["kind"] == "stall"
    # The same run again, from the command line.
    out = plan.with_name("again")
    words = ["run", *WORLD, "--bug", "skip_collective_when_empty", "--out", out, "--quiet"]
    hicache(*words, "--schedule", document["schedule"])
    assert json.loads(hicache("check", out, "--json").out)["first_divergence"]["call"] == "event_round"
    # And as a test, which fails as long as the bug is there.
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", plan.parent, test],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ran.returncode, "they part at call" in ran.stdout) == (1, True), ran.stdout


def test_one_preemption_is_enough_and_a_right_run_has_none(hicache: Hicache, plan: Path) -> None:
    said = hicache("explore", plan, "--preemptions", 1, "--no-shrink")
    assert said.code == 10
    assert "  again   --schedule at:" in said.out
    right = plan.with_name("right.json")
    assert hicache("run", *WORLD, "--out", plan.with_name("x"), "--plan-out", right).code == 0
    said = hicache("explore", right, "--seeds", 3)
    assert (said.code, said.out) == (0, "CONSISTENT  in all 3 runs of right.json\n")


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["no/such/plan.json"], 3, "error: no/such/plan.json: No such file or directory"),
        (["skip_collective_when_empty", "--seeds", "0"], 2, "error: invalid value"),
    ],
)
def test_what_can_not_be_explored_is_said(hicache: Hicache, words: list[str], code: int, told: str) -> None:
    said = hicache("explore", *words)
    assert (said.code, said.out) == (code, "")
    assert said.err.startswith(told)


def test_a_file_that_is_no_plan_and_a_test_that_is_there_are_refused(
    hicache: Hicache, tmp_path: Path, plan: Path
) -> None:
    (tmp_path / "x.json").write_text('{"config": 3}')
    assert hicache("explore", tmp_path / "x.json").code == 2
    (tmp_path / "test_x.py").write_text("")
    assert hicache("explore", plan, "--test", tmp_path / "test_x.py").code == 2


def test_a_screen_keeps_to_80_columns(hicache: Hicache, plan: Path) -> None:
    said = hicache("explore", plan, "--preemptions", 1, "--no-shrink")
    assert max(map(len, said.out.splitlines())) <= 80
    assert "  scope dp0" in said.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--runs", 5], "error: --runs changes nothing here"),
        (["--seeds", 5, "--preemptions", 1], "error: --seeds changes nothing here"),
        (["--seed", 5], "error: --seed changes nothing here"),
        (["--test", "no/such/test_x.py"], "error: --test no/such/test_x.py: no folder no/such"),
    ],
)
def test_options_that_change_nothing_are_refused(
    hicache: Hicache, plan: Path, words: list[object], told: str
) -> None:
    said = hicache("explore", plan, *words)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(told)
