"""What a snapshot has of each process, and why it has not the rest."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

from rich.text import Text

from cli.screens.table import table
from cli.theme import COMMAND, HEADING, INDENT, width

if TYPE_CHECKING:
    from tracer.snapshot.look import Taken

STATES = {
    "R": "running",
    "S": "waiting",
    "D": "in the system",
    "T": "stopped",
    "t": "traced",
    "Z": "ended",
    "": "gone",
}
# Kinds of evidence as a column's heading calls them.
HEADINGS = {
    "stacks": "stacks",
    "flight_recorder": "flight rec",
    "process": "system",
    "own_log": "own log",
    "log_tail": "log tail",
    "py_spy": "py-spy",
}
NAMED_MAX = 4


def screen(found: list[Taken], command: str, *, is_quiet: bool) -> list[str | Text]:
    stopped = sum(one.is_stopped for one in found)
    head = f"SNAPSHOT  {len(found)} process{'es' if len(found) != 1 else ''}"
    head += f", {stopped} of them stopped" if stopped else ""
    lines: list[str | Text] = [Text(head, style=HEADING)]
    if is_quiet:
        return lines
    columns = ("pid", "rank", "state", *HEADINGS.values())
    rows = [[one.pid, one.rank, STATES.get(one.state, one.state), *_counts(one)] for one in found]
    lines += ["", *table(columns, rows, width=width())]
    if reasons := _reasons(found):
        lines += ["", *reasons]
    return [*lines, "", Text.assemble("next".ljust(INDENT), (command, COMMAND))]


def _counts(one: Taken) -> list[int | None]:
    """Files of each kind; a dash where there is none."""
    return [len(one.files[kind]) if one.files.get(kind) else None for kind in HEADINGS]


def _reasons(found: list[Taken]) -> list[str | Text]:
    """Each reason once, with what it is the reason of."""
    told: dict[str, dict[str, list[Taken]]] = {}
    for one in found:
        for kind, reason in one.reasons.items():
            told.setdefault(reason, {}).setdefault(kind, []).append(one)
    lines: list[str | Text] = []
    for reason, kinds in told.items():
        names = ", ".join(HEADINGS[kind] for kind in HEADINGS if kind in kinds)
        whose = {one.pid: one for ones in kinds.values() for one in ones}
        text = f"{names} of {_who(list(whose.values()), len(found))}: {reason}"
        label = "missing".ljust(INDENT) if not lines else " " * INDENT
        parts = wrap(text, width() - INDENT, subsequent_indent="  ") or [""]
        lines += [label + parts[0], *(" " * INDENT + part for part in parts[1:])]
    return lines


def _who(ones: list[Taken], count: int) -> str:
    if len(ones) == count and count > 1:
        return "all"
    named = [f"rank {one.rank}" if one.rank is not None else f"process {one.pid}" for one in ones[:NAMED_MAX]]
    more = len(ones) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")
