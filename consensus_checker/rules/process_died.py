"""Rule `process_died`: one rank's process ended by itself, before its peers lost their connections to it.

Equation, with D the ranks whose process ended by a signal that it was not sent to end it, or whose only
exceptions are not about another rank:

    2 |D| < |W|      the others lost D

    rank 1  exitcode -9 (pid 4242)                       killed, by the system as a rule
    rank 0  Connection closed by peer                    a victim

    rank 1  IndexError: pop from empty list              its own
    rank 0  Timed out waiting 1800000ms                  a victim

Not its own: SIGTERM, SIGINT and SIGQUIT; an abort by a watchdog or by gloo, which comes of a collective that
went wrong before; an exception in half of the job.
"""

from __future__ import annotations

from collections.abc import Mapping

from consensus_checker.claim import Claim
from consensus_checker.finding import Alternative, Finding
from consensus_checker.said import LOST, WAITED, by_rank, entries, expected_ranks, lines_of
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier, Line

RULE = "process_died"
SIGINT, SIGQUIT, SIGABRT, SIGKILL, SIGSEGV, SIGTERM = 2, 3, 6, 9, 11, 15
TOLD_TO_END = (SIGINT, SIGQUIT, SIGTERM)
SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", SIGKILL: "SIGKILL", SIGSEGV: "SIGSEGV"}
# What ends a process because of a collective: whoever is ended so is not who was wrong.
COLLECTIVE = (*WAITED, "gloo_abort", "gloo_size_mismatch", "remote_dump")
# No error of the program.
ENDINGS = ("KeyboardInterrupt", "SystemExit", "CancelledError")


def find(dossier: Dossier) -> list[Claim]:
    died = _killed(dossier) or _raised(dossier)
    if not died:
        return []
    ranks = tuple(sorted(died))
    everyone = set(expected_ranks(dossier)) | set(ranks)
    is_named = 2 * len(ranks) < len(everyone)
    waited = {rank: own[0] for rank, own in by_rank(lines_of(dossier, (*WAITED, *LOST))).items()}
    victims = tuple(rank for rank in sorted(waited) if rank not in died)
    role = "culprit" if is_named else "unknown"
    raised = _raised(dossier)
    told = "; ".join(sorted({_words(line, raised.get(rank)) for rank, line in died.items()})[:3])
    is_signal = all(line.event == "process_died" for line in died.values())
    is_killed = any(line.fields.get("signal") == SIGKILL for line in died.values())
    finding = Finding(
        "dead",
        14,
        RULE,
        f"the {'process' if len(ranks) == 1 else 'processes'} of {ranks_text(ranks)} ended: {told}",
        # A killed one may have been killed because the job stood.
        ("high" if is_signal and not is_killed else "medium") if is_named else "undetermined",
        basis=("a launcher's report",) if is_signal else ("an exception of its own",),
        culprit=ranks if is_named else (),
        victims=victims,
        unknown=() if is_named else ranks,
        evidence=(
            *entries(dossier, died, ranks, role),
            *entries(dossier, waited, victims, "victim"),
        ),
        alternatives=(Alternative("somebody ended the job, and this process first", RULE),)
        if is_signal
        else (),
    )
    return [Claim(finding)]


def _killed(dossier: Dossier) -> dict[int, Line]:
    """Ranks whose process ended by a signal that nobody sent to end the job."""
    closing = {line.who.pid for line in lines_of(dossier, ("shutdown",)) if line.who.pid is not None}
    aborts = lines_of(dossier, COLLECTIVE)
    # Who is left behind by others may end in an abort as well.
    in_collective = set(by_rank(aborts)) | set(by_rank(lines_of(dossier, LOST)))
    # A library's last words have no rank in front: any of the ranks that were aborted may have said them.
    is_open = any(line.who.rank is None for line in aborts)
    died: dict[int, Line] = {}
    for rank, lines in by_rank(lines_of(dossier, ("process_died",))).items():
        for line in lines:
            signal = line.fields["signal"]
            is_told = signal in TOLD_TO_END or line.who.pid in closing
            is_consequence = signal == SIGABRT and (is_open or rank in in_collective)
            if signal is not None and not is_told and not is_consequence:
                died.setdefault(rank, line)
    return died


def _raised(dossier: Dossier) -> Mapping[int, Line]:
    """Ranks with exceptions of their own alone, while others report that somebody is gone.

    Who is left behind by others raises more than one exception, and not all are about that.
    """
    reporting = set(by_rank(lines_of(dossier, (*COLLECTIVE, *LOST))))
    if not reporting:
        return {}
    raised = by_rank(lines_of(dossier, ("exception",)))
    return {
        rank: lines[0]
        for rank, lines in raised.items()
        if rank not in reporting
        and not any(line.fields["is_communication"] or line.fields["type"] in ENDINGS for line in lines)
    }


def _words(line: Line, raised: Line | None) -> str:
    said = str(raised.fields["type"]) if raised is not None else ""
    if line.event == "exception":
        return said
    signal = line.fields["signal"]
    name = SIGNALS.get(signal, f"signal {signal}")
    return f"{name}, after {said}" if said else name
