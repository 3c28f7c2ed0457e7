"""Evidence in which no rule finds anything: sound as far as it goes, or too little to say."""

from __future__ import annotations

from consensus_checker.finding import Evidence, Finding
from consensus_checker.verdict import COVERAGE
from consensus_checker.weigh import Weighed
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier


def without_claims(dossier: Dossier, weighed: Weighed) -> Finding:
    """Where no rule says anything: sound, if two looks show that it goes on; else not enough to say."""
    compared = compared_calls(dossier)
    moved, still = _moved(dossier)
    ranks = ranks_of(dossier)
    everybody = {rank for kind in ranks.values() for rank in kind}
    if compared and moved and not still and everybody <= moved and not weighed.missing:
        evidence = tuple(
            Evidence(dossier.files[dump.at.file].name, dump.at.record, f"moved {dump.who.rank}")
            for dump in dossier.dumps
            if dump.who.rank is not None and dump.sample > 0
        )
        return Finding(
            "consistent",
            0,
            COVERAGE,
            f"nothing contradicts: {compared} calls compared on {ranks_text(sorted(moved))}, and a second "
            "look shows that all of them went on",
            "medium",
            ("two looks that show progress",),
            evidence=evidence,
        )
    if not any(ranks.values()):
        text = "what was read tells of no rank"
        return Finding("nothing_compared", 4, COVERAGE, text, "undetermined")
    if not compared:
        text = f"nothing could be compared between two ranks of {ranks_text(sorted(everybody))}"
        return Finding("nothing_compared", 4, COVERAGE, text, "undetermined")
    text = f"nothing contradicts, as far as this evidence goes: {compared} calls compared"
    if not moved:
        text += "; one look can't tell a job that goes on from one that stands"
    return Finding("incomplete", 4, COVERAGE, text, "undetermined", silent=weighed.missing)


def compared_calls(dossier: Dossier) -> int:
    """Calls that at least two ranks' newest dumps of one group still hold."""
    newest = {dump.who.rank: dump for dump in dossier.dumps if dump.who.rank is not None}
    ranges: dict[object, list[tuple[int, int]]] = {}
    for dump in newest.values():
        for own in dump.groups:
            if own.first >= 0 and own.last >= own.first:
                ranges.setdefault(own.group, []).append((own.first, own.last))
    calls = 0
    for spans in ranges.values():
        if len(spans) > 1:
            calls += max(0, min(last for _, last in spans) - max(first for first, _ in spans) + 1)
    return calls


def seen_again(dossier: Dossier) -> frozenset[int]:
    """Ranks that a second look saw."""
    looks = [(row.who.rank, row.sample) for row in dossier.stacks]
    looks += [(row.who.rank, row.sample) for row in dossier.dumps]
    return frozenset(rank for rank, sample in looks if rank is not None and sample > 0)


def _moved(dossier: Dossier) -> tuple[set[int], set[int]]:
    """Ranks of which a later look shows more than the one before, and those of which it does not."""
    heads: dict[int, list[int]] = {}
    for dump in dossier.dumps:
        if dump.who.rank is not None:
            heads.setdefault(dump.who.rank, []).append(sum(max(0, own.enqueued) for own in dump.groups))
    looked = {rank: own for rank, own in heads.items() if len(own) > 1}
    moved = {rank for rank, own in looked.items() if own[-1] > own[-2]}
    return moved, set(looked) - moved


def ranks_of(dossier: Dossier) -> dict[str, set[int]]:
    """Kind of evidence -> ranks that it covers."""
    found: dict[str, set[int]] = {
        "dumps": {dump.who.rank for dump in dossier.dumps if dump.who.rank is not None},
        "stacks": {stack.who.rank for stack in dossier.stacks if stack.who.rank is not None},
        "lines": {line.who.rank for line in dossier.lines if line.who.rank is not None},
        "statuses": {status.who.rank for status in dossier.statuses if status.who.rank is not None},
        "polls": {rank for poll in dossier.polls for rank in (*poll.counts, *poll.states)},
    }
    return {kind: ranks for kind, ranks in found.items() if ranks}
