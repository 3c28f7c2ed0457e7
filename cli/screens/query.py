"""The answer to a query as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from cli.screens.table import count, table

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
