"""The folder of a run: never over somebody's logs, and never a file that is not ours.

Owns the rule of what may be removed: files named as this tool names a run's files, nothing else.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from cli.errors import CliError

OWN_FILE = re.compile(r"rank\d{4,}\.[A-Za-z0-9_-]+\.\d{3,}\.jsonl|rank\d{4,}\.meta\.json|run\.json")


def refuse_used(out: Path, *, overwrite: bool) -> None:
    """Say no before any work is done: `out` is a file, can't be written, or holds a run already.

    Raises:
        CliError: with the exit code of a usage error.
    """
    if out.exists() and not out.is_dir():
        raise CliError(f"--out {out} is a file", expected="a folder, new or empty")
    place = _nearest_existing(out)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise CliError(f"--out {out}: no permission to write in {place}", hint="another folder")
    if not overwrite and (found := own_files(out)):
        raise CliError(
            f"{out} holds a run already ({len(found)} files, {found[0].name} the first)",
            expected="a folder without logs",
            hint="another --out, or --overwrite to replace that run",
        )


def prepare(out: Path) -> None:
    """Make the folder; a run's files in it go. Other files, links' targets and subfolders stay."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file in own_files(out):
            file.unlink()
    except OSError as error:
        raise CliError(f"--out {out}: {error.strerror}", hint="another folder") from None


def own_files(out: Path) -> list[Path]:
    """The files in `out` that have the name of a run's file, in order of name."""
    if not out.is_dir():
        return []
    try:
        entries = sorted(out.iterdir())
    except OSError as error:
        raise CliError(f"--out {out}: {error.strerror}", hint="another folder") from None
    return [
        entry
        for entry in entries
        if OWN_FILE.fullmatch(entry.name) and (entry.is_file() or entry.is_symlink())
    ]


def _nearest_existing(path: Path) -> Path:
    for place in (path, *path.absolute().parents):
        if place.exists():
            return place
    return path
