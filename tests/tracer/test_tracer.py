"""What a tracer writes, and what it survives."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest

from tests.support.logs import DECIDE, NOTE, SMALL_KINDS, place
from tracer.chain import ALGORITHM
from tracer.record import Kind, header
from tracer.sinks import MemorySink, NullSink
from tracer.tracer import Tracer, silent

HEADER = header(place(), SMALL_KINDS, lane="scheduler", run_id="run-a", tool_version="test")


class Colour(Enum):
    RED = "red"


def tracer(warn: Callable[[str], None] | None = None) -> tuple[Tracer, MemorySink]:
    sink = MemorySink()
    return Tracer(sink, HEADER, lambda: 7, warn=warn), sink


def test_the_header_is_line_0_and_records_follow_from_1() -> None:
    tracing, sink = tracer()
    tracing.step = 41
    tracing.emitter(DECIDE)(17, 1, 64, 5)
    stamp = {"seq": 0, "step": 0, "time_ns": 7, "kind": "header"}
    assert json.loads(sink.lines[0]) == {**stamp, **HEADER, "chain": ALGORITHM}
    assert sink.lines[1] == (
        b'{"seq":1,"step":41,"time_ns":7,"kind":"write_backup",'
        b'"node":17,"pages":1,"tokens":64,"host_pages_free":5}'
    )


def test_the_trailer_counts_the_lines_before_it_and_closes_the_sink() -> None:
    tracing, sink = tracer()
    tracing.emitter(NOTE)("x")
    tracing.close("hung")
    tracing.close("completed")
    assert sink.lines[2:] == [b'{"seq":2,"step":0,"time_ns":7,"kind":"trailer","outcome":"hung","records":2}']
    assert sink.is_closed


def test_a_phase_stands_right_behind_the_kind_with_the_fields_that_were_asked_for() -> None:
    tracing, sink = tracer()
    tracing.emitter(DECIDE, phase="return", fields=("tokens", "node"))(64, 17)
    assert sink.lines[1] == (
        b'{"seq":1,"step":0,"time_ns":7,"kind":"write_backup","phase":"return","tokens":64,"node":17}'
    )


def test_a_kind_without_fields_can_be_written() -> None:
    tracing, sink = tracer()
    tracing.emitter(Kind("tick", "note"))()
    assert sink.lines[1] == b'{"seq":1,"step":0,"time_ns":7,"kind":"tick"}'


def test_a_tracer_that_is_off_hands_out_one_function_that_does_nothing() -> None:
    tracing = Tracer(NullSink(), HEADER, lambda: 7)
    assert tracing.emitter(DECIDE) is silent
    assert tracing.emitter(NOTE) is silent
    tracing.close("completed")


def test_a_wrong_number_of_fields_is_the_programmers_error() -> None:
    tracing, _ = tracer()
    with pytest.raises(TypeError, match="host_pages_free"):
        tracing.emitter(DECIDE)(17, 1, 64)


def test_a_field_that_the_kind_does_not_declare_is_refused() -> None:
    tracing, _ = tracer()
    with pytest.raises(AssertionError, match="colour"):
        tracing.emitter(DECIDE, fields=("colour",))


def test_lists_maps_and_short_enums_are_plain() -> None:
    tracing, sink = tracer()
    tracing.emitter(NOTE)([1, "a", None, [2.5, True], {"k": Colour.RED}])
    assert sink.lines[1].endswith(b'"text":[1,"a",null,[2.5,true],{"k":"red"}]}')


@pytest.mark.parametrize("value", [{1}, [frozenset({1})], object(), b"bytes", "\ud800", {1: {2}}])
def test_a_value_that_cannot_be_written_costs_its_kind_and_not_the_run(value: Any) -> None:
    warnings: list[str] = []
    tracing, sink = tracer(warnings.append)
    note, decide = tracing.emitter(NOTE), tracing.emitter(DECIDE)
    note(value)
    note("fine, but the kind is dropped by now")
    decide(17, 1, 64, 5)
    tracing.close("completed")
    assert [json.loads(line)["kind"] for line in sink.lines] == ["header", "write_backup", "trailer"]
    assert [json.loads(line)["seq"] for line in sink.lines] == [0, 1, 2]
    assert json.loads(sink.lines[-1])["dropped"] == {"note": 2}
    assert len(warnings) == 1
    assert warnings[0].startswith("records of kind note are dropped from here on (step 0): ")


def test_a_header_that_cannot_be_written_turns_tracing_off() -> None:
    warnings: list[str] = []
    sink = MemorySink()
    tracing = Tracer(sink, {"config": object()}, lambda: 7, warn=warnings.append)
    tracing.emitter(NOTE)("x")
    tracing.close("completed")
    assert (sink.lines, len(warnings), tracing.is_on) == ([], 1, False)
