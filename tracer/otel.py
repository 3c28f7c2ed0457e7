"""A log as OTLP/JSON, which every OpenTelemetry collector reads.

Owns the encoding and nothing else: what a span is, `tracer.span` says. Lines are `TracesData`, each with
the spans of one rank; equal logs give equal bytes.

The format's traps: ids are hex here although JSON of protobuf would have base64, whole numbers are strings,
enums are numbers, and what is zero or empty is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, BinaryIO, Final

import msgspec

from tracer.log import Run
from tracer.span import AttributeValue, Origin, Span, SpanEvent, SpanLink
from tracer.spans import ExportCount, spans

SCOPE = "hicache-toolkit"
SPANS_A_LINE = 512
# Status of a span whose end is not in the log: an error is what people look for first.
ERROR: Final = 2
NO_END = "its end is not in the log"
# Bits of `flags`: whether it is known that the other span is remote, and that it is.
HAS_IS_REMOTE, IS_REMOTE = 0x100, 0x200

# Names, and names with words, of which a run has few.
CACHED = 4096
NOTHING = msgspec.Raw(b"[]")
Progress = Callable[[int], None]


class _Event(msgspec.Struct, omit_defaults=True, rename="camel"):
    time_unix_nano: str = "0"
    name: str = ""
    attributes: msgspec.Raw = NOTHING


class _Link(msgspec.Struct, omit_defaults=True, rename="camel"):
    trace_id: str
    span_id: str
    flags: int = 0


class _Span(msgspec.Struct, omit_defaults=True, rename="camel"):
    trace_id: str
    span_id: str
    name: str
    kind: int
    parent_span_id: str = ""
    start_time_unix_nano: str = "0"
    end_time_unix_nano: str = "0"
    attributes: msgspec.Raw = NOTHING
    events: list[_Event] = []
    links: list[_Link] = []
    status: dict[str, Any] = {}
    flags: int = 0


def write_otlp(run: Run, out: BinaryIO, *, progress: Progress | None = None) -> ExportCount:
    """Write all spans of a run; constant memory but for spans that are open.

    Args:
        progress: told after each line how many records have been read so far.
    """
    encode = msgspec.json.Encoder().encode
    records = written = 0
    for origin, lane, found in spans(run):
        head, tail = _frame(origin, encode)
        for batch in _batches(found):
            out.write(head + encode([_span(each) for each in batch]) + tail)
            written += len(batch)
            if progress is not None:
                progress(records + lane.count)
        records += lane.count
    return ExportCount(records, written)


def _batches(found: Iterator[Span]) -> Iterator[list[Span]]:
    while batch := list(islice(found, SPANS_A_LINE)):
        yield batch


def _frame(origin: Origin, encode: Callable[[Any], bytes]) -> tuple[bytes, bytes]:
    """What stands before and behind the spans of a line."""
    scope = {"name": SCOPE} | ({"version": origin.tool_version} if origin.tool_version else {})
    head = b'{"resourceSpans":[{"resource":{"attributes":%b},"scopeSpans":[{"scope":%b,"spans":' % (
        encode(_attributes(origin.attributes)),
        encode(scope),
    )
    return head, b"}]}]}\n"


def _attributes(attributes: Mapping[str, AttributeValue]) -> msgspec.Raw:
    """Attributes as OTLP has them, written piece by piece: most of a line is these."""
    if not attributes:
        return NOTHING
    pieces = []
    for key, value in attributes.items():
        # By type and not by `isinstance`, for a bool is an int.
        kind = type(value)
        if kind is int:
            pieces.append(_whole(key) % value)
        elif kind is str:
            pieces.append(_text(key, value))
        else:
            pieces.append(_other(key, value))
    return msgspec.Raw(b"[%b]" % b",".join(pieces))


@lru_cache(maxsize=CACHED)
def _whole(key: str) -> bytes:
    """What a whole number has only to be put into; no name of ours holds a percent sign."""
    return b'{"key":%b,"value":{"intValue":"%%d"}}' % msgspec.json.encode(key)


@lru_cache(maxsize=CACHED)
def _text(key: str, value: AttributeValue) -> bytes:
    return b'{"key":%b,"value":{"stringValue":%b}}' % (msgspec.json.encode(key), msgspec.json.encode(value))


@lru_cache(maxsize=CACHED)
def _other(key: str, value: AttributeValue) -> bytes:
    if isinstance(value, tuple):
        values = b",".join([b'{"stringValue":%b}' % msgspec.json.encode(each) for each in value])
        inner = b'{"arrayValue":{"values":[%b]}}' % values
    else:
        inner = b'{"boolValue":%b}' % msgspec.json.encode(value)
    return b'{"key":%b,"value":%b}' % (msgspec.json.encode(key), inner)


def _span(span: Span) -> _Span:
    return _Span(
        span.trace_id,
        span.span_id,
        span.name,
        span.kind,
        span.parent_id,
        str(span.start_ns),
        "0" if span.end_ns is None else str(span.end_ns),
        _attributes(span.attributes),
        _events(span.events),
        _links(span.links),
        {"code": ERROR, "message": NO_END} if span.is_open else {},
        HAS_IS_REMOTE,
    )


def _events(events: Iterable[SpanEvent]) -> list[_Event]:
    return [_Event(str(event.time_ns), event.name, _attributes(event.attributes)) for event in events]


def _links(links: Iterable[SpanLink]) -> list[_Link]:
    return [
        _Link(link.trace_id, link.span_id, HAS_IS_REMOTE | IS_REMOTE if link.is_remote else HAS_IS_REMOTE)
        for link in links
    ]
