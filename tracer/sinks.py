"""Where lines go: segment files that survive a killed process, memory, or nowhere.

Owns the bytes of one lane's files while they are written. A sink takes whole lines without their
newline, adds it, and never raises into its caller: a sink that can't write any more says so once
and swallows the rest. It never looks into a line.

    rank0003.scheduler.000.jsonl   header line | line | line | ... | zero bytes
                                   |------------ used -------------|
                                   |----------- allocated on disk, then mapped ----------|

With a limit a lane is a ring: before a new segment is allocated the oldest sealed ones are removed.

    .004 sealed | .005 sealed | .006 sealed | .007 mapped        .003 and older are gone
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import resource
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

SEGMENT_BYTES_MIN = 64 * 1024
SEGMENT_BYTES_MAX = 4 * 1024 * 1024
# Of a ring's limit one segment takes at most this part, so that most of what it may keep is kept.
RING_SEGMENTS = 4
PAGE_BYTES = 4096
NEWLINE = 0x0A
# Asked for when the system sets no limit of its own.
OPEN_FILES_MAX = 1 << 20
# What says how a whole run ended; written by whoever made the run, never read as a log.
SUMMARY_NAME = "run.json"

Warn = Callable[[str], None]
HeaderLine = Callable[[], bytes]
# Device and inode: what a file is, whatever its name.
Identity = tuple[int, int]


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


class NullSink:
    """Nowhere. A tracer over it hands out one shared function that does nothing."""

    __slots__ = ()
    drops_oldest = False

    def open(self, header_line: HeaderLine) -> None:
        pass

    def write(self, line: bytes) -> None:
        pass

    def close(self) -> None:
        pass


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


class SegmentSink:
    """Append-only segments of one lane, mapped into memory: what was written survives SIGKILL.

    A file is allocated on disk before it is mapped, since a store into a sparse mapping kills the
    process with SIGBUS once the disk is full. It is cut to what was used when nobody writes any more,
    through the mapping itself: a sink holds one file descriptor, the mapping's, and never goes back to
    the path, where another file may be by then. Only a ring does, to remove a file that is still its own.
    Files are created exclusively, so an earlier run in the same folder is never overwritten.

    Args:
        folder: created when it is missing, but only once: a folder removed later stays removed.
        warn: called at most once, when the sink gives up.
        limit_bytes: makes a ring of this lane, whose files take no more than that on disk, as long as
            a header and a line fit in a quarter of it; None keeps everything.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int,
        lane: str,
        *,
        warn: Warn | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        assert limit_bytes is None or limit_bytes > 0, f"a ring of {limit_bytes} bytes keeps nothing"
        self.folder = Path(folder)
        self.rank = rank
        self.lane = lane
        self.segment_count = 0
        self._warn = warn or warn_on_stderr
        self._header_line: HeaderLine | None = None
        self._is_open = False
        self._map: mmap.mmap | None = None
        self._used = 0
        # Zero while nothing is mapped: then every line takes the slow path of `write`.
        self._size = 0
        self._limit_bytes = limit_bytes
        self._segment_bytes_max = (
            SEGMENT_BYTES_MAX if limit_bytes is None else min(SEGMENT_BYTES_MAX, _quarter(limit_bytes))
        )
        self._next_bytes = min(SEGMENT_BYTES_MIN, self._segment_bytes_max)
        self._path: Path | None = None
        self._identity: Identity = (0, 0)
        # Of a ring: what can be removed, oldest first.
        self._sealed: deque[_Sealed] = deque()

    @property
    def drops_oldest(self) -> bool:
        return self._limit_bytes is not None

    def open(self, header_line: HeaderLine) -> None:
        self._header_line = header_line
        self._is_open = True
        # A child would share the mapping and write over its parent's lines. Asking for the process
        # id at every line would cost a system call; the reference is weak because the interpreter
        # keeps such a hook for ever.
        os.register_at_fork(after_in_child=partial(_leave_to_parent, weakref.ref(self)))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._give_up(error)
            return
        self._advance(0)

    def write(self, line: bytes) -> None:
        start = self._used
        end = start + len(line)
        if end >= self._size:
            if not self._advance(len(line)):
                return
            start = self._used
            end = start + len(line)
        segment = self._map
        assert segment is not None
        segment[start:end] = line
        # The newline is what makes the line a record, so it comes after the rest.
        segment[end] = NEWLINE
        self._used = end + 1

    def close(self) -> None:
        self._is_open = False
        self._seal()

    def _advance(self, line_bytes: int) -> bool:
        """Go on in a new segment with room for `line_bytes`; false when there is none."""
        if not self._is_open:
            return False
        assert self._header_line is not None
        header = self._header_line()
        needed_bytes = len(header) + 1 + line_bytes + 1
        size = max(self._next_bytes, -(-needed_bytes // PAGE_BYTES) * PAGE_BYTES)
        self._seal()
        path = self.folder / segment_name(self.rank, self.lane, self.segment_count)
        try:
            self._make_room(size)
            self._map_new(path, size)
        except (OSError, ValueError) as error:
            self._give_up(error)
            return False
        self._path = path
        self.segment_count += 1
        self._next_bytes = min(2 * self._next_bytes, self._segment_bytes_max)
        self.write(header)
        return True

    def _make_room(self, size: int) -> None:
        """Remove a ring's oldest files until `size` bytes more are within its limit.

        Killed in between, it leaves a ring that is a little shorter: what is there has no gap.
        """
        if self._limit_bytes is None:
            return
        kept = sum(sealed.used_bytes for sealed in self._sealed)
        while self._sealed and kept + size > self._limit_bytes:
            oldest = self._sealed.popleft()
            kept -= oldest.used_bytes
            oldest.remove()

    def _map_new(self, path: Path, size: int) -> None:
        try:
            self._map, self._identity = _mapped(path, size)
        except OSError as error:
            if error.errno != errno.EMFILE or not allow_open_files():
                raise
            self._map, self._identity = _mapped(path, size)
        self._used = 0
        self._size = size

    def _seal(self) -> None:
        """Cut the segment to what was used and unmap it."""
        if self._map is None:
            return
        used_bytes = self._size
        # When this fails the zero bytes stay, and a reader stops at them.
        with contextlib.suppress(OSError, ValueError, SystemError):
            self._map.resize(self._used)
            used_bytes = self._used
        self._unmap()
        if self._limit_bytes is not None and self._path is not None:
            self._sealed.append(_Sealed(self._path, self._identity, used_bytes))

    def _unmap(self) -> None:
        if self._map is not None:
            self._map.close()
        self._map = None
        self._size = 0

    def _give_up(self, error: Exception) -> None:
        self._is_open = False
        self._seal()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        tell(
            self._warn,
            f"tracing of rank {self.rank}, lane {self.lane} is off from here on: {reason} "
            f"({self.folder / segment_name(self.rank, self.lane, self.segment_count)})",
        )


@dataclass(frozen=True, slots=True)
class _Sealed:
    """A file that nobody writes any more."""

    path: Path
    identity: Identity
    used_bytes: int

    def remove(self) -> None:
        """Take it away, unless it is gone or another file has its name by now."""
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(self.path)
            # A number of a file that is gone is given to the next one, so the size must be the same too.
            is_own = (status.st_dev, status.st_ino) == self.identity and status.st_size == self.used_bytes
            if is_own:
                os.unlink(self.path)


def _quarter(limit_bytes: int) -> int:
    """The size of a ring's segments: whole pages, at least one."""
    return max(PAGE_BYTES, limit_bytes // RING_SEGMENTS // PAGE_BYTES * PAGE_BYTES)


def _mapped(path: Path, size: int) -> tuple[mmap.mmap, Identity]:
    """A new file of `size` bytes in memory; the mapping keeps a descriptor of its own."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        status = os.fstat(fd)
        return mmap.mmap(fd, size), (status.st_dev, status.st_ino)
    except (OSError, ValueError):
        # An empty segment would look like a lane that was cut.
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


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
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(facts) + "\n", encoding="utf-8")
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


def _leave_to_parent(reference: weakref.ref[SegmentSink]) -> None:
    """In a forked child: unmap without touching the file, and say nothing."""
    sink = reference()
    if sink is None:
        return
    sink._is_open = False
    sink._unmap()
