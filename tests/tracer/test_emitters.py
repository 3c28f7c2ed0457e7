"""Every line says what it was given, or its kind is dropped: whatever values come, in whatever order."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from tests.support.logs import place
from tracer.log import find_logs
from tracer.record import Kind, header
from tracer.segments import SegmentSink
from tracer.sinks import MemorySink
from tracer.tracer import Tracer

ANY = Kind("any", "note", info=("value",))
# Names that the generated code would use too.
AWKWARD = Kind("awkward", "note", info=("type", "len", "step_seq", "emit", "bind", "gate"))
SHARED = Kind("shared", "decision", agree=("tp",), compared=("pages",), local=("fact",))
KINDS = (ANY, AWKWARD, SHARED)
HEADER = header(place(), KINDS, lane="scheduler", run_id="run-a", tool_version="test")


class Colour(Enum):
    RED = "red"
    BOTH = ("red", "blue")
    MIXED = frozenset({"red", "blue"})


def tracer() -> tuple[Tracer, MemorySink, list[str]]:
    warnings: list[str] = []
    sink = MemorySink()
    return Tracer(sink, HEADER, lambda: 7, warn=warnings.append), sink, warnings


def values(sink: MemorySink) -> list[Any]:
    return [json.loads(line)["value"] for line in sink.lines if b'"kind":"any"' in line]


def test_a_value_may_have_another_type_at_every_call() -> None:
    tracing, sink, warnings = tracer()
    emit = tracing.emitter(ANY)
    given: list[Any] = [1, "1", None, [1], True, 1, 1.5, {"a": [None]}, False, "", [], 0]
    for value in given:
        emit(value)
    assert [(type(value), value) for value in values(sink)] == [(type(value), value) for value in given]
    assert warnings == []


@pytest.mark.parametrize("late", [[{1, 2}], ({1, 2},), {"a": {1, 2}}, [b"x"], [[object()]]])
def test_what_a_list_or_a_map_holds_is_looked_at_every_time(late: Any) -> None:
    tracing, sink, warnings = tracer()
    emit = tracing.emitter(ANY)
    first = {list: [1], tuple: (1,), dict: {"a": 1}}[type(late)]
    emit(first)
    emit(late)
    assert len(values(sink)) == 1
    assert (tracing.dropped, len(warnings)) == ({"any": 1}, 1)


def test_a_member_of_an_enum_is_looked_at_even_behind_one_that_was_plain() -> None:
    tracing, sink, _ = tracer()
    emit = tracing.emitter(ANY)
    for colour in (Colour.RED, Colour.BOTH, Colour.MIXED):
        emit(colour)
    assert (values(sink), tracing.dropped) == (["red", ["red", "blue"]], {"any": 1})


@pytest.mark.parametrize("value", [2**63, 2**64 - 1, -(2**63), 2**64, 10**40, -(10**40)])
def test_large_numbers_are_written_to_the_last_digit(value: int) -> None:
    tracing, sink, _ = tracer()
    tracing.emitter(ANY)(value)
    assert values(sink) == [value]


@pytest.mark.parametrize("value", ["\udc00", ["\ud83d"], {"\ud800": 1}, {1, 2}])
def test_a_value_that_has_no_line_costs_its_kind_even_behind_good_ones_of_its_type(value: Any) -> None:
    tracing, sink, warnings = tracer()
    emit = tracing.emitter(ANY)
    for good in (1, "a", [1], {"a": 1}):
        if type(good) is type(value):
            emit(good)
    before = len(sink.lines)
    emit(value)
    emit(1)
    assert (len(sink.lines), tracing.seq) == (before, before)
    assert (tracing.dropped, len(warnings)) == ({"any": 2}, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_float_that_json_does_not_know_is_null(value: float) -> None:
    tracing, sink, _ = tracer()
    tracing.emitter(ANY)(value)
    assert values(sink) == [None]


def test_a_list_that_holds_itself_costs_its_kind() -> None:
    tracing, sink, warnings = tracer()
    endless: list[Any] = []
    endless.append(endless)
    tracing.emitter(ANY)(endless)
    assert (values(sink), tracing.dropped, len(warnings)) == ([], {"any": 1}, 1)


def test_a_value_whose_own_code_raises_is_not_asked_anything() -> None:
    class Raising:
        def __getattribute__(self, name: str) -> Any:
            raise ZeroDivisionError

    tracing, _, warnings = tracer()
    tracing.emitter(ANY)(Raising())
    assert (tracing.dropped, len(warnings)) == ({"any": 1}, 1)


@pytest.mark.parametrize("is_file", [False, True])
def test_fields_may_be_named_like_what_the_generated_code_uses(is_file: bool, tmp_path: Path) -> None:
    memory = MemorySink()
    tracing = Tracer(SegmentSink(tmp_path, 0, "scheduler") if is_file else memory, HEADER, lambda: 7)
    emit = tracing.emitter(AWKWARD)
    emit("a", "b", 3, 4, 5, [6])
    tracing.close("completed")
    if is_file:
        (lane,) = find_logs(tmp_path).lanes
        (record,) = lane.records()
    else:
        record = json.loads(memory.lines[1])
    assert [record[name] for name in AWKWARD.fields] == ["a", "b", 3, 4, 5, [6]]


def chains(pages: list[Any]) -> Any:
    tracing, sink, _ = tracer()
    emit = tracing.emitter(SHARED)
    for one in pages:
        emit(one, 5)
    tracing.close("completed")
    return json.loads(sink.lines[-1])["chains"]


def test_a_checkpoint_is_over_what_was_written_not_over_what_became_of_it() -> None:
    tracing, sink, _ = tracer()
    emit = tracing.emitter(SHARED)
    pages = [1, 2]
    emit(pages, 5)
    pages.append(3)
    tracing.close("completed")
    assert json.loads(sink.lines[-1])["chains"] == chains([[1, 2]]) != chains([[1, 2, 3]])


def test_a_checkpoint_does_not_depend_on_local_facts_or_their_types() -> None:
    tracing, sink, _ = tracer()
    emit = tracing.emitter(SHARED)
    for page, fact in ((1, None), (2, "x"), ([3], [4]), (5, 6)):
        emit(page, fact)
    tracing.close("completed")
    assert json.loads(sink.lines[-1])["chains"] == chains([1, 2, [3], 5])


def test_a_record_that_was_dropped_is_in_no_checkpoint() -> None:
    tracing, sink, _ = tracer()
    emit = tracing.emitter(SHARED)
    emit(1, 5)
    emit(2, {5})
    emit(3, 5)
    tracing.close("completed")
    assert json.loads(sink.lines[-1])["chains"] == chains([1])


def test_two_emitters_of_a_kind_share_its_fate() -> None:
    tracing, sink, warnings = tracer()
    one, two = tracing.emitter(ANY), tracing.emitter(ANY, phase="call")
    one(object())
    two(1)
    assert (len(sink.lines), tracing.dropped, len(warnings)) == (1, {"any": 2}, 1)


def test_a_line_that_was_refused_leaves_no_hole_in_the_file(tmp_path: Path) -> None:
    tracing = Tracer(SegmentSink(tmp_path, 0, "scheduler"), HEADER, lambda: 7, warn=lambda text: None)
    good, bad = tracing.emitter(SHARED), tracing.emitter(ANY)
    for page in range(100):
        good(page, 5)
        bad("x" if page < 50 else "\ud800")
    tracing.close("completed")
    (lane,) = find_logs(tmp_path).lanes
    assert [record["seq"] for record in lane.records()] == list(range(1, 151))
    assert lane.is_complete and lane.dropped == {"any": 50}


def test_a_field_may_be_called_as_an_expression_is(tmp_path: Path) -> None:
    fields = ("len(params.key)", "params", "class", "_own", "result['hit']")
    kind = Kind("match", "decision", agree=("tp",), compared=fields[:3], info=fields[3:])
    head = header(place(), [kind], lane="scheduler", run_id="run-a", tool_version="test")
    tracing = Tracer(SegmentSink(tmp_path, 0, "scheduler"), head, lambda: 7)
    tracing.emitter(kind, phase="call")(1, 2, 3, 4, 5)
    tracing.emitter(kind, phase="return", fields=["class"])([6])
    assert tracing.chains[("tp",)].links[0] == ("match", "call", 1, 2, 3)
    tracing.close("completed")
    (lane,) = find_logs(tmp_path).lanes
    first, second = lane.records()
    assert tuple(first.items())[5:] == tuple(zip(fields, (1, 2, 3, 4, 5), strict=True))
    assert second["class"] == [6]
