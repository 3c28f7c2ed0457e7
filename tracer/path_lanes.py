"""The lanes beside a scheduler: what each was at, what it had to be given first, and chains through them.

    submit - prefetch lane: ask, agree - query - hit - io lane: read - sync lane: agree - progress - ack

A lane is serial: what it is given while it is still at something else waits for that.
"""

from __future__ import annotations

from typing import Any

from tracer.path_moments import (
    LAG,
    LANES,
    LINKS_MAX,
    NEVER,
    PEERS,
    SCHEDULER,
    TAKEN,
    TIERS,
    UNKNOWN,
    Line,
    Moment,
    Piece,
    copy_tier,
    number,
)
from tracer.record import MAIN_LANE


class Lanes:
    """What the records so far have told.

    Attributes:
        has_submits: somebody was to be read for.
        spans: tier -> times in which something of it was under way.
    """

    def __init__(self) -> None:
        self.has_submits = False
        self.spans: dict[str, list[tuple[int, int]]] = {tier: [] for tier in TIERS}
        # What each lane says that it is at.
        self._states: dict[str, str] = {}
        self._ops: dict[int, tuple[Any, Any]] = {}
        self._by_key: dict[tuple[str, tuple[Any, Any]], Moment] = {}
        self._by_op: dict[tuple[str, int], Moment] = {}

    def see(self, moment: Moment) -> None:
        line, lane, before = moment.line, moment.lane, moment.before
        state = self._states.get(lane, "idle")
        is_at_work = state in ("backend", "collective")
        spent = LANES[lane] if state == "backend" else PEERS
        if line.kind == "lane_state":
            self._states[lane] = line.state if type(line.state) is str else "idle"
            moment.is_start = not is_at_work and self._states[lane] in ("backend", "collective")
            if moment.is_start:
                moment.after = self._cause(lane, line)
            elif is_at_work:
                moment.tier = spent
        elif line.kind == "meeting":
            moment.tier = PEERS if line.phase == "leave" else spent
        elif is_at_work:
            moment.tier = spent
        else:
            # A lane that does not say what it is at: this began when it could.
            moment.tier, moment.after = LANES[lane], self._cause(lane, line)
        if before is not None and moment.tier in self.spans:
            begin = max(before.at, moment.after.at) if moment.after is not None else before.at
            self.spans[moment.tier].append((begin, moment.at))
        if line.kind == "storage_write":
            self.remember(moment)
        elif line.kind in ("query", "read", "progress"):
            self.note(moment)

    def _cause(self, lane: str, line: Line) -> Moment | None:
        """What a lane had to be given before it could begin."""
        if lane == "prefetch":
            return self.of_prefetch("prefetch_submit", line)
        if lane == "io":
            return self.of_prefetch("prefetch_hit", line)
        if lane == "sync":
            return self.of_prefetch("read", line) or self.of_prefetch("prefetch_hit", line)
        return self.recall("storage_backup", line)

    def submitted(self, moment: Moment) -> None:
        """A prefetch has been asked for; from here on its number stands for it."""
        line = moment.line
        self.has_submits = True
        if (op := number(line.op)) is not None:
            self._ops[op] = (line.rid, number(line.attempt))
        self.note(moment)

    def note(self, moment: Moment) -> None:
        """The latest of its kind of this prefetch."""
        self._by_key[moment.line.kind, self.key(moment.line)] = moment

    def of_prefetch(self, kind: str, line: Line) -> Moment | None:
        return self._by_key.get((kind, self.key(line)))

    def remember(self, moment: Moment) -> None:
        """The latest of its kind with this number."""
        if (op := number(moment.line.op)) is not None:
            self._by_op[moment.line.kind, op] = moment

    def recall(self, what: str, line: Line) -> Moment | None:
        op = number(line.op)
        return self._by_op.get((what, op)) if op is not None else None

    def key(self, line: Line) -> tuple[Any, Any]:
        """What tells a prefetch in all lanes: its number where there is one, else its request and attempt."""
        op = number(line.op)
        if op is not None and op in self._ops:
            return self._ops[op]
        return (line.rid, number(line.attempt)) if type(line.rid) is str else ("", op)


def followed(end: Moment, since: int) -> list[Piece]:
    """The chain that led to a moment at which something was taken over, newest first, back to a time."""
    pieces: list[Piece] = []
    current = end
    for _ in range(LINKS_MAX):
        earlier, tier = _link(current)
        if earlier is None or current.at <= since:
            break
        pieces.append(Piece(earlier.at, current.at, tier))
        current = earlier
    else:
        return pieces
    # In front of it the scheduler had not asked for it yet; what it did until then is for others to say.
    pieces.append(Piece(-NEVER, current.at, LAG if current.lane == MAIN_LANE else UNKNOWN))
    return pieces


def _link(moment: Moment) -> tuple[Moment | None, str]:
    """Where one goes on from a moment of a chain, and what lies between."""
    line, after, before = moment.line, moment.after, moment.before
    if line.kind in TAKEN:
        return after, LAG
    if line.kind == "transfer_done":
        return after, copy_tier(line.queue)
    if moment.lane == MAIN_LANE:
        return None, UNKNOWN
    if after is not None and (before is None or after.at >= before.at):
        return after, SCHEDULER if moment.is_start else moment.tier
    # The lane was still at something else.
    return before, SCHEDULER if moment.is_start else moment.tier
