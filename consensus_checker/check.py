"""Logs in, verdict out.

    lanes -> scopes -> compare, one pass -> first difference of each scope
                                              | second look
                                              v
             who (vote) - how (alignment) - why (trigger) - what came of it (ending)

The earliest finding in causal order is the verdict; a stall or a crash after a divergence is its
consequence, not a finding of its own. Nothing here knows a cache: see `history`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from consensus_checker import ending
from consensus_checker.divergence import Divergence, divergence, in_causal_order
from consensus_checker.finding import Finding
from consensus_checker.history import History, Lane, Run, Source
from consensus_checker.rules.agreement import ANOMALIES, Comparison, compare
from consensus_checker.stall import find_stall
from consensus_checker.verdict import COVERAGE, Coverage, Verdict
from consensus_checker.words import ranks_text
from tracer.record import Record


def check(source: Run | Iterable[Source] | History, *, path: str = "PATH") -> Verdict:
    """Compare all ranks of a run and say what went wrong first, or how far nothing did.

    Args:
        source: a folder's logs (`tracer.log.find_logs`), lanes in memory, or a history of them.
        path: how the caller names the folder, quoted for a shell; only for the commands in `next`.
    """
    history = source if isinstance(source, History) else History.of(source)
    comparisons = [compare(history, scope, name) for scope in history.scopes for name in history.lane_names]
    coverage = _coverage(history, comparisons)
    divergences = in_causal_order(
        [divergence(history, comparison) for comparison in comparisons if comparison.difference is not None]
    )
    findings = _findings(history, divergences, _anomalies(history, comparisons))
    if not findings:
        findings = [_no_finding(history, coverage)]
    return Verdict(findings[0], coverage, tuple(findings[1:]), _next(findings[0], path))


def _findings(
    history: History, divergences: Sequence[Divergence], anomalies: Sequence[tuple[Lane, Record]]
) -> list[Finding]:
    """All findings, the earliest in causal order first."""
    findings = [found.finding for found in divergences]
    outcomes = {lane.outcome for lane in history.lanes}
    stall = find_stall(history) if outcomes & {"hung", "crashed"} else None
    if stall is not None:
        died = ending.crashed(history, stall)
        hung = "hung" in outcomes
        if divergences and hung:
            findings[0] = ending.with_consequence(history, divergences[0], stall)
        elif divergences and died is not None:
            findings[0] = ending.with_crash(findings[0], died)
        differing = ending.mismatches(stall) if hung else []
        # A rank that crashed is missed by the others: their stall is the crash's consequence.
        if not divergences:
            findings += (
                [died]
                if died is not None
                else differing or ([ending.stalled(history, stall)] if hung else [])
            )
        else:
            findings += differing
    for lane, note in anomalies:
        finding = ending.anomaly(lane, note)
        first = divergences[0] if divergences else None
        if first is None or _is_before(lane, note, first):
            findings.insert(0, finding)
        else:
            findings.append(finding)
    return findings


def _is_before(lane: Lane, note: Record, found: Divergence) -> bool:
    place = found.at.get(lane.rank) if found.lane == lane.name else None
    if place is not None:
        return bool(note["seq"] < place[1])
    return bool(note["step"] < found.order[0])


def _anomalies(history: History, comparisons: Sequence[Comparison]) -> list[tuple[Lane, Record]]:
    """The earliest note of each kind; lanes that no comparison has read are read here."""
    notes = [entry for comparison in comparisons for entry in comparison.anomalies]
    read = {(rank, comparison.lane) for comparison in comparisons for rank in comparison.seen}
    if ANOMALIES & set(history.kinds):
        for lane in history.lanes:
            if (lane.rank, lane.name) not in read:
                notes += [(lane, record) for record in lane.records() if record["kind"] in ANOMALIES]
    notes.sort(key=lambda entry: (entry[1]["step"], entry[0].rank, entry[1]["seq"]))
    earliest: dict[str, tuple[Lane, Record]] = {}
    for lane, record in notes:
        earliest.setdefault(record["kind"], (lane, record))
    return list(earliest.values())


def _coverage(history: History, comparisons: Sequence[Comparison]) -> Coverage:
    absent = {rank for comparison in comparisons for rank in comparison.absent}
    cut = {lane.rank for lane in history.lanes if lane.outcome is None}
    others = {lane.file_of(0) for lane in history.others}
    return Coverage(
        ranks_expected=history.world_size,
        ranks_seen=len(history.ranks),
        missing=tuple(rank for rank in range(history.world_size) if rank not in history.ranks),
        truncated=tuple(sorted(cut | absent)),
        compared_calls=sum(comparison.rows for comparison in comparisons),
        decisions_compared_fraction=_decisions_compared(history, comparisons),
        other_runs=tuple(sorted(others)),
    )


def _decisions_compared(history: History, comparisons: Sequence[Comparison]) -> float | None:
    """Smallest part, over ranks, of the decision records read that were in a row with another rank's.

    A kind is read in every scope that shows it; it counts where most of it was compared.
    """
    fractions = []
    for rank in history.ranks:
        seen: Counter[tuple[str, str]] = Counter()
        compared: Counter[tuple[str, str]] = Counter()
        for comparison in comparisons:
            for total, part in ((seen, comparison.seen), (compared, comparison.compared)):
                for kind, count in part.get(rank, {}).items():
                    total[comparison.lane, kind] = max(total[comparison.lane, kind], count)
        if total_seen := sum(seen.values()):
            fractions.append(sum(compared.values()) / total_seen)
    return round(min(fractions), 4) if fractions else None


def _no_finding(history: History, coverage: Coverage) -> Finding:
    calls = "1 call" if coverage.compared_calls == 1 else f"{coverage.compared_calls} calls"
    compared = f"{calls} compared on {coverage.ranks_seen} ranks"
    if not coverage.compared_calls:
        return Finding(
            "nothing_compared", 4, COVERAGE, "no call was compared between two ranks", "undetermined"
        )
    if coverage.is_complete and all(lane.outcome == "completed" for lane in history.lanes):
        return Finding(
            "consistent", 0, COVERAGE, f"no rank diverged: {compared}", "high", ("all logs complete",)
        )
    lacking = []
    if coverage.missing:
        lacking.append(f"{ranks_text(coverage.missing)} left no log of this run")
    if coverage.truncated:
        lacking.append(f"the log of {ranks_text(coverage.truncated)} was cut")
    return Finding(
        "incomplete",
        4,
        COVERAGE,
        f"equal as far as the logs go ({compared}); {' and '.join(lacking) or 'not every log was completed'}",
        "undetermined",
        silent=coverage.missing,
        evidence=ending.silent_evidence(coverage.missing),
    )


def _next(finding: Finding, path: str) -> tuple[tuple[str, str], ...]:
    hits = (f"hicache hits {path}", "which tier served what, and why the rest was computed")
    first = finding.first_divergence
    step = first.step if first else finding.victim.step if finding.victim else None
    if step is None:
        return (hits,)
    where = f"step BETWEEN {max(0, step - 1)} AND {step + 1}"
    columns = "rank, seq, kind, node, tokens, fields"
    query = f'hicache query {path} "SELECT {columns} FROM decisions WHERE {where} ORDER BY rank, seq"'
    return ((query, "the decisions of every rank around that step"), hits)
