"""Stack dumps inside of text: which lines may be of one, whose they are, and the rows that come of them.

    [rank3]: Thread 41 (idle): "MainThread"     what a launcher puts in front tells the streams apart
    === Rank 3: host:25999 ===                  torch's debug server: what follows is of that rank

Each format gives a `Reader`, one for each stream; two dumps that a launcher has mixed line by line come apart
so. What has no mark of any dump in it is passed over by the block. Nothing that a line holds is an error: it
is somebody else's line, and is counted. Arguments and locals are never kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from tracer.errors import HitsError
from tracer.importers.dossier import At, Dossier, Frame, Line, Stack, Who
from tracer.importers.rank_divergence import AXES, LAUNCHED, STAMPS
from tracer.importers.sniff import COLOURS, File, printable
from tracer.importers.stacks import MAIN_THREAD, is_started_thread, signature_of, wait_of

# A line of a dump is a function and a file; what is longer is cut there.
LINE_BYTES_MAX = 1 << 14
TEXT_CHARS_MAX = 300
STREAMS_MAX = 512
# 128 ranks with 60 threads of 60 frames.
FRAMES_MAX = 500_000
STACK_FRAMES_MAX = 512
PID_MAX = (1 << 31) - 1
LINE_MAX = (1 << 31) - 1
ID_MAX = (1 << 64) - 1
# Lines of others that may stand in the middle of a dump.
FOREIGN_MAX = 20
# Lines inside of dumps; a file of them has some ten thousand.
LINES_MAX = 2_000_000

SECTION = re.compile(r"=== Rank (\d{1,6}): (\S{1,200}) ===")
SECTION_MARK = b"=== Rank "
NUMBERED = re.compile(rb"\[rank(\d{1,6})\]:|\(rank ?(\d{1,6})\)|\[\d+,(\d{1,6})\]<std")
TAGGED = re.compile(r"\[\d{4}-\d\d-\d\d[ T][\d:.,]+((?: [A-Z_]+\d{1,6})+)\]")
TAG = re.compile(r"(?:^|[ _])(DP|PP|ATTN_CP|CP|TP)(\d{1,6})(?=$|[ _])")
DOCKER = b'{"log":"'


@dataclass(slots=True)
class Source:
    """Where the lines of one stream come from, as far as that is known by now."""

    sheet: Sheet
    key: bytes
    rank: int | None = None
    host: str = ""

    def who(self, *, pid: int | None = None, places: dict[str, int] | None = None) -> Who:
        return Who(self.rank, pid, self.host, places or {})


class Reader(Protocol):
    """Reads one stream; made anew for each."""

    is_open: bool

    def take(self, number: int, text: str) -> bool:
        """Whether a line, without its launcher's prefix, is of this format; blank ones come too."""

    def close(self) -> None:
        """No more lines of this stream, or another process's begin."""


@dataclass(slots=True)
class Thread:
    """A thread while its lines come; frames innermost first, or turned before it is added."""

    number: int
    thread_id: int
    name: str = ""
    state: str = ""
    frames: list[Frame] = field(default_factory=list)
    is_cut: bool = False


@dataclass(slots=True)
class Sheet:
    """The rows of one file, within what a file may hold.

    Attributes:
        looks: process -> looks at it in this file so far.
    """

    index: int
    into: Dossier
    looks: dict[object, int] = field(default_factory=dict)
    frames_left: int = FRAMES_MAX
    is_full: bool = False
    _known: dict[Frame, Frame] = field(default_factory=dict)

    def look(self, process: object) -> int:
        """Begin another look at a process; its number."""
        self.looks[process] = self.looks.get(process, -1) + 1
        return self.looks[process]

    def add(self, thread: Thread, who: Who, sample: int) -> None:
        frames = tuple(self._known.setdefault(frame, frame) for frame in thread.frames)
        if len(frames) > self.frames_left:
            if not self.is_full:
                self.note(f"more than {FRAMES_MAX:,} frames: from line {thread.number:,} on nothing is kept")
            self.is_full = True
        if self.is_full:
            return
        self.frames_left -= len(frames)
        stack = Stack(
            who,
            sample,
            thread.thread_id,
            thread.name,
            thread.state,
            frames,
            wait_of(frames, thread.state),
            signature_of(frames),
            At(self.index, thread.number),
        )
        self.into.stacks.append(stack)

    def add_look(self, threads: Sequence[Thread], who: Who, sample: int) -> None:
        """Threads of one process; of a tool that tells no names, the main one is the last not begun by
        `threading`, since all others are."""
        if not any(thread.name == MAIN_THREAD for thread in threads):
            own = [thread for thread in threads if not thread.is_cut and not is_started_thread(thread.frames)]
            if own and not own[-1].name:
                own[-1].name = MAIN_THREAD
        for thread in threads:
            self.add(thread, who, sample)

    def say(self, who: Who, event: str, number: int, **fields: str | int) -> None:
        self.into.lines.append(Line(who, event, fields, At(self.index, number)))

    def note(self, text: str) -> None:
        notes = self.into.files[self.index].notes
        if text not in notes:
            notes.append(text)


def frame_of(func: str, file: str, line: str | None, *, is_native: bool = False) -> Frame:
    """A frame of what a line says, with nothing in it that can't be printed."""
    number = int(line) if line and len(line) <= 10 else 0
    return Frame(short(func), short(file), min(number, LINE_MAX), is_native)


def short(text: str) -> str:
    return printable(text.strip())[:TEXT_CHARS_MAX]


def whole(text: str, most: int) -> int:
    """A number as a tool prints it, decimal or `0x...`; 0 where it is beyond what can be."""
    if len(text) > 20:
        return 0
    number = int(text, 16 if text[:2] in ("0x", "0X") else 10)
    return number if number <= most else 0


def places_of(tags: str) -> dict[str, int]:
    """`DP1 TP3`, or a process's title `scheduler_DP1_TP3`, as axis -> place."""
    return {AXES[axis]: int(number) for axis, number in TAG.findall(tags)}


def scan(
    file: File,
    index: int,
    into: Dossier,
    *,
    marks: Sequence[bytes],
    reader: Callable[[Source], Reader],
    name: tuple[str, int],
) -> None:
    """Give each line to the reader of its stream, and tell in `into.files[index]` what became of them.

    Args:
        marks: without any of these nothing begins.
        name: the format and its version.
    """
    read = into.files[index]
    scanning = _Scan(Sheet(index, into), (*marks, SECTION_MARK), reader)
    try:
        for block in _blocks(file):
            scanning.block(block)
    except HitsError as error:
        read.refused = error.what
    except OSError as error:
        read.refused = f"it can't be read: {error.strerror or error}"
    scanning.close()
    read.records = scanning.seen
    read.unparsed = scanning.seen - scanning.taken
    if scanning.is_mine:
        read.format, read.version = name


class _Scan:
    """The lines of one file on their way to the readers.

    Attributes:
        seen, taken: lines, without blank ones between dumps; those of them that are of a dump.
    """

    def __init__(self, sheet: Sheet, marks: Sequence[bytes], make: Callable[[Source], Reader]) -> None:
        self.seen = self.taken = 0
        self.is_mine = False
        self._sheet = sheet
        self._marks = marks
        self._make = make
        self._streams: dict[bytes, tuple[Source, Reader]] = {}
        self._open: set[bytes] = set()
        self._number = 0
        self._read = 0
        self._is_told = False

    def block(self, block: bytes) -> None:
        lines = block.splitlines()
        is_done = self._sheet.is_full or self._is_told
        if is_done or (not self._open and not any(mark in block for mark in self._marks)):
            self.seen += sum(1 for line in lines if line.strip())
            self._number += len(lines)
            return
        is_blank = False
        for line in lines:
            self._number += 1
            if not line.strip():
                # Inside a dump they are part of it, and one tells as much as many.
                if self._open and not is_blank:
                    self._line(line)
                self.seen += bool(self._open)
                self.taken += bool(self._open)
                is_blank = True
                continue
            is_blank = False
            self.seen += 1
            if self._open or any(mark in line for mark in self._marks):
                is_taken = self._line(line)
                self.taken += is_taken
                self.is_mine = self.is_mine or is_taken

    def close(self) -> None:
        for _, reader in self._streams.values():
            reader.close()

    def _line(self, line: bytes) -> bool:
        self._read += bool(self._open)
        if self._read > LINES_MAX:
            if not self._is_told:
                self._is_told = True
                told = (
                    f"more than {LINES_MAX:,} lines of dumps: from line {self._number:,} on nothing is read"
                )
                self._sheet.note(told)
            return False
        key, text = _unwrapped(line)
        source, reader = self._stream(key)
        section = SECTION.fullmatch(text.strip()) if text.startswith("=== Rank ") else None
        if section is not None:
            reader.close()
            source.rank = int(section[1])
            source.host = printable(section[2].rpartition(":")[0] or section[2])
            is_taken = True
        else:
            is_taken = reader.take(self._number, text)
        (self._open.add if reader.is_open else self._open.discard)(source.key)
        return is_taken

    def _stream(self, key: bytes) -> tuple[Source, Reader]:
        found = self._streams.get(key)
        if found is None and len(self._streams) >= STREAMS_MAX:
            # So many prefixes are none: they have numbers in them that nobody knows of.
            key = b""
            found = self._streams.get(key)
        if found is None:
            source = Source(self._sheet, key, _rank_in(key))
            found = self._streams[key] = (source, self._make(source))
        return found


def _unwrapped(line: bytes) -> tuple[bytes, str]:
    """A line without what a launcher or collector has put round it, and what tells its stream."""
    key = b""
    if line.startswith(DOCKER):
        line = _docker(line)
    line = line[:LINE_BYTES_MAX]
    if b"\x1b" in line:
        line = COLOURS.sub(b"", line)
    launched = LAUNCHED.match(line)
    if launched is not None and launched.end():
        key, line = STAMPS.sub(b"", launched[0]).strip(), line[launched.end() :]
    return key, line.decode("utf-8", "replace")


class _Docker(msgspec.Struct):
    log: str


_DOCKER = msgspec.json.Decoder(_Docker)


def _docker(line: bytes) -> bytes:
    """The text inside a line of a container's log as docker keeps it."""
    try:
        return _DOCKER.decode(line).log.rstrip("\n").encode("utf-8", "replace")
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return line


def _rank_in(prefix: bytes) -> int | None:
    found = NUMBERED.search(prefix)
    return int(next(number for number in found.groups() if number)) if found else None


def _blocks(file: File) -> Iterator[bytes]:
    """Blocks of whole lines; a line is never held beyond what any line of a dump may have."""
    rest = b""
    for chunk in file.chunks():
        end = chunk.rfind(b"\n") + 1
        if not end:
            if len(rest) < LINE_BYTES_MAX:
                rest += chunk
            continue
        yield rest + chunk[:end]
        rest = chunk[end:]
    if rest:
        yield rest
