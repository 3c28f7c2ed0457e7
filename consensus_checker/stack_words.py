"""What rules about stacks say of a rank, and which line of a dump proves it."""

from __future__ import annotations

from collections.abc import Iterable

from consensus_checker.finding import Evidence
from consensus_checker.stack_looks import Doing, Scope, Stand
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier, Stack

DOING: dict[Doing, str] = {
    "idle": "is where it waits for work",
    "storage": "is in a call to the external store",
    "device": "waits for the device",
    "gil": "waits for the interpreter (GIL)",
    "lock": "waits for a lock",
    "helper": "waits for a queue or another thread",
    "running": "runs in",
    "unknown": "stands in",
}


def doing_text(stand: Stand) -> str:
    """`waits in all_reduce (writing_check, hiradix_cache.py:700)`."""
    place = stand.place
    if stand.doing in ("running", "unknown"):
        return f"{DOING[stand.doing]} {place.where}"
    words = f"waits in {place.call}" if stand.is_waiting else DOING[stand.doing]
    return f"{words} ({place.where})"


def crowd_text(stands: Iterable[Stand]) -> str:
    """`ranks 0-2 wait in broadcast (recv_requests, scheduler.py:1210)`, for ranks that stand alike."""
    own = list(stands)
    verb, _, rest = doing_text(own[0]).partition(" ")
    if len(own) > 1:
        verb = {"is": "are", "has": "have"}.get(verb, verb.removesuffix("s"))
    return f"{ranks_text([stand.rank for stand in own])} {verb} {rest}"


def looks_text(scope: Scope) -> str:
    """What tells that it stands still."""
    if scope.is_still:
        return "the same place in two looks"
    return "one look, and a watchdog that found it still" if scope.is_watched else "one look"


def evidence_of(dossier: Dossier, stack: Stack, supports: str) -> Evidence:
    return Evidence(dossier.file_of(stack.at), stack.at.record, supports)


def evidence_for(dossier: Dossier, stands: Iterable[Stand], role: str) -> tuple[Evidence, ...]:
    """One entry for each rank, `victim 0: waits in ...`: the head of its main thread."""
    return tuple(
        evidence_of(dossier, stand.main, f"{role} {stand.rank}: {doing_text(stand)}") for stand in stands
    )


def within(scope: Scope) -> str:
    return f"{scope.name}: " if scope.name else ""
