"""Checkpoints: a digest over all that a lane has written so far and that other ranks must have written too.

Owns the links between two checkpoints. Each digest runs over the one before it, so that two lanes whose
digests are equal at one count were equal up to there: only what is behind the last equal one must be read.

    records  r1 r2 ... r2048 | r2049 ... r4096 | r4097 ...
    digest                   d1                d2 = digest(d1, r2049 ... r4096)
"""

from __future__ import annotations

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


class Chain:
    """The compared records of one lane that agree along one set of axes.

    Attributes:
        links: what has come since the last checkpoint; an emitter adds to it.
        count: records under `digest`.
    """

    __slots__ = ("_encode", "axes", "count", "digest", "links")

    def __init__(self, axes: tuple[str, ...]) -> None:
        self.axes = axes
        self.links: list[tuple[Any, ...]] = []
        self.count = 0
        self.digest = ""
        self._encode = msgspec.json.Encoder().encode

    def close(self) -> tuple[int, str]:
        """Fold the links into the digest; the count and the digest are a checkpoint."""
        links = self.links
        self.count += len(links)
        self.digest = digest_of(self.digest.encode() + self._encode(links))
        links.clear()
        return self.count, self.digest
