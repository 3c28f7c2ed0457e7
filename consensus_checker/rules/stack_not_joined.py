"""All others wait in a call that one rank is not in: it did not join, and its stack says what keeps it.

    Let    W = ranks whose main thread waits in a collective, seen there twice
           N = ranks that are in no collective
    Then   N is empty, or who is in it moves on and joins
    However  N = {r}, and r stands where it stood

    rank 0   all_reduce   forward               rank 0   all_reduce   forward
    rank 1   all_reduce   forward         ->    rank 1   all_reduce   forward
    rank 2   -            copy_pages            rank 2   -            copy_pages

What a rank waits for by right accuses nobody: a broadcast's source or a pipeline's first stage that has
nothing to do. One look tells nothing from a moment of a job that moves, unless a watchdog found it still.
"""

from __future__ import annotations

from consensus_checker.claim import Claim
from consensus_checker.stack_missed import claims
from tracer.importers.dossier import Dossier

RULE = "stack_not_joined"


def find(dossier: Dossier) -> list[Claim]:
    return claims(dossier, RULE)
