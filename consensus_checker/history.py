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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import dropwhile, islice, takewhile
from math import prod
from pathlib import Path
from typing import Any, Protocol

from consensus_checker import headers
from consensus_checker.steps import EVERY_STEP, LATEST, OWN, Gaps, Plan, in_full
from tracer.checkpoints import Axes, Checkpoints, Place
from tracer.log import LaneLog
from tracer.record import ENDED, HEART_LANE, IDLE, LANE_STATE, MAIN_LANE, Kind, Record


class Source(Protocol):
    """One lane of one rank, as `tracer.log` reads it.

    `torn`, `trailer` and `is_unsealed` hold after a whole pass.
    """

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
    @property
    def is_unsealed(self) -> bool: ...
    @property
    def last_dropped_seq(self) -> int: ...
    @property
    def counts_before(self) -> Mapping[str, int] | None: ...
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
    is_unsealed: bool = False
    last_dropped_seq: int = 0
    counts_before: Mapping[str, int] | None = field(default_factory=dict)

    def records(self) -> Iterator[Record]:
        return iter(self.entries)

    def file_of(self, seq: int) -> Path:
        return Path(f"rank{self.rank:04d}.{self.lane}.000.jsonl")


@dataclass(slots=True)
class Facts:
    """What is known of a lane once it has been read to its end; shared by all who read it in part."""

    is_read: bool = False
    outcome: str | None = None
    dropped: tuple[str, ...] = ()
    notes: tuple[Record, ...] = ()
    state: Record | None = None
    gaps: Gaps = field(default_factory=Gaps)
    last_step: int = -1
    is_unsealed: bool = False


class Lane:
    """A lane and how it ended, which is known for good once it has been read to its end.

    A record whose common fields can't be what they stand for tears the lane, as an unreadable line
    does: nothing behind it is trusted.

    Attributes:
        notes: records that say by themselves that something is wrong.
        dropped: kinds that are missing from some point on, on this lane only.
        state: the last record of all, where that says what the lane is at.
        is_done: it did all its work: it was completed, or stopped when it had nothing to do.
        gaps: steps that are not there in full.
        plan: how they are read, once all lanes are known.
        checkpoints: where a reading of the lane may begin, if it need not begin at its first record.
        told: how it ended as somebody else knows, where its own log does not say.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.rank = source.rank
        self.name = source.lane
        self.header = source.header
        roles = {kind.name: kind.role for kind in source.kinds.values()}
        self._meetings = frozenset(name for name, role in roles.items() if role == "meeting")
        self._anomalies = frozenset(name for name, role in roles.items() if role == "anomaly")
        self._facts = Facts()
        self.plan: Plan | None = None
        self.checkpoints: Checkpoints | None = None
        self.told: str | None = None
        # Reading begins behind `_start`; what must be known of its end stands behind `_tail`.
        self._start: Place | None = None
        self._tail: Place | None = None
        # One that is close to where the lane was found to differ.
        self._equal: Place | None = None
        # Of a part that is looked at several times: its records, and how many of them may be kept.
        self._whole: Lane | None = None
        self._part: Lane | None = None
        self._kept: list[Record] = []
        self._kept_max = 0

    def records(self) -> Iterator[Record]:
        return self._keeping() if self._kept_max else self._sound(self._found())

    def _keeping(self) -> Iterator[Record]:
        """Records that were kept, and what comes behind them, of which more is kept."""
        kept = self._kept
        yield from kept
        for record in self._sound(islice(self._found(), len(kept), None)):
            if len(kept) < self._kept_max:
                kept.append(record)
            yield record

    def _found(self) -> Iterator[Record]:
        if self.plan is None:
            return self._behind(self._start)
        if self._start is None or self.checkpoints is None:
            return in_full(self._behind(None), self.plan, self.source.kinds)
        # The step that idle ones are like may stand in front of the checkpoint.
        seq = self._start.seq
        before = self.checkpoints.before(self._start.at)
        found = in_full(self._behind(before), self.plan, self.source.kinds, is_from_inside=before is not None)
        return dropwhile(lambda record: record.get("seq", LATEST) <= seq, found)

    def _behind(self, place: Place | None) -> Iterator[Record]:
        if place is None:
            return self.source.records()
        assert isinstance(self.source, LaneLog)
        return self.source.records_behind(place.behind)

    def _sound(self, found: Iterator[Record]) -> Iterator[Record]:
        """The records up to the first that can't be one; at the end it is known how the lane ended."""
        anomalies = self._anomalies
        looked_at = self._meetings | anomalies | OWN | {LANE_STATE}
        notes: list[Record] = []
        gaps = Gaps()
        record: Record = {}
        # Whoever reads a log has looked at the common fields already.
        is_sound = isinstance(self.source, LaneLog) and self.plan is None
        for record in found:
            if not is_sound and not _is_common(record):
                return self._end(None, notes, {}, gaps)
            kind = record["kind"]
            if kind in looked_at:
                if kind in anomalies:
                    notes.append(record)
                elif kind in OWN:
                    gaps.note(record)
                elif kind != LANE_STATE and not _is_meeting(record):
                    return self._end(None, notes, {}, gaps)
            yield record
        self._end(None if self.source.torn else self.source.trailer, notes, record, gaps)

    def _end(self, trailer: Mapping[str, Any] | None, notes: list[Record], last: Record, gaps: Gaps) -> None:
        facts = self._facts
        outcome, dropped = (trailer or {}).get("outcome"), (trailer or {}).get("dropped") or {}
        is_told = isinstance(outcome, str) and isinstance(dropped, Mapping)
        if self.checkpoints is not None and facts.is_read and is_told:
            # Whoever reads a part has not seen more than is known.
            return
        facts.is_read = True
        facts.outcome, facts.dropped = None, ()
        if self.plan is None:
            facts.gaps = gaps
        if self.plan is None or facts.last_step < 0:
            facts.last_step = last.get("step", -1)
        facts.notes = tuple(notes)
        facts.state = last if last.get("kind") == LANE_STATE else None
        facts.is_unsealed = self.source.is_unsealed
        if is_told:
            facts.outcome = outcome
            facts.dropped = tuple(sorted(str(name) for name in dropped))

    def _read(self) -> Facts:
        while not self._facts.is_read:
            deque(self.ending.records(), maxlen=0)
            if self._tail is not None and self._facts.last_step < 0 and self.checkpoints is not None:
                # Nothing stands there: its last record is in front of it.
                self.skip(self.checkpoints, self.checkpoints.before(self._tail.at))
        return self._facts

    def skip(self, checkpoints: Checkpoints | None, tail: Place | None) -> None:
        """From here on its end is read from `tail` on, and the rest where it is asked for; None: all of it.

        What is known of it so far is forgotten.
        """
        self.checkpoints, self._tail = checkpoints, tail
        self._facts = Facts()

    def behind(self, place: Place | None) -> Lane:
        """The same lane, read from behind a checkpoint on; from its first record if that is None."""
        other = copy(self)
        # One pass over a log at a time: each has its own.
        other.source = copy(self.source)
        other._start = place
        other._whole = self if self._whole is None else self._whole
        other._kept, other._kept_max = [], 0
        return other

    def equal_up_to(self, place: Place) -> Lane:
        """The same lane, read from behind a checkpoint on, up to which it is like the others."""
        self._equal = place
        return self.behind(place)

    @property
    def is_part(self) -> bool:
        """Whether its first records are not read."""
        return self._start is not None

    @property
    def ending(self) -> Lane:
        """The same lane, of which only so much is read as says how it ended."""
        if self._tail is None:
            return self
        part = self.behind(self._tail)
        if part.plan is EVERY_STEP:
            # At its end nothing is compared; an idle server's hours are not written out.
            part.plan = None
        return part

    def from_further_back(self, count: int) -> Lane:
        """The same lane, read from `count` checkpoints further back on; all of it, if there are fewer."""
        place = self._start
        for _ in range(count):
            if place is None or self.checkpoints is None:
                break
            place = self.checkpoints.before(place.at)
        return self.behind(place)

    def part(
        self, fields: Mapping[str, tuple[str, ...]], index: int, before: int, *, kept_max: int = 0
    ) -> Lane:
        """The same lane, read from some way in front of its record `index` of these kinds on.

        Args:
            before: of such records at least so many in front of that one.
            kept_max: records of it that are kept for whoever asks for the same part next.
        """
        if self._whole is not None:
            return self._whole.part(fields, index, before, kept_max=kept_max)
        if self.checkpoints is None:
            return self
        chains = self.chains(fields)
        place = self._equal
        if place is None or place.records(chains) > index:
            place = self.checkpoints.last_of(lambda place: place.records(chains) <= index)
        while place is not None and place.records(chains) > index - before:
            place = self.checkpoints.before(place.at)
        if place is None:
            return self
        if self._part is None or self._part._start != place:
            self._part = self.behind(place)
            self._part._kept_max = kept_max
        return self._part

    @property
    def gaps(self) -> Gaps:
        return self._read().gaps

    @property
    def cut_step(self) -> int | None:
        """Its last step, where nobody knows what came behind it."""
        return None if self.is_closed else self._facts.last_step

    @property
    def outcome(self) -> str | None:
        """What the trailer says (`completed`, `hung`, `crashed`, `stopped`); None when the lane was cut."""
        return self._read().outcome or self.told

    @property
    def is_closed(self) -> bool:
        """Whether its writer has closed it."""
        return self._read().outcome is not None

    @property
    def dropped(self) -> tuple[str, ...]:
        return self._read().dropped

    @property
    def notes(self) -> tuple[Record, ...]:
        return self._read().notes

    @property
    def state(self) -> Record | None:
        return self._read().state

    @property
    def is_idle(self) -> bool:
        """Whether its last record says that it had nothing to do."""
        return self.state is not None and self.state.get("state") in (IDLE, ENDED)

    @property
    def is_done(self) -> bool:
        return self.outcome == "completed" or (self.outcome == "stopped" and self.is_idle)

    @property
    def is_unsealed(self) -> bool:
        """Whether nobody has closed its last file: its process died, or still runs."""
        return not self.is_closed and self._read().is_unsealed

    def begin(self, fields: Mapping[str, tuple[str, ...]]) -> int | None:
        """Records of the kinds in `fields` before the first one that is read; None: unknown.

        A ring has dropped them, or reading begins behind a checkpoint.
        """
        if self._start is not None:
            return self._start.records(self.chains(fields))
        counts = self.source.counts_before
        if counts is None:
            return None
        return sum(count for kind, count in counts.items() if kind in fields)

    def chains(self, fields: Iterable[str]) -> frozenset[Axes]:
        """The axes along which kinds agree, as a checkpoint tells its chains apart."""
        kinds = self.source.kinds
        return frozenset(frozenset(kinds[name].agree) for name in fields if name in kinds)

    def count(self, fields: Mapping[str, tuple[str, ...]], first: int, until: int) -> int:
        """Records of the kinds in `fields` from record `first` on and in front of record `until`."""
        if self.checkpoints is None or self._start is not None:
            found = (record for record in self.records() if first <= record["seq"] < until)
            return sum(1 for record in found if record["kind"] in fields)
        return self._index(fields, until) - self._index(fields, first)

    def _index(self, fields: Mapping[str, tuple[str, ...]], seq: int) -> int:
        """Records of the kinds in `fields` in front of record `seq`; counted from a checkpoint on."""
        assert self.checkpoints is not None
        part = self.behind(self.checkpoints.last_of(lambda place: place.seq < seq))
        found = takewhile(lambda record: record["seq"] < seq, part.records())
        return (part.begin(fields) or 0) + sum(1 for record in found if record["kind"] in fields)

    def file_of(self, seq: int) -> str:
        """Name of the segment that holds `seq`."""
        return self.source.file_of(seq).name


def _is_common(record: Record) -> bool:
    """Whether the fields that every record has are of their types."""
    get = record.get
    return (
        type(get("step")) is int
        and type(get("seq")) is int
        and type(get("kind")) is str
        and type(get("phase", "")) is str
    )


def _is_meeting(record: Record) -> bool:
    """Whether the fields that place a meeting are a name, a number and a rank, where they are there."""
    return (
        type(record.get("group", "")) is str
        and type(record.get("group_seq", 0)) is int
        and type(record.get("op", "")) is str
        and (record.get("peer") is None or type(record["peer"]) is int)
    )


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
        unfit: ranks with a log that can't be compared, because of what its header says.
        doubts: what the headers contradict each other in. Any of them forbids `consistent`.
        config_sides: ranks by their `config_digest`, most of them first; one entry where all are alike.
    """

    lanes: tuple[Lane, ...]
    others: tuple[Lane, ...]
    world_size: int
    kinds: Mapping[str, Kind]
    places: Mapping[int, Mapping[str, int]]
    scopes: tuple[Scope, ...]
    unfit: tuple[int, ...] = ()
    doubts: tuple[str, ...] = ()
    config_sides: tuple[tuple[int, ...], ...] = ()
    by_place: Mapping[tuple[int, str], Lane] = field(default_factory=dict)
    # What `context.look` has found; it is asked again for the screen.
    looked: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, source: Run | Iterable[Source]) -> History:
        """The run with the most ranks among the lanes of `source`; equal runs go by id."""
        given = source if isinstance(source, Iterable) else source.lanes
        unreadable = () if isinstance(source, Iterable) else getattr(source, "unreadable", ())
        sound, faults = headers.sound(lane for lane in given if lane.lane != HEART_LANE)
        doubts = [*unreadable, *(f"rank {rank}: {text}" for rank, text in faults)]
        unfit = {rank for rank, _ in faults}
        runs: dict[tuple[str, int], list[Lane]] = {}
        for lane in map(Lane, sound):
            run_id = (str(lane.header.get("run_id", "")), int(lane.header.get("attempt", 0)))
            runs.setdefault(run_id, []).append(lane)
        if not runs:
            return cls((), (), 0, {}, {}, (), tuple(sorted(unfit)), tuple(doubts))
        sizes_of = {run_id: len({lane.rank for lane in found}) for run_id, found in runs.items()}
        chosen = min(runs, key=lambda run_id: (-sizes_of[run_id], run_id))
        if list(sizes_of.values()).count(sizes_of[chosen]) > 1:
            doubts.append(f"another run with as many ranks lies in the same place; run {chosen[0]} is judged")
        others = [lane for run_id, found in runs.items() if run_id != chosen for lane in found]
        agreed = headers.agree(sorted(runs[chosen], key=_order))
        lanes = agreed.fit
        places = _places(lanes)
        compared = {name: kind for name, kind in agreed.kinds.items() if name not in agreed.disputed}
        return cls(
            tuple(lanes),
            tuple(sorted(others, key=_order)),
            int(lanes[0].header.get("world_size", 1)),
            agreed.kinds,
            places,
            _scopes(compared, places, lanes[0].header.get("sizes", {})),
            tuple(sorted({*unfit, *agreed.unfit} - {lane.rank for lane in lanes})),
            (*doubts, *agreed.doubts),
            agreed.config_sides,
            # Of two lanes at one place the first is the one that is compared.
            {(lane.rank, lane.name): lane for lane in reversed(lanes)},
        )

    def without(self, dropped: Mapping[str, Sequence[int]]) -> History:
        """The same history, in which a kind is compared in no scope that a rank which dropped it is in."""
        if not dropped:
            return self
        scopes = []
        for scope in self.scopes:
            out = {kind for kind, ranks in dropped.items() if set(ranks) & set(scope.ranks)}
            fields = {name: compared for name, compared in scope.fields.items() if name not in out}
            scopes.append(replace(scope, fields=fields))
        return replace(self, scopes=tuple(scopes))

    def align_steps(self) -> bool:
        """Have main lanes read so that steps which some have not in full can be compared; whether any has.

        Reads every main lane to its end.
        """
        is_any = False
        for ranks in self._partners():
            lanes = [lane for rank in ranks if (lane := self.lane(rank, MAIN_LANE)) is not None]
            if all(lane.gaps.is_empty for lane in lanes):
                continue
            plan = Plan.of([(lane.gaps, lane.cut_step) for lane in lanes])
            for lane in lanes:
                lane.plan = plan
            is_any = True
        return is_any

    def _partners(self) -> list[set[int]]:
        """Ranks that are compared with each other, in one scope or over several."""
        found: list[set[int]] = []
        for scope in self.scopes:
            ranks = set(scope.ranks)
            apart = [other for other in found if not other & ranks]
            found = [*apart, ranks.union(*(other for other in found if other & ranks))]
        return found

    @property
    def throttled(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Rank -> (step, one in so many windows written behind it), where recording was held back."""
        return {
            lane.rank: tuple(lane.gaps.throttled)
            for lane in self.lanes
            if lane.name == MAIN_LANE and lane.gaps.throttled
        }

    @property
    def dropped(self) -> dict[str, tuple[int, ...]]:
        """Kind -> ranks whose trailer says that it is missing from some point on. Reads every lane."""
        found: dict[str, set[int]] = {}
        for lane in self.lanes:
            for name in lane.dropped:
                found.setdefault(name, set()).add(lane.rank)
        return {name: tuple(sorted(found[name])) for name in sorted(found)}

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks with at least one lane here."""
        return tuple(sorted({lane.rank for lane in self.lanes}))

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks without any log."""
        have = {*self.ranks, *self.unfit}
        return tuple(rank for rank in range(self.world_size) if rank not in have)

    @property
    def completed(self) -> frozenset[int]:
        """Ranks all of whose lanes did their work."""
        return self._all_lanes(lambda lane: lane.is_done)

    @property
    def heard(self) -> frozenset[int]:
        """Ranks whose logs say to their end where they got to: neither absent, nor cut, nor stopped.

        One that was stopped while it was idle says so too.
        """
        meetings = {kind.name for kind in self.kinds.values() if kind.role == "meeting"}
        lost = {lane.rank for lane in self.lanes if meetings & set(lane.dropped)}
        return self._all_lanes(lambda lane: lane.is_done or lane.outcome in ("hung", "crashed")) - lost

    def _all_lanes(self, is_so: Callable[[Lane], bool]) -> frozenset[int]:
        """Ranks of which that is true for every lane."""
        return frozenset(self.ranks) - {lane.rank for lane in self.lanes if not is_so(lane)}

    @property
    def lane_names(self) -> tuple[str, ...]:
        """Names of all lanes, the one that decides in front."""
        return tuple(sorted({lane.name for lane in self.lanes}, key=lambda name: (name != MAIN_LANE, name)))

    def lane(self, rank: int, name: str) -> Lane | None:
        return self.by_place.get((rank, name))

    def with_lanes(self, lanes: Iterable[Lane]) -> History:
        """The same history, in which these lanes take the places of those that they are of."""
        by_place = {**self.by_place, **{(lane.rank, lane.name): lane for lane in lanes}}
        replaced = {id(old): by_place[place] for place, old in self.by_place.items()}
        return replace(
            self, lanes=tuple(replaced.get(id(lane), lane) for lane in self.lanes), by_place=by_place
        )

    def lanes_of(self, rank: int) -> tuple[Lane, ...]:
        return tuple(lane for lane in self.lanes if lane.rank == rank)

    def scope(self, name: str) -> Scope | None:
        return next((scope for scope in self.scopes if scope.name == name), None)


def _order(lane: Lane) -> tuple[int, bool, str]:
    """By rank; of one rank, the lane that decides in front."""
    return lane.rank, lane.name != MAIN_LANE, lane.name


def is_lockstep(record: Record, scope: Scope) -> bool:
    return record["kind"] in scope.fields


def _places(lanes: Sequence[Lane]) -> dict[int, Mapping[str, int]]:
    """Coordinates of every rank; those of a missing rank follow from the sizes, in rank order."""
    header = lanes[0].header
    sizes: Mapping[str, int] = header.get("sizes", {})
    places: dict[int, Mapping[str, int]] = {}
    if sizes and prod(sizes.values()) == header.get("world_size"):
        places = {rank: headers.numbered(rank, sizes) for rank in range(prod(sizes.values()))}
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
