"""A thread of one rank holds the interpreter, and all others wait for that rank.

    Let    g(r) = the thread of rank r that holds the GIL
    Then   g(r) gives it back while others wait in a collective, and r's main thread joins them
    However  g(r) is at the same place in two looks, and r is in no collective

    rank 0   idle         all_reduce   forward
    rank 1   active+gil   -            hash_pages

Any thread that runs holds it for a moment: one look alone accuses nobody.
"""

from __future__ import annotations

from consensus_checker.claim import Claim
from consensus_checker.stack_missed import claims
from tracer.importers.dossier import Dossier

RULE = "stack_gil_held"


def find(dossier: Dossier) -> list[Claim]:
    return claims(dossier, RULE)
