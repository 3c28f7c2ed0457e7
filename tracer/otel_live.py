"""Spans sent to a collector over OTLP/HTTP, from a finished log or from one that is still written.

The spans are those of `write_otlp`, ids included; only the official SDK's objects and its exporter stand in
between. Whatever the collector does, nothing here raises for it: what it did not take is counted, and the
time that it may cost is bounded. The traced process knows nothing of this one.

    records -> spans -> room in the queue? -> batch processor -> exporter -> collector
                             no room for timeout_s: dropped       not taken: failed, dropped
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Event, Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tracer.errors import TracerError
from tracer.follow import Follower, LaneTail
from tracer.log import find_logs
from tracer.otel import NO_END, SCOPE
from tracer.span import Origin, Span, origins
from tracer.spans import LaneSpans, spans

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

TRACES_PATH = "/v1/traces"
QUEUE_SPANS_MAX = 4096
BATCH_SPANS = 512
BATCH_DELAY_MS = 200
# One request may not take all of the patience that there is.
REQUEST_TIMEOUT_S_MAX = 10.0
POLL_S = 0.2
# What a URL has before its host: a name and a password.
SECRET = re.compile(r"//[^/]*@")
# More than a condition can wait for is a wait without an end.
TIMEOUT_S_MAX = 86_400.0
# For the SDK's own thread to end, when it is told to.
JOIN_S = 1.0

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class LiveCount:
    """What became of the spans of an export; every one is either sent or dropped.

    Attributes:
        sent: taken by the endpoint, as it said.
        dropped: all others.
        failed: of these, the ones that were in a request that the endpoint did not take; it may have been
            lost on the way back.
        notes: what could not be followed: a lane that was torn, records that a ring had dropped.
    """

    sent: int
    dropped: int
    failed: int
    notes: tuple[str, ...] = ()


def export_live(
    path: str | Path,
    endpoint: str,
    *,
    follow: bool,
    timeout_s: float,
    stop: Event | None = None,
    progress: Progress | None = None,
) -> LiveCount:
    """Send a log's spans to an OTLP/HTTP endpoint.

    Args:
        path: a run's folder, or a file of one lane.
        endpoint: URL of a collector; without a path, `/v1/traces` is meant.
        follow: go on until every rank's lanes have ended, or until `stop` is set. Spans are sent when they
            end, the open ones last.
        timeout_s: longest wait for the endpoint without a success. Then a finished log's spans are given
            up; while following, new ones are dropped until a request gets through again.
        stop: ends the export; what was read by then is sent.
        progress: told how many records have been read so far.

    Raises:
        LogError: nothing there that can be read.
        TracerError: the endpoint is no URL, or a package is missing.
    """
    url = _url(endpoint)
    if math.isnan(timeout_s) or timeout_s < 0:
        raise TracerError(f"{timeout_s} seconds is no time to wait", expected="0 or more")
    place = Path(path)
    stopped = stop or Event()
    sender = _Sender(url, min(timeout_s, TIMEOUT_S_MAX), gives_up=not follow)
    try:
        notes = (
            _follow(place, sender, stopped, progress) if follow else _read(place, sender, stopped, progress)
        )
    finally:
        count = sender.close()
    return LiveCount(count.sent, count.dropped, count.failed, tuple(notes))


def _read(place: Path, sender: _Sender, stopped: Event, progress: Progress | None) -> list[str]:
    run = find_logs(place)
    records = 0
    for origin, lane, found in spans(run):
        for span in found:
            sender.send(origin, span)
            if stopped.is_set():
                return []
        records += lane.count
        if progress is not None:
            progress(records)
    return [lane.cut for lane in run.lanes if lane.cut]


def _follow(place: Path, sender: _Sender, stopped: Event, progress: Progress | None) -> list[str]:
    follower = Follower(place)
    builders: dict[LaneTail, LaneSpans] = {}
    try:
        while True:
            # Asked first: after it has said so, one more look finds all that there is.
            is_last = stopped.is_set()
            for tail, records in follower.poll(is_last=is_last):
                builder = builders.get(tail) or builders.setdefault(tail, _builder(follower, tail))
                for record in records:
                    builder.feed(record)
                _send_all(sender, builder.origin, builder.take())
                if progress is not None:
                    progress(sum(each.records_read for each in builders.values()))
            if is_last or follower.is_over:
                break
            stopped.wait(POLL_S)
        for builder in builders.values():
            _send_all(sender, builder.origin, builder.finish())
    finally:
        follower.close()
    return [note for tail in follower.tails for note in (*tail.lost, tail.torn) if note]


def _builder(follower: Follower, tail: LaneTail) -> LaneSpans:
    assert follower.run is not None
    return LaneSpans(origins(follower.run)[tail.lane.run_id, tail.lane.rank], tail.lane)


def _send_all(sender: _Sender, origin: Origin, found: Sequence[Span]) -> None:
    for span in found:
        sender.send(origin, span)


def without_secret(endpoint: str) -> str:
    """An endpoint as it may be shown."""
    return SECRET.sub("//***@", endpoint)


def _url(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    # A URL with a blank or a line break in it is a slip of whoever has pasted it, and reaches nobody.
    if not is_url or " " in endpoint or not endpoint.isprintable():
        raise TracerError(
            f"{without_secret(endpoint)!r} is no endpoint",
            expected="http:// or https://, a host, and a port if it is not 80 or 443",
            hint="http://localhost:4318",
        )
    return endpoint if parts.path.strip("/") else parts._replace(path=TRACES_PATH).geturl()


def _missing(name: str | None) -> TracerError:
    return TracerError(
        f"sending spans needs a package that is not there: {name}", hint="pip install 'hicache-toolkit[otlp]'"
    )


class _Sender:
    """The SDK's processor and exporter, with a count of every span.

    The queue is never overrun: a span waits for room in it, and is dropped here when there is none for too
    long. So what is in the queue is known without asking the SDK.
    """

    def __init__(self, url: str, timeout_s: float, *, gives_up: bool) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise _missing(error.name) from None
        # Otherwise a failure is a line on stderr, from a thread that knows nothing of our screen.
        logger = logging.getLogger("opentelemetry")
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())
        self._timeout_s = timeout_s
        self._tally = _Tally(timeout_s, gives_up)
        request_s = min(timeout_s, REQUEST_TIMEOUT_S_MAX)
        try:
            exporter = OTLPSpanExporter(endpoint=url, timeout=request_s)
        except Exception as error:
            raise TracerError(
                f"the exporter can't be set up: {error}", hint="look at the variables OTEL_EXPORTER_OTLP_*"
            ) from None
        self._exporter = _counting(exporter, self._tally)
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=QUEUE_SPANS_MAX,
            schedule_delay_millis=BATCH_DELAY_MS,
            max_export_batch_size=BATCH_SPANS,
        )
        self._convert = _Converter()

    def send(self, origin: Origin, span: Span) -> None:
        if self._tally.enter():
            self._processor.on_end(self._convert(origin, span))

    def close(self) -> LiveCount:
        """Wait for what is under way, as long as it makes progress, and let go."""
        self._tally.drain(self._timeout_s)
        count = self._tally.close()
        # It joins the SDK's thread, which may still wait for an answer; that one ends with this process.
        closing = Thread(target=_quietly, args=(self._processor.shutdown,), daemon=True)
        closing.start()
        with suppress(Exception):
            self._exporter.shutdown()
        closing.join(JOIN_S)
        return count


def _quietly(call: Callable[[], object]) -> None:
    with suppress(Exception):
        call()


@dataclass(slots=True)
class _Tally:
    """Where every span is, between two threads.

    Attributes:
        gives_up: after one timeout without a success nothing is tried any more.
        tried_s: when the endpoint was first waited for since its last success.
    """

    timeout_s: float
    gives_up: bool
    sent: int = 0
    failed: int = 0
    queued: int = 0
    offered: int = 0
    is_closed: bool = False
    tried_s: float | None = None
    changed: Condition = field(default_factory=Condition)

    @property
    def is_late(self) -> bool:
        return self.tried_s is not None and time.monotonic() - self.tried_s > self.timeout_s

    def enter(self) -> bool:
        """Count one more; whether there is room for it in the queue, now or before it is late."""
        with self.changed:
            self.offered += 1
            if self.tried_s is None:
                self.tried_s = time.monotonic()
            while self.queued >= QUEUE_SPANS_MAX and not self.is_late:
                self.changed.wait(self._left_s())
            if self.queued >= QUEUE_SPANS_MAX or (self.gives_up and self.is_late):
                return False
            self.queued += 1
            return True

    def may_try(self) -> bool:
        with self.changed:
            return not self.is_closed and not (self.gives_up and self.is_late)

    def leave(self, count: int, *, is_sent: bool) -> None:
        """A batch has come back from the endpoint, or never got there."""
        with self.changed:
            if self.is_closed:
                return
            self.queued -= count
            if is_sent:
                self.sent += count
                self.tried_s = time.monotonic() if self.queued else None
            else:
                self.failed += count
            self.changed.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Wait until the queue is empty, for so long without a success."""
        with self.changed:
            if self.queued and not self.gives_up:
                self.tried_s = time.monotonic()
            while self.queued and not self.is_late:
                self.changed.wait(self._left_s())

    def close(self) -> LiveCount:
        with self.changed:
            self.is_closed = True
            return LiveCount(self.sent, self.offered - self.sent, self.failed)

    def _left_s(self) -> float:
        since_s = time.monotonic() if self.tried_s is None else self.tried_s
        return max(0.0, since_s + self.timeout_s - time.monotonic()) + 0.01


def _counting(inner: SpanExporter, tally: _Tally) -> SpanExporter:
    """An exporter that tells what became of each batch."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Counting(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = SpanExportResult.FAILURE
            try:
                if tally.may_try():
                    result = inner.export(spans)
            finally:
                tally.leave(len(spans), is_sent=result is SpanExportResult.SUCCESS)
            return result

        def shutdown(self) -> None:
            inner.shutdown()

    return Counting()


class _Converter:
    """Our spans as the SDK has them, with our ids."""

    def __init__(self) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import Event as SdkEvent
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

        self._event, self._span, self._link = SdkEvent, ReadableSpan, Link
        self._context = SpanContext
        self._sampled = TraceFlags(TraceFlags.SAMPLED)
        self._kinds = {1: SpanKind.INTERNAL, 2: SpanKind.SERVER, 3: SpanKind.CLIENT}
        self._statuses = {False: Status(StatusCode.UNSET), True: Status(StatusCode.ERROR, NO_END)}
        # Not `Resource.create`, which adds an id of its own that differs every time.
        self._resource = Resource
        self._scope = InstrumentationScope
        self._places: dict[tuple[str, int], tuple[Any, Any]] = {}

    def __call__(self, origin: Origin, span: Span) -> ReadableSpan:
        resource, scope = self._place(origin)
        return self._span(
            span.name,
            context=self._ids(span.trace_id, span.span_id),
            parent=self._ids(span.trace_id, span.parent_id) if span.parent_id else None,
            resource=resource,
            attributes=span.attributes,
            events=[self._event(each.name, each.attributes, each.time_ns) for each in span.events],
            links=list(self._links(span)),
            kind=self._kinds[span.kind],
            status=self._statuses[span.is_open],
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=scope,
        )

    def _links(self, span: Span) -> Iterator[Any]:
        for link in span.links:
            yield self._link(self._ids(link.trace_id, link.span_id, is_remote=link.is_remote))

    def _ids(self, trace_id: str, span_id: str, *, is_remote: bool = False) -> Any:
        return self._context(int(trace_id, 16), int(span_id, 16), is_remote, self._sampled)

    def _place(self, origin: Origin) -> tuple[Any, Any]:
        key = origin.run_id, origin.rank
        if key not in self._places:
            resource = self._resource(dict(origin.attributes))
            self._places[key] = resource, self._scope(SCOPE, origin.tool_version or None)
        return self._places[key]
