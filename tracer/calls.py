"""Decorators that record a call and its result: what is compared is projected, the rest is never looked at.

Owns the generated wrapper. It has the parameters of the function that it wraps, so that nothing is bound by
name at a call, and reads the attributes that a projection names. Where recording is off there is no wrapper.

    @traced(tracer, MATCH, params={"rid": "req.rid", "tokens": "len(req.ids)"}, result={"hit": "result[0]"})
    def match_prefix(self, req, limit): ...

    call   rid, tokens   ->  record, phase call
    ...                      the function runs; what it raises goes on to its caller
    result hit           ->  record, phase return       or the type of what was raised, phase raise
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import update_wrapper
from threading import get_ident
from typing import Any, TypeVar

from tracer.emitters import (
    CALL_FILE,
    NAMES,
    Setting,
    Shape,
    bind_code,
    indented,
    line_class,
    marks_code,
    record_code,
)
from tracer.record import Kind
from tracer.tracer import Tracer

F = TypeVar("F", bound=Callable[..., Any])

# What an outcome record carries when the function raised.
ERROR = "error"

BODY = """\
if _gate or _ident() != _thread:
    if _gate and _gate[0] and _ident() == _thread:
        _dropped[{name!r}] += 2
    return {awaited}_function({arguments})
{call}{marks}try:
    result = {awaited}_function({arguments})
except BaseException as _raised:
    _error_type = _type(_raised).__name__
{raised}    raise
{returned}return result
"""
# The kind may have been dropped since the call was recorded. A lane that is quiet by now
# still completes the pair.
OUTCOME = """\
if _gate and _gate[0]:
    _dropped[{name!r}] += 1
else:
{record}"""
# A call without an outcome: from here on nobody can tell how many records stand before a checkpoint.
UNLINKED = "    _tracer.is_countable = False\n"
# Names of the generated code's own: a parameter that has one of them would be taken for it.
OWN_NAME = re.compile(
    r"_(tracer|encode|write|window|clock|look|look_into|drop|dropped|gate|link|links|links_max|full|wider|function"
    r"|thread|ident|type|len|raw|start|end|buffer|line|error|raised|error_type|t\d+_\d+|[cf]\d+|(wide|mark)_\d+)"
    r"|_(v|Line|count|default)_.*"
)
# They would make another function of the one that they stand in, or change its parameters.
FORBIDDEN = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)


def traced(
    tracer: Tracer | None,
    kind: Kind,
    *,
    params: Mapping[str, str] | Sequence[str] = (),
    result: Mapping[str, str] | Sequence[str] = (),
) -> Callable[[F], F]:
    """Record every call of a function, by the thread that decorates it.

    Args:
        tracer: the lane of that thread; None, or one that is off, gives back the function itself.
        kind: must declare every field of `params` and `result`; a field `error` is filled where it has one.
        params: field -> expression over the parameters; or names of parameters.
        result: field -> expression over the parameters and `result`; or `["result"]`.

    Raises:
        ValueError: a projection is no expression, the kind lacks a field, or a parameter has a name that only
            the generated code may have.
    """

    def decorate(function: F) -> F:
        if tracer is None or not tracer.is_on:
            return function
        if isinstance(function, staticmethod | classmethod):
            return type(function)(decorate(function.__func__))
        return _wrapped(function, tracer, kind, _fields(params), _fields(result))

    return decorate


def _fields(given: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    return dict(given) if isinstance(given, Mapping) else {name: name for name in given}


def _wrapped(
    function: F, tracer: Tracer, kind: Kind, params: Mapping[str, str], result: Mapping[str, str]
) -> F:
    call, returned = _shape(kind, "call", params), _shape(kind, "return", result)
    shapes = [replace(call, linked=None), _with_call(returned, call)]
    if ERROR in kind.fields:
        shapes.append(_with_call(_shape(kind, "raise", {ERROR: "_error_type"}), call))
    signature = inspect.signature(function)
    if taken := [name for name in signature.parameters if OWN_NAME.fullmatch(name)]:
        raise ValueError(f"kind {kind.name}: parameters {taken} have names of the recorder's own")
    setting = tracer.setting_of(kind)
    code = _code(function, signature, shapes, setting)
    namespace: dict[str, Any] = {}
    exec(compile(code, f"{CALL_FILE}{kind.name}>", "exec"), _globals(function), namespace)
    counts = [tracer.count_of(kind)] * len(shapes) if setting.is_counted else []
    tracer.links_calls(
        kind, [shape.phase for shape in shapes[1:]], is_async=inspect.iscoroutinefunction(function)
    )
    defaults = [
        parameter.default
        for parameter in signature.parameters.values()
        if parameter.default is not inspect.Parameter.empty
    ]
    wrapper = namespace["bind"](
        *tracer.parts(kind),
        *map(line_class, shapes),
        *counts,
        function,
        get_ident(),
        get_ident,
        *NAMES.values(),
        *defaults,
    )
    update_wrapper(wrapper, function)
    recorded: F = wrapper
    return recorded


def _shape(kind: Kind, phase: str, projections: Mapping[str, str]) -> Shape:
    missing = [name for name in projections if name not in kind.fields]
    if missing:
        raise ValueError(f"kind {kind.name}: {missing} are not among its fields {kind.fields}")
    for name, text in projections.items():
        try:
            parsed = ast.parse(text, mode="eval")
        except SyntaxError as error:
            raise ValueError(
                f"kind {kind.name}, field {name}: {text!r} is no expression: {error.msg}"
            ) from None
        if any(isinstance(part, FORBIDDEN) for part in ast.walk(parsed)):
            raise ValueError(f"kind {kind.name}, field {name}: {text!r} does more than to look")
    computed = {f"_v_{name}": text for name, text in projections.items() if not text.isidentifier()}
    values = tuple(f"_v_{name}" if f"_v_{name}" in computed else text for name, text in projections.items())
    pairs = zip(projections, values, strict=True)
    compared = tuple(value for name, value in pairs if name in kind.compared) if kind.agree else None
    return Shape(kind.name, phase, tuple(projections), values, compared, tuple(computed.items()))


def _with_call(outcome: Shape, call: Shape) -> Shape:
    """The same, linked together with its call."""
    if outcome.linked is None or call.linked is None:
        return outcome
    return replace(outcome, linked=(*call.linked, *outcome.linked), is_outcome=True)


def _globals(function: Callable[..., Any]) -> dict[str, Any]:
    """Names that a projection may use: those that the function's own code may."""
    return getattr(inspect.unwrap(function), "__globals__", {})


def _code(
    function: Callable[..., Any], signature: inspect.Signature, shapes: Sequence[Shape], setting: Setting
) -> str:
    is_async = inspect.iscoroutinefunction(function)
    parameters, arguments, cells = signature_code(signature)
    awaited = "await " if is_async else ""
    is_linked = shapes[1].linked is not None
    codes = [record_code(shape, at, setting) for at, shape in enumerate(shapes)]
    codes[1:] = [OUTCOME.format(name=shapes[0].name, record=indented(code, 4)) for code in codes[1:]]
    body = BODY.format(
        name=shapes[0].name,
        call=codes[0],
        awaited=awaited,
        arguments=arguments,
        marks=marks_code(setting) if is_linked else "",
        raised=indented(codes[2], 4) if len(codes) > 2 else UNLINKED if is_linked else "",
        returned=codes[1],
    )
    name = "wrapper"
    return bind_code(
        shapes,
        setting,
        signature=f"{name}({parameters})",
        name=name,
        body=body,
        more=["_function", "_thread", "_ident", *NAMES, *cells],
        is_async=is_async,
    )


def signature_code(signature: inspect.Signature, cell: str = "_default_") -> tuple[str, str, list[str]]:
    """The same parameters, the arguments that pass them on, and a cell for each default.

    Args:
        cell: what the names of those cells begin with.
    """
    kinds = inspect.Parameter
    parameters: list[str] = []
    arguments: list[str] = []
    cells: list[str] = []
    is_star_due = True
    has_positional_only = False
    for name, parameter in signature.parameters.items():
        if has_positional_only and parameter.kind is not kinds.POSITIONAL_ONLY:
            parameters.append("/")
            has_positional_only = False
        if parameter.kind is kinds.POSITIONAL_ONLY:
            has_positional_only = True
        if parameter.kind is kinds.VAR_POSITIONAL:
            is_star_due = False
            parameters.append(f"*{name}")
            arguments.append(f"*{name}")
            continue
        if parameter.kind is kinds.VAR_KEYWORD:
            parameters.append(f"**{name}")
            arguments.append(f"**{name}")
            continue
        if parameter.kind is kinds.KEYWORD_ONLY:
            if is_star_due:
                parameters.append("*")
                is_star_due = False
            arguments.append(f"{name}={name}")
        else:
            arguments.append(name)
        if parameter.default is kinds.empty:
            parameters.append(name)
        else:
            cells.append(f"{cell}{name}")
            parameters.append(f"{name}={cell}{name}")
    if has_positional_only:
        parameters.append("/")
    return ", ".join(parameters), ", ".join(arguments), cells
