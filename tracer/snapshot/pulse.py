"""Whether threads of another process get a turn, by its heart: it writes a line once a second while they do.

The line is written through a mapping, which not every file system counts as a change of the file, and mostly
over itself: so what stands at the end of the lane is compared, and nothing else is asked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from tracer.record import HEART_LANE

# Around the end of what was written when it was first looked at: the last line, and what comes behind it.
BEFORE_BYTES, BEHIND_BYTES = 4 << 10, 64 << 10
SUFFIX = ".jsonl"


class Pulse:
    """The heart of one rank, watched from now on."""

    def __init__(self, folder: Path, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._begin = f"rank{rank:04d}.{HEART_LANE}."
        self._clock = clock
        self._name = ""
        self._from = 0
        self._seen = self._line()
        self._since_s = clock()

    @property
    def is_there(self) -> bool:
        """Whether there is a heart at all; without one nobody can say whether threads get a turn."""
        return bool(self._name)

    def still_s(self) -> float:
        """For how long there was no beat while this was watching."""
        seen = self._line()
        if seen != self._seen:
            self._seen, self._since_s = seen, self._clock()
        return self._clock() - self._since_s

    def _line(self) -> bytes:
        try:
            names = [name for name in os.listdir(self._folder) if name.startswith(self._begin)]
            # The thousandth file has a longer name than the ones before it.
            newest = max(
                (name for name in names if name.endswith(SUFFIX)), key=lambda name: (len(name), name)
            )
            if newest != self._name:
                written = len((self._folder / newest).read_bytes().rstrip(b"\0"))
                self._name, self._from = newest, max(0, written - BEFORE_BYTES)
            with (self._folder / newest).open("rb", buffering=0) as file:
                file.seek(self._from)
                return newest.encode() + file.read(BEFORE_BYTES + BEHIND_BYTES)
        except (OSError, ValueError):
            return b""
