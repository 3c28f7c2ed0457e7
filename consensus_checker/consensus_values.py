"""What sorts of values there are, and the bytes of those that are bytes.

Knows Python's own types, and torch's and numpy's where a process has imported them. Never imports either,
never waits for a device, never calls what a value's class defines except its fields and its length.
"""

from __future__ import annotations

import ctypes
import marshal
import sys
import types
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import cached_property, partial
from pathlib import PurePath
from typing import Any, Literal, cast
from uuid import UUID

# Content above this is looked at in as many places as fit in it, at equal distances.
CONTENT_BYTES_MAX = 8 << 20
PLACE_BYTES = 64 << 10
ITEM_BYTES_MAX = 32
# What is not in one piece is copied as a whole up to here; beyond, only the places are, item by item.
COPIED_BYTES_MAX = 64 << 20
# Lists shorter than this are not worth a look at whether they hold numbers only.
BULK_MIN = 16
# Of `marshal`: the one before references, with which equal values could have different bytes.
MARSHAL_VERSION = 2
# numpy's codes of long doubles, and of pairs of them; those of so many bits of fraction have so many bytes.
LONG_DOUBLES, LONG_DOUBLE_BITS, LONG_DOUBLE_BYTES = ("g", "G"), 63, 10
# A sequence's kind and length, and an integer of 32 bits: its kind, and four bytes.
HEAD_BYTES, NUMBER_BYTES = 5, 5

# Their parts say all that they are; `parts_of` has them.
BY_PARTS = (complex, range, slice, date, time, timedelta, tzinfo, Decimal, Fraction, UUID, PurePath)
NAMED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
OPAQUE = (types.ModuleType, partial, BaseException)
# What these are made of is the process's own business: locks, threads, handles.
OPAQUE_MODULES = frozenset(
    {
        "_asyncio",
        "asyncio",
        "concurrent",
        "contextvars",
        "multiprocessing",
        "subprocess",
        "_thread",
        "threading",
    }
    | {"_queue", "queue", "_io", "io", "selectors", "_socket", "socket", "_ssl", "ssl", "tempfile"}
    | {"_random", "random", "logging", "weakref"}
)

Style = Literal[
    "sequence",
    "set",
    "dict",
    "fields",
    "object",
    "enum",
    "number",
    "text",
    "bytes",
    "array",
    "tensor",
    "ndarray",
    "scalar",
    "parts",
    "named",
    "opaque",
]


@dataclass(frozen=True, slots=True)
class Plan:
    """How values of one type are looked at.

    Attributes:
        names: its fields; of an object those that have slots.
        skipped: attributes that are no part of the value: they appear when somebody asks for them.
    """

    style: Style
    name: str
    names: tuple[str, ...] = ()
    skipped: frozenset[str] = frozenset()


# In this order; the first one that fits.
BY_TYPE: tuple[tuple[Style, tuple[type, ...]], ...] = (
    ("enum", (Enum,)),
    ("parts", BY_PARTS),
    ("named", NAMED),
    ("opaque", OPAQUE),
    ("number", (int, float)),
    ("text", (str,)),
    ("bytes", (bytes, bytearray, memoryview)),
    ("array", (array,)),
    ("set", (set, frozenset)),
    ("dict", (dict, types.MappingProxyType)),
)


def plan_of(kind: type) -> Plan:
    name = kind.__name__
    if style := _foreign_style(kind):
        return Plan(style, name)
    declared = _declared(kind)
    for style, bases in BY_TYPE:
        if issubclass(kind, bases):
            return Plan(style, name)
    if declared is not None:
        return Plan("fields", name, declared)
    if issubclass(kind, list | tuple | deque):
        return Plan("sequence", name)
    if kind.__module__.partition(".")[0] in OPAQUE_MODULES:
        return Plan("opaque", name)
    return Plan("object", name, tuple(dict.fromkeys(_slots(kind))), _cached(kind))


def _foreign_style(kind: type) -> Style | None:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and issubclass(kind, getattr(torch, "Tensor", ())):
        return "tensor"
    if torch is not None and issubclass(kind, (getattr(torch, "dtype", ()), getattr(torch, "layout", ()))):
        return "parts"
    if numpy is not None and issubclass(kind, getattr(numpy, "ndarray", ())):
        return "ndarray"
    if numpy is not None and issubclass(kind, getattr(numpy, "generic", ())):
        return "scalar"
    return None


def _declared(kind: type) -> tuple[str, ...] | None:
    """Fields of a value type: what two of them are compared by."""
    if issubclass(kind, tuple):
        names = getattr(kind, "_fields", None)
        return tuple(names) if isinstance(names, tuple) else None
    if is_dataclass(kind):
        return tuple(one.name for one in fields(kind) if one.compare)
    if (names := getattr(kind, "__struct_fields__", None)) is not None:
        return tuple(names)
    return None


def _slots(kind: type) -> Iterator[str]:
    for base in reversed(kind.__mro__):
        own = base.__dict__.get("__slots__", ())
        for name in (own,) if isinstance(own, str) else tuple(own):
            if name in ("__dict__", "__weakref__"):
                continue
            is_private = name.startswith("__") and not name.endswith("__")
            yield f"_{base.__name__.lstrip('_')}{name}" if is_private else name


def _cached(kind: type) -> frozenset[str]:
    """Names that stand in an object's dictionary only once somebody has asked for them."""
    return frozenset(
        name
        for base in kind.__mro__
        for name, own in base.__dict__.items()
        if isinstance(own, cached_property)
    )


def exact_number(value: Any) -> int | float:
    """The number itself, whatever class of numbers it is of."""
    return int.__pos__(value) if isinstance(value, int) else float.__pos__(value)


def plain_scalar(value: Any) -> Any:
    """A number of numpy's as Python's; one that Python has nothing for as an array."""
    plain = value.item()
    return sys.modules["numpy"].asarray(value) if type(plain) is type(value) else plain


def parts_of(value: Any) -> Any:
    """What a value of `BY_PARTS` is made of.

    Its `repr` would not do: that of a slice has what is in it, and that of a time its zone's, with addresses.
    """
    match value:
        case complex():
            return value.real, value.imag
        case range() | slice():
            return value.start, value.stop, value.step
        case datetime():
            return datetime.isoformat(value.replace(tzinfo=None)), value.fold, value.tzinfo
        case time():
            return time.isoformat(value.replace(tzinfo=None)), value.fold, value.tzinfo
        case date():
            return date.isoformat(value)
        case timedelta():
            return value.days, value.seconds, value.microseconds
        case timezone():
            return value.utcoffset(None), value.tzname(None)
        case tzinfo():
            return getattr(value, "key", None)
        case Fraction():
            return value.numerator, value.denominator
        case UUID():
            return value.int
        case Decimal():
            return Decimal.__str__(value)
        case PurePath():
            return PurePath.__str__(value)
        case _:
            # A dtype or a layout of torch.
            return str(value)


def qualified(value: Any) -> str:
    module = getattr(value, "__module__", None) or ""
    return f"{module}.{getattr(value, '__qualname__', type(value).__name__)}".lstrip(".")


def bulk(values: Sequence[Any]) -> bytes | None:
    """The bytes of a list or tuple of integers, ten times as fast as one by one; None if it is none."""
    count = len(values)
    if count < BULK_MIN or type(values[0]) is not int or type(values) not in (list, tuple):
        return None
    try:
        # Whatever the list holds: what is no list of integers is seen below.
        data = marshal.dumps(cast(Any, values), MARSHAL_VERSION)
    except ValueError:
        return None
    # Where each is an integer of five bytes, the next begins five bytes on: all of them are, or it is seen.
    is_small = len(data) == HEAD_BYTES + NUMBER_BYTES * count
    if is_small and data[HEAD_BYTES::NUMBER_BYTES].count(b"i") == count:
        return data[HEAD_BYTES:]
    if set(map(type, values)) != {int}:
        return None
    try:
        return array("q", values).tobytes()
    except OverflowError:
        return None


def places(byte_count: int) -> Iterator[tuple[int, int]]:
    """Start and end of what is looked at of so many bytes: all of them, or places at equal distances."""
    if byte_count <= CONTENT_BYTES_MAX:
        yield 0, byte_count
        return
    count = CONTENT_BYTES_MAX // PLACE_BYTES
    for number in range(count):
        start = (byte_count - PLACE_BYTES) * number // (count - 1)
        # No item stands across the begin of a place, whatever its size.
        start -= start % ITEM_BYTES_MAX
        yield start, start + PLACE_BYTES if number < count - 1 else byte_count


def content_of(value: Any) -> bytes | memoryview:
    """Of anything with a buffer: a view of it, or what is looked at where it is large."""
    view = memoryview(value)
    if not view.nbytes:
        return b""
    flat = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
    if flat.nbytes <= CONTENT_BYTES_MAX:
        return flat
    return b"".join(flat[start:end] for start, end in places(flat.nbytes))


def _at(address: int, byte_count: int) -> bytes:
    return b"".join(ctypes.string_at(address + start, end - start) for start, end in places(byte_count))


def tensor_about(value: Any) -> list[Any]:
    return [str(value.dtype).rpartition(".")[2], list(value.shape)]


def tensor_content(value: Any) -> bytes | None:
    """None where it is not in this process's memory as it stands: on a device, sparse, or special."""
    torch = sys.modules["torch"]
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    if not is_plain or value.device.type != "cpu" or value.layout is not torch.strided:
        return None
    own = value.detach()
    byte_count = own.numel() * own.element_size()
    if byte_count > COPIED_BYTES_MAX and not own.is_contiguous():
        # A copy may be far larger than all that is there: an expanded tensor has few bytes of its own.
        return b"".join(_scattered(own, start, end) for start, end in places(byte_count))
    return _tensor_bytes(own) if byte_count else b""


def _scattered(value: Any, start: int, end: int) -> bytes:
    """The bytes that a copy in one piece would have there."""
    torch, size = sys.modules["torch"], value.element_size()
    first = start // size
    at = torch.arange(first, -(-end // size))
    data = _tensor_bytes(value[torch.unravel_index(at, value.shape)])
    return data[start - first * size : end - first * size]


def _tensor_bytes(value: Any) -> bytes:
    own = value.resolve_conj().resolve_neg().contiguous()
    return _at(own.data_ptr(), own.numel() * own.element_size())


def place_of(value: Any) -> str:
    """Where a tensor without content is; not on which device of its kind, for that is a rank's own."""
    return str(value.device.type)


def array_about(value: Any) -> list[Any]:
    return [str(value.dtype), list(value.shape)]


def array_content(value: Any) -> bytes | None:
    """None where its items are objects, or have room between their fields."""
    if value.dtype.hasobject or value.dtype.names is not None:
        return None
    if value.nbytes <= CONTENT_BYTES_MAX:
        data = bytes(value.tobytes())
    elif value.flags.c_contiguous or value.nbytes <= COPIED_BYTES_MAX:
        own = sys.modules["numpy"].ascontiguousarray(value)
        data = _at(own.ctypes.data, own.nbytes)
    else:
        data = b"".join(_flat(value, start, end) for start, end in places(value.nbytes))
    return _without_padding(value.dtype, data)


def _flat(value: Any, start: int, end: int) -> bytes:
    size = value.dtype.itemsize
    first = start // size
    data: bytes = value.flat[first : -(-end // size)].tobytes()
    return data[start - first * size : end - first * size]


def _without_padding(dtype: Any, data: bytes) -> bytes:
    """A long double of 80 bits stands in 16 bytes: what is in the other six is left over from before."""
    if dtype.char not in LONG_DOUBLES or sys.modules["numpy"].finfo(dtype).nmant != LONG_DOUBLE_BITS:
        return data
    room = dtype.itemsize // (2 if dtype.char == "G" else 1)
    return b"".join(data[at : at + LONG_DOUBLE_BYTES] for at in range(0, len(data), room))
