"""Rule `library_report`: the ranks that a library's own report of a stall says did not come.

Equation, with J the ranks that a report calls missing and W all ranks of the job:

    2 |J| < |W|  and all reports name the same    J did not join

    [0] Timeout at collective: ALLREDUCE, #12
    - [2] finished collective #11, but didn't join collective #12      rank 2 of 4 did not join #12

Reports are torch's desync report and the monitored barrier of gloo. Both know only what ranks had told the
job's store, and a barrier names the first that it misses. Reports that differ, or that call half of the job
missing, leave open who it is.
"""

from __future__ import annotations

from collections.abc import Iterator

from consensus_checker.claim import Claim
from consensus_checker.finding import Alternative, Finding
from consensus_checker.said import entry, expected_ranks, lines_of
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier, Line

RULE = "library_report"
EVENTS = ("desync_missing", "desync_finished", "monitored_barrier")


def find(dossier: Dossier) -> list[Claim]:
    reports = list(_reports(dossier))
    if not reports:
        return []
    named = {ranks for ranks, _line, _told in reports}
    everyone = set(expected_ranks(dossier)).union(*named)
    missing = tuple(sorted(set().union(*named)))
    is_named = len(named) == 1 and 2 * len(missing) < len(everyone)
    _ranks, line, told = reports[0]
    waiting = tuple(
        sorted({one.who.rank for _ranks, one, _told in reports if one.who.rank is not None} - set(missing))
    )
    reporters = {one.who.rank: one for _ranks, one, _told in reports if one.who.rank in waiting}
    role = "culprit" if is_named else "unknown"
    finding = Finding(
        "stall" if is_named else "undetermined",
        11 if is_named else 20,
        RULE,
        f"{ranks_text(missing)} did not join {told}, says the library"
        if len(named) == 1
        else f"the library's reports differ in who did not join: {_texts(reports)}",
        "medium" if is_named else "undetermined",
        basis=(f"{len(reports)} reports", f"{len(missing)} of {len(everyone)} ranks missing"),
        culprit=missing if is_named else (),
        victims=waiting,
        unknown=() if is_named else missing,
        evidence=(
            *(entry(dossier, line, f"{role} {rank}") for rank in missing),
            *(entry(dossier, own, f"victim {rank}") for rank, own in sorted(reporters.items(), key=str)),
        ),
        alternatives=(Alternative("the others made a call that was not to be made", RULE),)
        if is_named
        else (),
    )
    return [Claim(finding)]


def _reports(dossier: Dossier) -> Iterator[tuple[tuple[int, ...], Line, str]]:
    """The ranks that each report misses, and in which call."""
    for line in lines_of(dossier, EVENTS):
        fields = line.fields
        if line.event == "monitored_barrier":
            if fields["missing"]:
                yield fields["missing"], line, "a monitored barrier"
        elif fields["ranks"]:
            seq = fields.get("seq")
            yield fields["ranks"], line, f"collective #{seq + 1}" if seq is not None else "any collective"


def _texts(reports: list[tuple[tuple[int, ...], Line, str]]) -> str:
    return "; ".join(sorted({ranks_text(ranks) for ranks, _line, _told in reports})[:4])
