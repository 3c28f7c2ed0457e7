"""A helper thread that every other rank has is not there on one: it ended, and nobody looks after its queue.

    Let    h(r, k) = how many threads of kind k rank r has, k one of the cache's helpers
    Then   h(r, k) = h(q, k) for all ranks r, q of a replica and stage
    However  h(r, k) = 0 for one r, and 1 for all others

    rank 0   MainThread   prefetch_thread_func   backup_thread_func
    rank 1   MainThread                          backup_thread_func
    rank 2   MainThread   prefetch_thread_func   backup_thread_func

Only threads that begin in the cache's own code count: pools of workers, and a server's first rank, differ
by right.
"""

from __future__ import annotations

from consensus_checker.claim import Claim
from consensus_checker.finding import Alternative, Finding
from consensus_checker.stack_looks import Scope, helpers, is_of_cache, scopes
from consensus_checker.stack_words import evidence_of, within
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier

RULE = "stack_missing_thread"
OTHERS_MIN = 2


def find(dossier: Dossier) -> list[Claim]:
    return [claim for scope in scopes(dossier) for claim in _claims(dossier, scope)]


def _claims(dossier: Dossier, scope: Scope) -> list[Claim]:
    found = []
    for kind, own in sorted(helpers(scope).items()):
        absent = [stand for stand in scope.fresh if stand.rank not in own]
        is_told = len(absent) == 1 and len(own) >= OTHERS_MIN
        if not is_told or not all(is_of_cache(stack) for stack in own.values()):
            continue
        stand = absent[0]
        others = tuple(sorted(own))
        is_twice = len(scope.looks[stand.rank]) > 1 and kind not in helpers(scope, back=1, rank=stand.rank)
        finding = Finding(
            "frozen",
            15,
            RULE,
            f"{within(scope)}rank {stand.rank} has no thread {kind}; {ranks_text(others)} "
            f"{'has' if len(others) == 1 else 'have'} one",
            "medium" if is_twice else "low",
            ("absent in two looks" if is_twice else "one look", f"{len(others)} others have it"),
            ("HC12",),
            culprit=(stand.rank,),
            evidence=(
                evidence_of(dossier, stand.main, f"culprit {stand.rank}: its threads, and no {kind}"),
                *(evidence_of(dossier, own[rank], f"rank {rank}: its {kind}") for rank in others),
            ),
            alternatives=(Alternative(f"rank {stand.rank} is set up without it", RULE),),
        )
        found.append(Claim(finding, needs_second_look=not is_twice))
    return found
