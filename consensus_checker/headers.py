"""Whether the headers of one run can be what they say, and whether they say the same.

A header is written by each rank on its own, so it is evidence like any other: a rank with other sizes
is of another job, one with another declaration of a kind ran another version, one with another digest
of the config was started otherwise. Nothing is compared on the strength of a header that the rest
contradict, and a run whose headers differ is never called consistent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from consensus_checker.words import ranks_text
from tracer.places import SEGMENT
from tracer.plausible import WORLD_SIZE_MAX
from tracer.record import MAIN_LANE, Kind

if TYPE_CHECKING:
    from consensus_checker.history import Lane, Source


@dataclass(frozen=True, slots=True)
class Agreed:
    """What the headers of one run have in common.

    Attributes:
        fit: lanes that can be compared; never empty.
        unfit: ranks whose lanes were left out.
        kinds: each kind as most lanes declare it.
        disputed: kinds that some rank would compare otherwise: they are compared nowhere.
    """

    fit: list[Lane]
    unfit: tuple[int, ...]
    kinds: Mapping[str, Kind]
    disputed: frozenset[str]
    doubts: tuple[str, ...]
    config_sides: tuple[tuple[int, ...], ...]


def sound(sources: Iterable[Source]) -> tuple[list[Source], list[tuple[int, str]]]:
    """The lanes whose header can be what it says; and the others, as rank and fault."""
    good: list[Source] = []
    faults: list[tuple[int, str]] = []
    for source in sources:
        fault = _fault(source)
        if fault is None:
            good.append(source)
        else:
            rank = source.rank if _is_count(source.rank, 0, WORLD_SIZE_MAX) else -1
            faults.append((rank, fault))
    return good, faults


def agree(lanes: Sequence[Lane]) -> Agreed:
    """Hold the headers of one run, ordered by rank and lane, against each other."""
    shape, _ = Counter(map(_shape, lanes)).most_common(1)[0]
    world_size, sizes = shape[0], dict(shape[1])
    doubts: list[str] = []
    if sizes and prod(sizes.values()) != world_size:
        doubts.append(f"the headers' sizes multiply to {prod(sizes.values())}, not to {world_size} ranks")
    fit: list[Lane] = []
    unfit: list[int] = []
    at: dict[tuple[tuple[str, Any], ...], int] = {}
    is_numbered = sizes and prod(sizes.values()) == world_size
    for lane in _by_credit(lanes, sizes if is_numbered else {}):
        place = lane.header.get("coordinates", {})
        own = tuple(sorted(place.items()))
        reason = _misfit(lane, shape, world_size, sizes)
        if reason is None and place and at.setdefault(own, lane.rank) != lane.rank:
            reason = f"its header has the coordinates of rank {at[own]}"
        if reason is not None:
            unfit.append(lane.rank)
            doubts.append(f"rank {lane.rank}: {reason}: not compared")
            continue
        if is_numbered and place != numbered(lane.rank, sizes):
            doubts.append(f"rank {lane.rank}: its coordinates do not follow from its number")
        if name := _other_name(lane):
            doubts.append(name)
        fit.append(lane)
    fit.sort(key=lambda lane: (lane.rank, lane.name != MAIN_LANE, lane.name))
    if not fit:
        # Every header contradicts itself: the logs are shown, and none is believed.
        fit = [lanes[0]]
        unfit = [rank for rank in unfit if rank != lanes[0].rank]
    kinds, disputed, disputes = _kinds(fit)
    sides = _config_sides(fit)
    if len(sides) > 1:
        others = " and ".join(ranks_text(side) for side in sides[1:])
        doubts.append(f"config_digest of {others} differs from that of {ranks_text(sides[0])}")
    doubts += disputes
    return Agreed(fit, tuple(unfit), kinds, disputed, tuple(dict.fromkeys(doubts)), sides)


def numbered(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Coordinates of a rank when the last axis is fastest, in the order of `sizes`."""
    place: dict[str, int] = {}
    for axis in reversed(tuple(sizes)):
        rank, place[axis] = divmod(rank, sizes[axis])
    return {axis: place[axis] for axis in sizes}


def _fault(source: Source) -> str | None:
    """What of a header can't be true, whatever the others say."""
    header = source.header
    coordinates, sizes, groups = (header.get(part, {}) for part in ("coordinates", "sizes", "groups"))
    checks = {
        "rank": _is_count(source.rank, 0, WORLD_SIZE_MAX) and _is_count(header.get("rank", source.rank), 0),
        "lane": isinstance(source.lane, str) and isinstance(header.get("lane", ""), str),
        "world_size": _is_count(header.get("world_size", 1), 1, WORLD_SIZE_MAX),
        "run_id": isinstance(header.get("run_id", ""), str),
        "attempt": _is_count(header.get("attempt", 0), 0),
        "config_digest": isinstance(header.get("config_digest", ""), str),
        "coordinates": _is_counts(coordinates, 0),
        "sizes": _is_counts(sizes, 1),
        "groups": isinstance(groups, Mapping)
        and all(isinstance(name, str) and _is_ranks(members) for name, members in groups.items()),
        "kinds": all(map(_is_kind, source.kinds.values())),
    }
    return next((f"its header is damaged ({part})" for part, is_good in checks.items() if not is_good), None)


def _is_count(value: Any, low: int, high: int | None = None) -> bool:
    return type(value) is int and low <= value and (high is None or value <= high)


def _is_counts(value: Any, low: int) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and _is_count(count, low, WORLD_SIZE_MAX) for name, count in value.items()
    )


def _is_ranks(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(type(r) is int for r in value)


def _is_kind(kind: Kind) -> bool:
    return (
        isinstance(kind.role, str)
        and (kind.leader is None or isinstance(kind.leader, str))
        and (kind.result is None or isinstance(kind.result, str))
        and all(isinstance(need, str) for need in kind.needs.values())
    )


def _shape(lane: Lane) -> tuple[int, tuple[tuple[str, int], ...]]:
    return int(lane.header.get("world_size", 1)), tuple(lane.header.get("sizes", {}).items())


def _by_credit(lanes: Sequence[Lane], sizes: Mapping[str, int]) -> list[Lane]:
    """Of two lanes at one place, the one whose coordinates follow from its rank is believed."""
    return sorted(lanes, key=lambda lane: lane.header.get("coordinates", {}) != numbered(lane.rank, sizes))


def _misfit(lane: Lane, shape: Any, world_size: int, sizes: Mapping[str, int]) -> str | None:
    own = _shape(lane)
    if own[0] != shape[0]:
        return f"its header has world_size {own[0]}, most have {world_size}"
    if own[1] != shape[1]:
        return f"its header has sizes {dict(own[1])}, most have {dict(sizes)}"
    if lane.rank >= world_size:
        return f"there are {world_size} ranks"
    place = lane.header.get("coordinates", {})
    if sizes and set(place) != set(sizes):
        return f"its coordinates {dict(place)} are not on the axes {', '.join(sizes)}"
    outside = [axis for axis, size in sizes.items() if place[axis] >= size]
    return f"its coordinate on {outside[0]} is outside of the sizes" if outside else None


def _other_name(lane: Lane) -> str | None:
    """A file that is named after another rank or lane than its header: it may have been copied."""
    name = lane.file_of(0)
    match = SEGMENT.fullmatch(name)
    told = lane.header.get("rank", lane.rank), lane.header.get("lane", lane.name)
    if match is None or (int(match["rank"]), match["lane"]) == told == (lane.rank, lane.name):
        return None
    return f"{name}: its header says rank {told[0]}, lane {told[1]}"


def _kinds(lanes: Sequence[Lane]) -> tuple[dict[str, Kind], frozenset[str], list[str]]:
    """Each kind as most declare it, the kinds compared differently, and who differs.

    Only lanes of one name are held against each other: another lane may declare other kinds.
    """
    votes: dict[str, Counter[str]] = {}
    said: dict[str, Kind] = {}
    own: list[tuple[Lane, dict[str, str]]] = []
    for lane in lanes:
        texts = {name: repr(kind.declaration()) for name, kind in lane.source.kinds.items()}
        own.append((lane, texts))
        for name, text in texts.items():
            said.setdefault(text + name, lane.source.kinds[name])
            votes.setdefault(name, Counter())[text] += 1
    kinds = {name: said[counts.most_common(1)[0][0] + name] for name, counts in votes.items()}
    disputed: set[str] = set()
    differing: dict[str, set[int]] = {}
    for lane_name in sorted({lane.name for lane in lanes}):
        group = [(lane, texts) for lane, texts in own if lane.name == lane_name]
        for name in sorted({name for _, texts in group for name in texts}):
            usual = repr(kinds[name].declaration())
            ranks = {lane.rank for lane, texts in group if texts.get(name) != usual}
            if not ranks or len({texts.get(name) for _, texts in group}) == 1:
                continue
            differing.setdefault(name, set()).update(ranks)
            rules = {_rule(lane.source.kinds.get(name)) for lane, _ in group}
            if len(rules) > 1:
                disputed.add(name)
    doubts = [
        f"{ranks_text(sorted(ranks))}: its header declares {name} otherwise than most do"
        + (": not compared" if name in disputed else "")
        for name, ranks in sorted(differing.items())
    ]
    return kinds, frozenset(disputed), doubts


def _rule(kind: Kind | None) -> tuple[Any, ...] | None:
    """What of a declaration says how records are compared."""
    return (kind.role, kind.agree, kind.compared, kind.leader, kind.led) if kind is not None else None


def _config_sides(lanes: Sequence[Lane]) -> tuple[tuple[int, ...], ...]:
    sides: dict[str, set[int]] = {}
    for lane in lanes:
        if digest := str(lane.header.get("config_digest", "")):
            sides.setdefault(digest, set()).add(lane.rank)
    ordered = sorted(sides.values(), key=lambda ranks: (-len(ranks), min(ranks)))
    return tuple(tuple(sorted(ranks)) for ranks in ordered)
