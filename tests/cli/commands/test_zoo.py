from __future__ import annotations

import json
from pathlib import Path

from hicache.zoo import SCENARIOS
from tests.cli.conftest import Hicache


def test_list_tells_every_scenario(hicache: Hicache) -> None:
    said = hicache("zoo", "list")
    assert [line for line in said.out.splitlines() if len(line) > 80] == []
    assert all(name in said.out for name in SCENARIOS)


def test_list_as_json_has_what_a_program_needs(hicache: Hicache) -> None:
    document = json.loads(hicache("zoo", "list", "--json").out)
    assert sorted(SCENARIOS) == [entry["name"] for entry in document]
    assert {"name", "story", "resembles", "source", "bug", "fact"} == set(document[0])


def test_a_twin_has_the_fault_and_not_the_bug(runs: Path) -> None:
    hung, twin = (json.loads((runs / name / "run.json").read_text()) for name in ("hung", "twin"))
    assert (len(hung["bugs"]), len(twin["bugs"])) == (1, 0)
    assert hung["faults"] == twin["faults"]


def test_an_unknown_scenario_is_code_2_and_names_those_there_are(tmp_path: Path, hicache: Hicache) -> None:
    said = hicache("zoo", "run", "nope", "--out", tmp_path / "out")
    assert (said.code, said.out) == (2, "")
    assert all(name in said.err for name in SCENARIOS)
    assert not (tmp_path / "out").exists()


def test_a_plugin_can_stand_in_for_the_bug(tmp_path: Path, hicache: Hicache) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text("def wire(parts):\n    pass\n")
    said = hicache(
        *("zoo", "run", "skip_collective_when_empty", "--twin", "--plugin", plugin, "--json"),
        *("--out", tmp_path / "out"),
    )
    document = json.loads(said.out)
    assert (0, "completed", [f"plugin {plugin}"]) == (said.code, document["outcome"], document["bugs"])


def test_a_negative_seed_names_the_option(tmp_path: Path, hicache: Hicache) -> None:
    said = hicache("zoo", "run", "skip_collective_when_empty", "--seed", "-5", "--out", tmp_path / "out")
    assert (said.code, "--seed" in said.err) == (2, True)
    assert not (tmp_path / "out").exists()


def test_the_help_of_the_scenarios_is_not_cut(hicache: Hicache) -> None:
    assert "..." not in hicache("zoo", "--help").out.partition("Commands:")[2]
