"""What went wrong, as a person reads it and as an exit code.

One message on stderr, never a traceback: what is wrong, what was expected, what to try. The codes are
those of the verdict contract; a verdict has its own and does not come through here.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

OK = 0
INTERNAL = 1
USAGE = 2
UNREADABLE = 3
INTERRUPTED = 130
# By SIGTERM, as a shell says it.
TERMINATED = 143

DEBUG_VARIABLE = "HICACHE_DEBUG"
INDENT = "  "
LABEL_WIDTH = 10


class CliError(Exception):
    """A command can't do what was asked; the text is complete, the code is the exit code."""

    def __init__(self, what: str, *, code: int = USAGE, expected: str = "", hint: str = "") -> None:
        parts = (("expected", expected), ("try", hint))
        super().__init__(
            "\n".join([what, *(INDENT + label.ljust(LABEL_WIDTH) + text for label, text in parts if text)])
        )
        self.code = code


@contextmanager
def asked_by(command: str) -> Iterator[None]:
    """Where logs are in another folder than the one that was given, suggest this command there.

    Args:
        command: as it is typed, with `{}` in the place of the folder.
    """
    from tracer.errors import ElsewhereError, LogError

    try:
        yield
    except ElsewhereError as error:
        hint = command.format(error.place)
        raise LogError(error.what, where=error.where, expected=error.expected, hint=hint) from None


def code_of(error: BaseException) -> int:
    """The exit code for an error that a package raised on purpose; `INTERNAL` for any other.

    The packages are imported here, not above: only their own errors need them, and then they are loaded.
    """
    if isinstance(error, CliError):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, MemoryError):
        return INTERNAL
    from hicache.errors import ConfigError, WorkloadError
    from tracer.errors import TracerError

    if isinstance(error, ConfigError):
        return USAGE
    if isinstance(error, WorkloadError | TracerError):
        return UNREADABLE
    return INTERNAL


def report(error: BaseException) -> int:
    """Tell one error on stderr and return its exit code."""
    code = code_of(error)
    if code == INTERRUPTED:
        tell("interrupted")
    elif code != INTERNAL:
        tell(f"error: {error}")
    elif isinstance(error, MemoryError):
        tell("error: out of memory")
        tell(f"  {'try'.ljust(LABEL_WIDTH)}a machine with more, or logs of fewer steps")
    elif isinstance(error, OSError) and not os.environ.get(DEBUG_VARIABLE):
        where = f": {error.filename}" if error.filename else ""
        tell(f"error: {error.strerror or error}{where}")
    elif os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(error)
    else:
        said = " ".join(str(error).split())
        tell(f"error: internal: {type(error).__name__}{': ' if said else ''}{said}")
        tell(f"  try       {DEBUG_VARIABLE}=1 for the traceback")
    return code


def tell(text: str) -> None:
    """One or more lines on stderr, cut between words for a terminal; a closed stderr is nobody's problem."""
    try:
        if sys.stderr.isatty():
            columns = shutil.get_terminal_size().columns
            text = "\n".join(fitted(line, columns) for line in text.split("\n"))
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return


def fitted(line: str, columns: int) -> str:
    """A line as several, the later ones below where the text behind its label begins. Paths stay whole."""
    indent = INDENT + " " * LABEL_WIDTH if line.startswith(INDENT) else INDENT
    parts = textwrap.wrap(
        line,
        columns,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    )
    return "\n".join(parts)
