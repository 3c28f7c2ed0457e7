"""Options that several commands share, each with one name, one help text and one meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

OutDir = Annotated[
    Path,
    typer.Option("--out", metavar="DIR", help="Folder for one log a rank and run.json.", show_default=False),
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
    ),
]
Logs = Annotated[
    Path, typer.Argument(metavar="PATH", help="A run's folder, or one log in it.", show_default=False)
]
