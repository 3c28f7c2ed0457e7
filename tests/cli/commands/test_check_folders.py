from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.conftest import Hicache


@pytest.fixture
def place(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo's run in `hung`, and a working directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs / "hung", "hung")
    return tmp_path


def host(name: str, ranks: Sequence[int], source: str = "hung") -> str:
    """A folder with the files of some ranks."""
    Path(name).mkdir()
    for rank in ranks:
        for file in Path(source).glob(f"rank{rank:04d}.*"):
            shutil.copy(file, name)
    return name


def test_a_run_in_two_folders_is_the_same_verdict_as_in_one(place: Path, hicache: Hicache) -> None:
    hosts = host("host0", (0, 1)), host("host1", (2, 3))
    one, two = hicache("check", "hung", "--json"), hicache("check", *hosts, "--json")
    assert (one.code, two.code, two.err) == (10, 10, "")
    culprit_place = "host1" if json.loads(one.out)["ranks"]["culprit"] == [3] else "host0"
    assert two.out == one.out.replace(" hung", f" {culprit_place}")


def test_folders_of_one_run_have_one_screen_and_the_order_does_not_matter(
    place: Path, hicache: Hicache
) -> None:
    hosts = host("host0", (0, 1)), host("host1", (2, 3))
    said = hicache("check", *hosts)
    assert said.out.splitlines()[0].startswith("DIVERGED")
    assert "coverage 4/4" in said.out
    assert said.out == hicache("check", *reversed(hosts)).out


def test_commands_name_the_folder_with_the_rank_in_question(place: Path, hicache: Hicache) -> None:
    document = json.loads(hicache("check", host("host0", (0, 1, 2)), host("the other", (3,)), "--json").out)
    assert document["ranks"]["culprit"] == [3]
    assert [step["command"].split(' "')[0] for step in document["next"]] == [
        "hicache query 'the other'",
        "hicache hits 'the other'",
    ]


def test_a_copy_of_a_ranks_log_counts_once_and_that_is_said(place: Path, hicache: Hicache) -> None:
    hosts = host("host0", (0, 1, 2)), host("host1", (2, 3))
    said = hicache("check", *hosts)
    assert (said.code, "coverage 4/4" in said.out) == (10, True)
    assert said.err == "note: rank 2: the same bytes in host0 and host1, counted once\n"


def test_other_bytes_of_one_rank_are_never_brought_together(place: Path, hicache: Hicache) -> None:
    hosts = host("host0", (0, 1, 2)), host("host1", (2, 3))
    (last,) = sorted(Path("host1").glob("rank0002.scheduler.*.jsonl"))[-1:]
    last.write_bytes(last.read_bytes()[:-40])
    document = json.loads(hicache("check", *hosts, "--json").out)
    assert [entry["path"] for entry in document["verdicts"]] == ["host0", "host1"]
    told = "rank 2 of this run: other bytes in host0 and host1, so these are judged apart"
    assert [told in entry["coverage"]["doubts"] for entry in document["verdicts"]] == [True, True]


def test_different_runs_stay_two_verdicts(runs: Path, place: Path, hicache: Hicache) -> None:
    document = json.loads(hicache("check", runs / "twin", "hung", "--json").out)
    assert [entry["verdict"]["kind"] for entry in document["verdicts"]] == ["consistent", "divergence"]


def test_two_runs_over_two_folders_each_are_two_verdicts(runs: Path, place: Path, hicache: Hicache) -> None:
    shutil.copytree(runs / "twin", "twin")
    paths = [
        host(f"{run}{number}", ranks, run)
        for number, ranks in ((0, (0, 1)), (1, (2, 3)))
        for run in ("twin", "hung")
    ]
    said = hicache("check", *paths)
    assert [line for line in said.out.splitlines() if line.endswith(":")] == [
        "twin0 + twin1:",
        "hung0 + hung1:",
    ]
    document = json.loads(hicache("check", *paths, "--json").out)
    assert [entry["paths"] for entry in document["verdicts"]] == [["twin0", "twin1"], ["hung0", "hung1"]]
    assert [entry["verdict"]["code"] for entry in document["verdicts"]] == [0, 10]


def test_a_rank_that_is_in_no_folder_is_missing(place: Path, hicache: Hicache) -> None:
    document = json.loads(hicache("check", host("host0", (0, 1)), host("host1", (3,)), "--json").out)
    assert (document["coverage"]["ranks_seen"], document["coverage"]["missing"]) == (3, [2])


def test_a_folder_without_logs_does_not_hide_the_others(place: Path, hicache: Hicache) -> None:
    Path("empty").mkdir()
    said = hicache("check", host("host0", (0, 1)), "empty", host("host1", (2, 3)))
    assert (said.code, said.err.splitlines()[0]) == (10, "error: no logs in empty")
    assert said.out.splitlines()[0] == "host0 + host1:"
