"""The writing half: one tracer a lane, one generated function a kind of record.

Owns a lane's `seq` and the shape of its lines. Has one writer (its lane) and takes no lock. It must
never fail the run it records: a value that can't be written costs that kind of record, not the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from keyword import iskeyword
from typing import Any

import msgspec

from tracer.record import HEADER, TRAILER, Kind, Outcome
from tracer.sinks import NullSink, Sink, Warn, tell, warn_on_stderr

Emit = Callable[..., None]

# Sets are missing on purpose: msgspec would write one in an order that differs between processes.
PLAIN = frozenset({int, str, bool, float, type(None)})

# The dictionary is a literal and the encoder a closure cell: anything else on this path (keyword
# arguments, a loop over fields, a record object) costs more than the encoding.
SOURCE = """
def bind(_tracer, _encode, _write, _clock, _plain, _demand_plain, _dropped, _drop, _count):
    def emit({parameters}):
        if _dropped and {name!r} in _dropped:
            _dropped[{name!r}] += 1
            return
        _seq = _tracer.seq
        try:
            if not ({plain}):
                _demand_plain(({values}))
            _line = _encode({{
                "seq": _seq, "step": _tracer.step, "time_ns": _clock(), "kind": {name!r}, {items}
            }})
        except Exception as _error:
            _drop({name!r}, _error)
            return
        _write(_line)
        _tracer.seq = _seq + 1{count}
    return emit
"""
# Only where old segments are dropped: without the number of what is gone nobody could align what is left.
COUNT = "\n        _count[0] += 1"


class Tracer:
    """Writes the records of one lane.

    Attributes:
        step: scheduler iteration; the runtime sets it, every line carries it.
        seq: position of the next line in the lane; the header is line 0.
        dropped: kind -> records lost because a value of that kind could not be written.
        is_on: false over a null sink; then emitters are one function that does nothing.
    """

    __slots__ = (
        "_clock",
        "_counts",
        "_encode",
        "_header_body",
        "_is_closed",
        "_sink",
        "_warn",
        "dropped",
        "is_on",
        "seq",
        "step",
    )

    def __init__(
        self, sink: Sink, header: Mapping[str, Any], clock: Callable[[], int], *, warn: Warn | None = None
    ) -> None:
        self.step = 0
        self.seq = 0
        self.dropped: dict[str, int] = {}
        self.is_on = not isinstance(sink, NullSink)
        self._sink = sink
        self._clock = clock
        self._warn = warn or warn_on_stderr
        self._encode = msgspec.json.Encoder().encode
        self._is_closed = False
        self._header_body = b""
        # Kind -> records so far in a cell of its own, where the sink drops old ones.
        self._counts: dict[str, list[int]] | None = {} if sink.drops_oldest else None
        if not self.is_on:
            return
        try:
            self._header_body = self._encode(dict(header))
        except Exception as error:
            self.is_on = False
            tell(self._warn, f"tracing is off: the header can't be written: {error}")
            return
        sink.open(self._header_line)
        self.seq = 1

    def emitter(self, kind: Kind, *, phase: str = "", fields: Sequence[str] | None = None) -> Emit:
        """A function that writes one record of `kind`; takes its fields by position.

        Args:
            phase: written right after `kind` when not empty.
            fields: the kind's fields that this record carries, in this order; all when None.
        """
        names = kind.fields if fields is None else tuple(fields)
        unknown = set(names) - set(kind.fields)
        assert not unknown, f"kind {kind.name}: {sorted(unknown)} are not among its fields {kind.fields}"
        if not self.is_on:
            return silent
        bind = _compiled(kind.name, phase, names, is_counted=self._counts is not None)
        emit: Emit = bind(
            self,
            self._encode,
            self._sink.write,
            self._clock,
            PLAIN,
            demand_plain,
            self.dropped,
            self._drop,
            self._counts.setdefault(kind.name, [0]) if self._counts is not None else None,
        )
        return emit

    def close(self, outcome: Outcome) -> None:
        """Write the trailer and close the sink. A second call does nothing."""
        if self._is_closed or not self.is_on:
            return
        self._is_closed = True
        trailer = {
            "seq": self.seq,
            "step": self.step,
            "time_ns": self._clock(),
            "kind": TRAILER,
            "outcome": outcome,
            "records": self.seq,
        }
        if self.dropped:
            trailer["dropped"] = self.dropped
        self._sink.write(self._encode(trailer))
        self.seq += 1
        self._sink.close()

    def _header_line(self) -> bytes:
        """The header as a segment begins with it: it carries the `seq` of the record behind it.

        Where older segments are dropped it says how many records of each kind came before.
        """
        stamp_of: dict[str, Any] = {"seq": self.seq, "step": self.step}
        stamp_of |= {"time_ns": self._clock(), "kind": HEADER}
        if self._counts and self.seq:
            stamp_of["counts_before"] = {name: cell[0] for name, cell in self._counts.items() if cell[0]}
        stamp = self._encode(stamp_of)
        return stamp[:-1] + b"," + self._header_body[1:] if self._header_body != b"{}" else stamp

    def _drop(self, name: str, error: Exception) -> None:
        self.dropped[name] = 1
        tell(self._warn, f"records of kind {name} are dropped from here on (step {self.step}): {error}")


def silent(*_fields: Any) -> None:
    """The emitter of a tracer that is off."""


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
            demand_plain(value)
        elif kind is dict:
            demand_plain([*value, *value.values()])
        elif isinstance(value, Enum):
            demand_plain((value.value,))
        else:
            raise TypeError(f"{kind.__name__} is not a plain value")


@cache
def _compiled(name: str, phase: str, names: tuple[str, ...], *, is_counted: bool) -> Callable[..., Emit]:
    """The function that binds an emitter to its tracer; compiled once, as many lanes write the same kinds."""
    namespace: dict[str, Any] = {}
    exec(_source(name, phase, names, is_counted=is_counted), namespace)
    bind: Callable[..., Emit] = namespace["bind"]
    return bind


def _source(name: str, phase: str, names: Sequence[str], *, is_counted: bool) -> str:
    for field in names:
        is_usable = field.isidentifier() and not iskeyword(field) and not field.startswith("_")
        assert is_usable, f"kind {name}: field {field!r} can't be a parameter"
    items = [f'"phase": {phase!r}'] if phase else []
    items += [f"{field!r}: {field}" for field in names]
    return SOURCE.format(
        name=name,
        parameters=", ".join([*names, "/"]) if names else "",
        plain=" and ".join(f"type({field}) in _plain" for field in names) or "True",
        values="".join(f"{field}, " for field in names),
        items=", ".join(items),
        count=COUNT if is_counted else "",
    )
