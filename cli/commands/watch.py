"""`hicache watch`: a run that goes on, from its logs: who is where, who keeps others waiting, who parted."""

from __future__ import annotations

import json as jsonlib
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.errors import OK, CliError, tell
from cli.options import Logs, Quiet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from consensus_checker.live_tail import LaneState, Told

SCHEMA = "hicache.watch.v1"
# Kinds of a verdict that are no alarm.
CALM = ("consistent", "incomplete", "nothing_compared")

Look = tuple[Sequence["LaneState"], Sequence["Told"]]


def watch(
    path: Logs,
    silence: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="How long a rank may say nothing, or keep others waiting.", min=1.0
        ),
    ] = 5.0,
    period: Annotated[
        float, typer.Option(metavar="SECONDS", help="Between two looks at the logs.", min=0.05)
    ] = 1.0,
    on_alarm: Annotated[
        str | None,
        typer.Option(
            "--on-alarm",
            metavar="COMMAND",
            help="Run for each alarm, without a shell; verdict on its stdin and in HICACHE_VERDICT.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line: looks, alarms, the end.")
    ] = False,
    quiet: Quiet = False,
) -> int:
    """Show what every lane of a run is at while its logs grow, and say what goes wrong at once.

    Ends when the run does, or by Ctrl-C. The logs are read and nothing else: no rank notices.
    """
    words = command_words(on_alarm)
    from consensus_checker.live_tail import LogWatcher

    watcher = LogWatcher(path, silence_s=silence)
    show: Callable[[Look], None]
    with output(path, is_json=json, quiet=quiet) as show:
        try:
            for states, found in watcher.watch(period):
                show((states, found))
                for told in found:
                    if words and told.verdict.kind not in CALM:
                        run_command(words, told.verdict.to_text())
        finally:
            watcher.close()
    return OK


def command_words(command: str | None) -> list[str]:
    """The words of `--on-alarm`.

    Raises:
        CliError: it is empty, or a quote is not closed.
    """
    if command is None:
        return []
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise CliError(f"--on-alarm {command!r} is no command: {str(error).lower()}") from None
    if not words:
        raise CliError("--on-alarm is empty", expected="a program and its arguments")
    return words


@contextmanager
def output(path: Path, *, is_json: bool, quiet: bool) -> Iterator[Callable[[Look], None]]:
    """Where looks go: JSON lines, a table that is drawn over, or plain lines of what is new."""
    from cli.screens.watch import Plain, drawn_over

    if is_json:
        yield JsonLines()
    elif sys.stdout.isatty() and not quiet:
        with drawn_over(path) as show:
            yield show
    else:
        yield Plain(path, quiet=quiet)


class JsonLines:
    """One object a line; a look that is like the one before says nothing new."""

    def __init__(self) -> None:
        self._last: list[dict[str, Any]] = []

    def __call__(self, look: Look) -> None:
        states, found = look
        lanes = [asdict(state) for state in states]
        # For how long a lane has been still changes at every look.
        still = [{name: value for name, value in lane.items() if name != "still_s"} for lane in lanes]
        if still != self._last:
            self._last = still
            self._say("lanes", lanes)
        for told in found:
            name = "end" if told.verdict.kind in CALM else "alarm"
            self._say(name, told.verdict.to_json())

    def _say(self, name: str, value: object) -> None:
        from cli.theme import show_text

        document = {"schema": SCHEMA, "event": name, ("lanes" if name == "lanes" else "verdict"): value}
        show_text(jsonlib.dumps(document, ensure_ascii=False) + "\n")


def run_command(words: Sequence[str], verdict: str) -> None:
    """Tell a program of an alarm; what becomes of it is a warning at most."""
    from consensus_checker.live_policy import VERDICT_NAME, run_command

    with tempfile.TemporaryDirectory(prefix="hicache-") as folder:
        path = Path(folder) / VERDICT_NAME
        path.write_text(verdict, encoding="utf-8")
        if trouble := run_command(words, verdict, path):
            tell(f"warning: --on-alarm: {trouble}")
