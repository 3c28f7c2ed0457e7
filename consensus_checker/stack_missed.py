"""Ranks that are missed in a call: which they are, what keeps them, and how surely that is said.

One look, or one that moved, accuses nobody: `needs_second_look`. Ranks that wait by right for work are not
missed, nor are stages of a pipeline at rest. A rank that was seen only before the others stopped is silent.
"""

from __future__ import annotations

from consensus_checker.claim import Claim
from consensus_checker.finding import Alternative, Evidence, Finding, Level
from consensus_checker.stack_looks import Scope, Stand, holds_gil, scopes
from consensus_checker.stack_words import (
    crowd_text,
    doing_text,
    evidence_for,
    evidence_of,
    looks_text,
    within,
)
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier, Stack
from tracer.importers.stacks import is_pairwise

NOT_JOINED = "stack_not_joined"
IN_STORAGE = "stack_in_storage"
GIL_HELD = "stack_gil_held"
STEPS = {
    "lock": "a lock that its holder never gives back",
    "device": "the device, or a copy on it, that does not end",
    "helper": "a thread of its own that died or waits itself",
    "storage": "the external store, which does not answer",
}


def claims(dossier: Dossier, rule: str) -> list[Claim]:
    """What is missed in every scope, where `rule` is what it comes to."""
    found = (_claim(dossier, scope) for scope in scopes(dossier))
    return [claim for claim in found if claim is not None and claim.finding.rule == rule]


def _claim(dossier: Dossier, scope: Scope) -> Claim | None:
    if not scope.waiting or scope.is_idle or scope.is_steady:
        return None
    if scope.absent:
        return _absent(dossier, scope)
    return _silent(dossier, scope, scope.missing[0]) if is_silent_told(scope) else None


def is_silent_told(scope: Scope) -> bool:
    """Whether all others wait in one call, seen there twice, and one alone was not seen since."""
    is_alone = len(scope.missing) == 1 and len(scope.meetings) == 1 and not scope.absent
    return is_alone and scope.is_still and len(scope.waiting) > 1 and not scope.skipped


def _absent(dossier: Dossier, scope: Scope) -> Claim | None:
    """Ranks that are somewhere else than in a call."""
    moved = [stand for stand in scope.absent if stand.is_same is False]
    stuck = [stand for stand in scope.absent if stand.is_same is not False]
    if _is_pipeline_at_rest(scope, [*scope.absent]):
        return None
    if not stuck:
        return _moving(dossier, scope)
    ranks = tuple(stand.rank for stand in stuck)
    waiting = tuple(stand.rank for stand in scope.waiting)
    is_named = not moved and not scope.missing and _is_few(scope, stuck)
    rule, holder = _rule_of(stuck)
    level = _level(scope, stuck) if is_named else "undetermined"
    reason = _reason(stuck, holder)
    finding = Finding(
        "stall",
        11,
        rule,
        f"{within(scope)}{_they(stuck)} {'is' if len(stuck) == 1 else 'are'} not in the call that "
        f"{ranks_text(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in: {reason}",
        level,
        (looks_text(scope), *_waits_text(scope)),
        _resembles(stuck),
        culprit=ranks if is_named else (),
        victims=waiting if is_named else (),
        unknown=() if is_named else ranks,
        evidence=(
            *_evidence(dossier, stuck, holder, "culprit" if is_named else "unknown"),
            *evidence_for(dossier, moved, "rank"),
            *evidence_for(dossier, scope.waiting, "victim" if is_named else "rank"),
        ),
        ruled_out=(("the collective library", f"{ranks_text(ranks)} never called it"),),
        alternatives=_alternatives(scope, stuck),
    )
    cleared = {stand.rank: "it moved between two looks" for stand in moved}
    return Claim(finding, cleared, needs_second_look=not scope.is_stuck, missing=scope.missing)


def _moving(dossier: Dossier, scope: Scope) -> Claim:
    """Who is missed went on since the look before: the job may be well, or have stopped in between."""
    ranks = tuple(stand.rank for stand in scope.absent)
    waiting = ranks_text([stand.rank for stand in scope.waiting])
    finding = Finding(
        "incomplete",
        4,
        NOT_JOINED,
        f"{within(scope)}{_they(list(scope.absent))} moved between two looks, and {waiting} "
        f"{'waits' if len(scope.waiting) == 1 else 'wait'} in a call without it: another look tells more",
        "undetermined",
        ("moved between two looks",),
        unknown=ranks,
        evidence=(
            *evidence_for(dossier, scope.absent, "unknown"),
            *evidence_for(dossier, scope.waiting, "rank"),
        ),
    )
    return Claim(finding, missing=scope.missing)


def _silent(dossier: Dossier, scope: Scope, rank: int) -> Claim:
    """All others wait in one call, and of this one there is no look since they do."""
    old = next((stand for stand in scope.stands if stand.rank == rank), None)
    if old is not None:
        told = f"culprit {rank}: no look since the others wait; before that it was here"
        entry = evidence_of(dossier, old.main, told)
    else:
        entry = Evidence(None, None, f"silent {rank}: no stack of it, and all others wait")
    # Stacks of only some ranks are often all that anybody took: that alone is thin.
    is_named = old is not None
    finding = Finding(
        "stall",
        11,
        NOT_JOINED,
        f"{within(scope)}{crowd_text(scope.waiting)}, and of rank {rank} alone there is no stack since then",
        "low" if is_named else "undetermined",
        (looks_text(scope), "silent while all others were seen"),
        culprit=(rank,) if is_named else (),
        victims=tuple(stand.rank for stand in scope.waiting) if is_named else (),
        silent=(rank,),
        evidence=(entry, *evidence_for(dossier, scope.waiting, "victim" if is_named else "rank")),
        alternatives=(
            Alternative(f"rank {rank} is in the call too and was only not looked at", "stack_same_place"),
            Alternative(f"the process of rank {rank} is dead or stopped", NOT_JOINED),
        ),
    )
    return Claim(finding, missing=(rank,))


def _is_few(scope: Scope, stuck: list[Stand]) -> bool:
    """Whether those that are missed are fewer than those that wait, or held by something that is no turn."""
    if len(stuck) < len(scope.waiting):
        return True
    held = {"storage", "lock", "gil", "device"}
    return len(stuck) == len(scope.waiting) and all(stand.doing in held for stand in stuck)


def _is_pipeline_at_rest(scope: Scope, stuck: list[Stand]) -> bool:
    """Stages wait for messages of one that waits for work."""
    is_message = all(is_pairwise(stand.place.call) for stand in scope.waiting)
    return is_message and all(stand.doing in ("idle", "helper") for stand in stuck)


def _rule_of(stuck: list[Stand]) -> tuple[str, Stack | None]:
    holders = [stand.look.gil_holder for stand in stuck]
    if len(stuck) == 1 and holders[0] is not None and stuck[0].doing in ("running", "gil"):
        return GIL_HELD, holders[0]
    if all(stand.doing == "storage" for stand in stuck):
        return IN_STORAGE, None
    return NOT_JOINED, None


def _level(scope: Scope, stuck: list[Stand]) -> Level:
    """How surely these are named: one that runs on a line for seconds may only be slow."""
    if not scope.is_stuck:
        return "low"
    if scope.is_watched:
        return "high" if scope.is_still else "medium"
    is_slow = any(stand.doing == "running" and not holds_gil(stand.main) for stand in stuck)
    is_twice = all(stand.is_same is True for stand in stuck)
    is_doubtful = is_slow or (not is_twice and any(stand.doing in ("idle", "device") for stand in stuck))
    return "low" if is_doubtful else "medium"


def _reason(stuck: list[Stand], holder: Stack | None) -> str:
    own = stuck[0]
    if len(stuck) == 1 and own.doing == "helper":
        busy = _busy_helper(own)
        return f"it {doing_text(own)}{busy}"
    words = doing_text(own) if len({doing_text(stand) for stand in stuck}) == 1 else "see their stacks"
    if holder is None:
        return f"it {words}" if len(stuck) == 1 else words
    thread = "" if holder is own.main else f", its thread {holder.thread or holder.thread_id}"
    return f"it {words}{thread} and holds the interpreter (GIL)"


def _busy_helper(stand: Stand) -> str:
    """The thread of the same rank that keeps it: one in the store or in a meeting of its own."""
    for wait, words in (("storage", "in a call to the external store"), ("collective", "in a collective")):
        own = next((s for s in stand.look.threads if s.wait == wait and s is not stand.main), None)
        if own is not None:
            return f", while its thread {own.thread or own.thread_id} is {words}"
    return ""


def _they(stuck: list[Stand]) -> str:
    return ranks_text([stand.rank for stand in stuck])


def _waits_text(scope: Scope) -> tuple[str, ...]:
    return tuple(crowd_text(group) for group in scope.meetings[:2])


def _resembles(stuck: list[Stand]) -> tuple[str, ...]:
    doing = {stand.doing for stand in stuck}
    return ("HC12",) if doing == {"lock"} else ("HC07",) if doing == {"idle"} else ()


def _evidence(dossier: Dossier, stuck: list[Stand], holder: Stack | None, role: str) -> tuple[Evidence, ...]:
    entries = evidence_for(dossier, stuck, role)
    if holder is not None and holder is not stuck[0].main:
        told = f"{role} {stuck[0].rank}: holds the interpreter (GIL)"
        entries = (*entries, evidence_of(dossier, holder, told))
    return entries


def _alternatives(scope: Scope, stuck: list[Stand]) -> tuple[Alternative, ...]:
    found = [Alternative(f"{_they(stuck)} only takes long: look once more", "slow")]
    if not scope.is_placed:
        found.append(Alternative("it is of another stage or replica: the dumps do not say", NOT_JOINED))
    steps = {STEPS[stand.doing] for stand in stuck if stand.doing in STEPS}
    return (*found, *(Alternative(f"behind it: {step}", NOT_JOINED) for step in sorted(steps)))
