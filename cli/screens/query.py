"""The answer to a query as a table for people, and what there is to ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from rich.text import Text

from cli.screens.table import count, table
from cli.theme import HEADING, LABEL, WIDTH

if TYPE_CHECKING:
    from tracer.trace_store import Table

MORE = "--format json or csv has everything"
# A table of one column may use the whole line; of many, each gets a fair part of it.
CELL_MAX = 60


def rows_table(answer: Table, width: int, *, total: int | None = None) -> list[Text]:
    """Rows as they came, and how many there are: `total`, when these are but the first."""
    shown = len(answer.rows)
    rows = "1 row" if shown == 1 else f"{count(shown)} rows"
    if total is not None and total > shown:
        rows = f"the first {count(shown)} of {count(total)} rows; --full shows all"
    return [
        *table(answer.columns, answer.rows, width=width, more=MORE, cell_max=CELL_MAX),
        Text(f"({rows})"),
    ]


def schema_lines(views: Mapping[str, Sequence[tuple[str, str]]]) -> list[Text]:
    """Each view with a line for each column of its own; the others follow with their types.

    What places a record is said once, for it is in nearly every view.
    """
    from tracer.columns import KEYS, MEANINGS, VIEWS, meaning

    lines = [Text.assemble(("most views", HEADING), "  have these, which place a record")]
    lines += _explained([(key, kind, MEANINGS[key]) for key, kind in KEYS.items()])
    for view, columns in views.items():
        lines += [Text(), Text.assemble((view, HEADING), f"  {VIEWS[view]}")]
        told = {name: "" if _is_key(view, name) else meaning(view, name) for name, _kind in columns}
        lines += _explained([(name, kind, told[name]) for name, kind in columns if told[name]])
        rest = ", ".join(
            name if _is_key(view, name) else f"{name} {kind}" for name, kind in columns if not told[name]
        )
        lines += [Text(f"  {line}") for line in wrap(rest, WIDTH - 2)]
    return lines


def _is_key(view: str, column: str) -> bool:
    from tracer.columns import KEYS, MEANINGS

    return column in KEYS and f"{view}.{column}" not in MEANINGS


def _explained(columns: Sequence[tuple[str, str, str]]) -> list[Text]:
    """Name, type and meaning of columns, below each other."""
    name_width = max((len(name) for name, _kind, _said in columns), default=0) + 2
    kind_width = max((len(kind) for _name, kind, _said in columns), default=0) + 2
    indent = " " * (2 + name_width + kind_width)
    lines: list[Text] = []
    for name, kind, said in columns:
        first, *more = wrap(said, WIDTH - len(indent))
        lines.append(Text.assemble((f"  {name.ljust(name_width)}", LABEL), kind.ljust(kind_width), first))
        lines += [Text(indent + line) for line in more]
    return lines
