"""Rows of values as lines that fit a width: columns are dropped and cells cut, lines are never wrapped.

Laid out by hand, since a table of rich needs six seconds for the 12,000 requests of one public trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from rich.text import Text

from cli.theme import HEADING

GAP = 2
CELL_MAX = 32
CUT = ".."
# A cut column that shows less than this says nothing.
NARROW_MIN = 12
# A longer value is not worth a place below the table.
CONSTANT_MAX = 20


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    width: int,
    more: str = "",
    cell_max: int = CELL_MAX,
) -> list[Text]:
    """Header and rows. When they are too wide, columns that say the same in every row are said once
    below; the last column that fits is cut, and what lies right of it is named.

    Args:
        rows: values or ready texts; numbers are set to the right, None is `-`.
        more: how to see the columns that were left out.
    """
    texts = [[cell_text(value) for value in row] for row in rows]
    every = [
        Column(name, [row[index] for row in texts], _is_numeric([row[index] for row in rows]), cell_max)
        for index, name in enumerate(columns)
    ]
    shown, same = every, []
    if _total(every) > width and len(rows) > 1:
        same = [column for column in every if column.is_constant]
        shown = [column for column in every if not column.is_constant] or every
    fitting = _fitting(shown, width)
    lines = [Text(_line(fitting, None), style=HEADING)]
    lines += [Text(_line(fitting, index)) for index in range(len(rows))]
    notes = []
    if same and shown is not every:
        notes.append("in every row: " + ", ".join(f"{column.name} {column.cells[0]}" for column in same))
    if hidden := shown[len(fitting) :]:
        notes.append(
            "not shown: " + ", ".join(column.name for column in hidden) + (f"; {more}" if more else "")
        )
    return lines + [Text(line) for note in notes for line in wrap(f"({note})", width)]


class Column:
    """One column as text, and how wide it is."""

    __slots__ = ("cells", "is_numeric", "name", "width")

    def __init__(self, name: str, cells: list[str], is_numeric: bool, cell_max: int) -> None:
        self.name = printable(name)
        self.cells = cells
        self.is_numeric = is_numeric
        self.width = min(cell_max, max(len(self.name), *map(len, cells), 0))

    @property
    def is_constant(self) -> bool:
        return len(self.cells) > 1 and len(set(self.cells)) == 1 and len(self.cells[0]) <= CONSTANT_MAX


def cell_text(value: Any) -> str:
    """One value on one line; control characters can't reach the terminal."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(cell_text(item) for item in value) + "]"
    return printable(str(value))


def printable(text: str) -> str:
    """Somebody else's text, of which nothing can move the cursor or turn a line around."""
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


def count(value: int) -> str:
    """A quantity, as opposed to an id: with thousands separators."""
    return f"{value:,}"


def counted(number: int, noun: str) -> str:
    """A quantity and its noun."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}%"


def _total(columns: Sequence[Column]) -> int:
    return sum(column.width + GAP for column in columns) - GAP


def _fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns that fit from the left; the last one may be made narrower, and one always stays."""
    fitting: list[Column] = []
    room = width
    for column in columns:
        if column.width > room:
            if room >= NARROW_MIN or not fitting:
                column.width = room
                fitting.append(column)
            break
        fitting.append(column)
        room -= column.width + GAP
    return fitting


def _line(columns: Sequence[Column], index: int | None) -> str:
    """Row `index`, or the header."""
    parts = []
    for column in columns:
        text = _cut(column.name if index is None else column.cells[index], column.width)
        parts.append(text.rjust(column.width) if column.is_numeric else text.ljust(column.width))
    return (" " * GAP).join(parts).rstrip()


def _is_numeric(values: Sequence[Any]) -> bool:
    told = [value for value in values if value not in (None, "-")]
    return bool(told) and all(_is_number(value) for value in told)


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return value.replace(",", "").replace(".", "").rstrip("%").isdecimal()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - len(CUT))] + CUT
