"""`hicache diagnose`: whatever evidence there is of a job, and one verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.errors import OK, UNREADABLE, CliError, tell
from cli.options import ExitZero, Json, Quiet, a_path

# Wrapped by hand to stand beside its label.
READABLE = """logs of ours, flight recorder dumps, stacks of py-spy, pystack or
            faulthandler, logs of SGLang, NCCL or gloo, NCCL RAS as JSON, or
            archives of these"""
NAMED_MAX = 4


def diagnose(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="Folders, files and archives with any mixture of evidence.",
            show_default=False,
            parser=a_path,
        ),
    ],
    full: Annotated[
        bool, typer.Option("--full", help="Add every finding, and every file that was read.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    exit_zero: ExitZero = False,
) -> int:
    """Say what is wrong with a job, from whatever it left: logs, dumps, stacks, server logs.

    Recognises files by what is in them. Own logs go first; of what other programs wrote only what
    several ranks can be compared in accuses anybody.

    The exit code is the verdict: 0 nothing wrong, 4 not enough to say, 10 divergence, 11-18 see the
    docs, 20 something is wrong, 3 nothing that can be read.
    """
    from cli.reenacting import reenacting
    from cli.sigterm import ending_on_sigterm
    from cli.theme import show, show_text, spinner
    from consensus_checker.diagnose import diagnose as judge
    from tracer.importers.evidence import LINES, WHOLE
    from tracer.importers.gather import gathered

    # What an archive was unpacked into goes away, however this ends.
    with (
        ending_on_sigterm(),
        spinner("reading", paths[0], quiet=quiet),
        gathered(paths, whole=WHOLE, lines=LINES) as found,
    ):
        if found.is_nothing:
            raise _nothing(paths, found)
        told = judge(found, reenacting=reenacting)
    if json:
        show_text(told.verdict.to_text())
    else:
        from cli.screens.diagnose import screen

        show(screen(told, full=full, quiet=quiet))
        if not quiet:
            for note in told.notes[:NAMED_MAX]:
                tell(f"note: {note}")
    return OK if exit_zero else told.verdict.code


def _nothing(paths: list[Path], found: object) -> CliError:
    """What lies there, if it is no evidence."""
    from tracer.importers.gather import Gathered

    assert isinstance(found, Gathered)
    where = " ".join(map(str, paths[:NAMED_MAX]))
    if found.stored:
        stored = "; ".join(found.stored[:NAMED_MAX])
        return CliError(
            f"{stored}: decisions can't be compared from it",
            code=UNREADABLE,
            expected="the logs that it was made from",
            hint='hicache query PATH "SELECT ..." reads it',
        )
    refused = [file for file in found.dossier.files if file.refused]
    if refused:
        more = f"\n  and {len(refused) - NAMED_MAX:,} more" if refused[NAMED_MAX:] else ""
        told = "".join(f"\n  refused   {file.name}: {file.refused}" for file in refused[:NAMED_MAX])
        return CliError(f"nothing in {where} can be read{told}{more}", code=UNREADABLE, expected=READABLE)
    names = [file.name for file in found.dossier.files]
    shown = ", ".join(names[:NAMED_MAX]) + (
        f" and {len(names) - NAMED_MAX:,} more" if names[NAMED_MAX:] else ""
    )
    what = f"no evidence in {where}"
    if names:
        count = "1 file" if len(names) == 1 else f"{len(names):,} files"
        what += f": {count} that nobody knows ({shown})"
    return CliError(what, code=UNREADABLE, expected=READABLE)
