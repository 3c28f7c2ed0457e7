"""SGLang's request log (`--log-requests --log-requests-format json`), alone or in a server's output.

At level 2 and above it holds prompts and answers. Only ids, counts and times are decoded; what lies in
between is skipped, not read and forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from tracer.errors import HitsError
from tracer.importers.request_metrics import Count, Details, FinishReason, cached_notes, hits_row
from tracer.importers.sniff import COLOURS, File, Imported, Tally, is_too_deep, keys_of
from tracer.served import RequestHits

FORMAT = "sglang_request_log"
RECEIVED, FINISHED = "request.received", "request.finished"
EVENTS = (RECEIVED, FINISHED, "request.received.openai")
KNOWN = {"timestamp", "event", "rid", "obj", "headers", "out"}


class Meta(msgspec.Struct, gc=False):
    """`out.meta_info`."""

    prompt_tokens: Count
    id: str = ""
    cached_tokens: Count | None = None
    cached_tokens_details: Details | None = None
    finish_reason: FinishReason | str | None = None


class Out(msgspec.Struct, gc=False):
    """What was answered; its text is not a field, so nobody decodes it."""

    meta_info: Meta | None = None


class Event(msgspec.Struct, gc=False):
    """One line. A request of several prompts has lists."""

    event: str
    rid: str | list[str] | None = None
    timestamp: float | str | None = None
    out: Out | list[Out] | None = None


_EVENT = msgspec.json.Decoder(Event)


@dataclass(slots=True)
class _Log:
    """What has been read so far.

    Attributes:
        received: rid -> when.
        others: lines of a server's output that are not of this log.
    """

    tally: Tally
    requests: list[RequestHits] = field(default_factory=list)
    received: dict[str, int] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    untold: int = 0
    contradicted: int = 0
    again: int = 0

    def event(self, event: Event, file: int, number: int) -> bool:
        """Take one event; whether it says what it should."""
        rids = [event.rid] if isinstance(event.rid, str) else event.rid or []
        time_ns = _nanoseconds(event.timestamp)
        if event.event != FINISHED:
            for rid in rids:
                self.received.setdefault(rid, time_ns)
            return bool(rids)
        outs = event.out if isinstance(event.out, list) else [event.out]
        metas = [out.meta_info for out in outs if out is not None and out.meta_info is not None]
        for position, meta in enumerate(metas):
            rid = meta.id or (rids[position] if position < len(rids) else "")
            self.again += rid in self.finished
            self.finished.add(rid)
            row = hits_row(meta, file, number, rid=rid, time_ns=self.received.get(rid, time_ns))
            self.untold += meta.cached_tokens is None
            self.contradicted += row.device + row.host + row.storage > (meta.cached_tokens or 0)
            self.requests.append(row)
        return bool(metas)

    def notes(self) -> list[str]:
        notes = list(cached_notes(self.untold, self.contradicted))
        if open_count := len(self.received.keys() - self.finished):
            notes.append(f"{open_count:,} requests were received and never finished: not counted")
        if self.again:
            notes.append(f"{self.again:,} finished more than once under one id: each is counted")
        return notes


def is_mine(line: bytes) -> bool:
    return b'"event"' in line and any(f'"{event}"'.encode() in line for event in EVENTS)


def read(files: Sequence[File]) -> Imported:
    tally = Tally()
    log = _Log(tally)
    for file in files:
        index = tally.begin(file)
        for number, line in file.lines():
            tally.lines[index] = number
            event = _event(line, tally)
            if event is None or not log.event(event, index, number):
                tally.unparsed[index] += 1
    if not log.requests:
        raise HitsError(
            f"no {FINISHED} with meta_info in the request log",
            where=", ".join(tally.files),
            hint="SGLang with --log-requests --log-requests-format json",
        )
    has_times = all(request.time_ns for request in log.requests)
    groupings = ("request", "tier", *(["time"] if has_times else []))
    return Imported(tally.source(FORMAT, notes=log.notes()), tuple(log.requests), groupings)


def _event(line: bytes, tally: Tally) -> Event | None:
    """The event behind whatever stands in front of it on the line."""
    if not is_mine(line):
        return None
    line = COLOURS.sub(b"", line)
    # Another log may have written into the line before it: the event begins at the last place that can be
    # read.
    at = line.find(b'{"')
    while at >= 0:
        text = line[at:].rstrip()
        if is_too_deep(text):
            return None
        try:
            event = _EVENT.decode(text)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            at = line.find(b'{"timestamp"', at + 1)
            continue
        if event.event not in EVENTS:
            return None
        tally.unknown(sorted(keys_of(text) - KNOWN))
        return event
    return None


def _nanoseconds(moment: float | str | None) -> int:
    """Wall clock; 0 where there is none that can be read."""
    seconds: Any = moment
    if isinstance(moment, str):
        try:
            parsed = datetime.fromisoformat(moment)
            seconds = (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            return 0
    return round(seconds * 1e6) * 1000 if seconds and 0 < seconds < 9e9 else 0
