"""One queue of one rank as it was: its transfers, what state each was in, and what is shown at a step.

    begins   |  1  2  2  5  7  9          in order, so that a step is found by halving
    ends     |  4  6  3  8  .  .
    the most |  4  6  6  8  .  .          so far: where it is past, all up to here had ended

Owns the index over steps; knows nothing of logs.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import Any

import msgspec

from tracer.transfer_lines import NEVER

QUEUES = ("write", "load", "prefetch", "backup")
# What a rank counts by itself at an event round, and what the group makes of it.
COUNTS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "write": (("writes_done", "writes_agreed"),),
    "load": (("loads_done", "loads_agreed"),),
    "prefetch": (("hits_ready", "hits_agreed"), ("prefetch_acks_ready", "prefetch_acks_agreed")),
    "backup": (("storage_acks_ready", "storage_acks_agreed"),),
}
# Where a transfer is, in words for people and programs alike.
BEGUN, IN_FLIGHT, DONE, ACKED = "begun", "in flight", "done", "acked"
ASKING, ANSWERED, READING, GONE = "asking", "answered", "reading", "ended"
_BEGIN_STEP, _DONE_STEP, _END_STEP = map(attrgetter, ("begin_step", "done_step", "end_step"))


# Made by the million: a struct takes a third of a dataclass's time, and refers to nothing that refers back.
class Transfer(msgspec.Struct, eq=False, gc=False):
    """One transfer on one rank; steps are NEVER where the log has no such moment.

    Attributes:
        op: its number in this queue; None where the log counts none.
        pages: of KV; None where not told.
        middle: of a prefetch, the steps at which it came further, with the word for it.
        done_step: this rank has seen its bytes moved.
        end_step: it was applied, or given up; `end` says which.
        end_ns: of that record, by this rank's clock.
        told: what was found or written, in the log's own words.
    """

    op: int | None
    nodes: tuple[int, ...]
    pages: int | None
    rid: str
    begin_step: int
    begin_ns: int
    begin_seq: int
    middle: list[tuple[int, str]] | None = None
    done_step: int = NEVER
    end_step: int = NEVER
    end_ns: int = 0
    end: str = ""
    told: dict[str, int] | None = None

    @property
    def has_ended(self) -> bool:
        return self.end_step != NEVER

    @property
    def steps(self) -> int | None:
        """From its beginning to its end."""
        return self.end_step - self.begin_step if self.has_ended else None

    def moves(self) -> Iterator[tuple[int, str]]:
        """What happened to it when, in order."""
        yield self.begin_step, BEGUN
        yield from self.middle or ()
        if self.done_step != NEVER:
            yield self.done_step, DONE
        if self.has_ended:
            yield self.end_step, self.end

    def to_json(self, step: int) -> dict[str, Any]:
        """As it is at the end of a step. `bytes` is null: no log says how large a page is."""
        return {
            "op": self.op,
            "nodes": list(self.nodes),
            "pages": self.pages,
            "bytes": None,
            "rid": self.rid or None,
            "state": self.state(step),
            "begin_step": self.begin_step,
            "done_step": self.done_step if self.done_step != NEVER else None,
            "end_step": self.end_step if self.has_ended else None,
            "age_steps": step - self.begin_step,
            "seconds": round((self.end_ns - self.begin_ns) / 1e9, 6) if self.has_ended else None,
            **(self.told or {}),
        }

    def state(self, step: int) -> str:
        """Where it is at the end of a step, which is not before its beginning."""
        if self.end_step <= step:
            return self.end
        if self.done_step <= step:
            return DONE
        word = IN_FLIGHT if self.middle is None else ASKING
        for since, then in self.middle or ():
            if since <= step:
                word = then
        return word


class Round(msgspec.Struct, frozen=True, gc=False):
    """One event round on one rank: what it counted by itself, and what was applied; None where not told."""

    step: int
    number: int | None
    saw: tuple[int | None, ...]
    applied: tuple[int | None, ...]


@dataclass(slots=True)
class RankQueue:
    """One queue of one rank.

    Attributes:
        place: coordinates, such as `{"dp": 0, "pp": 1, "cp": 0, "tp": 0}`.
        transfers: in the order in which they began.
        rounds: in order of steps.
        unknown: acks of transfers whose beginning is not in the log.
        last_step: the last step that this rank's scheduler has recorded.
        limits: why something is not known, each as a sentence.
    """

    rank: int
    place: Mapping[str, int]
    queue: str
    transfers: list[Transfer] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    unknown: int = 0
    last_step: int = -1
    limits: tuple[str, ...] = ()
    _begins: array[int] = field(default_factory=lambda: array("q"))
    _ends_max: array[int] = field(default_factory=lambda: array("q"))
    _round_steps: array[int] = field(default_factory=lambda: array("q"))

    def seal(self) -> None:
        """Make the index; nothing is added afterwards."""
        for each in self.transfers:
            if each.middle:
                # Lanes are read one after the other; an answer comes before what is made of it.
                each.middle.sort(key=lambda entry: (entry[0], entry[1] != ANSWERED))
        self._begins = array("q", map(_BEGIN_STEP, self.transfers))
        self._ends_max = array("q", accumulate(map(_END_STEP, self.transfers), max))
        self._round_steps = array("q", map(attrgetter("step"), self.rounds))

    def at(self, step: int) -> list[Transfer]:
        """What is in the queue at the end of a step, oldest first."""
        until = bisect_right(self._begins, step)
        # Up to here all had ended: an end that comes late keeps those behind it, which are looked at.
        since = bisect_right(self._ends_max, step, 0, until)
        return [each for each in self.transfers[since:until] if each.end_step > step]

    def begun_in(self, step: int) -> list[Transfer]:
        """What began in that very step."""
        since = bisect_left(self._begins, step)
        return self.transfers[since : bisect_right(self._begins, step, since)]

    def round_at(self, step: int) -> Round | None:
        """The event round of that very step."""
        at = bisect_right(self._round_steps, step) - 1
        return self.rounds[at] if at >= 0 and self.rounds[at].step == step else None

    def moving_steps(self) -> set[int]:
        """Steps in which something happened."""
        steps = set(self._begins)
        steps.update(map(_DONE_STEP, self.transfers), map(_END_STEP, self.transfers))
        steps |= {since for each in self.transfers if each.middle for since, _word in each.middle}
        return steps - {NEVER}

    def moves_in(self, step: int) -> list[tuple[str, Transfer]]:
        """What happened in that very step, and to which transfer, oldest first."""
        touched = [*self.at(step - 1), *self.begun_in(step)]
        return [(word, each) for each in touched for since, word in each.moves() if since == step]
