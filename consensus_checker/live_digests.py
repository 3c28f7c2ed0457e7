"""Digests of this process's own chains, finer than the checkpoints of the log.

Owns the marks: a digest at every 64th link, each over the one before, so that equal at one count means equal
up to there. Links are encoded and digested by the block; nothing here looks at one of them.

    links   0 ... 63 | 64 ... 127 | 128 ... 191 | 192 ... head
    marks            d64          d128          d192         digest at the head, or at any count between
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tracer.chain import LINKS, Chain, digest_of

# Links under one mark.
EVERY = 64
# Windows of the chain that are kept: how far two ranks may be apart and still be compared.
WINDOWS = 32
LINKS_KEPT = WINDOWS * LINKS
# Marks in a post: so many of every 64th, of every 128th, and so on.
MARKS_A_LEVEL = 8

_encode = msgspec.json.Encoder().encode


class ChainDigests:
    """Marks of one chain, followed from its first link on.

    Attributes:
        head: links digested; `digest` is over them.
        lost: links that were gone when they should have been digested. From then on there are no digests.
    """

    def __init__(self, chain: Chain) -> None:
        chain.keep(WINDOWS)
        self.axes = chain.axes
        self.head = 0
        self.digest = ""
        self.lost = 0
        self._chain = chain
        # Count -> digest, of whole blocks.
        self._marks: dict[int, str] = {0: ""}
        self._count = 0

    def follow(self) -> int:
        """Digest what is new, and say how many links that were."""
        if self.lost:
            return 0
        first, links = self._chain.since(self._count)
        if first > self._count:
            self.lost = first - self._count
            return 0
        before = self.head
        digest = self._marks[self._count]
        whole = len(links) - len(links) % EVERY
        for start in range(0, whole, EVERY):
            digest = _folded(digest, links[start : start + EVERY])
            self._count += EVERY
            self._marks[self._count] = digest
        rest = links[whole:]
        self.head = self._count + len(rest)
        self.digest = _folded(digest, rest) if rest else digest
        self._forget()
        return self.head - before

    def _forget(self) -> None:
        """Marks of links that are gone tell nobody anything that newer ones do not."""
        if len(self._marks) <= 2 * LINKS_KEPT // EVERY:
            return
        oldest = self._count - LINKS_KEPT
        self._marks = {count: digest for count, digest in self._marks.items() if count >= oldest}

    def marks(self) -> list[tuple[int, str]]:
        """Of the newest ones many, of older ones fewer, at counts that another rank's share."""
        chosen: set[int] = set()
        step = EVERY
        while step <= LINKS_KEPT:
            last = self._count - self._count % step
            chosen.update(range(max(step, last - (MARKS_A_LEVEL - 1) * step), last + 1, step))
            step *= 2
        return [(count, self._marks[count]) for count in sorted(chosen) if count in self._marks]

    def digests_at(self, counts: Iterable[int]) -> list[tuple[int, str]]:
        """Digests at those of `counts` for which the links are still there."""
        wanted = sorted(count for count in counts if 0 < count <= self.head)
        if self.lost or not wanted:
            return []
        begin = wanted[0] - wanted[0] % EVERY
        first, links = self._chain.since(begin)
        found = []
        for count in wanted:
            base = count - count % EVERY
            if base in self._marks and (count == base or base >= first):
                part = links[base - first : count - first] if count > base else []
                found.append((count, _folded(self._marks[base], part) if part else self._marks[base]))
        return found

    def links(self, start: int, stop: int) -> tuple[int, list[Any]]:
        """Links `start` to `stop`, as far as they are there, and the number of the first."""
        first, links = self._chain.since(max(0, start))
        return first, links[: max(0, stop - first)]


def _folded(digest: str, links: Sequence[Any]) -> str:
    return digest_of(digest.encode() + _encode(links))


def as_json(links: Sequence[Any]) -> bytes:
    return _encode(links)
