"""The writing half: one tracer a lane, one generated function a kind of record.

Owns a lane's `seq` and the shape of its lines. Has one writer (its lane) and takes no lock. It must
never fail the run it records: a value that can't be written costs that kind of record, not the run.

    emit(node, tokens)  ->  a struct of the kind's own  ->  one line, stored where the sink's window says
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import msgspec

from tracer.chain import ALGORITHM, LINKS, Chain, declared
from tracer.checkpoint_file import CheckpointFile
from tracer.emitters import CALL_FILE, Setting, Shape, emitter_code, look
from tracer.idle import Idle
from tracer.record import CHECKPOINT, HEADER, IDLE_STEPS, THROTTLE, TRAILER, Kind, Outcome
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
        is_countable: each link of a chain stands for a known number of records in the lane.
    """

    __slots__ = (
        "_chains",
        "_checkpoints",
        "_clock",
        "_counters",
        "_counts",
        "_encode",
        "_gates",
        "_has_steps",
        "_header_body",
        "_idle",
        "_is_closed",
        "_noted",
        "_sink",
        "_step_seq",
        "_throttle",
        "_warn",
        "dropped",
        "is_countable",
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
        self.is_countable = True
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
        # Those of the header's kinds from the start: where a link stands among others is part of it.
        self._chains = declared(header) if self.is_on else {}
        # Kind -> records so far, of kinds that a checker must see wherever they are.
        self._noted: dict[str, list[int]] = {}
        self._checkpoints: CheckpointFile | None = None
        if isinstance(sink, SegmentSink) and not sink.drops_oldest:
            self._checkpoints = CheckpointFile(sink.folder, sink.rank, sink.lane)
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
        setting = self.setting_of(kind)
        bind, line = emitter_code(shape, setting)
        emit: Emit = bind(*self.parts(kind), line, *([self.count_of(kind)] if setting.is_counted else []))
        if kind.agree:
            self._chain_of(kind).singles.add((kind.name, phase))
        return emit

    @property
    def chains(self) -> Mapping[tuple[str, ...], Chain]:
        """Axes -> what was written that must be equal along them.

        Those of the header's kinds are there from the start, another with the first emitter of its kind.
        """
        return self._chains

    @property
    def was_throttled(self) -> bool:
        """Whether records were left out because recording took too much of the loop's time."""
        return self._throttle is not None and self._throttle.has_throttled

    def setting_of(self, kind: Kind) -> Setting:
        """What generated code for records of `kind` depends on."""
        has_window = isinstance(self._sink, SegmentSink)
        wider = len(self._chain_of(kind).wider) if kind.agree else 0
        is_counted = self._counts is not None or kind.role == "anomaly"
        return Setting(is_counted, has_window, self._has_steps, wider)

    def links_calls(self, kind: Kind, phases: Sequence[str], *, is_async: bool) -> None:
        """Calls of `kind` are linked with their outcome of one of `phases`, so that one link is two records.

        Several that are open at once may end in any order: then their links don't say in which they began.
        """
        if kind.agree:
            self._chain_of(kind).pairs.update((kind.name, phase) for phase in phases)
            self.is_countable = self.is_countable and not is_async

    def _chain_of(self, kind: Kind) -> Chain:
        """Its chain; one of its own where the header does not have the kind."""
        same = (chain for axes, chain in self._chains.items() if set(axes) == set(kind.agree))
        chain = self._chains.get(kind.agree) or next(same, None)
        if chain is None:
            # Where it stands among those before it is under no digest.
            own = set(kind.agree)
            is_apart = not any(own < set(axes) or own > set(axes) for axes in self._chains)
            self.is_countable = self.is_countable and is_apart
            chain = self._chains[kind.agree] = Chain(kind.agree)
        return chain

    def parts(self, kind: Kind) -> tuple[Any, ...]:
        """What generated code is bound to, for records of `kind`, in the order of `emitters.BIND`."""
        gate = self._gates.setdefault(kind.name, [False] if self.is_quiet else [])
        links: list[Any] = []
        wider: tuple[Chain, ...] = ()
        if kind.agree:
            chain = self._chain_of(kind)
            links = chain.links
            wider = tuple(chain.wider)
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
            wider,
        )

    def count_of(self, kind: Kind) -> list[int]:
        """The cell in which records of `kind` are counted, where they are."""
        cell = self._noted if self._counts is None else self._counts
        found = cell.setdefault(kind.name, [0])
        if kind.role == "anomaly":
            self._noted[kind.name] = found
        return found

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
                self._checkpoint(chain, sys._getframe(1))
                self._idle.go_on(self.seq)
        if self._throttle is not None and self._throttle.look(records):
            self._tell_throttle(self._throttle)

    def note(self, kind: Kind, *values: Any) -> None:
        """Write one record of a kind of the recorder's own; for what is rare."""
        if self.is_on:
            self.emitter(kind)(*values)
            self._noted.setdefault(kind.name, [0])[0] += 1

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
        if chains := self._close_all(self._chains.values()):
            trailer["chains"] = chains
            trailer["records_of"] = self._records(sys._getframe(1))
        if notes := self._notes():
            trailer["notes"] = notes
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
        # Behind the function that asks, whose own record is whole.
        caller = sys._getframe(1).f_back
        for chain in self._chains.values():
            if len(chain.links) >= LINKS:
                self._checkpoint(chain, caller)

    def _checkpoint(self, chain: Chain, caller: FrameType | None) -> None:
        try:
            chains = self._close_all([chain, *chain.narrower])
            records = self._records(caller)
        except Exception as error:
            self._drop(self._gates.setdefault(CHECKPOINT.name, []), CHECKPOINT.name, error)
            chain.links.clear()
            return
        if self._gates.get(CHECKPOINT.name):
            return
        values = (chain.name, chain.count, chain.digest, chains, records, self._notes())
        stamp = {"seq": self.seq, "step": self.step, "time_ns": self._clock(), "kind": CHECKPOINT.name}
        self._sink.write(line := self._encode(stamp | dict(zip(CHECKPOINT.info, values, strict=True))))
        self.seq += 1
        if self._counts is not None:
            self._counts.setdefault(CHECKPOINT.name, [0])[0] += 1
        if self._checkpoints is not None and isinstance(self._sink, SegmentSink) and self._sink.window.used:
            self._checkpoints.add(line, self._sink.segment_count - 1, self._sink.window.used)

    def _close_all(self, chains: Iterable[Chain]) -> dict[str, list[Any]]:
        """Close those that have links, the widest first; name, count and digest of each that has anything."""
        return {
            chain.name: list(chain.close() if chain.links else (chain.count, chain.digest))
            for chain in chains
            if chain.links or chain.count
        }

    def _records(self, caller: FrameType | None) -> dict[str, int]:
        """Chain -> its records in the lane so far; empty where the links don't tell.

        A call that is open has a record, and no link yet.
        """
        chains = self._chains.values()
        is_known = self.is_countable and not self.dropped and all(chain.is_countable for chain in chains)
        if not is_known or (any(chain.pairs for chain in chains) and _is_inside_call(caller)):
            return {}
        return {chain.name: chain.records_so_far for chain in chains if chain.links or chain.count}

    def _notes(self) -> dict[str, int]:
        """Kind -> records so far, of kinds that a checker must see wherever they are."""
        found = {name: cell[0] for name, cell in self._noted.items() if cell[0]}
        return found | ({IDLE_STEPS.name: self._idle.runs} if self._idle.runs else {})

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

    def declare(self, kinds: Sequence[Kind]) -> None:
        """Say kinds that were not known when the lane began: in the header of its next file, which begins."""
        is_lost = isinstance(self._sink, SegmentSink) and not self._sink.window.mark
        if self._is_closed or not self.is_on or is_lost:
            return
        head: dict[str, Any] = msgspec.json.decode(self._header_body)
        head["kinds"] = head.get("kinds", {}) | {kind.name: kind.declaration() for kind in kinds}
        self._header_body = self._encode(head)
        self._sink.open(self._header_line)


def _is_inside_call(frame: FrameType | None) -> bool:
    """Whether a recorded call is open in this thread: its wrapper is on the stack."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(CALL_FILE):
            return True
        frame = frame.f_back
    return False


def silent(*_fields: Any) -> None:
    """The emitter of a tracer that is off."""
