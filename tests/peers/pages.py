"""Tables that a run keeps in a page of docs/, between two marks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "sglang.md"
FULL_PAGE = DOCS / "sglang_matrix.md"


def kept(
    name: str, head: Sequence[str], rows: Sequence[Sequence[str]], below: str, page: Path = PAGE
) -> None:
    """Put a table where the page has `<!-- NAME -->`, in place of the one that is there."""
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
    own = f"<!-- {name} -->\n{table}\n" + (f"\n{below}\n" if below else "") + f"<!-- /{name} -->"
    text = page.read_text(encoding="utf-8")
    marked = re.compile(rf"<!-- {name} -->.*?<!-- /{name} -->", re.DOTALL)
    assert marked.search(text), f"{page} has no place for the table {name}"
    page.write_text(marked.sub(lambda _: own, text), encoding="utf-8")
