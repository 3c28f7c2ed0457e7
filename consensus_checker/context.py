"""A second look at the place of a difference: what each rank did just before, there and after.

Only made once something differs; the first pass keeps no records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from consensus_checker.history import History, Lane, Scope, is_lockstep
from consensus_checker.rules.agreement import Key, common_start
from tracer.chain import LINKS
from tracer.record import Record

# Lockstep records kept before and after the place.
BEFORE = 2
AFTER = 24
# Of a large log, lockstep records before the place that are looked at: so many over all ranks, of each one no
# fewer and no more than this. Where a rank has as many as that to itself, they are kept for the next look.
PAST_RECORDS = 1 << 16
PAST_MIN, PAST_MAX = LINKS // 2, 16 * LINKS
PAST_KEPT_MIN = 2 * LINKS
# What a rank has just done, such as the call that it is in, began no further back.
PAST_NEAR = 64


@dataclass(frozen=True, slots=True)
class Stand:
    """One rank at one index of a lockstep sequence.

    Attributes:
        record: what it wrote there; None when its lane ends before.
        before, after: lockstep records around it, in order.
        open_call: the innermost record with phase `call` whose `return` has not come.
        last_decision: the newest decision record before the place.
    """

    lane: Lane
    record: Record | None
    before: tuple[Record, ...]
    after: tuple[Record, ...]
    open_call: Record | None
    last_decision: Record | None

    @property
    def rank(self) -> int:
        return self.lane.rank


def key_of(record: Record, scope: Scope) -> Key:
    """What of a record is compared."""
    return (record["kind"], record.get("phase"), *map(record.get, scope.fields[record["kind"]]))


def compared_fields(record: Record, scope: Scope) -> dict[str, Any]:
    """The compared fields that a record has; a kind written twice a call has only some each time."""
    return {name: record[name] for name in scope.fields[record["kind"]] if name in record}


def past(history: History, scope: Scope, lane_name: str, index: int, *, is_near: bool = False) -> History:
    """The same history, in which large lanes of the scope are read from some way before `index` on.

    Args:
        is_near: only what was just before will be looked at.
    """
    lanes = [lane for rank in scope.ranks if (lane := history.lane(rank, lane_name)) is not None]
    share = PAST_RECORDS // max(1, len(lanes))
    before = max(PAST_MIN, min(PAST_MAX, share // 4))
    # With many ranks a part of one is more than may be kept of it.
    kept_max = share if share >= PAST_KEPT_MIN else 0
    if is_near and not kept_max:
        before = PAST_NEAR
    parts = [lane.part(scope.fields, index, before, kept_max=kept_max) for lane in lanes]
    return history.with_lanes(parts)


def look(history: History, scope: Scope, lane_name: str, index: int) -> dict[int, Stand]:
    """Every rank of the scope that has the lane, at `index`; not those that can't be aligned."""
    place = scope.name, lane_name, index, frozenset(scope.fields)
    if place in history.looked:
        known: dict[int, Stand] = history.looked[place]
        return known
    decisions = {kind.name for kind in history.kinds.values() if kind.role == "decision"}
    near = past(history, scope, lane_name, index, is_near=True)
    found = {
        rank: _stand(lane, scope, index - begin, decisions)
        for rank in scope.ranks
        if (lane := near.lane(rank, lane_name)) is not None
        and (begin := lane.begin(scope.fields)) is not None
    }
    history.looked[place] = found
    return found


def agreed_rows(
    history: History, scope: Scope, lane_name: str, index: int, kinds: frozenset[str], ranks: Sequence[int]
) -> Iterator[list[Record]]:
    """The rows before `index` whose record is of one of `kinds`: one record a rank."""
    history = past(history, scope, lane_name, index)
    lanes = [lane for rank in ranks if (lane := history.lane(rank, lane_name)) is not None]
    start = common_start(lanes, scope)
    streams = [
        _numbered(lane, scope, (start - begin, index - begin), kinds)
        for lane in lanes
        if (begin := lane.begin(scope.fields)) is not None
    ]
    for row in zip(*streams, strict=False):
        yield list(row)


def _numbered(lane: Lane, scope: Scope, span: tuple[int, int], kinds: frozenset[str]) -> Iterator[Record]:
    """A lane's lockstep records of some kinds inside `span`, counted from its first record.

    Before the first difference the n-th such record of one rank is the n-th of every other.
    """
    start, index = span
    position = 0
    fields = scope.fields
    for record in lane.records():
        kind = record["kind"]
        if kind not in fields:
            continue
        if position == index:
            return
        position += 1
        if position > start and kind in kinds:
            yield record


def _stand(lane: Lane, scope: Scope, index: int, decisions: set[str]) -> Stand:
    before: deque[Record] = deque(maxlen=BEFORE)
    calls: list[Record] = []
    last_decision: Record | None = None
    position = 0
    records = lane.records()
    found: Record | None = None
    fields = scope.fields
    for record in records:
        kind = record["kind"]
        if kind in fields:
            if position == index:
                found = record
                break
            position += 1
            before.append(record)
            if kind in decisions:
                last_decision = record
        if "phase" in record:
            follow_calls(calls, record)
    after: list[Record] = []
    for record in records:
        if is_lockstep(record, scope):
            after.append(record)
            if len(after) == AFTER:
                break
    return Stand(lane, found, tuple(before), tuple(after), calls[-1] if calls else None, last_decision)


def follow_calls(calls: list[Record], record: Record) -> None:
    """Keep the stack of calls that have not returned."""
    phase = record.get("phase")
    if phase == "call":
        calls.append(record)
    elif phase == "return":
        # A call that was left by an exception wrote no return: its caller's return closes it too.
        for depth in range(len(calls) - 1, -1, -1):
            if calls[depth]["kind"] == record["kind"]:
                del calls[depth:]
                break
