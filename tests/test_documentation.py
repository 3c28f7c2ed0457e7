"""What can be typed is written down."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from cli.app import app
from consensus_checker.verdict import EXIT_CODES
from hicache.sim.bugs import BUGS
from hicache.sim.faults import VERBS
from hicache.zoo import SCENARIOS

ROOT = Path(__file__).parent.parent
COMMANDS = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")


def options() -> list[str]:
    found: list[str] = []
    stack = [typer.main.get_command(app)]
    while stack:
        command = stack.pop()
        stack.extend(getattr(command, "commands", {}).values())
        for parameter in command.params:
            found += [name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("--")]
    return sorted(set(found) - {"--help", "--version"})


@pytest.mark.parametrize("option", options())
def test_every_option_is_documented(option: str) -> None:
    assert re.search(rf"{option}\b", COMMANDS)


@pytest.mark.parametrize("name", [*SCENARIOS, *BUGS, *VERBS])
def test_every_scenario_bug_and_fault_is_documented(name: str) -> None:
    assert f"`{name}" in COMMANDS


def test_every_exit_code_is_documented() -> None:
    for code in EXIT_CODES:
        assert re.search(rf"\b{code}\b", COMMANDS), code


def test_every_file_that_a_page_links_to_exists() -> None:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page}: {target}"
