"""Lines of a log as their writers meant them, whatever launchers and other writers made of them.

    (Worker pid=7) [2026-03-01 12:00:00 TP1] Decode batch, [rank2]:[E301 12:00:00.1 f.cpp:1] [Rank 2] Wat..
    '-- prefix --' '----- own head -------' '--- text ---' '--- the next one's head --' '-- its text --'

Owns the way from bytes to lines that hold some word: launchers' prefixes, docker's wrapping, colours, two
logs on one line and one log on two. Only lines with one of the words are taken apart, so a log of gigabytes
costs no more than its search; a line longer than anything honest is looked at in pieces. It knows no format.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from itertools import pairwise
from typing import Any

import msgspec

from tracer.errors import HitsError
from tracer.importers.dossier import At, Dossier, Line, Who
from tracer.importers.rank_divergence import DATE, LAUNCHER, NUMBERED, WRAPPED, Wrapped
from tracer.importers.sniff import COLOURS, COUNT_MAX, File

LINE_BYTES_MAX = 1 << 20
# Of a line longer than this, only what stands around a word is looked at.
TEXT_BYTES_MAX = 1 << 15
HEAD_BYTES = 1 << 12
# How much of what follows a line is shown with it: a traceback, a table, the rest of a line that was broken.
AFTER_BYTES = 1 << 14
# Rows of one event kept of one file; a loop that fails says the same a million times.
ROWS_MAX = 5_000
# Lines with one word that are taken apart: a gigabyte of them says no more than the first of it.
HITS_MAX = 500_000
BROKEN_LINES_MAX = 8
SECOND_NS, MILLISECOND_NS = 10**9, 10**6

PLACE = rb"(?:MOE_DP|ATTN_CP|ATTN_TP|DP|PP|CP|TP|EP)\d{1,5}"
PREFIX = LAUNCHER + rb"|[\w.-]{1,60} +\| |\[pod/[\w./-]{1,200}\] "
LAUNCHED = re.compile(rb"(?:" + PREFIX + rb")*")
LAUNCHED_END = re.compile(rb"(?:" + PREFIX + rb")+\Z")
SGLANG_HEAD = rb"\[(?:" + DATE + rb")?(?: ?" + PLACE + rb")*\] "
# Severity and day, with or without a blank; newer ones have nanoseconds, older ones neither.
GLOG_HEAD = rb"\[?[EWIFVC] ?\d{3,8} \d\d:\d\d:\d\d(?:\.\d{1,9})? (?: *\d+ )?[\w./-]{1,120}:\d+\] ?"
LOGGING_HEAD = DATE + rb" (?:- )?(?:[\w.]{1,80} - )?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b[ :-]*"
HEAD = re.compile(
    rb"\[(?=" + DATE + rb"|" + PLACE + rb")(?P<time>" + DATE + rb")?(?P<places>(?: ?" + PLACE + rb")*)\] "
    rb"|" + GLOG_HEAD + rb"|" + LOGGING_HEAD
)
# Where a log begins, also in the middle of somebody else's line.
STARTS = re.compile(
    rb"\[" + DATE + rb"[^\]\n]{0,60}\] |\[rank\d{1,6}\]:|" + GLOG_HEAD + rb"|terminate called after "
)
PLACES = re.compile(rb"(MOE_DP|ATTN_CP|ATTN_TP|DP|PP|CP|TP|EP)(\d{1,5})")
PID = re.compile(rb"\(?\b[A-Za-z_][\w.]* pid=(\d{1,9})(?:, ip=([\w.:-]{1,60}))?\)")
ADDRESS = re.compile(r"\[?(\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F:]{3,39})\]?:(\d{1,5})")
BLANKS = re.compile(r"\s+")
_WRAPPED = msgspec.json.Decoder(Wrapped)


@dataclass(frozen=True, slots=True)
class Text:
    """What one writer said in one line.

    Attributes:
        number: of the physical line, from 1.
        who: by the prefix and the head; the text itself may know better.
        text: without prefix, head and colours.
        is_cut: somebody else's log begins where it ends, so its last word may lack its end.
        part, end: the part of the file that it stands in, and where in it its line ends.
    """

    number: int
    who: Who
    text: str
    is_cut: bool = False
    part: bytes = b""
    end: int = 0
    time_ns: int = 0
    time_error_ns: int = 0

    @property
    def after(self) -> bytes:
        """The bytes of the lines that follow, as far as they are shown."""
        return self.part[self.end + 1 : self.end + 1 + AFTER_BYTES] if self.part else b""

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Where the pattern is in the text, or in the text with lines behind it that nobody else began.

        Of those, one may be the rest of another writer's, so each is tried alone too.
        """
        if found := pattern.search(self.text):
            return found
        joined = self.text
        for line in self.rest():
            joined += line
            if found := pattern.search(joined) or pattern.search(self.text + line):
                return found
        return None

    def rest(self) -> Iterator[str]:
        """Lines that may be the rest of a broken one: those of other writers are left out."""
        for line in self.after.split(b"\n", BROKEN_LINES_MAX)[:BROKEN_LINES_MAX]:
            if STARTS.search(line) is None:
                yield COLOURS.sub(b"", line).decode("utf-8", "replace").rstrip("\r")

    def following(self) -> Iterator[str]:
        """The lines that follow, with their launchers' prefixes off, until somebody's log begins."""
        *lines, last = self.after.split(b"\n")
        for line in [*lines, last] if last else lines:
            line = COLOURS.sub(b"", line)
            rest = line[_end(LAUNCHED, line) :]
            if HEAD.match(rest):
                return
            yield rest.decode("utf-8", "replace").rstrip("\r")


@dataclass(slots=True)
class Reading:
    """One importer's pass over one file.

    Attributes:
        lines: physical lines so far.
        taken: numbers of those that said something.
        counted: lines that are told by a row of many.
    """

    file: File
    index: int
    into: Dossier
    lines: int = 0
    taken: set[int] = field(default_factory=set)
    counted: int = 0
    long_lines: int = 0
    _rows: dict[str, int] = field(default_factory=dict)
    _hits_of: dict[bytes, int] = field(default_factory=dict)

    def texts(self, words: Sequence[bytes], line_bytes_max: int = TEXT_BYTES_MAX) -> Iterator[Text]:
        """What is on lines with one of these words; of a longer line, what stands around the first one."""
        for first, block, limit in self.blocks():
            number, at = first, 0
            for start, hit in sorted(self._hits(block, words, limit).items()):
                number += block.count(b"\n", at, start)
                at = start
                end = block.find(b"\n", start)
                end = len(block) if end < 0 else end
                if end - start > line_bytes_max:
                    low, high = max(start, hit - HEAD_BYTES), min(end, hit + HEAD_BYTES)
                    yield from taken_apart(number, block[low:high])
                else:
                    yield from taken_apart(number, block[start:end], block, end)

    def add(self, text: Text, event: str, fields: Mapping[str, Any], who: Who | None = None) -> None:
        """A row of one line; the same thing is not kept for ever."""
        self.taken.add(text.number)
        count = self._rows[event] = self._rows.get(event, 0) + 1
        if count <= ROWS_MAX:
            at = At(self.index, text.number)
            own = text.who if who is None else who
            self.into.lines.append(Line(own, event, fields, at, text.time_ns, text.time_error_ns))

    def settle(self, format_name: str, version: int) -> None:
        """What became of the file, as far as this importer goes."""
        read = self.into.files[self.index]
        took = len(self.taken) + self.counted
        read.records, read.unparsed = self.lines, max(0, self.lines - took)
        if took:
            read.format, read.version = format_name, version
        if self.long_lines:
            read.notes.append(
                f"{self.long_lines:,} lines of more than {LINE_BYTES_MAX >> 20} MiB were looked at in pieces"
            )
        for word, count in sorted(self._hits_of.items()):
            if count > HITS_MAX:
                read.notes.append(f"{word.decode()!r}: {count:,} lines, the first {HITS_MAX:,} are looked at")
        for event, count in sorted(self._rows.items()):
            if count > ROWS_MAX:
                read.notes.append(f"{event}: {count:,} lines, the first {ROWS_MAX:,} are kept")

    def _hits(self, block: bytes, words: Sequence[bytes], limit: int) -> dict[int, int]:
        """Where lines begin that hold one of the words, and where its first word is."""
        hits: dict[int, int] = {}
        for word in words:
            count = self._hits_of.get(word, 0)
            at = block.find(word, 0, limit)
            while at >= 0:
                count += 1
                if count <= HITS_MAX:
                    start = block.rfind(b"\n", 0, at) + 1
                    hits[start] = min(at, hits.get(start, at))
                end = block.find(b"\n", at, limit)
                at = block.find(word, end, limit) if end >= 0 else -1
            self._hits_of[word] = count
        return hits

    def blocks(self) -> Iterator[tuple[int, bytes, int]]:
        """Parts of the file: the number of its first line, its bytes, and where those end that count.

        What is behind that end comes again in the next part; it is there to be looked at with a line.
        """
        rest = b""
        is_inside = False
        for chunk in self._chunks():
            block = rest + chunk
            limit = block.rfind(b"\n", 0, max(0, len(block) - AFTER_BYTES)) + 1
            if not limit and len(block) > LINE_BYTES_MAX + AFTER_BYTES:
                # A line without an end: what was read of it counts as it is.
                limit = len(block) - AFTER_BYTES
                self.long_lines += not is_inside
                is_inside = True
                yield self.lines + 1, block[:limit], limit
                rest = block[limit:]
                continue
            if limit:
                is_inside = False
                yield self.lines + 1, block, limit
                self.lines += block.count(b"\n", 0, limit)
            rest = block[limit:]
        if rest:
            yield self.lines + 1, rest, len(rest)
            self.lines += rest.count(b"\n") + (not rest.endswith(b"\n"))

    def _chunks(self) -> Iterator[bytes]:
        """The bytes of the file; what docker wrapped is unwrapped."""
        is_wrapped: bool | None = None
        rest = b""
        for chunk in self.file.chunks():
            if is_wrapped is None:
                is_wrapped = chunk.startswith(WRAPPED)
            if not is_wrapped:
                yield chunk
                continue
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > LINE_BYTES_MAX:
                rest = b""
            yield b"".join(map(_unwrapped, lines))
        if rest:
            yield _unwrapped(rest)


def _unwrapped(line: bytes) -> bytes:
    """One line of docker's own files; a part of a longer one has no end of its own."""
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        return _WRAPPED.decode(line).log.encode("utf-8", "surrogatepass")
    return b"\n"


def taken_apart(number: int, line: bytes, part: bytes = b"", line_end: int = 0) -> Iterator[Text]:
    """What each writer said on one physical line, which ends at `line_end` of a part of the file."""
    line = COLOURS.sub(b"", line).rstrip(b"\r")
    cuts = [0]
    for found in STARTS.finditer(line):
        start = found.start()
        ahead = LAUNCHED_END.search(line, max(0, start - 200), start)
        start = ahead.start() if ahead else start
        # A head of one log may hold what begins another kind: `[rank1]:[E203 ...]`.
        if start > cuts[-1] and line[cuts[-1] : start].strip() and not _is_head(line[cuts[-1] : start]):
            cuts.append(start)
    cuts.append(len(line))
    for begin, end in pairwise(cuts):
        is_last = end == len(line)
        yield _text(number, line[begin:end], part if is_last else b"", line_end, is_cut=not is_last)


def _is_head(part: bytes) -> bool:
    """Whether nothing but prefixes and heads stands there."""
    return not _beheaded(part)[0].strip()


def _beheaded(part: bytes) -> tuple[bytes, bytes, list[re.Match[bytes]]]:
    """The text of a line, the prefixes before it, and the heads between them."""
    at = 0
    prefixes = b""
    heads: list[re.Match[bytes]] = []
    # A server may log through a launcher that logs itself.
    for _ in range(4):
        end = _end(LAUNCHED, part, at)
        prefixes += part[at:end]
        found = HEAD.match(part, end)
        if found is None:
            return part[end:], prefixes, heads
        heads.append(found)
        at = found.end()
    return part[at:], prefixes, heads


def _end(pattern: re.Pattern[bytes], line: bytes, at: int = 0) -> int:
    found = pattern.match(line, at)
    return found.end() if found else at


def _text(number: int, line: bytes, part: bytes, end: int, *, is_cut: bool) -> Text:
    text, prefixes, heads = _beheaded(line)
    places: dict[str, int] = {}
    time_ns = error_ns = 0
    for head in heads:
        for axis, at in PLACES.findall(head["places"] or b""):
            places[axis.decode().lower()] = int(at)
        if head["time"] and not time_ns:
            time_ns, error_ns = nanoseconds(head["time"].decode())
    numbered = NUMBERED.search(prefixes)
    rank = int(next(filter(None, numbered.groups()))) if numbered else None
    process = PID.search(prefixes)
    who = Who(
        rank,
        int(process[1]) if process else None,
        (process[2] or b"").decode() if process else "",
        places,
    )
    return Text(number, who, text.decode("utf-8", "replace"), is_cut, part, end, time_ns, error_ns)


@lru_cache(maxsize=256)
def nanoseconds(moment: str) -> tuple[int, int]:
    """A wall clock and how far it may be off, in nanoseconds; 0, 0 where it is no time."""
    try:
        parsed = datetime.fromisoformat(moment.replace(",", "."))
        seconds = parsed.replace(tzinfo=parsed.tzinfo or UTC).timestamp()
    except (ValueError, OverflowError):
        return 0, 0
    if not 0 < seconds < 9e9:
        return 0, 0
    has_fraction = "." in moment or "," in moment
    return round(seconds * 1e6) * 1000, MILLISECOND_NS if has_fraction else SECOND_NS


def count(text: str | None) -> int | None:
    """A count as a log writes it; None where it is none that can be believed."""
    if not text or len(text) > 20:
        return None
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()):
        return None
    number = int(text)
    return number if abs(number) <= COUNT_MAX else None


def ranks_in(text: str, most: int = 100_000) -> tuple[int, ...]:
    """`0, 1, 5` as ranks."""
    found = (count(part.strip()) for part in text.split(",")[:most])
    return tuple(sorted({rank for rank in found if rank is not None and 0 <= rank < 1 << 20}))


def holds(head: bytes, words: Sequence[bytes]) -> int:
    """How many of the words a text has."""
    return sum(word in head for word in words)


def refused(into: Dossier, index: int, error: HitsError | OSError) -> None:
    """A file that could not be read to its end."""
    read = into.files[index]
    said = error.what if isinstance(error, HitsError) else f"{read.name} can't be read: {error.strerror}"
    if read.records:
        read.notes.append(f"read to line {read.records:,} only: {said}")
    else:
        read.refused = said
