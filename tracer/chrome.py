"""Chrome trace JSON, an event at a time: what Perfetto and chrome://tracing open.

Owns the bytes and nothing of what is drawn. Times are nanoseconds in, microseconds with exact decimals out,
counted from the trace's own zero: a double could not hold a wall clock's. Slices are written as begin and
end, so that nothing has to be kept until it is over, and in a thread they nest by construction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO, Literal

import msgspec

# Pieces of events that are put together before they are written; an event has up to five.
CHUNK_PIECES = 4096
# What stands before every event but the first.
BETWEEN = b",\n"
# Above it what an event carries is cut to what a person can read; digests of pages go into the thousands.
ARGS_BYTES_MAX = 1024
TEXT_MAX = 120
ITEMS_MAX = 16

# Names that a row keeps ready; a request's or a step's is used once.
HEADS_MAX = 256

encode = msgspec.json.Encoder().encode
# What the end of a slice carries that has none in the log.
OPEN = encode({"open": True})


class Thread:
    """One row of the trace; `rank` is its process. Slices in it are begun and ended in order of time.

    Args:
        tid: its number in the process, from 1 on; 0 is the process itself, which has counters only.
    """

    __slots__ = ("_heads", "_place", "end_head", "rank", "tid")

    def __init__(self, rank: int, tid: int) -> None:
        self.rank = rank
        self.tid = tid
        thread = b'"tid":%d,' % tid if tid else b""
        self._place = b'"pid":%d,%b"ts":' % (rank, thread)
        # An end belongs to the slice that was begun last, and needs no name.
        self.end_head = BETWEEN + b'{"ph":"E",' + self._place
        self._heads: dict[tuple[str, str, str], bytes] = {}

    def head(self, phase: str, name: str, category: str, more: bytes = b"", *, keep: bool = True) -> bytes:
        """What stands before an event, and its start up to its time; kept where a name is used again."""
        found = self._heads.get((phase, name, category))
        if found is None:
            parts = (BETWEEN, phase.encode(), more, encode(name), encode(category), self._place)
            found = b'%b{"ph":"%b",%b"name":%b,"cat":%b,%b' % parts
            if keep and len(self._heads) < HEADS_MAX:
                self._heads[phase, name, category] = found
        return found


class ChromeWriter:
    """Writes one trace to a stream.

    Attributes:
        events: written so far.
    """

    __slots__ = ("_arrows", "_chunk", "_is_first", "_out", "_stamp", "_stamped_ns", "_zero_ns", "events")

    def __init__(self, out: BinaryIO, zero_ns: int) -> None:
        self.events = 0
        self._out = out
        self._zero_ns = zero_ns
        self._chunk: list[bytes] = []
        self._is_first = True
        self._arrows = 0
        self._stamped_ns: int | None = None
        self._stamp = b""
        out.write(b'{"displayTimeUnit":"ns","traceEvents":[\n')

    def begin(
        self, thread: Thread, time_ns: int, name: str, category: str, args: bytes = b"", *, keep: bool = True
    ) -> None:
        """Begin a slice inside those that are open in the thread; `keep` when many have this name."""
        self._event(thread.head("B", name, category, keep=keep), time_ns, args)

    def end(self, thread: Thread, time_ns: int, args: bytes = b"") -> None:
        """End the slice that was begun last; what it carries is merged with what its begin does."""
        self._event(thread.end_head, time_ns, args)

    def instant(
        self, thread: Thread, time_ns: int, name: str, category: str, args: bytes, *, is_global: bool = False
    ) -> None:
        """A moment in a thread, or over all of the trace."""
        scope = b'"s":"g",' if is_global else b'"s":"t",'
        self._event(thread.head("i", name, category, scope), time_ns, args)

    def counter(self, process: Thread, time_ns: int, name: str, series: str, value: int) -> None:
        self._event(process.head("C", name, "counter"), time_ns, encode({series: value}))

    def new_arrow(self) -> int:
        """The number of an arrow that has no point yet."""
        self._arrows += 1
        return self._arrows

    def arrow(
        self, thread: Thread, time_ns: int, phase: Literal["s", "t", "f"], name: str, arrow: int
    ) -> None:
        """One point of an arrow, in the slice that is open there: its start, one on the way, its end."""
        bind = b"" if phase == "s" else b'"bp":"e",'
        self._event(thread.head(phase, name, "flow", bind), time_ns, b"", arrow)

    def meta(self, rank: int, name: str, args: Mapping[str, Any], tid: int = 0) -> None:
        """What a process or thread is called, and where it stands."""
        thread = b',"tid":%d' % tid if tid else b""
        parts = (BETWEEN, name.encode(), rank, thread, encode(args))
        self.events += 1
        self._chunk.append(b'%b{"ph":"M","name":"%b","pid":%d%b,"args":%b}' % parts)

    def close(self, other: Mapping[str, Any]) -> None:
        """End the trace, with what holds for all of it."""
        self._flush()
        self._out.write(b'\n],"otherData":' + encode(other) + b"}\n")

    def _event(self, head: bytes, time_ns: int, args: bytes, arrow: int = 0) -> None:
        if time_ns != self._stamped_ns:
            # Many events have the time of the one before.
            past_ns = time_ns - self._zero_ns
            self._stamped_ns, self._stamp = time_ns, b"%d.%03d" % (past_ns // 1000, past_ns % 1000)
        self.events += 1
        chunk = self._chunk
        if args:
            chunk += (head, self._stamp, b',"args":', args, b"}")
        elif arrow:
            chunk += (head, self._stamp, b',"id":%d}' % arrow)
        else:
            chunk += (head, self._stamp, b"}")
        if len(chunk) >= CHUNK_PIECES:
            self._flush()

    def _flush(self) -> None:
        if self._chunk:
            written = b"".join(self._chunk)
            self._out.write(written.removeprefix(BETWEEN) if self._is_first else written)
            self._is_first = False
            self._chunk.clear()


def args_of(record: Mapping[str, Any]) -> bytes:
    """What an event carries of a record, cut where it is long."""
    args = encode(record)
    if len(args) <= ARGS_BYTES_MAX:
        return args
    return encode({name[:TEXT_MAX]: _short(value) for name, value in record.items()})


def args_at_end(record: Mapping[str, Any], event: str) -> bytes:
    """What a slice's end carries of a record: its numbers under other names, for its begin has them too."""
    args = dict(record)
    args[f"{event}_seq"], args[f"{event}_step"] = args.pop("seq"), args.pop("step")
    return args_of(args)


def _short(value: Any) -> Any:
    if isinstance(value, list) and len(value) > ITEMS_MAX:
        return [*map(_text, value[:ITEMS_MAX]), f"... ({len(value):,} items)"]
    if isinstance(value, list):
        return [_text(item) for item in value]
    return _text(value)


def _text(value: Any) -> Any:
    """A number or word as it is, whatever is longer cut."""
    if isinstance(value, list | dict):
        value = encode(value).decode()
    if isinstance(value, str) and len(value) > TEXT_MAX:
        return f"{value[:TEXT_MAX]}... ({len(value):,} characters)"
    return value
