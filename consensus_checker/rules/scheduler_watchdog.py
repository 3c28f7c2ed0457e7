"""Rule `scheduler_watchdog`: schedulers with a batch made no step; those without one say nothing.

Equation, with P the ranks whose watchdog printed and W those that wrote any line:

    P is not empty      P stands, and a rank of W - P that P needs is silent

    TP0  Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)
    TP1                                       TP1 has no batch: its watchdog does not look

A watchdog looks only at a scheduler that has a batch, and the first that speaks ends the server. So silence
is evidence of where to look, and never names anybody.
"""

from __future__ import annotations

from consensus_checker.claim import Claim
from consensus_checker.finding import Evidence, Finding
from consensus_checker.said import by_rank, entries, entry, lines_of
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier

RULE = "scheduler_watchdog"


def find(dossier: Dossier) -> list[Claim]:
    watchdogs = lines_of(dossier, ("scheduler_watchdog",))
    lines = [line for line in watchdogs if _is_scheduler(line.fields["name"])]
    if not lines:
        return []
    printed = {rank: own[-1] for rank, own in by_rank(lines).items()}
    seen = by_rank(lines_of(dossier, ("log_end", "prefill_batches", "decode_batch")))
    silent = tuple(rank for rank in seen if rank not in printed)
    ranks = tuple(printed)
    timeouts = [line.fields["timeout_s"] for line in lines]
    seconds = max(filter(_is_number, timeouts), default=0)
    whom = ranks_text(ranks) if ranks else "a scheduler"
    finding = Finding(
        "undetermined",
        20,
        RULE,
        f"{whom} made no step for {seconds:,} s with a batch in hand"
        + (f"; {ranks_text(silent)} printed nothing: no batch there, or no time left" if silent else ""),
        "undetermined",
        basis=(f"{len(lines)} watchdog lines",),
        victims=ranks,
        silent=silent,
        evidence=(
            *entries(dossier, printed, ranks, "victim"),
            *(() if ranks else (entry(dossier, lines[0], "a watchdog"),)),
            *(
                Evidence(
                    dossier.file_of(seen[rank][-1].at),
                    seen[rank][-1].at.record,
                    f"silent {rank}: no line of its watchdog",
                )
                for rank in silent
            ),
        ),
    )
    return [Claim(finding)]


def _is_scheduler(name: str) -> bool:
    return "scheduler" in name.lower()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and value < 1e9
