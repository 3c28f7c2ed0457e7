"""Processes that the system itself says are stopped, or have ended.

    state(rank) in {T, t}  in the last look                  the rank can't go on: somebody stopped it
    state(rank) in {Z, X}                                    it has ended, and nobody has taken note

The smallest evidence is one look at two processes:

    1/process_rank_0.json   {"rank": 0, "status": {"state": "S"}}
    1/process_rank_1.json   {"rank": 1, "status": {"state": "T"}}       rank 1 is stopped

Says nothing where every process that was looked at is stopped: then whoever looked may have stopped them.
A process that waits (S, D) or runs (R) is no news.
"""

from __future__ import annotations

from collections.abc import Sequence

from consensus_checker.claim import Claim
from consensus_checker.finding import Alternative, Evidence, Finding
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier, Line

RULE = "process_state"
EVENT = "process"
STOPPED, ENDED = "Tt", "ZXx"


def find(dossier: Dossier) -> list[Claim]:
    """One claim for those that are stopped, and one for those that have ended."""
    last: dict[int, Line] = {}
    for line in dossier.lines:
        if line.event == EVENT and line.who.rank is not None and line.fields.get("state"):
            last[line.who.rank] = line
    found = []
    for states, what in ((ENDED, "ended"), (STOPPED, "stopped")):
        ranks = tuple(rank for rank, line in sorted(last.items()) if str(line.fields["state"]) in states)
        if ranks and len(ranks) < len(last):
            found.append(_claim(dossier, ranks, last, what))
    return found


def _claim(dossier: Dossier, ranks: Sequence[int], last: dict[int, Line], what: str) -> Claim:
    """That others are there clears them of nothing but this: they are not spoken of."""
    is_one, is_stopped = len(ranks) == 1, what == "stopped"
    whose, them = ("its process", "it") if is_one else ("their processes", "them")
    told = f"{whose} {'is' if is_one else 'are'} stopped, and nothing in {them} runs"
    told = told if is_stopped else f"{whose} {'has' if is_one else 'have'} ended"
    return Claim(
        Finding(
            "dead",
            14,
            RULE,
            f"{ranks_text(tuple(ranks))}: {told}",
            "high",
            (f"state of the process, as the system says it, on {len(ranks)} of {len(last)} ranks",),
            culprit=tuple(ranks),
            evidence=tuple(
                Evidence(dossier.file_of(at := last[rank].at), at.record, f"culprit {rank}") for rank in ranks
            ),
            alternatives=(Alternative("a debugger holds it", RULE),) if is_stopped else (),
        )
    )
