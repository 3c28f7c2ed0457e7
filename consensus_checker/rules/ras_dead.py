"""Rule `ras_dead`: NCCL's monitor has lost a process.

Equation, for a member m in the newest poll q, and a poll p at least 10 s before:

    not dead(m, q)      and      not (silent(m, p) and silent(m, q))

    10:00:00   missing rank 3: unresponsive
    10:01:05   missing rank 3: unresponsive, considered dead      a minute without contact, dead for good

A process that is stopped, or whose machine is busy, is unresponsive at first. That a member is missing in one
poll alone says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from consensus_checker.claim import Claim
from consensus_checker.finding import Alternative, Evidence, Finding
from consensus_checker.polled import Looks, Process, global_ranks, looks, members_text, named
from consensus_checker.said import lines_of
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier, Line

RULE = "ras_dead"
SILENT = ("unresponsive", "missing")


def find(dossier: Dossier) -> list[Claim]:
    numbers = global_ranks(dossier)
    claims: dict[tuple[int, ...], Claim] = {}
    for look in looks(dossier):
        claim = _judged(dossier, look, numbers)
        if claim is not None:
            # The same process is missing in each of its communicators.
            claims.setdefault((*claim.finding.culprit, *claim.finding.unknown), claim)
    return [*claims.values(), *_events(dossier)]


def _judged(dossier: Dossier, look: Looks, numbers: Mapping[Process, int]) -> Claim | None:
    poll = look.newest
    dead = tuple(rank for rank, own in sorted(poll.states.items()) if "dead" in own)
    silent = tuple(rank for rank, own in sorted(poll.states.items()) if set(own) & set(SILENT))
    before = look.earlier.states if look.earlier is not None else {}
    stayed = tuple(rank for rank in silent if set(before.get(rank, ())) & set(SILENT))
    lost = dead or stayed or silent
    if not lost:
        return None
    ranks = named(poll, lost, numbers)
    whom = ranks_text(ranks) if ranks else members_text(poll, lost)
    # Where half of a job does not answer, the network between the halves may be it.
    is_named = bool(ranks) and 2 * len(lost) < poll.size
    role = "culprit" if is_named else "unknown"
    file, record = poll.at
    state = "is dead, says NCCL's monitor" if dead else "does not answer NCCL's monitor"
    finding = Finding(
        "dead",
        14,
        RULE,
        f"{whom} {state}, in communicator {poll.communicator}",
        ("high" if dead else "medium") if is_named else "undetermined",
        basis=("considered dead" if dead else f"no answer in {'two polls' if stayed else 'one poll'}",),
        culprit=ranks if is_named else (),
        unknown=() if is_named else ranks,
        evidence=(
            *(_entry(dossier, file, record, f"{role} {rank}") for rank in ranks),
            *(() if ranks else (_entry(dossier, file, record, "a member without an answer"),)),
        ),
        alternatives=() if dead else (Alternative("stopped, or its machine too busy to answer", RULE),),
    )
    return Claim(finding, needs_second_look=not dead and not stayed)


def _events(dossier: Dossier) -> list[Claim]:
    """What the monitor's own events say; a process is named by host and pid there."""
    lost: list[Line] = [
        line for line in lines_of(dossier, ("ras_event",)) if "DEAD" in str(line.fields["event"]).upper()
    ]
    if not lost:
        return []
    ranks = tuple(sorted({line.who.rank for line in lost if line.who.rank is not None}))
    first = lost[0]
    whom = ranks_text(ranks) if ranks else f"pid {first.who.pid} on {first.who.host or '?'}"
    finding = Finding(
        "dead",
        14,
        RULE,
        f"{whom} is dead, says an event of NCCL's monitor",
        "high" if ranks else "medium",
        basis=("an event of the monitor",),
        culprit=ranks,
        evidence=tuple(
            _entry(dossier, line.at.file, line.at.record, f"culprit {line.who.rank}")
            for line in lost
            if line.who.rank is not None
        )
        or (_entry(dossier, first.at.file, first.at.record, "a process that is dead"),),
    )
    return [Claim(finding)]


def _entry(dossier: Dossier, file: int, record: int, supports: str) -> Evidence:
    return Evidence(dossier.files[file].name, record, supports)
