"""An OTLP/HTTP receiver in a process of its own, and spans as it and as a file of OTLP/JSON have them.

As a module it listens on a free port, says which on stdout, and adds one JSON line a span to a file:

    python -m tests.support.otlp_receiver FILE [--requests N] [--mute]

With `--requests` it dies at the request after so many; with `--mute` it takes requests and never answers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
KINDS = {"stringValue": str, "intValue": int, "boolValue": bool}


@dataclass(frozen=True, slots=True)
class Receiver:
    """A receiver that runs."""

    endpoint: str
    file: Path

    def spans(self) -> list[dict[str, Any]]:
        """What it has got so far, in an order of its own."""
        return in_order(json.loads(line) for line in self.file.read_text().splitlines())


@contextmanager
def receiving(folder: Path, *words: str) -> Iterator[Receiver]:
    """A receiver for as long as the block lasts."""
    file = folder / "received.jsonl"
    file.touch()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.otlp_receiver", str(file), *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield Receiver(f"http://127.0.0.1:{int(process.stdout.readline())}", file)
    finally:
        process.kill()
        process.communicate()


def in_order(spans: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(spans, key=lambda span: (span["resource"]["hicache.rank"], span["span_id"]))


def spans_of(lines: bytes) -> list[dict[str, Any]]:
    """The spans of a file of OTLP/JSON, in the receiver's words."""
    return in_order(_spans_of(lines))


def _spans_of(lines: bytes) -> Iterator[dict[str, Any]]:
    for line in lines.splitlines():
        for resource_spans in json.loads(line)["resourceSpans"]:
            resource = _attributes(resource_spans["resource"]["attributes"])
            for scope_spans in resource_spans["scopeSpans"]:
                scope = scope_spans["scope"]
                for span in scope_spans["spans"]:
                    yield {
                        "resource": resource,
                        "scope": [scope["name"], scope.get("version", "")],
                        "trace_id": span["traceId"],
                        "span_id": span["spanId"],
                        "parent_id": span.get("parentSpanId", ""),
                        "name": span["name"],
                        "kind": span["kind"],
                        "start": int(span.get("startTimeUnixNano", "0")),
                        "end": int(span.get("endTimeUnixNano", "0")),
                        "attributes": _attributes(span.get("attributes", [])),
                        "events": [
                            [
                                event["name"],
                                int(event.get("timeUnixNano", "0")),
                                _attributes(event.get("attributes", [])),
                            ]
                            for event in span.get("events", [])
                        ],
                        "links": [
                            [link["traceId"], link["spanId"], link.get("flags", 0)]
                            for link in span.get("links", [])
                        ],
                        "status": [
                            span.get("status", {}).get("code", 0),
                            span.get("status", {}).get("message", ""),
                        ],
                        "flags": span.get("flags", 0),
                    }


def _attributes(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    return {pair["key"]: _value(pair["value"]) for pair in pairs}


def _value(value: dict[str, Any]) -> Any:
    ((name, inner),) = value.items()
    if name == "arrayValue":
        return [_value(each) for each in inner["values"]]
    assert name != "intValue" or isinstance(inner, str), f"a whole number that is no string: {inner!r}"
    return KINDS[name](inner)


def _received(body: bytes) -> Iterator[dict[str, Any]]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = _told(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield {
                    "resource": resource,
                    "scope": [scope_spans.scope.name, scope_spans.scope.version],
                    "trace_id": span.trace_id.hex(),
                    "span_id": span.span_id.hex(),
                    "parent_id": span.parent_span_id.hex(),
                    "name": span.name,
                    "kind": span.kind,
                    "start": span.start_time_unix_nano,
                    "end": span.end_time_unix_nano,
                    "attributes": _told(span.attributes),
                    "events": [
                        [each.name, each.time_unix_nano, _told(each.attributes)] for each in span.events
                    ],
                    "links": [[each.trace_id.hex(), each.span_id.hex(), each.flags] for each in span.links],
                    "status": [span.status.code, span.status.message],
                    "flags": span.flags,
                }


def _told(pairs: Any) -> dict[str, Any]:
    return {pair.key: _any_value(pair.value) for pair in pairs}


def _any_value(value: Any) -> Any:
    name = value.WhichOneof("value")
    inner = getattr(value, name)
    return [_any_value(each) for each in inner.values] if name == "array_value" else inner


class _Handler(BaseHTTPRequestHandler):
    file: Path
    requests_left: int
    is_mute: bool

    def do_POST(self) -> None:
        if type(self).requests_left == 0:
            os._exit(0)
        type(self).requests_left -= 1
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.is_mute:
            time.sleep(3600)
        assert self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
        with self.file.open("a") as file:
            file.writelines(json.dumps(span) + "\n" for span in _received(body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--requests", type=int, default=-1)
    parser.add_argument("--mute", action="store_true")
    given = parser.parse_args()
    _Handler.file, _Handler.requests_left, _Handler.is_mute = given.file, given.requests, given.mute
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
