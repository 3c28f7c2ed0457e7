"""`hicache check`: the first divergent call and the odd rank, from logs alone."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.errors import OK, UNREADABLE, CliError, report, tell
from cli.options import ExitZero, Json, Quiet, a_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

    from consensus_checker.folders import Together
    from consensus_checker.history import History
    from consensus_checker.verdict import Verdict

SCHEMA_MANY = "hicache.verdicts.v1"
# Of several folders the worst code counts: proof of trouble before what couldn't be judged.
MILD = (OK, 4, UNREADABLE)
NAMED_MAX = 3
# In the place of a folder in a command, while it isn't known which folder that is.
SOME_FOLDER = "\0"

# The lines of a screen: with the whole argument, or one sentence.
Draw = Callable[[bool, bool], "list[Text]"]


@dataclass(frozen=True, slots=True)
class Case:
    """What is judged together: a folder, several with one run, or all logs of a server.

    Attributes:
        judge: reads and judges; raises what can't be read.
        notes: what is worth telling beside the verdict.
    """

    paths: tuple[Path, ...]
    judge: Callable[[], tuple[Verdict, Draw]]
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        shown = " + ".join(map(str, self.paths[:NAMED_MAX]))
        more = len(self.paths) - NAMED_MAX
        return shown if more <= 0 else f"{shown} + {more} more"


def check(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="Folders with the logs of a run, or SGLang's server logs.",
            show_default=False,
            parser=a_path,
        ),
    ],
    full: Annotated[bool, typer.Option("--full", help="Add the argument, step by step.")] = False,
    every_line: Annotated[
        bool, typer.Option("--every-line", help="Hold every block of the logs against its checksum.")
    ] = False,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="RUN_ID", help="Which run, where PATH is a bundle of several.", show_default=False
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    exit_zero: ExitZero = False,
) -> int:
    """Say which rank left the others, at which call, and because of which local fact.

    Folders that hold the ranks of one run, one folder a host, are judged as one; so is a bundle or an
    archive of them. Of a server's logs, the lines of SGLang's own rank consensus checker are judged.

    The exit code is the verdict: 0 consistent, 4 not enough to say, 10 divergence, 11-18 see the docs,
    20 something is wrong, 3 no readable log.
    """
    from cli.places import logs_at
    from cli.sigterm import ending_on_sigterm

    with ending_on_sigterm(), ExitStack() as stack:
        places = [stack.enter_context(logs_at(path, run=run, quiet=quiet)) for path in paths]
        if run is not None and places == paths:
            raise CliError(f"--run {run}: no PATH is a bundle or an archive", expected="no --run")
        shown = dict(zip(places, paths, strict=True))
        code = tell_all(cases_of(places, every_line=every_line, shown=shown), full, json, quiet)
    return OK if exit_zero else code


def tell_all(cases: Sequence[Case], full: bool, json: bool, quiet: bool) -> int:
    """Judge case after case and show what came out; the worst code."""
    from cli.theme import show, show_json, show_text, spinner

    codes: list[int] = []
    documents: list[dict[str, Any]] = []
    for number, case in enumerate(cases):
        try:
            with spinner("checking", case.paths[0], quiet=quiet):
                verdict, draw = case.judge()
        except Exception as error:
            # With several folders one that can't be read must not hide the verdict on the others.
            if len(cases) == 1:
                raise
            codes.append(report(error))
            documents.append({**_where(case), "error": str(error)})
            continue
        codes.append(verdict.code)
        documents.append({**_where(case), **verdict.to_json()})
        for note in case.notes:
            tell(f"note: {note}")
        if json and len(cases) == 1:
            show_text(verdict.to_text())
        elif not json:
            heading: list[str | Text] = [f"{case.name}:"] if len(cases) > 1 else []
            space: list[str | Text] = [""] if number and not quiet else []
            show([*space, *heading, *draw(full, quiet)])
    if json and len(cases) > 1:
        show_json({"schema": SCHEMA_MANY, "code": worst(codes), "verdicts": documents})
    return worst(codes)


def _where(case: Case) -> dict[str, Any]:
    paths = [str(path) for path in case.paths]
    return {"path": paths[0], **({"paths": paths} if len(paths) > 1 else {})}


def cases_of(
    paths: Sequence[Path], *, every_line: bool = False, shown: Mapping[Path, Path] = {}
) -> list[Case]:
    """What the paths stand for, in the order in which the first of each was given.

    Args:
        shown: folder that is read -> what to call it, where somebody has given something else.
    """
    from consensus_checker.folders import server_logs

    logs = {path: found for path in paths if (found := server_logs(path)) is not None}
    cases: list[tuple[int, Case]] = []
    if logs:
        files = [file for path in paths for file in logs.get(path, ())]
        given = tuple(path for path in dict.fromkeys(paths) if path in logs)
        called = tuple(shown.get(path, path) for path in given)
        cases.append((paths.index(given[0]), Case(called, lambda: _judge_lines(files))))
    own = [(number, path) for number, path in enumerate(paths) if path not in logs]
    if len(own) < 2:
        cases += [(number, _folder(path, every_line=every_line, shown=shown)) for number, path in own]
    else:
        cases += _by_run(own, every_line=every_line, shown=shown)
    return [case for _, case in sorted(cases, key=lambda entry: entry[0])]


def _by_run(
    places: Sequence[tuple[int, Path]], *, every_line: bool, shown: Mapping[Path, Path]
) -> list[tuple[int, Case]]:
    from consensus_checker.folders import together
    from tracer.errors import TracerError
    from tracer.log import find_logs

    cases: list[tuple[int, Case]] = []
    runs = []
    number_of = {path: number for number, path in reversed(places)}
    for number, path in places:
        try:
            runs.append((path, find_logs(path)))
        except TracerError:
            # Read again in its turn, for its error to be told there.
            cases.append((number, _folder(path, every_line=every_line, shown=shown)))
    for group in together(runs):
        is_plain = len(group.places) == 1
        number = number_of[group.places[0]]
        case = _folder(group.places[0], group, every_line=every_line, shown=shown)
        if not is_plain:
            called = tuple(shown.get(place, place) for place in group.places)
            case = Case(called, case.judge, tuple(group.notes))
        cases.append((number, case))
    return cases


def _folder(
    path: Path, group: Together | None = None, *, every_line: bool, shown: Mapping[Path, Path]
) -> Case:
    called = shown.get(path, path)

    def judged() -> tuple[Verdict, Draw]:
        if group is not None:
            verdict, history = _judge_together(group, every_line=every_line, shown=shown)
        elif called == path:
            verdict, history = judge(path, every_line=every_line)
        else:
            verdict, history = judge(path, every_line=every_line, shown=called)
        return verdict, lambda full, quiet: screen(verdict, history, full=full, quiet=quiet)

    return Case((called,), judged)


def judge(path: Path, *, every_line: bool = False, shown: Path | None = None) -> tuple[Verdict, History]:
    """Read a folder's logs and compare the ranks.

    Args:
        shown: what commands are to call the folder, if not `path`.

    Raises:
        LogError: nothing readable is there.
    """
    from cli.reenacting import reenacting
    from consensus_checker.check import check
    from consensus_checker.history import History
    from tracer.log import find_logs

    run = find_logs(path)
    history = History.of(run)
    place = shlex.quote(str(shown or path))
    return check(history, path=place, reenact=reenacting(run.lanes), every_line=every_line), history


def _judge_together(
    group: Together, *, every_line: bool, shown: Mapping[Path, Path]
) -> tuple[Verdict, History]:
    """The same for folders that hold one run; commands name the one with the rank in question."""
    from dataclasses import replace

    from cli.reenacting import reenacting
    from consensus_checker.check import check
    from consensus_checker.history import History

    history = History.of(group)
    asked = reenacting(group.lanes)
    verdict = check(history, path=SOME_FOLDER, reenact=asked, every_line=every_line)
    named = (*verdict.finding.culprit, *verdict.finding.unknown, *verdict.finding.victims, 0)
    folder = group.place_of(named[0])
    place = shlex.quote(str(shown.get(folder, folder)))
    commands = tuple((command.replace(SOME_FOLDER, place), why) for command, why in verdict.next)
    return replace(verdict, next=commands), history


def _judge_lines(files: Sequence[Path]) -> tuple[Verdict, Draw]:
    from consensus_checker.divergence_lines import argument, judge_lines, lines_screen

    told = judge_lines(files)

    def draw(full: bool, quiet: bool) -> list[Text]:
        from cli.screens.verdict import coloured

        if quiet:
            return sentence(told.verdict)
        lines = [*lines_screen(told), *(argument(told) if full else ())]
        return coloured(lines, told.verdict.kind)

    return told.verdict, draw


def screen(verdict: Verdict, history: History, *, full: bool = False, quiet: bool = False) -> list[Text]:
    """The first screen; with `full` the argument for every finding, with `quiet` one sentence."""
    from cli.screens.verdict import coloured
    from consensus_checker.explain import proof
    from consensus_checker.screen import first_screen

    if quiet:
        return sentence(verdict)
    lines = first_screen(verdict, history)
    if full:
        for finding in (verdict.finding, *verdict.findings):
            lines += ["", *proof(finding, history)]
    return coloured(lines, verdict.kind)


def sentence(verdict: Verdict) -> list[Text]:
    """The verdict in one line."""
    from cli.screens.verdict import coloured

    word = verdict.kind.upper().replace("_", " ")
    return coloured([f"{word}  {verdict.finding.summary}"], verdict.kind)


def worst(codes: Sequence[int]) -> int:
    """The most serious of several exit codes."""
    return max(codes, key=lambda code: (code not in MILD, MILD.index(code) if code in MILD else code))
