"""Entries of one group in one flight recorder, as columns: a job of 256 ranks has half a million of them.

    seqs      5  6  7  8        ascending; entries of one coalesced call have one number and are one call here
    shapes    0  0  1  0        numbers in `shape_texts`, which are few
    states, records, callers    likewise

To readers it is a mapping from sequence number to `Call`, made when it is asked for. `all_shapes` gives the
columns themselves, so that calls can be compared without being made.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby

from tracer.importers.dossier import At, Call, State

STATES: tuple[State, ...] = ("scheduled", "started", "completed")
RETIRED = 4
# Between the shapes of a coalesced call.
JOINED = " + "
SHAPE_CHARS_MAX = 2000


@dataclass(slots=True)
class CallTable:
    """What the calls of one dump have in common: each text once."""

    shape_texts: list[str] = field(default_factory=list)
    # thread, stack
    callers: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    _shapes: dict[str, int] = field(default_factory=dict)
    _callers: dict[tuple[str, tuple[str, ...]], int] = field(default_factory=dict)

    def shape(self, text: str) -> int:
        number = self._shapes.get(text)
        if number is None:
            number = self._shapes[text] = len(self.shape_texts)
            self.shape_texts.append(text)
        return number

    def caller(self, thread: str, stack: tuple[str, ...]) -> int:
        number = self._callers.get((thread, stack))
        if number is None:
            number = self._callers[thread, stack] = len(self.callers)
            self.callers.append((thread, stack))
        return number


class RecordedCalls(Mapping[int, Call]):
    """Calls of one group by sequence number. `add` everything, then `close`."""

    __slots__ = ("_callers", "_file", "_records", "_seqs", "_shapes", "_states", "table")

    def __init__(self, file: int, table: CallTable) -> None:
        self.table = table
        self._file = file
        self._seqs = array("q")
        self._shapes = array("I")
        self._states = bytearray()
        self._records = array("I")
        self._callers = array("I")

    def add(self, seq: int, shape: int, state: int, record: int, caller: int) -> None:
        """Take one entry; `state` is an index of `STATES`, with `RETIRED` added."""
        self._seqs.append(seq)
        self._shapes.append(shape)
        self._states.append(state)
        self._records.append(record)
        self._callers.append(caller)

    def close(self) -> None:
        """Bring the numbers into order, and make one call of what has one number."""
        seqs = self._seqs
        count = len(seqs)
        if count and seqs[-1] - seqs[0] == count - 1 and seqs == array("q", range(seqs[0], seqs[0] + count)):
            return
        old_shapes, old_states = self._shapes, self._states
        old_records, old_callers = self._records, self._callers
        self._seqs, self._shapes, self._states = array("q"), array("I"), bytearray()
        self._records, self._callers = array("I"), array("I")
        order = sorted(range(count), key=lambda at: (seqs[at], old_records[at]))
        for seq, group in groupby(order, key=lambda at: seqs[at]):
            parts = list(group)
            shape = old_shapes[parts[0]]
            if len(parts) > 1:
                shape = self.table.shape(_joined([self.table.shape_texts[old_shapes[at]] for at in parts]))
            # As far as the least of its parts.
            state = min(old_states[at] % RETIRED for at in parts)
            is_retired = all(old_states[at] & RETIRED for at in parts)
            self.add(seq, shape, state | RETIRED * is_retired, old_records[parts[0]], old_callers[parts[0]])

    def __getitem__(self, seq: int) -> Call:
        at = bisect_left(self._seqs, seq)
        if at == len(self._seqs) or self._seqs[at] != seq:
            raise KeyError(seq)
        return self._call(at)

    def __iter__(self) -> Iterator[int]:
        return iter(self._seqs)

    def __len__(self) -> int:
        return len(self._seqs)

    def all_shapes(self) -> tuple[Sequence[int], Sequence[int]]:
        """The columns: sequence numbers, and their shapes by number."""
        return self._seqs, self._shapes

    def open_seqs(self, *, is_retired_done: bool) -> list[int]:
        """Numbers of the calls that have not ended, ascending.

        Args:
            is_retired_done: with gloo, whose calls are so when they end; others let go of what timed out.
        """
        ended = {2, 2 + RETIRED, *((RETIRED, 1 + RETIRED) if is_retired_done else ())}
        if all(state in ended for state in set(self._states)):
            return []
        return [seq for seq, state in zip(self._seqs, self._states, strict=True) if state not in ended]

    def _call(self, at: int) -> Call:
        shape = self.table.shape_texts[self._shapes[at]]
        state = self._states[at]
        thread, stack = self.table.callers[self._callers[at]]
        return Call(
            seq=self._seqs[at],
            op=shape.partition(" ")[0],
            shape=shape,
            state=STATES[state % RETIRED],
            is_retired=bool(state & RETIRED),
            is_p2p=False,
            at=At(self._file, self._records[at]),
            thread=thread,
            stack=stack,
        )


def _joined(texts: Sequence[str]) -> str:
    """The parts of a coalesced call as one text, which stays short and still tells two calls apart."""
    text = JOINED.join(texts)
    if len(text) <= SHAPE_CHARS_MAX:
        return text
    return f"{text[:SHAPE_CHARS_MAX]}... #{blake2b(text.encode(errors='replace'), digest_size=8).hexdigest()}"
