"""How the lanes of a run stood that nobody closed: as its hearts and the open ends of its logs say.

A log without a trailer looks alike where the run hung and where it went on. A heart beats on beside a lane
that stands still, so its last beat says for how long it did:

    0  ... events! | beats: still 41 s        waited, 41 s by its own clock
    1  ... events! | beats: still 41 s
    2  ... match   | last beat: still 0 s     was the first to fall silent: dead, or stopped, or held

Owns the rule of what is long: longer than a moment, and several times as long as the same lane had ever
waited there before. Each rank is told by its own clock; no two clocks are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from consensus_checker import skip
from consensus_checker.history import History, Lane, Source
from consensus_checker.stall import NS_PER_S, Stall, Standing
from tracer.record import HEART_LANE, IDLE_STEPS, MAIN_LANE, Record

# What is shorter may be a moment; how many times as long as ever before a wait must be.
LONG_NS_MIN = NS_PER_S // 2
LONG_PARTS = 3
# Where a lane has never waited before, nobody knows what is usual.
UNKNOWN_LONG_NS = 5 * NS_PER_S


@dataclass(frozen=True, slots=True)
class Beat:
    """The last sign of life of a rank.

    Attributes:
        time_ns: of the clock that the rank's records carry.
        still_ns: lane -> for how long it had written nothing.
        seqs: lane -> the number of its next record.
    """

    rank: int
    time_ns: int
    still_ns: Mapping[str, int]
    seqs: Mapping[str, int]
    file: str
    seq: int


@dataclass(slots=True)
class Pace:
    """What is usual in a lane: the longest stay in each group, and between two records."""

    waits: dict[str, int] = field(default_factory=dict)
    gap: int = 0

    @classmethod
    def of(cls, lane: Lane, meetings: frozenset[str]) -> Pace:
        """As far back as the end of the lane is read."""
        pace = cls()
        entered: dict[str, int] = {}
        before: Record | None = None
        for record in lane.ending.records():
            time = _time(record)
            if record["kind"] in meetings and time is not None:
                group = str(record.get("group", ""))
                if record.get("phase") == "enter":
                    entered[group] = time
                elif group in entered:
                    pace.waits[group] = max(pace.waits.get(group, 0), time - entered.pop(group))
            # Between idle steps that are not written out any time may go by.
            if before is not None and IDLE_STEPS.name not in (before["kind"], record["kind"]):
                pace.gap = max(pace.gap, (time or 0) - (_time(before) or 0))
            before = record
        return pace


def last_beats(lanes: Iterable[Source]) -> dict[int, Beat]:
    """The last beat of each rank whose heart has beaten."""
    beats: dict[int, Beat] = {}
    for lane in lanes:
        if lane.lane != HEART_LANE:
            continue
        last: Record | None = None
        for record in lane.records():
            if record["kind"] == "heartbeat":
                last = record
        if last is None or _time(last) is None:
            continue
        seq = int(last["seq"])
        still_ns, seqs = _by_lane(last, "still_ns"), _by_lane(last, "seqs")
        beats[lane.rank] = Beat(lane.rank, int(last["time_ns"]), still_ns, seqs, lane.file_of(seq).name, seq)
    return beats


def _by_lane(beat: Record, name: str) -> dict[str, int]:
    """A list of a beat, by the lanes that it is of; what can't be is left out."""
    lanes, values = beat.get("lanes"), beat.get(name)
    if not (isinstance(lanes, list) and isinstance(values, list) and len(lanes) == len(values)):
        return {}
    return {
        str(lane): value
        for lane, value in zip(lanes, values, strict=True)
        if type(value) is int and value >= 0
    }


def tell(history: History, beats: Mapping[int, Beat]) -> tuple[int, ...]:
    """Say of every rank that stood still, and whose log has no end, that it hung; those ranks.

    Where nobody waits for anybody, nobody is said to have hung: such a run may just have been ended. Whoever
    goes on elsewhere while others wait for it has not come, and is not dead. A log that breaks off before
    what its heart has counted does not say where its rank stood.
    """
    if not beats:
        return ()
    # How lanes ended is read from their last checkpoints on, where there is much of them.
    skip.arm(history)
    cut = {lane.rank for lane in history.lanes if not lane.is_closed}
    if not cut & set(beats):
        return ()
    stall = skip.ending(history)
    meetings = frozenset(kind.name for kind in history.kinds.values() if kind.role == "meeting")
    waiting: set[int] = set()
    for one in stall.standings:
        beat = beats.get(one.rank)
        is_told = beat is not None and one.rank in cut and is_whole(one, beat)
        if is_told and beat is not None and one.open and _has_waited(one, beat, meetings):
            waiting.add(one.rank)
    if not waiting:
        return ()
    missed = {rank for wait in stall.waits if waiting & set(wait.ranks) for rank in wait.absent}
    hung = waiting | {rank for rank in missed & cut if _stands(stall, rank, beats.get(rank), meetings)}
    for lane in history.lanes:
        if not lane.is_closed and lane.rank not in missed - hung:
            # A rank that went on, and that nobody waits for, was ended with the others.
            lane.told = "hung" if lane.rank in hung else "stopped"
    return tuple(sorted(hung))


def is_whole(one: Standing, beat: Beat) -> bool:
    """Whether a lane's log has all that its heart had counted."""
    last = -1 if one.last is None else int(one.last["seq"])
    return last + 1 >= beat.seqs.get(one.lane.name, 0)


def _has_waited(one: Standing, beat: Beat, meetings: frozenset[str]) -> bool:
    """Whether the call that a lane is in has lasted."""
    enter = one.open[-1]
    begin = _time(enter)
    pace = Pace.of(one.lane, meetings)
    usual = pace.waits.get(str(enter.get("group", "")))
    return begin is not None and beat.time_ns - begin >= _long(usual)


def _stands(stall: Stall, rank: int, beat: Beat | None, meetings: frozenset[str]) -> bool:
    """Whether a rank that others miss is alive: it stands where it is, or goes on with something else."""
    one = stall.standing(rank, MAIN_LANE)
    if beat is None or one is None or one.last is None or not is_whole(one, beat):
        return False
    pace = Pace.of(one.lane, meetings)
    if beat.still_ns.get(MAIN_LANE, 0) >= _long(pace.gap):
        return True
    last, left = _time(one.last), _last_meeting_ns(one.lane, meetings)
    return last is not None and left is not None and last - left >= _long(pace.gap)


def _last_meeting_ns(lane: Lane, meetings: frozenset[str]) -> int | None:
    times = [_time(record) for record in lane.ending.records() if record["kind"] in meetings]
    return times[-1] if times else None


def _long(usual: int | None) -> int:
    return UNKNOWN_LONG_NS if usual is None else max(LONG_NS_MIN, LONG_PARTS * usual)


def _time(record: Record) -> int | None:
    time = record.get("time_ns")
    return time if type(time) is int else None


def longest_s(beats: Mapping[int, Beat], ranks: Sequence[int], lane: str = MAIN_LANE) -> float:
    """For how long the first of these ranks has stood still."""
    return max((beats[rank].still_ns.get(lane, 0) for rank in ranks if rank in beats), default=0) / NS_PER_S
