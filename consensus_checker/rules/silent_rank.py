"""Rule `silent_rank`: all ranks report that somebody did not come, but for one, which says nothing.

Equation, for the ranks W with a log, those E with a line of waiting in vain or of a lost connection, and
S = W - E:

    |S| = 1  and  |E| >= 2      the rest waited for S

    rank 0  Timed out waiting 1800000ms for recv operation to complete
    rank 1                                                       its log ends without any error
    rank 2  Timed out waiting 1800000ms for recv operation to complete

Who waited in vain waited for somebody, and nobody else is left. Where nobody waited and connections were only
closed, the silent rank's process may be gone; but whoever ends a job ends one process first, so it is not
named. One that reports while all others are silent, or two of two, leave open who it is. A rank without any
log is missing, not silent. Where something has ended the job, the silent one may only have been ended before
it could speak, and is not named either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from consensus_checker.claim import Claim
from consensus_checker.finding import Alternative, Evidence, Finding
from consensus_checker.said import LOST, WAITED, by_rank, entries, expected_ranks, lines_of
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier, FileRead, Line

RULE = "silent_rank"
# Lines by which a rank speaks of an error of any kind.
ERRORS = (*WAITED, *LOST, *("exception", "gloo_size_mismatch", "gloo_abort", "remote_dump", "debug_mismatch"))
NUMBER = re.compile(r"\d+")


def find(dossier: Dossier) -> list[Claim]:
    told = by_rank(lines_of(dossier, ERRORS))
    waited = {rank: own[0] for rank, own in by_rank(lines_of(dossier, WAITED)).items()}
    lost = {rank: own[0] for rank, own in by_rank(lines_of(dossier, LOST)).items() if rank not in waited}
    if not waited and not lost:
        return []
    ends = dict(_ends(dossier))
    silent = tuple(sorted(ends.keys() - told.keys()))
    victims = tuple(sorted({*waited, *lost}))
    missing = tuple(rank for rank in expected_ranks(dossier) if rank not in ends and rank not in told)
    # A rank with an error of its own, or one whose log is not here, may be it as well.
    is_alone = len(silent) == 1 and len(victims) >= 2 and not missing and set(told) == set(victims)
    evidence = (
        *(ends[rank] for rank in silent),
        *entries(dossier, {**lost, **waited}, victims, "victim"),
    )
    is_ended = bool(lines_of(dossier, ("shutdown",)))
    if is_alone and len(waited) >= 2 and not is_ended:
        return [Claim(_named(silent, victims, tuple(sorted(waited)), evidence))]
    if is_alone and not waited:
        return [Claim(_gone(silent, victims, evidence))]
    finding = Finding(
        "undetermined",
        20,
        RULE,
        _open_summary(tuple(sorted(waited)), tuple(sorted(lost)), silent),
        "undetermined",
        basis=(
            f"{len(victims)} ranks report, {len(silent)} are silent",
            *(["the job was ended, so a silent one may have had no time"] if is_ended and silent else []),
        ),
        victims=victims,
        silent=silent,
        evidence=evidence,
    )
    return [Claim(finding, missing=missing)]


def _named(
    silent: tuple[int, ...], victims: tuple[int, ...], waited: tuple[int, ...], evidence: tuple[Evidence, ...]
) -> Finding:
    return Finding(
        "stall",
        11,
        RULE,
        f"{ranks_text(waited)} waited in vain, and {ranks_text(silent)}, which nobody else is left for, "
        "says nothing",
        # A log that was cut or rotated, beside a rank without any, looks the same.
        "low",
        basis=("all others report", "its log ends without an error"),
        culprit=silent,
        victims=victims,
        silent=silent,
        evidence=tuple(_as_culprit(entry, silent) for entry in evidence),
        alternatives=(Alternative("its log was cut, or it was ended before it could speak", RULE),),
    )


def _gone(silent: tuple[int, ...], victims: tuple[int, ...], evidence: tuple[Evidence, ...]) -> Finding:
    return Finding(
        "dead",
        14,
        RULE,
        f"{ranks_text(victims)} lost their connections, and {ranks_text(silent)} says nothing: its process "
        "may be gone",
        "low",
        basis=("connections closed by a peer", "its log ends without an error"),
        victims=victims,
        silent=silent,
        evidence=evidence,
        alternatives=(Alternative("the job was ended, and this process first", RULE),),
    )


def _as_culprit(entry: Evidence, silent: tuple[int, ...]) -> Evidence:
    (rank,) = silent
    is_its_own = entry.supports.startswith("silent ")
    return Evidence(entry.file, entry.record, f"culprit {rank}: its log ends") if is_its_own else entry


def _open_summary(waited: tuple[int, ...], lost: tuple[int, ...], silent: tuple[int, ...]) -> str:
    parts = []
    if waited:
        parts.append(f"{ranks_text(waited)} waited in vain")
    if lost:
        parts.append(f"{ranks_text(lost)} lost a connection")
    if silent:
        parts.append(f"{ranks_text(silent)} {'says' if len(silent) == 1 else 'say'} nothing")
    return f"{'; '.join(parts)}: no line says for whom"


def _ends(dossier: Dossier) -> Iterator[tuple[int, Evidence]]:
    """Where each rank's log ends; an empty one is a log too, if it is named as the others are."""
    ends: dict[int, Line] = {}
    for line in lines_of(dossier, ("log_end",)):
        if line.who.rank is not None:
            ends[line.who.rank] = line
    for rank, line in sorted(ends.items()):
        yield rank, Evidence(dossier.file_of(line.at), line.at.record, f"silent {rank}: its log ends")
    named: dict[str, dict[int, str]] = {}
    for rank, line in ends.items():
        template, number = _template(dossier.file_of(line.at))
        if number == rank:
            named.setdefault(template, {})[rank] = dossier.file_of(line.at)
    for file in dossier.files:
        template, number = _template(file.name)
        if _is_empty(file) and number is not None and template in named and number not in ends:
            yield number, Evidence(file.name, None, f"silent {number}: its log is empty")


def _is_empty(file: FileRead) -> bool:
    return file.format is None and not file.records and file.refused is None


def _template(name: str) -> tuple[str, int | None]:
    """A file's name without its last number, and that."""
    found = list(NUMBER.finditer(name))
    if not found:
        return name, None
    last = found[-1]
    return f"{name[: last.start()]}#{name[last.end() :]}", int(last[0][:9])
