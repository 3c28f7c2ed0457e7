"""The first screen of a verdict as plain lines: at most 24, 80 columns, complete without colour.

Headline, confidence, the calls around the difference side by side, then why, then, not, unsure and
next. It lays out what the verdict says and decides nothing; colour is the command line's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from consensus_checker.context import Stand, look
from consensus_checker.explain import INDENT, WIDTH, after, paragraph
from consensus_checker.finding import Finding, FirstDivergence
from consensus_checker.history import History
from consensus_checker.resembles import CLASSES
from consensus_checker.verdict import COVERAGE, Verdict
from consensus_checker.words import call_text, ranks_text, value_text
from tracer.record import Record

LINES_MAX = 24
# Columns of ranks that fit side by side.
COLUMNS_MAX = 4
ROWS_AFTER = 2

HEADLINES = {
    "divergence": "DIVERGED",
    "stall": "STALLED",
    "mismatch": "MISMATCH",
    "dead": "DEAD",
    "frozen": "FROZEN",
    "invariant": "BROKEN",
    "undetermined": "UNDETERMINED",
    "consistent": "CONSISTENT",
    "incomplete": "INCOMPLETE",
    "nothing_compared": "UNCHECKED",
}


def first_screen(verdict: Verdict, history: History) -> list[str]:
    """What a person sees first."""
    # Places are counted without the kinds that some rank dropped.
    history = history.without(verdict.coverage.dropped_kinds)
    finding = verdict.finding
    first = finding.first_divergence
    lines = [*_headline(finding), *_confidence(verdict), ""]
    if first is not None:
        lines += [*_table(first, finding, history), ""]
        why = finding.trigger.summary if finding.trigger else "no local fact in the log explains it"
        lines += paragraph("why", f"{first.about}: {why}" if first.about else why, lines_max=3)
    if first is not None or finding.victim is not None:
        lines += paragraph("then", after(finding), lines_max=3)
    if finding.ruled_out:
        ruled_out = ", ".join(f"{name} ({because})" for name, because in finding.ruled_out)
        lines += paragraph("not", ruled_out, lines_max=3)
    doubts = _unsure(verdict)
    if doubts or first is not None:
        lines += paragraph("unsure", doubts or "-", lines_max=3)
    lines += _next(verdict)
    return lines[:LINES_MAX]


def _headline(finding: Finding) -> list[str]:
    first = finding.first_divergence
    text = finding.summary
    if first is not None:
        parted = text.split(" at call ")[0].split(": they part")[0]
        text = f"scope {first.scope}: {parted} at call {first.index}, step {first.step}"
    word = f"{HEADLINES.get(finding.kind, 'WRONG')}  ".ljust(INDENT)
    return wrap(word + text, WIDTH, subsequent_indent=" " * INDENT, drop_whitespace=True)[:4]


def _confidence(verdict: Verdict) -> list[str]:
    finding, coverage = verdict.finding, verdict.coverage
    like = ", like " + ", ".join(f"{name} ({CLASSES[name]})" for name in finding.resembles)
    parts = [f"confidence {finding.level}"]
    if finding.rule != COVERAGE:
        parts.append(finding.rule + (like if finding.resembles else ""))
    seen = f"coverage {coverage.ranks_seen}/{coverage.ranks_expected}"
    lines = [" | ".join([*parts, seen])]
    if len(lines[0]) > WIDTH - INDENT:
        lines = [" | ".join(parts), seen]
    if finding.basis:
        lines += wrap("(" + "; ".join(finding.basis) + ")", WIDTH - INDENT)[:2]
    return [" " * INDENT + line for line in lines]


def _table(first: FirstDivergence, finding: Finding, history: History) -> list[str]:
    scope = history.scope(first.scope)
    if scope is None:
        return []
    stands = look(history, scope, first.lane, first.index)
    odd = finding.culprit or finding.unknown
    columns = _columns(sorted(stands), finding.culprit, sorted(first.by_rank))
    gutter = max(8, len(str(first.index + ROWS_AFTER)) + 3)
    titles = [_title(rank, odd, finding) for rank in columns]
    agreeing = [rank for rank in first.by_rank if rank not in columns and rank not in odd]
    if agreeing:
        titles[-1] = f"{len(agreeing) + 1} others agree"
    differing = first.field_diff[0].field if first.field_diff else None
    widest = (WIDTH - gutter) // len(columns)
    rows = []
    for offset in range(-1, ROWS_AFTER + 1):
        records = [_at(stands[rank], offset) for rank in columns]
        if any(record is not None for record in records):
            telling = differing if offset == 0 else None
            cells = [_cell(record, history, telling, widest - 1) for record in records]
            rows.append((offset, cells, _note(records, history)))
    # Narrow columns leave room for what a row is about; the note gives way, never a cell.
    width = min(widest, 1 + max(len(cell) for _, cells, _ in rows for cell in (*cells, *titles)))
    lines = [(" " * gutter + "".join(title.ljust(width) for title in titles)).rstrip()]
    for offset, cells, note in rows:
        mark = ">" if offset == 0 else " "
        line = f"{mark} {first.index + offset}".ljust(gutter) + "".join(cell.ljust(width) for cell in cells)
        lines.append((line + " " + note if len(line) + 1 + len(note) <= WIDTH else line).rstrip())
    return lines


def _columns(ranks: Sequence[int], culprit: Sequence[int], present: Sequence[int]) -> list[int]:
    """Ranks to show: all if they fit, else the odd ones and one that stands for the others."""
    if len(ranks) <= COLUMNS_MAX:
        return list(ranks)
    others = [rank for rank in present if rank not in culprit]
    return [*culprit[: COLUMNS_MAX - 1], *others[:1]] if culprit else others[:COLUMNS_MAX]


def _title(rank: int, odd: Sequence[int], finding: Finding) -> str:
    mark = "" if rank not in odd else " <<" if finding.culprit else " ?"
    return f"rank {rank}{mark}"


def _at(stand: Stand, offset: int) -> Record | None:
    if offset < 0:
        return stand.before[offset] if len(stand.before) >= -offset else None
    if offset == 0:
        return stand.record
    return stand.after[offset - 1] if len(stand.after) >= offset else None


def _cell(record: Record | None, history: History, telling: str | None, room: int) -> str:
    """A record in few words: its name and the value that tells most; the name gives way, not the value."""
    if record is None:
        return "-"
    kind = history.kinds[record["kind"]]
    if kind.role == "meeting":
        name, value = call_text(f"{record.get('phase') or 'meet'} {record.get('purpose', '')}".strip()), ""
    else:
        name, value = call_text(kind.name), "..." if record.get("phase") == "call" else ""
        # By convention a declaration ends with the outcome, and numbers say it best.
        numbers = [
            field
            for field in kind.compared
            if isinstance(record.get(field), int) and not isinstance(record.get(field), bool)
        ]
        shown = (
            telling if telling in kind.compared and telling in record else (numbers[-1] if numbers else None)
        )
        if shown is not None and (not value or shown == telling):
            value = value_text(record[shown])[: room - 4]
    room -= len(value) + 1 if value else 0
    if len(name) > room:
        name = name[: room - 1] + "."
    return f"{name} {value}".rstrip()


def _note(records: Sequence[Record | None], history: History) -> str:
    """What the row is about: its request, its group or its first field, where all ranks agree on that."""
    told = [record for record in records if record is not None]
    if len({record["kind"] for record in told}) > 1:
        return ""
    kind = history.kinds[told[0]["kind"]]
    field = "rid" if "rid" in told[0] else "group" if "group" in told[0] else next(iter(kind.compared), None)
    if (
        field is None
        or any(field not in record for record in told)
        or len({repr(record.get(field)) for record in told}) > 1
    ):
        return ""
    value = value_text(told[0].get(field))
    return value if field in ("rid", "group") else f"{field} {value}"


def _unsure(verdict: Verdict) -> str:
    finding, coverage = verdict.finding, verdict.coverage
    doubts = []
    if finding.unknown:
        doubts.append(f"who is right among {ranks_text(finding.unknown)}")
    if finding.alternatives:
        doubts.append("or because " + "; or ".join(entry.summary for entry in finding.alternatives[:3]))
    if coverage.missing:
        doubts.append(f"{ranks_text(coverage.missing)} left no log of this run")
    if coverage.truncated:
        doubts.append(f"the log of {ranks_text(coverage.truncated)} was cut")
    if coverage.dropped_up_to:
        ranks = ranks_text(sorted(coverage.dropped_up_to))
        doubts.append(f"of {ranks} the oldest records are gone, a ring has dropped them")
    if coverage.throttled:
        first = min(coverage.throttled.values())
        ranks = ranks_text(sorted(coverage.throttled))
        doubts.append(f"{ranks} left out steps from {first} on: recording took too much time")
    if coverage.other_runs:
        count = len(coverage.other_runs)
        doubts.append(
            f"{count} files of another run were left out"
            if count > 1
            else "1 file of another run was left out"
        )
    doubts += coverage.doubts
    doubts += [f"{ranks_text(ranks)} dropped {kind}" for kind, ranks in coverage.dropped_kinds.items()]
    if verdict.findings:
        plural = "s" if len(verdict.findings) > 1 else ""
        doubts.append(f"{len(verdict.findings)} more finding{plural}, later or elsewhere (--json)")
    return "; ".join(doubts)


def _next(verdict: Verdict) -> list[str]:
    lines: list[str] = []
    for number, (command, _why) in enumerate(verdict.next):
        # A line break inside the quotes of a query is a space to it, so a wrapped command still runs.
        head = "  next".ljust(INDENT) if number == 0 else " " * INDENT
        broken = wrap(
            command, WIDTH - INDENT, break_long_words=False, break_on_hyphens=False, subsequent_indent=""
        )
        lines += [head + broken[0], *(" " * INDENT + line for line in broken[1:])]
    return lines
