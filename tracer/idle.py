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

    Attributes:
        runs: records so far that count idle steps.
    """

    __slots__ = (
        "_advance",
        "_at",
        "_block",
        "_count",
        "_counters",
        "_due_seq",
        "_encode",
        "_first_step",
        "_last",
        "_seq",
        "_shape",
        "_sink",
        "_start",
        "_start_seq",
        "_width",
        "runs",
    )

    def __init__(self, sink: Sink, counters: Mapping[str, tuple[str, ...]]) -> None:
        self._sink = sink
        self.runs = 0
        self._counters = counters
        self._encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode
        self._start: Position = (-1, 0)
        self._start_seq = 0
        # The last idle step that stands there in full, and the block that it is in.
        self._shape: Shape | None = None
        self._block = -1
        self._last: list[int] = []
        self._advance: list[int] | None = None
        # The record that counts them.
        self._at: Position | None = None
        self._due_seq = self._width = self._seq = self._first_step = self._count = 0

    def begin(self, seq: int) -> None:
        """A step begins with record `seq`."""
        if seq != self._due_seq:
            # A record between two steps belongs to neither, and what stands for steps may not go over it.
            self.forget()
        self._start = self._sink.position()
        self._start_seq = seq

    def go_on(self, seq: int) -> None:
        """What was written up to `seq` speaks of counts, not of steps: a checkpoint breaks no run of them."""
        self._due_seq = seq

    def forget(self) -> None:
        """Something has happened: the next idle step is the first one."""
        self._shape = self._at = None

    def end(self, seq: int, step: int, time_ns: int) -> int:
        """An idle step has ended in front of record `seq`; gives back the `seq` that is next now."""
        self._due_seq = self._end(seq, step, time_ns)
        return self._due_seq

    def _end(self, seq: int, step: int, time_ns: int) -> int:
        lines = self._sink.since(self._start)
        if lines is None:
            self.forget()
            return seq
        shape, values = self._apart(lines)
        advance = [now - before for now, before in zip(values, self._last, strict=False)]
        # Each block has a whole step of its own to go by.
        is_alike = (
            shape == self._shape
            and len(values) == len(self._last)
            and self._start[0] == self._block
            and (self._at is None or advance == self._advance)
        )
        if not is_alike:
            self._shape, self._at, self._block = shape, None, self._start[0]
            self._last = values
            return seq
        self._last, self._advance = values, advance
        self._count += 1
        if self._at is not None:
            line = self._line(step, time_ns)
            # A line that has outgrown its room would run into the next one.
            if len(line) == self._width:
                self._sink.rewind(self._start)
                self._sink.rewrite(self._at, line)
                return self._start_seq
        return self._begin_record(seq, step, time_ns)

    def _begin_record(self, seq: int, step: int, time_ns: int) -> int:
        # One that counts nothing yet is written behind the step, to see whether it comes to stand in another
        # block than the step that it is like, or in a new file, whose header would have the wrong `seq`.
        self._seq, self._first_step, self._count, self._width = seq, step, 0, 0
        line = self._line(step, time_ns)
        self._width = len(line) + SPARE_BYTES
        self._sink.write(line.ljust(self._width))
        block, end = self._sink.position()
        if block != self._block:
            self._sink.rewind((block, end - self._width - 1))
            self.forget()
            return seq
        self._sink.rewind(self._start)
        self._at, self._seq, self._count = self._start, self._start_seq, 1
        self.runs += 1
        self._sink.write(self._line(step, time_ns))
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
            values += [record.pop(name) for name in counters if type(record.get(name)) is int]
            for name in COMMON[:3]:
                del record[name]
            shape.append(record)
        return shape, values
