"""Checkpoints: a digest over all that a lane has written so far and that other ranks must have written too.

Owns the links between two checkpoints. Each digest runs over the one before it, so that two lanes whose
digests are equal at one count were equal up to there: only what is behind the last equal one must be read.
A watcher in another thread may read the links too, and some that came before the last checkpoint.

    records  r1 r2 ... r2048 | r2049 ... r4096 | r4097 ...
    digest                   d1                d2 = digest(d1, r2049 ... r4096)

Records that agree along fewer axes than others have a chain of their own, and the two are interleaved in the
lane. The links of the narrower one say how: each has the number of the wider chain's links before it. Where
the wider chain is closed, so is the narrower.

    tp, cp, pp      w1  w2      w3  | w4
    tp, cp                n1:2      |    n2:4
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from hashlib import blake2b
from operator import itemgetter
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

# A tuple of kind, phase and values, and behind them the counts that say where it stands among others;
# msgspec.Raw with the same as JSON, where one of them holds others.
Link = Any
_WORDS = msgspec.json.Decoder(list[Any])


class Chain:
    """The compared records of one lane that agree along one set of axes.

    Attributes:
        links: what has come since the last checkpoint; an emitter adds to it.
        count: links under `digest`.
        records: records under it: a call that `calls.traced` has written is one link and two records.
        wider: chains that agree along more axes, and these too; they are closed before this one is.
        narrower: those that are closed whenever this one is.
        singles, pairs: kind and phase of links that stand for one record, and for two.
    """

    __slots__ = (
        "_encode",
        "_kept",
        "_turn",
        "axes",
        "count",
        "digest",
        "links",
        "narrower",
        "pairs",
        "records",
        "singles",
        "wider",
    )

    def __init__(self, axes: tuple[str, ...]) -> None:
        self.axes = axes
        self.links: list[Link] = []
        self.count = 0
        self.records = 0
        self.digest = ""
        self.wider: list[Chain] = []
        self.narrower: list[Chain] = []
        self.singles: set[tuple[str, str]] = set()
        self.pairs: set[tuple[str, str]] = set()
        self._encode = msgspec.json.Encoder().encode
        # Windows before `links`, oldest first, each with the count that it begins at.
        self._kept: deque[tuple[int, list[Link]]] | None = None
        # Odd while a window is being closed.
        self._turn = 0

    def close(self) -> tuple[int, str]:
        """Fold the links into the digest; the count and the digest are a checkpoint."""
        links = self.links
        digest = digest_of(self.digest.encode() + self._encode(links))
        records = self._records_in(links)
        self._turn += 1
        if self._kept is not None:
            self._kept.append((self.count, links.copy()))
        self.count += len(links)
        self.records += records
        self.digest = digest
        links.clear()
        self._turn += 1
        return self.count, digest

    @property
    def name(self) -> str:
        """The axes as a checkpoint names them."""
        return ",".join(self.axes)

    @property
    def is_countable(self) -> bool:
        """Whether each link tells for how many records it stands."""
        return not self.singles & self.pairs

    @property
    def records_so_far(self) -> int:
        """Records of this chain in the lane, those behind the last checkpoint too."""
        return self.records + self._records_in(self.links)

    def _records_in(self, links: list[Link]) -> int:
        if not self.pairs:
            return len(links)
        if not self.singles:
            return 2 * len(links)
        return len(links) + sum(map(self.pairs.__contains__, map(_word, links)))

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


_kind_and_phase = itemgetter(0, 1)


def _word(link: Link) -> tuple[str, str]:
    kind, phase = _kind_and_phase(_WORDS.decode(link) if type(link) is msgspec.Raw else link)
    return kind, phase


def declared(header: Mapping[str, Any]) -> dict[tuple[str, ...], Chain]:
    """A chain for each set of axes along which a header's kinds agree, the widest first."""
    every = {tuple(parts.get("agree", ())) for parts in header.get("kinds", {}).values()}
    found: dict[frozenset[str], Chain] = {}
    for axes in sorted(every, key=lambda axes: (-len(axes), axes)):
        if axes:
            found.setdefault(frozenset(axes), Chain(axes))
    for own, chain in found.items():
        chain.wider = [other for axes, other in found.items() if own < axes]
        chain.narrower = [other for axes, other in found.items() if axes < own]
    return {chain.axes: chain for chain in found.values()}
