"""Decorated functions: what of a call is compared, and the wrapper that hands it over.

Owns the generated wrapper. It is made when a function is decorated, and records once a recorder is there:
until then it looks at one variable and calls the function. It has the function's own parameters, so that
nothing is bound by name at a call, and expressions stand in it as they were written.

    if closed: return function(...)
    key = params.key            ->  payload  ->  record, phase call
    result = function(...)                       the type of what it raised: record, phase raise
    hit = result.hit_length     ->  payload  ->  record, phase return
"""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import update_wrapper
from threading import get_ident
from typing import Any, cast

from consensus_checker.payload import REQUEST_ID, REQUEST_NAMES
from tracer.calls import signature_code
from tracer.emitters import indented
from tracer.record import COMMON, Kind
from tracer.segments import Window
from tracer.tracer import Tracer

Selector = bool | str | list[str] | None

# What an expression may call.
BUILTINS: Mapping[str, Any] = {
    function.__name__: function
    for function in (len, int, str, bool, float, tuple, list, dict, set, sorted, min, max, sum)
}
# The axis along which the ranks that must agree are numbered.
MEMBER = "member"
# The type of what a call raised; on one rank only it is a divergence.
ERROR = "error"
RESULT = "result"
TAKEN = frozenset({*COMMON, "phase"})
FIELD_CHARS_MAX = 120
# Comparing with one that is as short as this costs the interpreter next to nothing.
SHORT_MAX = 2**30 - 1
# Expressions of these alone stand in the wrapper; others have names of their own, and are evaluated apart.
SIMPLE = (
    ast.Expression,
    ast.Name,
    ast.Attribute,
    ast.Constant,
    ast.Call,
    ast.keyword,
    ast.Subscript,
    ast.Slice,
    ast.UnaryOp,
    ast.BinOp,
    ast.BoolOp,
    ast.Compare,
    ast.IfExp,
    ast.Tuple,
    ast.expr_context,
    ast.unaryop,
    ast.operator,
    ast.boolop,
    ast.cmpop,
)
# Short integers, truth and nothing go on as they are; all else has a payload, which may be the value itself.
VALUE = """\
{p}{at} = {text}
if ({p}type({p}{at}) is not {p}int or {p}{at} > {most} or {p}{at} < -{most}) and (
    {p}{at} is not None and {p}{at} is not True and {p}{at} is not False
):
    {p}{at} = {p}payload({p}{at}, {name!r})
"""
REQUEST_VALUE = """\
{p}{at} = {text}
if not ({p}type({p}{at}) is {p}str and {p}is_request_id({p}{at})):
    {p}{at} = {p}payload({p}{at}, {name!r})
"""
# As `tracer.emitters` has it: stored where the file is mapped, the newline last.
RECORD = """\
try:
    {p}seq = {p}tracer.seq
    {p}line = {p}encode({p}{phase}_line({leading}))
    {p}start = {p}window.used
    {p}end = {p}start + {p}len({p}line)
    if {p}end < {p}window.mark:
        {p}buffer = {p}window.buffer
        {p}buffer[{p}start:{p}end] = {p}line
        {p}buffer[{p}end] = 10
        {p}window.used = {p}end + 1
    else:
        {p}write({p}line)
    {p}tracer.seq = {p}seq + 1
    {p}count[0] += 1
    {p}link(({p}name, {phase!r}, {values}))
{full}except {p}Exception as {p}error:
    {p}fail({p}error)
"""
# Once a call is enough.
FULL = """\
    if {p}len({p}links) >= {p}links_max:
        {p}full()
"""
MAKE = """\
def {p}make({p}function{cells}):
    {p}closed = True
    {p}late = {first} = None
    {word}def {p}wrapper({parameters}):
{body}
    def {p}bind(closed, late=None, by=None):
        nonlocal {p}closed, {p}late, {parts}
        if by is not None:
{assigned}
        {p}late, {p}closed = late, closed
    return {p}wrapper, {p}bind
"""
BODY = """\
if {p}closed:
    if {p}closed is True or {p}late():
        return {awaited}{p}function({arguments})
if {p}ident() != {p}thread:
    {p}refuse({shown!r})
{call}try:
    {p}result = {awaited}{p}function({arguments})
except {p}BaseException as {p}raised:
    {p}error_name = {p}type({p}raised).__name__
{raised}    raise
{returned}return {p}result
"""
# Names that the generated code takes from here, for its own may mean something else there.
NAMES: Mapping[str, Any] = {
    "type": type,
    "str": str,
    "int": int,
    "len": len,
    "ident": get_ident,
    "is_request_id": REQUEST_ID.fullmatch,
    "Exception": Exception,
    "BaseException": BaseException,
}
# A wrapper that asks at its next call what to do.
ASK = "ask"


@dataclass(frozen=True, slots=True)
class Binding:
    """What a wrapper records by; each is a variable of its code.

    Attributes:
        refuse: raises, where another thread calls.
        fail: told why a record could not be written.
        name: of the kind.
        call_line, return_line, raise_line: classes of its lines.
    """

    thread: int
    refuse: Callable[[str], None]
    payload: Callable[[Any, str], Any]
    fail: Callable[[Exception], None]
    name: str
    tracer: Tracer
    encode: Callable[[Any], bytes]
    write: Callable[[bytes], None]
    window: Window
    clock: Callable[[], int]
    link: Callable[[Any], None]
    links: list[Any]
    links_max: int
    full: Callable[[], None]
    count: list[int]
    call_line: type
    return_line: type
    raise_line: type


@dataclass(frozen=True, slots=True)
class Selected:
    """One value that is compared.

    Attributes:
        field: what it is called in a log.
        text: the expression, as it was written.
        name: what the value is called: the last name in the expression, if that is all that it ends with.
    """

    field: str
    text: str
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Decorated:
    """A decorated function, as long as its wrapper lives.

    Attributes:
        params, results: what is compared of them; empty where only the call is.
    """

    module: str
    qualname: str
    name: str
    params: tuple[Selected, ...]
    results: tuple[Selected, ...]
    _bind: Callable[..., None]

    def kind(self, name: str) -> Kind:
        names = [one.field for one in (*self.params, *self.results)]
        return Kind(name, "decision", agree=(MEMBER,), compared=tuple(dict.fromkeys([*names, ERROR])))

    @property
    def fields_of(self) -> dict[str, tuple[str, ...]]:
        """Phase -> the fields that its record carries."""
        params = tuple(one.field for one in self.params)
        results = tuple(one.field for one in self.results)
        return {"call": params, "return": results, "raise": (ERROR,)}

    def bind(self, by: Binding) -> None:
        """Record from here on."""
        self._bind(False, None, by)

    def ask(self, late: Callable[[], bool]) -> None:
        """Ask `late` at each call whether it is to go untouched; it may bind the function.

        A call that is under way still tells its outcome.
        """
        self._bind(ASK, late)

    def release(self) -> None:
        """Record no more. A call that is under way still tells its outcome, to whoever it told the call."""
        self._bind(True)


def selector(value: Selector, name: str) -> bool | list[str]:
    """False, True, or expressions.

    Raises:
        TypeError: it is none of what a selector may be.
    """
    if value is None or value is False:
        return False
    if value is True:
        return True
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return list(value)
    raise TypeError(f"{name} must be True, False, None, a string or a list of strings, got {value!r}")


def decorated(
    function: Any, same_params: bool | list[str], same_results: bool | list[str]
) -> tuple[Any, Decorated]:
    """The wrapper, as static or class method where `function` is one, and what binds it."""
    descriptor = type(function) if isinstance(function, classmethod | staticmethod) else None
    raw = function.__func__ if descriptor is not None else function
    # Where no parameter is looked at it takes what it takes, whatever the function below a `wraps` takes.
    signature = inspect.signature(raw, follow_wrapped=bool(same_params))
    name = str(getattr(raw, "__name__", type(raw).__name__))
    params = _params(signature, same_params, has_receiver=_has_receiver(function))
    results = _results(same_results)
    make = _Maker(raw, name, signature, params, results)
    wrapper, bind = make.made()
    update_wrapper(wrapper, raw)
    own = Decorated(
        str(getattr(raw, "__module__", "")),
        str(getattr(raw, "__qualname__", name)),
        name,
        params,
        results,
        bind,
    )
    return (wrapper if descriptor is None else descriptor(wrapper)), own


def _has_receiver(function: Any) -> bool:
    """Whether the first parameter is the object, or class, that a method is called on."""
    if isinstance(function, staticmethod):
        return False
    if isinstance(function, classmethod):
        return True
    qualname = getattr(function, "__qualname__", "") if inspect.isfunction(function) else ""
    # A function inside of a function is none of a class body, even where that function is a method.
    return "." in qualname and "<locals>" not in qualname


def _params(
    signature: inspect.Signature, same: bool | list[str], *, has_receiver: bool
) -> tuple[Selected, ...]:
    if same is True:
        names = list(signature.parameters)[1 if has_receiver else 0 :]
        return tuple(Selected(_field(name), name, name) for name in names)
    return _expressions(same)


def _results(same: bool | list[str]) -> tuple[Selected, ...]:
    return (Selected(RESULT, RESULT, RESULT),) if same is True else _expressions(same)


def _expressions(same: bool | list[str]) -> tuple[Selected, ...]:
    texts = dict.fromkeys(same if isinstance(same, list) else [])
    found: dict[str, Selected] = {}
    for text in texts:
        field = _field(text)
        while field in found:
            field += "'"
        found[field] = Selected(field, text, _last_name(text))
    return tuple(found.values())


def _field(text: str) -> str:
    """The expression as the name of a field: without what JSON would have to escape."""
    plain = " ".join(text.split()).replace('"', "'").replace("\\", "/")
    plain = "".join(char for char in plain if char.isprintable())[:FIELD_CHARS_MAX]
    return f"parameter {plain}" if plain in TAKEN or not plain else plain


def _parsed(text: str) -> ast.Expression | None:
    try:
        return ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError):
        return None


def _last_name(text: str) -> str:
    tree = _parsed(text)
    match tree.body if tree is not None else None:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


class _Maker:
    """Writes the code of one wrapper."""

    def __init__(
        self,
        function: Callable[..., Any],
        shown: str,
        signature: inspect.Signature,
        params: Sequence[Selected],
        results: Sequence[Selected],
    ) -> None:
        self._function = function
        self._shown = shown
        self._signature = signature
        self._names = set(signature.parameters)
        self._params = params
        self._results = results
        # Nothing that a parameter or an expression is called may be a name of the generated code's own.
        own = "_own_"
        while any(own in text for text in (*self._names, *(one.text for one in (*params, *results)))):
            own = "_" + own
        self._own = own
        self._cells: dict[str, Any] = {}

    def made(self) -> tuple[Callable[..., Any], Callable[..., None]]:
        own, function = self._own, self._function
        is_async = inspect.iscoroutinefunction(function)
        parameters, arguments, defaults = signature_code(self._signature, f"{own}default_")
        for name in defaults:
            self._cells[name] = self._signature.parameters[name.removeprefix(f"{own}default_")].default
        params = [self._value(one, f"param_{at}", is_result=False) for at, one in enumerate(self._params)]
        results = [self._value(one, f"result_{at}", is_result=True) for at, one in enumerate(self._results)]
        call = "".join(params) + self._record("call", [f"{own}param_{at}" for at in range(len(params))])
        returned = "".join(results) + self._record(
            "return", [f"{own}result_{at}" for at in range(len(results))]
        )
        body = BODY.format(
            p=own,
            awaited="await " if is_async else "",
            arguments=arguments,
            shown=self._shown,
            call=call,
            raised=indented(self._record("raise", [f"{own}error_name"]), 4),
            returned=returned,
        )
        parts = [one.name for one in fields(Binding)]
        self._cells |= {own + name: value for name, value in NAMES.items()}
        code = MAKE.format(
            p=own,
            cells="".join(f", {name}" for name in self._cells),
            first=" = ".join(own + name for name in parts),
            parts=", ".join(own + name for name in parts),
            word="async " if is_async else "",
            parameters=parameters,
            body=indented(body, 8),
            assigned="".join(f"            {own}{name} = by.{name}\n" for name in parts).rstrip(),
        )
        # What an expression may name besides the parameters: nothing of the function's own module.
        namespace: dict[str, Any] = {"__builtins__": dict(BUILTINS)}
        exec(compile(code, f"<rank_consensus {self._shown}>", "exec"), namespace)
        made = namespace[f"{own}make"](function, *self._cells.values())
        return cast(tuple[Callable[..., Any], Callable[..., None]], made)

    def _record(self, phase: str, values: Sequence[str]) -> str:
        own = self._own
        listed = "".join(f"{value}, " for value in values)
        stamp = f"{own}seq, {own}tracer.step, {own}clock(), {own}name, {phase!r}, "
        return RECORD.format(
            p=own,
            phase=phase,
            leading=stamp + listed,
            values=listed,
            full="" if phase == "call" else FULL.format(p=own),
        )

    def _value(self, one: Selected, at: str, *, is_result: bool) -> str:
        text = self._inline(one.text, is_result=is_result) or self._apart(one.text, at, is_result=is_result)
        form = REQUEST_VALUE if one.name in REQUEST_NAMES else VALUE
        return form.format(p=self._own, at=at, text=text, name=one.name, most=SHORT_MAX)

    def _inline(self, text: str, *, is_result: bool) -> str | None:
        """The expression as it stands in the wrapper; None where it would mean something else there."""
        tree = _parsed(text)
        if tree is None or not all(isinstance(part, SIMPLE) for part in ast.walk(tree)):
            return None
        names = {part.id for part in ast.walk(tree) if isinstance(part, ast.Name)}
        if not is_result:
            return f"({ast.unparse(tree)})"
        if names & (self._names - {RESULT}):
            # A result's expression sees the result only.
            return None
        for part in ast.walk(tree):
            if isinstance(part, ast.Name) and part.id == RESULT:
                part.id = f"{self._own}result"
        return f"({ast.unparse(tree)})"

    def _apart(self, text: str, at: str, *, is_result: bool) -> str:
        """A call of `eval` on it, with nothing but the parameters or the result in sight."""
        cell = f"{self._own}eval_{at}"
        try:
            code: Any = compile(text.strip(), "<rank_consensus>", "eval")
        except (SyntaxError, ValueError, RecursionError):
            # As written, so that whoever calls the function is told.
            code = text

        def evaluate(scope: dict[str, Any]) -> Any:
            return eval(code, {"__builtins__": dict(BUILTINS)}, scope)

        self._cells[cell] = evaluate
        if is_result:
            return f"{cell}({{{RESULT!r}: {self._own}result}})"
        return f"{cell}({{{', '.join(f'{name!r}: {name}' for name in self._signature.parameters)}}})"


def kind_names(functions: Sequence[Decorated], reserved: frozenset[str]) -> Iterator[str]:
    """A name for each, which does not depend on the order in which they were decorated.

    A function's own, with its class or module where two have the same or where it is `reserved`.
    """
    forms = [[one.name, _within_class(one), f"{one.module}.{_within_class(one)}"] for one in functions]
    counts = [Counter(own[depth] for own in forms) for depth in range(3)]
    used: set[str] = set()
    for own in forms:
        free = (form for depth, form in enumerate(own) if counts[depth][form] == 1 and form not in reserved)
        name = next(free, own[2])
        while name in used or name in reserved:
            name += "'"
        used.add(name)
        yield name


def _within_class(one: Decorated) -> str:
    """`Cache.match` of a method; of another function `module.match`."""
    parts = one.qualname.replace("<locals>.", "").split(".")
    return ".".join(parts[-2:]) if len(parts) > 1 else f"{one.module.rpartition('.')[2]}.{one.name}"
