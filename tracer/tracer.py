"""The writing half: one tracer a lane, one generated function a kind of record.

Owns a lane's `seq` and the shape of its lines. Has one writer (its lane) and takes no lock. It must
never fail the run it records: a value that can't be written costs that kind of record, not the run.

    emit(node, tokens)  ->  a struct of the kind's own  ->  one line, stored where the sink's window says
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tracer.chain import ALGORITHM, LINKS, Chain
from tracer.emitters import Setting, Shape, emitter_code, look
from tracer.idle import Idle
from tracer.record import CHECKPOINT, HEADER, THROTTLE, TRAILER, Kind, Outcome
from tracer.segments import SegmentSink
from tracer.sinks import NullSink, Sink, Warn, tell, warn_on_stderr
from tracer.throttle import WINDOW_STEPS, Throttle

Emit = Callable[..., None]


class Tracer:
    """Writes the records of one lane.

    Args:
        has_steps: `begin_step` and `end_step` are called here; other lanes only carry the step's number.
        throttle: what limits the recorder's share of the loop's time; None is no limit.

    Attributes:
        step: scheduler iteration; the runtime sets it, every line carries it.
        seq: position of the next line in the lane; the header is line 0.
        dropped: kind -> records lost because a value of that kind could not be written.
        is_on: false over a null sink; then emitters are one function that does nothing.
        is_quiet: nothing is written for the moment, because recording took too much of the loop's time.
    """

    __slots__ = (
        "_chains",
        "_clock",
        "_counters",
        "_counts",
        "_encode",
        "_gates",
        "_has_steps",
        "_header_body",
        "_idle",
        "_is_closed",
        "_sink",
        "_step_seq",
        "_throttle",
        "_warn",
        "dropped",
        "is_on",
        "is_quiet",
        "seq",
        "step",
    )

    def __init__(
        self,
        sink: Sink,
        header: Mapping[str, Any],
        clock: Callable[[], int],
        *,
        warn: Warn | None = None,
        has_steps: bool = False,
        throttle: Throttle | None = None,
    ) -> None:
        self.step = 0
        self.seq = 0
        self.dropped: dict[str, int] = {}
        self.is_on = not isinstance(sink, NullSink)
        self.is_quiet = False
        self._sink = sink
        self._clock = clock
        self._warn = warn or warn_on_stderr
        self._encode = msgspec.json.Encoder().encode
        self._is_closed = False
        self._header_body = b""
        # Kind -> records so far in a cell of its own, where the sink drops old ones.
        self._counts: dict[str, list[int]] | None = {} if sink.drops_oldest else None
        self._counters: dict[str, tuple[str, ...]] = {}
        self._idle = Idle(sink, self._counters)
        self._chains: dict[tuple[str, ...], Chain] = {}
        self._throttle = throttle
        self._has_steps = has_steps
        # Kind -> empty, or why it is not written: True, it was dropped; False, the lane is quiet.
        self._gates: dict[str, list[bool]] = {}
        self._step_seq = 0
        if not self.is_on:
            return
        try:
            self._header_body = self._encode({**header, "chain": ALGORITHM} if header else {})
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
        if kind.counters:
            self._counters[kind.name] = kind.counters
        compared = tuple(name for name in names if name in kind.compared) if kind.agree else None
        shape = Shape(kind.name, phase, names, names, compared)
        bind, line = emitter_code(shape, self.setting)
        emit: Emit = bind(
            *self.parts(kind), line, *([self.count_of(kind)] if self.setting.is_counted else [])
        )
        return emit

    @property
    def chains(self) -> Mapping[tuple[str, ...], Chain]:
        """Axes -> what was written that must be equal along them; a chain appears with its first emitter."""
        return self._chains

    @property
    def setting(self) -> Setting:
        """What generated code depends on."""
        has_window = isinstance(self._sink, SegmentSink)
        return Setting(self._counts is not None, has_window, self._has_steps)

    def parts(self, kind: Kind) -> tuple[Any, ...]:
        """What generated code is bound to, for records of `kind`, in the order of `emitters.BIND`."""
        gate = self._gates.setdefault(kind.name, [False] if self.is_quiet else [])
        links: list[Any] = []
        if kind.agree:
            links = self._chains.setdefault(kind.agree, Chain(kind.agree)).links
        return (
            self,
            self._encode,
            self._sink.write,
            self._sink.window if isinstance(self._sink, SegmentSink) else None,
            self._clock,
            look,
            self._drop,
            self.dropped,
            gate,
            links.append,
            links,
            LINKS,
            self._chain_is_full,
        )

    def count_of(self, kind: Kind) -> list[int]:
        """The cell in which records of `kind` are counted, where they are."""
        assert self._counts is not None, "this lane counts nothing"
        return self._counts.setdefault(kind.name, [0])

    def begin_step(self, step: int) -> None:
        """A step of the loop begins. Only the lane that calls `end_step` too may call this."""
        assert self._has_steps, "steps begin and end only where the tracer was told so"
        self.step = step
        if self._throttle is not None:
            self._be_quiet(not self._throttle.is_written(step))
        self._step_seq = self.seq
        if self.is_on:
            self._idle.begin(self.seq)

    def end_step(self, *, is_idle: bool) -> None:
        """The step has ended. An idle one that was like the last is taken back and counted."""
        if not self.is_on:
            return
        records = self.seq - self._step_seq
        if not is_idle or self.is_quiet:
            self._idle.forget()
        else:
            self.seq = self._idle.end(self.seq, self.step, self._clock())
        for chain in self._chains.values():
            if len(chain.links) >= LINKS:
                self._checkpoint(chain)
                self._idle.go_on(self.seq)
        if self._throttle is not None and self._throttle.look(records):
            self._tell_throttle(self._throttle)

    def note(self, kind: Kind, *values: Any) -> None:
        """Write one record of a kind of the recorder's own; for what is rare."""
        if self.is_on:
            self.emitter(kind)(*values)

    def close(self, outcome: Outcome) -> None:
        """Write the trailer and close the sink. A second call does nothing."""
        if self._is_closed or not self.is_on:
            return
        self._is_closed = True
        trailer: dict[str, Any] = {
            "seq": self.seq,
            "step": self.step,
            "time_ns": self._clock(),
            "kind": TRAILER,
            "outcome": outcome,
            "records": self.seq,
        }
        if self.dropped:
            trailer["dropped"] = self.dropped
        # The last checkpoint of each chain.
        if chains := {",".join(axes): list(chain.close()) for axes, chain in self._chains.items()}:
            trailer["chains"] = chains
        self._sink.write(self._encode(trailer))
        self.seq += 1
        self._sink.close()

    def _header_line(self) -> bytes:
        """The header as a segment begins with it: it carries the `seq` of the record behind it.

        Where older segments are dropped it says how many records of each kind came before, unless some were
        left out: then nobody knows.
        """
        stamp_of: dict[str, Any] = {"seq": self.seq, "step": self.step}
        stamp_of |= {"time_ns": self._clock(), "kind": HEADER}
        if self._counts and self.seq and (self._throttle is None or not self._throttle.has_throttled):
            stamp_of["counts_before"] = {name: cell[0] for name, cell in self._counts.items() if cell[0]}
        stamp = self._encode(stamp_of)
        return stamp[:-1] + b"," + self._header_body[1:] if self._header_body != b"{}" else stamp

    def _chain_is_full(self) -> None:
        """For lanes without steps. Others wait for the end of one, where all ranks have come to the same."""
        for chain in self._chains.values():
            if len(chain.links) >= LINKS:
                self._checkpoint(chain)

    def _checkpoint(self, chain: Chain) -> None:
        try:
            count, digest = chain.close()
        except Exception as error:
            self._drop(self._gates.setdefault(CHECKPOINT.name, []), CHECKPOINT.name, error)
            chain.links.clear()
            return
        self.note(CHECKPOINT, ",".join(chain.axes), count, digest)

    def _tell_throttle(self, throttle: Throttle) -> None:
        share, most = round(1000 * throttle.share), round(1000 * throttle.share_max)
        self._be_quiet(False)
        self.note(THROTTLE, WINDOW_STEPS, throttle.one_in, share, most)

    def _be_quiet(self, is_quiet: bool) -> None:
        if is_quiet == self.is_quiet:
            return
        self.is_quiet = is_quiet
        for gate in self._gates.values():
            if not (gate and gate[0]):
                gate[:] = [False] if is_quiet else []

    def _drop(self, gate: list[bool], name: str, error: Exception) -> None:
        """A kind that can't be written is dropped for good."""
        gate[:] = [True]
        self.dropped[name] = 1
        tell(self._warn, f"records of kind {name} are dropped from here on (step {self.step}): {error}")


def silent(*_fields: Any) -> None:
    """The emitter of a tracer that is off."""
