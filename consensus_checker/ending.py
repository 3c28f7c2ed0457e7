"""How a run ended, as findings: a stall, a crash, a wrong page; and a stall as a divergence's end.

A hung run without a divergence is judged from its frontier alone. With one, the stall is where the
divergence showed: the victim, and how many calls later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from consensus_checker.divergence import Divergence
from consensus_checker.finding import Evidence, Finding, Victim
from consensus_checker.history import History, Lane, is_lockstep
from consensus_checker.stall import Stall, Wait, stands_text
from consensus_checker.words import ranks_text
from tracer.record import Record

STALL = "stall_not_joined"
UNFINISHED = "stall_all_joined"
MISMATCH = "collective_mismatch"
FROZEN = "frozen"
CRASHED = "crashed"


def with_consequence(history: History, found: Divergence, stall: Stall) -> Finding:
    """The divergence with the hang it led to."""
    finding = found.finding
    if not stall.waits:
        return replace(finding, consequence=("stall", 11))
    # Where the others wait is where it showed; if nobody else does, where the odd ranks themselves do.
    waits = [one for wait in stall.waits if (one := wait.without(finding.culprit)) is not None]
    waits = waits or list(stall.waits)
    suspects = set(finding.culprit)
    wait = min(waits, key=lambda wait: (not suspects & set(wait.absent), wait.order))
    waiting = {rank for wait in waits for rank in wait.ranks}
    victim = Victim(wait.ranks, wait.where, int(wait.first["step"]), _calls_later(history, found, wait))
    ruled_out = [("process death", f"all {len(history.ranks)} ranks closed their logs")]
    if history.world_size > len(history.ranks) or any(lane.outcome is None for lane in history.lanes):
        ruled_out = []
    if stall.completed_everywhere(wait):
        before = f"#{wait.group_seq - 1} of {wait.group} completed on every member"
        ruled_out.append(("the collective library", before))
    return replace(
        finding,
        victims=tuple(sorted(waiting - {*finding.culprit, *finding.unknown})),
        victim=victim,
        consequence=("stall", 11),
        evidence=(*finding.evidence, *_waiting(waits, "victim")),
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
                evidence=_waiting([wait], "in the call"),
            )
        )
    return findings


def stalled(history: History, stall: Stall) -> Finding:
    """A run that hung although its decisions agree as far as they go."""
    if not stall.waits:
        return Finding(
            "frozen",
            15,
            FROZEN,
            "the run hung, and no rank is inside a collective",
            "low",
            ("no open meeting in any log",),
            unknown=history.ranks,
            evidence=_last_lines(history, history.ranks, stall, "unknown"),
        )
    absent = tuple(sorted({rank for wait in stall.waits for rank in wait.absent}))
    waiting = tuple(sorted({rank for wait in stall.waits for rank in wait.ranks}))
    wait = stall.waits[0]
    victim = Victim(wait.ranks, wait.where, int(wait.first["step"]), None)
    if not absent:
        return Finding(
            "stall",
            13,
            UNFINISHED,
            f"every member entered {wait.where} and none left it",
            "medium",
            ("all joined with equal op, size and purpose",),
            victims=waiting,
            victim=victim,
            evidence=_waiting(stall.waits, "victim"),
        )
    at_root = {rank for group in stall.roots for rank in group} & set(absent)
    # In a circle of waits the ranks that most others stand with are not the ones that went astray.
    crowd = max((wait.ranks for wait in stall.waits), key=len)
    accused = sorted(at_root - set(crowd)) if 2 * len(crowd) > history.world_size else sorted(at_root)
    in_circle = any(len(group) > 1 for group in stall.roots)
    silent = tuple(rank for rank in accused if rank not in history.ranks)
    cut = {lane.rank for lane in history.lanes if lane.outcome is None}
    culprit = tuple(rank for rank in accused if rank in history.ranks and rank not in cut)
    if in_circle and 2 * len(crowd) <= history.world_size:
        culprit = ()
    named = culprit or silent
    unknown = () if culprit else tuple(rank for rank in (accused or absent) if rank not in silent)
    who = ranks_text(named or unknown)
    standing = f" ({stands_text(history, stall, (named or unknown)[0])})" if named or unknown else ""
    # A log that was cut says where its rank was, not where it got to.
    verb = "had not joined" if not named and cut & set(unknown) else "did not join"
    return Finding(
        "stall",
        11,
        STALL,
        f"{who} {verb} {wait.where}{standing}",
        "undetermined" if not culprit else "medium" if in_circle else "high",
        (
            "wait-for graph"
            if culprit
            else "the ranks that are missing left no whole log or wait in a circle",
        ),
        culprit=culprit,
        victims=tuple(rank for rank in waiting if rank not in (*culprit, *unknown)),
        silent=silent,
        unknown=unknown,
        victim=victim,
        evidence=(
            *_last_lines(history, culprit, stall, "culprit"),
            *_last_lines(history, silent, stall, "silent"),
            *_last_lines(history, unknown, stall, "unknown"),
            *_waiting([wait for wait in stall.waits if set(wait.ranks) - {*culprit, *unknown}], "victim"),
        ),
    )


def anomaly(lane: Lane, note: Record) -> Finding:
    """A note that says by itself that something is wrong, such as a page with another page's bytes."""
    seq = int(note["seq"])
    details = ", ".join(f"{name} {value}" for name, value in note.items() if name in ("page_index", "slot"))
    return Finding(
        "invariant",
        18,
        str(note["kind"]),
        f"rank {lane.rank} noted {note['kind']} in step {note['step']}" + (f": {details}" if details else ""),
        "high",
        ("noted by the rank itself",),
        culprit=(lane.rank,),
        victim=Victim((lane.rank,), str(note["kind"]), int(note["step"]), None),
        evidence=(Evidence(lane.file_of(seq), seq, f"culprit {lane.rank}"),),
    )


def crashed(history: History, stall: Stall) -> Finding | None:
    """Ranks that ended by an error of their own."""
    ranks = tuple(sorted({lane.rank for lane in history.lanes if lane.outcome == "crashed"}))
    if not ranks:
        return None
    # A run may close every log as crashed; those that were waiting for the others did not raise.
    ranks = tuple(rank for rank in ranks if stall.wait_of(rank) is None) or ranks
    last = [standing.last for standing in stall.standings if standing.rank in ranks and standing.last]
    step = min((int(record["step"]) for record in last), default=0)
    return Finding(
        "invariant",
        18,
        CRASHED,
        f"{ranks_text(ranks)} stopped on an error in step {step}",
        "medium",
        ("trailer says crashed",),
        victims=ranks,
        victim=Victim(ranks, f"crash, {stands_text(history, stall, ranks[0])}", step, None),
        evidence=_last_lines(history, ranks, stall, "victim"),
    )


def _calls_later(history: History, found: Divergence, wait: Wait) -> int | None:
    """Lockstep records that a victim wrote from the divergence up to where it waits."""
    for rank in wait.ranks:
        lane = history.lane(rank, found.lane)
        if rank not in found.at or lane is None or wait.lanes[rank].name != found.lane:
            continue
        first, until = found.at[rank][1], int(wait.enters[rank]["seq"])
        return sum(
            1
            for record in lane.records()
            if first <= record["seq"] < until and is_lockstep(record, found.scope)
        )
    return None


def _waiting(waits: Sequence[Wait], role: str) -> tuple[Evidence, ...]:
    entries: dict[int, Evidence] = {}
    for wait in waits:
        for rank in wait.ranks:
            seq = int(wait.enters[rank]["seq"])
            entries.setdefault(rank, Evidence(wait.lanes[rank].file_of(seq), seq, f"{role} {rank}"))
    return tuple(entries[rank] for rank in sorted(entries))


def _last_lines(history: History, ranks: Sequence[int], stall: Stall, role: str) -> tuple[Evidence, ...]:
    entries = []
    for rank in ranks:
        standing = next((one for one in stall.standings if one.rank == rank and one.last is not None), None)
        if standing is None or standing.last is None:
            entries.append(Evidence(None, None, f"{role} {rank}: no log of this rank"))
        else:
            seq = int(standing.last["seq"])
            entries.append(Evidence(standing.lane.file_of(seq), seq, f"{role} {rank}"))
    return tuple(entries)


def with_crash(finding: Finding, died: Finding) -> Finding:
    """The divergence with the crash it led to."""
    return replace(
        finding,
        victims=tuple(rank for rank in died.victims if rank not in finding.culprit),
        victim=died.victim,
        consequence=(died.kind, died.code),
        evidence=(*finding.evidence, *died.evidence),
    )


def silent_evidence(ranks: Sequence[int]) -> tuple[Evidence, ...]:
    return tuple(Evidence(None, None, f"silent {rank}: no log of this rank") for rank in ranks)
