"""Steps in which nothing happens, as one record however many they are.

Owns the last idle step that is in the log in full, and the record that counts those like it. An idle step
is written as any other, so that a rank that hangs in it is seen to; once it has ended and was like the one
before it, its lines are taken back and the record is written over, in place:

    step 41 in full | idle: 17 steps from 42 on | step 59, still running

Two steps are alike when they differ in `seq`, time, and counters of their kinds alone, and the counters went
up as they did the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tracer.record import COMMON, IDLE_STEPS
from tracer.sinks import Position, Sink

# Room for the numbers of a record to grow.
SPARE_BYTES = 24

_DECODER = msgspec.json.Decoder(dict[str, Any])
Shape = list[dict[str, Any]]


class Idle:
    """Coalesces a lane's idle steps.

    Args:
        counters: kind -> its counters, for the kinds that the lane writes; it may grow later.
    """

    __slots__ = (
        "_advance",
        "_at",
        "_count",
        "_counters",
        "_encode",
        "_first_step",
        "_last",
        "_seq",
        "_shape",
        "_sink",
        "_start",
        "_start_seq",
        "_width",
    )

    def __init__(self, sink: Sink, counters: Mapping[str, tuple[str, ...]]) -> None:
        self._sink = sink
        self._counters = counters
        self._encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode
        self._start: Position = (-1, 0)
        self._start_seq = 0
        self._shape: Shape | None = None
        self._last: list[int] = []
        self._advance: list[int] | None = None
        # The record that counts them.
        self._at: Position | None = None
        self._width = self._seq = self._first_step = self._count = 0

    def begin(self, seq: int) -> None:
        """A step begins with record `seq`."""
        self._start = self._sink.position()
        self._start_seq = seq

    def forget(self) -> None:
        """Something has happened: the next idle step is the first one."""
        self._shape = self._at = None

    def end(self, seq: int, step: int, time_ns: int) -> int:
        """An idle step has ended in front of record `seq`; gives back the `seq` that is next now."""
        lines = self._sink.since(self._start)
        if lines is None:
            self.forget()
            return seq
        shape, values = self._apart(lines)
        advance = [now - before for now, before in zip(values, self._last, strict=False)]
        is_alike = shape == self._shape and len(values) == len(self._last)
        if self._at is not None:
            # Each block has a whole step of its own to go by.
            is_alike = is_alike and advance == self._advance and self._sink.since(self._at) is not None
        if not is_alike:
            self._shape, self._at = shape, None
            self._last = values
            return seq
        self._last, self._advance = values, advance
        self._sink.rewind(self._start)
        self._count += 1
        if self._at is not None and self._sink.rewrite(self._at, self._line(step, time_ns)):
            return self._start_seq
        return self._begin_record(step, time_ns)

    def _begin_record(self, step: int, time_ns: int) -> int:
        self._seq, self._first_step, self._count, self._width = self._start_seq, step, 1, 0
        line = self._line(step, time_ns)
        self._width = len(line) + SPARE_BYTES
        at = self._sink.position()
        self._sink.write(line.ljust(self._width))
        # Where no room was left it stands in the next block, with what comes after it.
        self._at = at if self._sink.position()[0] == at[0] else None
        if self._at is None:
            self.forget()
        return self._start_seq + 1

    def _line(self, step: int, time_ns: int) -> bytes:
        line = self._encode(
            {
                "seq": self._seq,
                "step": step,
                "time_ns": time_ns,
                "kind": IDLE_STEPS.name,
                "first_step": self._first_step,
                "count": self._count,
                "records": len(self._shape or ()),
                "advance": self._advance,
            }
        )
        return line.ljust(self._width)

    def _apart(self, lines: bytes) -> tuple[Shape, list[int]]:
        """The step's records without what goes on anyway, and the values of their counters."""
        shape, values = [], []
        for record in _DECODER.decode_lines(lines):
            counters = self._counters.get(record["kind"], ())
            values += [value for name in counters if type(value := record.pop(name, None)) is int]
            for name in COMMON[:3]:
                del record[name]
            shape.append(record)
        return shape, values
