"""The first screen of a diagnosis: the verdict, who stands where, what is left open, what to do.

A verdict with calls of our own logs has the screen of `check`, and what to do beneath. One from others'
evidence has in its place the ranks as a grid and the merged tree of their stacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from cli.theme import INDENT, WIDTH

if TYPE_CHECKING:
    from rich.text import Text

    from consensus_checker.diagnose import Diagnosis
    from consensus_checker.finding import Finding
    from consensus_checker.verdict import Sources, Verdict

LINES_MAX = 24
TREE_LINES_MIN = 4
BASIS_LINES_MAX = 2
ADVICE_SHOWN_MAX = 2
# Ranks of a row of the grid, in eights.
ROW_RANKS = 32
SIGNS = {".": "fine", "W": "waits", "!": "missing", "?": "unknown", "X": "dead"}
FILES_SHOWN_MAX = 40
# What is noted of a file that has no bytes.
EMPTY = "it is empty"


def screen(told: Diagnosis, *, full: bool = False, quiet: bool = False) -> list[Text]:
    """At most 24 lines; with `full` every finding and file behind them, with `quiet` one sentence."""
    from cli.screens.verdict import coloured

    verdict = told.verdict
    if quiet:
        word = verdict.kind.upper().replace("_", " ")
        return coloured([f"{word}  {verdict.finding.summary}"], verdict.kind)
    lines = _first(told)
    if full:
        lines += _everything(told)
    return coloured(lines, verdict.kind)


def _first(told: Diagnosis) -> list[str]:
    """Verdict, evidence, what is left open, what to do; the stacks get the room that is left."""
    from consensus_checker.screen import first_screen

    verdict = told.verdict
    tail = [*_advice(verdict), *_next(verdict)]
    if told.history is not None and verdict.finding.first_divergence is not None:
        shown = first_screen(verdict, told.history)
        head = shown[: next((at for at, line in enumerate(shown) if line.startswith("  next")), len(shown))]
        rest: list[str] = []
        tree: list[str] = []
    else:
        head = [*_headline(verdict.finding), *_confidence(verdict), *_grid(verdict)]
        rest = _rest(verdict)
        room = LINES_MAX - len(head) - len(rest) - len(tail)
        tree = _tree(told, max(room, TREE_LINES_MIN)) if verdict.code not in (0, 4) else []
    body = [*head, *tree, *rest]
    if also := _also(verdict)[: max(0, LINES_MAX - len(body) - len(tail))]:
        body += also
    return [*_cut(body, LINES_MAX - len(tail)), *tail]


def _cut(body: list[str], count: int) -> list[str]:
    return body if len(body) <= count else [*body[: count - 1], f"{' ' * INDENT}.. (--full)"]


def _headline(finding: Finding) -> list[str]:
    from consensus_checker.screen import HEADLINES

    word = f"{HEADLINES.get(finding.kind, 'WRONG')}  ".ljust(INDENT)
    return wrap(word + finding.summary, WIDTH, subsequent_indent=" " * INDENT, break_on_hyphens=False)[:5]


def _rest(verdict: Verdict) -> list[str]:
    """What is beneath the evidence."""
    from consensus_checker.explain import after, paragraph

    finding = verdict.finding
    lines: list[str] = []
    if finding.first_divergence is not None:
        lines += paragraph("then", after(finding), lines_max=2)
    elif finding.code not in (0, 4) and finding.victim and finding.victim.where not in finding.summary:
        lines += paragraph("where", after(finding), lines_max=2)
    if finding.ruled_out:
        ruled_out = ", ".join(f"{name} ({because})" for name, because in finding.ruled_out)
        lines += paragraph("not", ruled_out, lines_max=2)
    if doubts := _unsure(verdict):
        lines += paragraph("unsure", doubts, lines_max=3)
    if verdict.coverage.sources is not None and (seen := seen_text(verdict.coverage.sources)):
        lines += paragraph("read", seen, lines_max=2)
    return lines


def _confidence(verdict: Verdict) -> list[str]:
    from consensus_checker.resembles import CLASSES
    from consensus_checker.verdict import COVERAGE

    finding, coverage = verdict.finding, verdict.coverage
    like = ", like " + ", ".join(
        f"{name} ({CLASSES[name]})" if name in CLASSES else name for name in finding.resembles
    )
    parts = [f"confidence {finding.level}"]
    if finding.rule != COVERAGE:
        parts.append(finding.rule + (like if finding.resembles else ""))
    parts.append(f"coverage {coverage.ranks_seen}/{coverage.ranks_expected}")
    lines = wrap(" | ".join(parts), WIDTH - INDENT)
    if finding.basis:
        basis = wrap("(" + "; ".join(finding.basis) + ")", WIDTH - INDENT)
        if len(basis) > BASIS_LINES_MAX:
            basis = [*basis[: BASIS_LINES_MAX - 1], f"{basis[BASIS_LINES_MAX - 1][: WIDTH - INDENT - 4]} ..)"]
        lines += basis
    return [" " * INDENT + line for line in lines]


def marks(verdict: Verdict) -> dict[int, str]:
    """One sign for each rank that is there or was expected."""
    finding = verdict.finding
    signs = dict.fromkeys(range(verdict.coverage.ranks_expected), ".")
    signs |= dict.fromkeys(verdict.coverage.missing, "?")
    signs |= dict.fromkeys(finding.victims, "W")
    signs |= dict.fromkeys((*finding.unknown, *finding.silent), "?")
    signs |= dict.fromkeys(finding.culprit, "X" if finding.code == 14 else "!")
    return signs


def _grid(verdict: Verdict) -> list[str]:
    """The ranks in rows, eights apart, and what the signs stand for that are in it."""
    signs = marks(verdict)
    if len(signs) < 2 or set(signs.values()) <= {"."}:
        return []
    rows = [list(signs)[at : at + ROW_RANKS] for at in range(0, len(signs), ROW_RANKS)]
    shown = [row for row in rows if {signs[rank] for rank in row} - {".", "W"}] or rows[:1]
    lines = []
    for row in shown[:4]:
        label = f"{row[0]}-{row[-1]}" if len(row) > 1 else str(row[0])
        text = " ".join("".join(signs[rank] for rank in row[at : at + 8]) for at in range(0, len(row), 8))
        lines.append(f"{label.rjust(9)}  {text}"[:WIDTH])
    if len(rows) > len(shown[:4]):
        lines.append(f"{' ' * INDENT} {_left_out(len(rows) - len(shown[:4]))}")
    legend = ", ".join(f"{sign} {SIGNS[sign]}" for sign in SIGNS if sign in set(signs.values()))
    lines[0] = f"{lines[0]}   {legend}" if len(lines[0]) + len(legend) + 3 <= WIDTH else lines[0]
    if legend not in lines[0]:
        lines.append(" " * (INDENT + 1) + legend)
    return ["  ranks", *lines] if len(lines) > 1 else [f"{'  ranks'.ljust(INDENT)}{lines[0].strip()}"]


def _left_out(count: int) -> str:
    if count == 1:
        return "1 row without any other sign is left out"
    return f"{count} rows without any other sign are left out"


def _tree(told: Diagnosis, lines_max: int) -> list[str]:
    """The merged tree of the ranks' main threads, where stacks are there."""
    from consensus_checker.stack_tree import merged_tree

    room = WIDTH - INDENT
    lines = merged_tree(told.dossier, lines_max=lines_max, width=room)
    return [
        ("  stacks".ljust(INDENT) if number == 0 else " " * INDENT) + line
        for number, line in enumerate(lines)
    ]


def _unsure(verdict: Verdict) -> str:
    from consensus_checker.words import ranks_text

    finding, coverage = verdict.finding, verdict.coverage
    doubts = []
    if finding.unknown:
        among = f"who is right among {ranks_text(finding.unknown)}"
        doubts.append(among if len(finding.unknown) > 1 else f"whether it is {ranks_text(finding.unknown)}")
    if finding.alternatives:
        doubts.append("or because " + "; or ".join(entry.summary for entry in finding.alternatives[:2]))
    if coverage.missing:
        doubts.append(f"nothing is there of {ranks_text(coverage.missing)}")
    if coverage.truncated:
        doubts.append(f"the log of {ranks_text(coverage.truncated)} was cut")
    doubts += coverage.doubts
    return "; ".join(doubts)


def seen_text(sources: Sources) -> str:
    """What was read, in a line or two."""
    counts: dict[str, int] = {}
    strangers, refused = [], []
    lines = unparsed = 0
    for file in sources.files:
        if file.refused:
            refused.append(f"{file.name} ({file.refused})")
        elif file.format is None:
            # An empty file says nothing, and nobody would know it better.
            strangers += [] if EMPTY in file.notes else [file.name]
        else:
            counts[file.format] = counts.get(file.format, 0) + 1
            lines += file.records
            unparsed += file.unparsed
    parts = [f"{count} {name}" for name, count in counts.items()]
    if unparsed:
        parts.append(f"{unparsed:,} of {lines:,} records say nothing that is known")
    if refused:
        parts.append(
            f"refused: {', '.join(refused[:2])}" + (f" and {len(refused) - 2} more" if refused[2:] else "")
        )
    if strangers:
        shown = ", ".join(strangers[:2]) + (f" and {len(strangers) - 2} more" if strangers[2:] else "")
        parts.append(f"not known: {shown}")
    return "; ".join(parts)


def _also(verdict: Verdict) -> list[str]:
    from consensus_checker.explain import paragraph

    told = [_short(one) for one in verdict.findings if one.code not in (0,)]
    if not told:
        return []
    more = f"; and {len(told) - 2} more (--full)" if len(told) > 2 else ""
    return paragraph("also", "; ".join(told[:2]) + more, lines_max=3)


def _short(finding: Finding) -> str:
    return f"{finding.rule}: {finding.summary}"


def _advice(verdict: Verdict) -> list[str]:
    from consensus_checker.explain import paragraph

    lines: list[str] = []
    for number, (what, why) in enumerate(verdict.advice[:ADVICE_SHOWN_MAX]):
        lines += paragraph("do" if number == 0 else "", f"{what} ({why})", lines_max=2)
    return lines


def _next(verdict: Verdict) -> list[str]:
    lines: list[str] = []
    for number, (command, _why) in enumerate(verdict.next[:2]):
        head = "  next".ljust(INDENT) if number == 0 else " " * INDENT
        broken = wrap(command, WIDTH - INDENT, break_long_words=False, break_on_hyphens=False)
        lines += [head + broken[0], *(" " * INDENT + line for line in broken[1:])]
    return lines


def _everything(told: Diagnosis) -> list[str]:
    """Every finding with its evidence, every file with what became of it."""
    from consensus_checker.explain import paragraph, proof

    verdict = told.verdict
    lines: list[str] = []
    for finding in (verdict.finding, *verdict.findings):
        if finding.first_divergence is not None and told.history is not None and told.history.lanes:
            argued = proof(finding, told.history)
        else:
            argued = paragraph("Seen", finding.summary)
            if finding.basis:
                argued += paragraph("Basis", "; ".join(finding.basis))
        lines += ["", *argued]
        for entry in finding.evidence[:FILES_SHOWN_MAX]:
            if entry.file is not None:
                lines += paragraph("", f"{entry.supports}: {entry.file}, record {entry.record}", lines_max=2)
    lines += _whole_tree(told)
    if verdict.coverage.sources is not None:
        lines += ["", "  files"]
        lines += _files(verdict.coverage.sources)
    return lines


def _whole_tree(told: Diagnosis) -> list[str]:
    from consensus_checker.stack_tree import merged_tree

    lines = merged_tree(told.dossier, width=WIDTH - 2)
    return ["", "  stacks", *(f"  {line}" for line in lines)] if lines else []


def _files(sources: Sources) -> list[str]:
    from consensus_checker.explain import paragraph

    lines: list[str] = []
    for file in sources.files[:FILES_SHOWN_MAX]:
        what = file.format or "not known"
        if file.refused:
            what = f"refused: {file.refused}"
        elif file.format is not None:
            what += f", {file.records:,} records"
            what += f", {file.unparsed:,} of them not understood" if file.unparsed else ""
        notes = "".join(f"; {note}" for note in file.notes)
        lines += paragraph("", f"{file.name}: {what}{notes}", lines_max=3)
    if more := len(sources.files) - FILES_SHOWN_MAX:
        lines += [] if more < 0 else [f"{' ' * INDENT}and {more:,} more files (--json)"]
    return lines


def coverage_of(ranks: Mapping[str, Sequence[int]]) -> str:
    """Kind of evidence, and the ranks that it covers."""
    from consensus_checker.words import ranks_text

    return "; ".join(f"{kind} of {ranks_text(found)}" for kind, found in ranks.items())
