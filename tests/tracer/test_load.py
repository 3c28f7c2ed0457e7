"""Malformed and unusual logs as the store sees them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.logs import DECIDE, NOTE, lines, place, write_lane, write_run
from tracer.errors import LogError, StoreError
from tracer.load import DECLARED_FIELDS_MAX
from tracer.record import OWN_KINDS, Kind, header
from tracer.segments import SegmentSink
from tracer.trace_store import open_store
from tracer.tracer import Tracer

BACKED_UP = {"kind": "write_backup", "node": 3, "pages": 1, "tokens": 64, "host_pages_free": 5}


def fields_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    with open_store(folder) as opened:
        rows = opened.query(f"SELECT own_fields(records) FROM records WHERE kind = '{kind}'").rows
    return [json.loads(row[0]) for row in rows]


def test_fields_of_an_undeclared_kind_are_not_lost(tmp_path: Path) -> None:
    own = {"rid": "r0", "tokens": 7, "colour": "red", "deep": {"a": [1, {"b": None}]}, "Node": 4}
    write_lane(tmp_path, [{"kind": "news", **own}, BACKED_UP], kinds=(DECIDE,))
    with open_store(tmp_path) as opened:
        (row,) = opened.query(
            "SELECT rid, tokens, other_fields FROM records WHERE other_fields IS NOT NULL"
        ).rows
        assert row[:2] == ("r0", 7)
        assert json.loads(row[2]) == {"colour": "red", "deep": own["deep"], "Node": 4}
        assert opened.query("SELECT name, role FROM kinds WHERE role IS NULL").rows == (("news", None),)
        assert opened.query("SELECT kind, seq FROM records").rows == (("news", 1), ("write_backup", 2))
    assert fields_of(tmp_path, "news") == [{"colour": "red", "deep": own["deep"], "Node": 4}]


def test_a_declared_field_that_nobody_knows_has_a_column(tmp_path: Path) -> None:
    kinds = (Kind("news", "event", info=("colour", "amount")),)
    write_lane(tmp_path, [{"kind": "news", "colour": "red", "amount": [1.5]}], kinds=kinds)
    with open_store(tmp_path) as opened:
        assert opened.query("SELECT colour, amount FROM records").rows == (('"red"', "[1.5]"),)
    assert fields_of(tmp_path, "news") == [{"colour": "red", "amount": [1.5]}]


def test_more_fields_than_columns_are_not_lost(tmp_path: Path) -> None:
    names = tuple(f"f{number:05d}" for number in range(DECLARED_FIELDS_MAX + 5))
    own = dict.fromkeys(names, 1)
    write_lane(tmp_path, [{"kind": "news", **own}], kinds=(Kind("news", "event", info=names),))
    assert fields_of(tmp_path, "news") == [own]


def test_fields_that_differ_in_case_only_are_not_lost(tmp_path: Path) -> None:
    kinds = (Kind("news", "event", info=("colour", "Colour")),)
    write_lane(tmp_path, [{"kind": "news", "colour": 1, "Colour": 2}], kinds=kinds)
    assert fields_of(tmp_path, "news") == [{"Colour": 2, "colour": 1}]


def test_records_stand_in_order_of_rank_lane_and_seq(tmp_path: Path) -> None:
    records = [BACKED_UP] * 50
    for rank in range(12):
        for lane in ("scheduler", "io"):
            write_lane(
                tmp_path, records[: 50 - rank], rank=rank, lane=lane, sizes={"tp": 12}, kinds=(DECIDE,)
            )
    with open_store(tmp_path) as opened:
        rows = opened.query("SELECT rank, lane <> 'scheduler', seq FROM records").rows
    assert list(rows) == sorted(rows)


def test_lines_that_are_no_records_are_left_out(tmp_path: Path) -> None:
    sink = SegmentSink(tmp_path, 0, "scheduler")
    emit_all(sink, 5000)
    text = (tmp_path / "rank0000.scheduler.000.jsonl").read_bytes()
    assert b'\n{"kind":"block",' in text
    with open_store(tmp_path) as opened:
        assert opened.query("SELECT kind, count(*) FROM records GROUP BY kind").rows == (("note", 5000),)


def emit_all(sink: SegmentSink, count: int) -> None:
    """So many notes through the recorder."""
    tracer = Tracer(
        sink, header(place(), (NOTE,), lane="scheduler", run_id="a", tool_version="test"), lambda: 0
    )
    emit = tracer.emitter(NOTE)
    for number in range(count):
        emit(number)
    tracer.close("completed")


def test_a_spoilt_block_is_left_out_and_told(tmp_path: Path) -> None:
    emit_all(SegmentSink(tmp_path, 0, "scheduler"), 5000)
    path = tmp_path / "rank0000.scheduler.000.jsonl"
    text = path.read_bytes()
    path.write_bytes(text.replace(b'"text":100}', b'"text":109}'))
    with open_store(tmp_path) as opened:
        ((count, damage),) = opened.query("SELECT records, damage FROM lanes").rows
        assert 0 < count < 5000
        assert opened.query(
            "SELECT count(*), count(*) FILTER (field_text = 109) FROM "
            "(SELECT text::BIGINT AS field_text FROM records)"
        ).rows == ((count, 0),)
        assert opened.notes == tuple(damage)
        assert len(damage) == 1


@pytest.mark.parametrize("outcome", ["completed", None])
def test_compressed_segments_are_loaded_beside_others(outcome: str | None, tmp_path: Path) -> None:
    every = lines([BACKED_UP] * 6, kinds=(DECIDE,), outcome=outcome)
    again = [json.dumps({**json.loads(every[0]), "seq": seq}).encode() + b"\n" for seq in (3, 5)]
    parts = [every[:3], [again[0], *every[3:5]], [again[1], *every[5:]]]
    for index, part in enumerate(parts):
        path = tmp_path / f"rank0000.scheduler.{index:03d}.jsonl"
        data = b"".join(part)
        if index < 2:
            # A member a block, as the recorder packs them.
            packed = b"".join(map(gzip.compress, (data[:900], data[900:])))
            path.with_name(path.name + ".gz").write_bytes(packed)
        else:
            path.write_bytes(data if outcome else data[:-3])
    with open_store(tmp_path) as opened:
        records = 6 if outcome else 5
        assert opened.query("SELECT count(*), min(tokens), max(seq) FROM records").rows == (
            (records, 64, records),
        )


def test_a_compressed_segment_that_is_cut_gives_what_can_be_read(tmp_path: Path) -> None:
    data = gzip.compress(
        b"".join(lines([{**BACKED_UP, "node": node} for node in range(9000)], kinds=(DECIDE,)))
    )
    (tmp_path / "rank0000.scheduler.000.jsonl.gz").write_bytes(data[: len(data) // 2])
    with open_store(tmp_path) as opened:
        ((records, is_whole),) = opened.query(
            "SELECT records, torn IS NULL AND len(damage) = 0 FROM lanes"
        ).rows
        assert not is_whole
        assert opened.query("SELECT count(*) FROM records").rows == ((records,),)


def test_a_newer_minor_version_is_loaded(tmp_path: Path) -> None:
    write_lane(tmp_path, [{**BACKED_UP, "new": 1}], kinds=(DECIDE,), version=[1, 99], new={"a": 1})
    with open_store(tmp_path) as opened:
        assert opened.query("SELECT tokens FROM records").rows == ((64,),)


def test_a_newer_major_version_is_refused(tmp_path: Path) -> None:
    write_lane(tmp_path, [BACKED_UP], version=[2, 0])
    with pytest.raises(LogError, match=r"log version 2\.0"):
        open_store(tmp_path)


def test_of_two_runs_in_a_folder_one_can_be_chosen(tmp_path: Path) -> None:
    write_lane(tmp_path, [BACKED_UP], rank=0, run_id="a", sizes={"tp": 2}, kinds=(DECIDE,))
    write_lane(tmp_path, [BACKED_UP] * 2, rank=1, run_id="b", sizes={"tp": 2}, kinds=(DECIDE,))
    with pytest.raises(StoreError, match="holds 2 runs\n  where     a, b\n  try       one of them, by --run"):
        open_store(tmp_path)
    with open_store(tmp_path, run_id="b") as opened:
        assert opened.query("SELECT rank, count(*) FROM records GROUP BY ALL").rows == ((1, 2),)


VALUES: Sequence[Any] = (2**63, -(2**200), "x" * 100_000, [[[]]], {"a": {}}, True, None, "", "\u0000")
SOME_FIELDS = ("nodes", "op", "kv_tokens", "is_late", "arrival_ms", "computed_tokens", "state")


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{value!r:.12}")
def test_no_value_of_a_field_loses_a_record(value: Any, tmp_path: Path) -> None:
    kinds = (Kind("match", "decision", info=("rid", *SOME_FIELDS)),)
    records = [{"kind": "match", field: value} for field in SOME_FIELDS]
    write_lane(tmp_path, [*records, {"kind": "match", "rid": "r1"}], kinds=kinds)
    with open_store(tmp_path) as opened:
        assert opened.query("SELECT count(*), any_value(rid) FROM records").rows == (
            (len(SOME_FIELDS) + 1, "r1"),
        )


def test_a_key_that_stands_twice_in_a_line_loses_no_record(tmp_path: Path) -> None:
    head, first, *rest = lines([BACKED_UP, BACKED_UP], kinds=(DECIDE,))
    first = first.replace(b'"node":3', b'"node":3,"node":4')
    (tmp_path / "rank0000.scheduler.000.jsonl").write_bytes(b"".join([head, first, *rest]))
    with open_store(tmp_path) as opened:
        assert opened.query("SELECT count(*) FROM records").rows == ((2,),)


def test_a_lane_of_any_name_is_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "one.log"
    path.write_bytes(b"".join(lines([BACKED_UP], lane="it's [1] * = %2F\n", kinds=(DECIDE,))))
    with open_store(path) as opened:
        assert opened.query("SELECT lane FROM records").rows == (("it's [1] * = %2F\n",),)


def test_what_the_recorder_says_of_itself_is_counted_in_lanes(tmp_path: Path) -> None:
    own: list[Mapping[str, Any]] = [
        {"kind": "idle", "first_step": 2, "count": 5, "records": 3, "advance": {"round": 1}, "step": 6},
        {"kind": "idle", "first_step": 8, "count": 2, "records": 3, "advance": {}, "step": 9},
        {"kind": "checkpoint", "axes": ["tp"], "count": 7, "digest": "ab", "state": None, "step": 9},
        {"kind": "throttle", "kinds": 1, "share": 31, "share_max": 20, "step": 9},
        {"kind": "freeze", "folder": "f", "reason": "r", "files": 1, "step": 9},
    ]
    write_lane(tmp_path, own, kinds=OWN_KINDS)
    with open_store(tmp_path) as opened:
        assert opened.query("SELECT idle_steps, checkpoints, throttles, freezes, steps FROM lanes").rows == (
            (7, 1, 1, 1, 10),
        )
        assert opened.query(
            'SELECT kind, state, first_step, step, idle_steps, "count" FROM heartbeats'
        ).rows == (("idle", "idle", 2, 6, 5, 1), ("idle", "idle", 8, 9, 2, 2))


def test_a_heartbeat_is_a_sign_of_life(tmp_path: Path) -> None:
    beat = {"kind": "heartbeat", "count": 1, "lanes": ["io"], "seqs": [4], "steps": [2], "still_ns": [9]}
    write_lane(tmp_path, [beat], lane="heart", kinds=OWN_KINDS)
    with open_store(tmp_path) as opened:
        assert opened.query("SELECT lane, kind, state FROM heartbeats").rows == (
            ("heart", "heartbeat", "alive"),
        )


def test_hundreds_of_lanes_are_loaded(tmp_path: Path) -> None:
    write_run(tmp_path, {rank: [BACKED_UP] for rank in range(300)}, kinds=(DECIDE,))
    with open_store(tmp_path) as opened:
        assert opened.query("SELECT count(DISTINCT rank), max(tp) FROM records").rows == ((300, 299),)
