"""`hicache snapshot`: evidence of processes that stand still, before somebody restarts them."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.errors import OK, UNREADABLE, CliError, tell
from cli.options import Json, Quiet

if TYPE_CHECKING:
    from tracer.snapshot.look import Taken

SECONDS_MIN = 1.0


def snapshot(
    pids: Annotated[
        list[int] | None, typer.Argument(metavar="[PID...]", help="Processes.", show_default=False, min=1)
    ] = None,
    match: Annotated[
        str | None,
        typer.Option(
            "--match",
            metavar="PATTERN",
            help="Those whose command line has this regular expression in it.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="A folder, new or empty.", show_default=False),
    ] = None,
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="It is over after so long.", min=SECONDS_MIN)
    ] = 20.0,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Gather what running or stuck processes can still tell, for `hicache diagnose`.

    Two looks, two seconds apart: stacks, torch's flight recorder, what the system says, and copies of logs.
    No process is ended, stopped or waited for; a signal is sent only to one that has said that it handles
    it. What can't be had is told with its reason.
    """
    if sys.platform != "linux":
        raise CliError("snapshot reads /proc, which only Linux has")
    if out is None:
        raise CliError("snapshot needs -o", expected="a folder, new or empty")
    chosen = choose(pids or [], match)
    make(out)
    from tracer.snapshot.take import Snapshot

    def done(taken: Taken) -> None:
        if not quiet:
            tell(f"process {taken.pid}: done")

    try:
        found = Snapshot(out, seconds=seconds, told=done).take(chosen)
    except OSError as error:
        raise CliError(f"-o {out} was not written: {error.strerror}") from None
    show_all(found, out, is_json=json, is_quiet=quiet)
    # Nobody is there any more of whom there could be evidence.
    return OK if any(one.state for one in found) else UNREADABLE


def choose(pids: list[int], match: str | None) -> list[int]:
    """The processes that were asked for, each once, in order.

    Raises:
        CliError: none, too many, or a pattern that is none.
    """
    from tracer.snapshot.take import PROCESSES_MAX, ancestors, matching

    chosen = list(dict.fromkeys(pids))
    if match is not None:
        try:
            pattern = re.compile(match)
        except re.error as error:
            raise CliError(f"--match {match!r} is no pattern: {error}") from None
        try:
            chosen += [pid for pid in matching(pattern, ancestors(os.getpid())) if pid not in chosen]
        except OSError as error:
            raise CliError(f"processes can't be listed: {error.strerror}", code=UNREADABLE) from None
        if not chosen:
            raise CliError(f"no process has {match!r} in its command line", code=UNREADABLE)
    if not chosen:
        raise CliError("snapshot of nothing", expected="process ids, or --match PATTERN")
    if len(chosen) > PROCESSES_MAX:
        raise CliError(f"{len(chosen)} processes, at most {PROCESSES_MAX}", hint="a narrower --match")
    return chosen


def make(out: Path) -> None:
    """The folder, which only its owner may read: logs have more in them than names.

    Raises:
        CliError: something is there, or it can't be made.
    """
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = sorted(entry.name for entry in out.iterdir())
    except FileExistsError:
        raise CliError(f"-o {out} is a file", expected="a folder, new or empty") from None
    except (OSError, ValueError) as error:
        raise CliError(f"-o {out}: {getattr(error, 'strerror', None) or error}") from None
    if names:
        raise CliError(f"-o {out} is there already ({names[0]} in it)", expected="a folder, new or empty")


def show_all(found: list[Taken], out: Path, *, is_json: bool, is_quiet: bool) -> None:
    from cli.screens.snapshot import screen
    from cli.theme import show, show_json

    if is_json:
        document: dict[str, Any] = {
            "schema": "hicache.snapshot.v1",
            "out": str(out),
            "processes": [one.to_json() for one in found],
        }
        show_json(document)
    else:
        show(screen(found, f"hicache diagnose {shlex.quote(str(out))}", is_quiet=is_quiet))
