"""Notes by which ranks say themselves that something is wrong: a wrong page, a call that meant two things."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from consensus_checker.deaths import CRASHED
from consensus_checker.finding import Evidence, Finding, Victim
from consensus_checker.history import Lane
from consensus_checker.words import ranks_text
from tracer.record import Record


def anomaly(notes: Sequence[tuple[Lane, Record]]) -> Finding:
    """Notes of one kind, by which ranks say themselves that something is wrong.

    Such as a page with another page's bytes. Who read it is not proven to have spoiled it. A note that names
    a group and its call is about that call, in which ranks meant different things.
    """
    lane, note = notes[0]
    if "group" in note and "group_seq" in note:
        return _mispaired(notes)
    ranks = tuple(sorted({lane.rank for lane, _ in notes}))
    details = ", ".join(f"{name} {value}" for name, value in note.items() if name in ("page_index", "slot"))
    return Finding(
        "invariant",
        18,
        str(note["kind"]),
        f"{ranks_text(ranks)} noted {note['kind']}, first rank {lane.rank} in step {note['step']}"
        + (f": {details}" if details else ""),
        "high",
        ("noted by the rank itself",),
        victims=ranks,
        victim=Victim(ranks, str(note["kind"]), int(note["step"]), None),
        evidence=_noted(notes, dict.fromkeys(ranks, "victim")),
    )


def _mispaired(notes: Sequence[tuple[Lane, Record]]) -> Finding:
    """Ranks in one call that say what each of them meant by it: the few are odd, if there are few."""
    _lane, note = notes[0]
    call = note["group"], note["group_seq"]
    same = [(lane, one) for lane, one in notes if (one.get("group"), one.get("group_seq")) == call]
    sides: dict[str, list[int]] = {}
    for lane, one in same:
        sides.setdefault(str(one.get("purpose")), []).append(lane.rank)
    ordered = sorted(sides.values(), key=len, reverse=True)
    is_majority = 2 * len(ordered[0]) > sum(map(len, ordered)) and len(ordered) > 1
    odd = tuple(sorted(rank for ranks in ordered[1:] for rank in ranks)) if is_majority else ()
    ranks = tuple(sorted(lane.rank for lane, _ in same))
    victims = tuple(rank for rank in ranks if rank not in odd) if is_majority else ()
    roles = {rank: "culprit" if rank in odd else "victim" if is_majority else "unknown" for rank in ranks}
    meant = ": " + ", ".join(f"{purpose} on {ranks_text(members)}" for purpose, members in sides.items())
    if len(sides) == 1:
        meant = f" of {next(iter(sides))}"
    where = f"{call[0]} #{call[1]}"
    return Finding(
        "mismatch",
        16,
        str(note["kind"]),
        f"ranks met in {where}, step {note['step']}, and meant different calls{meant}",
        "medium" if is_majority else "undetermined",
        (
            "noted by the ranks themselves",
            f"majority {len(ordered[0])}/{len(ranks)}" if is_majority else "no majority",
        ),
        culprit=odd,
        victims=victims,
        unknown=() if is_majority else ranks,
        victim=Victim(victims or ranks, where, int(note["step"]), None),
        evidence=_noted(same, roles),
    )


def _noted(notes: Sequence[tuple[Lane, Record]], roles: Mapping[int, str]) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(lane.file_of(int(note["seq"])), int(note["seq"]), f"{roles[lane.rank]} {lane.rank}")
        for lane, note in sorted(notes, key=lambda entry: (entry[0].rank, entry[0].name))
    )


def with_own_crash(finding: Finding, findings: list[Finding]) -> tuple[Finding, list[Finding]]:
    """A note of ranks that met wrongly, with the crash that it led to; and the findings without that."""
    ranks = set(_all_named(finding))
    crash = next((one for one in findings if one.rule == CRASHED and ranks & set(_all_named(one))), None)
    if finding.kind != "mismatch" or crash is None:
        return finding, findings
    finding = replace(finding, consequence=(crash.kind, crash.code))
    return finding, [one for one in findings if one is not crash]


def _all_named(finding: Finding) -> tuple[int, ...]:
    return (*finding.culprit, *finding.victims, *finding.unknown)
