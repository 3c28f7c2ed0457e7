"""The one rank of a replica that reads all posts and says what is wrong.

Owns what has been said already, and when it is over. It is asked once a tick what is to be published, and
touches the store only through the mailbox that it is given.

    members: posts, ages -+- search: chains that differ --------- verdict, and the last one
                          +- silence: who is in a call, or still - verdict, and a line when it is over
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from consensus_checker.live_members import Doubts, Members, Seen
from consensus_checker.live_own import fate_of, host_of_this, kinds_of
from consensus_checker.live_posts import Inside, Post, Published
from consensus_checker.live_search import Asked, Search
from consensus_checker.live_silence import Alarm, Member, View, judge
from consensus_checker.live_stand import inside
from consensus_checker.live_store import Mailbox
from consensus_checker.verdict import Coverage, Verdict
from consensus_checker.words import ranks_text
from tracer.record import Kind

# A member that was never heard is looked for after that: models take long to load.
START_S = 30.0
# Kinds are declared seldom after the start.
KINDS_S = 1.0


class Finder:
    """Compares the members of one replica.

    Args:
        header: of this rank's lanes; the others' differ in rank and coordinates.
        declarations: of kinds, those too that came later than the header.
        number: of the last verdict published by another finder before; `ask`: of its last question.
        is_first: nobody has compared before, so that a post may be of a run that is long over: it counts
            when another one follows.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        members: Sequence[int],
        header: Mapping[str, Any],
        *,
        main: str,
        silence_s: float,
        folder: Path | None,
        contract: str,
        declarations: Callable[[], Mapping[str, Any]] | None = None,
        number: int = 0,
        ask: int = 0,
        is_first: bool = True,
    ) -> None:
        self.number = number
        self.is_final = False
        self.is_closed = False
        self._declarations = declarations or (lambda: header.get("kinds", {}))
        self._kinds: Mapping[str, Kind] = kinds_of(header.get("kinds", {}))
        # When kinds were looked for last that the header did not have.
        self._looked_s = -KINDS_S
        self._main = main
        self._silence_s = silence_s
        self._folder = folder
        self._host = host_of_this()
        self._watched_s = 0.0
        self._doubts = Doubts()
        self._members = Members(
            mailbox, members, self._doubts, contract=contract, silence_s=silence_s, is_first=is_first
        )
        self._search = Search(
            mailbox,
            self._members,
            self._doubts,
            header,
            main=main,
            folder=folder,
            kinds=lambda: self._kinds,
            coverage=self.coverage,
            ask=ask,
        )
        self._told: dict[str, Alarm] = {}
        # Of ranks whose posts have stopped, completed from their logs.
        self._last_posts: dict[tuple[int, int], Post] = {}

    @property
    def asked(self) -> Asked | None:
        return self._search.asked

    @property
    def ask(self) -> int:
        """Number of the last question."""
        return self._search.ask

    @property
    def is_urgent(self) -> bool:
        return self._search.is_urgent

    @property
    def compared(self) -> int:
        return self._search.compared

    def assume(self, rank: int, post: Post, age_s: float) -> None:
        """What a deputy has watched of its predecessor, before it took over."""
        self._members.seen[rank] = Seen(post, age_s)

    def tick(self, dt_s: float) -> list[Published]:
        """Read what is new, go on with the search, and say what is to be published."""
        self._watched_s += dt_s
        self._search.watched_s = self._watched_s
        # Answers first: the posts that are read behind them are at least as new.
        self._search.hear(dt_s)
        for post in self._members.read(dt_s):
            self._search.know(post)
        self._search.have_all_heads()
        published = [] if self.is_final else self._look(dt_s)
        published += [self._publish(text) for text in self._doubts.untold()]
        self.is_closed = self._members.have_ended and (self.is_final or self._search.is_over)
        return published

    def _look(self, dt_s: float) -> list[Published]:
        found = self._search.compare()
        if found is not None:
            verdict, lines = found
            self.is_final = True
            may_abort = verdict.kind == "divergence"
            return [self._publish("\n".join(lines), verdict, may_abort=may_abort, is_final=True)]
        return [] if self._search.is_hunting else self._silence(dt_s)

    # Silence.

    def _silence(self, dt_s: float) -> list[Published]:
        view = self._view(dt_s)
        published = []
        alarms = {alarm.key: alarm for alarm in judge(view)}
        for key, alarm in alarms.items():
            if key in self._told or self._is_told(alarm):
                continue
            from consensus_checker import live_verdict

            screen = live_verdict.plain(alarm.finding, self.coverage(), self._folder)
            self._told[key] = alarm
            published.append(
                self._publish("\n".join(screen.lines), screen.verdict, may_abort=alarm.may_abort)
            )
        published += self._ended_alarms(alarms, view)
        return published

    def _is_told(self, alarm: Alarm) -> bool:
        """Whether an alarm that still holds speaks of the same ranks."""
        return any(
            told.finding.kind == alarm.finding.kind and set(alarm.culprits) <= set(told.culprits)
            for told in self._told.values()
        )

    def _ended_alarms(self, alarms: Mapping[str, Alarm], view: View) -> list[Published]:
        """One line for each alarm that holds no more because its ranks have gone on."""
        published = []
        held = {rank for alarm in alarms.values() for rank in alarm.culprits}
        for key, alarm in list(self._told.items()):
            if set(alarm.culprits) & held or alarms.get(key) is not None:
                continue
            moved = [
                rank
                for rank in alarm.culprits
                if rank in view.members and view.members[rank].still_s.get(self._main, 0) < self._silence_s
            ]
            if set(moved) != set(alarm.culprits):
                continue
            del self._told[key]
            verb = "goes" if len(moved) == 1 else "go"
            published.append(
                self._publish(f"it is over: {ranks_text(moved)} {verb} on ({alarm.finding.kind})")
            )
        return published

    def _view(self, dt_s: float) -> View:
        members = {}
        for rank, seen in sorted(self._members.seen.items()):
            fate = ""
            post = seen.post
            if seen.age_s >= self._silence_s and not post.ended:
                fate = fate_of(post.pid) if post.host and post.host == self._host else ""
                post = self._with_last(post)
            members[rank] = Member(rank, post, seen.age_s, dict(seen.still_s), fate)
        is_late = self._watched_s >= max(START_S, self._silence_s)
        unheard = self._members.missing if is_late else ()
        self._have_kinds(members)
        self._search.follow_behind(dt_s)
        behind = self._search.behind()
        return View(members, self._kinds, self._main, self._silence_s, behind, unheard)

    def _have_kinds(self, members: Mapping[int, Member]) -> None:
        """Look again for declarations, where a lane is in a call of a kind that nobody has declared."""
        called = {
            str(call.get("kind"))
            for member in members.values()
            for lane in member.post.lanes
            if lane.inside is not None
            for call in lane.inside.calls
        }
        if called <= set(self._kinds) or self._watched_s - self._looked_s < KINDS_S:
            return
        self._looked_s = self._watched_s
        self._kinds = kinds_of(self._declarations())

    def _with_last(self, post: Post) -> Post:
        """The post of a rank that can't say any more where it is, with what its own log says."""
        if self._folder is None:
            return post
        if (post.rank, post.beat) in self._last_posts:
            return self._last_posts[post.rank, post.beat]
        lanes = []
        for lane in post.lanes:
            found: Inside | None = lane.inside
            if lane.name == self._main:
                found = inside(self._folder, post.rank, lane.name, {}) or found
            lanes.append(msgspec.structs.replace(lane, inside=found))
        found_post = msgspec.structs.replace(post, lanes=lanes)
        if len(self._last_posts) > len(self._members.ranks):
            self._last_posts.clear()
        self._last_posts[post.rank, post.beat] = found_post
        return found_post

    # What comes of it.

    def coverage(self) -> Coverage:
        members = self._members
        return Coverage(
            ranks_expected=len(members.ranks),
            ranks_seen=len(members.seen),
            missing=members.missing,
            truncated=(),
            compared_calls=self.compared,
            decisions_compared_fraction=None,
            other_runs=(),
            doubts=tuple(self._doubts.texts),
        )

    def _publish(
        self,
        text: str,
        verdict: Verdict | None = None,
        *,
        may_abort: bool = False,
        is_final: bool = False,
    ) -> Published:
        self.number += 1
        data = msgspec.json.encode(verdict) if verdict is not None else b""
        return Published(self.number, -1, text, data, is_final, may_abort, time.time_ns())
