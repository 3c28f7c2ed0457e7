"""What a log keeps of a value that ranks must agree on: enough to see that two differ and in which field,
and nothing of a prompt.

Owns the rule of what stands for a value. It never asks for a `repr`, an address, a hash or the time, waits
for no device, and looks at so many parts of a value at most:

    7, True, None, 0.5              as they are
    "r7", where it is called rid    as it is; any other text: ["str", 11, "0f3c..."]   type, length, digest
    [1, 2, 3], b"abc", {..}         ["list", 3, "91aa..."]
    a tensor                        ["Tensor", "int64", [17], "c0de..."]; on a device without its content
    an object                       ["MatchParams", {"rid": "r7", "key": ["RadixKey", 4096, "ab12..."]}]
    a function, a lock, a socket    ["function", "module.name"], ["lock"], ["socket"]

Digests are keyed and run over values, types and lengths: 1, 1.0 and True differ, and so do ("ab", "c") and
("a", "bc"). Sets and dictionaries have no order.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from consensus_checker.consensus_values import (
    Plan,
    array_about,
    array_content,
    bulk,
    content_of,
    exact_number,
    parts_of,
    place_of,
    plain_scalar,
    plan_of,
    qualified,
    tensor_about,
    tensor_content,
)
from tracer.keyed import Digest

# What a table, and most readers of JSON, can hold.
INT_MAX = 2**63 - 1
# Names of text that says which request it is.
REQUEST_NAMES = ("rid", "req_id", "request_id")
# As long as a request id may be, and what it is made of: other text is not one, whatever its name says.
REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,80}")
# What of a request itself is compared, besides its id: it has clocks, counters of its process and much more.
REQUEST_CONTENT = ("origin_input_ids", "output_ids")
# A field with a number of seconds that is called so is a clock's, and differs between ranks.
CLOCK = re.compile(r"(?:^|_)(?:time|times|timestamp|timestamps|ts|clock)(?:_|$)")
# Parts of one value that are looked at, and how deep; behind that only types and lengths are.
PARTS_MAX = 1 << 16
DEPTH_MAX = 16
# Bytes above this have a digest of their own.
OWN_BYTES_MAX = 64
# Fields of an object that a log shows one by one.
FIELDS_MAX = 48
TYPES_MAX = 4096
LONG_MIN = 1024


@dataclass(slots=True)
class Room:
    """Parts that may still be looked at, and the containers that the present one is inside of."""

    left: int = PARTS_MAX
    path: list[int] = field(default_factory=list)


class Payloads:
    """Makes payloads under one digest.

    Args:
        tell: called once, when a value could not be looked at.
    """

    __slots__ = ("_digest", "_has_told", "_long", "_plans", "_tell")

    def __init__(self, digest: Digest, tell: Callable[[str], None] = lambda text: None) -> None:
        self._digest = digest
        self._tell = tell
        self._has_told = False
        self._plans: dict[type, Plan] = {}
        # Address -> a long list or array of the value that is looked at, and what stands for it.
        self._long: dict[int, tuple[Any, bytes]] = {}

    def of(self, value: Any, name: str = "") -> Any:
        """What stands for `value`; made of plain values and lists. Never raises.

        Args:
            name: what the value is called; it tells whether text is a request's id.
        """
        shown = self._guarded(value, name, is_top=True)
        if self._long:
            self._long.clear()
        return shown

    def _guarded(self, value: Any, name: str, *, is_top: bool) -> Any:
        try:
            return self._shown(value, name, is_top=is_top)
        except Exception as error:
            return ["?", self._failed(error, name)]

    def _failed(self, error: Exception, name: str = "") -> str:
        if not self._has_told:
            self._has_told = True
            self._tell(f"a value of {name or 'a call'} could not be looked at: {type(error).__name__}")
        return type(error).__name__

    def _shown(self, value: Any, name: str, *, is_top: bool) -> Any:
        kind = type(value)
        if kind is int:
            if -INT_MAX <= value <= INT_MAX:
                return value
            return ["int", value.bit_length(), self._digest_of(value)]
        if kind is bool or value is None:
            return value
        if kind is float:
            # JSON has neither of them, and what is not a number equals nothing.
            return value if value - value == 0 else ["float", _float_name(value)]
        if kind is str:
            if name in REQUEST_NAMES and REQUEST_ID.fullmatch(value):
                return value
            return ["str", len(value), self._digest_of(value)]
        plan = self._plan(kind)
        match plan.style:
            case "enum":
                return value.name or [plan.name, self._shown(value.value, "", is_top=False)]
            case "number":
                return [plan.name, self._shown(exact_number(value), "", is_top=False)]
            case "scalar":
                return [plan.name, self._shown(plain_scalar(value), "", is_top=False)]
            case "tensor" | "ndarray":
                return [plan.name, *self._array(value, plan)]
            case "named":
                return [plan.name, qualified(value)]
            case "opaque":
                return [plan.name]
            case "fields" | "object":
                return self._object(value, plan, is_top=is_top)
            case "parts":
                return [plan.name, self._digest_of(value)]
            case _:
                return [plan.name, len(value), self._digest_of(value)]

    def _object(self, value: Any, plan: Plan, *, is_top: bool) -> list[Any]:
        fields = self._fields(value, plan)
        if not fields and plan.style == "object":
            return [plan.name]
        if is_top and len(fields) <= FIELDS_MAX and all(name.isidentifier() for name, _ in fields):
            return [plan.name, {name: self._guarded(own, name, is_top=False) for name, own in fields}]
        about: list[Any] = []
        if plan.style == "object" and fields[0][0] in REQUEST_NAMES:
            about.append(self._shown(fields[0][1], fields[0][0], is_top=False))
        if hasattr(type(value), "__len__"):
            about.append(len(value))
        return [plan.name, *about, self._digest_of(value)]

    def _array(self, value: Any, plan: Plan) -> list[Any]:
        is_tensor = plan.style == "tensor"
        about = tensor_about(value) if is_tensor else array_about(value)
        content = tensor_content(value) if is_tensor else array_content(value)
        if content is not None:
            return [*about, self._digest(content)]
        if is_tensor:
            return [*about, place_of(value)]
        out = bytearray()
        self._put_sequence(out, value.ravel().tolist(), Room(), 0)
        return [*about, self._digest(bytes(out))]

    def _digest_of(self, value: Any) -> str:
        out = bytearray()
        self._put(out, value, Room(), 0)
        return self._digest(bytes(out))

    # What a digest runs over: every part begins with its kind and says how long it is.

    def _put(self, out: bytearray, value: Any, room: Room, depth: int) -> None:
        room.left -= 1
        kind = type(value)
        if kind is int:
            out += b"i%x;" % value
        elif value is None:
            out += b"N"
        elif kind is bool:
            out += b"T" if value else b"F"
        elif kind is str:
            out += b"s"
            self._put_bytes(out, value.encode("utf-8", "surrogatepass"))
        elif kind is float:
            out += b"f" + (struct.pack(">d", value) if value == value else b"nan")
        else:
            self._put_other(out, value, room, depth)

    def _put_other(self, out: bytearray, value: Any, room: Room, depth: int) -> None:
        plan = self._plan(type(value))
        _put_text(out, b"<", plan.name)
        if id(value) in room.path:
            # How far up, not which: addresses are a process's own.
            out += b"c%d;" % (len(room.path) - room.path.index(id(value)))
            return
        if depth >= DEPTH_MAX or room.left <= 0:
            out += b"~"
            return
        room.path.append(id(value))
        start = len(out)
        try:
            self._put_content(out, value, plan, room, depth + 1)
        except Exception as error:
            # Only this part of the value can't be looked at.
            del out[start:]
            _put_text(out, b"?", self._failed(error))
        finally:
            room.path.pop()

    def _put_content(self, out: bytearray, value: Any, plan: Plan, room: Room, depth: int) -> None:
        match plan.style:
            case "sequence" | "array" if len(value) >= LONG_MIN:
                self._put_long(out, value, plan, room, depth)
            case "sequence":
                self._put_sequence(out, value, room, depth)
            case "bytes":
                self._put_bytes(out, content_of(value))
            case "array":
                self._put_array(out, value)
            case "set":
                self._put_unordered(out, len(value), lambda: [(member,) for member in value], room, depth)
            case "dict":
                self._put_unordered(out, len(value), lambda: list(value.items()), room, depth)
            case "fields" | "object":
                for name, own in self._fields(value, plan):
                    _put_text(out, b".", name)
                    self._put(out, own, room, depth)
            case "enum":
                _put_text(out, b"e", str(value.name))
                self._put(out, value.value, room, depth)
            case "text":
                self._put(out, str.__str__(value), room, depth)
            case "number":
                self._put(out, exact_number(value), room, depth)
            case "scalar":
                self._put(out, plain_scalar(value), room, depth)
            case "parts":
                self._put(out, parts_of(value), room, depth)
            case "named":
                _put_text(out, b"n", qualified(value))
            case "tensor" | "ndarray":
                _put_text(out, b"t", str(self._array(value, plan)))
            case "opaque":
                pass

    def _put_long(self, out: bytearray, value: Any, plan: Plan, room: Room, depth: int) -> None:
        """A key and its request often hold the very same tokens: they are read once."""
        known = self._long.get(id(value))
        if known is None:
            part = bytearray()
            left = room.left
            if plan.style == "array":
                self._put_array(part, value)
            else:
                self._put_sequence(part, value, room, depth)
            known = (value, bytes(part))
            # What looked at its members may have come to the end of its room, and would not elsewhere.
            if room.left == left:
                self._long[id(value)] = known
        out += known[1]

    def _put_array(self, out: bytearray, value: Any) -> None:
        out += b"a%s%d:%d:" % (value.typecode.encode(), value.itemsize, len(value))
        self._put_bytes(out, content_of(value))

    def _put_sequence(self, out: bytearray, value: Sequence[Any], room: Room, depth: int) -> None:
        out += b"l%d:" % len(value)
        if (data := bulk(value)) is not None:
            self._put_bytes(out, data)
            return
        for member in value:
            if room.left <= 0:
                out += b"~"
                return
            self._put(out, member, room, depth)

    def _put_bytes(self, out: bytearray, data: bytes | memoryview) -> None:
        """What is long goes in as its own digest: bytes are read once, and never copied about."""
        out += b"b%d:" % len(data)
        out += data if len(data) <= OWN_BYTES_MAX else self._digest(data).encode()

    def _put_unordered(
        self,
        out: bytearray,
        count: int,
        entries: Callable[[], Sequence[Sequence[Any]]],
        room: Room,
        depth: int,
    ) -> None:
        """Each entry has the same room, so that which comes first does not decide what is looked at."""
        out += b"u%d:" % count
        share = room.left // count if count else 0
        if not share:
            out += b"~" if count else b""
            return
        parts = []
        for entry in entries():
            own = Room(share, room.path)
            part = bytearray()
            for value in entry:
                self._put(part, value, own, depth)
            room.left -= share - own.left
            parts.append(bytes(part))
        parts.sort()
        for data in parts:
            out += b"%d:" % len(data)
            out += data

    def _fields(self, value: Any, plan: Plan) -> list[tuple[str, Any]]:
        """Names and values, in the order of their declaration or, where there is none, of their names."""
        if plan.style == "fields":
            found = [(name, getattr(value, name, None)) for name in plan.names]
            return [(name, own) for name, own in found if not _is_clock(name, own)]
        own_dict = getattr(value, "__dict__", None)
        held: dict[str, Any] = dict(own_dict) if isinstance(own_dict, dict) else {}
        for name in plan.names:
            try:
                held[name] = getattr(value, name)
            except AttributeError:
                continue
        for name in REQUEST_NAMES:
            if isinstance(held.get(name), str):
                return [(name, held[name]), *((one, held[one]) for one in REQUEST_CONTENT if one in held)]
        names = sorted(name for name in held if name not in plan.skipped)
        return [(name, held[name]) for name in names if not _is_clock(name, held[name])]

    def _plan(self, kind: type) -> Plan:
        plan = self._plans.get(kind)
        if plan is None:
            if len(self._plans) >= TYPES_MAX:
                self._plans.clear()
            plan = self._plans[kind] = plan_of(kind)
        return plan


def _put_text(out: bytearray, mark: bytes, text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    out += b"%s%d:" % (mark, len(data))
    out += data


def _float_name(value: float) -> str:
    if value != value:
        return "nan"
    return "inf" if value > 0 else "-inf"


def _is_clock(name: str, value: Any) -> bool:
    is_number = type(value) is float or (type(value) is int and name.endswith("_ns"))
    return is_number and CLOCK.search(name) is not None
