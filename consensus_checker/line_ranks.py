"""Which rank printed which divergence line, and which lines belong to one incident.

A line says its rank in its tag, in what a launcher put in front of it, in the name of its file, or not at
all: then ranks are numbered by order of appearance, and that is said. Ranks are compared inside a replica
only. A server that was started again prints again, so the lines of one rank are of several incidents.

    TP0 TP1 | TP0 TP1          two incidents, unless they are 20 minutes apart: then the middle says which
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tracer.importers.rank_divergence import Lines, Printed, Tags

# Lines further apart are of two incidents. All ranks print within a moment; their clocks may be off.
SAME_INCIDENT_SECONDS = 600
# All ranks check as many events, unless one is shut down in the middle: then only the moment tells.
SAME_MOMENT_SECONDS = 10
NAMED = re.compile(r"(?:rank|tp|worker|proc(?:ess)?)[-_]?(\d{1,6})(?!\d)", re.IGNORECASE)
NUMBER_LAST = re.compile(r"(\d{1,6})(?:\.(?:log|out|err|txt|stderr|stdout|gz))*$")
PROCESSES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Seat:
    """A line and the rank that printed it.

    Attributes:
        place: axis -> coordinate.
        name: how its log calls it: `TP1 PP0`, or `process B`.
    """

    printed: Printed
    rank: int
    place: Mapping[str, int]
    name: str

    @property
    def replica(self) -> int:
        return self.place.get("dp", 0)


@dataclass(frozen=True, slots=True)
class Seating:
    """All lines with their ranks.

    Attributes:
        sizes: axis -> coordinates on it, in the order in which ranks are numbered.
        expected: replica -> every rank of it that wrote any line, or must be there.
        notes: how ranks were told apart, where their lines do not say it.
    """

    seats: tuple[Seat, ...]
    sizes: Sizes
    expected: Mapping[int, tuple[int, ...]]
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Incident:
    """One time that the ranks of a replica were found to differ: at most one line of each rank."""

    replica: int
    seats: dict[int, Seat] = field(default_factory=dict)

    @property
    def seconds(self) -> float | None:
        times = [seat.printed.seconds for seat in self.seats.values() if seat.printed.seconds is not None]
        return min(times) if times else None

    def distance(self, printed: Printed) -> float:
        """Seconds to a line; 0 where nobody knows."""
        own = self.seconds
        return abs(own - printed.seconds) if own is not None and printed.seconds is not None else 0.0

    def has_count(self, count: int) -> bool:
        return any(seat.printed.count == count for seat in self.seats.values())

    def takes(self, seat: Seat) -> bool:
        """Whether a line of a rank that has none here can be of this incident."""
        printed = seat.printed
        if seat.rank in self.seats:
            return False
        lines = (printed, *(own.printed for own in self.seats.values()))
        is_edited = any(one.is_whole and one.count != len(one.events) for one in lines)
        if self.has_count(printed.count) or is_edited:
            return True
        is_timed = printed.seconds is not None and self.seconds is not None
        return is_timed and self.distance(printed) <= SAME_MOMENT_SECONDS


def seated(lines: Lines) -> Seating:
    """Give every line its rank."""
    tags = {one.tags for one in lines.printed if one.tags}
    if tags and all(one.tags for one in lines.printed):
        grid = _Grid.of(lines.tags | tags)
        seats = [grid.seat(one) for one in lines.printed]
        return Seating(tuple(seats), grid.sizes, grid.expected())
    if tags:
        return _partly(lines, tags)
    return _untagged(lines.printed)


def incidents(seats: Sequence[Seat]) -> list[Incident]:
    """Lines grouped by the incident that they are of, the earliest first; one line twice counts once."""
    found: list[Incident] = []
    for seat in sorted(seats, key=lambda seat: seat.printed.seconds or 0.0):
        printed = seat.printed
        near = [
            one
            for one in found
            if one.replica == seat.replica and one.distance(printed) <= SAME_INCIDENT_SECONDS
        ]
        twin = next((one for one in near if _is_twice(one.seats.get(seat.rank), seat)), None)
        if twin is not None:
            twin.seats[seat.rank] = max(twin.seats[seat.rank], seat, key=_worth)
            continue
        free = [one for one in near if one.takes(seat)]
        if free:
            best = min(free, key=lambda one: (not one.has_count(printed.count), one.distance(printed)))
            best.seats[seat.rank] = seat
        else:
            found.append(Incident(seat.replica, {seat.rank: seat}))
    return found


def _is_twice(seat: Seat | None, other: Seat) -> bool:
    """Whether two handlers have printed the same."""
    return seat is not None and bool(other.printed.hash) and seat.printed.hash == other.printed.hash


def _worth(seat: Seat) -> tuple[bool, bool, int]:
    return seat.printed.is_proven, seat.printed.is_whole, len(seat.printed.events)


@dataclass(frozen=True, slots=True)
class _Grid:
    """Ranks as their tags number them, with tp fastest.

    Under data-parallel attention TP numbers go on over the replicas: DP1 begins at TP4, not at TP0. They are
    the global ranks then.
    """

    sizes: Sizes
    is_shared: bool
    known: tuple[Mapping[str, int], ...]

    @classmethod
    def of(cls, tags: set[Tags]) -> _Grid:
        known = [{axis: dict(tag).get(axis, 0) for axis in ("dp", "pp", "tp")} for tag in sorted(tags) if tag]
        sizes = {axis: 1 + max(place[axis] for place in known) for axis in ("dp", "pp", "tp")}
        spans: dict[int, set[int]] = {}
        for place in known:
            spans.setdefault(place["dp"], set()).add(place["tp"])
        sizes_in = -(-sizes["tp"] // sizes["dp"])
        is_shared = sizes["dp"] > 1 and all(
            number // sizes_in == replica for replica, numbers in spans.items() for number in numbers
        )
        if is_shared:
            sizes = {"pp": sizes["pp"], "dp": sizes["dp"], "tp": sizes_in}
            known = [{**place, "tp": place["tp"] % sizes_in} for place in known]
        return cls(sizes, is_shared, tuple(known))

    def seat(self, printed: Printed) -> Seat:
        tags = dict(printed.tags)
        place = {axis: tags.get(axis, 0) for axis in self.sizes}
        if self.is_shared:
            place["tp"] %= self.sizes["tp"]
        return Seat(printed, self.rank(place), place, _tag_text(printed.tags))

    def rank(self, place: Mapping[str, int]) -> int:
        rank = 0
        for axis, size in self.sizes.items():
            rank = rank * size + place[axis]
        return rank

    def expected(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each replica that is known of: every stage has as many as the largest."""
        return {
            replica: tuple(
                sorted(
                    self.rank({"dp": replica, "pp": stage, "tp": number})
                    for stage in range(self.sizes["pp"])
                    for number in range(self.sizes["tp"])
                )
            )
            for replica in sorted({place["dp"] for place in self.known})
        }


def _tag_text(tags: Tags) -> str:
    order = ("dp", "pp", "cp", "tp")
    return " ".join(
        f"{axis.upper()}{number}" for axis, number in sorted(tags, key=lambda t: order.index(t[0]))
    )


def _partly(lines: Lines, tags: set[Tags]) -> Seating:
    """Some lines have lost their tags: these get the numbers behind all others."""
    grid = _Grid.of(lines.tags | tags)
    world = 1
    for size in grid.sizes.values():
        world *= size
    seats = []
    bare = 0
    for one in lines.printed:
        if one.tags:
            seat = grid.seat(one)
            seats.append(Seat(one, seat.rank, {"tp": seat.rank}, seat.name))
        else:
            seats.append(Seat(one, world + bare, {"tp": world + bare}, f"process {_letter(bare)}"))
            bare += 1
    note = f"{bare} of the lines have no rank in them: numbered from {world} on"
    ranks = tuple(sorted({seat.rank for seat in seats}))
    return Seating(tuple(seats), {"tp": world + bare}, {0: ranks}, (note,))


def _untagged(printed: Sequence[Printed]) -> Seating:
    """No line has a tag: ranks by the launcher's numbers, by the files' names, or in order of appearance."""
    for numbers, where in ((_launched(printed), "launcher's prefix"), (_named(printed), "files' names")):
        if numbers is not None:
            size = 1 + max(numbers)
            seats = [
                Seat(one, rank, {"tp": rank}, f"rank {rank}")
                for one, rank in zip(printed, numbers, strict=True)
            ]
            note = f"ranks are told by the {where}, the lines have no tag"
            return Seating(tuple(seats), {"tp": size}, {0: tuple(range(size))}, (note,))
    seats = [Seat(one, rank, {"tp": rank}, f"process {_letter(rank)}") for rank, one in enumerate(printed)]
    note = "no line says which rank wrote it: numbered in order of appearance"
    return Seating(tuple(seats), {"tp": max(1, len(seats))}, {0: tuple(range(len(seats)))}, (note,))


def _launched(printed: Sequence[Printed]) -> list[int] | None:
    """The launcher's numbers, where every line has one and no two processes share it."""
    numbers = [one.number for one in printed if one.number is not None]
    return numbers if len(numbers) == len(printed) and _are_apart(printed, numbers) else None


def _named(printed: Sequence[Printed]) -> list[int] | None:
    """Numbers by the files' names, where every file is of one process and they tell the files apart."""
    numbers: list[int | None] = [_number_in(one.file.path) for one in printed]
    if None in numbers:
        numbers = [_number_behind(one.file.path) for one in printed]
        if set(numbers) != set(range(len(set(numbers)))):
            # A day or a port is a number too.
            return None
    files = {one.file.path: number for one, number in zip(printed, numbers, strict=True)}
    told = [number for number in numbers if number is not None]
    is_told = len(told) == len(numbers) and len(set(files.values())) == len(files) > 1
    return told if is_told and _are_apart(printed, told) else None


def _are_apart(printed: Sequence[Printed], numbers: Sequence[int]) -> bool:
    """Whether no number stands for two lists that were printed at the same time."""
    told = Counter({(number, one.hash) for number, one in zip(numbers, printed, strict=True)})
    by_number = Counter(number for number, _ in told)
    return not numbers or max(by_number.values()) == 1


def _number_in(path: Path) -> int | None:
    """`rank3.log`, or `3/stderr.log` as torchrun writes it."""
    if named := NAMED.findall(path.name):
        return int(named[-1])
    return int(path.parent.name) if path.parent.name.isdecimal() and len(path.parent.name) < 7 else None


def _number_behind(path: Path) -> int | None:
    """`server_3.log.gz`."""
    found = NUMBER_LAST.search(path.name)
    return int(found[1]) if found else None


def _letter(number: int) -> str:
    return PROCESSES[number] if number < len(PROCESSES) else str(number)
