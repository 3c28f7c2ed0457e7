"""The logs of one run, and which ranks must agree on what.

Owns the partition of ranks into scopes. It reads nothing but headers, so it knows a kind of record
only by its declaration. A scope is a set of ranks that differ only on the axes of an `agree`
declaration; its lockstep sequence is every record whose kind agrees at least along those axes:

    axes of the scope   sees                                         example
    tp, cp              decisions and meetings, interleaved          one stage of a pipeline
    tp, cp, pp          only what every stage shares                 one replica

An axis of size 1 tells no two ranks apart and is dropped first, so that with one pipeline stage the
two scopes above are one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tracer.record import Kind, Record


class Source(Protocol):
    """One lane of one rank, as `tracer.log` reads it: `torn` and `trailer` hold after a whole pass."""

    @property
    def rank(self) -> int: ...
    @property
    def lane(self) -> str: ...
    @property
    def header(self) -> Mapping[str, Any]: ...
    @property
    def kinds(self) -> Mapping[str, Kind]: ...
    @property
    def torn(self) -> str | None: ...
    @property
    def trailer(self) -> Mapping[str, Any] | None: ...
    def records(self) -> Iterator[Any]: ...
    def file_of(self, seq: int) -> Path: ...


class Run(Protocol):
    """A folder of logs."""

    @property
    def lanes(self) -> Sequence[Source]: ...


@dataclass(frozen=True, slots=True)
class MemoryLane:
    """A lane that was never on disk: tests, and records that arrive another way."""

    rank: int
    lane: str
    header: Mapping[str, Any]
    kinds: Mapping[str, Kind]
    entries: Sequence[Record]
    trailer: Mapping[str, Any] | None = None
    torn: str | None = None

    def records(self) -> Iterator[Record]:
        return iter(self.entries)

    def file_of(self, seq: int) -> Path:
        return Path(f"rank{self.rank:04d}.{self.lane}.000.jsonl")


class Lane:
    """A lane and how it ended, which is known for good once it has been read to its end."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.rank = source.rank
        self.name = source.lane
        self.header = source.header
        self._is_read = False
        self._outcome: str | None = None

    def records(self) -> Iterator[Record]:
        yield from self.source.records()
        self._is_read = True
        if not self.source.torn and self.source.trailer is not None:
            self._outcome = str(self.source.trailer.get("outcome"))

    @property
    def outcome(self) -> str | None:
        """What the trailer says: `completed`, `hung` or `crashed`; None when the lane was cut."""
        if not self._is_read:
            deque(self.records(), maxlen=0)
        return self._outcome

    def file_of(self, seq: int) -> str:
        """Name of the segment that holds `seq`."""
        return self.source.file_of(seq).name


@dataclass(frozen=True, slots=True)
class Scope:
    """Ranks that must agree, and the records on which they must.

    Attributes:
        name: the coordinates that are fixed in it: `dp0`, `dp0.pp1`, or `world`.
        ranks: every rank that belongs to it, also those whose log is missing.
        fields: kind -> its compared fields, for the kinds of the lockstep sequence.
    """

    name: str
    ranks: tuple[int, ...]
    fields: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class History:
    """All lanes of one run, ordered by rank and lane, with its scopes.

    Attributes:
        others: lanes of other runs found in the same place; never compared, only reported.
        places: rank -> its coordinates, also for a rank whose log is missing.
    """

    lanes: tuple[Lane, ...]
    others: tuple[Lane, ...]
    world_size: int
    kinds: Mapping[str, Kind]
    places: Mapping[int, Mapping[str, int]]
    scopes: tuple[Scope, ...]

    @classmethod
    def of(cls, source: Run | Iterable[Source]) -> History:
        """The run with the most ranks among the lanes of `source`; equal runs go by id."""
        given = source if isinstance(source, Iterable) else source.lanes
        runs: dict[tuple[str, int], list[Lane]] = {}
        for lane in map(Lane, given):
            run_id = (str(lane.header.get("run_id", "")), int(lane.header.get("attempt", 0)))
            runs.setdefault(run_id, []).append(lane)
        if not runs:
            return cls((), (), 0, {}, {}, ())
        chosen = min(runs, key=lambda run_id: (-len({lane.rank for lane in runs[run_id]}), run_id))
        lanes = sorted(runs[chosen], key=lambda lane: (lane.rank, lane.name))
        others = [lane for run_id, found in runs.items() if run_id != chosen for lane in found]
        kinds: dict[str, Kind] = {}
        for lane in lanes:
            for name, kind in lane.source.kinds.items():
                kinds.setdefault(name, kind)
        places = _places(lanes)
        return cls(
            tuple(lanes),
            tuple(sorted(others, key=lambda lane: (lane.rank, lane.name))),
            max(int(lane.header.get("world_size", 1)) for lane in lanes),
            kinds,
            places,
            _scopes(kinds, places, lanes[0].header.get("sizes", {})),
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks with at least one lane here."""
        return tuple(sorted({lane.rank for lane in self.lanes}))

    @property
    def lane_names(self) -> tuple[str, ...]:
        return tuple(sorted({lane.name for lane in self.lanes}))

    def lane(self, rank: int, name: str) -> Lane | None:
        return next((lane for lane in self.lanes if lane.rank == rank and lane.name == name), None)

    def scope(self, name: str) -> Scope | None:
        return next((scope for scope in self.scopes if scope.name == name), None)


def is_lockstep(record: Record, scope: Scope) -> bool:
    return record["kind"] in scope.fields


def _places(lanes: Sequence[Lane]) -> dict[int, Mapping[str, int]]:
    """Coordinates of every rank; those of a missing rank follow from the sizes, in rank order."""
    header = lanes[0].header
    sizes: Mapping[str, int] = header.get("sizes", {})
    places: dict[int, Mapping[str, int]] = {}
    world_size = 1
    for size in sizes.values():
        world_size *= size
    if sizes and world_size == header.get("world_size"):
        for rank in range(world_size):
            rest = rank
            place: dict[str, int] = {}
            for axis in reversed(tuple(sizes)):
                rest, place[axis] = divmod(rest, sizes[axis])
            places[rank] = place
    # What a rank says of itself goes before what follows from the numbering.
    places.update({lane.rank: lane.header.get("coordinates", {}) for lane in lanes})
    return dict(sorted(places.items()))


def _scopes(
    kinds: Mapping[str, Kind], places: Mapping[int, Mapping[str, int]], sizes: Mapping[str, int]
) -> tuple[Scope, ...]:
    axes = tuple(sizes) or tuple(sorted({axis for place in places.values() for axis in place}))
    split = {axis for axis in axes if len({place.get(axis) for place in places.values()}) > 1}
    declared: dict[frozenset[str], set[str]] = {}
    for kind in kinds.values():
        if agree := frozenset(kind.agree) & split:
            declared.setdefault(agree, set()).update(kind.agree)
    scopes: list[Scope] = []
    for agree in sorted(declared, key=lambda agree: (len(agree), sorted(agree))):
        fields = {name: kind.compared for name, kind in kinds.items() if agree <= frozenset(kind.agree)}
        fixed = [axis for axis in axes if axis not in declared[agree]]
        members: dict[tuple[int | None, ...], list[int]] = {}
        for rank, place in places.items():
            members.setdefault(tuple(place.get(axis) for axis in axes if axis not in agree), []).append(rank)
        for ranks in members.values():
            place = places[ranks[0]]
            name = ".".join(f"{axis}{place.get(axis, 0)}" for axis in fixed) or "world"
            scopes.append(Scope(name, tuple(ranks), fields))
    return tuple(scopes)
