"""The folder of a run: never over somebody's logs, never two runs at once, and never a file that is not ours.

Owns the rule of what may be removed: files named as this tool names a run's files, nothing else. Whoever
makes a run holds the folder's lock; it ends with the process, so that a killed one blocks nobody.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cli.errors import CliError

LOCK_NAME = ".hicache.lock"
OWN_FILE = re.compile(
    r"rank\d{4,}\.[A-Za-z0-9_-]+\.\d{3,}\.jsonl(?:\.gz(?:\.tmp)?)?|rank\d{4,}\.meta\.json|run\.json|"
    r"rank\d{4,}\.[A-Za-z0-9_-]+\.checkpoints|" + re.escape(LOCK_NAME)
)
# A file system that knows no locks: two runs at once are then nobody's to see.
NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK)


def refuse_used(out: Path, *, overwrite: bool) -> None:
    """Say no before any work is done: `out` is a file, can't be written, or holds a run already.

    Raises:
        CliError: with the exit code of a usage error.
    """
    with _told(out):
        if out.exists() and not out.is_dir():
            raise CliError(f"--out {out} is a file", expected="a folder, new or empty")
        place = _nearest_existing(out)
        if not place.is_dir():
            raise CliError(f"--out {out}: {place} is a file", expected="a folder, new or empty")
        if not os.access(place, os.W_OK | os.X_OK):
            raise CliError(f"--out {out}: no permission to write in {place}", hint="another folder")
        if not overwrite and (found := own_files(out)):
            raise CliError(
                f"{out} holds a run already ({len(found)} files, {found[0].name} the first)",
                expected="a folder without logs",
                hint="another --out, or --overwrite to replace that run",
            )


@contextmanager
def prepared(out: Path, *, overwrite: bool) -> Iterator[None]:
    """The folder, made and locked, for the time of a run; an old run's files in it go.

    Other files, links' targets and subfolders stay.

    Raises:
        CliError: as `refuse_used`, or another process is making a run there.
    """
    with _told(out):
        out.mkdir(parents=True, exist_ok=True)
        lock = _lock(out)
    try:
        with _told(out):
            # Again, since another run may have come and gone since the first look.
            refuse_used(out, overwrite=overwrite)
            for file in own_files(out):
                file.unlink()
        yield
    finally:
        # While it is still locked, so that nobody else's file is removed.
        with suppress(OSError):
            (out / LOCK_NAME).unlink()
        os.close(lock)


def own_files(out: Path) -> list[Path]:
    """The files in `out` that have the name of a run's file, in order of name; the lock is not among them."""
    with _told(out):
        if not out.is_dir():
            return []
        return [
            entry
            for entry in sorted(out.iterdir())
            if OWN_FILE.fullmatch(entry.name)
            and entry.name != LOCK_NAME
            and (entry.is_file() or entry.is_symlink())
        ]


def _lock(out: Path) -> int:
    """Take the folder for this process; the descriptor that holds it.

    Raises:
        CliError: another process has it.
        OSError: the file of the lock can't be made.
    """
    path = out / LOCK_NAME
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return fd
            os.close(fd)
            if not isinstance(error, BlockingIOError):
                raise
            raise CliError(
                f"{out}: another process is making a run there right now",
                expected="one run at a time in a folder",
                hint="another --out, or wait until it has ended",
            ) from None
        # The run before may have removed the file between our opening and locking it.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        os.close(fd)


@contextmanager
def _told(out: Path) -> Iterator[None]:
    """What the system says of a path, as a message about the option."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            shown = f"{str(out)[:80]}..."
        else:
            shown = str(out)
        raise CliError(f"--out {shown}: {error.strerror}", hint="another folder") from None
    except ValueError as error:
        raise CliError(f"--out: {error}", hint="another folder") from None


def _nearest_existing(path: Path) -> Path:
    for place in (path, *path.absolute().parents):
        if place.exists():
            return place
    return path
