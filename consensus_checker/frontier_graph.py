"""Who waits for whom by flight recorders: the call that each group stands at, and whose absence explains it.

Of a group: `proven` is the newest collective that surely all have joined, and it stands at the oldest one
behind that which is open on anybody. A member that has called less did not join; one whose dump ends before
`proven` has an old dump, which says nothing.

    rank 0   41  42  43~          proven 42: it ended on rank 1, so all were in it
    rank 1   41  42  43~          stands at 43; rank 2 did not join
    rank 2   41  42~
    rank 3   40~                  an old dump: rank 3 has been in 42 since

A rank that did not join and waits in a call itself is explained by that one. What is left are the roots.
Sends and receives are no part of it: stages of a pipeline differ in them by right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from consensus_checker.recorded_groups import Place, RankGroup, Recorded


@dataclass(frozen=True, slots=True)
class Stand:
    """A group of which somebody waits.

    Attributes:
        seq: the call it stands at; all before `proven` were joined by all.
        joined: ranks that have called it; `waiting` those of them on which it is open.
        absent: ranks whose dump tells that they have not; `idle` those of them whose count is not known, only
            that no call of the group is open there.
        old: ranks with a dump from before; `unknown` those whose dump doesn't tell.
        behind: ranks that have joined, and on which a call is open that has ended elsewhere.
    """

    group: RankGroup
    seq: int
    proven: int
    joined: tuple[int, ...]
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    idle: tuple[int, ...]
    old: tuple[int, ...]
    unknown: tuple[int, ...]
    behind: tuple[int, ...]

    @property
    def unheard(self) -> tuple[int, ...]:
        """Members that may or may not have joined."""
        return tuple(sorted({*self.group.unheard, *self.old, *self.unknown}))

    @property
    def has_timed_out(self) -> bool:
        return any(self.group.places[rank].has_timed_out(self.seq) for rank in self.waiting)

    @property
    def stood(self) -> bool:
        """Whether somebody was seen waiting here twice."""
        return any(self.group.places[rank].stood for rank in self.waiting)

    @property
    def is_gloo(self) -> bool:
        return any(self.group.places[rank].is_gloo for rank in self.waiting)

    @property
    def call(self) -> str:
        """`all_reduce #43 of 5 (tp)`."""
        op = next((op for rank in self.waiting if (op := self.group.places[rank].call(self.seq))), "")
        return f"{op or 'collective'} #{self.seq} of {self.group.label}"


@dataclass(slots=True)
class Frontier:
    """All groups in which somebody waits.

    Attributes:
        roots: ranks that did not join and wait for nobody, with the stands that miss them.
        explained: ranks that did not join because they wait themselves: rank -> where.
        circle: ranks that wait for each other, where there is no root.
        lagging: groups in which nobody waits for anybody, and what has ended on one is open on another.
    """

    recorded: Recorded
    stands: tuple[Stand, ...]
    roots: dict[int, list[Stand]] = field(default_factory=dict)
    explained: dict[int, Stand] = field(default_factory=dict)
    circle: tuple[int, ...] = ()
    lagging: tuple[Stand, ...] = ()

    @property
    def absent(self) -> set[int]:
        return {rank for stand in self.stands for rank in stand.absent}

    @property
    def old(self) -> set[int]:
        return {rank for stand in self.stands for rank in stand.old}

    @property
    def is_alive(self) -> bool:
        """Whether something shows that the job went on while it was looked at."""
        return bool(self.old or self.recorded.moved)


def frontier(recorded: Recorded) -> Frontier:
    """Where every group stands, and whom that leaves without an excuse."""
    stands = tuple(stand for group in recorded.groups if (stand := _stand(group)) is not None)
    lagging = tuple(one for group in recorded.groups if (one := _lagging(group)) is not None)
    found = Frontier(recorded, stands, lagging=lagging)
    for stand in stands:
        for rank in stand.absent:
            if rank in recorded.moved:
                continue
            excuse = _excuse(rank, stand, stands)
            if excuse is None:
                found.roots.setdefault(rank, []).append(stand)
            else:
                found.explained.setdefault(rank, excuse)
    for rank in found.roots:
        found.explained.pop(rank, None)
    if not found.roots:
        found.circle = _circle(stands)
    return found


def _stand(group: RankGroup) -> Stand | None:
    """Where the group stands; None where nobody waits in it, or only one rank is known of it."""
    places = group.places
    proven = max((place.proven() for place in places.values()), default=-1)
    waiting: dict[int, int] = {}
    for rank, place in places.items():
        if place.enqueued is not None and place.completed is not None:
            seq = max(place.completed, proven) + 1
            if seq <= place.enqueued:
                waiting[rank] = seq
    if not waiting or (len(places) < 2 and not group.unheard):
        return None
    seq = min(waiting.values())
    joined, absent, idle, old, unknown = [], [], [], [], []
    for rank, place in places.items():
        if place.enqueued is None:
            # A call that is open is in the dump, as long as calls are.
            if place.dump.are_calls_left_out:
                unknown.append(rank)
            else:
                absent.append(rank)
                idle.append(rank)
        elif place.enqueued >= seq:
            joined.append(rank)
        elif place.enqueued < proven:
            old.append(rank)
        else:
            absent.append(rank)
    behind = [
        rank
        for rank in joined
        if not places[rank].is_gloo and (places[rank].completed or 0) < proven and rank in waiting
    ]
    return Stand(
        group,
        seq,
        proven,
        tuple(joined),
        tuple(rank for rank in joined if rank in waiting),
        tuple(absent),
        tuple(idle),
        tuple(old),
        tuple(unknown),
        tuple(behind),
    )


def _lagging(group: RankGroup) -> Stand | None:
    """The oldest call that is open on a device and has ended elsewhere; with gloo there is no device."""
    places = group.places
    proven = max((place.proven() for place in places.values()), default=-1)
    behind = {
        rank: place.completed + 1
        for rank, place in places.items()
        if place.enqueued is not None
        and place.completed is not None
        and place.completed < min(proven, place.enqueued)
        and not place.is_gloo
    }
    if not behind:
        return None
    joined = tuple(rank for rank, place in places.items() if (place.enqueued or -1) >= min(behind.values()))
    ranks = tuple(behind)
    return Stand(group, min(behind.values()), proven, joined, ranks, (), (), (), (), ranks)


def _excuse(rank: int, missed: Stand, stands: Sequence[Stand]) -> Stand | None:
    """Another group in which the rank waits, and so can't have come."""
    own = missed.group.places[rank]
    for stand in stands:
        if (
            stand is not missed
            and rank in stand.waiting
            and _may_be_same_thread(own, stand.group.places[rank])
        ):
            return stand
    return None


def _may_be_same_thread(one: Place, other: Place) -> bool:
    """A gloo call holds up its own thread alone; a device is held up for all of them."""
    return not (one.is_gloo and one.thread and other.thread and one.thread != other.thread)


def _circle(stands: Sequence[Stand]) -> tuple[int, ...]:
    """Ranks from whom one comes back to them by going from who waits to who is missed."""
    waits: dict[int, set[int]] = {}
    for stand in stands:
        for rank in stand.waiting:
            waits.setdefault(rank, set()).update(stand.absent)
    circle = []
    for start in sorted(waits):
        reached: set[int] = set()
        ahead = sorted(waits[start])
        while ahead:
            rank = ahead.pop()
            if rank not in reached:
                reached.add(rank)
                ahead += sorted(waits.get(rank, ()))
        if start in reached:
            circle.append(start)
    return tuple(circle)
