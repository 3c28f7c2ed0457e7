"""Lanes that work for the one that decides, and that never came back: a read that hangs, a thread that ended.

Such a run may look sound: all decisions are equal, requests are served, only nothing is read ahead any more.

    1/io    state:backend=7                      in the store for 41 s, where 0.2 s was the longest before
    1/io    state:ended     0/io  state:idle     its thread has ended, and those of the others have not

Ages are told by the clock of the lane's own rank: from its last record to the last sign of life of the rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from consensus_checker.finding import Evidence, Finding, Victim
from consensus_checker.hearts import LONG_PARTS, UNKNOWN_LONG_NS, Beat, is_whole
from consensus_checker.history import History, Lane
from consensus_checker.stall import NS_PER_S, Stall, Standing
from consensus_checker.words import call_text, ranks_text
from tracer.record import BACKEND, ENDED, HEART_LANE, LANE_STATE, MAIN_LANE, Record

RULE = "dead_lane"
# A store may be slow for a while.
LONG_NS_MIN = 2 * NS_PER_S


@dataclass(frozen=True, slots=True)
class _Stuck:
    """A lane that stands where it is.

    Attributes:
        where: in words; ns: for how long; usual: the longest such stay before, None where there was none.
    """

    one: Standing
    where: str
    ns: int
    usual: int | None = None


def dead_lanes(history: History, stall: Stall, beats: Mapping[int, Beat]) -> list[Finding]:
    """One finding for each lane's name of which some rank's is stuck, or has ended alone."""
    ends = {rank: _end(history, rank, beats.get(rank)) for rank in history.ranks}
    lanes: dict[str, list[Standing]] = {}
    for one in stall.standings:
        if one.lane.name not in (MAIN_LANE, HEART_LANE):
            lanes.setdefault(one.lane.name, []).append(one)
    findings = []
    for name, every in lanes.items():
        # What a log lacks at its end may be that the lane came back.
        standings = [one for one in every if one.rank not in beats or is_whole(one, beats[one.rank])]
        usual = _usual(standings)
        stuck = [found for one in standings if (found := _stuck(one, ends[one.rank], usual)) is not None]
        if stuck:
            findings.append(_stuck_finding(history, name, standings, stuck))
        elif ended := _ended_alone(history, standings):
            findings.append(_ended_finding(history, name, ended))
    return findings


def _end(history: History, rank: int, beat: Beat | None) -> int:
    """The last sign of life of a rank by its own clock; 0 where none has a time."""
    times = [beat.time_ns] if beat is not None else []
    for lane in history.lanes_of(rank):
        trailer = lane.source.trailer or {}
        if type(time := trailer.get("time_ns")) is int:
            times.append(time)
    return max(times, default=0)


def _usual(standings: list[Standing]) -> int | None:
    """The longest stay in the store that any of these lanes has come back from."""
    longest: int | None = None
    for one in standings:
        before: Record | None = None
        for record in one.lane.ending.records():
            if before is not None and _is_backend(before):
                longest = max(longest or 0, _time(record) - _time(before))
            before = record
    return longest


def _stuck(one: Standing, end: int, usual: int | None) -> _Stuck | None:
    last = one.last
    if last is None or one.lane.outcome == "completed" or _time(last) == 0:
        return None
    state, call = one.lane.state, one.open_call
    if one.is_in_backend and state is not None:
        op = state.get("op")
        where = "the store" + (f" with op {op}" if type(op) is int else "")
    elif call is not None and not one.open and call is last:
        where = call_text(str(call["kind"]))
    else:
        return None
    ns = end - _time(last)
    needed = UNKNOWN_LONG_NS if usual is None else max(LONG_NS_MIN, LONG_PARTS * usual)
    return _Stuck(one, where, ns, usual) if ns >= needed else None


def _stuck_finding(history: History, name: str, standings: list[Standing], stuck: list[_Stuck]) -> Finding:
    ranks = tuple(sorted(one.one.rank for one in stuck))
    others = tuple(sorted({one.rank for one in standings} - set(ranks)))
    first = max(stuck, key=lambda one: one.ns)
    is_alone = bool(others) and len(others) >= len(ranks)
    usual = "" if first.usual is None else f"; the longest before was {first.usual / NS_PER_S:.1f} s"
    whose = f"the {name} lane of {ranks_text(ranks)}"
    return Finding(
        "frozen",
        15,
        RULE,
        f"{whose} never came back from {first.where}: {first.ns / NS_PER_S:.1f} s{usual}",
        "medium" if is_alone else "low",
        (
            f"still for {first.ns / NS_PER_S:.1f} s when its rank last gave a sign of life",
            *((f"{ranks_text(others)} came back",) if others else ("no rank's came back",)),
        ),
        culprit=ranks if is_alone else (),
        unknown=() if is_alone else ranks,
        victim=Victim(ranks, f"{name} lane, {first.where}", _step(first.one), None),
        evidence=tuple(_evidence(one.one, is_named=is_alone) for one in stuck),
    )


def _ended_alone(history: History, standings: list[Standing]) -> list[Standing]:
    """Lanes that ended while their rank went on, and those of others did not."""
    ended = [one for one in standings if one.lane.state is not None and one.lane.state.get("state") == ENDED]
    alive = [one for one in standings if one not in ended]
    if not ended or len(alive) < len(ended):
        return []
    return [one for one in ended if _went_on(history.lane(one.rank, MAIN_LANE), one)]


def _went_on(main: Lane | None, one: Standing) -> bool:
    if main is None or one.last is None:
        return False
    last = 0
    for record in main.ending.records():
        last = max(last, _time(record))
    return last - _time(one.last) >= LONG_NS_MIN


def _ended_finding(history: History, name: str, ended: list[Standing]) -> Finding:
    ranks = tuple(sorted(one.rank for one in ended))
    return Finding(
        "frozen",
        15,
        RULE,
        f"the {name} lane of {ranks_text(ranks)} has ended, and its rank went on without it",
        "medium",
        ("its thread said that it ends", "the same lane of the other ranks has not ended"),
        culprit=ranks,
        victim=Victim(ranks, f"{name} lane", _step(ended[0]), None),
        evidence=tuple(_evidence(one, is_named=True) for one in ended),
    )


def _step(one: Standing) -> int:
    return int(one.last["step"]) if one.last is not None else 0


def _evidence(one: Standing, *, is_named: bool) -> Evidence:
    seq = int(one.last["seq"]) if one.last is not None else 0
    return Evidence(one.lane.file_of(seq), seq, f"{'culprit' if is_named else 'unknown'} {one.rank}")


def _is_backend(record: Record) -> bool:
    return record["kind"] == LANE_STATE and record.get("state") == BACKEND


def _time(record: Record) -> int:
    time = record.get("time_ns")
    return time if type(time) is int else 0
