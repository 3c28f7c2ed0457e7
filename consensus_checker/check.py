"""Logs in, verdict out.

    lanes -> scopes -> compare, one pass -> first difference of each scope
                                              | second look
                                              v
             who (vote) - how (alignment) - why (trigger) - what came of it (ending)

The earliest finding in causal order is the verdict; a stall or a crash after a divergence is its
consequence, not a finding of its own. Nothing here knows a cache: see `history`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from consensus_checker import deaths, ending, skip
from consensus_checker.context import past
from consensus_checker.divergence import CONFIG, Divergence, divergence, in_causal_order
from consensus_checker.evidence import silent_lines
from consensus_checker.finding import Evidence, Finding, FirstDivergence, Level
from consensus_checker.history import History, Lane, Run, Source
from consensus_checker.notes import anomaly, with_own_crash
from consensus_checker.reenact import Reenact
from consensus_checker.rules.agreement import Comparison, compare
from consensus_checker.stall import Stall
from consensus_checker.verdict import COVERAGE, Coverage, Verdict
from consensus_checker.words import ranks_text
from tracer.record import MAIN_LANE, Record
from tracer.transfers import COUNTS

# Part of every rank's decisions that must have been compared for nothing found to mean anything.
COMPARED_MIN = 0.95
# Without records of requests there is nothing that their hits could be counted from.
REQUEST = "request"
# Among so many records of a server's log there is one of a request.
FIRST_RECORDS = 4096
# How a run was read, where that was not line by line.
READ = {
    "lines": (),
    "checkpoints": ("compared by their checkpoints",),
    "checksums": ("compared by their checkpoints", "every block has its checksum"),
}
# Fields that SQL would read as something else, or that a table of records has under another name.
RESERVED = frozenset(
    {"group", "order", "left", "right", "op", "rank", "lane", "seq", "step", "kind", "phase", "fields", "end"}
)


def check(
    source: Run | Iterable[Source] | History,
    *,
    path: str = "PATH",
    reenact: Reenact | None = None,
    every_line: bool = False,
    skip_bytes_min: int = skip.BYTES_MIN,
) -> Verdict:
    """Compare all ranks of a run and say what went wrong first, or how far nothing did.

    Args:
        source: a folder's logs (`tracer.log.find_logs`), lanes in memory, or a history of them.
        path: how the caller names the folder, quoted for a shell; only for the commands in `next`.
        reenact: takes a decision again from what the log says it was taken from; breaks ties.
        every_line: hold every block of lines against its checksum, also where a checkpoint vouches for them.
        skip_bytes_min: logs of so many bytes in all are read from their checkpoints, where they can be.
    """
    history = source if isinstance(source, History) else History.of(source)
    read = skip.arm(history, bytes_min=skip_bytes_min, is_verified=every_line)
    comparisons = _compare(history)
    # Only who has read all lanes knows which steps all of them have.
    if history.align_steps():
        comparisons = _compare(history)
    # Only a lane's end says what it has dropped, so a run that dropped something is compared again.
    if dropped := history.dropped:
        history = history.without(dropped)
        comparisons = _compare(history)
    coverage = replace(_coverage(history, comparisons, dropped), read=read)
    divergences = in_causal_order(
        [
            divergence(_past(history, comparison), comparison, reenact)
            for comparison in comparisons
            if comparison.difference is not None
        ]
    )
    findings = _findings(history, divergences)
    if not findings:
        findings = [_no_finding(history, coverage, comparisons)]
    return Verdict(findings[0], coverage, tuple(findings[1:]), _next(findings[0], history, path))


def _compare(history: History) -> list[Comparison]:
    return [compare(history, scope, name) for scope in history.scopes for name in history.lane_names]


def _past(history: History, comparison: Comparison) -> History:
    return past(history, comparison.scope, comparison.lane, comparison.index)


def _findings(history: History, divergences: Sequence[Divergence]) -> list[Finding]:
    """All findings, the earliest in causal order first."""
    findings = [found.finding for found in divergences]
    outcomes = {lane.outcome for lane in history.lanes}
    # Where all others were stopped, a log without an end may be that of a dead process.
    if outcomes & {"hung", "crashed"} or outcomes >= {None, "stopped"}:
        findings = _with_ending(history, divergences, skip.ending(history), is_hung="hung" in outcomes)
    for notes in _anomalies(history):
        finding, findings = with_own_crash(anomaly(notes), findings)
        first = divergences[0] if divergences else None
        if first is None or any(_is_before(lane, note, first) for lane, note in notes):
            findings.insert(0, finding)
        else:
            findings.append(finding)
    if len(history.config_sides) > 1:
        findings.append(_configured(history))
    return findings


def _with_ending(
    history: History, divergences: Sequence[Divergence], stall: Stall, *, is_hung: bool
) -> list[Finding]:
    """The divergences, each with the stall, crash or death that it led to, and what is not of their making.

    What a replica does that shares no wait with a divergence is not that divergence's consequence.
    """
    findings: list[Finding] = []
    # A rank that lost a peer may end by an error, so whoever is dead goes first.
    died = deaths.dead(history, stall) or deaths.crashed(history, stall)
    rest = stall
    is_told = died is None
    hung = {lane.rank for lane in history.lanes if lane.outcome == "hung"}
    for found in divergences:
        own, rest = rest.split(found.scope.ranks)
        finding = found.finding
        if is_hung and (own.waits or (not stall.waits and hung & set(found.scope.ranks))):
            finding = ending.with_consequence(history, found, own)
        elif not is_told and died is not None and _is_within(died, found, own):
            finding = deaths.with_crash(finding, died)
            is_told = True
        findings.append(finding)
        if is_hung:
            findings += ending.mismatches(own)
    # The divergences come first, in their order; what they led to is told in them.
    findings.sort(key=lambda finding: finding.kind != "divergence")
    if died is not None and not is_told:
        findings.append(died)
    if died is not None:
        # A rank that has ended is missed by the others: their stall is the consequence.
        _, rest = rest.split((*died.culprit, *died.victims) or died.unknown)
    if is_hung and (rest.waits or not (findings or stall.waits)):
        findings += ending.mismatches(rest) or [ending.stalled(history, rest)]
    return findings


def _is_within(died: Finding, found: Divergence, own: Stall) -> bool:
    """Whether a crash is on ranks of the divergence, or on ones that wait with them."""
    reached = {*found.scope.ranks, *(rank for wait in own.waits for rank in wait.parties)}
    return bool(reached & {*died.culprit, *died.victims, *died.unknown})


def _configured(history: History) -> Finding:
    """Ranks of one run that were not configured alike: whatever one decides, another may decide otherwise."""
    sides = history.config_sides
    ranks = tuple(sorted(rank for side in sides for rank in side))
    others = tuple(sorted(rank for side in sides[1:] for rank in side))
    evidence = [
        Evidence(lane.file_of(0), 0, f"unknown {lane.rank}")
        for rank in ranks
        if (lane := next((lane for lane in history.lanes if lane.rank == rank), None)) is not None
    ]
    return Finding(
        "undetermined",
        20,
        CONFIG,
        f"config_digest of {ranks_text(others)} differs from that of {ranks_text(sides[0])}: "
        "the ranks were not configured alike",
        "undetermined",
        ("headers",),
        unknown=ranks,
        evidence=tuple(evidence),
    )


def _is_before(lane: Lane, note: Record, found: Divergence) -> bool:
    place = found.at.get(lane.rank) if found.lane == lane.name else None
    if place is not None:
        return bool(note["seq"] < place[1])
    return bool(note["step"] < found.order[0])


def _anomalies(history: History) -> list[list[tuple[Lane, Record]]]:
    """Each kind of note: the first of every rank, the earliest in front."""
    notes = [(lane, record) for lane in history.lanes for record in lane.notes]
    notes.sort(key=lambda entry: (entry[1]["step"], entry[0].rank, entry[1]["seq"]))
    found: dict[str, dict[int, tuple[Lane, Record]]] = {}
    for lane, record in notes:
        found.setdefault(record["kind"], {}).setdefault(lane.rank, (lane, record))
    return [list(ranks.values()) for ranks in found.values()]


def _coverage(
    history: History, comparisons: Sequence[Comparison], dropped: Mapping[str, tuple[int, ...]]
) -> Coverage:
    absent = {rank for comparison in comparisons for rank in comparison.absent}
    cut = {lane.rank for lane in history.lanes if not lane.is_closed}
    others = {lane.file_of(0) for lane in history.others}
    return Coverage(
        ranks_expected=history.world_size,
        ranks_seen=len(history.ranks),
        missing=history.missing,
        truncated=tuple(sorted(cut | absent)),
        compared_calls=sum(comparison.rows for comparison in comparisons),
        decisions_compared_fraction=_decisions_compared(history, comparisons),
        other_runs=tuple(sorted(others)),
        doubts=history.doubts,
        dropped_kinds=dropped,
        dropped_up_to=_dropped_up_to(history),
        compared_from={
            f"{comparison.scope.name} {comparison.lane}": comparison.start
            for comparison in comparisons
            if comparison.start
        },
        throttled={rank: changes[0][0] for rank, changes in history.throttled.items()},
    )


def _dropped_up_to(history: History) -> dict[int, dict[str, int]]:
    found: dict[int, dict[str, int]] = {}
    for lane in history.lanes:
        if lane.source.last_dropped_seq:
            found.setdefault(lane.rank, {})[lane.name] = lane.source.last_dropped_seq
    return found


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


def _no_finding(history: History, coverage: Coverage, comparisons: Sequence[Comparison]) -> Finding:
    calls = "1 call" if coverage.compared_calls == 1 else f"{coverage.compared_calls} calls"
    ranks = "1 rank" if coverage.ranks_seen == 1 else f"{coverage.ranks_seen} ranks"
    compared = f"{calls} compared on {ranks}"
    if not coverage.compared_calls:
        return Finding("nothing_compared", 4, COVERAGE, _why_nothing(history, coverage), "undetermined")
    lacking = _lacking(history, coverage, comparisons)
    if coverage.dropped_up_to:
        compared += f", of {ranks_text(sorted(coverage.dropped_up_to))} only what a ring has kept"
        if coverage.compared_from:
            begins = (f"{place} from call {index} on" for place, index in coverage.compared_from.items())
            compared += f": {', '.join(begins)}"
    if coverage.throttled:
        compared += f", without the steps that {_throttled(coverage)}"
    if not lacking:
        basis = "all logs complete" if not coverage.dropped_up_to else "all logs complete at their end"
        # Of what a ring has dropped, or a throttle left out, nobody can say that it was alike.
        level: Level = "medium" if coverage.dropped_up_to or coverage.throttled else "high"
        how = READ[coverage.read]
        return Finding("consistent", 0, COVERAGE, f"no rank diverged: {compared}", level, (basis, *how))
    return Finding(
        "incomplete",
        4,
        COVERAGE,
        f"equal as far as the logs go ({compared}); {' and '.join(lacking)}",
        "undetermined",
        silent=coverage.missing,
        evidence=silent_lines(coverage.missing),
    )


def _throttled(coverage: Coverage) -> str:
    ranks = sorted(coverage.throttled)
    first = min(coverage.throttled.values())
    return f"{ranks_text(ranks)} left out from step {first} on, because recording took too much time"


def _why_nothing(history: History, coverage: Coverage) -> str:
    if history.world_size == 1:
        return "one rank alone has nobody to be compared with"
    if coverage.ranks_seen == 1:
        return f"only {ranks_text(history.ranks)} left a log that could be compared: it has no partner"
    return "no call was compared between two ranks"


def _lacking(history: History, coverage: Coverage, comparisons: Sequence[Comparison]) -> list[str]:
    """What stands between these logs and `consistent`, each in words; empty when nothing does."""
    lacking = []
    if coverage.missing:
        lacking.append(f"{ranks_text(coverage.missing)} left no log of this run")
    if coverage.truncated:
        lacking.append(f"the log of {ranks_text(coverage.truncated)} was cut")
    stopped = sorted({lane.rank for lane in history.lanes if lane.outcome == "stopped" and not lane.is_done})
    if stopped:
        lacking.append(f"{ranks_text(stopped)} stopped before the end")
    if unaligned := sorted({rank for comparison in comparisons for rank in comparison.unaligned}):
        lacking.append(f"the oldest records of {ranks_text(unaligned)} are gone, and nobody has counted them")
    lacking += coverage.doubts
    lacking += [f"{ranks_text(ranks)} dropped {kind}" for kind, ranks in coverage.dropped_kinds.items()]
    partnered = frozenset[int]().union(*(comparison.partnered for comparison in comparisons))
    if alone := [rank for rank in history.ranks if rank not in partnered]:
        lacking.append(f"{ranks_text(alone)} had nobody to be compared with")
    fraction = coverage.decisions_compared_fraction
    if fraction is not None and fraction < COMPARED_MIN and not lacking:
        lacking.append(f"only {fraction:.0%} of the decisions were compared")
    if not lacking and not all(lane.is_done for lane in history.lanes):
        lacking.append("not every log was completed")
    return lacking


def _next(finding: Finding, history: History, path: str) -> tuple[tuple[str, str], ...]:
    hits: tuple[tuple[str, str], ...] = ()
    if REQUEST in history.kinds:
        hits = ((f"hicache hits {path}", "which tier served what, and why the rest was computed"),)
    first = finding.first_divergence
    step = first.step if first else finding.victim.step if finding.victim else None
    if step is None:
        return hits
    if first is None and len(history.lane_names) > 1:
        lanes = f"hicache query {path} --name lanes_at"
        return ((lanes, "what every lane of every rank was at when its log ended"), *hits)
    if first is not None and (sql := _fact_sql(first, finding, history)) is not None:
        call = (f'hicache query {path} "{sql}"', "the call on every rank, with the fact beside it")
        return (call, *_queue_at(finding, step, path), *_test_of(first, history, path), *hits)
    where = f"step BETWEEN {max(0, step - 1)} AND {step + 1}"
    columns = "rank, seq, kind, node, tokens, fields"
    query = f'hicache query {path} "SELECT {columns} FROM decisions WHERE {where} ORDER BY rank, seq"'
    around = (query, "the decisions of every rank around that step")
    return (around, *_test_of(first, history, path), *hits)


def _test_of(first: FirstDivergence | None, history: History, path: str) -> tuple[tuple[str, str], ...]:
    """Of a real server's logs, if they have what a test is made of."""
    lane = next((lane for lane in history.lanes if lane.name == MAIN_LANE), None)
    if first is None or first.lane != MAIN_LANE or lane is None:
        return ()
    if lane.header.get("config", {}).get("server") != "sglang":
        return ()
    if not any(isinstance(one.get("pages"), str) for one in _first_requests(lane)):
        return ()
    words = "a test of the server's own code that fails at this call"
    return ((f"hicache replay {path} --test test_parting.py", words),)


def _first_requests(lane: Lane) -> Iterator[Record]:
    """Of a lane's first records those of requests."""
    return (record for record in islice(lane.records(), FIRST_RECORDS) if record["kind"] == REQUEST)


def _queue_at(finding: Finding, step: int, path: str) -> tuple[tuple[str, str], ...]:
    """Where ranks counted differently what a transfer queue had ready: that queue, at that step."""
    fact = finding.trigger.fact if finding.trigger is not None else ""
    for queue, counts in COUNTS.items():
        if fact in (saw for saw, _applied in counts):
            replay = f"hicache replay {path} --queue {queue} --until {step}"
            return ((replay, "what each rank had in that queue, and what was applied"),)
    return ()


def _fact_sql(first: FirstDivergence, finding: Finding, history: History) -> str | None:
    """A query that shows the call, what differs in it and the fact that explains it; None if none would."""
    trigger = finding.trigger
    kind = history.kinds.get(first.call)
    if kind is None or kind.role == "meeting" or (trigger is not None and trigger.call != first.call):
        return None
    declared = (*kind.compared, *kind.local, *kind.info)
    # A field of an object is in the object's column.
    differing = [diff.field.partition(".")[0] for diff in first.field_diff]
    fields = [name for name in differing if name in kind.compared]
    if trigger is not None:
        fields.append(trigger.fact)
    fields = list(dict.fromkeys(fields))
    names = (kind.name, *fields)
    if not fields or not set(fields) <= set(declared):
        return None
    if not all(re.fullmatch(r"[a-z][a-z0-9_]*", name) and name not in RESERVED for name in names):
        return None
    phases = ("phase",) if first.phase is not None or first.kind == "collective" else ()
    columns = ", ".join(("rank", "seq", *phases, *fields))
    return (
        f"SELECT {columns} FROM records WHERE kind = '{kind.name}' AND step = {first.step} ORDER BY seq, rank"
    )
