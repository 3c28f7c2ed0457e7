"""`hicache check`: the first divergent call and the odd rank, from logs alone."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.errors import OK, UNREADABLE, report
from cli.options import ExitZero, Json, Quiet, a_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

    from consensus_checker.history import History
    from consensus_checker.verdict import Verdict

SCHEMA_MANY = "hicache.verdicts.v1"
# Of several folders the worst code counts: proof of trouble before what couldn't be judged.
MILD = (OK, 4, UNREADABLE)


def check(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="Folders with the logs of one run each.",
            show_default=False,
            parser=a_path,
        ),
    ],
    full: Annotated[bool, typer.Option("--full", help="Add the argument, step by step.")] = False,
    json: Json = False,
    quiet: Quiet = False,
    exit_zero: ExitZero = False,
) -> int:
    """Say which rank left the others, at which call, and because of which local fact.

    The exit code is the verdict: 0 consistent, 4 not enough to say, 10 divergence, 11-18 see the docs,
    3 no readable log.
    """
    from cli.theme import show, show_json, show_text, spinner

    codes: list[int] = []
    documents: list[dict[str, Any]] = []
    for number, path in enumerate(paths):
        try:
            with spinner("checking", path, quiet=quiet):
                verdict, history = judge(path)
        except Exception as error:
            # With several folders one that can't be read must not hide the verdict on the others.
            if len(paths) == 1:
                raise
            codes.append(report(error))
            documents.append({"path": str(path), "error": str(error)})
            continue
        codes.append(verdict.code)
        documents.append({"path": str(path), **verdict.to_json()})
        if json and len(paths) == 1:
            show_text(verdict.to_text())
        elif not json:
            heading: list[str | Text] = [f"{path}:"] if len(paths) > 1 else []
            space: list[str | Text] = [""] if number and not quiet else []
            show([*space, *heading, *screen(verdict, history, full=full, quiet=quiet)])
    if json and len(paths) > 1:
        show_json({"schema": SCHEMA_MANY, "code": worst(codes), "verdicts": documents})
    return OK if exit_zero else worst(codes)


def judge(path: Path) -> tuple[Verdict, History]:
    """Read a folder's logs and compare the ranks.

    Raises:
        LogError: nothing readable is there.
    """
    from consensus_checker.check import check
    from consensus_checker.history import History
    from tracer.log import find_logs

    history = History.of(find_logs(path))
    return check(history, path=shlex.quote(str(path))), history


def screen(verdict: Verdict, history: History, *, full: bool = False, quiet: bool = False) -> list[Text]:
    """The first screen; with `full` the argument for every finding, with `quiet` one sentence."""
    from cli.screens.verdict import coloured
    from consensus_checker.explain import proof
    from consensus_checker.screen import first_screen

    if quiet:
        word = verdict.kind.upper().replace("_", " ")
        return coloured([f"{word}  {verdict.finding.summary}"], verdict.kind)
    lines = first_screen(verdict, history)
    if full:
        for finding in (verdict.finding, *verdict.findings):
            lines += ["", *proof(finding, history)]
    return coloured(lines, verdict.kind)


def worst(codes: Sequence[int]) -> int:
    """The most serious of several exit codes."""
    return max(codes, key=lambda code: (code not in MILD, MILD.index(code) if code in MILD else code))
