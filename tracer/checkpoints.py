"""Finding checkpoints in a lane's files without reading them: by jumps, or from the small file beside them.

Owns the search. Each checkpoint says how many records come before it, so those of a lane are in order and can
be halved: what lies between two of them is looked through for the next line that is one.

    file 000 | ... c1 ... c2 ... | 001 | ... c3 ... | 002 | ... c4 ... c5 ... |
                                            ^ the next one behind this byte is c4

A place that is found is a line that could be read, no more: whoever reads on from it has its block checked.
Bytes are those that were written. A file that was packed since is given as much room as any has: how much of
it was used is only known once its members are looked at, and that only where something is looked for.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import msgspec

from tracer.blocks import opened
from tracer.chain import LINKS
from tracer.checkpoint_file import file_name
from tracer.log import Behind, LaneLog
from tracer.pack import PACKED
from tracer.positions import UnsearchableError, read_at, table
from tracer.record import CHECKPOINT

CHUNK_BYTES = 1 << 17
# A checkpoint says little; a line as long as this is none.
LINE_BYTES_MAX = 1 << 14
# A file of checkpoints is read whole.
FILE_BYTES_MAX = 1 << 26
# Between two checkpoints with so many records some steps were written in full; how far back that is tried.
SETTLED_RECORDS = 64
SETTLED_TRIED_MAX = 256
# A place is looked for from a little before it is thought to be.
GUESS_BYTES = 1 << 18
# What a packed file may hold: a segment is never longer.
PACKED_ROOM = 1 << 23
# So many records further on are no longer among the next.
MISSES_RECORDS = 4 * LINKS
_MARK = b'"kind":"%s"' % CHECKPOINT.name.encode()


class _Line(msgspec.Struct):
    seq: int
    kind: str
    chains: dict[str, tuple[int, str]]
    records_of: dict[str, int]
    notes: dict[str, int]


class _Entry(msgspec.Struct):
    file: int
    end: int
    record: msgspec.Raw


class _BadListError(Exception):
    """A file of checkpoints that says what can't be."""


_LINE = msgspec.json.Decoder(_Line)
_ENTRY = msgspec.json.Decoder(_Entry)


# Axes along which records agree: what a chain is known by.
Axes = frozenset[str]


@dataclass(frozen=True, slots=True)
class Place:
    """A checkpoint, and where it is.

    Attributes:
        at: byte of the lane at which its line begins, all files taken together; `behind` is where it ends.
        chains: links and digest of every chain that has a checkpoint here.
        records_of: records of the lane before it, of every chain.
        notes: kind -> how many came before it, of kinds that must be seen wherever they are.
    """

    at: int
    behind: Behind
    chains: Mapping[Axes, tuple[int, str]]
    records_of: Mapping[Axes, int]
    notes: Mapping[str, int]

    @property
    def seq(self) -> int:
        return self.behind.seq

    def records(self, chains: frozenset[Axes]) -> int:
        """Records of these chains before it."""
        return sum(count for axes, count in self.records_of.items() if axes in chains)

    def stamp(self, chains: frozenset[Axes]) -> dict[Axes, tuple[int, tuple[int, str]]] | None:
        """Records, links and digest of each of these chains; None where one has no checkpoint here.

        One without records has nothing that could differ.
        """
        counts = {axes: count for axes, count in self.records_of.items() if count and axes in chains}
        if not counts or not counts.keys() <= self.chains.keys():
            return None
        return {axes: (count, self.chains[axes]) for axes, count in counts.items()}


class Checkpoints:
    """The checkpoints of one lane that say how many records come before them.

    Attributes:
        bytes: of all files.
        end: only those that begin in front of this byte are found.
        is_searchable: a byte of its files stands for a place; otherwise there is nothing here.
        is_listed: they stand in a file of their own, so that nothing is searched; it is believed until
            something in it is wrong.
    """

    def __init__(self, lane: LaneLog) -> None:
        self._starts: list[int] = []
        self._paths = lane.files
        self.bytes = 0
        self.is_searchable = True
        is_packed = False
        for path, segment in zip(lane.files, lane.segments, strict=True):
            self._starts.append(self.bytes)
            is_last = path == lane.files[-1]
            is_packed = is_packed or path.suffix == PACKED
            try:
                is_room = path.suffix == PACKED and not is_last
                self.bytes += PACKED_ROOM if is_room else table(path).size
            except UnsearchableError:
                self.is_searchable = False
            if not segment.header:
                self.is_searchable = False
        self.end = self.bytes
        # A ring, whose files are packed, has none.
        is_listed = self.is_searchable and not is_packed
        self._list = _List(lane, self._starts, self.bytes) if is_listed else None

    def before(self, at: int) -> Place | None:
        """The last one that begins in front of byte `at`."""
        at = min(at, self.end)
        if not self.is_searchable:
            return None
        if self.is_listed:
            return self._listed(lambda places: places.before(at), lambda: self.before(at))
        file = bisect_right(self._starts, max(0, at - 1)) - 1
        try:
            while file >= 0:
                end = min(at, self._end(file)) - self._starts[file]
                if (place := self._backward(file, end)) is not None:
                    return place
                file -= 1
        except UnsearchableError:
            self.is_searchable = False
        return None

    def behind(self, at: int, until: int) -> Place | None:
        """The first one that begins at byte `at` or later, and in front of byte `until`."""
        until = min(until, self.end)
        if not self.is_searchable:
            return None
        if self.is_listed:
            return self._listed(lambda places: places.behind(at, until), lambda: self.behind(at, until))
        file = bisect_right(self._starts, at) - 1
        try:
            while file < len(self._paths) and self._starts[file] < until:
                start = max(at, self._starts[file]) - self._starts[file]
                end = min(until, self._end(file)) - self._starts[file]
                if (place := self._forward(file, start, end)) is not None:
                    return place
                file += 1
        except UnsearchableError:
            self.is_searchable = False
        return None

    def last_of(self, is_within: Callable[[Place], bool]) -> Place | None:
        """The last one for which that holds, where it holds for all up to some one and for none behind."""
        return self._halve(is_within, lambda place: True)

    def settled(self, place: Place | None) -> Place | None:
        """The last one up to `place` that no record of idle steps in front of it reaches beyond.

        Such a record goes on being written over behind a checkpoint, until a step is written in full again.
        """
        for _ in range(SETTLED_TRIED_MAX):
            if place is None or (before := self.before(place.at)) is None:
                return None
            if before.notes == place.notes and place.seq - before.seq >= SETTLED_RECORDS:
                return place
            place = before
        return None

    def of(self, chains: frozenset[Axes]) -> Series:
        return Series(self, chains)

    def _halve(
        self, is_within: Callable[[Place], bool], is_one: Callable[[Place], bool], high: int | None = None
    ) -> Place | None:
        low, high = 0, self.end if high is None else high
        best: Place | None = None
        while low < high:
            middle = (low + high) // 2
            place = self.behind(middle, high)
            while place is not None and not is_one(place):
                place = self.behind(place.at + 1, high)
            if place is None or not is_within(place):
                high = middle
            else:
                best, low = place, place.at + 1
        return best

    def _end(self, file: int) -> int:
        return self._starts[file + 1] if file + 1 < len(self._starts) else self.bytes

    def _forward(self, file: int, start: int, end: int) -> Place | None:
        path, end = self._paths[file], min(end, self._size(file))
        while start < end:
            # A line that begins in front of `end` may go on behind it.
            data = read_at(path, CHUNK_BYTES + LINE_BYTES_MAX, start)
            at = 0
            while (at := data.find(_MARK, at)) >= 0:
                begin = data.rfind(b"\n", 0, at) + 1
                if begin and start + begin >= end:
                    return None
                place = self._place(file, start, data, begin) if begin or not start else None
                if place is not None:
                    return place
                at += 1
            if len(data) < CHUNK_BYTES + LINE_BYTES_MAX:
                return None
            start += CHUNK_BYTES
        return None

    def _backward(self, file: int, end: int) -> Place | None:
        path, end = self._paths[file], min(end, self._size(file))
        limit = end
        while end > 0:
            start = max(0, end - CHUNK_BYTES)
            # A line that begins in front of `end` may go on behind it.
            data = read_at(path, end - start + LINE_BYTES_MAX, start)
            at = len(data)
            while (at := data.rfind(_MARK, 0, at)) >= 0:
                begin = data.rfind(b"\n", 0, at) + 1
                if (begin or not start) and start + begin < limit:
                    place = self._place(file, start, data, begin)
                    if place is not None:
                        return place
            end = start
        return None

    def _size(self, file: int) -> int:
        """Bytes that were written of a file; what has no room in the lane can't be searched."""
        size = table(self._paths[file]).size
        if size > self._end(file) - self._starts[file]:
            raise UnsearchableError
        return size

    def _place(self, file: int, start: int, data: bytes, begin: int) -> Place | None:
        """The checkpoint at byte `begin` of `data`; None where it can't be read, or counts nothing."""
        end = data.find(b"\n", begin) + 1
        if not end:
            return None
        place = _parsed(data[begin:end], file, self._starts[file], start + end)
        if place is None or not place.records_of:
            return None
        return place

    @property
    def is_listed(self) -> bool:
        return bool(self._list)

    def _listed(
        self, look_up: Callable[[_List], Place | None], search: Callable[[], Place | None]
    ) -> Place | None:
        assert self._list is not None
        try:
            return look_up(self._list)
        except _BadListError:
            self._list = None
            return search()


class _List(Sequence[Place]):
    """The places in the file beside a lane's own. A line of it is read when it is asked for, and held against
    the log then.
    """

    def __init__(self, lane: LaneLog, starts: Sequence[int], file_bytes: int) -> None:
        self._paths = lane.files
        self._starts = starts
        self._ends = [*starts[1:], file_bytes]
        self._numbers = {segment.index: number for number, segment in enumerate(lane.segments)}
        self._places: dict[int, Place] = {}
        try:
            with opened(lane.files[0].parent / file_name(lane.rank, lane.lane)) as file:
                data = file.read(FILE_BYTES_MAX)
        except OSError:
            data = b""
        # The last line may not have been finished.
        self._lines = data[: data.rfind(b"\n") + 1].splitlines()

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, number: Any) -> Any:
        if (place := self._places.get(number)) is None:
            place = self._places[number] = self._read(self._lines[number])
        return place

    def before(self, at: int) -> Place | None:
        number = bisect_left(self, at, key=attrgetter("at")) - 1
        while number >= 0 and not self[number].records_of:
            number -= 1
        return self[number] if number >= 0 else None

    def behind(self, at: int, until: int) -> Place | None:
        number = bisect_left(self, at, key=attrgetter("at"))
        while number < len(self) and not self[number].records_of:
            number += 1
        return self[number] if number < len(self) and self[number].at < until else None

    def _read(self, line: bytes) -> Place:
        try:
            entry = _ENTRY.decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise _BadListError from None
        number = self._numbers.get(entry.file)
        if number is None or not 0 < entry.end <= self._ends[number] - self._starts[number]:
            raise _BadListError
        own = bytes(entry.record) + b"\n"
        place = _parsed(own, number, self._starts[number], entry.end)
        begin = entry.end - len(own)
        if place is None or begin < 0:
            raise _BadListError
        try:
            with opened(self._paths[number]) as file:
                is_there = os.pread(file.fileno(), len(own), begin) == own
        except OSError:
            is_there = False
        if not is_there:
            raise _BadListError
        return place


def _parsed(line: bytes, file: int, file_start: int, end: int) -> Place | None:
    try:
        found = _LINE.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    counts = (*found.records_of.values(), *found.notes.values(), found.seq)
    if found.kind != CHECKPOINT.name or not found.chains or min(counts) < 0:
        return None
    begin = file_start + end - len(line)
    chains = {_axes(name): entry for name, entry in found.chains.items()}
    records_of = {_axes(name): count for name, count in found.records_of.items()}
    return Place(begin, Behind(file, end, found.seq), chains, records_of, found.notes)


@cache
def _axes(name: str) -> Axes:
    return frozenset(name.split(","))


class Series:
    """Those checkpoints of a lane at which all of some chains have one: between them only these count.

    Each has more records of these chains before it than the one in front.
    """

    def __init__(self, checkpoints: Checkpoints, chains: frozenset[Axes]) -> None:
        self.checkpoints = checkpoints
        self.chains = chains
        # Records before it -> one that was met.
        self._known: dict[int, Place] = {}
        self._counts: list[int] = []

    def last(self) -> Place | None:
        place = self.checkpoints.before(self.checkpoints.end)
        while place is not None and not self._is_one(place):
            place = self.checkpoints.before(place.at)
        return place

    def settled(self, place: Place) -> bool:
        """Whether no record of idle steps in front of it reaches beyond; without such records none does."""
        return not place.notes or self.checkpoints.settled(place) == place

    def before(self, place: Place) -> Place | None:
        found = self.checkpoints.before(place.at)
        while found is not None and not self._is_one(found):
            found = self.checkpoints.before(found.at)
        return found

    def last_of(self, is_within: Callable[[Place], bool], until: Place) -> Place | None:
        """As `Checkpoints.last_of`, up to `until`."""
        if is_within(until):
            return until
        return self.checkpoints._halve(is_within, self._is_one, until.at)

    def with_records(self, count: int, guess: float) -> Place | None:
        """The one with so many records before it.

        Args:
            guess: which part of the lane's bytes probably comes before it.
        """
        found = bisect_left(self._counts, count)
        if found < len(self._counts) and self._counts[found] == count:
            return self._known[count]
        low = self._known[self._counts[found - 1]].at + 1 if found else 0
        high = self._known[self._counts[found]].at if found < len(self._counts) else self.checkpoints.end
        tried = min(max(low, int(guess * self.checkpoints.bytes) - GUESS_BYTES), high)
        while low < high:
            place = self.checkpoints.behind(tried, high)
            while place is not None and not self._is_one(place):
                place = self.checkpoints.behind(place.at + 1, high)
            own = -1 if place is None else place.records(self.chains)
            if own == count:
                return place
            if place is None or own > count:
                high = tried
                tried = (low + high) // 2
            else:
                # The guess was good: it is one of the next.
                low = tried = place.at + 1
                if own < count - MISSES_RECORDS:
                    tried = (low + high) // 2
        return None

    def _is_one(self, place: Place) -> bool:
        if place.stamp(self.chains) is None:
            return False
        count = place.records(self.chains)
        if count not in self._known:
            self._known[count] = place
            insort(self._counts, count)
        return True
