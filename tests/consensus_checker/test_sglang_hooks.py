"""Wrappers around a server's functions: they pass everything on, and fail for themselves alone."""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections.abc import Callable
from operator import attrgetter
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from consensus_checker import sglang_kinds as kinds
from consensus_checker.sglang_hooks import Hook, Point, fitted, owner_of, put, undecorated
from consensus_checker.sglang_points import POINTS
from consensus_checker.sglang_see import See
from tracer.record import Kind

NOTE = Kind("note", "decision", agree=("tp",), compared=("want", "got", "before"))


class Lane:
    """Keeps what is written into it."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def emitter(self, kind: Kind, *, phase: str = "", fields: Any = None) -> Callable[..., None]:
        return lambda *values: self.lines.append((kind.name, phase, dict(zip(fields, values, strict=True))))


def allocate(self: Any, need: int = 3, *, extra: int = 0) -> int:
    self.free -= need
    return need + extra


def hooked(function: Callable[..., Any], point: Point) -> tuple[Callable[..., Any], Hook, Lane, list[str]]:
    told: list[str] = []
    lane = Lane()
    hook = Hook(point, told.append)
    wrapper = hook.wrapper(function, SimpleNamespace())
    hook.bind("scheduler", threading.get_ident(), lane, lambda error: None)
    return wrapper, hook, lane, told


def point(**more: Any) -> Point:
    return Point(
        "module.Pool.allocate",
        NOTE,
        {"want": "need", "got": "result", "before": "_h_free"},
        before={"_h_free": "self.free"},
        **more,
    )


def test_a_call_is_passed_on_as_it_was_made_and_recorded_at_its_return() -> None:
    wrapper, _, lane, _ = hooked(allocate, point())
    pool = SimpleNamespace(free=10)
    assert wrapper(pool, 5, extra=3) == 8
    assert pool.free == 5
    assert lane.lines == [("note", "", {"want": 5, "got": 8, "before": 10})]


def test_the_wrapper_has_the_functions_own_parameters_and_defaults() -> None:
    wrapper, _, lane, _ = hooked(allocate, point())
    assert inspect.signature(allocate) == inspect.signature(wrapper, follow_wrapped=False)
    wrapper(SimpleNamespace(free=10))
    assert lane.lines[0][2]["want"] == 3


def test_what_a_call_raises_goes_to_its_caller_and_leaves_no_record() -> None:
    def refuse(self: Any, need: int) -> int:
        raise MemoryError(need)

    wrapper, hook, lane, told = hooked(refuse, point())
    with pytest.raises(MemoryError, match="7"):
        wrapper(SimpleNamespace(free=10), 7)
    assert (lane.lines, told, hook.error) == ([], [], "")


def test_a_call_that_raises_ends_what_its_lane_was_at() -> None:
    def refuse(self: Any) -> int:
        raise MemoryError

    ended: list[str] = []
    own = Point("module.Pool.refuse", NOTE, {"got": "result"}, raised="self.ended.append('idle')")
    wrapper, hook, _, told = hooked(refuse, own)
    with pytest.raises(MemoryError):
        wrapper(SimpleNamespace(ended=ended))
    assert (ended, told, hook.error) == (["idle"], [], "")


def test_a_look_that_raises_costs_the_point_once_and_no_call() -> None:
    wrapper, hook, lane, told = hooked(allocate, point())
    pools = [SimpleNamespace(free=10_000), SimpleNamespace(taken=0, free=10_000)]
    # One has no `free` to look at before the call, as if a version had renamed it.
    broken = SimpleNamespace()
    for _ in range(1000):
        with pytest.raises(AttributeError):
            wrapper(broken, 1)
    assert [wrapper(pools[0]) for _ in range(1000)] == [3] * 1000
    assert pools[0].free == 7000
    (warning,) = told
    assert "Pool.allocate is not recorded from here on: AttributeError" in warning
    assert (lane.lines, "free" in hook.error) == ([], True)


def test_an_expression_over_the_result_that_raises_changes_no_result() -> None:
    wrong = Point("module.Pool.allocate", NOTE, {"got": "result.none", "want": "need"})
    wrapper, _, lane, told = hooked(allocate, wrong)
    assert [wrapper(SimpleNamespace(free=10)) for _ in range(2)] == [3, 3]
    assert (lane.lines, len(told)) == ([], 1)


def test_a_lane_that_cannot_write_changes_no_result() -> None:
    wrapper, hook, lane, told = hooked(allocate, point())

    def full(*_values: Any) -> None:
        raise OSError("no room")

    hook._emits[threading.get_ident()] = None, full
    assert wrapper(SimpleNamespace(free=10)) == 3
    assert (len(told), lane.lines) == (1, [])


def test_until_it_is_bound_and_after_it_is_released_it_only_calls() -> None:
    wrapper, hook, lane, _ = hooked(allocate, point())
    hook.unbind()
    # There is nothing to look at.
    assert wrapper(SimpleNamespace(free=10)) == 3
    assert lane.lines == []


def test_a_thread_of_another_lane_is_not_recorded() -> None:
    wrapper, hook, lane, _ = hooked(allocate, point(lanes=("io",)))
    hook.unbind()
    hook.bind("scheduler", threading.get_ident(), lane, lambda error: None)
    wrapper(SimpleNamespace(free=10))
    assert lane.lines == []


def test_a_condition_that_does_not_hold_leaves_the_call_out() -> None:
    wrapper, _, lane, _ = hooked(allocate, point(when="need > 3"))
    for need in (2, 5):
        wrapper(SimpleNamespace(free=10), need)
    assert [fields["want"] for _, _, fields in lane.lines] == [5]


def test_a_record_before_the_call_has_a_phase_of_its_own() -> None:
    both = Point(
        "module.Pool.allocate", NOTE, {"got": "result"}, call={"want": "need"}, phases=("enter", "leave")
    )
    wrapper, _, lane, _ = hooked(allocate, both)
    wrapper(SimpleNamespace(free=10), 4)
    assert lane.lines == [("note", "enter", {"want": 4}), ("note", "leave", {"got": 4})]


def test_only_the_named_modules_wrappers_are_taken_off() -> None:
    namespace: dict[str, Any] = {"__name__": "checker"}
    exec("def wrapper(*args): return args", namespace)
    wrapper = namespace["wrapper"]
    wrapper.__wrapped__ = allocate
    assert allocate is undecorated(wrapper, "checker")
    assert wrapper is undecorated(wrapper, "somebody else")


def test_a_parameter_is_known_by_its_former_name() -> None:
    poll = next(one for one in POINTS if one.name == "check_prefetch_progress")

    def former(self: Any, req_id: str) -> bool:
        return True

    found = fitted(poll, former)
    assert found is not None
    assert found.values is not None
    assert found.values["rid"] == "_see.rid(req_id)"
    assert found.before["_h_is_open"] == "req_id in self.ongoing_prefetch"


def test_a_field_that_a_version_cannot_give_is_left_out() -> None:
    evict = next(one for one in POINTS if one.name == "evict_for_alloc")
    found = fitted(evict, lambda self, params: None)
    assert found is not None
    assert list(found.values or ()) == ["pages_wanted", "pages_freed"]


def test_a_point_that_would_say_nothing_is_not_hooked() -> None:
    acks = next(one for one in POINTS if one.name == "loading_check")
    assert fitted(acks, lambda self: None) is None


@pytest.mark.parametrize("own", POINTS, ids=lambda own: own.short)
def test_every_point_fills_fields_of_its_kind_and_asks_what_there_is_to_ask(own: Point) -> None:
    fields = [*(own.call or {}), *(own.values or {})]
    assert set(fields) <= set(own.kind.fields if own.kind is not None else ())
    texts = [*own.before.values(), *(own.call or {}).values(), *(own.values or {}).values(), *own.after]
    texts += [own.when, own.raised]
    for found in re.findall(r"_see\.((?:transfers\.)?\w+)", " ".join(texts)):
        attrgetter(found)(See())


def test_no_two_points_are_of_one_function() -> None:
    paths = [own.path for own in POINTS]
    assert len(set(paths)) == len(paths)


def test_every_kind_is_declared_once() -> None:
    declared = [value for value in vars(kinds).values() if isinstance(value, Kind)]
    assert len({kind.name for kind in declared}) == len(declared)


def test_a_name_made_by_one_expression_is_there_for_the_next() -> None:
    own = Point(
        "module.Pool.allocate", NOTE, {"got": "_h_twice", "want": "need"}, after=("(_h_twice := 2 * result)",)
    )
    assert own.parameters == {"need"}
    wrapper, _, lane, _ = hooked(allocate, own)
    assert wrapper(SimpleNamespace(free=10), 4) == 4
    assert lane.lines == [("note", "", {"got": 8, "want": 4})]


def test_a_parameter_may_be_called_result() -> None:
    def resolve(self: Any, result: int) -> int:
        return result + 1

    own = Point("module.Pool.resolve", NOTE, {"want": "result", "got": "_h_returned"})
    wrapper, _, lane, _ = hooked(resolve, own)
    assert wrapper(None, 4) == 5
    assert lane.lines == [("note", "", {"want": 4, "got": 5})]


def test_a_function_of_a_module_is_replaced_wherever_it_has_been_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def poll() -> int:
        return 1

    def other() -> int:
        return 2

    home, user, stranger = (ModuleType(name) for name in ("sglang.polls", "sglang.user", "elsewhere.user"))
    for module in (home, user, stranger):
        vars(module)["poll"] = poll
        monkeypatch.setitem(sys.modules, module.__name__, module)
    put(home, "poll", poll, other)
    assert [vars(module)["poll"]() for module in (home, user, stranger)] == [2, 2, 1]


def test_a_class_that_a_package_only_hands_on_is_not_taken_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = ModuleType("sglang.pools")
    vars(package)["Pool"] = type("Pool", (), {"__module__": "sglang.pools.paged"})
    monkeypatch.setitem(sys.modules, package.__name__, package)
    assert owner_of(Point("sglang.pools.Pool.alloc", NOTE), may_import=False) is None
    vars(package)["Pool"].__module__ = "sglang.pools"
    assert owner_of(Point("sglang.pools.Pool.alloc", NOTE), may_import=False) is vars(package)["Pool"]


def test_a_module_that_a_version_has_not_is_no_error() -> None:
    assert owner_of(Point("tracer.no_such_module.Pool.alloc", NOTE), may_import=True) is None
