"""The pages of rules and of classes of bugs, as they are shipped: `hicache explain` shows them.

One file a rule in `rule_pages`, named as the rule; one file a class of the bug corpus, named `HC02`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files

FOLDER, SUFFIX = "rule_pages", ".md"
CLASS = re.compile(r"HC(\d{1,2})", re.IGNORECASE)
NAME = re.compile(r"[A-Za-z0-9_]{1,64}")


@dataclass(frozen=True, slots=True)
class Page:
    """A page.

    Attributes:
        says: its first sentence or two: what it means when the rule fires.
        sections: heading -> text below it.
    """

    name: str
    text: str
    says: str
    sections: dict[str, str]


def names() -> list[str]:
    """Every page: rules by name, then classes."""
    found = [
        entry.name.removesuffix(SUFFIX)
        for entry in (files("consensus_checker") / FOLDER).iterdir()
        if entry.name.endswith(SUFFIX)
    ]
    return sorted(found, key=lambda name: (CLASS.fullmatch(name) is not None, name))


def page(name: str) -> Page | None:
    """The page of a rule or class, also as a person types it (`hc2`, `Dead`); None where there is none."""
    number = CLASS.fullmatch(name)
    wanted = f"HC{int(number[1]):02d}" if number else name.lower()
    if not NAME.fullmatch(wanted):
        return None
    place = files("consensus_checker") / FOLDER / f"{wanted}{SUFFIX}"
    if not place.is_file():
        return None
    text = place.read_text(encoding="utf-8")
    head, *rest = re.split(r"^## ", text, flags=re.MULTILINE)
    says = " ".join(head.split("\n", 1)[1].split()) if "\n" in head else ""
    sections = {}
    for part in rest:
        title, _, body = part.partition("\n")
        sections[title.strip()] = body.strip("\n")
    return Page(wanted, text, says, sections)


def first_sentence(name: str) -> str:
    """What a page says first."""
    found = page(name)
    return found.says.split(". ")[0].rstrip(".") if found is not None else ""
