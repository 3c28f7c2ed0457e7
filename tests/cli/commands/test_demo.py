"""The demo is the first thing anybody sees: it must come out, and what it shows must be true."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.cli.conftest import Hicache


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands(screen: str) -> list[list[str]]:
    """The commands that a screen shows after `$`, up to the empty line that ends each."""
    return [
        shlex.split(part.split("\n\n")[0].replace("\\\n", " "))[1:]
        for part in ("\n" + screen).split("\n$ ")[1:]
    ]


def test_the_demo_names_the_disturbed_rank_and_clears_the_twin(workplace: Path, hicache: Hicache) -> None:
    said = hicache("demo", "--json")
    assert (said.code, said.err) == (0, "")
    document = json.loads(said.out)
    assert (document["schema"], document["is_expected"]) == ("hicache.demo.v1", True)
    assert (document["run"]["outcome"], document["twin_run"]["outcome"]) == ("hung", "completed")
    assert tuple(document[name]["verdict"]["kind"] for name in ("verdict", "twin_verdict")) == (
        "divergence",
        "consistent",
    )
    assert document["disturbed_ranks"] == document["verdict"]["ranks"]["culprit"]
    assert document["verdict"]["consequence"]["kind"] == "stall"
    (fault,) = json.loads((workplace / "runs/demo/run.json").read_text())["faults"]
    assert f"rank={document['disturbed_ranks'][0]}," in fault


def test_the_demo_tells_the_story_on_a_plain_narrow_screen(workplace: Path, hicache: Hicache) -> None:
    said = hicache("demo")
    assert (said.code, said.err) == (0, "")
    assert [line for line in said.out.splitlines() if len(line) > 80 or "\x1b" in line] == []
    order = [
        "HUNG",
        "Where do the ranks stand?",
        "DIVERGED",
        "host_pages_free was 0",
        "CONSISTENT",
        "EXPECTED",
    ]
    assert sorted(order, key=said.out.index) == order


def test_every_command_of_the_demo_shows_what_the_demo_shows(workplace: Path, hicache: Hicache) -> None:
    screen = hicache("demo").out
    typed = commands(screen)
    assert [words[0] for words in typed] == ["zoo", "query", "check", "zoo", "check", "hits", "hits"]
    for words in typed:
        again = [*words, "--overwrite"] if words[0] == "zoo" else words
        said = hicache(*again)
        assert said.code in (0, 10)
        assert said.out.splitlines()[-1 if words[0] != "zoo" else 0] in screen


def test_a_second_demo_replaces_the_first_and_nothing_else(workplace: Path, hicache: Hicache) -> None:
    assert hicache("demo", "--json").code == 0
    (workplace / "runs" / "demo" / "notes.txt").write_text("mine")
    assert hicache("demo", "--json").code == 0
    assert (workplace / "runs" / "demo" / "notes.txt").read_text() == "mine"
    assert sorted(file.name for file in (workplace / "runs").iterdir()) == ["demo", "demo-twin"]


def test_a_demo_does_not_replace_a_run_elsewhere_unless_told_to(workplace: Path, hicache: Hicache) -> None:
    assert hicache("demo", "--json", "--out", "here").code == 0
    said = hicache("demo", "--json", "--out", "here")
    assert said.code == 2
    assert "here holds a run already" in said.err
    assert hicache("demo", "--json", "--out", "here", "--overwrite").code == 0


def test_a_verdict_that_did_not_come_is_an_error(
    workplace: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.commands.demo.faults_of", lambda out: ["alloc_fail:rank=0,pool=host,nth=1"])
    said = hicache("demo")
    assert said.code == 1
    assert "UNEXPECTED  rank 0 was disturbed; the verdict is divergence and names rank 3" in said.out


@pytest.mark.parametrize("name", [".", "/", "x" * 253])
def test_a_demo_without_room_for_its_twins_name_is_a_usage_error(
    name: str, workplace: Path, hicache: Hicache
) -> None:
    said = hicache("demo", "--out", name)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error: --out")
    assert list(workplace.iterdir()) == []


def test_the_readme_shows_what_the_demo_prints(inside: Path, hicache: Hicache) -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    shown = readme.split("```\n")[1]
    assert hicache("check", "hung").out.startswith(shown)
