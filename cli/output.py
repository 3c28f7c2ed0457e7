"""Files that a command writes for somebody: whole or not at all, and never in the place of something else.

An existing file keeps its content until the new one is complete. Pipes and devices are written to, not
replaced. A file of a run is never written over.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from cli.errors import CliError
from cli.folder import OWN_FILE


@contextmanager
def writing(out: Path) -> Iterator[BinaryIO]:
    """A stream whose bytes are at `out` once the block has ended without an error.

    Raises:
        CliError: a folder, a file of a run, or a place that can't be written to.
    """
    try:
        target = _target(out)
        if target is None:
            # Opened by the name that was given: /dev/stdout has no other that works.
            with out.open("wb") as stream:
                yield stream
            return
        part = target.with_name(f".hicache-{os.getpid()}.part")
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        try:
            # Inside: an interrupt may come right after the file is there. The name is this process's own.
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            with os.fdopen(fd, "wb") as stream:
                yield stream
            if mode is not None:
                part.chmod(mode)
            part.replace(target)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
    except BrokenPipeError:
        raise CliError(f"{out} was not written: nobody reads it any more") from None
    except OSError as error:
        raise CliError(f"{out} was not written: {error.strerror}") from None


def refuse_unwritable(out: Path) -> None:
    """Say no before any work is done.

    Raises:
        CliError: as `writing`.
    """
    try:
        target = _target(out)
        if target is not None and not target.parent.is_dir():
            raise CliError(
                f"--out {out}: no folder {target.parent}", expected="a file in a folder that is there"
            )
    except OSError as error:
        raise CliError(f"--out {out}: {error.strerror}") from None


def _target(out: Path) -> Path | None:
    """The regular file that `out` is or becomes, links followed; None for a pipe or device.

    Raises:
        CliError: it is a folder, or one of a run's own files.
        OSError: it can't be looked at.
    """
    try:
        mode = out.stat().st_mode
    except FileNotFoundError:
        mode = None
    except ValueError as error:
        raise CliError(f"--out: {error}", expected="a file") from None
    if mode is not None and stat.S_ISDIR(mode):
        raise CliError(f"--out {out} is a folder", expected="a file")
    if mode is not None and not stat.S_ISREG(mode):
        return None
    target = Path(os.path.realpath(out))
    if OWN_FILE.fullmatch(target.name) or OWN_FILE.fullmatch(out.name):
        raise CliError(f"--out {out} has the name of a run's own file", expected="another name")
    return target
