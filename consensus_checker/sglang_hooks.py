"""Wrappers around functions of a server: what they read, when they record, and that they never fail a call.

Owns the generated wrapper. It is put in place before anything is recorded, for a thread keeps the function
that it was started with; until a recorder is there it looks at one dictionary and calls the function. It has
the function's own parameters, and the expressions of a `Point` stand in it as they were written.

    who calls?  ->  before: expressions  ->  [record, phase call]  ->  the function  ->  record

A thread that no lane belongs to is never recorded. An expression that raises, or a value that can't be
written, costs the point, once, with a warning; the call goes on as if nothing were there.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import update_wrapper
from importlib import import_module
from threading import get_ident
from types import ModuleType
from typing import Any, Protocol

from tracer.calls import signature_code
from tracer.emitters import indented
from tracer.record import MAIN_LANE, Kind

Fields = Mapping[str, str]
Emit = Callable[..., None]

CODE_FILE = "<hicache "
PACKAGE = "sglang."
# What expressions name besides parameters, their own and those of `before`.
OTHER_NAMES = frozenset(
    {"result", "_h_returned", "_see"} | {"len", "list", "bool", "int", "getattr", "map", "sum", "str", "max"}
)
MAKE = """\
def _h_make(_h_function, _h_emits, _h_ident, _h_fail, _see{cells}):
    def _h_wrapper({parameters}):
        if not _h_emits or (_h_both := _h_emits.get(_h_ident())) is None:
            return _h_function({arguments})
        try:
{before}
        except Exception as _h_error:
            _h_fail(_h_error)
            return _h_function({arguments})
{called}
        try:
{after}
        except Exception as _h_error:
            _h_fail(_h_error)
        return {returned}
    return _h_wrapper
"""


# What parameters were called in versions before 0.5.20.
FORMER_NAMES: Mapping[str, tuple[str, ...]] = {
    "request": ("req_id", "rid", "handle"),
    "node_id": ("node", "best_match_node"),
    "last_host_node_id": ("last_host_node",),
}


CALL = "{returned} = _h_function({arguments})"
RAISING = """\
try:
    {returned} = _h_function({arguments})
except BaseException:
    try:
        {raised}
    except Exception as _h_error:
        _h_fail(_h_error)
    raise
"""


@dataclass(frozen=True, slots=True)
class Point:
    """One function of the server and what is recorded of it.

    What a call gives back is `result` in its expressions, and `_h_returned` where a parameter has that name.

    Attributes:
        path: module, class and function; or package, module and function.
        lanes: of the threads in which it is recorded.
        before: name -> expression over the parameters, looked at before the call, in this order.
        call: field -> expression, of a record before the call; None for none.
        values: field -> expression over parameters, `result` and the names of `before`; None for no record.
        when: an expression; where it is false neither record is written. With `call` it sees no result.
        after: expressions that are looked at behind the call, ahead of its record.
        raised: one that is looked at where the call raises, which leaves no record.
        phases: of the two records.
        axis: it is recorded only where there is more than one rank along it; "" is always.
        part: of which part of a server it is; "" is of each.
    """

    path: str
    kind: Kind | None
    values: Fields | None = None
    lanes: tuple[str, ...] = (MAIN_LANE,)
    before: Fields = field(default_factory=dict)
    call: Fields | None = None
    when: str = ""
    after: tuple[str, ...] = ()
    raised: str = ""
    phases: tuple[str, str] = ("call", "")
    axis: str = ""
    part: str = ""

    @property
    def module(self) -> str:
        return self.path.rsplit(".", 2)[0]

    @property
    def owner(self) -> str:
        return self.path.rsplit(".", 2)[1]

    @property
    def name(self) -> str:
        return self.path.rsplit(".", 1)[1]

    @property
    def short(self) -> str:
        return f"{self.owner}.{self.name}"

    @property
    def parameters(self) -> frozenset[str]:
        """Names that its expressions take from the function's parameters."""
        texts = [*self.before.values(), *(self.call or {}).values(), *(self.values or {}).values()]
        texts += [*self.after, *([self.when] if self.when else [])]
        own = frozenset(self.before).union(*map(names_made_in, texts))
        return frozenset().union(*map(names_in, texts)) - own - OTHER_NAMES

    def fitted(self, parameters: Collection[str]) -> Point | None:
        """The same for a function with these parameters: some were called otherwise, or were not there yet.

        A field that can't be had is left out. None where what is left would say nothing.
        """
        missing = self.parameters - set(parameters)
        if not missing:
            return self
        other = {name: found for name in missing if (found := _other_name(name, parameters)) is not None}
        lost = missing - set(other)

        def fit(fields: Fields | None) -> Fields | None:
            if fields is None:
                return None
            return {name: renamed(text, other) for name, text in fields.items() if not names_in(text) & lost}

        needed = (*self.before.values(), *self.after, self.when or "None")
        call, values = fit(self.call), fit(self.values)
        compared = set(self.kind.compared) if self.kind is not None else set()
        is_empty = any(part is not None and not compared & set(part) for part in (call, values))
        if is_empty or any(names_in(text) & lost for text in needed):
            return None
        return replace(
            self,
            before=fit(self.before) or {},
            call=call,
            values=values,
            when=renamed(self.when, other) if self.when else "",
            after=tuple(renamed(text, other) for text in self.after),
        )


def names_in(text: str) -> frozenset[str]:
    """Variables that an expression reads and does not make itself."""
    return frozenset(part.id for part in _names(text)) - names_made_in(text)


def names_made_in(text: str) -> frozenset[str]:
    """Variables that an expression makes: those of a comprehension, or one for what comes behind it."""
    return frozenset(part.id for part in _names(text) if isinstance(part.ctx, ast.Store))


def _names(text: str) -> list[ast.Name]:
    return [part for part in ast.walk(ast.parse(text, mode="eval")) if isinstance(part, ast.Name)]


def renamed(text: str, other: Mapping[str, str]) -> str:
    tree = ast.parse(text, mode="eval")
    for part in ast.walk(tree):
        if isinstance(part, ast.Name):
            part.id = other.get(part.id, part.id)
    return ast.unparse(tree)


def _other_name(name: str, parameters: Collection[str]) -> str | None:
    return next((other for other in FORMER_NAMES.get(name, ()) if other in parameters), None)


class Writers(Protocol):
    """A lane's tracer, as far as a hook needs it."""

    def emitter(self, kind: Kind, *, phase: str = "", fields: Sequence[str] | None = None) -> Emit: ...


class Hook:
    """A point that was found, and its wrapper.

    Attributes:
        error: why it records no more; "" while it does.
    """

    def __init__(self, point: Point, tell: Callable[[str], None]) -> None:
        self.point = point
        self.error = ""
        self._tell = tell
        self._emits: dict[int, tuple[Emit | None, Emit | None]] = {}
        self._on_drop: Callable[[Exception], None] | None = None

    def wrapper(self, function: Any, see: Any) -> Any:
        """The function as it is put in place of `function`."""
        return _made(self.point, function, self._emits, self.fail, see)

    def bind(self, lane: str, ident: int, tracer: Writers, on_drop: Callable[[Exception], None]) -> None:
        """Record what the thread `ident` calls, into its lane."""
        point = self.point
        if lane not in point.lanes or self.error:
            return
        both: list[Emit | None] = [None, None]
        if point.kind is not None:
            for at, fields in enumerate((point.call, point.values)):
                if fields is not None:
                    both[at] = tracer.emitter(point.kind, phase=point.phases[at], fields=tuple(fields))
        self._on_drop = on_drop
        self._emits[ident] = both[0], both[1]

    def unbind(self, ident: int | None = None) -> None:
        if ident is None:
            self._emits.clear()
        else:
            self._emits.pop(ident, None)

    def fail(self, error: Exception) -> None:
        """Record no more of this point."""
        self._emits.clear()
        if self.error:
            return
        self.error = f"{type(error).__name__}: {error}"[:200]
        self._tell(f"{self.point.short} is not recorded from here on: {self.error}")
        if self._on_drop is not None:
            self._on_drop(error)


def _made(point: Point, function: Any, emits: Any, fail: Any, see: Any) -> Any:
    signature = inspect.signature(function)
    parameters, arguments, cells = signature_code(signature, "_h_default_")
    returned = "result" if "result" not in signature.parameters else "_h_returned"
    before = [f"{name} = {text}" for name, text in point.before.items()]
    if point.call is not None:
        before += _emitted(0, point.call, point.when)
    after = list(point.after)
    if point.values is not None:
        after += _emitted(1, point.values, point.when)
    called = (RAISING if point.raised else CALL).format(
        arguments=arguments, raised=point.raised, returned=returned
    )
    code = MAKE.format(
        cells="".join(f", {cell}" for cell in cells),
        parameters=parameters,
        arguments=arguments,
        before=indented("\n".join(before) or "pass", 12).rstrip("\n"),
        called=indented(called, 8).rstrip("\n"),
        after=indented("\n".join(after) or "pass", 12).rstrip("\n"),
        returned=returned,
    )
    defaults = [signature.parameters[cell.removeprefix("_h_default_")].default for cell in cells]
    namespace: dict[str, Any] = {}
    exec(compile(code, f"{CODE_FILE}{point.short}>", "exec"), namespace)
    wrapper = namespace["_h_make"](function, emits, get_ident, fail, see, *defaults)
    update_wrapper(wrapper, function)
    return wrapper


def _emitted(at: int, fields: Fields, when: str) -> list[str]:
    emitted = f"_h_both[{at}]({', '.join(fields.values())})"
    return [f"if {when}:", f"    {emitted}"] if when else [emitted]


def fitted(point: Point, function: Any) -> Point | None:
    """The point as this version's function allows it."""
    return point.fitted(inspect.signature(function).parameters)


def undecorated(function: Any, module: str) -> Any:
    """The function below those wrappers whose code is that of `module`."""
    while hasattr(function, "__wrapped__") and getattr(function, "__globals__", {}).get("__name__") == module:
        function = function.__wrapped__
    return function


def owner_of(point: Point, *, may_import: bool) -> Any:
    """The class, or module, that the point's function is in; None where this version has none, or not yet.

    Raises:
        Exception: what its module raises when it is imported, where there is one.
    """
    module = sys.modules.get(point.module)
    if module is None:
        if not may_import:
            return None
        try:
            module = import_module(point.module)
        except ModuleNotFoundError as error:
            if not point.module.startswith(error.name or " "):
                raise
            return None
    owner = getattr(module, point.owner, None)
    home = str(getattr(owner, "__module__", ""))
    # A name that a package only hands on is that of another point's class.
    is_handed_on = home.startswith(PACKAGE) and home != point.module
    return None if is_handed_on else owner


def put(owner: Any, name: str, old: Any, new: Any) -> None:
    """Let `new` stand where `old` did: in its class, or in each module that has it under its name."""
    setattr(owner, name, new)
    if not isinstance(owner, ModuleType):
        return
    for module in list(sys.modules.values()):
        if (getattr(module, "__name__", None) or "").startswith(PACKAGE) and vars(module).get(name) is old:
            setattr(module, name, new)
