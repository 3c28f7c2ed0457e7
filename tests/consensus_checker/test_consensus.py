"""The decorator and its four functions mean what SGLang's mean, and what they see is in the rank's log."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import consensus_checker
from consensus_checker import assert_same, configure, enabled, rank_consensus, shutdown
from consensus_checker.check import check
from consensus_checker.consensus_ranks import lacking
from consensus_checker.consensus_recorder import _private_folder
from tests.support.consensus import asked_for, events, lane_of, record
from tests.tracer.test_calls import every, few, keys, nothing, only, same_names
from tracer.log import find_logs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with asked_for(tmp_path / "run"):
        yield tmp_path / "run"


def alone(**more: Any) -> list[str]:
    """Configure a rank that has a partner nobody hears of."""
    warnings: list[str] = []
    configure([[0, 1]], rank=0, watcher=None, warn=warnings.append, **more)
    return warnings


@dataclass
class Match:
    hit_length: int
    nodes: list[int]


# What is compared.


def test_a_bare_decorator_compares_that_a_call_was_made(folder: Path) -> None:
    @rank_consensus
    def write(node: object) -> object:
        return node

    alone()
    assert write(folder) is folder
    shutdown()
    assert events(folder) == [("write", "call"), ("write", "return")]


def test_true_compares_each_parameter_with_defaults_and_the_result(folder: Path) -> None:
    @rank_consensus(same_params=True, same_results=True)
    def add(a: int, b: int = 2, *rest: int, c: int = 3, **more: int) -> int:
        return a + b + c

    alone()
    assert (add(1), add(1, c=5)) == (6, 8)
    shutdown()
    first, _, second, _ = events(folder)
    assert first[:4] == ("add", "call", 1, 2)
    assert first[5] == 3 and second[5] == 5
    assert [one[0] for one in (first[4], first[6])] == ["tuple", "dict"]
    assert events(folder)[1] == ("add", "return", 6)
    assert lane_of(folder).kinds["add"].compared == ("a", "b", "rest", "c", "more", "result", "error")


def test_expressions_are_fields_of_the_log_as_they_were_written(folder: Path) -> None:
    @rank_consensus(
        same_params=["len(key)", "limit or 0", "key[0]"],
        same_results=["result.hit_length", "max(result.nodes)"],
    )
    def match(key: list[int], limit: int | None = None) -> Match:
        return Match(len(key) // 2, [3, 7])

    alone()
    match([5, 6, 7, 8])
    shutdown()
    call, returned = list(lane_of(folder).records())
    assert (call["len(key)"], call["limit or 0"], call["key[0]"]) == (4, 0, 5)
    assert (returned["result.hit_length"], returned["max(result.nodes)"]) == (2, 7)


def test_one_expression_needs_no_list(folder: Path) -> None:
    @rank_consensus(same_params="rid", same_results="result + 1")
    def admit(rid: str) -> int:
        return 1

    alone()
    admit("r7")
    shutdown()
    assert events(folder) == [("admit", "call", "r7"), ("admit", "return", 2)]


@pytest.mark.parametrize("nothing", [None, False, []])
def test_none_false_and_no_expression_compare_nothing(folder: Path, nothing: Any) -> None:
    @rank_consensus(same_params=nothing, same_results=nothing)
    def step(number: int) -> int:
        return number

    alone()
    step(1)
    shutdown()
    assert events(folder) == [("step", "call"), ("step", "return")]


def test_an_expression_sees_the_builtins_that_it_may_and_nothing_else(folder: Path) -> None:
    unseen = 5
    assert unseen

    @rank_consensus(
        same_params=["sorted(set(list(tuple(a)))) + [min(a), sum(a), int(float(str(bool(a) + 1)))]"]
    )
    def allowed(a: list[int]) -> None:
        pass

    @rank_consensus(same_params=["unseen"])
    def outside(a: int) -> None:
        pass

    @rank_consensus(same_params=["repr(a)"])
    def other_builtin(a: int) -> None:
        pass

    @rank_consensus(same_results=["a"])
    def parameter_of_a_result(a: int) -> None:
        pass

    @rank_consensus(same_results=["len(result)"])
    def builtin_and_parameter(len: int) -> list[int]:
        return [1, 2, 3]

    alone()
    allowed([1, 2])
    assert builtin_and_parameter(7) == [1, 2, 3]
    for refused in (outside, other_builtin, parameter_of_a_result):
        with pytest.raises(NameError):
            refused(1)
    shutdown()
    assert ("builtin_and_parameter", "return", 3) in events(folder)


def test_comprehensions_lambdas_and_text_are_evaluated_too(folder: Path) -> None:
    @rank_consensus(
        same_params=["[one for one in a if one > 1]", "(lambda rid: rid)(1)", "f'{a}'", "{1: a}", "(n := 4)"],
        same_results=["[result for result in result]", "(lambda result: result)(5)"],
    )
    def gather(a: list[int]) -> list[int]:
        return a

    alone()
    gather([1, 2])
    shutdown()
    call, returned = list(lane_of(folder).records())
    assert call["(lambda rid: rid)(1)"] == 1
    assert call["(n := 4)"] == 4
    assert call["[one for one in a if one > 1]"][:2] == ["list", 1]
    assert returned["(lambda result: result)(5)"] == 5


@pytest.mark.parametrize(
    ("text", "error"),
    [("key.", SyntaxError), ("missing.rid", NameError), ("key.rid", AttributeError), ("key[9]", IndexError)],
)
def test_what_is_wrong_with_an_expression_is_the_callers_to_hear(
    folder: Path, text: str, error: type[Exception]
) -> None:
    calls: list[int] = []

    @rank_consensus(same_params=[text])
    def by_params(key: list[int]) -> None:
        calls.append(1)

    @rank_consensus(same_results=[text.replace("key", "result")])
    def by_results(key: list[int]) -> list[int]:
        calls.append(2)
        return key

    alone()
    for function in (by_params, by_results):
        with pytest.raises(error):
            function([1])
    assert calls == [2]


@pytest.mark.parametrize("wrong", [5, b"", ("a",), ["a", 1], {"a": 1}])
def test_a_selector_that_is_none_is_a_type_error_whether_asked_for_or_not(
    folder: Path, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("1", "0"):
        monkeypatch.setenv("SGLANG_ENABLE_RANK_CONSENSUS_CHECKER", value)
        for name in ("same_params", "same_results"):
            with pytest.raises(TypeError, match=name):
                rank_consensus(**{name: wrong})


def test_an_unknown_argument_is_a_type_error(folder: Path) -> None:
    with pytest.raises(TypeError, match=r"same_result$"):
        rank_consensus(same_result=True)  # type: ignore[call-overload]


# Methods.


class Cache:
    size = 3


def test_true_leaves_out_the_receiver_of_methods_of_every_sort(folder: Path) -> None:
    # As in a module: what a function defines has another qualified name.
    text = """
class Cache:
    @rank_consensus(same_params=True)
    def method(self, a, b=2): return self, a, b
    @rank_consensus(same_params=True)
    @classmethod
    def inside(cls, a): return cls, a
    @classmethod
    @rank_consensus(same_params=True)
    def outside(cls, a): return cls, a
    @rank_consensus(same_params=True)
    @staticmethod
    def static(a): return a
    @staticmethod
    @rank_consensus(same_params=True)
    def plain(a): return a
@rank_consensus(same_params=True)
def function(a): return a
"""
    names: dict[str, Any] = {"rank_consensus": rank_consensus, "__name__": "cache"}
    exec(text, names)
    own = names["Cache"]
    cache = own()
    alone()
    assert cache.method(1) == (cache, 1, 2)
    assert cache.inside(3) == own.inside(3) == (own, 3)
    assert cache.outside(4) == own.outside(4) == (own, 4)
    assert cache.static(5) == own.static(5) == 5
    names["function"](7)
    shutdown()
    calls = {event[0]: event[2:] for event in events(folder) if event[1] == "call"}
    assert calls == {"method": (1, 2), "inside": (3,), "outside": (4,), "static": (5,), "function": (7,)}


def test_a_static_method_decorated_inside_loses_its_first_parameter_as_it_does_in_sglang(
    folder: Path,
) -> None:
    text = """
class Cache:
    @staticmethod
    @rank_consensus(same_params=True)
    def plain(a, b): return a
"""
    names: dict[str, Any] = {"rank_consensus": rank_consensus, "__name__": "cache"}
    exec(text, names)
    alone()
    assert names["Cache"].plain(1, 2) == 1
    shutdown()
    assert events(folder)[0] == ("plain", "call", 2)


def test_a_function_inside_of_a_method_has_no_receiver(folder: Path) -> None:
    @rank_consensus(same_params=True)
    def inner(a: int) -> int:
        return a

    alone()
    inner(7)
    shutdown()
    assert events(folder)[0] == ("inner", "call", 7)


def test_what_has_no_name_of_its_own_is_called_by_its_type(folder: Path) -> None:
    class Evict:
        def __call__(self, tokens: int) -> int:
            return tokens

    add = rank_consensus(same_params=True, same_results=True)(functools.partial(int.__add__, 1))
    evict = rank_consensus(same_params=True)(Evict())
    alone()
    assert (add(2), evict(64)) == (3, 64)
    shutdown()
    assert [one[:2] for one in events(folder)] == [
        ("partial", "call"),
        ("partial", "return"),
        ("Evict", "call"),
        ("Evict", "return"),
    ]


def test_where_no_parameter_is_looked_at_a_function_takes_what_it_took(folder: Path) -> None:
    def match(rid: str) -> str:
        return rid

    @functools.wraps(match)
    def locked(lock: object, rid: str) -> str:
        return match(rid)

    wrapper: Any = rank_consensus(same_results=True)(locked)
    assert wrapper(None, "r7") == "r7"
    alone()
    assert wrapper(None, "r7") == "r7"
    shutdown()
    assert [one[:2] for one in events(folder)] == [("match", "call"), ("match", "return")]


def test_an_expression_without_end_is_the_callers_to_hear(folder: Path) -> None:
    @rank_consensus(same_params=["n" + " + 1" * 20_000])
    def evict(n: int) -> int:
        return n

    assert evict(1) == 1
    alone()
    with pytest.raises((RecursionError, MemoryError)):
        evict(1)


def test_the_wrapper_looks_like_the_function(folder: Path) -> None:
    def match(rid: str, *, limit: int = 5) -> str:
        """Of the tree."""
        return f"{rid} {limit}"

    wrapper = rank_consensus(same_params=True)(match)
    assert (wrapper.__name__, wrapper.__doc__, wrapper.__wrapped__) == (  # type: ignore[attr-defined]
        "match",
        "Of the tree.",
        match,
    )
    alone()
    assert wrapper("r", limit=3) == "r 3"
    with pytest.raises(TypeError, match=r"match\(\) missing 1 required positional argument: 'rid'"):
        wrapper()  # type: ignore[call-arg]


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
        (every, (), {"d": 4}),
        (only, (), {"a": 1, "b": 2}),
        (keys, (1,), {}),
    ],
)
def test_arguments_arrive_as_they_were_given_before_and_while_it_is_on(
    folder: Path, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    def outcome(called: Any) -> Any:
        try:
            return called(*args, **kwargs)
        except TypeError:
            return TypeError

    wrapper = rank_consensus(same_params=True, same_results=True)(function)
    expected = outcome(function)
    assert outcome(wrapper) == expected
    alone()
    assert outcome(wrapper) == expected
    shutdown()
    assert outcome(wrapper) == expected
    phases = [event[1] for event in events(folder)]
    assert phases == ([] if expected is TypeError else ["call", "return"])


def test_parameters_may_have_any_name(folder: Path) -> None:
    @rank_consensus(same_params=True, same_results=True)
    def odd(_own_type: int, step: int, seq: int = 1, result: int = 2, error: int = 3, *, len: int = 4) -> int:
        return _own_type + step

    alone()
    assert odd(1, 2) == 3
    shutdown()
    call, returned = list(lane_of(folder).records())
    assert (call["_own_type"], call["parameter step"], call["step"]) == (1, 2, 0)
    assert (call["result"], call["error"], call["len"], returned["result"]) == (2, 3, 4, 3)


def test_what_is_awaited_returns_when_it_is_done(folder: Path) -> None:
    @rank_consensus(same_params=True, same_results=True)
    async def load(a: int) -> int:
        await asyncio.sleep(0)
        return 2 * a

    alone()
    assert asyncio.run(load(3)) == 6
    shutdown()
    assert events(folder) == [("load", "call", 3), ("load", "return", 6)]


# Calls and their outcomes.


def test_calls_inside_of_calls_are_in_the_order_in_which_they_happen(folder: Path) -> None:
    @rank_consensus
    def evict() -> None:
        pass

    @rank_consensus
    def alloc() -> None:
        evict()

    alone()
    alloc()
    shutdown()
    assert events(folder) == [("alloc", "call"), ("evict", "call"), ("evict", "return"), ("alloc", "return")]


def test_what_a_call_raises_goes_on_and_its_type_is_compared(folder: Path) -> None:
    @rank_consensus(same_results=True)
    def fail(error: BaseException) -> None:
        raise error

    alone()
    for error in (LookupError("a secret"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            fail(error)
    shutdown()
    assert events(folder) == [
        ("fail", "call"),
        ("fail", "raise", "LookupError"),
        ("fail", "call"),
        ("fail", "raise", "KeyboardInterrupt"),
    ]


def test_a_call_that_raises_on_one_rank_only_is_a_divergence(folder: Path) -> None:
    @rank_consensus
    def alloc(rank: int) -> None:
        if rank == 1:
            raise MemoryError

    def body(rank: int) -> None:
        try:
            alloc(rank)
        except MemoryError:
            return

    record([0, 1, 2], body)
    verdict = check(find_logs(folder))
    assert (verdict.finding.kind, verdict.finding.culprit) == ("divergence", (1,))


def test_integers_of_any_length_are_recorded(folder: Path) -> None:
    @rank_consensus(same_params=True, same_results=True)
    def big(a: int, b: int) -> int:
        return 1 << 64

    alone()
    for number in (2**63 - 1, 2**63, -(2**63), 2**64, 3**4000):
        big(number, 5)
    shutdown()
    told = [event[2:] for event in events(folder) if event[1] == "call"]
    assert told[0] == (2**63 - 1, 5)
    assert [one[0][:2] for one in told[1:]] == [["int", 64], ["int", 64], ["int", 65], ["int", 6340]]
    assert [one[1] for one in told] == [5] * 5


# When it is on.


@pytest.mark.parametrize("value", ["1", "true", "YES", "on", "y", " t "])
def test_the_environment_asks_for_it_when_a_function_is_decorated(
    folder: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    def function() -> None:
        pass

    monkeypatch.setenv("SGLANG_ENABLE_RANK_CONSENSUS_CHECKER", value)
    assert rank_consensus(function) is not function


@pytest.mark.parametrize("value", ["0", "false", "no", "", "off", "maybe"])
def test_otherwise_the_same_function_object_comes_back_and_nothing_is_configured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    def function() -> None:
        pass

    monkeypatch.setenv("SGLANG_ENABLE_RANK_CONSENSUS_CHECKER", value)
    method = classmethod(function)
    assert rank_consensus(function) is function
    assert rank_consensus(same_params=True)(method) is method
    alone()
    assert not enabled()
    assert not folder.exists()


def test_it_is_on_from_configure_to_shutdown_and_again(folder: Path) -> None:
    @rank_consensus(same_params=True)
    def step(number: int) -> int:
        return number

    assert [enabled(), step(1)] == [False, 1]
    shutdown()
    alone()
    assert [enabled(), step(2)] == [True, 2]
    shutdown()
    shutdown()
    assert [enabled(), step(3)] == [False, 3]
    assert_same("nobody %s", "listens")
    alone()
    assert [enabled(), step(4)] == [True, 4]
    shutdown()
    # The second log of the same name has a folder of its own.
    assert [event[2] for event in events(folder) if event[1] == "call"] == [2]
    (again,) = [path for path in folder.iterdir() if path.is_dir()]
    assert [event[2] for event in events(again) if event[1] == "call"] == [4]


def test_to_configure_twice_is_to_shut_down_in_between(folder: Path) -> None:
    @rank_consensus(same_params=True)
    def step(number: int) -> int:
        return number

    alone()
    step(1)
    alone()
    step(2)
    assert lane_of(folder).kinds["step"].compared == ("number", "error")
    lane = lane_of(folder)
    assert [one["number"] for one in lane.records() if one["phase"] == "call"] == [1]
    assert lane.outcome == "completed"


def test_what_is_decorated_later_is_recorded_too(folder: Path) -> None:
    @rank_consensus
    def early() -> None:
        pass

    alone()
    early()

    @rank_consensus(same_params=True)
    def late(number: int) -> int:
        return number

    @rank_consensus
    def later() -> None:
        pass

    assert late(5) == 5
    early()
    later()
    shutdown()
    lane = lane_of(folder)
    assert [event[:3] for event in events(folder)] == [
        ("early", "call"),
        ("early", "return"),
        ("late", "call", 5),
        ("late", "return"),
        ("early", "call"),
        ("early", "return"),
        ("later", "call"),
        ("later", "return"),
    ]
    assert {"early", "late", "later"} <= set(lane.kinds)
    assert "late" not in lane.header["kinds"]
    # One more file for all that was new.
    assert len(lane.segments) == 2


def test_what_is_decorated_later_is_compared(folder: Path) -> None:
    def body(rank: int) -> None:
        @rank_consensus(same_params=True)
        def late(number: int) -> int:
            return number

        late(5 if rank != 2 else 6)

    record([0, 1, 2], body)
    finding = check(find_logs(folder)).finding
    assert (finding.kind, finding.culprit) == ("divergence", (2,))
    assert finding.first_divergence is not None and finding.first_divergence.call == "late"


def test_functions_of_one_name_are_told_apart_by_their_class(folder: Path) -> None:
    text = """
class {name}:
    @rank_consensus
    def evict(self): pass
    @rank_consensus
    def checkpoint(self): pass
"""
    classes = []
    for name in ("Tree", "Pool"):
        names: dict[str, Any] = {"rank_consensus": rank_consensus, "__name__": "package.cache"}
        exec(text.format(name=name), names)
        classes.append(names[name])
    alone()
    for one in classes:
        one().evict()
    classes[0]().checkpoint()
    shutdown()
    # `checkpoint` is a kind of the log's own.
    assert [event[0] for event in events(folder)[::2]] == ["Tree.evict", "Pool.evict", "Tree.checkpoint"]


# Threads.


def in_a_thread(function: Any) -> BaseException | None:
    found: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name="prefetcher")
    thread.start()
    thread.join()
    return found[0] if found else None


def test_a_thread_that_does_not_decide_is_refused_while_it_is_on(folder: Path) -> None:
    @rank_consensus
    def step() -> None:
        pass

    assert in_a_thread(step) is None
    alone()

    @rank_consensus
    def late() -> None:
        pass

    for function in (step, late, lambda: assert_same("text")):
        error = in_a_thread(function)
        assert isinstance(error, RuntimeError)
        assert "thread prefetcher" in str(error) and "configure, MainThread" in str(error)
    shutdown()
    assert in_a_thread(step) is None
    assert events(folder) == []


# assert_same.


def test_assert_same_compares_the_text_and_writes_its_format_only(folder: Path) -> None:
    alone()
    assert_same("evicted %d of %s", 3, "the-canary")
    assert_same("the-canary, put together by the caller")
    shutdown()
    first, second = events(folder)
    assert first[:2] == ("assert_same", "evicted %d of %s")
    assert (first[2][:2], second[1][:2]) == (["str", 23], ["str", 38])
    assert "canary" not in str(events(folder))


def test_assert_same_formats_at_once_and_what_is_wrong_is_the_callers(folder: Path) -> None:
    taken: list[int] = []

    def body(rank: int) -> None:
        if rank:
            taken.clear()
        taken.append(1)
        assert_same("took %s", taken)
        taken.append(rank)

    record([0, 1], body)
    assert check(find_logs(folder)).finding.kind == "consistent"
    alone()
    with pytest.raises(TypeError):
        assert_same("%d", "text")
    with pytest.raises(TypeError):
        assert_same("no place", 1)


def test_shifted_boundaries_of_texts_are_seen(folder: Path) -> None:
    def body(rank: int) -> None:
        for text in ("ab", "c") if rank != 1 else ("a", "bc"):
            assert_same("%s", text)

    record([0, 1, 2], body)
    finding = check(find_logs(folder)).finding
    assert (finding.kind, finding.culprit) == ("divergence", (1,))


# Nothing that goes wrong here fails what it watches.


def test_records_that_can_not_be_written_are_counted_and_the_function_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from consensus_checker import consensus

    @rank_consensus(same_params=True)
    def step(number: int) -> int:
        return number

    warnings = alone()
    checker = consensus._checker
    assert checker is not None

    def broken(*_values: Any) -> None:
        raise OSError("no such device")

    step(1)
    # The next line finds a clock that is broken.
    (own,) = [own for own in checker._kinds if own.name == "step"]
    parts = checker._recording.parts(own, checker._kinds[own]) | {"clock": broken}
    monkeypatch.setattr(checker._recording, "parts", lambda *_: parts)
    checker._bind(own, checker._kinds[own])
    assert [step(2), step(3)] == [2, 3]
    assert [text for text in warnings if "no such device" in text] == [
        "records of kind step are dropped from here on (step 0): no such device"
    ]
    shutdown()
    lane = lane_of(folder)
    assert [one["phase"] for one in lane.records()] == ["call", "return"]
    assert lane.dropped == {"step": 4}


def test_a_recorder_that_can_not_be_made_leaves_the_functions_untouched(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @rank_consensus(same_params=True)
    def step(number: int) -> int:
        return number

    def broken(*_values: Any, **_more: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr("consensus_checker.consensus.Recording", broken)
    assert alone() == [
        "no store to meet the other ranks in: decisions are recorded, and compared by nobody" + lacking(),
        "decisions of rank 0 are not recorded: no room",
    ]
    assert (enabled(), step(1)) == (False, 1)


def test_a_folder_that_can_not_be_written_costs_the_log_and_not_the_calls(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("HICACHE_TRACE_DIR", str(blocked / "run"))

    @rank_consensus(same_params=True)
    def step(number: int) -> int:
        return number

    warnings = alone()
    assert step(1) == 1
    shutdown()
    assert any("tracing of rank 0, lane scheduler is off" in text for text in warnings)


def test_without_a_folder_records_are_in_a_private_one_that_is_gone_afterwards(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HICACHE_TRACE_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    alone()
    (own,) = tmp_path.glob("hicache-records-*")
    assert own.stat().st_mode & 0o777 == 0o700
    assert list(own.glob("rank0000.scheduler.000.jsonl"))
    shutdown()
    assert not own.exists()


def test_with_a_verdict_the_private_folder_stays_and_is_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HICACHE_TRACE_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    warnings: list[str] = []
    configure(
        [[0, 1]],
        rank=0,
        store=Shelf({"hello/1": b'{"groups": [[0, 1]], "algorithm": "blake2b-64"}'}),
        watcher=lambda **more: Watched(more, verdict="diverged"),
        warn=warnings.append,
    )
    shutdown()
    (own,) = tmp_path.glob("hicache-records-*")
    assert warnings == [f"the records of rank 0 are in {own}"]


@pytest.mark.parametrize("trace", ["off", "full", "ring"])
def test_what_is_traced_is_what_the_environment_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch, trace: str
) -> None:
    @rank_consensus(same_params=True)
    def step(number: int) -> int:
        return number

    monkeypatch.setenv("HICACHE_TRACE", trace)
    alone()
    from consensus_checker import consensus

    checker = consensus._checker
    assert checker is not None
    tracer = checker._recording.tracer
    for number in range(3000):
        step(number)
    # What a watcher looks at is there in any case.
    assert tracer.chains[("member",)].head == 6000
    shutdown()
    if trace == "off":
        assert not folder.exists()
        return
    lane = lane_of(folder)
    assert [one["number"] for one in lane.records() if one.get("phase") == "call"] == list(range(3000))
    assert lane.is_complete


def test_a_ring_keeps_the_newest_within_its_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @rank_consensus(same_params=True)
    def step(text: str) -> str:
        return text

    monkeypatch.setenv("HICACHE_TRACE_LIMIT", str(1 << 20))
    alone()
    for number in range(12_000):
        step(str(number))
    shutdown()
    lane = lane_of(folder)
    kept = [one for one in lane.records() if one.get("phase") == "call"]
    assert lane.last_dropped_seq > 0 and len(kept) > 1000
    # Whoever aligns it with another rank's knows how many came before.
    every = [one for one in lane.records() if one["kind"] == "step"]
    assert lane.counts_before is not None
    assert lane.counts_before["step"] + len(every) == 24_000
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 1 << 20


@pytest.mark.parametrize(("name", "value"), [("HICACHE_TRACE", "some"), ("HICACHE_TRACE_LIMIT", "64M")])
def test_what_the_environment_says_wrongly_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert any(name in text and value in text for text in alone())


def test_a_forked_child_runs_its_functions_untouched_and_leaves_the_log_to_its_parent(folder: Path) -> None:
    @rank_consensus(same_params=True)
    def step(number: int) -> int:
        return number

    alone()
    step(1)
    child = os.fork()
    if child == 0:
        os._exit(0 if step(2) == 2 and not enabled() else 1)
    assert os.waitpid(child, 0)[1] == 0
    step(3)
    shutdown()
    assert [event[2] for event in events(folder) if event[1] == "call"] == [1, 3]


def test_a_killed_process_has_written_every_call(folder: Path) -> None:
    script = """
import os, signal
from consensus_checker import configure, rank_consensus
@rank_consensus(same_params=True)
def step(number): return number
configure([[0, 1]], rank=0, watcher=None, warn=lambda text: None)
for number in range(500): step(number)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT)
    assert done.returncode == -9
    calls = [one["number"] for one in lane_of(folder).records() if one["phase"] == "call"]
    assert calls == list(range(500))


# Watchers.


class Shelf:
    """A store of the simplest sort: what is not there is None."""

    def __init__(self, told: dict[str, bytes] | None = None) -> None:
        self.values: dict[str, Any] = {}
        self.told = told or {}

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value

    def get(self, key: str) -> Any:
        # What others have said, whatever is put before it.
        own = next((value for name, value in self.told.items() if key.endswith(name)), None)
        return self.values.get(key, own)


class Watched:
    def __init__(self, given: dict[str, Any], verdict: Any = None) -> None:
        self.given = given
        self.verdict = verdict
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self, outcome: str) -> None:
        self.calls.append(f"stop {outcome}")


def test_a_watcher_is_told_what_it_needs_and_when_it_is_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HICACHE_CHECKER_POLICY", "snapshot")
    made: list[Watched] = []

    def watcher(**given: Any) -> Watched:
        made.append(Watched(given))
        return made[-1]

    store = Shelf({"hello/1": b'{"groups": [[0, 1]], "algorithm": "blake2b-64"}'})
    configure([[1, 0]], rank=0, store=store, watcher=watcher)
    (own,) = made
    assert set(own.given) == {"store", "rank", "members", "lanes", "header", "folder", "policy", "tell"}
    assert (own.given["rank"], own.given["members"], own.given["policy"]) == (0, (0, 1), "snapshot")
    assert (own.given["folder"], list(own.given["lanes"])) == (folder, ["scheduler"])
    own.given["store"].set("post/0", b"x")
    assert own.given["store"].check(["post/0"])
    shutdown("stopped")
    assert own.calls == ["start", "stop stopped"]
    assert lane_of(folder).header["run_id"] == own.given["header"]["run_id"]


def test_a_watcher_that_fails_fails_nothing_else(folder: Path) -> None:
    def broken(**_given: Any) -> Any:
        raise OSError("no thread")

    warnings: list[str] = []
    store = Shelf({"hello/1": b'{"groups": [[0, 1]], "algorithm": "blake2b-64"}'})
    configure([[0, 1]], rank=0, store=store, watcher=broken, warn=warnings.append)
    assert enabled()
    shutdown()
    assert warnings == ["nobody compares the ranks while they run: no thread"]


def test_a_rank_without_partners_is_on_and_has_nothing_to_compare(folder: Path) -> None:
    @rank_consensus(same_params=True)
    def step(number: int) -> int:
        return number

    warnings: list[str] = []
    configure([None, [0], [0]], rank=0, watcher=Watched, warn=warnings.append)
    assert (enabled(), step(1)) == (True, 1)
    shutdown()
    assert warnings == []
    assert check(find_logs(folder)).finding.kind == "nothing_compared"


def test_the_names_are_there_without_loading_what_reads_logs() -> None:
    script = (
        "import sys, consensus_checker\n"
        "assert 'consensus_checker.consensus' not in sys.modules\n"
        "from consensus_checker import assert_same, configure, enabled, rank_consensus, shutdown\n"
        "assert not {'consensus_checker.check', 'torch', 'duckdb', 'rich', 'typer'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        consensus_checker.nothing  # noqa: B018


def test_ranks_of_one_host_that_have_met_share_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = _private_folder("7f3a")
    assert (first, first.stat().st_mode & 0o777) == (tmp_path / "hicache-records-7f3a", 0o700)
    assert _private_folder("7f3a") == first
    # One that others may look into was made by somebody else.
    (tmp_path / "hicache-records-5b").mkdir(0o755)
    (tmp_path / "hicache-records-6c").symlink_to(first)
    assert _private_folder("5b") not in (tmp_path / "hicache-records-5b", first)
    assert _private_folder("6c") not in (tmp_path / "hicache-records-6c", first)


BARE = """
import sys
ALLOWED = {"msgspec", "tracer", "consensus_checker"}
class Only:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ALLOWED:
            raise ImportError(f"what records wants {name}")
sys.meta_path.insert(0, Only())
from consensus_checker import assert_same, configure, enabled, rank_consensus, shutdown
@rank_consensus(same_params=True, same_results=True)
def admit(rid, tokens): return len(tokens)
configure([[0, 1]], rank=0, watcher=None, warn=lambda text: None)
for number in range(100):
    admit(f"r{number}", [number])
assert_same("%d", 1)
assert enabled()
shutdown()
"""


def test_a_server_needs_the_standard_library_and_msgspec(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", BARE], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [event[2] for event in events(folder) if event[:2] == ("admit", "call")] == [
        f"r{number}" for number in range(100)
    ]
