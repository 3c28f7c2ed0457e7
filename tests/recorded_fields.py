"""What docs/trust.md has from elsewhere: `python -m tests.recorded_fields` brings it up to date.

Fields are those that the plugin declares; costs are the table of docs/sglang.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from consensus_checker import sglang_kinds
from tracer.record import Kind

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, MEASURED = DOCS / "trust.md", DOCS / "sglang.md"
COSTS = re.compile(r"^## What it costs\n.*?\n(\|.*?\n)\n", re.MULTILINE | re.DOTALL)


def kinds() -> Iterator[Kind]:
    for value in vars(sglang_kinds).values():
        if isinstance(value, Kind):
            yield value


def fields() -> str:
    """A row a kind, by name; fields in the order of the record."""
    lines = ["| kind | fields |", "| --- | --- |"]
    for kind in sorted(kinds(), key=lambda one: one.name):
        names = [*kind.compared, *kind.local, *kind.info]
        lines.append(f"| `{kind.name}` | {' '.join(f'`{name}`' for name in names)} |")
    return "\n".join(lines) + "\n"


def costs() -> str:
    found = COSTS.search(MEASURED.read_text(encoding="utf-8"))
    assert found, f"{MEASURED} has no table of costs"
    return found[1]


def brought_up_to_date(text: str) -> str:
    """The page with both tables as they are now."""
    for name, table in (("fields", fields()), ("costs", costs())):
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, behind = text.split(begin)[0], text.split(end)[1]
        text = before + begin + table + end + behind
    return text


if __name__ == "__main__":
    PAGE.write_text(brought_up_to_date(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
