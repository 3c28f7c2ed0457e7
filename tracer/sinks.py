"""Where lines go: what a tracer needs from a sink, a list in memory, or nowhere; and the names of files.

A sink takes whole lines without their newline and never raises into its caller. The one that writes files is
`segments.SegmentSink`.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

# Asked for when the system sets no limit of its own.
OPEN_FILES_MAX = 1 << 20
# What says how a whole run ended; written by whoever made the run, never read as a log.
SUMMARY_NAME = "run.json"
# Whatever the umask: who may read a log is its owner's to say.
FOLDER_MODE, FILE_MODE = 0o700, 0o600

Warn = Callable[[str], None]
HeaderLine = Callable[[], bytes]
# Block and offset of a line that is not written yet.
Position = tuple[int, int]


class Sink(Protocol):
    """What a tracer needs from a sink."""

    @property
    def drops_oldest(self) -> bool:
        """Whether lines that were written are removed again to make room for new ones."""

    def open(self, header_line: HeaderLine) -> None:
        """Write the header; `header_line` is kept and asked again whenever a new file begins."""

    def write(self, line: bytes) -> None:
        """Add one line, given without its newline."""

    def close(self) -> None:
        """Let go of the file; lines that come later are lost. May be called twice."""

    def position(self) -> Position:
        """Where the next line goes."""

    def since(self, position: Position) -> bytes | None:
        """The lines from `position` on; None when they are final and can't be taken back."""

    def rewind(self, position: Position) -> None:
        """Take those lines back."""

    def rewrite(self, position: Position, line: bytes) -> bool:
        """Put another line of the same length in place of the one at `position`; False when it is final."""


class NowhereSink:
    """Lines are lost; a tracer over it still keeps what a watcher compares."""

    __slots__ = ()
    drops_oldest = False

    def open(self, header_line: HeaderLine) -> None:
        pass

    def write(self, line: bytes) -> None:
        pass

    def close(self) -> None:
        pass

    def position(self) -> Position:
        return 0, 0

    def since(self, position: Position) -> bytes | None:
        return None

    def rewind(self, position: Position) -> None:
        pass

    def rewrite(self, position: Position, line: bytes) -> bool:
        return False


class NullSink(NowhereSink):
    """Nothing is recorded at all: a tracer over it hands out one shared function that does nothing."""

    __slots__ = ()


class MemorySink:
    """A list of lines, for tests."""

    __slots__ = ("is_closed", "lines")
    drops_oldest = False

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.is_closed = False

    def open(self, header_line: HeaderLine) -> None:
        self.lines.append(header_line())

    def write(self, line: bytes) -> None:
        self.lines.append(line)

    def close(self) -> None:
        self.is_closed = True

    def position(self) -> Position:
        return 0, len(self.lines)

    def since(self, position: Position) -> bytes | None:
        return b"".join(line + b"\n" for line in self.lines[position[1] :])

    def rewind(self, position: Position) -> None:
        del self.lines[position[1] :]

    def rewrite(self, position: Position, line: bytes) -> bool:
        self.lines[position[1]] = line
        return True


def allow_open_files(wanted: int | None = None) -> bool:
    """Raise this process's own limit to `wanted` open files, or as far as it goes; whether that was done."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_unlimited = hard == resource.RLIM_INFINITY
    limit = OPEN_FILES_MAX if is_unlimited else hard
    if wanted is not None:
        limit = wanted if is_unlimited else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (OSError, ValueError):
        return False
    return True


def segment_name(rank: int, lane: str, index: int) -> str:
    return f"rank{rank:04d}.{lane}.{index:03d}.jsonl"


def meta_name(rank: int) -> str:
    return f"rank{rank:04d}.meta.json"


def write_meta(folder: str | os.PathLike[str], rank: int, *, warn: Warn | None = None) -> None:
    """Write the side file with whatever would make two equal runs differ; a failure only warns."""
    facts = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "wall_clock_ns": time.time_ns(),
        "monotonic_ns": time.monotonic_ns(),
    }
    path = Path(folder) / meta_name(rank)
    try:
        path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")
    except OSError as error:
        tell(warn or warn_on_stderr, f"{path} was not written: {error.strerror}")


def warn_on_stderr(text: str) -> None:
    # Not `warnings.warn`: under `-W error` that would raise into the run that is being traced.
    print(f"hicache: warning: {text}", file=sys.stderr)


def tell(warn: Warn, text: str) -> None:
    """Warn, and survive a warning that can't be given (a closed stderr, a broken callback)."""
    try:
        warn(text)
    except Exception:
        return
