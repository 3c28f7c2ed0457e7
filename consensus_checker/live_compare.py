"""What the finder knows of one chain of all ranks, and how it finds the first link that differs.

Owns the comparison of digests. Each runs over the one before it, so that two ranks with equal digests at one
count were equal up to there, and two with different ones part before it. The rest is a search:

    rank 0   d64 = d128 = d192   d256 ...
    rank 1   d64 = d128 = d192 | d256 ...     they part in links 192..255: ask for those, and look

A rank that has made fewer links is compared at its own head; nobody is held to what it has not reached.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from consensus_checker.live_posts import ChainPost, Question, Told

# Links looked at one by one; a longer range is cut by digests first.
RANGE_MAX = 256
# Digests asked for at a time.
CUTS = 32
# Links shown before the first that differs, by which facts are weighed, and behind it.
BEFORE, BEHIND = 64, 24
# Of each rank's digests so many are kept.
DIGESTS_MAX = 512

Answers = Mapping[int, Told]


@dataclass(frozen=True, slots=True)
class Found:
    """Where ranks part: at link `place`; `window` has what each of them wrote around it.

    A rank whose final head is `place` made no such link. `range` is what it was narrowed to, where the links
    themselves are gone.
    """

    place: int | None
    range: tuple[int, int]
    window: Mapping[int, Told]


@dataclass(slots=True)
class Known:
    """One chain of the ranks that must agree on it.

    Attributes:
        name: the lane; `axes` along which they agree.
        heads: rank -> links that it has made, as last heard.
        equal: links that are known to be equal on all ranks that were heard.
    """

    name: str
    axes: tuple[str, ...]
    heads: dict[int, int] = field(default_factory=dict)
    equal: int = 0
    posts: dict[int, ChainPost] = field(default_factory=dict)
    _digests: dict[int, dict[int, str]] = field(default_factory=dict)
    _compared: frozenset[int] = frozenset()

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.heads))

    def take(self, rank: int, post: ChainPost) -> None:
        self.heads[rank] = post.head
        if self.posts.get(rank) is post:
            return
        self.posts[rank] = post
        if not post.lost:
            self.add(rank, [*post.marks, (post.head, post.digest)])

    def add(self, rank: int, digests: Sequence[tuple[int, str]]) -> None:
        own = self._digests.setdefault(rank, {})
        # What is below the last equal count is equal, too.
        own.update((count, digest) for count, digest in digests if count > 0 and count >= self.equal)

    def forget(self, rank: int) -> None:
        for part in (self.heads, self.posts, self._digests):
            part.pop(rank, None)

    def look(self, ranks: Sequence[int]) -> tuple[int, int] | None:
        """The links between which `ranks` part: the last count at which all are equal, and the first at which
        two differ. None where nothing differs as far as is known.
        """
        if not self._compared.issuperset(ranks):
            # Whoever is new has been found equal up to nowhere yet.
            self.equal = 0
        self._compared = frozenset(ranks)
        own = {rank: self._digests.get(rank, {}) for rank in ranks}
        counts = sorted({count for digests in own.values() for count in digests})
        low = 0
        for count in counts:
            there = [digests[count] for digests in own.values() if count in digests]
            if len(set(there)) > 1:
                return low, count
            if len(there) == len(own):
                low = count
        self.equal = max(self.equal, low)
        self._prune(low)
        return None

    def due(self, ranks: Sequence[int]) -> int | None:
        """The count at which a digest of every rank would say more than is known; None if none would."""
        heads = [self.heads[rank] for rank in ranks if rank in self.heads]
        least = min(heads, default=0)
        return least if len(heads) > 1 and least > self.equal else None

    def _prune(self, low: int) -> None:
        for rank, digests in self._digests.items():
            if len(digests) > DIGESTS_MAX or min(digests, default=low) < low:
                kept = sorted(count for count in digests if count >= low)[-DIGESTS_MAX:]
                self._digests[rank] = {count: digests[count] for count in kept}


def hunt(known: Known, ranks: Sequence[int]) -> Generator[Question, Answers, Found | None]:
    """Find the first link that differs, by questions to all ranks; None where nothing differs after all."""
    span = known.look(ranks)
    while span is not None and span[1] - span[0] > RANGE_MAX:
        answers = yield Question(known.name, known.axes, counts=_cuts(*span))
        for rank, told in answers.items():
            known.add(rank, told.digests)
        closer = known.look([rank for rank in ranks if rank in answers])
        if closer is None or closer == span:
            break
        span = closer
    if span is None:
        return None
    low, high = span
    answers = yield Question(known.name, known.axes, links=(low, high))
    place = first_difference(answers, low)
    if place is None:
        return Found(None, span, {})
    return (yield from show(known, place))


def show(known: Known, place: int) -> Generator[Question, Answers, Found | None]:
    """What all ranks wrote around link `place`."""
    links = (max(0, place - BEFORE), place + BEHIND)
    window = yield Question(known.name, known.axes, links=links, has_records=True)
    return Found(place, (place, place + 1), window)


def first_difference(answers: Answers, low: int) -> int | None:
    """The number of the first link in which two ranks that have it differ."""
    links = {rank: list(parts(told)) for rank, told in answers.items()}
    begin = max([low, *(told.first for told in answers.values())])
    end = max((told.first + len(links[rank]) for rank, told in answers.items()), default=0)
    for number in range(begin, end):
        there = [
            bytes(links[rank][number - told.first])
            for rank, told in answers.items()
            if number - told.first < len(links[rank])
        ]
        if len(set(there)) > 1:
            return number
    return None


def parts(told: Told) -> Sequence[msgspec.Raw]:
    """The links of an answer, each as it was written."""
    return msgspec.json.decode(told.links, type=list[msgspec.Raw])


def _cuts(low: int, high: int) -> list[int]:
    """Counts between the two, evenly, and the higher one itself."""
    step = max(1, (high - low) // CUTS)
    return [*range(low + step, high, step), high]
