"""Source of the functions that write records: what every line costs is decided here.

Owns the generated code. A function is compiled once for a shape of record and bound to a tracer by closure
cells: keyword arguments, a loop over fields, or a dictionary would cost more than the encoding.

    seq, step, time, kind [, phase], values  ->  struct made for this shape  ->  line  ->  window of the sink
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from keyword import iskeyword
from typing import Any

import msgspec

from tracer.record import COMMON

# Sets are missing on purpose: msgspec would write one in an order that differs between processes.
PLAIN = frozenset({int, str, bool, float, type(None)})

# What the code of a recorded call gives as its file.
CALL_FILE = "<traced "
# What is written behind the values, where the sink has no window of its own.
WRITE = """\
    _write(_line)
"""
# The newline comes last: it is what makes the line a record.
STORE = """\
    _start = _window.used
    _end = _start + _len(_line)
    if _end < _window.mark:
        _buffer = _window.buffer
        _buffer[_start:_end] = _line
        _buffer[_end] = 10
        _window.used = _end + 1
    else:
        _write(_line)
"""
# Types are looked at before anything is written, against those of the last record: mostly they are the same.
# What holds others is looked into every time.
RECORD = """\
try:
{computed}    if not ({same_types}):
        _c{at}, _f{at} = _look(({values}), {linked_at})
{remember}
    elif _c{at}:
        _look_into(({values}), _c{at})
    _line = _encode({line}(_tracer.seq, _tracer.step, _clock(), {leading}{values}))
except Exception as _error:
    _drop(_gate, {name!r}, _error)
else:
{store}    _tracer.seq += 1
{after}"""
# Only where old segments are dropped: without the number of what is gone nobody could align what is left.
COUNT = "    _count_{at}[0] += 1\n"
# What ranks must agree on goes into the lane's next checkpoint, as it is now: lists may change until then.
LINK = "    _link(({key}) if {is_flat} else _raw(_encode(({key}))))\n"
# A lane with steps looks at the end of each; another one has to ask itself.
FULL = "    if _len(_links) >= _links_max:\n        _full()\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """One record as generated code writes it.

    Attributes:
        values: the name of a variable for each field, in order.
        linked: variables whose values ranks must agree on, for the next checkpoint; None: it adds nothing.
            Those of a call go with its result, so that the two are one link.
        computed: variable -> the expression that it is given before anything else.
        is_outcome: it ends a call that is linked with it; where that began, `marks_code` keeps.
    """

    name: str
    phase: str
    fields: tuple[str, ...]
    values: tuple[str, ...]
    linked: tuple[str, ...] | None
    computed: tuple[tuple[str, str], ...] = ()
    is_outcome: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """What the generated code depends on besides its records.

    Attributes:
        is_counted: records are counted by kind, because old ones are dropped or a checker must see each.
        has_window: lines are stored straight into the sink's file.
        has_steps: checkpoints are made at the end of steps.
        wider: chains that are wider than the kind's own.
    """

    is_counted: bool
    has_window: bool
    has_steps: bool
    wider: int = 0

    @property
    def heads(self) -> tuple[str, ...]:
        """How many links each chain has among which a link has its place: wider ones so far, its own here."""
        wide = (f"_wide_{number}" for number in range(self.wider))
        return (*(f"{chain}.count + _len({chain}.links)" for chain in wide), "_len(_links)")


def record_code(shape: Shape, at: int, setting: Setting) -> str:
    """Statements that write one record; `at` tells the records of one function apart."""
    values = shape.values
    types = [f"_t{at}_{number}" for number in range(len(values))]
    pairs = list(zip(values, types, strict=True))
    remember = "".join(f"        {kind} = _type({value})\n" for value, kind in pairs)
    # A call's own values are linked with its result.
    linked = set(values if shape.linked is None else shape.linked)
    after = COUNT.format(at=at) if setting.is_counted else ""
    if shape.linked is not None:
        key = ", ".join([repr(shape.name), repr(shape.phase), *shape.linked, *_place(shape, setting)])
        after += LINK.format(key=key, is_flat=f"_f0 and _f{at}" if at else "_f0")
        after += "" if setting.has_steps else FULL
    return RECORD.format(
        computed="".join(f"    {name} = {text}\n" for name, text in shape.computed),
        same_types=" and ".join(f"_type({value}) is {kind}" for value, kind in pairs) or "True",
        values="".join(f"{value}, " for value in values),
        remember=remember.rstrip("\n"),
        at=at,
        linked_at=tuple(number for number, value in enumerate(values) if value in linked),
        line=f"_Line_{at}",
        leading=f"{shape.name!r}, " + (f"{shape.phase!r}, " if shape.phase else ""),
        name=shape.name,
        store=STORE if setting.has_window else WRITE,
        after=after,
    )


def _place(shape: Shape, setting: Setting) -> list[str]:
    """Expressions for where a link stands: without them another order could have the same links.

    Behind how many links of wider chains; and of a call, how many of each chain have come since it began.
    """
    heads = setting.heads
    place = list(heads[:-1])
    if shape.is_outcome:
        place += [f"{head} - _mark_{number}" for number, head in enumerate(heads)]
    return place


def marks_code(setting: Setting) -> str:
    """Statements that keep where a call begins, for the link of its outcome."""
    return "".join(f"_mark_{number} = {head}\n" for number, head in enumerate(setting.heads))


def look(values: Sequence[Any], linked: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """Which of the values hold others, and whether none of those at `linked` does.

    Raises:
        TypeError: one can't be written the same way twice, or holds something that can't.
    """
    if PLAIN.issuperset(map(type, values)):
        return (), True
    demand_plain(values)
    holding = tuple(number for number, value in enumerate(values) if type(value) not in PLAIN)
    return holding, not set(holding) & set(linked)


def look_into(values: Sequence[Any], holding: Sequence[int]) -> None:
    """Demand the same of those that hold others, whatever they hold by now."""
    for number in holding:
        value = values[number]
        if type(value) is not list or not PLAIN.issuperset(map(type, value)):
            demand_plain((value,))


def demand_plain(values: Sequence[Any]) -> None:
    """Refuse what can't be written the same way twice.

    Raises:
        TypeError: names the type; sets and objects are not plain, lists and maps of plain values are.
    """
    for value in values:
        kind = type(value)
        if kind in PLAIN:
            continue
        if kind is list or kind is tuple:
            if not PLAIN.issuperset(map(type, value)):
                demand_plain(value)
        elif kind is dict:
            demand_plain([*value, *value.values()])
        elif isinstance(value, Enum):
            demand_plain((value.value,))
        else:
            raise TypeError(f"{kind.__name__} is not a plain value")


# Names that generated code uses and that a field or a parameter may have too.
NAMES = {"_type": type, "_len": len, "_raw": msgspec.Raw, "_look_into": look_into}


def type_cells(shape: Shape, at: int) -> list[str]:
    """Names of the cells that keep the types of the last record's values."""
    return [f"_t{at}_{number}" for number in range(len(shape.values))]


def found_cells(at: int) -> list[str]:
    """Names of the cells that keep which of its values hold others, and whether none does that is linked."""
    return [f"_c{at}", f"_f{at}"]


def line_class(shape: Shape) -> type[msgspec.Struct]:
    """The class of a shape's lines. Building and encoding one takes half the time of a dictionary."""
    own = ["phase", *shape.fields] if shape.phase else list(shape.fields)
    attributes = {field: field if is_variable(field) else f"field_{at}_" for at, field in enumerate(own)}
    renamed = {attribute: field for field, attribute in attributes.items() if attribute != field}
    names = [*COMMON, *attributes.values()]
    return msgspec.defstruct("Line", [(name, Any) for name in names], rename=renamed, gc=False)


def is_variable(field: str) -> bool:
    """Whether generated code may have a parameter of that name."""
    return field.isidentifier() and not iskeyword(field) and not field.startswith("_")


def _with_variables(shape: Shape) -> Shape:
    """The same with a variable for each field, whatever the field is called."""
    variable_of = {
        value: value if is_variable(value) else f"_v_{at}" for at, value in enumerate(shape.values)
    }
    linked = None if shape.linked is None else tuple(variable_of[value] for value in shape.linked)
    return replace(shape, values=tuple(variable_of.values()), linked=linked)


def indented(code: str, depth: int) -> str:
    return "".join(f"{' ' * depth}{line}\n" for line in code.splitlines())


BIND = """\
def bind(
    _tracer, _encode, _write, _window, _clock, _look, _drop, _dropped, _gate, _link, _links,
    _links_max, _full, _wider, {cells}
):
{types}
    {word}def {signature}:
{body}
    return {name}
"""
# What `bind` takes in front, in this order.
PARTS = tuple(re.findall(r"\b_(\w+)", BIND[: BIND.index("{cells}")]))
EMIT = """\
if _gate:
    if _gate[0]:
        _dropped[{name!r}] += 1
    return
"""


def bind_code(
    shapes: Sequence[Shape],
    setting: Setting,
    *,
    signature: str,
    name: str,
    body: str,
    more: Sequence[str] = (),
    is_async: bool = False,
) -> str:
    """A function `bind` that makes the function `name` out of a tracer and its parts."""
    cells = [f"_Line_{at}" for at in range(len(shapes))]
    if setting.is_counted:
        cells += [f"_count_{at}" for at in range(len(shapes))]
    cells += more
    types = [cell for at, shape in enumerate(shapes) for cell in type_cells(shape, at)]
    founds = [cell for at in range(len(shapes)) for cell in found_cells(at)]
    first = "".join(f"    _c{at}, _f{at} = (), True\n" for at in range(len(shapes)))
    first += f"    {' = '.join(types)} = None\n" if types else ""
    first += "".join(f"    _wide_{number} = _wider[{number}]\n" for number in range(setting.wider))
    said = f"nonlocal {', '.join([*types, *founds])}\n"
    return BIND.format(
        cells=", ".join(cells),
        types=first,
        word="async " if is_async else "",
        signature=signature,
        body=indented(said + body, 8),
        name=name,
    )


@cache
def emitter_code(shape: Shape, setting: Setting) -> tuple[Callable[..., Any], type[msgspec.Struct]]:
    """The `bind` of a function that takes a record's values by position, and the class of its lines."""
    shape = _with_variables(shape)
    parameters = ", ".join([*shape.values, "/"]) if shape.values else ""
    code = bind_code(
        [shape],
        setting,
        signature=f"emit({parameters})",
        name="emit",
        body=EMIT.format(name=shape.name) + record_code(shape, 0, setting),
    )
    namespace: dict[str, Any] = dict(NAMES)
    line = line_class(shape)
    exec(code, namespace)
    return namespace["bind"], line
