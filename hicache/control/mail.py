"""What one iteration's broadcast carries: whatever came through the front door, as bytes.

    flags | item | item | ...          item: tag, numbers, then the texts and tokens that they measure

Only the first rank of a replica sees the front door; every other rank knows of a request what is in here
and nothing else. Most steps carry nothing, which is one byte. Prompts are copied once on each side and
never looked at.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hicache.core import Abort, Arrival, Command, Request

NOTHING, IS_LAST = b"\0", b"\1"
REQUEST, ABORT, COMMAND = b"R", b"A", b"C"
VERBS: tuple[Literal["flush", "attach", "detach"], ...] = ("flush", "attach", "detach")

# priority, arrival_ms, output_tokens; bytes of rid, conversation, extra_key, cache_salt, tokens, output.
_REQUEST = struct.Struct("<qqqIIIIQQ")
_RID_BYTES = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Mail:
    """Arrivals in order, and whether this is the last mail there will be."""

    arrivals: Sequence[Arrival]
    is_last: bool


def encode(mail: Mail) -> bytes:
    parts = [IS_LAST if mail.is_last else NOTHING]
    for arrival in mail.arrivals:
        if isinstance(arrival, Request):
            _put_request(parts, arrival)
        elif isinstance(arrival, Abort):
            rid = _text(arrival.rid)
            parts += (ABORT, _RID_BYTES.pack(len(rid)), rid)
        else:
            parts += (COMMAND, bytes([VERBS.index(arrival.verb)]))
    return b"".join(parts)


def _put_request(parts: list[bytes], request: Request) -> None:
    fields = (
        _text(request.rid),
        _text(request.conversation),
        _text(request.extra_key),
        _text(request.cache_salt),
        request.tokens,
        request.output,
    )
    numbers = (request.priority, request.arrival_ms, request.output_tokens)
    parts += (REQUEST, _REQUEST.pack(*numbers, *map(len, fields)), *fields)


def _text(value: str) -> bytes:
    # Half a surrogate pair must not stop a whole replica.
    return value.encode("utf-8", "surrogatepass")


def decode(message: bytes) -> Mail:
    """The mail that `encode` was given."""
    reader = _Reader(message)
    is_last = reader.take(1) == IS_LAST
    arrivals: list[Arrival] = []
    while not reader.is_at_end:
        tag = reader.take(1)
        if tag == REQUEST:
            arrivals.append(_request(reader))
        elif tag == ABORT:
            (rid_bytes,) = reader.unpack(_RID_BYTES)
            arrivals.append(Abort(reader.text(rid_bytes)))
        else:
            assert tag == COMMAND, f"mail: tag {tag!r} at byte {reader.at - 1} of {len(message)}"
            arrivals.append(Command(VERBS[reader.take(1)[0]]))
    return Mail(arrivals, is_last)


def _request(reader: _Reader) -> Request:
    priority, arrival_ms, output_tokens, *lengths = reader.unpack(_REQUEST)
    rid, conversation, extra_key, cache_salt = (reader.text(length) for length in lengths[:4])
    tokens, output = (reader.take(length) for length in lengths[4:])
    return Request(
        rid, tokens, output, output_tokens, conversation, arrival_ms, priority, extra_key, cache_salt
    )


class _Reader:
    """A place in a message."""

    __slots__ = ("_view", "at")

    def __init__(self, message: bytes) -> None:
        self._view = memoryview(message)
        self.at = 0

    @property
    def is_at_end(self) -> bool:
        return self.at == len(self._view)

    def take(self, length: int) -> bytes:
        end = self.at + length
        assert end <= len(self._view), f"mail: {length} bytes at {self.at} of {len(self._view)}"
        taken = bytes(self._view[self.at : end])
        self.at = end
        return taken

    def text(self, length: int) -> str:
        return self.take(length).decode("utf-8", "surrogatepass")

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))
