"""Checkpoints: a digest over all that a lane has written so far and that other ranks must have written too.

Owns the links between two checkpoints. Each digest runs over the one before it, so that two lanes whose
digests are equal at one count were equal up to there: only what is behind the last equal one must be read.
A watcher in another thread may read the links too, and some that came before the last checkpoint.

    records  r1 r2 ... r2048 | r2049 ... r4096 | r4097 ...
    digest                   d1                d2 = digest(d1, r2049 ... r4096)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import msgspec

# Compared records under one digest.
LINKS = 2048


def _blake2b(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()


def _chosen() -> tuple[str, Callable[[bytes], str]]:
    """The digest and its name; a server's environment may not have xxhash."""
    try:
        from xxhash import xxh3_64_hexdigest
    except ImportError:
        return "blake2b-64", _blake2b
    return "xxh3-64", xxh3_64_hexdigest


# 16 hex characters; digests of two processes compare only where their algorithms are the same.
ALGORITHM, digest_of = _chosen()

# A tuple of kind, phase and values; msgspec.Raw with the same as JSON, where one of them holds others.
Link = Any


class Chain:
    """The compared records of one lane that agree along one set of axes.

    Attributes:
        links: what has come since the last checkpoint; an emitter adds to it.
        count: records under `digest`.
    """

    __slots__ = ("_encode", "_kept", "_turn", "axes", "count", "digest", "links")

    def __init__(self, axes: tuple[str, ...]) -> None:
        self.axes = axes
        self.links: list[Link] = []
        self.count = 0
        self.digest = ""
        self._encode = msgspec.json.Encoder().encode
        # Windows before `links`, oldest first, each with the count that it begins at.
        self._kept: deque[tuple[int, list[Link]]] | None = None
        # Odd while a window is being closed.
        self._turn = 0

    def close(self) -> tuple[int, str]:
        """Fold the links into the digest; the count and the digest are a checkpoint."""
        links = self.links
        digest = digest_of(self.digest.encode() + self._encode(links))
        self._turn += 1
        if self._kept is not None:
            self._kept.append((self.count, links.copy()))
        self.count += len(links)
        self.digest = digest
        links.clear()
        self._turn += 1
        return self.count, digest

    def keep(self, windows: int) -> None:
        """From here on keep the links of that many closed windows, for `since`."""
        self._kept = deque(self._kept or (), maxlen=windows)

    @property
    def head(self) -> int:
        """Links so far. May be asked by any thread."""
        while True:
            turn = self._turn
            head = self.count + len(self.links)
            if not turn % 2 and turn == self._turn:
                return head
            time.sleep(0)

    def since(self, start: int) -> tuple[int, list[Link]]:
        """Links from number `start` on, and the number of the first: later, where older ones are gone.

        May be asked by any thread.
        """
        while True:
            turn = self._turn
            count, tail = self.count, self.links[max(0, start - self.count) :]
            kept = list(self._kept or ()) if start < count else []
            if not turn % 2 and turn == self._turn:
                break
            time.sleep(0)
        if start >= count:
            return start, tail
        windows = [(first, links) for first, links in kept if first + len(links) > start]
        if not windows:
            return count, tail
        first = max(start, windows[0][0])
        found = [link for begin, links in windows for link in links[max(0, first - begin) :]]
        return first, [*found, *tail]
