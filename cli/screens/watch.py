"""A run that is watched: a table that is drawn over in a terminal, plain lines of what is new elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.text import Text

from cli.screens.table import table
from cli.screens.verdict import coloured
from cli.theme import BAD, DOUBT, HEADING, console, show, width

if TYPE_CHECKING:
    from consensus_checker.live_tail import LaneState, Told

Look = tuple[Sequence["LaneState"], Sequence["Told"]]
# Lanes in a table; of more, those that stand longest and are furthest behind.
LANES_MAX = 24
HEADINGS = ("rank", "lane", "step", "calls", "last", "still", "behind", "state")
# Plain lines: a sign of life so often.
LIFE_S = 30.0
NO_LANE = "no lane yet"


@contextmanager
def drawn_over(path: Path) -> Iterator[Callable[[Look], None]]:
    """The table of all lanes, drawn over at each look; verdicts stay above it."""
    began_s = time.monotonic()
    out = console(sys.stdout)
    with Live(console=out, auto_refresh=False, transient=True) as live:

        def draw(look: Look) -> None:
            states, found = look
            for told in found:
                for line in coloured(told.lines, told.verdict.kind):
                    out.print(line, soft_wrap=True)
                out.print()
            seconds = time.monotonic() - began_s
            live.update(Group(*lines(path, states, seconds)), refresh=True)

        yield draw


class Plain:
    """What is new, as lines: for a pipe and a log file."""

    def __init__(self, path: Path, *, quiet: bool) -> None:
        self._path = path
        self._quiet = quiet
        self._said_s = -LIFE_S
        self._has_lanes = False

    def __call__(self, look: Look) -> None:
        states, found = look
        now_s = time.monotonic()
        is_first = bool(states) and not self._has_lanes
        self._has_lanes = bool(states)
        if not self._quiet and (is_first or now_s - self._said_s >= LIFE_S):
            self._said_s = now_s
            show([heading(self._path, states) if states else f"{self._path}: {NO_LANE}"])
        for told in found:
            if self._quiet:
                word = told.verdict.kind.upper().replace("_", " ")
                show([f"{word}  {told.verdict.finding.summary}"])
            else:
                show(["", *told.lines])


def heading(path: Path, states: Sequence[LaneState]) -> str:
    """One line: how many ranks, how far they are, who is behind."""
    ranks = {state.rank for state in states}
    steps = [state.step for state in states if state.lane == states[0].lane]
    # Lanes are read one after the other, so that of those that move some always look behind.
    behind = [state for state in states if state.is_behind and state.lane == states[0].lane]
    far = f"step {max(steps):,}" if len(set(steps)) == 1 else f"steps {min(steps):,} to {max(steps):,}"
    text = f"{path}: {'1 rank' if len(ranks) == 1 else f'{len(ranks)} ranks'} at {far}"
    if behind:
        last = max(behind, key=lambda state: state.behind)
        text += f"; rank {last.rank} is {last.behind:,} calls behind"
    return text


def lines(path: Path, states: Sequence[LaneState], seconds: float) -> list[Text]:
    """The whole table, at most `LANES_MAX` lanes of it."""
    if not states:
        return [Text(f"{path}: {NO_LANE}")]
    shown = list(states)
    if len(shown) > LANES_MAX:
        telling = sorted(states, key=lambda one: (not one.is_behind, -one.still_s, one.rank))[:LANES_MAX]
        shown = [state for state in states if state in telling]
    rows = [
        (
            state.rank,
            state.lane,
            state.step,
            state.seq,
            state.last,
            f"{state.still_s:.1f} s" if state.still_s >= 1.0 else "",
            state.behind if state.is_behind else "",
            state.state,
        )
        for state in shown
    ]
    found = [Text(f"{heading(path, states)}, watched for {seconds:.0f} s", style=HEADING)]
    body = table(HEADINGS, rows, width=width())
    marks = dict(zip(range(len(shown)), shown, strict=True))
    for number, line in enumerate(body, start=-1):
        state = marks.get(number)
        if state is not None and state.state == "torn":
            line.stylize(BAD)
        elif state is not None and state.state.startswith("waits"):
            line.stylize(DOUBT)
        found.append(line)
    if len(states) > len(shown):
        found.append(Text(f"({len(states) - len(shown):,} more lanes, none further behind)"))
    return found
