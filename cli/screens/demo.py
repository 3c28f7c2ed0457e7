"""The demo as a story: each scene is what one types and what one then sees."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich.text import Text

from cli.commands.check import screen
from cli.screens.hits import tables
from cli.screens.query import rows_table
from cli.screens.run import outcome, run_document
from cli.theme import BAD, COMMAND, GOOD, HEADING, WIDTH, headline, next_step, paragraph
from consensus_checker.words import ranks_text

if TYPE_CHECKING:
    from consensus_checker.history import History
    from consensus_checker.verdict import Verdict
    from hicache.sim.world import Plan, Result
    from hicache.zoo.scenario import Scenario

SCHEMA = "hicache.demo.v1"
# A line break inside the quotes of a query is a space to it, so what is shown can be pasted.
STANDS_SQL = 'SELECT rank, op, "group", group_seq, numel\n    FROM collectives WHERE NOT "left" ORDER BY rank'


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything the demo has made.

    Attributes:
        disturbed: ranks that the fault plan disturbed; the verdict must name them and no other.
    """

    scenario: Scenario
    seed: int
    out: Path
    twin_out: Path
    plan: Plan
    result: Result
    twin_plan: Plan
    twin_result: Result
    disturbed: tuple[int, ...]
    verdict: Verdict
    history: History
    twin_verdict: Verdict
    twin_history: History

    @property
    def is_right(self) -> bool:
        finding = self.verdict.finding
        return (
            finding.kind == "divergence"
            and finding.culprit == self.disturbed
            and self.twin_verdict.kind == "consistent"
        )


def scenes(made: Scene) -> Iterator[list[Text]]:
    """One scene at a time, in the order in which the story is told."""
    from tracer.hits import hits
    from tracer.log import find_logs
    from tracer.trace_store import open_store

    out, twin_out, name = made.out, made.twin_out, made.scenario.name
    zoo = ("zoo", "run", name, "--seed", made.seed)
    topology = made.plan.config.topology
    yield [
        *_title(
            1,
            f"Run a server of {topology.world_size} tensor-parallel ranks with a bug from production: "
            f"{made.scenario.source}.",
        ),
        *_typed(*zoo, "--out", out),
        *outcome(made.plan, made.result),
        Text(""),
    ]
    with open_store(out) as store:
        stands = store.query(STANDS_SQL)
    yield [
        *_title(2, "Where do the ranks stand? A stack dump shows this much: not when, not why."),
        *_typed("query", out, STANDS_SQL),
        *rows_table(stands, WIDTH),
        Text(""),
    ]
    yield [
        *_title(3, "Which rank took the wrong turn, at which call, because of which fact?"),
        *_typed("check", out),
        *screen(made.verdict, made.history),
        Text(""),
    ]
    yield [
        *_title(4, "The healthy twin: same world, seed and fault, without the bug."),
        *_typed(*zoo, "--twin", "--out", twin_out),
        *outcome(made.twin_plan, made.twin_result),
        *_typed("check", twin_out),
        *screen(made.twin_verdict, made.twin_history),
        Text(""),
    ]
    twin_logs = find_logs(twin_out)
    yield [
        *_title(5, "Which tier served the prompts, and why was the rest computed?"),
        *_typed("hits", twin_out, "--by", "tier"),
        *tables(hits(twin_logs, by="tier"), WIDTH),
        Text(""),
        *_typed("hits", twin_out, "--by", "reason"),
        *tables(hits(twin_logs, by="reason"), WIDTH)[2:],
        Text(""),
    ]


def expected(made: Scene) -> list[Text]:
    """Whether it came as it must, and where everything is."""
    finding = made.verdict.finding
    found = ranks_text(finding.culprit) if finding.culprit else "no rank"
    if made.is_right:
        lines = headline(
            "EXPECTED",
            f"{ranks_text(made.disturbed)} was disturbed, and {found} was named from the logs alone. "
            "The twin is silent.",
            GOOD,
        )
    else:
        lines = headline(
            "UNEXPECTED",
            f"{ranks_text(made.disturbed)} was disturbed; the verdict is {finding.kind} and names {found}; "
            f"the twin's is {made.twin_verdict.kind}.",
            BAD,
        )
    lines += paragraph("traces", f"{made.out}, {made.twin_out}")
    return lines + next_step("zoo", "list")


def document(made: Scene) -> dict[str, Any]:
    """The same for a program."""
    return {
        "schema": SCHEMA,
        "is_expected": made.is_right,
        "disturbed_ranks": list(made.disturbed),
        "run": run_document(made.plan, made.result, made.out),
        "verdict": made.verdict.to_json(),
        "twin_run": run_document(made.twin_plan, made.twin_result, made.twin_out),
        "twin_verdict": made.twin_verdict.to_json(),
    }


def _title(number: int, text: str) -> list[Text]:
    lines = wrap(text, WIDTH - 3)
    return [
        Text(f"{number}. {lines[0]}", style=HEADING),
        *(Text("   " + line, style=HEADING) for line in lines[1:]),
    ]


def _typed(*words: object) -> list[Text]:
    """A command as one would type it, continued with a backslash where it is long."""
    lines = ["$ hicache"]
    for piece in _pieces(list(map(str, words))):
        # An option stays with its value, and a quoted word whole.
        if len(lines[-1]) + 1 + len(piece.splitlines()[0]) > WIDTH - 2:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += " " + piece
    return [Text(line, style=COMMAND) for text in lines for line in text.splitlines()] + [Text("")]


def _pieces(words: list[str]) -> Iterator[str]:
    while words:
        word = words.pop(0)
        has_value = word.startswith("--") and words and not words[0].startswith("--")
        yield shlex.join([word, words.pop(0)] if has_value else [word])
