"""One queue step by step in a terminal: a screen that is drawn over, and single keys."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import tty
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.text import Text

from cli.theme import COMMAND, LABEL, show, width

if TYPE_CHECKING:
    from tracer.transfers import Replay

KEYS = "n next move  p previous  + - one step  a apart  g go to  q quit"
CLEAR = "\x1b[H\x1b[2J"
ARROWS = {"\x1b[C": "n", "\x1b[D": "p", "\x1b[A": "-", "\x1b[B": "+"}
# One key: an escape sequence, whole, or a character. A key that is held down comes many at a time.
KEY = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO[ -~]|\x1b[^\x1b\[O]|[\x00-\U0010ffff]", re.DOTALL)
BEGUN = re.compile(rb"\x1b(\[[0-?]*[ -/]*|O)?\Z")
# What of an escape sequence is not there yet comes within this.
SEQUENCE_S = 0.05
READ_MAX = 4096


def step_through(found: Replay, start: int | None) -> None:
    """Show steps until `q`, Ctrl-C or the end of the input."""
    from cli.screens.replay import at_step

    steps = found.steps or (0,)
    step = start if start is not None else steps[0]
    note = ""
    with _keys() as keys:
        while True:
            sys.stdout.write(CLEAR)
            foot = Text.assemble(("  keys".ljust(10), LABEL), (KEYS, COMMAND))
            show([*at_step(found, step, width()), "", foot, *([f"          {note}"] if note else [])])
            key = next(keys, "q")
            note = ""
            if key == "q":
                return
            if key == "g":
                step, note = _asked(keys, found, step)
            else:
                step, note = _moved(found, steps, step, key)


def _moved(found: Replay, steps: tuple[int, ...], step: int, key: str) -> tuple[int, str]:
    if key == "n":
        at = bisect_right(steps, step)
        return (steps[at], "") if at < len(steps) else (step, "nothing moves behind this step")
    if key == "p":
        at = bisect_left(steps, step) - 1
        return (steps[at], "") if at >= 0 else (step, "nothing moved before this step")
    if key in ("+", "-"):
        wanted = step + (1 if key == "+" else -1)
        return (wanted, "") if 0 <= wanted <= found.last_step else (step, "the run has no other step there")
    if key == "a":
        apart = found.parts_at()
        return (step, "ranks applied alike at every step") if apart is None else (apart, "")
    return step, f"no such key: {key!r}"


def _asked(keys: Iterator[str], found: Replay, step: int) -> tuple[int, str]:
    """A number, ended by return."""
    text = ""
    while True:
        sys.stdout.write(f"\r          go to step {text} \b")
        sys.stdout.flush()
        key = next(keys, "\n")
        if key in ("\n", "\r"):
            break
        text = text[:-1] if key in ("\x7f", "\b") else text + key if key.isdecimal() else text
    if not text:
        return step, ""
    wanted = int(text[:18])
    return (wanted, "") if wanted <= found.last_step else (step, f"the logs end with step {found.last_step}")


@contextmanager
def _keys() -> Iterator[Iterator[str]]:
    """Keys as they are pressed; the terminal is as it was afterwards, whatever happens."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield _read(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _read(fd: int) -> Iterator[str]:
    while data := _bytes(fd):
        while BEGUN.search(data) and len(data) < READ_MAX and select.select([fd], [], [], SEQUENCE_S)[0]:
            more = _bytes(fd)
            data += more
            if not more:
                break
        for key in KEY.findall(data.decode("utf-8", "ignore")):
            # Some terminals say the same with another letter.
            arrow = ARROWS.get(key.replace("\x1bO", "\x1b["))
            yield arrow or ("q" if key in ("\x04", "\x1b") else key)


def _bytes(fd: int) -> bytes:
    """What was typed; nothing once the terminal is gone."""
    try:
        return os.read(fd, 64)
    except OSError:
        return b""
