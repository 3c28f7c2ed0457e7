"""All ranks stand in one call, or all wait for work: what stacks rule out, and what they can't tell.

    Let    c(r) = the call that rank r's main thread waits in
    Then   c(r) = c(q) for all r, q: nobody is elsewhere
    However  equal frames are not equal calls: one rank may be in the 412th and another in the 413th

    rank 0   all_reduce   forward
    rank 1   all_reduce   forward

Nobody is accused. Where all have nothing to do, or moved between two looks, nothing is wrong.
"""

from __future__ import annotations

from consensus_checker.claim import Claim
from consensus_checker.finding import Alternative, Finding
from consensus_checker.stack_looks import Scope, scopes
from consensus_checker.stack_missed import is_silent_told
from consensus_checker.stack_words import crowd_text, evidence_for, looks_text, within
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier

RULE = "stack_same_place"


def find(dossier: Dossier) -> list[Claim]:
    found = scopes(dossier)
    idle = [stand.rank for scope in found if _is_at_rest(scope) for stand in scope.fresh]
    claims = (_claim(dossier, scope, idle) for scope in found)
    return [claim for claim in claims if claim is not None]


def _is_at_rest(scope: Scope) -> bool:
    is_all = all(stand.doing == "idle" for stand in scope.fresh) and not scope.is_watched
    return scope.is_idle or is_all


def _claim(dossier: Dossier, scope: Scope, idle: list[int]) -> Claim | None:
    """Args: idle: ranks of other replicas and stages that have nothing to do."""
    if len(scope.fresh) < 2:
        return None
    if _is_at_rest(scope):
        return _fine(dossier, scope, "have nothing to do")
    if scope.is_steady:
        told = "moved from each look to the next"
        return _fine(dossier, scope, told, f"it {told}")
    if _is_moving(scope):
        return _fine(dossier, scope, "moved between two looks", "it moved between two looks")
    if scope.absent or len(scope.meetings) != 1 or is_silent_told(scope):
        return None
    ranks = tuple(stand.rank for stand in scope.waiting)
    finding = Finding(
        "undetermined" if scope.is_stuck else "incomplete",
        20 if scope.is_stuck else 4,
        RULE,
        f"{within(scope)}{crowd_text(scope.waiting)}: the same call on all of them, by their frames",
        "undetermined",
        (looks_text(scope),),
        unknown=ranks,
        silent=scope.missing,
        evidence=evidence_for(dossier, scope.waiting, "unknown"),
        ruled_out=(
            ("a rank that went another way", f"{ranks_text(ranks)} stand in one place of the program"),
        ),
        alternatives=(
            Alternative(
                "one of them is a call behind: a flight recorder's dumps would tell", "fr_not_joined"
            ),
            Alternative("all joined, and the library or the network does not complete it", "fr_all_joined"),
            *_too_wide(idle),
        ),
    )
    return Claim(finding, needs_second_look=not scope.is_stuck, missing=scope.missing)


def _too_wide(idle: list[int]) -> tuple[Alternative, ...]:
    if not idle:
        return ()
    told = f"{ranks_text(idle)} would have to join, and {'waits' if len(idle) == 1 else 'wait'} for work"
    return (Alternative(told, RULE, ("HC07",)),)


def _is_moving(scope: Scope) -> bool:
    """Whether all ranks went on, and now none is where others wait for it.

    That they moved between two looks says nothing of the newer one: the job may have stopped in between.
    """
    if scope.missing or scope.is_watched or not all(stand.is_same is False for stand in scope.fresh):
        return False
    return not scope.waiting or (not scope.absent and len(scope.meetings) == 1)


def _fine(dossier: Dossier, scope: Scope, told: str, why: str = "") -> Claim:
    """Nothing is wrong; a rank that waits is not cleared by that, it may be missed elsewhere."""
    ranks = [stand.rank for stand in scope.fresh]
    finding = Finding(
        "consistent",
        0,
        RULE,
        f"{within(scope)}{ranks_text(ranks)} {told}",
        "medium" if all(stand.is_same is not None for stand in scope.fresh) else "low",
        (looks_text(scope),),
        silent=scope.missing,
        evidence=evidence_for(dossier, scope.fresh, "rank"),
    )
    return Claim(finding, dict.fromkeys(ranks, why) if why else {}, missing=scope.missing)
