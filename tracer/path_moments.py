"""What a critical path is made of: records of one rank as moments, and stretches of its time as pieces.

A moment knows what had to be before it could: the one before it in its lane, and in another lane what it
waited for. A piece is time on the rank's own clock, with the word for what it went into.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec

from tracer.log import Layout
from tracer.plausible import Count, Integer

# What has a speed.
D2H, H2D, FORWARD = "d2h", "h2d", "forward"
STORAGE_READ, STORAGE_WRITE = "storage_read", "storage_write"
TIERS = (D2H, H2D, STORAGE_READ, STORAGE_WRITE, FORWARD)
# What has none: forwards of a batch that one is not in; other ranks; everything that a scheduler does between
# forwards, and until it looks; a prefetch's deadline; nobody to serve; and what is not in the log.
QUEUE, PEERS, SCHEDULER, DEADLINE = "queue", "peers", "scheduler", "deadline"
NO_REQUEST, UNKNOWN = "no_request", "unknown"
WORDS = (*TIERS, QUEUE, PEERS, SCHEDULER, DEADLINE, NO_REQUEST, UNKNOWN)
IDLE, LAG = "idle", "lag"

LANES = {"prefetch": STORAGE_READ, "io": STORAGE_READ, "sync": PEERS, "backup": STORAGE_WRITE}
COPIES = {"write": D2H, "load": H2D}
# Records of a round that takes over what a lane, or a copy, has done.
TAKEN = ("prefetch_hit", "prefetch_ack", "prefetch_insert", "transfer_ack", "storage_ack")
KEPT = frozenset(
    [
        *("request", "prefetch_submit", "prefetch_poll", "admit", "finish"),
        *("plan", "batch", "forward", "event_round", "meeting", "idle"),
        *("transfer_enqueue", "transfer_done", "storage_backup"),
        *("lane_state", "query", "read", "progress", "storage_write"),
        *TAKEN,
    ]
)
# Links of a chain that are followed back, at most: a lane that never rests is a chain as long as the run.
LINKS_MAX = 10_000
NEVER = 1 << 62


class Line(msgspec.Struct):
    """The fields that are looked at; whatever type they have, for only a whole line decides what counts."""

    seq: Count
    kind: str
    step: Integer
    time_ns: Integer
    phase: str = ""
    queue: Any = None
    op: Any = None
    rid: Any = None
    attempt: Any = None
    rids: Any = None
    verdict: Any = None
    outcome: Any = None
    tokens: Any = None
    state: Any = None


_LINE = msgspec.json.Decoder(Line)
LINES = Layout(_LINE.decode, _LINE.decode_lines, attrgetter("seq"), attrgetter("kind"), lambda records: True)


# Moments name each other, so that the text of one would be that of all before it, many times over.
@dataclass(slots=True, eq=False, repr=False)
class Moment:
    """One record, and what had to be before it could.

    Attributes:
        index: among the rank's moments of all lanes, by its clock.
        at: nanoseconds.
        tier: what the time since `before` went into.
        before: the moment before it in its lane.
        after: in another lane, or further back in its own, what it waited for; None where nothing is known.
        is_start: a lane begins something then, having waited for `after` and for itself.
        is_copy: it saw a copy done for which the scheduler stood still, since `after`.
        pause: the pause of the scheduler that it lies in.
    """

    index: int
    at: int
    lane: str
    line: Line
    tier: str = SCHEDULER
    before: Moment | None = None
    after: Moment | None = None
    is_start: bool = False
    is_copy: bool = False
    pause: Pause | None = None


@dataclass(slots=True, eq=False, repr=False)
class Pause:
    """Steps of a scheduler without a batch, although there was somebody to serve.

    Attributes:
        begin: the last moment before it.
        end: what ended it, taken over in its last step; None where that is not known.
        tier: of all of it, where there is no `end`.
    """

    begin: Moment
    end: Moment | None = None
    tier: str = UNKNOWN


@dataclass(frozen=True, slots=True)
class Piece:
    """Time on one rank's clock and what it went into; `rids` of a forward, where they are told."""

    begin: int
    end: int
    tier: str
    rids: tuple[str, ...] = ()


def copy_tier(queue: Any) -> str:
    """Which tier a copy of this queue goes over."""
    return COPIES.get(queue, UNKNOWN) if type(queue) is str else UNKNOWN


def number(value: Any) -> int | None:
    return value if type(value) is int else None


def sums(pieces: Iterable[Piece]) -> dict[str, int]:
    told: Counter[str] = Counter()
    for piece in pieces:
        told[piece.tier] += piece.end - piece.begin
    return {word: told[word] for word in WORDS if told[word]}


def between(pieces: Sequence[Piece], begins: Sequence[int], begin: int, end: int) -> Iterator[Piece]:
    at = max(0, bisect_right(begins, begin) - 1)
    while at < len(pieces) and pieces[at].begin < end:
        piece = pieces[at]
        low, high = max(begin, piece.begin), min(end, piece.end)
        if low < high:
            yield Piece(low, high, piece.tier, piece.rids)
        at += 1


def clipped(newest_first: Sequence[Piece], begin: int, end: int) -> list[Piece]:
    """A chain between two times, oldest first; what it does not reach back to is unknown."""
    told: list[Piece] = []
    reached = end
    for piece in newest_first:
        low, high = max(begin, piece.begin), min(reached, piece.end)
        if low < high:
            told.append(Piece(low, high, piece.tier))
        reached = min(reached, max(begin, piece.begin))
    if begin < reached:
        told.append(Piece(begin, reached, UNKNOWN))
    return told[::-1]


def union(spans: Iterable[tuple[int, int]]) -> int:
    total, reached = 0, -NEVER
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total
