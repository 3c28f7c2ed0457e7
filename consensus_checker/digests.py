"""Up to where lanes are equal, as their checkpoints say: what is before need not be compared again.

rank 0   ---- c1 ---- c2 ---- c3 ---- c4
rank 1   ---- c1 ---- c2 ---- x3 ---- x4      equal at c2: what differs comes behind it
"""

from __future__ import annotations

from collections.abc import Sequence

from consensus_checker.history import Lane, Scope
from tracer.checkpoints import Place

# Checkpoints in the middle of idle steps that are passed over.
UNSETTLED_MAX = 64


def furthest(lanes: Sequence[Lane], scope: Scope, index: int) -> list[Place] | None:
    """Behind which checkpoint of each lane to read on at `index`, since all are equal up to there.

    None where there is none. The last one is found by halves: once two lanes differ they never meet again.
    """
    checkpoints = [lane.checkpoints for lane in lanes if lane.checkpoints is not None]
    if len(checkpoints) < len(lanes):
        return None
    chains = lanes[0].chains(scope.fields)
    series = [one.of(chains) for one in checkpoints]
    ends = [one.last() for one in series]
    found: list[Place] = []
    known = [end for end in ends if end is not None]
    if len(known) < len(lanes):
        return None
    # The one that ends first: whoever goes on is compared later, without it.
    number = min(range(len(known)), key=lambda number: known[number].records(chains))
    own, others = series[number], [one for at, one in enumerate(series) if at != number]

    def is_equal(place: Place) -> bool:
        nonlocal found
        count = place.records(chains)
        if count <= index:
            return True
        stamp = place.stamp(chains)
        places = []
        for other in others:
            same = other.with_records(count, place.at / own.checkpoints.bytes)
            if same is None or same.stamp(chains) != stamp:
                return False
            places.append(same)
        found = [*places[:number], place, *places[number:]]
        return True

    best = own.last_of(is_equal, known[number])
    for _ in range(UNSETTLED_MAX):
        if best is None or best.records(chains) <= index or not is_equal(best):
            return None
        if all(one.settled(place) for one, place in zip(series, found, strict=True)):
            return found
        best = own.before(best)
    return None
