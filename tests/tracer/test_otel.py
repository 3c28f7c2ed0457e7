"""A log as OTLP/JSON: the bytes, and what a collector makes of them."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from hicache.config import Config, StorageConfig
from hicache.job import PlanSpec
from hicache.sim.world import simulate
from hicache.topology import Topology
from tests.support.golden import assert_golden
from tests.support.logs import write_lane, write_run
from tests.support.otlp_receiver import spans_of
from tracer.hits import hits
from tracer.log import find_logs
from tracer.otel import SPANS_A_LINE, write_otlp
from tracer.spans import ExportCount

TIERS = ("device", "host", "storage", "computed")
GROUPS = {"tp0/main": [0, 1]}
MEETING = {
    "kind": "meeting",
    "axis": "tp",
    "purpose": "events",
    "op": "all_reduce",
    "reduce": "min",
    "numel": 8,
    "group": "tp0/main",
    "group_seq": 0,
    "peer": None,
}
WHOLE: list[Mapping[str, Any]] = [
    {"kind": "request", "rid": "r0", "order": 0, "input_tokens": 128, "time_ns": 1000},
    {
        "kind": "admit",
        "rid": "r0",
        "verdict": "admitted",
        "device_tokens": 64,
        "host_tokens": 0,
        "time_ns": 2000,
    },
    {**MEETING, "phase": "enter", "time_ns": 3000},
    {**MEETING, "phase": "leave", "time_ns": 4000},
    {"kind": "insert", "phase": "call", "rid": "r0", "tokens": 128, "time_ns": 5000},
    {"kind": "write_backup", "node": 3, "reason": "threshold", "pages": 1, "tokens": 64, "time_ns": 5000},
    {"kind": "insert", "phase": "return", "rid": "r0", "node": 3, "new_tokens": 64, "time_ns": 5000},
    {
        "kind": "transfer_enqueue",
        "op": 1,
        "queue": "write",
        "nodes": [3],
        "pages": 1,
        "step": 1,
        "time_ns": 6000,
    },
    {"kind": "transfer_done", "op": 1, "queue": "write", "step": 1, "time_ns": 7000},
    {"kind": "finish", "rid": "r0", "reason": "stop", "output_tokens": 4, "step": 2, "time_ns": 9000},
]


def export(place: Path) -> tuple[bytes, ExportCount]:
    out = BytesIO()
    count = write_otlp(find_logs(place), out)
    return out.getvalue(), count


def spans_in(lines: bytes) -> list[dict[str, Any]]:
    return [
        span
        for line in lines.splitlines()
        for span in json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    ]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two ranks: one whole, one that never left its collective."""
    folder = tmp_path / "small"
    options: dict[str, Any] = {"sizes": {"tp": 2}, "groups": GROUPS, "config": {"page_size_tokens": 64}}
    write_lane(folder, WHOLE, rank=0, **options)
    write_lane(folder, WHOLE[:3], rank=1, outcome=None, **options)
    meta = {"host": "node-a", "pid": 77, "wall_clock_ns": 1_700_000_000_000_000_000, "monotonic_ns": 1}
    (folder / "rank0000.meta.json").write_text(json.dumps(meta))
    return folder


def test_a_small_log_is_these_lines(small: Path) -> None:
    lines, count = export(small)
    assert count == ExportCount(records=13, events=5)
    # A line for each span, so that a difference can be read.
    assert_golden("otel_small.txt", lines.decode().replace('{"traceId"', '\n{"traceId"'))


def test_two_exports_of_one_log_are_equal(small: Path) -> None:
    assert export(small) == export(small)


def test_ids_are_hex_numbers_are_strings_and_enums_are_numbers(small: Path) -> None:
    lines, _count = export(small)
    for span in spans_in(lines):
        assert (len(bytes.fromhex(span["traceId"])), len(bytes.fromhex(span["spanId"]))) == (16, 8)
        assert type(span["kind"]) is int and type(span["startTimeUnixNano"]) is str
        for attribute in span["attributes"]:
            assert type(attribute["value"].get("intValue", "")) is str


def test_every_line_is_the_official_message(small: Path) -> None:
    from google.protobuf.json_format import MessageToDict, ParseDict
    from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

    def as_protobuf_has_it(value: Any) -> Any:
        """The same with ids in base64, which is all that OTLP/JSON has different."""
        if isinstance(value, list):
            return [as_protobuf_has_it(each) for each in value]
        if not isinstance(value, dict):
            return value
        return {
            name: b64encode(bytes.fromhex(each)).decode()
            if name in ("traceId", "spanId", "parentSpanId")
            else as_protobuf_has_it(each)
            for name, each in value.items()
        }

    lines, _count = export(small)
    for line in lines.splitlines():
        document = as_protobuf_has_it(json.loads(line))
        # A name that the message does not have is an error; what was not taken would be missing here.
        message = ParseDict(document, TracesData())
        assert MessageToDict(message, use_integers_for_enums=True) == document


def test_what_is_empty_is_left_out(tmp_path: Path) -> None:
    lines, _count = export(write_lane(tmp_path, [WHOLE[0], WHOLE[-1]]))
    (span,) = spans_in(lines)
    assert {"parentSpanId", "links", "events", "status"}.isdisjoint(span)


def test_an_open_span_has_no_end_and_an_error(small: Path) -> None:
    lines, _count = export(small)
    last = [span for span in spans_in(lines) if "endTimeUnixNano" not in span]
    assert [span["name"] for span in last] == ["transfer write", "collective all_reduce", "request"]
    for span in last:
        assert span["status"] == {"code": 2, "message": "its end is not in the log"}
        assert {"key": "hicache.open", "value": {"boolValue": True}} in span["attributes"]


def test_each_line_holds_one_rank_and_no_more_spans_than_a_collector_likes(tmp_path: Path) -> None:
    calls = [
        {**MEETING, "group_seq": seq, "phase": phase}
        for seq in range(SPANS_A_LINE + 1)
        for phase in ("enter", "leave")
    ]
    lines, count = export(write_run(tmp_path, {0: calls, 1: calls}, groups=GROUPS))
    found = [json.loads(line)["resourceSpans"][0] for line in lines.splitlines()]
    sizes = [len(each["scopeSpans"][0]["spans"]) for each in found]
    assert sizes == [SPANS_A_LINE, 1, SPANS_A_LINE, 1] and count.events == sum(sizes)


def test_the_instance_is_host_and_pid_or_the_rank(small: Path) -> None:
    lines, _count = export(small)
    instances = [
        attribute["value"]["stringValue"]
        for line in lines.splitlines()
        for attribute in json.loads(line)["resourceSpans"][0]["resource"]["attributes"]
        if attribute["key"] == "service.instance.id"
    ]
    assert instances == ["node-a:77", "rank:1"]


def test_progress_is_told_in_records(small: Path) -> None:
    told: list[int] = []
    write_otlp(find_logs(small), BytesIO(), progress=told.append)
    assert told == [10, 13]


def test_a_spoilt_line_ends_one_lane_only(small: Path) -> None:
    with (small / "rank0000.scheduler.000.jsonl").open("r+b") as file:
        data = file.read()
        file.seek(data.index(b'{"seq":4'))
        file.write(b"#")
    lines, count = export(small)
    assert count.records == 3 + 3 and len(spans_in(lines)) == count.events == 4


def simulated(folder: Path, **options: Any) -> Path:
    config = Config(topology=Topology(tp=2), page_size_tokens=64, **options)
    result = simulate(PlanSpec(config, agentic="conversations=2,rounds=2").plan(), out=folder, trace="full")
    assert result.outcome == "completed"
    return folder


def test_every_id_of_a_run_is_there_once_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    lines, count = export(simulated(tmp_path))
    found = spans_in(lines)
    ids = {(span["traceId"], span["spanId"]) for span in found}
    assert len(ids) == len(found) == count.events > 50
    links = [(link["traceId"], link["spanId"]) for span in found for link in span.get("links", ())]
    assert links and set(links) <= ids
    assert not [span for span in found if "status" in span]


def test_a_request_says_of_its_prompt_what_the_hit_analysis_says(tmp_path: Path) -> None:
    storage = StorageConfig(backend="memory", prefetch_threshold_tokens=64)
    log = simulated(tmp_path, device_pages=80, host_pages=160, storage=storage)
    told = {
        attributes["rid"]: [attributes[f"hicache.{tier}.tokens"] for tier in TIERS]
        for span in spans_of(export(log)[0])
        if span["name"] == "request" and span["resource"]["tp_rank"] == 0
        for attributes in [span["attributes"]]
    }
    rows = hits(find_logs(log)).rows
    assert told == {row["rid"]: [row[tier] for tier in TIERS] for row in rows}
    assert all(sum(row[tier] for row in rows) for tier in ("device", "computed"))


def test_equal_runs_have_equal_ids(tmp_path: Path) -> None:
    def ids(lines: bytes) -> Sequence[tuple[str, str]]:
        return [(span["traceId"], span["spanId"]) for span in spans_in(lines)]

    one, other = (export(simulated(tmp_path / name))[0] for name in ("a", "b"))
    assert ids(one) == ids(other)
