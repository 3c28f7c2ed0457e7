"""What a decision would have been, asked of somebody who can take it again: the way out of a tie.

Two ranks that differ are a tie, and no log of theirs says which of them is right. But each log has what its
decision was taken from. A rank whose logged decision does not follow from its own logged inputs is the odd
one; where both follow, they were given different inputs, and it is the input that differs.

The checker knows no runtime: whoever calls it and has one passes the function in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tracer.log import LaneLog
from tracer.record import Record


@dataclass(frozen=True, slots=True)
class Question:
    """A place where ranks differ.

    Attributes:
        scope, lane, index: as in a finding's `first_divergence`.
        records: rank -> what it wrote there; None where its lane ends before.
    """

    scope: str
    lane: str
    index: int
    records: Mapping[int, Record | None]


# Rank -> whether what it wrote follows from its own inputs. A rank that is not in the answer can't be judged.
Reenact = Callable[[Question], Mapping[int, bool]]
# The logs of one run -> somebody who can take its decisions again.
Reenacting = Callable[[Sequence[LaneLog]], Reenact]


@dataclass(frozen=True, slots=True)
class Ruling:
    """Who contradicts its own inputs, and who follows from them; both in rank order."""

    odd: tuple[int, ...]
    others: tuple[int, ...]

    @property
    def is_clear(self) -> bool:
        """Whether somebody did right where somebody did wrong."""
        return bool(self.odd and self.others)


def ruled(answer: Mapping[int, bool], ranks: Mapping[int, Record | None]) -> Ruling:
    """The answer, for the ranks that were asked about."""
    told = {rank: answer[rank] for rank in sorted(ranks) if rank in answer}
    return Ruling(
        tuple(rank for rank, follows in told.items() if not follows),
        tuple(rank for rank, follows in told.items() if follows),
    )
