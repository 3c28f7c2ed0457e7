"""One rank votes in the cache while all others are at the request broadcast: only it took that way.

    Let    c(r) = what rank r's main thread waits in, for ranks of one replica and stage
    Then   c(r) is the same vote or the same broadcast for all r
    However  c(r) = vote for one r, and c(q) = request broadcast for all others: r alone decided to vote

    rank 0   all_reduce   writing_check, check_hicache_events
    rank 1   broadcast    broadcast_pyobj, recv_requests
    rank 2   broadcast    broadcast_pyobj, recv_requests

The pair says that a decision before it was taken from a fact that the ranks did not share, and no more. Who
is odd is told by the majority alone, and in this direction only: one rank at the broadcast while the others
vote may as well wait there for one of them that votes once too often.
"""

from __future__ import annotations

from consensus_checker.claim import Claim
from consensus_checker.finding import Alternative, Finding
from consensus_checker.stack_looks import Scope, Stand, scopes
from consensus_checker.stack_words import crowd_text, evidence_for, looks_text, within
from tracer.importers.dossier import Dossier

RULE = "stack_cache_reduction"
RESEMBLES = ("HC01", "HC03", "HC05")
OTHERS_MIN = 2


def find(dossier: Dossier) -> list[Claim]:
    return [claim for scope in scopes(dossier) if (claim := _claim(dossier, scope)) is not None]


def is_vote_and_broadcast(scope: Scope) -> bool:
    """Whether every rank waits in a vote of the cache or at the request broadcast, some in each."""
    purposes = [stand.place.purpose for stand in scope.waiting]
    is_whole = not scope.absent and not scope.missing and not scope.is_steady
    return is_whole and {*purposes} == {"cache", "requests"}


def _claim(dossier: Dossier, scope: Scope) -> Claim | None:
    if not is_vote_and_broadcast(scope):
        return None
    voting = [stand for stand in scope.waiting if stand.place.purpose == "cache"]
    asking = [stand for stand in scope.waiting if stand.place.purpose == "requests"]
    is_told = len(voting) == 1 and len(asking) >= OTHERS_MIN
    named = tuple(stand.rank for stand in voting) if is_told else ()
    ranks = tuple(stand.rank for stand in scope.waiting)
    roles = ("culprit", "victim") if is_told else ("unknown", "unknown")
    finding = Finding(
        "stall",
        11,
        RULE,
        f"{within(scope)}{crowd_text(voting)}, {crowd_text(asking)}: "
        "some of them voted in the cache and the others did not",
        ("medium" if scope.is_stuck else "low") if is_told else "undetermined",
        (looks_text(scope), *((f"majority {len(asking)}/{len(ranks)}",) if is_told else ())),
        RESEMBLES,
        culprit=named,
        victims=tuple(stand.rank for stand in asking) if is_told else (),
        unknown=() if is_told else ranks,
        evidence=(*evidence_for(dossier, voting, roles[0]), *evidence_for(dossier, asking, roles[1])),
        ruled_out=(("a slow or broken network", "they wait in two different calls, not in one"),),
        alternatives=_alternatives(voting, is_told=is_told),
    )
    return Claim(finding, needs_second_look=not scope.is_stuck)


def _alternatives(voting: list[Stand], *, is_told: bool) -> tuple[Alternative, ...]:
    if is_told:
        told = "the others left out a vote that was due"
    elif len(voting) > 1:
        told = "a rank in the vote voted once too often, and whoever is at the broadcast waits for it"
    else:
        told = "either of the two took the wrong way"
    return (Alternative(told, RULE, ("HC01", "HC02")),)
