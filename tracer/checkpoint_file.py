"""Where each checkpoint of a lane stands: a small file beside its segments, which saves a search.

Owns the names and lines of `rank0003.scheduler.checkpoints`. It is a help for whoever reads the log and never
evidence: what it says is held against the log itself. A lane that can't have it goes on without.

    {"file":4,"end":381204,"record":{"seq":8311,...,"kind":"checkpoint",...}}      one a line
"""

from __future__ import annotations

import os
from pathlib import Path

SUFFIX = ".checkpoints"


def file_name(rank: int, lane: str) -> str:
    return f"rank{rank:04d}.{lane}{SUFFIX}"


class CheckpointFile:
    """Adds one line at a time, and gives up for good at the first that can't be written.

    It is opened for each, for a lane holds one descriptor, and never where another file has its name by then.
    """

    __slots__ = ("_identity", "_is_off", "_path")

    def __init__(self, folder: Path, rank: int, lane: str) -> None:
        self._path = folder / file_name(rank, lane)
        self._identity: tuple[int, int] | None = None
        self._is_off = False

    def add(self, record: bytes, index: int, end: int) -> None:
        """The checkpoint `record` ends at byte `end` of the lane's segment number `index`."""
        if self._is_off:
            return
        line = b'{"file":%d,"end":%d,"record":%s}\n' % (index, end, record)
        try:
            self._is_off = not self._append(line)
        except OSError:
            self._is_off = True

    def _append(self, line: bytes) -> bool:
        made = os.O_CREAT | os.O_EXCL if self._identity is None else 0
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | made, 0o600)
        try:
            status = os.fstat(fd)
            identity = status.st_dev, status.st_ino
            if self._identity not in (None, identity):
                return False
            self._identity = identity
            return os.write(fd, line) == len(line)
        finally:
            os.close(fd)
