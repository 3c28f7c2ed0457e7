"""The members of a replica as the rank that compares sees them: what each has posted, and how long ago.

Owns the ages. All times are those that it has watched go by: a pause of its own is not the silence of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from consensus_checker.live_posts import LanePost, Post, decoded
from consensus_checker.live_store import Mailbox
from consensus_checker.words import ranks_text

# How long ranks that have ended are given to be joined by others, before a missing last call is one.
ENDED_S = 0.2
# Calls that a rank's watcher may be behind by, in seconds of its own time.
LAG_S = 1.0
DOUBTS_MAX = 16


class Doubts:
    """What limits all that can be said: each is told once, and is part of every verdict from then on."""

    def __init__(self) -> None:
        self.texts: dict[str, None] = {}
        self._untold: list[str] = []

    def add(self, text: str) -> None:
        if text not in self.texts and len(self.texts) < DOUBTS_MAX:
            self.texts[text] = None
            self._untold.append(text)

    def untold(self) -> list[str]:
        """Those that came since this was asked last."""
        found, self._untold = self._untold, []
        return found


@dataclass(slots=True)
class Seen:
    """One member, as its posts say and as long as they have said it."""

    post: Post
    age_s: float = 0.0
    still_s: dict[str, float] = field(default_factory=dict)
    ended_s: float = 0.0
    # Why it is compared no more, or "".
    unfit: str = ""


class Members:
    """All members that were heard.

    Args:
        contract: of this rank; whoever has another is not compared.
        is_first: nobody has compared before, so that a post may be of a run that is long over: it counts
            when another one follows.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        ranks: Sequence[int],
        doubts: Doubts,
        *,
        contract: str,
        silence_s: float,
        is_first: bool,
    ) -> None:
        self.ranks = tuple(ranks)
        self.seen: dict[int, Seen] = {}
        self._mailbox = mailbox
        self._doubts = doubts
        self._contract = contract
        self.silence_s = silence_s
        self._is_first = is_first
        # Rank -> session and beat of a post that may be an old one.
        self._old: dict[int, tuple[str, int]] = {}
        # Ranks whose watchers have been late.
        self._late: set[int] = set()

    def read(self, dt_s: float) -> list[Post]:
        """Have all posts that are there; those that are new, of ranks that can be compared."""
        found = []
        names = {f"post/{rank}": rank for rank in self.ranks}
        for name, data in self._mailbox.get(list(names)).items():
            rank = names[name]
            post = decoded(data, Post)
            if post is None or post.rank != rank:
                self._doubts.add(f"the key {name} holds something that is not a post of rank {rank}")
                continue
            if not self._is_old(post) and self._take(post, dt_s):
                found.append(post)
        return found

    def _is_old(self, post: Post) -> bool:
        if not self._is_first or post.rank in self.seen:
            return False
        return self._old.setdefault(post.rank, (post.session, post.beat)) == (post.session, post.beat)

    def _take(self, post: Post, dt_s: float) -> bool:
        """Whether it says anything that is to be compared."""
        seen = self.seen.get(post.rank)
        if seen is None:
            seen = self.seen[post.rank] = Seen(post)
            if post.contract != self._contract:
                seen.unfit = "its header declares something else"
                self._doubts.add(f"{ranks_text((post.rank,))}: {seen.unfit}: not compared")
        elif seen.post.session != post.session:
            seen.unfit = "another process has taken its place"
            self._doubts.add(f"{ranks_text((post.rank,))}: {seen.unfit}: not compared")
        elif seen.post.beat == post.beat:
            seen.age_s += dt_s
            for lane in seen.still_s:
                seen.still_s[lane] += dt_s
            seen.ended_s += dt_s if post.ended else 0.0
            return False
        if seen.age_s >= self.silence_s:
            # It was silent, and that was told: whether it stands still begins to count now.
            seen.still_s.clear()
        before = {lane.name: _state(lane) for lane in seen.post.lanes}
        seen.still_s = {
            lane.name: seen.still_s.get(lane.name, 0.0) + dt_s
            if before.get(lane.name) == _state(lane)
            else 0.0
            for lane in post.lanes
        }
        seen.age_s = 0.0
        seen.ended_s += dt_s if post.ended else 0.0
        seen.post = post
        if post.lag_s >= LAG_S and post.rank not in self._late:
            self._late.add(post.rank)
            self._doubts.add(
                f"the watcher of {ranks_text((post.rank,))} was {post.lag_s:.1f} s behind its calls"
            )
        return not seen.unfit

    def live(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Those that can still answer."""
        return tuple(
            rank for rank in ranks if self.seen[rank].age_s < self.silence_s and not self.has_left(rank)
        )

    def has_left(self, rank: int) -> bool:
        """Whether it has ended and posts no more."""
        seen = self.seen[rank]
        return bool(seen.post.ended) and seen.age_s > ENDED_S

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.ranks if rank not in self.seen)

    @property
    def have_ended(self) -> bool:
        """Whether all of them have, or can't be heard any more."""
        return not self.missing and all(
            seen.post.ended or seen.age_s >= self.silence_s for seen in self.seen.values()
        )


def _state(lane: LanePost) -> tuple[int, ...]:
    """What changes while a lane goes on, even if its idle steps are taken back."""
    return (lane.seq, lane.step, *(chain.head for chain in lane.chains))
