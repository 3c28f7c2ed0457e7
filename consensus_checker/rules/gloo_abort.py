"""Rule `gloo_abort`: a rank was sent more than it had room for, and gloo ended its process.

Equation, for the line of rank r with the bytes it was sent and the bytes it had room for:

    sent(r) <= own(r)

    rank 0  op.preamble.length <= op.nbytes. 16 vs 8      rank 0 ends itself, and closes its connections
    rank 1  Connection reset by peer                      a victim
    rank 2  Connection reset by peer                      a victim

Two ranks brought different sizes to one collective. Gloo ends the process with the *smaller* buffer, whoever
of the two is odd: the line says that sizes differ, never who is wrong.
"""

from __future__ import annotations

from consensus_checker.claim import Claim
from consensus_checker.finding import Alternative, Finding
from consensus_checker.said import LOST, by_rank, entries, entry, lines_of
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier, Line

RULE = "gloo_abort"


def find(dossier: Dossier) -> list[Claim]:
    lines = lines_of(dossier, ("gloo_size_mismatch",))
    if not lines:
        return []
    aborted = {rank: own[0] for rank, own in by_rank(lines).items()}
    lost = {rank: own[0] for rank, own in by_rank(lines_of(dossier, LOST)).items() if rank not in aborted}
    who = ranks_text(tuple(aborted)) if aborted else "a rank"
    finding = Finding(
        "mismatch",
        16,
        RULE,
        f"{who} {_sizes(lines[0])}: ranks brought different sizes to one collective",
        "undetermined",
        basis=("the rank that gloo ends is the one with less room, not the one that is wrong",),
        resembles=("HC02",),
        victims=tuple(lost),
        unknown=tuple(aborted),
        evidence=(
            *entries(dossier, aborted, tuple(aborted), "unknown"),
            *(() if aborted else (entry(dossier, lines[0], "different sizes"),)),
            *entries(dossier, lost, tuple(lost), "victim"),
        ),
        ruled_out=(("network", "a connection was reset because its process had ended itself"),)
        if lost
        else (),
        alternatives=(
            Alternative("a call that was left out or made twice pairs calls of different sizes", RULE),
        ),
    )
    return [Claim(finding)]


def _sizes(line: Line) -> str:
    sent, own = line.fields["sent_bytes"], line.fields["own_bytes"]
    if sent is None or own is None:
        # Numbers that no size can have: the line is damaged.
        return "was sent more than it had room for"
    return f"had room for {own:,} bytes and was sent {sent:,}"
