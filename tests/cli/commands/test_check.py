from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.commands.check import worst
from tests.cli.conftest import Hicache
from tests.support.golden import assert_golden
from tests.support.logs import write_run

FINE = {"kind": "write_backup", "node": 17, "pages": 1, "tokens": 64, "host_pages_free": 5}
FULL = {**FINE, "tokens": 0, "host_pages_free": 0}


def refused(folder: Path) -> Path:
    """Three ranks; the last one has no room for the second backup."""
    later = {"step": 1, "node": 18}
    good = [FINE, {**FINE, **later}]
    return write_run(folder, {0: good, 1: good, 2: [FINE, {**FULL, **later}]})


def test_the_exit_code_is_the_verdict(inside: Path, hicache: Hicache) -> None:
    assert [hicache("check", name).code for name in ("hung", "twin")] == [10, 0]
    assert hicache("check", "hung", "--exit-zero").code == 0


def test_the_screen_is_short_narrow_and_plain(inside: Path, hicache: Hicache) -> None:
    lines = hicache("check", "hung").out.splitlines()
    assert len(lines) <= 24
    assert [line for line in lines if len(line) > 80 or "\x1b" in line] == []


@pytest.mark.parametrize("words", [[], ["--full"], ["--quiet"]], ids=["screen", "full", "quiet"])
def test_the_screen_reads_as_agreed(
    words: list[str], tmp_path: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = hicache("check", refused(Path("last")), *words)
    assert (said.code, said.err) == (10, "")
    name = f"cli_check{'_' + words[0].strip('-') if words else ''}.txt"
    assert_golden(name, said.out)


def test_json_is_one_document_and_equal_for_equal_logs(inside: Path, hicache: Hicache) -> None:
    said = hicache("check", "hung", "--json")
    assert (said.code, said.err) == (10, "")
    document = json.loads(said.out)
    assert document["schema"] == "hicache.verdict.v1"
    assert (document["verdict"]["kind"], document["verdict"]["code"]) == ("divergence", 10)
    assert said.out == hicache("check", "hung", "--json").out


def test_of_several_folders_all_are_told_and_the_worst_code_counts(
    inside: Path, tmp_path: Path, hicache: Hicache
) -> None:
    said = hicache("check", "twin", "hung", tmp_path)
    assert said.code == 10
    assert [line for line in said.out.splitlines() if line.endswith(":")] == ["twin:", "hung:"]
    assert said.err.startswith("error: no logs in")
    document = json.loads(hicache("check", "twin", "hung", tmp_path, "--json").out)
    assert (document["schema"], document["code"]) == ("hicache.verdicts.v1", 10)
    assert ["twin", "hung", str(tmp_path)] == [entry["path"] for entry in document["verdicts"]]


def test_a_finding_is_worse_than_what_could_not_be_read() -> None:
    assert [worst(codes) for codes in ([0, 10, 3], [4, 3, 0], [0, 4], [4, 20, 10])] == [10, 3, 4, 20]


def test_a_path_with_a_space_is_quoted_in_the_commands(tmp_path: Path, hicache: Hicache) -> None:
    said = hicache("check", refused(tmp_path / "my run"), "--json")
    commands = [step["command"] for step in json.loads(said.out)["next"]]
    assert [command.startswith(f"hicache query '{tmp_path / 'my run'}' ") for command in commands] == [True]


def test_a_folder_of_runs_suggests_one_of_them(inside: Path, hicache: Hicache) -> None:
    said = hicache("check", ".")
    assert (said.code, said.out) == (3, "")
    assert said.err == (
        "error: no logs in ., but in folders below it\n"
        "  expected  the folder of one run: hung, twin\n"
        "  try       hicache check hung\n"
    )


def test_the_summary_of_a_run_is_not_a_log(inside: Path, hicache: Hicache) -> None:
    said = hicache("check", "twin/run.json")
    assert (said.code, said.err) == (
        3,
        "error: twin/run.json is a run's summary; give its folder\n  try       hicache check twin\n",
    )


def test_all_verdicts_are_shown_beside_a_folder_that_cannot_be_read(inside: Path, hicache: Hicache) -> None:
    said = hicache("check", "twin", "nowhere", "hung")
    assert (said.code, said.err.count("error: ")) == (10, 1)
    assert [line for line in said.out.splitlines() if line.endswith(":")] == ["twin:", "hung:"]
