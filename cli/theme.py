"""Where output goes and what it may look like: the console, the colours, the progress bar.

stdout holds the result, stderr the progress. Colour and animation are for a terminal only, and never
carry a meaning that the text does not. A reader that goes away early (`| head`) is no error.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import wrap
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

WIDTH = 80
# Column at which the text beside a label starts.
INDENT = 10
GOOD, BAD, DOUBT = "bold green", "bold red", "bold yellow"
LABEL, HEADING, COMMAND = "cyan", "bold", "bold cyan"

Progress = Callable[[int, float], None]


def console(stream: TextIO) -> Console:
    """A console that decorates only a terminal, and not under NO_COLOR, whatever else is set."""
    is_plain = not stream.isatty() or bool(os.environ.get("NO_COLOR"))
    return Console(
        file=stream,
        force_terminal=stream.isatty(),
        color_system=None if is_plain else "auto",
        highlight=False,
        markup=False,
        emoji=False,
    )


def width() -> int:
    """Columns that a table may take: those of the terminal, 80 without one."""
    return max(WIDTH, console(sys.stdout).width) if sys.stdout.isatty() else WIDTH


def show(lines: Sequence[str | Text]) -> None:
    """Print lines that are already laid out, as they are."""
    out = console(sys.stdout)
    with quiet_when_closed():
        if out.color_system is None:
            # Half a million plain lines take a second this way and a minute through rich.
            sys.stdout.write("".join(f"{line}\n" for line in lines))
            sys.stdout.flush()
            return
        for line in lines:
            out.print(line, soft_wrap=True)


def show_json(document: Mapping[str, Any] | Sequence[Any]) -> None:
    """One JSON document and nothing else."""
    show_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n")


def show_text(text: str) -> None:
    show_parts(lambda write: write(text))


def show_parts(print_parts: Callable[[Callable[[str], object]], object]) -> None:
    """Whatever is written through the function that `print_parts` is given, as it comes."""
    with quiet_when_closed():
        print_parts(sys.stdout.write)
        sys.stdout.flush()


@contextmanager
def quiet_when_closed() -> Iterator[None]:
    """Whoever read stdout is gone: say nothing more, and let the command end with its own exit code."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def progress_bar(what: str, *, quiet: bool = False) -> Iterator[Progress | None]:
    """A bar on stderr for `simulate(progress=)`; None where nobody would see it move."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]} requests"))
    with Bar(*columns, TimeElapsedColumn(), console=console(sys.stderr), transient=True) as bar:
        task = bar.add_task(what, total=1.0, done=0)
        yield lambda done, fraction: bar.update(task, completed=fraction, done=done)


# Logs of this size are read in a second or so, and from there on one wonders.
LARGE_BYTES = 100 * 1000 * 1000


@contextmanager
def spinner(what: str, path: Path, *, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """A sign of life on stderr while large logs are read; the function that it yields takes it away."""
    size = _size(path) if not quiet and sys.stderr.isatty() else 0
    if size < LARGE_BYTES:
        yield lambda: None
        return
    status = console(sys.stderr).status(f"{what}: {size / 1e6:,.0f} MB of logs")
    status.start()
    try:
        yield status.stop
    finally:
        status.stop()


def _size(path: Path) -> int:
    """Bytes in a folder's files, or in a file; what can't be looked at counts nothing."""
    size = 0
    with suppress(OSError, ValueError):
        if not path.is_dir():
            return path.stat().st_size
        for entry in os.scandir(path):
            with suppress(OSError):
                size += entry.stat().st_size
    return size


def paragraph(label: str, text: str, style: str = LABEL) -> list[Text]:
    """`text` beside a label, wrapped at 80 columns; the shape of every screen's lines."""
    # A path or a command that is broken can't be copied; a line that is too long can.
    lines = wrap(text, WIDTH - INDENT, break_on_hyphens=False, break_long_words=False) or ["-"]
    return [
        Text.assemble((f"  {label}".ljust(INDENT) if number == 0 else " " * INDENT, style), line)
        for number, line in enumerate(lines)
    ]


def headline(word: str, text: str, style: str) -> list[Text]:
    """The verdict first: one word at the left edge, then the sentence."""
    first = f"{word}  ".ljust(INDENT)
    lines = wrap(first + text, WIDTH, subsequent_indent=" " * INDENT, break_on_hyphens=False)
    told = [Text(line) for line in lines]
    told[0].stylize(style, 0, len(word))
    return told


def next_step(*words: object) -> list[Text]:
    """What to type next, whole on its line."""
    return [Text.assemble(("  next".ljust(INDENT), LABEL), (command_line(*words), COMMAND))]


def command_line(*words: object) -> str:
    """A command as it can be pasted into a shell."""
    return shlex.join(["hicache", *map(str, words)])
