"""Every rule that a verdict can name has a page, and every class that one may be like."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import consensus_checker
from consensus_checker.foreign import FOREIGN_RULES
from consensus_checker.pages import names, page
from consensus_checker.resembles import CLASSES

ROOT = Path(consensus_checker.__file__).parent
SECTIONS = ["Equation", "Smallest evidence", "Looks like", "What it can't see", "What to do"]
# Names of rules are constants of the modules that make findings.
CONSTANT = re.compile(
    r"^(?:RULE|COVERAGE|STALL|UNFINISHED|MISMATCH|FROZEN|DEAD|CRASHED|CONFIG|CONTRADICTION|ONE_LOOK|BEHIND|ALL_JOINED)"
    r' = "([a-z_]+)"$',
    re.MULTILINE,
)
ANOMALIES = ("wrong_page", "mispaired")


def sources(folder: Path, words: str = "") -> dict[str, str]:
    """Module -> its text, of those that hold these words."""
    found = {path.stem: path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
    return {name: text for name, text in found.items() if words in text}


def rules() -> list[str]:
    found = {name for text in sources(ROOT).values() for name in CONSTANT.findall(text)}
    foreign = {rule.RULE for rule in FOREIGN_RULES}
    return sorted({*found, *foreign, *ANOMALIES})


@pytest.mark.parametrize("rule", rules())
def test_every_rule_has_a_page(rule: str) -> None:
    found = page(rule)
    assert found is not None
    assert found.text.startswith(f"# {rule}\n\n")


@pytest.mark.parametrize("name", names())
def test_a_page_has_all_its_parts(name: str) -> None:
    found = page(name)
    assert found is not None
    assert list(found.sections) == SECTIONS
    assert all(found.sections.values())
    assert "```" in found.sections["Smallest evidence"]
    assert found.says.endswith((".", "!"))


def test_every_class_has_a_page_and_a_title() -> None:
    assert [name for name in names() if name.startswith("HC")] == sorted(CLASSES)
    for name, title in CLASSES.items():
        found = page(name.lower())
        assert found is not None
        assert f"({title})" in found.says


def test_every_page_is_of_a_rule_or_a_class() -> None:
    assert sorted({*names()} - {*rules(), *CLASSES}) == []


def test_every_importer_and_rule_of_foreign_evidence_is_registered() -> None:
    evidence = import_module("tracer.importers.evidence")
    registered = {one.__name__.rpartition(".")[2] for one in (*evidence.WHOLE, *evidence.LINES)}
    assert sources(ROOT.parent / "tracer" / "importers", "\ndef votes(").keys() == registered
    found = {rule.__name__.rpartition(".")[2] for rule in FOREIGN_RULES}  # type: ignore[attr-defined]
    assert sources(ROOT / "rules", "\ndef find(").keys() == found


def test_what_is_no_name_has_no_page() -> None:
    assert [page(name) for name in ("nope", "../verdict", "", "a" * 100)] == [None] * 4
