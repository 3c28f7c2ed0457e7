"""Ranks that ended before their time: by an error of their own, or without a word."""

from __future__ import annotations

from dataclasses import replace

from consensus_checker.evidence import last_lines, last_step, waiting_lines
from consensus_checker.finding import Alternative, Evidence, Finding, Victim
from consensus_checker.history import History
from consensus_checker.stall import Stall, stands_text
from consensus_checker.words import ranks_text
from tracer.record import MAIN_LANE

CRASHED = "crashed"
DEAD = "dead"
ALIVE, HELD = "it still runs, and can't be reached", ": it is stopped, or something holds its interpreter"


def dead(history: History, stall: Stall) -> Finding | None:
    """Ranks whose process ended without a word while all others closed their logs.

    The file of a killed process still has the room that was never written. One that was merely cut, for
    want of disk space or by a copy, has not, and says nothing about its process. Nobody is named where
    another rank ended by an error that it had outside of any call: what came after may have been killed.
    """
    outcomes = {rank: {lane.outcome for lane in history.lanes_of(rank)} for rank in history.ranks}
    gone = tuple(rank for rank, ended in outcomes.items() if ended == {None})
    closed = set().union(*(ended for rank, ended in outcomes.items() if rank not in gone))
    unsealed = {lane.rank for lane in history.lanes if lane.is_unsealed}
    if not gone or not set(gone) <= unsealed or None in closed or not closed & {"hung", "stopped", "crashed"}:
        return None
    raised = [rank for rank, ended in outcomes.items() if "crashed" in ended]
    if any(stall.wait_of(rank) is None for rank in raised):
        return None
    # Of several, whoever still waited for somebody was killed in the end like the others.
    rest = tuple(rank for rank in gone if _waited_first(stall, rank, gone, is_hung="hung" in closed))
    first = tuple(rank for rank in gone if rank not in rest)
    waits = [wait for wait in stall.waits if wait.parties & set(first) and set(wait.ranks) - set(gone)]
    victims = tuple(rank for rank in _waiting_for(stall, first) if rank not in gone)
    step = last_step(stall, first or gone)
    log = "its log" if len(first or gone) == 1 else "their logs"
    who = f"{ranks_text(first or gone)} ended in step {step}"
    # Nobody closed a log, but the others are known to have gone on.
    is_told = any(lane.told for lane in history.lanes)
    # Of a rank without any log nobody knows whether it ended first, and took this one with it.
    missing = tuple(rank for rank in range(history.world_size) if rank not in outcomes)
    here = " that is here" if missing else ""
    summary = f"{who} without closing {log}; every other rank{here} closed its own"
    if is_told:
        summary = (
            f"{ranks_text(first or gone)} said nothing more in step {step}; every other rank still lived"
        )
    return Finding(
        "dead",
        14,
        DEAD,
        summary,
        "undetermined" if not first else "low" if missing else "high" if waits and not is_told else "medium",
        (
            "its heart was the first to stop" if is_told else "unwritten room at the end of the log",
            *(("the others wait for it",) if waits else ()),
        ),
        culprit=first,
        victims=victims,
        unknown=rest,
        victim=Victim(
            tuple(rank for rank in waits[0].ranks if rank not in gone) if waits else gone,
            waits[0].where if waits else "the end of its log",
            step,
            None,
        ),
        evidence=(
            *last_lines(history, first, stall, "culprit"),
            *last_lines(history, rest, stall, "unknown"),
            *waiting_lines(
                [
                    one
                    for wait in stall.waits
                    if set(wait.ranks) & set(victims) and (one := wait.without(gone)) is not None
                ],
                "victim",
            ),
        ),
        alternatives=(
            Alternative(ALIVE + (HELD if is_told else ""), DEAD),
            *([Alternative(f"{ranks_text(missing)}, without any log, ended first", DEAD)] if missing else []),
        ),
    )


def _waited_first(stall: Stall, rank: int, gone: tuple[int, ...], *, is_hung: bool) -> bool:
    """Whether the lane that decides waited for another rank that it did not keep waiting itself.

    A single one that is gone is the one that ended, wherever it stood; unless the run hung, and was ended
    because of the one for whom it waited.
    """
    wait = stall.wait_of(rank, MAIN_LANE)
    if wait is None or not (others := set(wait.absent) - {rank}):
        return False
    if len(gone) > 1:
        return True
    return is_hung and not others & set(_waiting_for(stall, gone))


def _waiting_for(stall: Stall, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Ranks that wait for one of `ranks`, directly or through others."""
    reached = set(ranks)
    while found := {
        rank for wait in stall.waits if wait.parties & reached for rank in wait.ranks if rank not in reached
    }:
        reached |= found
    return tuple(sorted(reached - set(ranks)))


def crashed(history: History, stall: Stall) -> Finding | None:
    """Ranks that ended by an error of their own."""
    ranks = tuple(sorted({lane.rank for lane in history.lanes if lane.outcome == "crashed"}))
    if not ranks:
        return None
    if len(ranks) > 1 and len(ranks) == history.world_size:
        return _all_crashed(history, stall, ranks)
    own = _crashed_lane(history, ranks[0])
    if own is None:
        step = last_step(stall, ranks)
        evidence = last_lines(history, ranks, stall, "victim")
        where, stands = f"in step {step}", stands_text(history, stall, ranks[0])
    else:
        last = {rank: lane for rank in ranks if (lane := _crashed_lane(history, rank)) is not None}
        told = tuple(_last_line(stall, rank, lane) for rank, lane in last.items())
        evidence = (*told, *last_lines(history, [r for r in ranks if r not in last], stall, "victim"))
        found = stall.standing(ranks[0], own)
        step = int(found.last["step"]) if found is not None and found.last is not None else 0
        where = f"in {'its' if len(ranks) == 1 else 'the'} {own} lane, step {step}"
        stands = f"{own} lane of {ranks_text(ranks[:1])}"
    return Finding(
        "invariant",
        18,
        CRASHED,
        f"{ranks_text(ranks)} stopped on an error {where}",
        "medium",
        ("trailer says crashed",),
        victims=ranks,
        victim=Victim(ranks, f"crash, {stands}", step, None),
        evidence=evidence,
    )


def _crashed_lane(history: History, rank: int) -> str | None:
    """The lane that an error ended, where that is not the one that decides: what that says follows."""
    names = [lane.name for lane in history.lanes_of(rank) if lane.outcome == "crashed"]
    return next((name for name in names if name != MAIN_LANE), None)


def _last_line(stall: Stall, rank: int, lane: str) -> Evidence:
    standing = stall.standing(rank, lane)
    seq = int(standing.last["seq"]) if standing is not None and standing.last is not None else 0
    return Evidence(standing.lane.file_of(seq) if standing is not None else None, seq, f"victim {rank}")


def _all_crashed(history: History, stall: Stall, ranks: tuple[int, ...]) -> Finding:
    """Every log was closed as crashed: who raised can only be guessed from who was not in a collective."""
    outside = tuple(rank for rank in ranks if stall.wait_of(rank) is None)
    named = outside if len(outside) < len(ranks) else ()
    unknown = () if named else ranks
    text = f"{ranks_text(named)} was not in a collective" if len(named) == 1 else ""
    text = text or (f"{ranks_text(named)} were not in a collective" if named else "none stands out")
    seen = named or ranks
    step = last_step(stall, seen)
    return Finding(
        "invariant",
        18,
        CRASHED,
        f"every rank's log says crashed, and {text}",
        "low",
        ("trailers say crashed on all ranks",),
        victims=named,
        unknown=unknown,
        victim=Victim(seen, f"crash, {stands_text(history, stall, seen[0])}", step, None),
        evidence=last_lines(history, seen, stall, "victim" if named else "unknown"),
    )


def with_crash(finding: Finding, died: Finding) -> Finding:
    """The divergence with the crash it led to."""
    named = sorted({*died.culprit, *died.victims})
    return replace(
        finding,
        victims=tuple(rank for rank in named if rank not in (*finding.culprit, *finding.unknown)),
        victim=died.victim,
        consequence=(died.kind, died.code),
        evidence=(*finding.evidence, *died.evidence),
    )
