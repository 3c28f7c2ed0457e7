"""Options that several commands share, each with one name, one help text and one meaning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from cli.errors import CliError


def a_path(text: str | Path) -> Path:
    """A path that was typed; "" would be the current folder, which nobody means by it.

    Raises:
        typer.BadParameter: it is empty.
    """
    if not str(text):
        raise typer.BadParameter("it is empty; expected a path")
    return Path(text)


# What a path can't be read or written for is ours to say: an input is code 3.
OutDir = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Folder for one log a rank and run.json.",
        show_default=False,
        parser=a_path,
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the run that --out holds; other files stay.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="One line, no progress.")]
ExitZero = Annotated[bool, typer.Option("--exit-zero", help="Exit 0 whatever the verdict.")]
Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE.py",
        help="A substitution of your own: Python with wire(parts). Repeatable.",
        show_default=False,
        parser=a_path,
    ),
]
RunId = Annotated[
    str | None,
    typer.Option("--run", metavar="RUN_ID", help="Which run, where PATH has several.", show_default=False),
]
Logs = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", help="A run's folder, or one log in it.", show_default=False, parser=a_path
    ),
]


def one_of(option: str, value: str, known: Sequence[str], *, later: Sequence[str] = ()) -> str:
    """A choice by name; `later` are names of the contract that this version can't do.

    Raises:
        CliError: it is none of `known`.
    """
    if value in known:
        return value
    what = f"{option} {value} is not supported yet" if value in later else f"{option} {value} is not known"
    *others, last = known
    raise CliError(what, expected=" or ".join(filter(None, (", ".join(others), last))))


class GroupedCommand(TyperCommand):
    """A command with so many options that its help shows them by panel, in plain text as everywhere."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                panel = getattr(parameter, "rich_help_panel", None) or "Options"
                panels.setdefault(panel, []).append(record)
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)
