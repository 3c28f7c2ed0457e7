"""Segment files of one lane, mapped into memory: what was written survives a killed process.

Owns the bytes of one lane's files while they are written. A sink takes whole lines without their newline,
adds it, and never raises into its caller: a sink that can't write any more says so once and swallows the
rest. It never looks into a line.

    rank0003.scheduler.000.jsonl   header line | line | ... | block | line | ... | block | line | zero bytes
                                   |------- checked ----------------|-- checked ---------|
                                   |----------- allocated on disk, then mapped ----------------------------|

A `block` line holds a checksum of the lines since the one before it. It is written when a block is full and
when the file is closed, off the path of a line.

With a limit a lane is a ring: sealed files are compressed by a packer, and before a new segment is allocated
the oldest ones are removed.

    .004.jsonl.gz | .005.jsonl.gz | .006.jsonl sealed | .007.jsonl mapped        .003 and older are gone
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
import weakref
import zlib
from collections import deque
from functools import partial
from pathlib import Path

from tracer.pack import PACKED, Packing, Sealed
from tracer.sinks import (
    FOLDER_MODE,
    HeaderLine,
    Position,
    Warn,
    allow_open_files,
    segment_name,
    tell,
    warn_on_stderr,
)

SEGMENT_BYTES_MIN = 64 * 1024
SEGMENT_BYTES_MAX = 4 * 1024 * 1024
# Of a ring's limit one segment takes at most this part, so that most of what it may keep is kept.
RING_SEGMENTS = 4
PAGE_BYTES = 4096
# Lines under one checksum: what a flipped bit costs.
BLOCK_BYTES = 64 * 1024
# Kept free at the end of a file for its last block line.
BLOCK_LINE_BYTES = 64
NEWLINE = 0x0A
# `MADV_POPULATE_WRITE` of Linux 5.14, for which this Python has no name.
POPULATE_WRITE = 23

# Device and inode: what a file is, whatever its name.
Identity = tuple[int, int]


class Window:
    """Where the next line goes. Emitters store into it themselves, as long as the line ends before `mark`.

    Attributes:
        buffer: the mapped file.
        used: offset of the next line.
        mark: a line may go up to here, its newline included; beyond, it is the sink's to say. 0 when closed.
    """

    __slots__ = ("buffer", "mark", "used")

    def __init__(self) -> None:
        self.buffer: mmap.mmap | bytearray = bytearray()
        self.used = 0
        self.mark = 0


class SegmentSink:
    """Append-only segments of one lane.

    A file is allocated on disk before it is mapped, since a store into a sparse mapping kills the
    process with SIGBUS once the disk is full. It is cut to what was used when nobody writes any more,
    through the mapping itself: a sink holds one file descriptor, the mapping's, and never goes back to
    the path, where another file may be by then. Only a ring does, to remove or pack a file that is still its
    own. Files are created exclusively, so an earlier run in the same folder is never overwritten.

    Args:
        folder: created when it is missing, for its owner alone, but only once: a folder removed later stays
            removed.
        warn: called at most once, when the sink gives up.
        limit_bytes: makes a ring of this lane, whose files take no more than that on disk, as long as
            a header and a line fit in a quarter of it; None keeps everything.
        age_s: of a ring: sealed files older than this are removed too, when the next one is sealed.
        packer: compresses what is sealed; None leaves it as it is.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int,
        lane: str,
        *,
        warn: Warn | None = None,
        limit_bytes: int | None = None,
        age_s: float | None = None,
        packer: Packing | None = None,
    ) -> None:
        assert limit_bytes is None or limit_bytes > 0, f"a ring of {limit_bytes} bytes keeps nothing"
        self.folder = Path(folder)
        self.rank = rank
        self.lane = lane
        self.segment_count = 0
        self.window = Window()
        self._warn = warn or warn_on_stderr
        self._header_line: HeaderLine | None = None
        self._is_open = False
        self._map: mmap.mmap | None = None
        self._size = 0
        self._populated = 0
        self._block_start = 0
        self._block_count = 0
        self._limit_bytes = limit_bytes
        self._age_s = age_s
        self._packer = packer
        self._segment_bytes_max = (
            SEGMENT_BYTES_MAX if limit_bytes is None else min(SEGMENT_BYTES_MAX, _quarter(limit_bytes))
        )
        self._next_bytes = min(SEGMENT_BYTES_MIN, self._segment_bytes_max)
        self._path: Path | None = None
        self._identity: Identity = (0, 0)
        # Of a ring: what can be removed, oldest first.
        self._sealed: deque[Sealed] = deque()

    @property
    def drops_oldest(self) -> bool:
        return self._limit_bytes is not None or self._age_s is not None

    def open(self, header_line: HeaderLine) -> None:
        self._header_line = header_line
        self._is_open = True
        # A child would share the mapping and write over its parent's lines. Asking for the process
        # id at every line would cost a system call; the reference is weak because the interpreter
        # keeps such a hook for ever.
        os.register_at_fork(after_in_child=partial(_leave_to_parent, weakref.ref(self)))
        try:
            self.folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        except OSError as error:
            self._give_up(error)
            return
        self._begin_segment(0)

    def write(self, line: bytes) -> None:
        window = self.window
        if window.used + len(line) >= window.mark and not self._advance(len(line)):
            return
        start = window.used
        end = start + len(line)
        window.buffer[start:end] = line
        # The newline is what makes the line a record, so it comes after the rest.
        window.buffer[end] = NEWLINE
        window.used = end + 1

    def close(self) -> None:
        self._is_open = False
        self._seal()

    # Where lines may be taken back: only inside of the block that is being written.

    def position(self) -> Position:
        return self._block_count, self.window.used

    def since(self, position: Position) -> bytes | None:
        block, start = position
        if block != self._block_count or self._map is None:
            return None
        return self._map[start : self.window.used]

    def rewind(self, position: Position) -> None:
        assert position[0] == self._block_count and self._map is not None, "lines of a closed block are final"
        start, end = position[1], self.window.used
        if start < end:
            # A reader stops at a zero byte: from the first store on, the lines behind it are gone.
            self._map[start] = 0
            self._map[start:end] = bytes(end - start)
        self.window.used = start

    def rewrite(self, position: Position, line: bytes) -> bool:
        block, start = position
        if block != self._block_count or self._map is None:
            return False
        self._map[start : start + len(line)] = line
        return True

    def _advance(self, line_bytes: int) -> bool:
        """Make room for a line, behind a block line or in a new segment; false when there is none."""
        if not self._is_open:
            return False
        # The line, its newline, and the lines of this block and of its own.
        if self._map is not None and self.window.used + line_bytes + 1 + 2 * BLOCK_LINE_BYTES <= self._size:
            self._end_block()
            self._set_mark(line_bytes)
            return True
        return self._begin_segment(line_bytes)

    def _begin_segment(self, line_bytes: int) -> bool:
        assert self._header_line is not None
        header = self._header_line()
        needed_bytes = len(header) + 1 + line_bytes + 1 + 2 * BLOCK_LINE_BYTES
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
        self._set_mark(len(header))
        self.write(header)
        self._set_mark(line_bytes)
        return True

    def _set_mark(self, line_bytes: int) -> None:
        window = self.window
        wanted = max(self._block_start + BLOCK_BYTES, window.used + line_bytes + 1)
        window.mark = min(wanted, self._size - BLOCK_LINE_BYTES)
        self._populate(window.used, min(window.mark + BLOCK_LINE_BYTES, self._size))

    def _populate(self, start: int, end: int) -> None:
        """Have the next block's pages at hand: one by one, as lines touch them, they cost twice as much."""
        start = max(start, self._populated) // PAGE_BYTES * PAGE_BYTES
        if start >= end or self._map is None:
            return
        self._populated = -(-end // PAGE_BYTES) * PAGE_BYTES
        # A kernel that does not know it, or has no memory to spare, leaves it to the lines.
        with contextlib.suppress(OSError, ValueError):
            self._map.madvise(POPULATE_WRITE, start, min(self._populated, self._size) - start)

    def _end_block(self) -> None:
        """Write the checksum of the lines since the last one."""
        segment, window = self._map, self.window
        start, end = self._block_start, window.used
        if segment is None or start == end:
            return
        checksum = zlib.crc32(segment[start:end])
        line = b'{"kind":"block","bytes":%d,"crc32":"%08x"}\n' % (end - start, checksum)
        segment[end : end + len(line)] = line
        window.used = self._block_start = end + len(line)
        self._block_count += 1

    def _make_room(self, size: int) -> None:
        """Remove a ring's oldest files until `size` bytes more are within its limit.

        Killed in between, it leaves a ring that is a little shorter: what is there has no gap.
        """
        sealed = self._sealed
        if self._age_s is not None:
            oldest_s = time.monotonic() - self._age_s
            while sealed and sealed[0].sealed_s < oldest_s:
                sealed.popleft().remove()
        if self._limit_bytes is None:
            return
        # While a file is packed it is there twice, the second time smaller.
        packing_bytes = size if self._packer is not None else 0
        while sealed and sum(one.used_bytes for one in sealed) + size + packing_bytes > self._limit_bytes:
            sealed.popleft().remove()

    def _map_new(self, path: Path, size: int) -> None:
        try:
            self._map, self._identity = _mapped(path, size)
        except OSError as error:
            if error.errno != errno.EMFILE or not allow_open_files():
                raise
            self._map, self._identity = _mapped(path, size)
        self.window.buffer = self._map
        self.window.used = self._block_start = self._populated = 0
        self._size = size
        self._block_count += 1

    def _seal(self) -> None:
        """Cut the segment to what was used and unmap it."""
        if self._map is None:
            return
        self._end_block()
        used_bytes = self._size
        # When this fails the zero bytes stay, and a reader stops at them.
        with contextlib.suppress(OSError, ValueError, SystemError):
            self._map.resize(self.window.used)
            used_bytes = self.window.used
        self._unmap()
        if self._path is None or not (self.drops_oldest or self._packer):
            return
        sealed = Sealed(self._path, self._identity, used_bytes, time.monotonic())
        if self.drops_oldest:
            self._sealed.append(sealed)
        if self._packer is not None:
            self._packer.submit(sealed)

    def _unmap(self) -> None:
        window = self.window
        window.mark = 0
        window.buffer = bytearray()
        window.used = 0
        if self._map is not None:
            self._map.close()
        self._map = None
        self._size = 0
        self._block_start = 0

    def _give_up(self, error: Exception) -> None:
        self._is_open = False
        self._seal()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        tell(
            self._warn,
            f"tracing of rank {self.rank}, lane {self.lane} is off from here on: {reason} "
            f"({self.folder / segment_name(self.rank, self.lane, self.segment_count)})",
        )


def _quarter(limit_bytes: int) -> int:
    """The size of a ring's segments: whole pages, at least one."""
    return max(PAGE_BYTES, limit_bytes // RING_SEGMENTS // PAGE_BYTES * PAGE_BYTES)


def _mapped(path: Path, size: int) -> tuple[mmap.mmap, Identity]:
    """A new file of `size` bytes in memory; the mapping keeps a descriptor of its own."""
    packed = path.with_name(path.name + PACKED)
    if packed.exists():
        # An earlier run's, and this one's would take its place.
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(packed))
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


def _leave_to_parent(reference: weakref.ref[SegmentSink]) -> None:
    """In a forked child: unmap without touching the file, and say nothing."""
    sink = reference()
    if sink is None:
        return
    sink._is_open = False
    sink._unmap()
