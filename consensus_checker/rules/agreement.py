"""Rule `agreement`: ranks that must agree wrote the same records in the same order.

Equation, for every scope S, lane and index i of the lockstep sequence:

    for all a, b in S:  record(a, i) = record(b, i)    on (kind, phase, compared fields)

    0  match:4096  backup:64  event_round
    1  match:4096  backup:64  event_round
    2  match:4096  backup:0   ^ what follows the first difference is consequence
                   ^ first difference: index 1

Owns the streamed comparison and the vote. All ranks of a scope are read forward together, a block
at a time, so memory does not grow with the log. A log that was cut abstains where it ends: only two
records that are both there can differ. Values of different types are different: 1 is not true.

Where a ring has dropped the oldest records, its header says how many of each kind, so that indexes are still
those of the whole sequence, and what is compared begins where the last one begins:

    0      .  .  4  5  6  7  8  9
    1      .  .  .  .  6  7  8  9      compared from index 6 on
"""

from __future__ import annotations

import marshal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from consensus_checker.digests import furthest
from consensus_checker.history import History, Lane, Scope
from tracer.checkpoints import Place

Key = tuple[Any, ...]

# The "record" of a lane that was closed as completed before the others: it can be compared.
END: Key = ("",)
# Records held a rank; with many ranks fewer, so that the sum stays small.
BLOCK = 4096
BLOCK_SUM = 1 << 18
# Behind a checkpoint that is the last one up to which all are equal.
BLOCK_NEAR = 512
# The "kind" of records that checkpoints say are equal: they are not told apart.
JUMPED = ""
# A tail as long as this is more than the opening of a vote.
OPENING_MAX = 16


@dataclass(frozen=True, slots=True)
class Comparison:
    """One lane of one scope, compared up to its end or its first difference.

    Attributes:
        start: index at which it begins; above 0 where records were dropped.
        unaligned: ranks whose oldest records are gone uncounted, so that nothing of theirs is compared.
        rows: indexes at which at least two ranks had a record.
        difference: rank -> what it has at index `index`; None when nothing differs. A rank whose log
            is missing or cut before is not in it.
        seen, compared: rank -> decision records read, and those of them that were in a row.
        absent: ranks of the scope that left logs, but none of this lane.
        partnered: ranks of which at least one record was compared with another rank's.
    """

    scope: Scope
    lane: str
    rows: int
    index: int
    difference: Mapping[int, Key] | None
    seen: Mapping[int, Counter[str]]
    compared: Mapping[int, Counter[str]]
    absent: tuple[int, ...]
    partnered: frozenset[int]
    start: int = 0
    unaligned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Vote:
    """Who is right by count. In a tie `odd` is empty and `majority` holds the largest side.

    Attributes:
        sides: groups of ranks with equal records, largest first.
        is_sure: False when the ranks without a record could have said otherwise.
        followers: later stages that have what the accused stage before them has: they adopted it.
        unclear: later stages that differ from the leader in their own way.
        deed: what each odd rank did, in words, where that is the evidence and not a count.
    """

    majority: tuple[int, ...]
    odd: tuple[int, ...]
    sides: tuple[tuple[int, ...], ...]
    basis: str
    is_sure: bool
    followers: tuple[int, ...] = ()
    unclear: tuple[int, ...] = ()
    deed: str = ""

    @property
    def is_led(self) -> bool:
        return self.basis.startswith("leader")

    @property
    def is_tied(self) -> bool:
        """Whether the count alone names nobody; what else did may be in `odd`."""
        return self.basis.startswith("tie")


def compare(history: History, scope: Scope, name: str) -> Comparison:
    """Read lane `name` of all ranks of a scope until they differ or end."""
    decisions = frozenset(kind.name for kind in history.kinds.values() if kind.role == "decision")
    meetings = frozenset(kind.name for kind in history.kinds.values() if kind.role == "meeting")
    lanes = [lane for rank in scope.ranks if (lane := history.lane(rank, name)) is not None]
    begins = {lane.rank: lane.begin(scope.fields) for lane in lanes}
    start = common_start(lanes, scope)
    readers = [_Reader(lane, scope, decisions) for lane in lanes if begins[lane.rank] is not None]
    block = max(64, min(BLOCK, BLOCK_SUM // max(1, len(readers))))
    index = _jump(readers, scope, start)
    for reader in readers:
        missing = start - (begins[reader.lane.rank] or 0)
        if index > start:
            reader.pass_over(missing)
        else:
            reader.skip(missing, block)
    rows = index - start
    if index > start:
        # What differs is not far.
        block = min(block, BLOCK_NEAR)
    live_count = len(readers)
    difference: dict[int, Key] | None = None
    while True:
        for reader in readers:
            reader.fill(block)
        live = [reader for reader in readers if reader.ahead]
        closed = [reader for reader in readers if not reader.ahead and reader.lane.outcome == "completed"]
        if live and closed and not all(_only_opens_a_vote(reader, meetings) for reader in live):
            difference = {reader.lane.rank: END for reader in closed}
            difference.update({reader.lane.rank: reader.ahead[0] for reader in live})
            rows += 1
            break
        if len(live) < 2:
            # A rank alone has nobody to be compared with; its decisions count as seen.
            for reader in live:
                reader.run_out()
            while live and live[0].ahead:
                live[0].drop(len(live[0].ahead))
                live[0].fill(block)
            break
        if len(live) < live_count:
            # Without those that have ended the others may be equal for a long way.
            live_count = len(live)
            if (jumped := _jump(live, scope, index)) > index:
                rows, index = rows + jumped - index, jumped
                continue
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
        frozenset(reader.lane.rank for reader in readers if reader.rows),
        start,
        tuple(rank for rank, begin in begins.items() if begin is None),
    )


def common_start(lanes: Sequence[Lane], scope: Scope) -> int:
    """The index from which on no lane that can be aligned lacks a record at its front."""
    return max((begin for lane in lanes if (begin := lane.begin(scope.fields)) is not None), default=0)


def vote(
    difference: Mapping[int, Key], scope: Scope, places: Mapping[int, Mapping[str, int]], leader: str | None
) -> Vote:
    """Name the odd ranks, or nobody.

    A leader's decision goes before any count: the others had to adopt it. Where its own ranks differ they are
    counted among themselves, and whoever adopted from the odd one is its follower. Where all others stand
    against it, either it or the first that took it over did wrong, and nobody is named.
    Otherwise a side wins if it is larger than the rest; ranks without a record could be on any side,
    so they may weaken a majority to a tie, but never turn it around.

    Args:
        leader: axis along which coordinate 0 decides what differs here, or None.
    """
    groups = sides_of(difference)
    if leader is not None and (led := _led(difference, scope, places, leader, groups)) is not None:
        return led
    most = len(groups[0])
    others = len(difference) - most
    unheard = len(scope.ranks) - len(difference)
    if most > others and most >= others + unheard:
        odd = tuple(rank for group in groups[1:] for rank in group)
        basis = f"majority {most}/{len(scope.ranks)}"
        return Vote(groups[0], tuple(sorted(odd)), groups, basis, most > others + unheard)
    counts = ":".join(str(len(group)) for group in groups)
    return Vote(groups[0], (), groups, f"tie {counts}" + (f", {unheard} unheard" if unheard else ""), False)


def exact(key: Key) -> str:
    """A key as text that tells types apart, as `==` does not."""
    return repr(key)


def sides_of(difference: Mapping[int, Key]) -> tuple[tuple[int, ...], ...]:
    """Ranks that have the same, the most first."""
    sides: dict[str, list[int]] = {}
    for rank in sorted(difference):
        sides.setdefault(exact(difference[rank]), []).append(rank)
    # The sort is stable: of equal sides the one with the smallest rank comes first.
    return tuple(tuple(ranks) for ranks in sorted(sides.values(), key=lambda ranks: -len(ranks)))


def _led(
    difference: Mapping[int, Key],
    scope: Scope,
    places: Mapping[int, Mapping[str, int]],
    axis: str,
    groups: tuple[tuple[int, ...], ...],
) -> Vote | None:
    """The vote where coordinate 0 decides: the first stage that differs from it is the odd one.

        pp0   1  1      decided
        pp1   1  2      rank 3 adopted something else: accused
        pp2   1  2      rank 5 adopted what it was handed: a follower

    None where nobody of the leader's stage is here, or nobody else. A stage that was not heard could
    be the one at which it went wrong, so nobody behind it is accused.
    """
    stage = {rank: places.get(rank, {}).get(axis, 0) for rank in scope.ranks}
    leaders = {rank for rank in difference if stage[rank] == 0}
    if not leaders or leaders == set(difference):
        return None
    side = next((group for group in groups if leaders <= set(group)), None)
    if side is None:
        return _divided(difference, scope, places, axis, stage)
    astray = sorted(set(difference) - set(side))
    first = min(stage[rank] for rank in astray)
    odd = tuple(rank for rank in astray if stage[rank] == first)
    followers, unclear = _behind(difference, scope, places, axis, odd, side)
    unheard = [rank for rank in scope.ranks if rank not in difference]
    if any(0 < stage[rank] < first for rank in unheard):
        basis = f"leader {axis}0, but a stage between was not heard"
        return Vote(side, (), groups, basis, False)
    if set(side) == leaders and not unclear and len(groups) == 2 and len(astray) > len(side):
        # One value in the leader's hands, another in all others': the hop between them is where it changed.
        hop = (tuple(sorted(leaders)), odd)
        return Vote(side, (), hop, f"tie of leader {axis}0 and all that adopted from it", False, followers)
    is_sure = not any(stage[rank] <= first for rank in unheard)
    return Vote(side, odd, groups, f"leader {axis}0", is_sure, followers, unclear)


def _divided(
    difference: Mapping[int, Key],
    scope: Scope,
    places: Mapping[int, Mapping[str, int]],
    axis: str,
    stage: Mapping[int, int],
) -> Vote | None:
    """The vote among the leader's own ranks, which differ: what the others have they were handed.

    None where they are tied and a majority of all ranks is not: whoever follows a rank and has another value
    speaks against it.

        pp0   1  1  2      rank 2 decided something else: accused
        pp1   1  1  2      rank 5 adopted it: a follower
    """
    own = {rank: key for rank, key in difference.items() if stage[rank] == 0}
    groups = sides_of(own)
    side = groups[0]
    others = len(own) - len(side)
    unheard = sum(1 for rank in scope.ranks if stage[rank] == 0 and rank not in difference)
    if len(side) > others and len(side) >= others + unheard:
        odd = tuple(sorted(rank for group in groups[1:] for rank in group))
        sided = tuple(rank for rank in difference if exact(difference[rank]) == exact(own[side[0]]))
        followers, unclear = _behind(difference, scope, places, axis, odd, sided)
        basis = f"majority {len(side)}/{len(own) + unheard} of leader {axis}0"
        return Vote(side, odd, groups, basis, len(side) > others + unheard, followers, unclear)
    most = len(sides_of(difference)[0])
    if 2 * most > len(scope.ranks):
        return None
    counts = ":".join(str(len(group)) for group in groups)
    followers = tuple(sorted(set(difference) - set(own)))
    return Vote(side, (), groups, f"tie {counts} in leader {axis}0", False, followers)


def _behind(
    difference: Mapping[int, Key],
    scope: Scope,
    places: Mapping[int, Mapping[str, int]],
    axis: str,
    odd: Sequence[int],
    side: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the ranks off the right side: those that have what the stage before them has, and the rest."""
    astray = sorted(set(difference) - set(side) - set(odd))
    followers: list[int] = []
    for rank in sorted(astray, key=lambda rank: places.get(rank, {}).get(axis, 0)):
        handed = [
            difference[one]
            for one in scope.ranks
            if _is_before(places, axis, one, rank) and one in difference and one not in side
        ]
        if any(exact(key) == exact(difference[rank]) for key in handed):
            followers.append(rank)
    return tuple(sorted(followers)), tuple(rank for rank in astray if rank not in followers)


def _is_before(places: Mapping[int, Mapping[str, int]], axis: str, one: int, rank: int) -> bool:
    """Whether `one` stands where `rank` does, one stage earlier."""
    return dict(places[one]) == {**places[rank], axis: places[rank].get(axis, 0) - 1}


def _jump(readers: Sequence[_Reader], scope: Scope, index: int) -> int:
    """Go on behind the last checkpoint up to which all are equal, if one is further on; where that is."""
    places = furthest([reader.lane for reader in readers], scope, index) if len(readers) > 1 else None
    if places is None:
        return index
    jumped = places[0].records(readers[0].lane.chains(scope.fields))
    for reader, place in zip(readers, places, strict=True):
        reader.jump(place, jumped - index)
    return jumped


class _Reader:
    """One rank's lockstep sequence, read forward a block at a time."""

    def __init__(self, lane: Lane, scope: Scope, decisions: frozenset[str]) -> None:
        self.lane = lane
        self.ahead: list[Key] = []
        self.seen: Counter[str] = Counter()
        self.compared: Counter[str] = Counter()
        self.taken = 0
        # Records that were in a row with those of other ranks.
        self.rows = 0
        self._decisions = decisions
        self._fields = scope.fields
        self._skipped = decisions - set(scope.fields)
        self._keys = self._read(lane)

    def fill(self, count: int) -> None:
        if len(self.ahead) < count:
            self.ahead += islice(self._keys, count - len(self.ahead))

    def skip(self, count: int, block: int) -> None:
        """Leave out `count` keys: another rank has none to hold against them."""
        while count > 0:
            self.fill(min(count, block))
            taken = min(count, len(self.ahead))
            if not taken:
                return
            self.drop(taken)
            count -= taken

    def pass_over(self, count: int) -> None:
        """The same for a reader that has jumped behind them."""
        self.seen[JUMPED] += count
        self.taken += count

    def jump(self, place: Place, count: int) -> None:
        """The next `count` records are equal in all lanes; read on behind the checkpoint that says so."""
        self.seen[JUMPED] += count
        self.compared[JUMPED] += count
        self.rows += count
        self.taken += count
        self._go_on(place)

    def run_out(self) -> None:
        """Leave out what can be, up to the last checkpoint: nobody is there to be compared with."""
        chains = self.lane.chains(self._fields)
        last = self.lane.checkpoints and self.lane.checkpoints.of(chains).last()
        begin = self.lane.begin(self._fields)
        if last and begin is not None and (left := last.records(chains) - begin - self.taken) > 0:
            self.seen[JUMPED] += left
            self._go_on(last)

    def _go_on(self, place: Place) -> None:
        self.ahead.clear()
        self._keys = self._read(self.lane.equal_up_to(place))

    def take(self, count: int) -> None:
        """The next `count` keys were in a row with those of other ranks."""
        self.compared.update(self._count(count))
        self.rows += count
        self.drop(count)

    def drop(self, count: int) -> None:
        self.seen.update(self._count(count))
        self.taken += count
        del self.ahead[:count]

    def _count(self, count: int) -> dict[str, int]:
        kinds = Counter([key[0] for key in self.ahead[:count]])
        return {kind: number for kind, number in kinds.items() if kind in self._decisions}

    def _read(self, lane: Lane) -> Iterator[Key]:
        # The hot loop of the checker: half a microsecond a record.
        skipped = self._skipped
        fields_of = self._fields.get
        for record in lane.records():
            kind = record["kind"]
            compared = fields_of(kind)
            if compared is not None:
                get = record.get
                yield (kind, get("phase"), *map(get, compared))
            elif kind in skipped:
                self.seen[kind] += 1


def _equal_prefix(blocks: Sequence[list[Key]], count: int) -> int:
    """How many of the first `count` keys are equal in all blocks, types and all."""
    first = blocks[0][:count]
    if all(block[:count] == first for block in blocks[1:]):
        # Equal in the sense of `==`, for which 1, 1.0 and true are one.
        written = _written(first)
        if all(_written(block[:count]) == written for block in blocks[1:]):
            return count
    texts = [list(map(exact, block[:count])) for block in blocks]
    return next(
        (index for index in range(count) if any(own[index] != texts[0][index] for own in texts[1:])), count
    )


def _written(keys: list[Key]) -> bytes:
    # Version 2 writes equal values alike whether or not they are one object.
    return marshal.dumps(keys, 2)


def _only_opens_a_vote(reader: _Reader, meetings: frozenset[str]) -> bool:
    """Whether a lane ends in nothing but the opening of a vote: a shutdown in the middle of one.

    Such a lane is no witness against the ranks that had already left: nobody decided anything. One that
    hangs there is: it came to a vote that the others, who are done, never held.
    """
    if len(reader.ahead) >= OPENING_MAX or reader.lane.outcome == "hung":
        return False
    *calls, last = reader.ahead
    return last[0] in meetings and last[1] == "enter" and all(key[1] == "call" for key in calls)
