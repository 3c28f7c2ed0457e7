"""The line that SGLang's rank consensus checker prints on every rank before it ends the server.

    [2026-03-01 12:00:00 TP1] Found rank divergence for 42 events(s)! local hash: 90de, events = ['..', ...]

Owns the way from the bytes of a server's log to one list of events a rank: whatever a launcher puts in front,
lines that another process wrote into, lines that a collector broke, and lists without their end. A file is
read in chunks and a list event by event, so memory grows neither with the log nor with the line. The hash
tells which lists are whole: it is the SHA-1 over their events. It reads, and judges nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from tracer.errors import LogError, TracerError
from tracer.importers.python_reprs import Leaf, Value, leaves, value
from tracer.importers.sniff import BLOCK_BYTES, GZIP, RATIO_FREE_BYTES, RATIO_MAX, ZSTD, File

ENABLED = b"Rank consensus checker is enabled"
# How a list ends.
WHOLE, BROKEN, CUT = "", "broken", "its list is cut"
LOST = "it was broken, and the rest of it did not come"
# How docker's own files begin.
WRAPPED = b'{"log":"'
NEEDLE = b"Found rank divergence for "
HEAD = re.compile(
    rb"Found rank divergence for (?P<count>\d{1,15}) events?(?:\(s\))?!"
    rb"(?: local hash: (?P<hash>[0-9A-Za-z]*)(?P<list>, events = \[)?)?"
)
EVENT = re.compile(r"(?P<name>[A-Za-z_]\w*) (?:called params|returns result)=", re.ASCII)
UNCHECKED = "<no check>"
# Longer than any prefix or head.
HEAD_BYTES = 512
EVENT_BYTES_MAX = 64 << 20
# Lines of other processes that may stand inside of one that was broken.
LINES_BETWEEN_MAX = 1000

COLOUR = rb"(?:\x1b\[[0-9;]*m)"
DATE = rb"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?"
# What launchers and collectors write in front of a line, in any order.
LAUNCHER = (
    COLOUR + rb" ?|\([A-Za-z_][\w.]* pid=\d+(?:, [^)\n]{0,60})?\) ?|\[(?:default|rank)\d+\]: ?"
    rb"|\(rank ?\d+\):? ?|\[\d+,\d+\]<std(?:err|out)>: ?"
    rb"|\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d)? (?:std(?:out|err) [FP] )?"
)
LAUNCHED = re.compile(rb"(?:" + LAUNCHER + rb"|[\w.-]{1,60} +\| )*")
# Behind somebody else's text a name of a service has no beginning.
LAUNCHED_END = re.compile(rb"(?:" + LAUNCHER + rb")+\Z")
INTERRUPTED = re.compile(rb"(?:" + LAUNCHER + rb")*" + rb"\[" + DATE)
STAMPS = re.compile(DATE + rb"(?:Z|[+-]\d\d:?\d\d)?")
# The start of a process's own line: in the middle of another's, it has been written into that.
OWN_START = rb"\[" + DATE + rb"(?: [A-Z_]+\d+)*\] "
OWN = re.compile(rb"\[" + DATE)
OWN_LINE = re.compile(OWN_START)
TAGGED = re.compile(rb"\[" + DATE + rb"((?: [A-Z_]+\d+)+)\] ")
FOREIGN = re.compile(
    rb"\s*$|\[" + DATE + rb"|" + DATE + rb"|(?:INFO|WARNING|ERROR|CRITICAL|DEBUG)\b|Traceback \(|  File \""
    rb"|[IWEF]\d{4} \d\d:|Process |Fatal Python error|" + NEEDLE
)
# What in a string is more than text: an escape, its end, and where its line ends or another begins.
STOP = rb"\\(?!\n|%(own)s).|\\|%(quote)s|\n|(?=%(own)s|%(needle)s\d)"
STOPS = {
    quote: re.compile(STOP % {b"own": OWN_START, b"quote": quote, b"needle": NEEDLE}, re.DOTALL)
    for quote in (b"'", b'"')
}
QUOTES = {quote: re.compile(quote) for quote in STOPS}
BETWEEN = re.compile(rb",? ?(['\"\]])")
ESCAPE = re.compile(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|.)", re.DOTALL)
ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}

TAG = re.compile(rb"\b(DP|PP|ATTN_CP|CP|TP)(\d{1,5})\b")
AXES = {"DP": "dp", "PP": "pp", "ATTN_CP": "cp", "CP": "cp", "TP": "tp"}
NUMBERED = re.compile(rb"\[rank(\d{1,6})\]:|\(rank ?(\d{1,6})\)|\[\d+,(\d{1,6})\]<std|\[default(\d{1,6})\]:")

# Axis -> coordinate, as the tag of a line says.
Tags = tuple[tuple[str, int], ...]


class Wrapped(msgspec.Struct):
    """A line of a container's log, or a part of one, as docker keeps it."""

    log: str


_WRAPPED = msgspec.json.Decoder(Wrapped)


@dataclass(frozen=True, slots=True)
class Event:
    """One call of a decorated function, or its return.

    Attributes:
        name: of the function; "" for a text that is neither.
        raw: digest of the text as it was printed, addresses and all.
    """

    name: str
    phase: str
    fields: Mapping[str, Value]
    raw: bytes


@dataclass(frozen=True, slots=True)
class Printed:
    """One divergence line.

    Attributes:
        path, file, line: where it begins; `file` is what a person calls it.
        offset: of its first byte in the unwrapped file, by which it can be found again.
        tags: of the rank, none where the line has no tag.
        number: the rank by the launcher's prefix, None where that has none.
        seconds: by the server's wall clock; None where the line has no time.
        count, hash: what the line states.
        events: those that can be trusted, from the first on.
        is_proven: its events give the hash that it states.
        damage: why reading stopped before the end of the list, or nothing.
        byte_count: from its beginning to where reading it stopped.
        read: every event up to there, believed or not; actual: the hash that they give.
        origin: beginning of the list that `events` are from; another's, where two were mixed up.
        text: the line, where it had to be put together from pieces.
    """

    file: File
    line: int
    offset: int
    tags: Tags
    number: int | None
    seconds: float | None
    count: int
    hash: str
    events: tuple[Event, ...]
    is_proven: bool
    damage: str = ""
    byte_count: int = 0
    read: tuple[Event, ...] = ()
    actual: str = ""
    origin: int = 0
    text: bytes = b""

    @property
    def is_whole(self) -> bool:
        """Whether its list has its end."""
        return not self.damage

    @property
    def is_pieced(self) -> bool:
        """Whether its list was put together from pieces that stood elsewhere."""
        return bool(self.text) or self.origin != self.offset


@dataclass(slots=True)
class Lines:
    """What the logs of a server hold.

    Attributes:
        tags: every rank that wrote any line.
        lines: file -> lines in it.
        notes: files that could not be read to their end, each as a sentence.
        is_enabled: some line says that the checker was on.
    """

    printed: list[Printed] = field(default_factory=list)
    tags: set[Tags] = field(default_factory=set)
    lines: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    is_enabled: bool = False


def read_lines(files: Sequence[File]) -> Lines:
    """Every divergence line of these files, in their order.

    Raises:
        LogError: none of the files can be read.
    """
    found = Lines()
    memory: dict[bytes, Event] = {}
    failed: TracerError | None = None
    for file in files:
        scan = Scan(file, lambda _offset, _index, text: event_of(text, memory))
        printed: list[Printed] = []
        try:
            printed.extend(scan.lists())
        except TracerError as error:
            failed = error
            found.notes.append(str(error).splitlines()[0])
        found.printed += sorted(printed, key=lambda one: one.offset)
        found.lines[file.name] = scan.lines
        found.tags |= set(map(tags_of, scan.tags))
        found.is_enabled |= scan.is_enabled
    if failed is not None and len(found.notes) == len(files):
        raise LogError(failed.what, where=failed.where, expected=failed.expected, hint=failed.hint)
    return found


def texts_of(printed: Printed, index: int | None = None) -> list[str]:
    """The text of every event, or of the one at `index`, read from the file again."""
    kept: list[str] = []
    # A line that was put together stands at the beginning.
    offset = printed.text.find(NEEDLE) if printed.text else printed.origin

    def keep(of: int, at: int, text: str) -> Event:
        if of == offset and index in (None, at):
            kept.append(text)
        return _NOTHING

    for one in Scan(printed.file, keep, [printed.text] if printed.text else None).lists():
        if one.offset == offset or (kept and index is not None):
            break
    return kept


def fields_of(text: str) -> list[Leaf]:
    """The fields of an event; one that is neither a call nor a return is a text, and none of it a name."""
    name, phase, payload = _taken_apart(text)
    if not name:
        return [Leaf("text", text)]
    return leaves(payload, is_result=phase == "return") if payload != UNCHECKED else []


def _taken_apart(text: str) -> tuple[str, str, str]:
    """Name, phase and payload; no name and no phase where it is neither a call nor a return."""
    match = EVENT.match(text)
    if match is None:
        return "", "", text
    phase = "call" if text[match.end("name") + 1] == "c" else "return"
    return match["name"], phase, text[match.end() :]


def tags_of(text: bytes) -> Tags:
    """` DP1 TP3` as axes and coordinates, in the order of the axes' names."""
    return tuple(sorted({AXES[axis.decode()]: int(number) for axis, number in TAG.findall(text)}.items()))


_NOTHING = Event("", "", {}, b"")


def event_of(text: str, memory: dict[bytes, Event]) -> Event:
    """An event by its text; ranks that agree share it."""
    raw = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    if raw not in memory:
        name, phase, _payload = _taken_apart(text)
        memory[raw] = Event(name, phase, {leaf.name: value(leaf) for leaf in fields_of(text)}, raw)
    return memory[raw]


@dataclass(slots=True)
class _List:
    """A list while it is read.

    Attributes:
        launched: launcher's prefix of its line, without times: the rest of a broken line has the same.
        quote: of the string that is open; empty between two.
        is_escaped: it was broken behind a backslash, so that its next byte is no quote.
        sure: events before the first place at which another line may have come in between.
    """

    line: int
    offset: int
    prefix: bytes
    launched: bytes
    count: int
    hash: str
    quote: bytes = b""
    is_escaped: bool = False
    part: bytearray = field(default_factory=bytearray)
    events: list[Event] = field(default_factory=list)
    sha1: hashlib._Hash = field(default_factory=lambda: hashlib.sha1(usedforsecurity=False))
    sure: int | None = None
    lines_between: int = 0
    is_there: bool = True


class Scan:
    """One pass over one file, with no more of it in memory than a chunk and the event that is being read.

    Attributes:
        line: number of the line that is being read.
        parked: lists that were broken, the last one at the end.
    """

    def __init__(
        self, file: File, make: Callable[[int, int, str], Event], chunks: Sequence[bytes] | None = None
    ) -> None:
        self.file = file
        self.line = 1
        self.parked: list[_List] = []
        self.tags: set[bytes] = set()
        self.is_enabled = False
        self._make = make
        self._chunks = chunks_of(file) if chunks is None else iter(chunks)
        self._is_end = False
        self._buffer = self._last = b""
        # The next byte to look at, and the offset in the file of the buffer's first one.
        self._at = 0
        self._base = 0

    @property
    def lines(self) -> int:
        """Lines read so far; the last one may lack its end."""
        return self.line - 1 + (self._last not in (b"", b"\n"))

    def lists(self) -> Iterator[Printed]:
        """The lists of the file, in the order in which they end."""
        while (current := self._next()) is not None:
            if (found := self._read(current)) is not None:
                yield found
            while self.parked and self.parked[0].lines_between > LINES_BETWEEN_MAX:
                yield self._printed(self.parked.pop(0), LOST)
        for left in self.parked:
            yield self._printed(left, LOST)

    def _next(self) -> _List | None:
        """The next list that begins, or one that goes on; None at the end of the file."""
        while True:
            end = self._buffer.find(b"\n", self._at) if self.parked else -1
            found = self._buffer.find(NEEDLE, self._at, end if end >= 0 else len(self._buffer))
            if found >= 0:
                self._advance(found)
                return self._begun()
            if end >= 0:
                self._advance(end + 1)
                if self._goes_on():
                    return self.parked.pop()
                continue
            self._advance(max(self._at, len(self._buffer) - len(NEEDLE)))
            if not self._fill():
                self._advance(len(self._buffer))
                return None

    def _begun(self) -> _List:
        """The list whose needle is here; without its head if there is none."""
        self._need()
        buffer, at = self._buffer, self._at
        start = max(buffer.rfind(b"\n", 0, at) + 1, at - HEAD_BYTES)
        prefix = buffer[start:at]
        # Another process may have left the beginning of a line of its own in front.
        own = max((found.start() for found in OWN.finditer(prefix)), default=0)
        if own and not LAUNCHED.fullmatch(prefix, 0, own):
            ahead = LAUNCHED_END.search(prefix[:own])
            prefix = prefix[ahead.start() if ahead else own :]
        launched = _launched(prefix)[0]
        if own and not launched and self.parked:
            # It began in the middle of a line, in front of which a collector put something once.
            launched = self.parked[-1].launched
        head = HEAD.match(buffer, at)
        current = _List(
            self.line,
            self._base + at,
            prefix,
            launched,
            int(head["count"]) if head else 0,
            (head["hash"] or b"").decode().lower() if head else "",
            is_there=head is not None and head["list"] is not None,
        )
        self._advance(head.end() if head else at + len(NEEDLE))
        return current

    def _goes_on(self) -> bool:
        """Whether the line that begins here is the rest of the last list that was broken; steps to it."""
        self._need()
        last = self.parked[-1]
        line = self._buffer[self._at : self._at + HEAD_BYTES].partition(b"\n")[0]
        launched, length = _launched(line) if last.launched else (b"", 0)
        if launched == last.launched + b" ":
            # The blank is of the text that was broken.
            launched, length = last.launched, length - 1
        # A collector puts it in front of the rest too, a pipe into which two have written does not.
        if launched not in (last.launched, b"") or FOREIGN.match(line[length:]):
            last.lines_between += 1
            return False
        self._advance(self._at + length)
        return True

    def _read(self, current: _List) -> Printed | None:
        """The list, once it has come to an end; None when it was broken and may go on below."""
        if not current.is_there:
            return self._printed(current, "it ends before its list")
        while True:
            ended = self._string(current) if current.quote else self._between(current)
            if ended == BROKEN:
                self.parked.append(current)
                return None
            if ended is not None:
                return self._printed(current, ended)

    def _between(self, current: _List) -> str | None:
        """Step into the next event; or how the list ends here."""
        self._need()
        match = BETWEEN.match(self._buffer, self._at)
        if match is not None:
            self._advance(match.end())
            if match[1] == b"]":
                return WHOLE
            current.quote = match[1]
            return None
        rest = self._buffer[self._at : self._at + HEAD_BYTES].lstrip(b", ")
        if not rest:
            return CUT
        if rest.startswith((b"\n", b"\r\n")) or INTERRUPTED.match(rest):
            return self._broken(current)
        return "its list is damaged"

    def _string(self, current: _List) -> str | None:
        """Read the open string to its end; or how the list ends in it."""
        self._need()
        if current.is_escaped and self._at < len(self._buffer):
            current.part += self._buffer[self._at : self._at + 1]
            current.is_escaped = False
            self._advance(self._at + 1)
        while True:
            # What is found near the end of what was read may be the beginning of something else.
            until = len(self._buffer) - (0 if self._is_end else HEAD_BYTES)
            match = self._stop(current.quote, until)
            if match is None or match.start() >= until:
                until = max(self._at, until)
                current.part += self._buffer[self._at : until]
                self._advance(until)
                if len(current.part) > EVENT_BYTES_MAX:
                    return f"it has an event of more than {EVENT_BYTES_MAX >> 20} MiB"
                if self._is_end:
                    return CUT
                self._fill()
                continue
            current.part += self._buffer[self._at : match.start()]
            mark = match[0]
            if mark == current.quote:
                self._advance(match.end())
                self._take(current)
                return None
            if not mark.startswith(b"\\"):
                self._advance(match.start())
                return self._broken(current)
            current.part += mark
            current.is_escaped = len(mark) == 1
            self._advance(match.end())

    def _stop(self, quote: bytes, until: int) -> re.Match[bytes] | None:
        """The next thing in a string that is more than text; None where there is none before `until`."""
        buffer, at = self._buffer, self._at
        end = buffer.find(quote, at, until)
        # A mark that begins before `until` may end behind it.
        limit = end if end >= 0 else len(buffer)
        is_plain = all(buffer.find(mark, at, limit) < 0 for mark in (b"\\", b"\n", NEEDLE))
        # Ten times as fast as the expression, on text in which there is nothing.
        if is_plain and OWN.search(buffer, at, limit) is None:
            return QUOTES[quote].match(buffer, end) if end >= 0 else None
        return STOPS[quote].search(buffer, at)

    def _take(self, current: _List) -> None:
        text = _unescaped(bytes(current.part).decode("utf-8", "surrogateescape"))
        current.part.clear()
        current.quote = b""
        current.sha1.update(_bytes(text))
        current.events.append(self._make(current.offset, len(current.events), text))

    def _broken(self, current: _List) -> str:
        """A line ends, or another one begins, in the middle of a list."""
        if current.sure is None:
            current.sure = len(current.events)
        is_line = self._buffer[self._at : self._at + 1] == b"\n"
        if not is_line and (ahead := LAUNCHED_END.search(bytes(current.part[-HEAD_BYTES:]))):
            del current.part[len(current.part) - len(ahead[0]) :]
        return BROKEN

    def _printed(self, current: _List, ended: str) -> Printed:
        actual = current.sha1.hexdigest() if ended == WHOLE else ""
        is_proven = bool(actual) and actual == current.hash
        events = current.events
        if not is_proven and current.sure is not None:
            events = events[: current.sure]
            ended = ended or "another line stands in the middle of it"
        number = NUMBERED.search(current.prefix)
        return Printed(
            self.file,
            current.line,
            current.offset,
            tags_of(current.prefix),
            int(next(filter(None, number.groups()))) if number else None,
            _seconds(current.prefix),
            current.count,
            current.hash,
            tuple(events),
            is_proven=is_proven,
            damage=ended,
            byte_count=self._base + self._at - current.offset,
            read=tuple(current.events),
            actual=actual,
            origin=current.offset,
        )

    def _advance(self, to: int) -> None:
        self.line += self._buffer.count(b"\n", self._at, to)
        self._at = to

    def _need(self) -> None:
        """Have as much in front as any head takes, where the file has that."""
        while len(self._buffer) - self._at < HEAD_BYTES and self._fill():
            pass

    def _fill(self) -> bool:
        """Read on, and drop what was used but for the start of a line; false at the end of the file."""
        chunk = next(self._chunks, b"")
        self._is_end = not chunk
        drop = len(self._buffer) if self._is_end else max(0, self._at - HEAD_BYTES)
        # A tag that is cut by the end of this part is whole in the next.
        self.tags.update(TAGGED.findall(self._buffer, 0, drop))
        self.is_enabled |= self._buffer.find(ENABLED, 0, drop) >= 0
        if chunk:
            self._last = chunk[-1:]
            self._buffer = self._buffer[drop:] + chunk
            self._at -= drop
            self._base += drop
        return bool(chunk)


def chunks_of(file: File) -> Iterator[bytes]:
    """The bytes of a file, unwrapped, however many.

    Raises:
        TracerError: it can't be read, or is better compressed than anything honest.
    """
    try:
        on_disk = max(1, file.path.stat().st_size)
    except OSError as error:
        raise LogError(f"{file.name} can't be read: {error.strerror}") from None
    size = 0
    rest: bytes | None = None
    with file.opened() as stream:
        while chunk := stream.read(BLOCK_BYTES):
            if not size and chunk.startswith(WRAPPED):
                rest = b""
            if not size and chunk.startswith((GZIP, ZSTD)):
                raise LogError(f"{file.name} is compressed twice", hint="unwrap it once")
            size += len(chunk)
            if size > RATIO_FREE_BYTES and size > RATIO_MAX * on_disk:
                raise LogError(f"{file.name} unwraps to more than {RATIO_MAX} times its size: refused")
            if rest is not None:
                chunk, rest = _unwrapped(rest + chunk)
            if chunk:
                yield chunk


def _unwrapped(wrapped: bytes) -> tuple[bytes, bytes]:
    """What docker has put into a JSON object a line, or several for a long one; and an unfinished line."""
    *lines, rest = wrapped.split(b"\n")
    found = []
    for line in lines:
        with suppress(msgspec.MsgspecError, ValueError):
            found.append(_WRAPPED.decode(line).log.encode("utf-8", "surrogatepass"))
    return b"".join(found), rest


def _launched(line: bytes) -> tuple[bytes, int]:
    """What a launcher put in front of a line, without its times and marks, and how long that is."""
    match = LAUNCHED.match(line)
    assert match is not None
    return STAMPS.sub(b"", match[0]).replace(b" P ", b" F "), match.end()


def _unescaped(text: str) -> str:
    """A string as it was before `repr`."""
    if "\\" not in text:
        return text

    def one(match: re.Match[str]) -> str:
        mark = match[1]
        if len(mark) == 1:
            return ESCAPED.get(mark, mark)
        code = int(mark[1:], 16)
        return chr(code) if code <= 0x10FFFF else match[0]

    return ESCAPE.sub(one, text)


def _bytes(text: str) -> bytes:
    """The text as it was hashed, also where bytes of it are no text."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _seconds(prefix: bytes) -> float | None:
    found = re.search(DATE, prefix)
    if found is None:
        return None
    try:
        moment = datetime.fromisoformat(found[0].decode().replace(",", "."))
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC).timestamp()
