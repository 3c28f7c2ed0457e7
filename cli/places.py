"""Where a command finds the logs that a path stands for; bundles and archives are opened here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cli.errors import tell


@contextmanager
def logs_at(path: Path, *, run: str | None = None, quiet: bool = False) -> Iterator[Path]:
    """The folder to read in the place of `path`, for the block's time; what was left out is told on stderr.

    Args:
        run: a run's id or its folder in a bundle; without it the newest is taken.

    Raises:
        TracerError: it can't be opened, or has no such run.
    """
    from cli.screens.table import printable
    from tracer.run_folder import run_folder

    with run_folder(path, run=run) as placed:
        for note in () if quiet else placed.notes:
            tell(f"note: {printable(note)}")
        yield placed.folder
