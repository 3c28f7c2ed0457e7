"""Bytes of a log by their place in what was written, whether its file is compressed since then or not.

Owns the table of a packed file's members: each says how long it is and how much it holds, so that the member
with any byte is found without unpacking those before it.

    packed     | member 0 | member 1 | member 2 | ...
    written    0          64,000     128,000           byte 70,000 is in member 1
"""

from __future__ import annotations

import errno
import os
import struct
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tracer.pack import PACKED, DamagedError, inflated, member_length
from tracer.sinks import allow_open_files

# A packed segment of a recorder has a megabyte; a larger file is somebody else's.
PACKED_BYTES_MAX = 1 << 26
TABLES_KEPT = 4096
SIZE = struct.Struct("<I")


class UnsearchableError(Exception):
    """A file in which no byte stands for a place: it was packed by another tool, is damaged, or is gone."""


@dataclass(frozen=True, slots=True)
class Table:
    """Members of a packed file; of a plain one there are none.

    Attributes:
        size: bytes that were written.
        offsets: where in the file each member begins, and behind the last one where it ends.
        starts: the first byte of what was written that each holds.
    """

    size: int
    offsets: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()

    def member_with(self, at: int) -> int:
        """Number of the member that byte `at` is in."""
        return max(0, bisect_right(self.starts, at) - 1)


def table(path: Path) -> Table:
    """Where what was written is in a file.

    Raises:
        UnsearchableError: nobody can say.
    """
    try:
        told = path.stat()
        return _table(path, told.st_size, told.st_mtime_ns)
    except OSError:
        raise UnsearchableError from None


@lru_cache(maxsize=TABLES_KEPT)
def _table(path: Path, size: int, _mtime_ns: int) -> Table:
    with path.open("rb") as file:
        if path.suffix != PACKED and file.read(1) != b"\x1f":
            return Table(size)
        if size > PACKED_BYTES_MAX:
            raise UnsearchableError
        file.seek(0)
        data = file.read()
    offsets, starts = [0], [0]
    while offsets[-1] < len(data):
        length = member_length(data, offsets[-1])
        if length is None or offsets[-1] + length > len(data):
            raise UnsearchableError
        offsets.append(offsets[-1] + length)
        starts.append(starts[-1] + SIZE.unpack_from(data, offsets[-1] - SIZE.size)[0])
    return Table(starts[-1], tuple(offsets), tuple(starts[:-1]))


def read_at(path: Path, count: int, start: int) -> bytes:
    """At most `count` bytes of what was written from byte `start` on; fewer at its end, or at what is spoilt.

    Raises:
        UnsearchableError: as `table`.
    """
    found = table(path)
    try:
        with _opened(path) as file:
            if not found.offsets:
                return os.pread(file, count, start)
            return _unpacked(file, found, count, start)
    except OSError:
        raise UnsearchableError from None


def _unpacked(fd: int, found: Table, count: int, start: int) -> bytes:
    if start >= found.size:
        return b""
    first = found.member_with(start)
    last = found.member_with(min(start + count, found.size) - 1)
    begin = found.offsets[first]
    packed = os.pread(fd, found.offsets[last + 1] - begin, begin)
    parts = []
    for number in range(first, last + 1):
        part = inflated(packed[found.offsets[number] - begin : found.offsets[number + 1] - begin])
        if isinstance(part, DamagedError):
            break
        parts.append(part)
    skipped = start - found.starts[first]
    return b"".join(parts)[skipped : skipped + count]


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A file descriptor; the limit of open files is raised where it is reached."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EMFILE or not allow_open_files():
            raise
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
