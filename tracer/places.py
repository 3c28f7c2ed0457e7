"""What stands at a path that should hold logs, and what to say when it does not."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import stat
from itertools import islice
from pathlib import Path

from tracer.errors import ElsewhereError, LogError
from tracer.sinks import SUMMARY_NAME, segment_name

# Runs below a folder that are named when it holds none itself, and entries looked at to find them.
RUNS_NAMED_MAX = 3
ENTRIES_MAX = 1000
PATH_SHOWN_MAX = 200
# One of 4,096 ranks that all wait for something has a megabyte.
SUMMARY_BYTES_MAX = 16 << 20

SEGMENT = re.compile(r"rank(?P<rank>\d{4,})\.(?P<lane>[A-Za-z0-9_-]+)\.(?P<index>\d{3,})\.jsonl(?:\.gz)?")
META = re.compile(r"rank\d{4,}\.meta\.json")


def demand_there(place: Path) -> None:
    """Refuse a path at which nothing can be, or is.

    Raises:
        LogError: names the path and what the system says of it.
    """
    try:
        mode = place.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise LogError(
            f"no such file or folder: {place}", hint="the folder that hicache run --out wrote"
        ) from None
    except (OSError, ValueError) as error:
        raise LogError(
            f"{_shown(place)} can't be read: {_reason(error)}", hint="the folder that hicache run --out wrote"
        ) from None
    if stat.S_ISREG(mode) and (place.name == SUMMARY_NAME or META.fullmatch(place.name)):
        what = "a run's summary" if place.name == SUMMARY_NAME else "a side file of a log"
        raise ElsewhereError(f"{place} is {what}; give its folder", quoted(place.parent))
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise LogError(
            f"{place} is neither a file nor a folder", hint="the folder that hicache run --out wrote"
        )


def no_logs(place: Path) -> LogError:
    """Why there is nothing to read, and what would be: a run below, or a new one."""
    runs = _runs_below(place)
    if runs:
        return ElsewhereError(
            f"no logs in {place}, but in folders below it",
            quoted(runs[0]),
            expected=f"the folder of one run: {', '.join(map(str, runs))}",
        )
    expected = f"{segment_name(0, 'scheduler', 0)}, ..."
    if (place / SUMMARY_NAME).is_file():
        # Somebody's run: nothing is suggested that would replace it by another one.
        return LogError(
            f"no logs in {place}",
            where=f"{SUMMARY_NAME}: {_told_by(place / SUMMARY_NAME)}",
            expected=expected,
            hint="the same run again with --trace full, and another --out or --overwrite",
        )
    return LogError(
        f"no logs in {place}",
        expected=expected,
        hint=f"hicache zoo run local_host_room_decides_backup --out {quoted(place)}",
    )


def _told_by(summary: Path) -> str:
    """What a run's summary says of a run whose logs are not there."""
    try:
        with summary.open("rb") as file:
            found = json.loads(file.read(SUMMARY_BYTES_MAX))
        outcome, trace = str(found["outcome"])[:20], found.get("trace")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "can't be read; the disk may have been full"
    if trace == "off":
        return f"that run ({outcome}) was made with --trace off"
    return f"that run ({outcome}) was made with --trace off, or its logs were removed"


def _runs_below(place: Path) -> list[Path]:
    """The first few subfolders that hold logs, in order of name."""
    runs: list[Path] = []
    try:
        folders = sorted(entry.path for entry in islice(os.scandir(place), ENTRIES_MAX) if entry.is_dir())
    except OSError:
        return runs
    for folder in folders:
        # One that can't be listed is no run that could be read.
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            if any(SEGMENT.fullmatch(entry.name) for entry in islice(entries, ENTRIES_MAX)):
                runs.append(Path(folder))
        if len(runs) == RUNS_NAMED_MAX:
            break
    return runs


def quoted(path: Path) -> str:
    """A path as it can be pasted into a shell."""
    return shlex.quote(str(path))


def _shown(path: Path) -> str:
    """A path short enough for a message."""
    text = str(path)
    return text if len(text) <= PATH_SHOWN_MAX else f"{text[:PATH_SHOWN_MAX]}..."


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
