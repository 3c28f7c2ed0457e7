"""Real gloo ranks that stop in twelve ways: who it was, by their own logs and by others' evidence alone."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Hicache
from tests.support.processes import ROOT
from tests.support.stalls import CASES, DECORATED, HEALTHY, Case

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("processes"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]

MODULE = "tests.support.stalls"
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
# What may be left of others' evidence: whatever it is, no rank may be named that is not the odd one.
PARTS: dict[str, Callable[[Path, Case], bool]] = {
    "flight_recorder": lambda path, case: path.name.startswith("comm_lib"),
    "without_the_odd_rank": lambda path, case: not is_of(case.odd, path),
    "without_rank_0": lambda path, case: not is_of(0, path),
}


def is_of(rank: int, path: Path) -> bool:
    return f"rank_{rank}" in path.name


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all cases, one a folder, and a snapshot of the ranks of one; not to be changed."""
    folder = tmp_path_factory.mktemp("stalls")
    said = subprocess.run(
        [sys.executable, "-m", MODULE, str(folder), "--snapshot", "stopped"],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    return folder


def diagnosed(hicache: Hicache, *paths: Path) -> dict[str, Any]:
    said = hicache("diagnose", *paths, "--json")
    document: dict[str, Any] = json.loads(said.out)
    assert said.code == document["verdict"]["code"]
    return document


@pytest.mark.parametrize("case", [*CASES.values(), DECORATED], ids=lambda case: case.name)
def test_with_its_own_log_the_rank_and_the_class_are_right(
    case: Case, evidence: Path, hicache: Hicache
) -> None:
    found = diagnosed(hicache, evidence / case.name / "own")
    assert (case.code, [case.odd]) == (found["verdict"]["code"], found["ranks"]["culprit"]), found


@EVERY
def test_with_all_there_is_the_rank_is_right(case: Case, evidence: Path, hicache: Hicache) -> None:
    """Its class may be the one that only others can see: a log does not tell why a rank says no more."""
    found = diagnosed(hicache, evidence / case.name / "own", evidence / case.name / "foreign")
    assert found["ranks"]["culprit"] == [case.odd], found
    assert found["verdict"]["code"] in (case.code, *case.classes), found


@EVERY
def test_with_others_evidence_alone_the_class_is_right_or_open_and_no_other_rank_is_named(
    case: Case, evidence: Path, hicache: Hicache
) -> None:
    found = diagnosed(hicache, evidence / case.name / "foreign")
    verdict, culprit = found["verdict"], found["ranks"]["culprit"]
    assert culprit in ([], [case.odd]), found
    assert verdict["confidence"]["level"] == "undetermined" or verdict["code"] in case.classes, found


def test_of_ranks_that_go_on_nobody_is_named(evidence: Path, hicache: Hicache) -> None:
    place = evidence / HEALTHY.name
    for part in (place / "own", place / "foreign", place):
        found = diagnosed(hicache, part)
        assert found["verdict"]["code"] in HEALTHY.classes, found
        assert (found["ranks"]["culprit"], found["ranks"]["victims"]) == ([], []), found
    assert diagnosed(hicache, place / "own")["verdict"]["code"] == HEALTHY.code


@pytest.mark.parametrize("part", PARTS)
def test_with_a_part_of_others_evidence_no_other_rank_is_named_and_no_class_is_sure_that_is_wrong(
    part: str, evidence: Path, tmp_path: Path, hicache: Hicache
) -> None:
    for name, case in CASES.items():
        own = evidence / name / "foreign"
        for path in own.rglob("*"):
            if path.is_file() and PARTS[part](path, case):
                target = tmp_path / name / path.relative_to(own)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        found = diagnosed(hicache, tmp_path / name)
        verdict = found["verdict"]
        assert found["ranks"]["culprit"] in ([], [case.odd]), (name, found)
        is_open = verdict["code"] in (4, 20) or verdict["confidence"]["level"] in ("low", "undetermined")
        assert is_open or verdict["code"] in case.classes, (name, found)


def test_a_snapshot_of_ranks_that_stand_names_the_one_that_is_stopped(
    evidence: Path, hicache: Hicache
) -> None:
    place = evidence / "stopped" / "snapshot"
    processes = json.loads((place / "snapshot.json").read_text())["processes"]
    assert [one["state"] for one in processes] == ["S", "S", "T"]
    for one in processes[:2]:
        assert len(one["files"]["stacks"]) == len(one["files"]["flight_recorder"]) == 2
    found = diagnosed(hicache, place)
    assert (found["verdict"]["code"], found["ranks"]["culprit"]) == (14, [2]), found
