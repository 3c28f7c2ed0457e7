"""Flight recorder dumps of all ranks, brought together group by group: who stands where in it.

    dumps of a rank      -> its newest place in each group; whether two looks show it at two places
    groups of all ranks  -> one by name, description and members; by name and description where a dump has no
                            members, as gloo's have none

Places, no verdict. Looks at one rank have no order but what they show: further is later. Dumps of one rank
that contradict each other are of two processes or two jobs, and tell nothing of either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tracer.importers.dossier import Dossier, Dump, Group, Progress
from tracer.importers.recorded_calls import RecordedCalls

GLOO = "gloo"
# A completed call of these says nothing of ranks that have only to give, or only to take.
ONE_SIDED = ("broadcast", "reduce", "gather", "scatter", "send", "recv", "_broadcast", "coalesced")
TWO_SIDED = ("reduce_scatter",)
# From inner to outer; a group whose description has none of these words stands between.
DEPTHS = (
    (("tensor_and", "tensor_model_pipeline", "tensor_and_data"), 3),
    (("default_pg", "world"), 6),
    (("pipeline", "pp", "embedding"), 5),
    (("expert_data", "data_parallel", "dp"), 4),
    (("expert", "ep", "moe"), 2),
    (("context", "cp"), 1),
    (("tensor", "tp"), 0),
)
DEPTH_UNKNOWN = 3


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank stands in one group.

    Attributes:
        enqueued, completed: collectives; None where its dump does not tell them.
        stood: two looks have it at the same place here.
        thread: of its newest call in the group, empty where not recorded.
    """

    rank: int
    progress: Progress
    dump: Dump
    enqueued: int | None
    completed: int | None
    stood: bool = False
    thread: str = ""

    @property
    def is_gloo(self) -> bool:
        return self.dump.backend == GLOO

    def call(self, seq: int) -> str:
        """The op of a call, empty where the ring does not hold it."""
        own = self.progress.calls.get(seq)
        return own.op if own is not None else ""

    def has_timed_out(self, seq: int) -> bool:
        """Whether NCCL's watchdog has let go of a call that never ended."""
        own = self.progress.calls.get(seq)
        return own is not None and own.is_retired and own.state != "completed" and not self.is_gloo

    @property
    def ended_surely(self) -> int:
        """The newest collective that has ended here, -1 for none.

        Gloo says of a call that failed that it ended. Only what was followed by another call did surely.
        """
        if self.enqueued is None or self.completed is None:
            return -1
        return self.completed - (self.is_gloo and self.completed >= self.enqueued)

    def proven(self) -> int:
        """The newest collective that all members must have joined, since it ended here; -1 for none."""
        seq = self.ended_surely
        while seq >= 0 and (op := self.call(seq)):
            if not op.startswith(ONE_SIDED) or op.startswith(TWO_SIDED):
                break
            seq -= 1
        return seq


@dataclass(frozen=True, slots=True)
class RankGroup:
    """One process group of the job.

    Attributes:
        places: rank -> its place, of those whose dump knows the group.
        unheard: members without a dump, or with dumps that contradict each other.
    """

    group: Group
    places: Mapping[int, Place]
    unheard: tuple[int, ...]

    @property
    def label(self) -> str:
        """As it can be found in a dump: its name and what it is for."""
        name, description = self.group.name, self.group.description
        return f"{name} ({description})" if name and description else name or description or "?"

    @property
    def depth(self) -> tuple[int, int]:
        """Sorts inner groups before outer ones."""
        words = self.group.description.lower()
        parts = words.replace("-", "_").split("_")
        depth = DEPTH_UNKNOWN
        for names, own in DEPTHS:
            if any(name in words if len(name) > 2 else name in parts for name in names):
                depth = own
                break
        return depth, len(self.group.members or self.places)


@dataclass(frozen=True, slots=True)
class Recorded:
    """All groups of all dumps.

    Attributes:
        moved: rank -> why two looks show that it goes on.
        confused: rank -> why its dumps can't be of one process.
        ranks: all with a dump that can be used.
    """

    groups: tuple[RankGroup, ...]
    moved: Mapping[int, str]
    confused: Mapping[int, str]
    ranks: tuple[int, ...]


Key = tuple[str, str, tuple[int, ...] | None]


@dataclass(slots=True)
class _Looks:
    """One rank's dumps."""

    rank: int
    dumps: list[Dump]
    # group's name and description -> the furthest place, and the dump that has it
    newest: dict[Key, tuple[Progress, Dump]] = field(default_factory=dict)
    stood: set[Key] = field(default_factory=set)
    moved: set[Key] = field(default_factory=set)


def recorded(dossier: Dossier) -> Recorded:
    """Bring the dumps together."""
    by_rank: dict[int, list[Dump]] = {}
    for dump in dossier.dumps:
        if dump.who.rank is not None:
            by_rank.setdefault(dump.who.rank, []).append(dump)
    confused = {rank: why for rank, dumps in by_rank.items() if (why := _contradiction(rank, dumps))}
    looks = [_looks(rank, by_rank[rank]) for rank in sorted(by_rank) if rank not in confused]
    members = _members(looks)
    found: dict[Key, dict[int, Place]] = {}
    uses_p2p = {
        _whole(key, members, own.rank)
        for own in looks
        for key, (progress, _) in own.newest.items()
        if progress.p2p
    }
    for own in looks:
        for key, (progress, dump) in own.newest.items():
            whole = _whole(key, members, own.rank)
            place = _place(own, key, progress, dump, is_mixed=whole in uses_p2p)
            found.setdefault(whole, {})[own.rank] = place
    heard = {own.rank for own in looks}
    groups = [
        RankGroup(
            Group(*key),
            {rank: found[key][rank] for rank in sorted(found[key])},
            tuple(sorted(rank for rank in key[2] or () if rank not in heard)),
        )
        for key in found
    ]
    groups.sort(key=lambda one: (one.depth, one.group.name, one.group.members or ()))
    moved = {own.rank: "its looks show progress" for own in looks if own.moved}
    return Recorded(tuple(groups), moved, confused, tuple(sorted(heard)))


def _key(progress: Progress) -> Key:
    return progress.group.name, progress.group.description, progress.group.members


def _contradiction(rank: int, dumps: Sequence[Dump]) -> str:
    """Why dumps of one rank are not of one process, or not of it; empty where they may be."""
    for one in dumps:
        for progress in one.groups:
            members = progress.group.members
            if members and rank not in members and (progress.calls or progress.p2p):
                return f"its dump has calls of group {progress.group.name}, which it is not in"
    # Neighbours: of many looks at one process the next is enough.
    for one, two in pairwise(dumps):
        if one.backend != two.backend:
            continue
        own = {_key(progress)[:2]: progress for progress in one.groups}
        further: set[bool] = set()
        for other in two.groups:
            mine = own.get(_key(other)[:2])
            if mine is None:
                continue
            if mine.group.members and other.group.members and mine.group.members != other.group.members:
                return f"its dumps have other members in group {other.group.name}"
            if mine.enqueued != other.enqueued and min(mine.enqueued, other.enqueued) >= 0:
                further.add(mine.enqueued > other.enqueued)
        threads, others = _threads(one), _threads(two)
        if len(further) > 1:
            return "of two of its dumps each is further in some group"
        if further and threads and others and not threads & others:
            return "its dumps have no thread in common"
    return ""


def _threads(dump: Dump) -> set[str]:
    return {
        thread
        for progress in dump.groups
        if isinstance(progress.calls, RecordedCalls)
        for thread, _ in progress.calls.table.callers
        if thread
    }


def _looks(rank: int, dumps: list[Dump]) -> _Looks:
    looks = _Looks(rank, dumps)
    for dump in dumps:
        for progress in dump.groups:
            key = _key(progress)
            known = looks.newest.get(key)
            if known is None or _reached(progress) > _reached(known[0]):
                looks.newest[key] = (progress, dump)
    # Equal dumps in two forms are most likely one that was converted: no second look.
    forms: dict[tuple[str, str], list[Dump]] = {}
    for dump in dumps:
        forms.setdefault((dump.form, dump.backend), []).append(dump)
    for own in forms.values():
        if len(own) > 1:
            own = sorted(own, key=_total)
            before = {_key(progress): progress for progress in own[-2].groups}
            for progress in own[-1].groups:
                key = _key(progress)
                if key in before:
                    is_same = _reached(progress) == _reached(before[key])
                    (looks.stood if is_same else looks.moved).add(key)
    if looks.moved:
        # A call of a thread that makes others meanwhile is not what the rank stands in.
        looks.moved |= {key for key in looks.stood if _is_same_thread(looks, key)}
        looks.stood -= looks.moved
    return looks


def _is_same_thread(looks: _Looks, key: Key) -> bool:
    own = _thread(looks.newest[key][0])
    moving = {_thread(looks.newest[other][0]) for other in looks.moved}
    return not own or own in moving or "" in moving


def _reached(progress: Progress) -> tuple[int, int, int]:
    return progress.enqueued, progress.completed, max((call.seq for call in progress.p2p), default=-1)


def _total(dump: Dump) -> tuple[int, int]:
    return sum(max(0, one.enqueued) for one in dump.groups), sum(max(0, one.completed) for one in dump.groups)


def _thread(progress: Progress) -> str:
    call = progress.calls.get(progress.last)
    return call.thread if call is not None else ""


def _members(looks: Sequence[_Looks]) -> dict[tuple[str, str], set[tuple[int, ...]]]:
    """What members dumps give to each name and description."""
    members: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for own in looks:
        for name, description, ranks in own.newest:
            if ranks:
                members.setdefault((name, description), set()).add(ranks)
    return members


def _whole(key: Key, members: Mapping[tuple[str, str], set[tuple[int, ...]]], rank: int) -> Key:
    """The group's key; of one whose dump has no members, that of the only one it can be."""
    if key[2]:
        return key
    able = [ranks for ranks in members.get(key[:2], ()) if rank in ranks]
    return (key[0], key[1], able[0]) if len(able) == 1 else key


def _place(own: _Looks, key: Key, progress: Progress, dump: Dump, *, is_mixed: bool) -> Place:
    enqueued: int | None = progress.enqueued
    completed: int | None = progress.completed
    if is_mixed:
        # Its status counts sends and receives with the rest: only calls in the ring are collectives.
        enqueued = progress.last
        completed = min(progress.completed, progress.last)
    if enqueued is not None and enqueued < 0:
        enqueued = completed = None
    return Place(
        rank=own.rank,
        progress=progress,
        dump=dump,
        enqueued=enqueued,
        completed=completed,
        stood=key in own.stood,
        thread=_thread(progress),
    )
