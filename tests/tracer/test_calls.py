"""A traced function does what it did before, whatever it is, is given, returns or raises."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.logs import place
from tracer.calls import OWN_NAME, traced
from tracer.log import find_logs
from tracer.record import Kind, header
from tracer.segments import SegmentSink
from tracer.sinks import MemorySink, NullSink
from tracer.tracer import Tracer

CALL = Kind("match", "decision", agree=("tp",), compared=("rid", "tokens"), local=("hit", "error", "result"))
PLAIN = Kind("plain", "note", info=("value",))
KINDS = (CALL, PLAIN)
HEADER = header(place(), KINDS, lane="scheduler", run_id="run-a", tool_version="test")
SENTINEL = object()

Projections = Mapping[str, str] | Sequence[str]


class Recorder:
    """A lane in memory."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.sink = MemorySink()
        self.tracer = Tracer(self.sink, HEADER, lambda: 7, warn=self.warnings.append)

    def wrap(
        self, function: Any, params: Projections = (), result: Projections = (), kind: Kind = CALL
    ) -> Any:
        return traced(self.tracer, kind, params=params, result=result)(function)

    @property
    def told(self) -> list[tuple[Any, ...]]:
        """Phase and values of each record."""
        lines = [json.loads(line) for line in self.sink.lines[1:]]
        return [tuple(line.values())[4:] for line in lines]


def test_a_call_and_its_result_are_two_records() -> None:
    here = Recorder()

    def match(rid: str, tokens: int) -> int:
        return tokens // 2

    assert here.wrap(match, ["rid", "tokens"], {"hit": "result"})("r1", 64) == 32
    assert here.sink.lines[1:] == [
        b'{"seq":1,"step":0,"time_ns":7,"kind":"match","phase":"call","rid":"r1","tokens":64}',
        b'{"seq":2,"step":0,"time_ns":7,"kind":"match","phase":"return","hit":32}',
    ]


def every(a, b=2, /, c=SENTINEL, *rest, d, e=SENTINEL, **more):  # type: ignore[no-untyped-def]
    return a, b, c, rest, d, e, more


def few(a, b=(), *, c=None):  # type: ignore[no-untyped-def]
    return a, b, c


def only(a, b, /):  # type: ignore[no-untyped-def]
    return a, b


def nothing():  # type: ignore[no-untyped-def]
    return SENTINEL


def keys(*, a, b=1):  # type: ignore[no-untyped-def]
    return a, b


def same_names(a, /, **more):  # type: ignore[no-untyped-def]
    return a, more


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (every, (1,), {"d": 4}),
        (every, (1, 3, 5, 6, 7), {"d": 4, "e": None, "x": 8, "y": 9}),
        (every, (1,), {"d": 4, "c": 3}),
        (few, (1,), {}),
        (few, (), {"b": 3, "a": 1, "c": 2}),
        (only, (1, 2), {}),
        (nothing, (), {}),
        (keys, (), {"b": 2, "a": 1}),
        (same_names, (1,), {"a": 2}),
    ],
)
def test_all_kinds_of_parameters_arrive_as_they_were_given(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    here = Recorder()
    wrapped = here.wrap(function)
    plain, recorded = function(*args, **kwargs), wrapped(*args, **kwargs)
    assert plain == recorded
    assert inspect.signature(wrapped) == inspect.signature(function)
    assert [phase for phase, *_ in here.told] == ["call", "return"]


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (every, (), {"d": 4}),
        (every, (1,), {}),
        (only, (), {"a": 1, "b": 2}),
        (keys, (1,), {}),
        (nothing, (1,), {}),
    ],
)
def test_a_call_that_does_not_fit_is_the_callers_error_and_no_record(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    here = Recorder()
    with pytest.raises(TypeError):
        here.wrap(function)(*args, **kwargs)
    assert (here.told, here.tracer.dropped) == ([], {})


def test_a_mutable_default_is_the_functions_own_object() -> None:
    def gather(value: int, into: list[int] = []) -> list[int]:  # noqa: B006
        into.append(value)
        return into

    wrapped = Recorder().wrap(gather)
    assert wrapped(1) is gather(2) is gather.__defaults__[0]  # type: ignore[index]
    assert wrapped(3) == [1, 2, 3]


def test_methods_of_every_sort_are_bound_as_before() -> None:
    here = Recorder()

    class Cache:
        limit = 7

        @traced(here.tracer, CALL, params={"rid": "self.limit"}, result={"hit": "result"})
        def match(self, tokens: int) -> int:
            return tokens + self.limit

        @staticmethod
        @traced(here.tracer, CALL, params={"rid": "tokens"})
        def inner_static(tokens: int) -> int:
            return tokens

        @traced(here.tracer, CALL, params={"rid": "tokens"})
        @staticmethod
        def outer_static(tokens: int) -> int:
            return tokens

        @classmethod
        @traced(here.tracer, CALL, params={"rid": "cls.limit"})
        def inner_class(cls, tokens: int) -> int:
            return cls.limit + tokens

        @traced(here.tracer, CALL, params={"rid": "cls.limit"})
        @classmethod
        def outer_class(cls, tokens: int) -> int:
            return cls.limit + tokens

    cache = Cache()
    assert cache.match(1) == Cache.match(cache, 1) == 8
    assert cache.inner_static(1) == Cache.outer_static(1) == cache.outer_static(1) == 1
    assert cache.inner_class(1) == Cache.outer_class(1) == cache.outer_class(1) == 8
    assert len(here.told) == 2 * 8
    assert here.warnings == []


def test_an_async_function_is_recorded_around_what_it_awaits() -> None:
    here = Recorder()

    async def fetch(rid: str) -> str:
        await asyncio.sleep(0)
        here.tracer.emitter(PLAIN)("inside")
        return rid * 2

    wrapped = here.wrap(fetch, ["rid"], {"hit": "result"})
    assert inspect.iscoroutinefunction(wrapped)
    assert asyncio.run(wrapped("r")) == "rr"
    assert here.told == [("call", "r"), ("inside",), ("return", "rr")]


def test_an_async_function_that_is_cancelled_says_so() -> None:
    here = Recorder()

    async def wait(rid: str) -> None:
        await asyncio.sleep(3600)

    async def run() -> None:
        task = asyncio.ensure_future(here.wrap(wait, ["rid"])("r"))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert here.told == [("call", "r"), ("raise", "CancelledError")]


def test_a_generator_goes_on_to_generate() -> None:
    here = Recorder()

    def count(tokens: int) -> Iterator[int]:
        sent = yield tokens
        yield from (sent, 2)

    wrapped = here.wrap(count, ["tokens"])
    running = wrapped(1)
    assert (next(running), running.send(5), next(running)) == (1, 5, 2)
    assert here.told == [("call", 1), ("return",)]


def test_an_async_generator_goes_on_to_generate() -> None:
    async def count() -> AsyncIterator[int]:
        yield 1
        yield 2

    async def run() -> list[int]:
        return [number async for number in Recorder().wrap(count)()]

    assert asyncio.run(run()) == [1, 2]


class Odd(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError("x"), Odd(), KeyboardInterrupt(), StopIteration(3)])
def test_what_a_function_raises_is_the_same_object_from_the_same_place_and_it_ran_once(
    error: BaseException,
) -> None:
    here = Recorder()
    runs = []
    cause = KeyError("cause")

    def fail(rid: str) -> None:
        runs.append(rid)
        raise error from cause

    with pytest.raises(type(error)) as caught:
        here.wrap(fail, ["rid"])("r")
    assert (caught.value is error, error.__cause__ is cause, error.__context__, runs) == (
        True,
        True,
        None,
        ["r"],
    )
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    assert frames[-2:] == ["wrapper", "fail"]
    assert here.told == [("call", "r"), ("raise", type(error).__name__)]


def test_a_kind_without_a_field_for_it_tells_nothing_of_what_was_raised() -> None:
    here = Recorder()

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        here.wrap(fail, kind=PLAIN)()
    assert here.told == [("call",)]


@pytest.mark.parametrize("text", ["1 // 0", "missing", "rid.nothing", "[][3]", "object()", "{1}", "b'x'"])
@pytest.mark.parametrize("is_of_result", [False, True])
def test_a_projection_that_fails_a_thousand_times_is_one_warning_and_a_dropped_kind(
    text: str, is_of_result: bool
) -> None:
    here = Recorder()
    runs = []

    def match(rid: str) -> int:
        runs.append(rid)
        return len(runs)

    params, result = ({}, {"hit": text}) if is_of_result else ({"tokens": text}, {"hit": "result"})
    wrapped = here.wrap(match, params, result)
    assert [wrapped("r") for _ in range(1000)] == list(range(1, 1001))
    assert len(here.warnings) == 1
    assert here.told == ([("call",)] if is_of_result else [])
    assert here.tracer.dropped == {"match": 2000 - is_of_result}


def test_a_kind_that_is_dropped_inside_of_a_call_has_no_records_behind_that() -> None:
    here = Recorder()

    def match(rid: Any) -> int:
        return wrapped(object()) if rid == "outer" else 1

    wrapped = here.wrap(match, ["rid"], {"hit": "result"})
    assert wrapped("outer") == 1
    assert here.told == [("call", "outer")]
    assert (here.tracer.dropped, len(here.warnings)) == ({"match": 3}, 1)


def test_a_record_that_fails_while_an_error_passes_does_not_take_its_place() -> None:
    here = Recorder()
    clock = iter([7])
    tracing = Tracer(MemorySink(), {}, lambda: next(clock), warn=here.warnings.append)

    def fail() -> None:
        raise LookupError("own")

    with pytest.raises(LookupError, match="own") as caught:
        traced(tracing, CALL)(fail)()
    assert (tracing.dropped, len(here.warnings)) == ({"match": 2}, 1)
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    "name", ["result", "type", "len", "wrapper", "bind", "tuple", "self", "cls", "kind", "_x"]
)
def test_a_parameter_may_be_named_like_what_the_generated_code_uses(name: str, tmp_path: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def match({name}, *, other=3):\n    return [{name}, other]", namespace)
    tracing = Tracer(SegmentSink(tmp_path, 0, "scheduler"), HEADER, lambda: 7)
    wrapped = traced(tracing, CALL, params={"rid": name}, result={"hit": "result"})(namespace["match"])
    assert wrapped("a") == ["a", 3]
    assert wrapped(**{name: 5, "other": 4}) == [5, 4]
    tracing.close("completed")
    (lane,) = find_logs(tmp_path).lanes
    told = [record.get("rid", record.get("hit")) for record in lane.records()]
    assert told == ["a", ["a", 3], 5, [5, 4]]


@pytest.mark.parametrize(
    "name", ["_gate", "_function", "_thread", "_ident", "_line", "_t0_0", "_v_rid", "_default_other", "_len"]
)
def test_a_parameter_with_a_name_of_the_recorders_own_is_refused_at_once(name: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def match({name}, rid=0):\n    return {name}", namespace)
    with pytest.raises(ValueError, match=name):
        Recorder().wrap(namespace["match"], {"rid": "rid + 1"})


def test_every_name_of_the_generated_code_is_known_to_be_its_own(tmp_path: Path) -> None:
    def match(rid: str, other: int = 3) -> int:
        return other

    tracing = Tracer(SegmentSink(tmp_path, 0, "scheduler", limit_bytes=1 << 20), HEADER, lambda: 7)
    wrapped: Any = traced(tracing, CALL, params={"rid": "len(rid)"}, result={"hit": "result"})(match)
    code = wrapped.__code__
    names = {*code.co_varnames, *code.co_freevars, *code.co_cellvars} - {"rid", "other", "result"}
    assert sorted(name for name in names if not OWN_NAME.fullmatch(name)) == []


@pytest.mark.parametrize("text", ["", "rid rid", "rid)", "rid = 1", "\0", "return rid", "(yield rid)"])
def test_what_is_no_expression_is_refused_at_once(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Recorder().wrap(few, {"rid": text})


@pytest.mark.parametrize("text", ["(yield a)", "(a := 3)", "[b := 3 for _ in a]"])
def test_an_expression_that_does_something_to_the_function_is_refused_at_once(text: str) -> None:
    with pytest.raises(ValueError, match="does more than to look"):
        Recorder().wrap(few, {"rid": text})


def test_an_expression_that_awaits_is_refused_at_once() -> None:
    async def fetch(rid: Any) -> None:
        await rid

    with pytest.raises(ValueError, match="does more than to look"):
        Recorder().wrap(fetch, {"rid": "await rid"})


def test_a_field_that_the_kind_lacks_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="colour"):
        Recorder().wrap(few, {"colour": "a"})


def double(value: int) -> int:
    return later(value)


def test_a_projection_may_use_what_the_module_of_the_function_defines_even_later_on() -> None:
    here = Recorder()
    wrapped = here.wrap(double, {"tokens": "FACTOR * value"})
    globals()["FACTOR"] = 5
    try:
        assert wrapped(4) == 8
    finally:
        del globals()["FACTOR"]
    assert here.told[0] == ("call", 20)


def later(value: int) -> int:
    return 2 * value


def test_decorating_leaves_nothing_in_the_module_of_the_function() -> None:
    before = set(globals())
    Recorder().wrap(double, {"tokens": "value"})("x")
    assert set(globals()) == before


def test_a_projection_does_not_see_what_only_a_closure_holds() -> None:
    here = Recorder()
    hidden = 3

    def match(tokens: int) -> int:
        return tokens + hidden

    assert here.wrap(match, {"tokens": "hidden"})(1) == 4
    assert len(here.warnings) == 1
    assert "hidden" in here.warnings[0]


def test_calls_by_another_thread_are_passed_on_and_not_recorded() -> None:
    here = Recorder()
    found: list[Any] = []

    def match(rid: str) -> str:
        return rid

    wrapped = here.wrap(match, ["rid"])
    other = threading.Thread(target=lambda: found.append(wrapped("other")))
    other.start()
    other.join()
    assert (found, here.told) == (["other"], [])
    assert wrapped("own") == "own"
    assert len(here.told) == 2


def test_calls_by_another_thread_are_not_counted_as_dropped() -> None:
    here = Recorder()
    wrapped = here.wrap(lambda rid: rid, {"rid": "missing"})
    wrapped(1)
    other = threading.Thread(target=lambda: wrapped(1))
    other.start()
    other.join()
    assert here.tracer.dropped == {"match": 2}


@pytest.mark.parametrize("tracing", [None, Tracer(NullSink(), HEADER, lambda: 7)])
def test_where_recording_is_off_the_function_is_given_back_itself(tracing: Tracer | None) -> None:
    assert traced(tracing, CALL, params={"rid": "a"})(few) is few


def test_a_wrapper_tells_who_it_is() -> None:
    wrapped = Recorder().wrap(few)
    assert (wrapped.__name__, wrapped.__wrapped__, wrapped.__module__) == ("few", few, __name__)


def test_a_large_argument_is_asked_only_what_the_projection_asks() -> None:
    class Untouchable:
        def __len__(self) -> int:
            return 40_000

        def refuse(self, *_: Any) -> Any:
            raise AssertionError("somebody looked")

        __iter__ = __repr__ = __getitem__ = __eq__ = __hash__ = __contains__ = refuse  # type: ignore[assignment]

    class Request:
        def __init__(self) -> None:
            self.ids = Untouchable()

        __repr__ = Untouchable.refuse

    here = Recorder()

    def match(req: Request, limit: int) -> tuple[int, Any]:
        return limit, req.ids

    wrapped = here.wrap(match, {"tokens": "len(req.ids)"}, {"hit": "result[0]"})
    assert wrapped(Request(), 7)[0] == 7
    assert (here.told, here.warnings) == ([("call", 40_000), ("return", 7)], [])


def test_a_wrapper_of_a_lane_that_was_closed_still_works(tmp_path: Path) -> None:
    tracing = Tracer(SegmentSink(tmp_path, 0, "scheduler"), HEADER, lambda: 7)
    wrapped: Callable[[int], Any] = traced(tracing, CALL, params={"rid": "a"})(few)
    wrapped(1)
    tracing.close("completed")
    assert wrapped(2) == (2, (), None)
    (lane,) = find_logs(tmp_path).lanes
    assert [record.get("rid") for record in lane.records()] == [1, None]
    assert lane.is_complete
