"""The search of the rank that compares: which chains differ, what is asked, and the first link that differs.

Owns the open question and whatever is known of the chains of all ranks. It is asked once a tick to go on.

    heads, digests -> differ? -> hunt: question, answers, question ... -> window -> check -> verdict
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from consensus_checker.live_compare import Answers, Found, Known, hunt, parts, show
from consensus_checker.live_members import ENDED_S, Doubts, Members
from consensus_checker.live_posts import Answer, Post, Question, Told, decoded
from consensus_checker.live_store import Mailbox
from consensus_checker.verdict import Coverage, Verdict
from consensus_checker.words import ranks_text
from tracer.record import HEART_LANE, Kind

# A question is given up for those who have not answered it by then.
ANSWER_S = 0.5
# Where the ranks that have come to a difference are not enough to say who is odd, the others are waited for.
JOIN_S, AGAIN_S = 1.0, 0.1
# And so much longer as long as all of them go on.
COMING_S, MOVED_S = 4.0, 0.5
# Ranks that do not answer may only be slow: so long the search begins again.
HUNT_S = 5.0

# Name of the lane, axes, and the coordinates off these.
Key = tuple[str, tuple[str, ...], tuple[tuple[str, int], ...]]
# A rank counts as heard as long as its last post is not older than this part of the silence that is told.
HEARD_PART = 0.5


@dataclass(slots=True)
class Asked:
    """An open question: to whom, since when, and what came."""

    number: int
    questions: list[Question]
    ranks: tuple[int, ...]
    is_urgent: bool
    age_s: float = 0.0
    answers: dict[int, list[Told]] = field(default_factory=dict)


Hunting = Generator[Question, Answers, "Found | None"]


class Search:
    """Compares the chains of all members.

    Args:
        header: of this rank's lanes; the others' differ in rank and coordinates.
        main: the lane that decides.
        kinds: what is declared by now.
        coverage: what a verdict says of how much was looked at.
        ask: number of the last question that another rank has asked before.

    Attributes:
        watched_s: time that has gone by.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        members: Members,
        doubts: Doubts,
        header: Mapping[str, Any],
        *,
        main: str,
        folder: Path | None,
        kinds: Callable[[], Mapping[str, Kind]],
        coverage: Callable[[], Coverage],
        ask: int,
    ) -> None:
        self.asked: Asked | None = None
        self.ask = ask
        self.watched_s = 0.0
        self._mailbox = mailbox
        self._members = members
        self._doubts = doubts
        self._header = header
        self._main = main
        self._folder = folder
        self._kinds = kinds
        self._coverage = coverage
        self._chains: dict[Key, Known] = {}
        # Chains that are compared no more, and why.
        self._given_up: dict[Key, str] = {}
        # Differences that ranks may yet settle, or show: until when, and when they are looked at again.
        self._later: dict[Key, tuple[float, float]] = {}
        self._behind_s: dict[Key, dict[int, tuple[int, float]]] = {}
        self._hunting: tuple[Key, tuple[int, ...], Hunting] | None = None
        self._found: list[tuple[tuple[Any, ...], Verdict, tuple[str, ...]]] = []
        self._is_swept = False

    @property
    def is_urgent(self) -> bool:
        return self.is_hunting or (self.asked is not None and self.asked.is_urgent)

    @property
    def is_hunting(self) -> bool:
        return self._hunting is not None

    @property
    def compared(self) -> int:
        """Links found equal on all ranks, over all chains."""
        return sum(known.equal for known in self._chains.values())

    def have_all_heads(self) -> None:
        """Who has made no link of a chain yet, and must agree on it, has made none so far."""
        for (lane, axes, fixed), known in self._chains.items():
            for rank, seen in self._members.seen.items():
                if rank in known.heads or seen.unfit or _fixed(seen.post.coordinates, axes) != fixed:
                    continue
                if any(one.name == lane for one in seen.post.lanes):
                    known.heads[rank] = 0

    def know(self, post: Post) -> None:
        """Take the heads and digests of a post."""
        for lane in post.lanes:
            if lane.name == HEART_LANE:
                continue
            for chain in lane.chains:
                # In whatever order a rank names them.
                axes = tuple(sorted(chain.axes))
                key = lane.name, axes, _fixed(post.coordinates, axes)
                known = self._chains.setdefault(key, Known(lane.name, axes))
                known.take(post.rank, chain)
                if chain.lost:
                    self._give_up(
                        key,
                        f"{chain.lost:,} calls of {ranks_text((post.rank,))} were gone before they were "
                        f"looked at: its {lane.name} lane is not compared any more",
                    )
                if lane.is_thinned:
                    self._give_up(
                        key,
                        f"{ranks_text((post.rank,))} leaves out steps, because recording took too much "
                        f"time: its {lane.name} lane is not compared any more",
                    )

    def _give_up(self, key: Key, why: str) -> None:
        if key not in self._given_up:
            self._given_up[key] = why
            self._doubts.add(why)

    # Questions.

    def _put(self, questions: Sequence[Question], ranks: Sequence[int], *, is_urgent: bool) -> None:
        self.ask += 1
        self.asked = Asked(self.ask, list(questions), tuple(ranks), is_urgent)

    def hear(self, dt_s: float) -> None:
        asked = self.asked
        if asked is None:
            return
        asked.age_s += dt_s
        names = [f"answer/{rank}" for rank in asked.ranks if rank not in asked.answers]
        if not names:
            return
        for data in self._mailbox.get(names).values():
            answer = decoded(data, Answer)
            if answer is None or answer.ask != asked.number or answer.rank not in asked.ranks:
                continue
            seen = self._members.seen.get(answer.rank)
            if seen is not None and seen.post.session == answer.session:
                asked.answers[answer.rank] = answer.told

    @property
    def _is_answered(self) -> bool:
        asked = self.asked
        return asked is not None and (len(asked.answers) == len(asked.ranks) or asked.age_s >= ANSWER_S)

    def _answers(self, number: int = 0) -> dict[int, Told]:
        """The answers to one of the questions."""
        assert self.asked is not None, "nothing was asked"
        return {rank: told[number] for rank, told in sorted(self.asked.answers.items()) if len(told) > number}

    # Comparing.

    def _fit(self, key: Key) -> tuple[int, ...]:
        """Ranks of a chain that can be held against each other."""
        known = self._chains[key]
        return tuple(rank for rank in known.ranks if not self._members.seen[rank].unfit)

    def compare(self) -> tuple[Verdict, tuple[str, ...]] | None:
        """Go on; the verdict and its screen, when one is found."""
        if self._hunting is not None:
            self._go_on()
            return None
        if self.asked is not None:
            if not self._is_answered:
                return None
            for number, question in enumerate(self.asked.questions):
                for rank, told in self._answers(number).items():
                    if told.digests:
                        self._chain_of(question, rank).add(rank, told.digests)
            self.asked = None
        differing = [key for key in self._chains if self._differs(key)]
        if differing and not self._is_swept:
            # The others may have parted earlier: all are brought to the same state before one is looked into.
            self._is_swept = True
            if self._ask_heads(is_urgent=True):
                return None
        if differing:
            self._begin(differing[0])
            return None
        if self._found:
            return self._conclude()
        self._is_swept = False
        self._ask_heads(is_urgent=False)
        return None

    def _chain_of(self, question: Question, rank: int) -> Known:
        axes = tuple(sorted(question.axes))
        return self._chains[question.lane, axes, _fixed(self._members.seen[rank].post.coordinates, axes)]

    def _differs(self, key: Key) -> bool:
        _, again_s = self._later.get(key, (0.0, 0.0))
        if key in self._given_up or self.watched_s < again_s:
            return False
        ranks = self._fit(key)
        known = self._chains[key]
        if len(ranks) < 2:
            return False
        return known.look(ranks) is not None or self._lacks_end(key, ranks) is not None

    def _lacks_end(self, key: Key, ranks: Sequence[int]) -> int | None:
        """The head of a rank that has completed, where others have made more."""
        known = self._chains[key]
        ended = [rank for rank in ranks if self._members.seen[rank].post.ended == "completed"]
        waited = [rank for rank in ended if self._members.seen[rank].ended_s >= ENDED_S]
        least = min((known.heads[rank] for rank in waited), default=None)
        if least is None or least > known.equal or least >= max(known.heads[rank] for rank in ranks):
            return None
        return least

    def _ask_heads(self, *, is_urgent: bool) -> bool:
        """Ask for digests where all ranks have more in common than is known; whether there is anything."""
        questions: dict[tuple[str, tuple[str, ...]], set[int]] = {}
        ranks: set[int] = set()
        for key, known in self._chains.items():
            if key in self._given_up:
                continue
            fit = self._fit(key)
            count = known.due(fit)
            live = self._members.live(fit)
            if count is None or not live:
                continue
            questions.setdefault((key[0], key[1]), set()).add(count)
            ranks.update(live)
        if questions:
            asked = [Question(lane, axes, sorted(counts)) for (lane, axes), counts in questions.items()]
            self._put(asked, sorted(ranks), is_urgent=is_urgent)
        return bool(questions)

    def _begin(self, key: Key) -> None:
        known = self._chains[key]
        ranks = self._fit(key)
        place = self._lacks_end(key, ranks)
        is_end = known.look(ranks) is None and place is not None
        hunting = show(known, place) if is_end and place is not None else hunt(known, ranks)
        self._hunting = key, ranks, hunting
        try:
            self._put([next(hunting)], self._members.live(ranks), is_urgent=True)
        except StopIteration as end:
            self._caught(key, end.value)

    def _go_on(self) -> None:
        assert self._hunting is not None
        if not self._is_answered or self.asked is None:
            return
        key, ranks, hunting = self._hunting
        question = self.asked.questions[0]
        answers = self._answers()
        if question.links is not None:
            answers.update(
                (rank, tail)
                for rank in ranks
                if rank not in answers and (tail := self._tail(key, rank, question.links)) is not None
            )
        try:
            self._put([hunting.send(answers)], self._members.live(ranks), is_urgent=True)
        except StopIteration as end:
            self._caught(key, end.value)

    def _tail(self, key: Key, rank: int, links: tuple[int, int]) -> Told | None:
        """What a rank that has left has put into its last post."""
        post = self._chains[key].posts.get(rank)
        if post is None or not post.tail:
            return None
        all_of_it = msgspec.json.decode(post.tail, type=list[msgspec.Raw])
        first = max(post.tail_first, links[0])
        part = all_of_it[first - post.tail_first : max(0, links[1] - post.tail_first)]
        return Told([], first, msgspec.json.encode(part))

    def _caught(self, key: Key, found: Found | None) -> None:
        self._hunting = self.asked = None
        if found is not None and len(found.window) < 2 and self._is_again(key, HUNT_S):
            return
        screen = None
        if found is not None:
            # Not before it is needed: a server that is well has no use for the rest of the checker.
            from consensus_checker import live_verdict

            own = {
                rank: live_verdict.Rank(
                    self._members.seen[rank].post.coordinates,
                    self._members.seen[rank].post.ended,
                    self._chains[key].heads[rank],
                    self._dropped(rank, key),
                )
                for rank in self._fit(key)
            }
            try:
                screen = live_verdict.divergence(
                    self._header, self._chains[key], found, own, self._coverage(), self._folder
                )
            except Exception as error:
                # What another program's header or log makes of it is no reason to be silent.
                self._doubts.add(
                    f"what the ranks wrote could not be looked into ({type(error).__name__}: {error})"
                )
                screen = live_verdict.narrowed(self._chains[key], found, self._coverage())
        if screen is None and found is not None and found.place == self._lacks_end(key, self._fit(key)):
            # Such as a vote that was being opened when the others had already left: nobody decided anything.
            self._given_up[key] = "they ended"
            return
        if screen is None:
            lacking = sorted(rank for rank in self._fit(key) if self._dropped(rank, key))
            why = f"{ranks_text(lacking)} dropped some of its records" if lacking else "nobody is accused"
            self._give_up(
                key,
                f"the {key[0]} lanes differ, and what stands in them says not where ({why}): "
                "they are not compared any more",
            )
            return
        if self._may_be_joined(key, found, screen.verdict.finding.culprit):
            return
        self._given_up[key] = "a divergence was found"
        first = screen.verdict.finding.first_divergence
        seq = min((entry.record or 0 for entry in screen.verdict.finding.evidence), default=0)
        place = (first.step, key[0] != self._main, seq, first.index) if first else ()
        # What is only known by its digests may follow from what has a record.
        self._found.append(((first is None, *place), screen.verdict, screen.lines))

    def _may_be_joined(self, key: Key, found: Found | None, accused: Sequence[int]) -> bool:
        """Whether ranks that have yet to come to the place may settle who is right: it is looked at later.

        Two against one are no majority as long as a fourth may come to the one.
        """
        fit = self._fit(key)
        if found is None or found.place is None or len(fit) < 3:
            return False
        seen = self._members.seen
        coming = [
            rank
            for rank, told in found.window.items()
            if told.first + len(parts(told)) <= found.place and not seen[rank].post.ended
        ]
        is_settled = bool(accused) and 2 * (len(fit) - len({*accused, *coming})) > len(fit)
        if not coming or is_settled:
            return False
        do_move = all(seen[rank].still_s.get(key[0], 0.0) < MOVED_S for rank in coming)
        return self._is_again(key, JOIN_S, COMING_S if do_move else 0.0)

    def _is_again(self, key: Key, seconds: float, more_s: float = 0.0) -> bool:
        """Have a difference looked at again in a moment, for so many seconds from the first time on."""
        end_s, _ = self._later.setdefault(key, (self.watched_s + seconds, 0.0))
        self._later[key] = end_s, self.watched_s + AGAIN_S
        return self.watched_s < end_s + more_s

    def _dropped(self, rank: int, key: Key) -> dict[str, int]:
        """Kinds of the chain that a rank has given up."""
        lane = next((lane for lane in self._members.seen[rank].post.lanes if lane.name == key[0]), None)
        dropped = lane.dropped if lane is not None else {}
        kinds = self._kinds()
        return {
            name: count
            for name, count in dropped.items()
            if (kind := kinds.get(name)) is None or frozenset(kind.agree) == frozenset(key[1])
        }

    def _conclude(self) -> tuple[Verdict, tuple[str, ...]]:
        """The earliest of what was found; the others are told with it."""
        found = sorted(self._found, key=lambda one: one[0])
        order, verdict, lines = found[0]
        others = tuple(other.finding for own, other, _ in found[1:] if own[0] == order[0])
        self._found = []
        return Verdict(verdict.finding, verdict.coverage, (*verdict.findings, *others), verdict.next), lines

    # Standing behind, and the end.

    def follow_behind(self, dt_s: float) -> None:
        """For how long each rank has stood at one head that is not its peers' greatest."""
        for key, known in self._chains.items():
            if key in self._given_up:
                self._behind_s.pop(key, None)
                continue
            ranks = [rank for rank in self._fit(key) if not self._members.seen[rank].post.ended]
            most = max((known.heads[rank] for rank in ranks), default=0)
            times = self._behind_s.setdefault(key, {})
            for rank in known.ranks:
                head = known.heads[rank]
                at, seconds = times.get(rank, (head, 0.0))
                # Of one that says nothing nobody knows that it stands still.
                is_heard = self._members.seen[rank].age_s < HEARD_PART * self._members.silence_s
                if rank not in ranks or head >= most or at != head or not is_heard:
                    times[rank] = head, 0.0
                else:
                    times[rank] = head, seconds + dt_s

    def behind(self) -> dict[tuple[str, ...], dict[int, float]]:
        """Axes -> rank -> for how long its main lane has stood behind another's without moving."""
        found: dict[tuple[str, ...], dict[int, float]] = {}
        for (lane, axes, _), times in self._behind_s.items():
            if lane == self._main:
                found.setdefault(axes, {}).update((rank, seconds) for rank, (_, seconds) in times.items())
        return found

    @property
    def is_over(self) -> bool:
        """Whether nothing is open that the members, who have all ended, could still say."""
        if self.asked is not None or self._hunting is not None or self._found:
            return False
        for key, known in self._chains.items():
            ranks = self._fit(key)
            if key in self._given_up or len(ranks) < 2:
                continue
            heads = {known.heads[rank] for rank in ranks}
            if known.equal < min(heads) or (len(heads) > 1 and self._lacks_end_soon(ranks)):
                return False
        return True

    def _lacks_end_soon(self, ranks: Sequence[int]) -> bool:
        return any(
            self._members.seen[rank].post.ended == "completed"
            and self._members.seen[rank].ended_s < 2 * ENDED_S
            for rank in ranks
        )


def _fixed(coordinates: Mapping[str, int], axes: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """The coordinates that ranks which agree along `axes` have in common."""
    return tuple(sorted((axis, at) for axis, at in coordinates.items() if axis not in axes))
