"""Ranks wait in different calls: each waits for somebody who waits elsewhere.

    Let    c(r) = the call that rank r's main thread waits in, for ranks of one replica and stage
    Then   c(r) = c(q) for all r, q
    However  c(r) != c(q): a circle, whose members' logs alone tell who left the way

    rank 0   all_reduce   check_hicache_events
    rank 1   all_reduce   check_hicache_events
    rank 2   all_reduce   forward

The larger crowd is named as such and nobody is accused: a rank that votes once too often is joined in that
vote by those who come round to it, and the one left behind is its victim.
"""

from __future__ import annotations

from consensus_checker.claim import Claim
from consensus_checker.finding import Alternative, Finding
from consensus_checker.rules.stack_cache_reduction import is_vote_and_broadcast
from consensus_checker.stack_looks import Scope, scopes
from consensus_checker.stack_words import crowd_text, evidence_for, looks_text, within
from tracer.importers.dossier import Dossier
from tracer.importers.stacks import is_pairwise

RULE = "stack_split"
CROWDS_TOLD = 3


def find(dossier: Dossier) -> list[Claim]:
    # The pair of vote and broadcast is the other rule's.
    rest = (scope for scope in scopes(dossier) if not is_vote_and_broadcast(scope))
    claims = (_claim(dossier, scope) for scope in rest)
    return [claim for claim in claims if claim is not None]


def _claim(dossier: Dossier, scope: Scope) -> Claim | None:
    meetings = scope.meetings
    if scope.absent or scope.missing or scope.is_steady or len(meetings) < 2:
        return None
    if all(is_pairwise(stand.place.call) for stand in scope.waiting):
        # Neighbours of a pipeline stand in different messages by right.
        return None
    if not scope.is_placed and any(is_pairwise(stand.place.call) for stand in scope.waiting):
        return None
    ranks = tuple(stand.rank for stand in scope.waiting)
    crowds = [crowd_text(group) for group in meetings[:CROWDS_TOLD]]
    rest = len(meetings) - len(crowds)
    more = f", and {rest} more" if rest else ""
    finding = Finding(
        "stall",
        11,
        RULE,
        f"{within(scope)}ranks wait in different calls: {', '.join(crowds)}{more}",
        "undetermined",
        (looks_text(scope), f"largest crowd {len(meetings[0])}/{len(ranks)}"),
        ("HC01", "HC03"),
        unknown=ranks,
        evidence=evidence_for(dossier, scope.waiting, "unknown"),
        ruled_out=(("a slow or broken network", "they wait in different calls, not in one"),),
        alternatives=(
            Alternative("the smaller crowd left the way", RULE),
            Alternative("one of the larger crowd is a call ahead, and is waited for in the other", RULE),
        ),
    )
    return Claim(finding, needs_second_look=not scope.is_stuck)
