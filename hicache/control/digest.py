"""A running digest of every compared decision of one lane, so that a fork shows in the next event round.

It is computed from the same declarations that the checker reads, whether or not anything is recorded.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from hicache.probes import EVENT_ROUND, INSERT_CALL, INSERT_RETURN, KINDS, REPLICA, Probes
from tracer.record import Kind

Emit = Callable[..., None]
# Two halves: the value and its negative must fit a vector, and a short checksum is too easy to meet twice.
HALF_BITS = 21
# Kinds that are written in phases: emitter -> its fields.
PHASES = {"insert": {"insert_call": INSERT_CALL, "insert_return": INSERT_RETURN}}
HALF_MASK = (1 << HALF_BITS) - 1


class RunningDigest:
    """Folds the compared fields of each decision, in order. Equal histories give equal values."""

    __slots__ = ("_first", "_second")

    def __init__(self) -> None:
        self._first = 0
        self._second = 1

    @property
    def value(self) -> int:
        """0..2**42-1."""
        return (self._first & HALF_MASK) << HALF_BITS | self._second & HALF_MASK

    def fold(self, kind: str, values: tuple[object, ...]) -> None:
        text = repr((kind, values)).encode()
        self._first = zlib.crc32(text, self._first)
        self._second = zlib.adler32(text, zlib.crc32(text, self._second))

    def watch(self, probes: Probes) -> None:
        """Fold what `probes` is given from now on, kind by kind, before it is recorded."""
        for kind in KINDS:
            if kind.agree == REPLICA and kind is not EVENT_ROUND:
                for emitter, fields in PHASES.get(kind.name, {kind.name: kind.fields}).items():
                    setattr(probes, emitter, self._folding(kind, fields, getattr(probes, emitter)))

    def _folding(self, kind: Kind, fields: Sequence[str], emit: Emit) -> Emit:
        # What a leader decides reaches the others by the same message that carries this digest.
        watched = set(kind.compared) - set(kind.led)
        kept = [at for at, name in enumerate(fields) if name in watched]

        def fold_and_emit(*values: object) -> None:
            self.fold(kind.name, tuple(values[at] for at in kept))
            emit(*values)

        return fold_and_emit
