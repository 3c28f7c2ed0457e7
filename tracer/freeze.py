"""Keeping the last minutes: links to a rank's files, which a ring can't drop.

Owns the folders `frozen-<when>` beside the logs. A link costs no room until the ring drops its own name of
the file; the file that is still written goes on in both.

    rank0000.scheduler.004.jsonl.gz  ------+      frozen-1795963933/rank0000.scheduler.004.jsonl.gz
    rank0000.scheduler.005.jsonl     ----- + ---> frozen-1795963933/rank0000.scheduler.005.jsonl
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

# Touched by whoever wants the last minutes kept; every rank of the folder looks for it.
REQUEST_NAME = "freeze"
FOLDER_BEGIN = "frozen-"
# Each may hold what a ring holds, so that the disk must not fill with them.
FREEZES_MAX = 3


@dataclass(frozen=True, slots=True)
class Kept:
    """What came of it: how many files are in `folder`, or why none is."""

    folder: str
    reason: str
    files: int


def freeze(folder: Path, rank: int, when_ns: int) -> Kept:
    """Keep the files that rank `rank` has in `folder`. Never raises for what the disk says.

    Args:
        when_ns: when it was asked for; it names the folder, so that all ranks keep theirs in the same one.
    """
    target = folder / f"{FOLDER_BEGIN}{when_ns // 1_000_000}"
    try:
        frozen = {path.name for path in folder.glob(f"{FOLDER_BEGIN}*") if path.is_dir()}
        if target.name not in frozen and len(frozen) >= FREEZES_MAX:
            return Kept("", "too_many", 0)
        target.mkdir(mode=0o700, exist_ok=True)
        files = 0
        for path in sorted(folder.glob(f"rank{rank:04d}.*")):
            if path.is_file() and not path.is_symlink():
                files += _keep(path, target / path.name)
    except OSError as error:
        return Kept("", os.strerror(error.errno or 0).lower().replace(" ", "_"), 0)
    return Kept(target.name, "asked", files)


def _keep(path: Path, target: Path) -> bool:
    """Link, or copy where the file system has no links; false when the ring was faster."""
    try:
        os.link(path, target)
    except FileNotFoundError:
        return False
    except FileExistsError:
        return True
    except OSError:
        try:
            shutil.copyfile(path, target)
            target.chmod(0o600)
        except FileNotFoundError:
            return False
    return True
