"""No rank waits in a collective, and some do not move: they are held by something that is no rank.

    Let    d(r) = what rank r's main thread is in: the store, a lock, the device, another thread
    Then   d(r) ends between two looks
    However  d(r) is the same at the same place in two looks, and no other rank waits for r

    rank 0   storage   batch_get       ->   rank 0   storage   batch_get
    rank 1   storage   batch_get       ->   rank 1   storage   batch_get

Ranks that have nothing to do are not frozen.
"""

from __future__ import annotations

from consensus_checker.claim import Claim
from consensus_checker.finding import Alternative, Finding
from consensus_checker.stack_looks import Scope, scopes
from consensus_checker.stack_words import crowd_text, evidence_for, within
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier

RULE = "stack_frozen"
HELD = ("storage", "lock", "device", "gil", "helper")


def find(dossier: Dossier) -> list[Claim]:
    claims = (_claim(dossier, scope) for scope in scopes(dossier))
    return [claim for claim in claims if claim is not None]


def _claim(dossier: Dossier, scope: Scope) -> Claim | None:
    if scope.waiting:
        return None
    held = [stand for stand in scope.fresh if stand.is_same is True and stand.doing in HELD]
    if not held or any(stand.is_same is False for stand in scope.fresh):
        return None
    ranks = tuple(stand.rank for stand in held)
    is_some = len(held) < len(scope.fresh)
    alike = {(stand.doing, stand.place.where) for stand in held}
    told = crowd_text(held) if len(alike) == 1 else f"{ranks_text(ranks)} stand still, each elsewhere"
    finding = Finding(
        "frozen",
        15,
        RULE,
        f"{within(scope)}{told}; no rank waits in a collective",
        "medium" if is_some or len(alike) == 1 else "low",
        ("the same place in two looks",),
        ("HC17",),
        culprit=ranks if is_some else (),
        victims=() if is_some else ranks,
        silent=scope.missing,
        evidence=evidence_for(dossier, held, "culprit" if is_some else "victim"),
        ruled_out=(("a rank that did not join", "no rank waits in a collective"),),
        alternatives=(Alternative("it only takes long: look once more", "slow"),),
    )
    return Claim(finding, missing=scope.missing)
