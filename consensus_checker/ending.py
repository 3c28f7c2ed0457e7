"""How a hung run ended, as findings: who did not join, who meant another call; and what a divergence led to.

A hung run without a divergence is judged from its frontier alone. With one, the stall is where the
divergence showed: the victim, and how many calls later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from consensus_checker.divergence import Divergence
from consensus_checker.evidence import last_lines, waiting_lines
from consensus_checker.finding import Finding, Victim
from consensus_checker.history import History
from consensus_checker.stall import Stall, Wait, stands_text
from consensus_checker.words import ranks_text

STALL = "stall_not_joined"
UNFINISHED = "stall_all_joined"
MISMATCH = "collective_mismatch"
FROZEN = "frozen"


def with_consequence(history: History, found: Divergence, stall: Stall) -> Finding:
    """The divergence with the hang it led to: the waits in `stall` are those that follow from it."""
    finding = found.finding
    if not stall.waits:
        return replace(finding, consequence=("frozen", 15))
    # Where the others wait is where it showed; if nobody else does, where the odd ranks themselves do.
    waits = [one for wait in stall.waits if (one := wait.without(finding.culprit)) is not None]
    waits = waits or list(stall.waits)
    suspects = set(finding.culprit)
    own = set(found.scope.ranks)
    wait = min(
        waits,
        key=lambda wait: (
            not suspects & set(wait.absent),
            not own & set(wait.ranks),
            wait.lane != found.lane,
            wait.order,
        ),
    )
    waiting = {rank for wait in waits for rank in wait.ranks}
    victim = Victim(
        wait.ranks,
        wait.where,
        int(wait.first["step"]),
        _calls_later(history, found, wait),
        _seconds_later(found, wait),
    )
    ruled_out = [("process death", f"all {len(history.ranks)} ranks closed their logs")]
    if history.world_size > len(history.ranks) or not all(lane.is_closed for lane in history.lanes):
        ruled_out = []
    if stall.completed_everywhere(wait):
        before = f"#{wait.group_seq - 1} of {wait.group} completed on every member"
        ruled_out.append(("the collective library", before))
    return replace(
        finding,
        victims=tuple(sorted({*finding.victims, *waiting} - {*finding.culprit, *finding.unknown})),
        victim=victim,
        consequence=("stall", 11),
        evidence=(*finding.evidence, *waiting_lines(waits, "victim")),
        ruled_out=tuple(ruled_out),
    )


def mismatches(stall: Stall) -> list[Finding]:
    """Calls of one group at one group_seq that were meant to be different ones."""
    findings = []
    for wait in stall.waits:
        if not wait.mismatch:
            continue
        shapes = {
            name: {rank: str(enter.get(name)) for rank, enter in wait.enters.items()}
            for name in wait.mismatch
        }
        sides: dict[str, list[int]] = {}
        for rank in wait.ranks:
            sides.setdefault(repr([shapes[name][rank] for name in wait.mismatch]), []).append(rank)
        largest = max(len(ranks) for ranks in sides.values())
        odd = [rank for ranks in sides.values() if len(ranks) < largest for rank in ranks]
        is_majority = 2 * largest > len(wait.members)
        findings.append(
            Finding(
                "mismatch",
                16,
                MISMATCH,
                f"{wait.group} #{wait.group_seq}: members came with different {', '.join(wait.mismatch)}",
                "medium" if is_majority else "undetermined",
                (f"majority {largest}/{len(wait.members)}" if is_majority else "no majority",),
                culprit=tuple(odd) if is_majority else (),
                victims=tuple(rank for rank in wait.ranks if not is_majority or rank not in odd),
                unknown=() if is_majority else wait.ranks,
                victim=Victim(wait.ranks, wait.where, int(wait.first["step"]), None),
                evidence=waiting_lines([wait], "in the call"),
            )
        )
    return findings


def stalled(history: History, stall: Stall) -> Finding:
    """A run that hung although its decisions agree as far as they go."""
    if not stall.waits:
        return _frozen(history, stall)
    stall = stall.lasting()
    if not any(wait.absent for wait in stall.waits):
        return _all_joined(stall)
    wait = next(wait for wait in stall.waits if wait.absent)
    if not set(wait.absent) & history.heard:
        return _unheard(history, stall, wait)
    # In a circle of waits the lanes that most others stand with are not the ones that went astray.
    crowd = max((one.waiting for one in stall.waits), key=len)
    parties = {node for one in stall.waits for node in (*one.waiting, *one.missed)}
    is_crowd = 2 * len(crowd) > len(parties)
    blamed = stall.blamed
    at_root = {rank for rank, _lane in blamed}
    astray = {rank for rank, _lane in (blamed - set(crowd) if is_crowd else blamed)}
    accused = astray & history.heard - history.completed
    in_circle = any(len(group) > 1 for group in stall.roots)
    if in_circle and not is_crowd:
        return _circle(history, stall, wait, at_root)
    if not accused and (lost := at_root - history.heard):
        return _unheard(history, stall, next((one for one in stall.waits if lost & _needed(one)), wait))
    if not accused:
        return _nobody_left(history, stall, wait)
    culprit = tuple(sorted(accused))
    others = at_root - history.heard
    missed = _missed(stall, culprit)
    return Finding(
        "stall",
        11,
        STALL,
        f"{ranks_text(culprit)} did not join {missed.where} ({stands_text(history, stall, culprit[0])})",
        "medium" if in_circle or others else "high",
        ("wait-for graph", *((f"{ranks_text(sorted(others))} left no whole log",) if others else ())),
        culprit=culprit,
        **_sides(history, stall, missed, culprit, others),
    )


def _frozen(history: History, stall: Stall) -> Finding:
    """Nobody waits for anybody: each rank stands alone, in a store if its log says so."""
    stuck = stall.in_backend(history.ranks)
    ranks = tuple(sorted({standing.rank for standing in stuck}))
    told = "; ".join(f"{ranks_text((rank,))}: {stands_text(history, stall, rank)}" for rank in ranks[:3])
    is_named = bool(ranks) and len(ranks) < len(history.ranks)
    named = ranks if is_named else history.ranks
    return Finding(
        "frozen",
        15,
        FROZEN,
        "the run hung, and no rank is inside a collective" + (f"; {told}" if told else ""),
        "medium" if is_named else "low",
        ("no open meeting in any log", *(("only these ask an external store",) if is_named else ())),
        culprit=named if is_named else (),
        unknown=() if is_named else named,
        evidence=last_lines(history, named, stall, "culprit" if is_named else "unknown"),
    )


def _all_joined(stall: Stall) -> Finding:
    """Everybody that was waited for had entered."""
    waiting = tuple(sorted({rank for wait in stall.waits for rank in wait.ranks}))
    wait = next((wait for wait in stall.waits if wait.gone), stall.waits[0])
    victim = Victim(wait.ranks, wait.where, int(wait.first["step"]), None)
    if wait.gone:
        return Finding(
            "undetermined",
            20,
            UNFINISHED,
            f"{ranks_text(wait.gone)} left {wait.where}, and {ranks_text(wait.ranks)} did not",
            "undetermined",
            ("the logs do not say why a call ends on some members only",),
            unknown=waiting,
            victim=victim,
            evidence=waiting_lines(stall.waits, "unknown"),
        )
    return Finding(
        "stall",
        13,
        UNFINISHED,
        f"every member entered {wait.where} and none left it",
        "medium",
        ("all joined with equal op, size and purpose",),
        victims=waiting,
        victim=victim,
        evidence=waiting_lines(stall.waits, "victim"),
    )


def _unheard(history: History, stall: Stall, wait: Wait) -> Finding:
    """Nobody who was waited for can be asked: no log, or one that ends before."""
    lost = tuple(rank for rank in sorted(_needed(wait)) if rank not in history.heard)
    return Finding(
        "undetermined",
        20,
        STALL,
        f"{ranks_text(wait.ranks)} hung in {wait.where}, and {ranks_text(lost)} {_silence(history, lost)}",
        "undetermined",
        ("the ranks that are missing left no whole log",),
        **_sides(history, stall, wait, (), set(lost)),
    )


def _circle(history: History, stall: Stall, wait: Wait, ranks: set[int]) -> Finding:
    """Each waits for another, and no side is larger."""
    places = {one.where: one.ranks for one in stall.waits if ranks & set(one.ranks)}
    stands = "; ".join(f"{ranks_text(members)} in {where}" for where, members in places.items())
    return Finding(
        "stall",
        11,
        STALL,
        f"{ranks_text(sorted(ranks))} wait for each other: {stands}",
        "undetermined",
        ("a circle of waits, in which each is cause and victim",),
        **_sides(history, stall, wait, (), ranks),
    )


def _nobody_left(history: History, stall: Stall, wait: Wait) -> Finding:
    """Those who did not come are done, or in part not heard of: then those who wait are odd, or nobody."""
    done = tuple(sorted(set(wait.absent) & history.completed))
    where = f"{ranks_text(wait.ranks)} hung in {wait.where}"
    if 2 * len(done) > len(wait.members):
        return Finding(
            "stall",
            11,
            STALL,
            f"{where}, which {ranks_text(done)}, most of its members, never entered: they completed",
            "medium",
            (f"majority {len(done)}/{len(wait.members)}",),
            culprit=wait.ranks,
            **_sides(history, stall, wait, wait.ranks, set()),
        )
    named = f"{ranks_text(done)} completed without it" if done else "nobody who is missing can be asked"
    return Finding(
        "undetermined",
        20,
        STALL,
        f"{where}, and {named}",
        "undetermined",
        ("the logs alone do not say who is right",),
        **_sides(history, stall, wait, (), {*wait.ranks, *wait.absent}),
    )


def _needed(wait: Wait) -> set[int]:
    """Ranks without which a wait does not end."""
    return {rank for rank, _lane in wait.missed}


def _missed(stall: Stall, culprit: Sequence[int]) -> Wait:
    """The earliest call that one of them did not join, with the lane that is to blame if there is one."""
    waits = [wait for wait in stall.waits if set(wait.absent) & set(culprit)]
    blamed = {node for node in stall.blamed if node[0] in culprit}
    return next((wait for wait in waits if blamed & set(wait.missed)), waits[0])


def _silence(history: History, ranks: Sequence[int]) -> str:
    """Why ranks can't be asked, in a few words."""
    if not set(ranks) & set(history.ranks):
        return "left no log"
    if any(lane.outcome == "stopped" for lane in history.lanes if lane.rank in ranks):
        return "stopped before"
    return "left no whole log"


def _sides(
    history: History, stall: Stall, wait: Wait, culprit: Sequence[int], unsure: set[int]
) -> dict[str, Any]:
    """Victims, silent and unknown ranks of a stall, with a line of evidence for each."""
    silent = tuple(sorted(unsure - set(history.ranks)))
    unknown = tuple(sorted(unsure - set(silent) - set(culprit)))
    named = {*culprit, *unknown}
    waits = [one for one in stall.waits if set(one.ranks) - named]
    victims = tuple(sorted({rank for one in waits for rank in one.ranks} - named))
    return {
        "victims": victims,
        "silent": silent,
        "unknown": unknown,
        "victim": Victim(wait.ranks, wait.where, int(wait.first["step"]), None),
        "evidence": (
            *last_lines(history, culprit, stall, "culprit"),
            *last_lines(history, silent, stall, "silent"),
            *last_lines(history, unknown, stall, "unknown"),
            *waiting_lines(
                [one for wait in waits if (one := wait.without(sorted(named))) is not None], "victim"
            ),
        ),
    }


def _seconds_later(found: Divergence, wait: Wait) -> float | None:
    """Time from the divergence to the wait, on the first victim that has both; no two clocks are compared."""
    for rank in wait.ranks:
        time_ns = wait.enters[rank].get("time_ns")
        if rank in found.times and type(time_ns) is int and time_ns > found.times[rank]:
            return round((time_ns - found.times[rank]) / 1e9, 3)
    return None


def _calls_later(history: History, found: Divergence, wait: Wait) -> int | None:
    """Lockstep records that a victim wrote from the divergence up to where it waits."""
    for rank in wait.ranks:
        lane = history.lane(rank, found.lane)
        if rank not in found.at or lane is None or wait.lanes[rank].name != found.lane:
            continue
        first, until = found.at[rank][1], int(wait.enters[rank]["seq"])
        return lane.count(found.scope.fields, first, until)
    return None
