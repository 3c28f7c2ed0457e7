"""Rule `agreement`: ranks that must agree wrote the same records in the same order.

Equation, for every scope S, lane and index i of the lockstep sequence:

    for all a, b in S:  record(a, i) = record(b, i)    on (kind, phase, compared fields)

    0  match:4096  backup:64  event_round
    1  match:4096  backup:64  event_round
    2  match:4096  backup:0   ^ what follows the first difference is consequence
                   ^ first difference: index 1

Owns the streamed comparison and the vote. All ranks of a scope are read forward together, a block
at a time, so memory does not grow with the log. A log that was cut abstains where it ends: only two
records that are both there can differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from consensus_checker.history import History, Lane, Scope
from tracer.record import Record

Key = tuple[Any, ...]

# The "record" of a lane that was closed as completed before the others: it can be compared.
END: Key = ("",)
# Records held a rank; with many ranks fewer, so that the sum stays small.
BLOCK = 4096
BLOCK_SUM = 1 << 18
# Kinds of note that say that something is wrong on their own.
ANOMALIES = frozenset({"wrong_page"})


@dataclass(frozen=True, slots=True)
class Comparison:
    """One lane of one scope, compared up to its end or its first difference.

    Attributes:
        rows: indexes at which at least two ranks had a record.
        difference: rank -> what it has at index `index`; None when nothing differs. A rank whose log
            is missing or cut before is not in it.
        seen, compared: rank -> decision records read, and those of them that were in a row.
        absent: ranks of the scope that left logs, but none of this lane.
        anomalies: notes met on the way, in the order of ranks.
    """

    scope: Scope
    lane: str
    rows: int
    index: int
    difference: Mapping[int, Key] | None
    seen: Mapping[int, Counter[str]]
    compared: Mapping[int, Counter[str]]
    absent: tuple[int, ...]
    anomalies: tuple[tuple[Lane, Record], ...]


@dataclass(frozen=True, slots=True)
class Vote:
    """Who is right by count. In a tie `odd` is empty and `majority` holds the largest side.

    Attributes:
        sides: groups of ranks with equal records, largest first.
        is_sure: False when the ranks without a record could have turned the majority into a tie.
    """

    majority: tuple[int, ...]
    odd: tuple[int, ...]
    sides: tuple[tuple[int, ...], ...]
    basis: str
    is_sure: bool


def compare(history: History, scope: Scope, name: str) -> Comparison:
    """Read lane `name` of all ranks of a scope until they differ or end."""
    decisions = frozenset(kind.name for kind in history.kinds.values() if kind.role == "decision")
    lanes = [lane for rank in scope.ranks if (lane := history.lane(rank, name)) is not None]
    readers = [_Reader(lane, scope, decisions) for lane in lanes]
    block = max(64, min(BLOCK, BLOCK_SUM // max(1, len(readers))))
    rows = 0
    index = 0
    difference: dict[int, Key] | None = None
    while True:
        for reader in readers:
            reader.fill(block)
        live = [reader for reader in readers if reader.ahead]
        closed = [reader for reader in readers if not reader.ahead and reader.lane.outcome == "completed"]
        if live and closed and not all(_stops_in_a_meeting(history, reader) for reader in live):
            difference = {reader.lane.rank: END for reader in closed}
            difference.update({reader.lane.rank: reader.ahead[0] for reader in live})
            rows += 1
            break
        if len(live) < 2:
            # A rank alone has nobody to be compared with; its decisions count as seen.
            while live and live[0].ahead:
                live[0].drop(len(live[0].ahead))
                live[0].fill(block)
            break
        count = min(len(reader.ahead) for reader in live)
        equal = _equal_prefix([reader.ahead for reader in live], count)
        for reader in live:
            reader.take(equal)
        rows += equal
        index += equal
        if equal < count:
            difference = {reader.lane.rank: reader.ahead[0] for reader in live}
            for reader in live:
                reader.take(1)
            rows += 1
            break
    has_rows = any(reader.seen or reader.ahead or reader.taken for reader in readers)
    return Comparison(
        scope,
        name,
        rows,
        index,
        difference,
        {reader.lane.rank: reader.seen for reader in readers},
        {reader.lane.rank: reader.compared for reader in readers},
        tuple(rank for rank in scope.ranks if rank in history.ranks and history.lane(rank, name) is None)
        if has_rows
        else (),
        tuple((reader.lane, record) for reader in readers for record in reader.anomalies),
    )


def vote(
    difference: Mapping[int, Key], scope: Scope, places: Mapping[int, Mapping[str, int]], leader: str | None
) -> Vote:
    """Name the odd ranks, or nobody.

    A leader's decision goes before any count, where its own ranks agree: the others had to adopt it.
    Otherwise a side wins if it is larger than the rest; ranks without a record could be on any side,
    so they may weaken a majority to a tie, but never turn it around.

    Args:
        leader: axis of the record's kind along which coordinate 0 decides, or None.
    """
    sides: list[tuple[Key, list[int]]] = []
    for rank in sorted(difference):
        for key, ranks in sides:
            if key == difference[rank]:
                ranks.append(rank)
                break
        else:
            sides.append((difference[rank], [rank]))
    # The sort is stable: of equal sides the one with the smallest rank comes first.
    groups = tuple(tuple(ranks) for _, ranks in sorted(sides, key=lambda side: -len(side[1])))
    if leader is not None:
        first = [rank for rank in difference if places[rank].get(leader, 0) == 0]
        followers = [rank for rank in difference if places[rank].get(leader, 0) != 0]
        led = next((group for group in groups if first and set(first) <= set(group)), None)
        if led is not None and followers:
            odd = tuple(sorted(set(difference) - set(led)))
            return Vote(led, odd, groups, f"leader {leader}0", True)
    most = len(groups[0])
    others = len(difference) - most
    unheard = len(scope.ranks) - len(difference)
    if most > others and most >= others + unheard:
        odd = tuple(rank for group in groups[1:] for rank in group)
        basis = f"majority {most}/{len(scope.ranks)}"
        return Vote(groups[0], tuple(sorted(odd)), groups, basis, most > others + unheard)
    counts = ":".join(str(len(group)) for group in groups)
    return Vote(groups[0], (), groups, f"tie {counts}" + (f", {unheard} unheard" if unheard else ""), False)


class _Reader:
    """One rank's lockstep sequence, read forward a block at a time."""

    def __init__(self, lane: Lane, scope: Scope, decisions: frozenset[str]) -> None:
        self.lane = lane
        self.ahead: list[Key] = []
        self.seen: Counter[str] = Counter()
        self.compared: Counter[str] = Counter()
        self.taken = 0
        self.anomalies: list[Record] = []
        self._decisions = decisions
        self._skipped = decisions - set(scope.fields) | ANOMALIES
        self._keys = self._read(scope.fields)

    def fill(self, count: int) -> None:
        if len(self.ahead) < count:
            self.ahead += islice(self._keys, count - len(self.ahead))

    def take(self, count: int) -> None:
        """The next `count` keys were in a row with those of other ranks."""
        self.compared.update(self._count(count))
        self.drop(count)

    def drop(self, count: int) -> None:
        self.seen.update(self._count(count))
        self.taken += count
        del self.ahead[:count]

    def _count(self, count: int) -> dict[str, int]:
        kinds = Counter([key[0] for key in self.ahead[:count]])
        return {kind: number for kind, number in kinds.items() if kind in self._decisions}

    def _read(self, fields: Mapping[str, tuple[str, ...]]) -> Iterator[Key]:
        # The hot loop of the checker: half a microsecond a record.
        skipped = self._skipped
        fields_of = fields.get
        for record in self.lane.records():
            kind = record["kind"]
            compared = fields_of(kind)
            if compared is not None:
                get = record.get
                yield (kind, get("phase"), *map(get, compared))
            elif kind in skipped:
                if kind in ANOMALIES:
                    self.anomalies.append(record)
                else:
                    self.seen[kind] += 1


def _equal_prefix(blocks: Sequence[list[Key]], count: int) -> int:
    """How many of the first `count` keys are equal in all blocks."""
    first = blocks[0][:count]
    if all(block[:count] == first for block in blocks[1:]):
        return count
    return next(index for index in range(count) if any(block[index] != first[index] for block in blocks[1:]))


def _stops_in_a_meeting(history: History, reader: _Reader) -> bool:
    """Whether a lane ends a few records on, inside a meeting: a shutdown in the middle of a vote.

    Such a lane is no witness against the ranks that had already left: nobody decided anything.
    """
    if len(reader.ahead) >= 16:
        return False
    roles = {kind.name: kind.role for kind in history.kinds.values()}
    return roles[reader.ahead[-1][0]] == "meeting" and reader.ahead[-1][1] == "enter"
