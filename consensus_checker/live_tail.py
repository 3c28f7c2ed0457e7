"""Logs that are still written, watched from outside: who is where, who keeps others waiting, who parted.

Owns the view of a folder. Nothing is asked of the ranks, which need no watcher for it: their records are
followed as they become final, and the whole is put before the same `check` that finished logs are, again and
again. That takes at most a part of the time, so that the larger the logs the rarer it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from consensus_checker.check import check
from consensus_checker.history import History
from consensus_checker.live_own import kinds_of
from consensus_checker.live_posts import VERSION, ChainPost, Inside, LanePost, Post
from consensus_checker.live_silence import Alarm, Member, View, judge
from consensus_checker.live_stand import tail_of
from consensus_checker.live_verdict import plain
from consensus_checker.screen import first_screen
from consensus_checker.verdict import Coverage, Verdict
from tracer.errors import LogError
from tracer.follow import Follower, LaneTail
from tracer.heart import PERIOD_S as HEART_S
from tracer.log import find_logs
from tracer.record import HEART_LANE, IDLE_STEPS, MAIN_LANE, OWN_KINDS, Kind

# Ranks beat once a second; writers hold the newest step back until the next one begins.
SILENCE_S = 5.0
# Of the time that goes by, what checking may take; and how often at most.
CHECK_PARTS = 5
CHECK_S_MIN = 1.0
# A lane that has said nothing new for so long is looked for at the end of its file.
STILL_S = 0.5
# What a running job can be told; a log without an end says nothing as long as it is written.
RUNNING = ("divergence", "mismatch", "invariant")
# When no heart has beaten for so many times as long as a silence may be, a run is over.
GONE_PARTS = 4
# What of a run there is at least, as long as its folder is.
LOG_FILES = "rank*.jsonl*"
# What the check says of an accusation that ranks which are still coming may turn.
OPEN = "not every rank's log reaches this call"
# Name of the lane, axes, and the coordinates off these.
_Group = tuple[str, tuple[str, ...], tuple[tuple[str, int], ...]]
_OWN = frozenset(kind.name for kind in OWN_KINDS)


@dataclass(frozen=True, slots=True)
class LaneState:
    """One line of a table.

    Attributes:
        last: its last record, in a few words.
        state: `running`, `waits in …`, `in …`, `still`, `ended` or `torn`.
        behind: compared records that the rank furthest on has made beyond it.
    """

    rank: int
    lane: str
    step: int
    seq: int
    last: str
    state: str
    still_s: float
    behind: int

    @property
    def is_behind(self) -> bool:
        """Whether it stands still while others have gone on."""
        return self.behind > 0 and self.still_s >= STILL_S


@dataclass(frozen=True, slots=True)
class Told:
    """What is newly found, with its first screen."""

    verdict: Verdict
    lines: tuple[str, ...]


@dataclass(slots=True)
class _Lane:
    """One lane as it was last seen."""

    rank: int
    name: str
    step: int = 0
    seq: int = 0
    last: Mapping[str, Any] = field(default_factory=dict)
    # Axes -> records that agree along them, and how many of them the present step has.
    heads: dict[tuple[str, ...], int] = field(default_factory=dict)
    of_step: dict[tuple[str, ...], int] = field(default_factory=dict)
    still_s: float = 0.0
    end: str = ""
    inside: Inside | None = None
    is_over: bool = False
    torn: str = ""


class LogWatcher:
    """Watches the logs of one run from their folder.

    Args:
        silence_s: how long a rank may say nothing, or keep others waiting.

    Raises:
        LogError: nothing is at that path.
    """

    def __init__(self, path: Path, *, silence_s: float = SILENCE_S) -> None:
        self.verdict: Verdict | None = None
        self._path = path
        self._folder = path if path.is_dir() else path.parent
        self._follower = Follower(path)
        self._silence_s = silence_s
        self._lanes: dict[tuple[int, str], _Lane] = {}
        self._kinds: dict[str, Kind] = {}
        self._header: Mapping[str, Any] = {}
        self._coordinates: dict[int, dict[str, int]] = {}
        self._polled_s = time.monotonic()
        self._behind_s: dict[tuple[str, ...], dict[int, tuple[int, float]]] = {}
        self._told: set[str] = set()
        self._checking: Thread | None = None
        self._checked: list[Told] = []
        self._check_due_s = 0.0
        self._has_news = False
        # Nobody is left whose log could go on: all have ended or been killed.
        self._are_all_gone = False
        # What ranks that have yet to come to the place may turn, since when.
        self._held: dict[str, tuple[float, Told]] = {}

    @property
    def is_over(self) -> bool:
        """Whether all lanes have ended and what they hold has been checked."""
        return self._is_at_end and self._checking is None and not self._has_news

    @property
    def _is_at_end(self) -> bool:
        return self._follower.is_over or self._are_all_gone

    def close(self) -> None:
        self._follower.close()

    def watch(self, period_s: float = 1.0) -> Iterator[tuple[tuple[LaneState, ...], tuple[Told, ...]]]:
        """A look each period, until the run is over."""
        while True:
            found = self.poll()
            yield self.states(), found
            if self.is_over:
                return
            time.sleep(period_s)

    def poll(self) -> tuple[Told, ...]:
        """Read what is new; what is newly found.

        Raises:
            LogError: what is there is no log of ours.
        """
        if self._lanes and not any(self._folder.glob(LOG_FILES)):
            # Its ranks may go on, into files that nobody can open any more.
            raise LogError(f"{self._folder} was removed, or its logs were, while it was watched")
        now_s = time.monotonic()
        dt_s, self._polled_s = min(now_s - self._polled_s, self._silence_s / 2), now_s
        moved = set()
        for tail, records in self._follower.poll():
            lane = self._lane(tail)
            moved.add((lane.rank, lane.name))
            for record in records:
                self._take(lane, record)
        for tail in self._follower.tails:
            lane = self._lane(tail)
            lane.is_over, lane.torn = tail.is_over, tail.torn
        self._has_news = self._has_news or bool(moved)
        for key, lane in self._lanes.items():
            self._look(lane, 0.0 if key in moved else dt_s)
        self._follow_behind(dt_s)
        self._look_for_the_living()
        return (*self._check(now_s), *self._silent())

    def states(self) -> tuple[LaneState, ...]:
        """One a lane, by rank, the one that decides first; without the hearts."""
        most = {key: max(heads) for key, heads in self._heads().items()}
        return tuple(
            LaneState(
                lane.rank,
                lane.name,
                lane.step,
                lane.seq,
                _text(lane.last),
                _state(lane),
                lane.still_s,
                max((most[self._group(lane, axes)] - head for axes, head in lane.heads.items()), default=0),
            )
            for lane in sorted(
                self._lanes.values(), key=lambda one: (one.rank, one.name != MAIN_LANE, one.name)
            )
            if lane.name != HEART_LANE
        )

    # Reading.

    def _lane(self, tail: LaneTail) -> _Lane:
        key = tail.lane.rank, tail.lane.lane
        if key not in self._lanes:
            self._lanes[key] = _Lane(*key)
            header = tail.lane.header
            self._header = self._header or header
            self._coordinates[key[0]] = dict(header.get("coordinates", {}))
            self._kinds.update(kinds_of(header.get("kinds", {})))
        return self._lanes[key]

    def _take(self, lane: _Lane, record: Mapping[str, Any]) -> None:
        kind = record["kind"]
        lane.seq = record["seq"]
        if record["step"] != lane.step and kind not in _OWN:
            lane.of_step = {}
        lane.step = record["step"]
        if kind == IDLE_STEPS.name and type(count := record.get("count")) is int:
            for axes, records in lane.of_step.items():
                lane.heads[axes] = lane.heads.get(axes, 0) + records * count
        if kind in _OWN:
            return
        lane.last = record
        declared = self._kinds.get(kind)
        if declared is not None and declared.agree:
            axes = tuple(sorted(declared.agree))
            lane.heads[axes] = lane.heads.get(axes, 0) + 1
            lane.of_step[axes] = lane.of_step.get(axes, 0) + 1

    def _look(self, lane: _Lane, dt_s: float) -> None:
        """For how long it has been still, and where: what is not final yet counts as well."""
        lane.still_s = lane.still_s + dt_s if dt_s else 0.0
        if lane.is_over or lane.still_s < STILL_S:
            lane.inside = None
            return
        found = tail_of(self._folder, lane.rank, lane.name, self._header.get("groups", {}))
        if found is None:
            return
        end, lane.inside = found
        if end != lane.end:
            lane.end, lane.still_s = end, STILL_S

    # What is found.

    def _look_for_the_living(self) -> None:
        """A run that was killed has no end in its logs, and is over all the same."""
        members = self._view().members.values()
        long_s = GONE_PARTS * self._silence_s
        is_so = bool(members) and all(one.post.ended or one.age_s >= long_s for one in members)
        if is_so and not self._are_all_gone:
            self._has_news = True
        self._are_all_gone = is_so

    def _check(self, now_s: float) -> Iterator[Told]:
        """Check in the background, and hand out what that has come to."""
        if self._checking is not None and not self._checking.is_alive():
            self._checking = None
            yield from self._newly(self._checked, now_s)
            self._checked = []
        yield from self._held_for_long(now_s)
        is_due = now_s >= self._check_due_s or self._is_at_end
        if self._checking is None and self._has_news and is_due:
            self._has_news = False
            self._checking = Thread(target=self._check_all, args=(self._is_at_end,), daemon=True)
            self._checking.start()

    def _newly(self, found: list[Told], now_s: float) -> Iterator[Told]:
        for told in found:
            finding = told.verdict.finding
            first = finding.first_divergence
            place = (first.scope, first.index, finding.culprit) if first else finding.summary
            key = f"{finding.kind} {place}"
            if key in self._told:
                continue
            if OPEN in finding.basis and not self._is_at_end:
                since_s, _ = self._held.get(key, (now_s, told))
                self._held = {key: (since_s, told)}
                continue
            self._held.clear()
            yield self._tell(key, told)

    def _held_for_long(self, now_s: float) -> Iterator[Told]:
        """Whoever has not come to the place by now may never do so."""
        for key, (since_s, told) in list(self._held.items()):
            if now_s - since_s >= self._silence_s:
                del self._held[key]
                yield self._tell(key, told)

    def _tell(self, key: str, told: Told) -> Told:
        self._told.add(key)
        self.verdict = told.verdict
        return told

    def _check_all(self, is_over: bool) -> None:
        begin_s = time.monotonic()
        try:
            history = History.of(find_logs(self._path))
            verdict = check(history, path=str(self._path))
        except (LogError, OSError):
            # It may be gone, or about to begin; whoever follows it says so.
            return
        finally:
            spent_s = time.monotonic() - begin_s
            self._check_due_s = time.monotonic() + max(CHECK_S_MIN, CHECK_PARTS * spent_s)
        if verdict.kind in RUNNING or is_over:
            self._checked.append(Told(verdict, tuple(first_screen(verdict, history))))

    def _silent(self) -> Iterator[Told]:
        if self._is_at_end:
            return
        view = self._view()
        for alarm in judge(view):
            if alarm.key in self._told or self._is_told(alarm):
                continue
            self._told.add(alarm.key)
            ranks = tuple(sorted(self._coordinates))
            world_size = int(self._header.get("world_size", len(ranks)))
            coverage = Coverage(
                world_size,
                len(ranks),
                tuple(rank for rank in range(world_size) if rank not in ranks),
                (),
                sum(min(heads) for heads in self._heads().values()),
                None,
                (),
            )
            screen = plain(alarm.finding, coverage, self._folder)
            self.verdict = screen.verdict
            yield Told(screen.verdict, screen.lines)

    def _is_told(self, alarm: Alarm) -> bool:
        """One line of ranks that stand still is enough, as long as they do."""
        key = f"{alarm.finding.kind} {alarm.culprits}"
        is_known = key in self._told
        self._told.add(key)
        return is_known

    def _group(self, lane: _Lane, axes: tuple[str, ...]) -> _Group:
        """What the lane has in common with those that must agree with it along `axes`."""
        place = self._coordinates.get(lane.rank, {})
        return lane.name, axes, tuple(sorted((axis, at) for axis, at in place.items() if axis not in axes))

    def _heads(self) -> dict[_Group, list[int]]:
        found: dict[_Group, list[int]] = {}
        for lane in self._lanes.values():
            for axes, head in lane.heads.items():
                found.setdefault(self._group(lane, axes), []).append(head)
        return found

    def _view(self) -> View:
        members = {}
        for rank, coordinates in sorted(self._coordinates.items()):
            own = [lane for lane in self._lanes.values() if lane.rank == rank]
            lanes = [
                LanePost(
                    lane.name,
                    lane.step,
                    lane.seq,
                    [ChainPost(axes, head, "", []) for axes, head in lane.heads.items()],
                    lane.inside,
                )
                for lane in own
                if lane.name != HEART_LANE
            ]
            ended = "completed" if all(lane.is_over for lane in own if lane.name != HEART_LANE) else ""
            heart = next((lane for lane in own if lane.name == HEART_LANE), None)
            age_s = _silent_s(heart, own) if heart is not None and not heart.is_over else 0.0
            post = Post(VERSION, rank, "", 0, "", coordinates, "", 0, lanes, 0, ended)
            members[rank] = Member(rank, post, age_s, {lane.name: lane.still_s for lane in own})
        behind = {
            axes: {rank: seconds for rank, (_, seconds) in times.items()}
            for axes, times in self._behind_s.items()
        }
        return View(members, self._kinds, MAIN_LANE, self._silence_s, behind)

    def _follow_behind(self, dt_s: float) -> None:
        most = {key: max(heads) for key, heads in self._heads().items()}
        for lane in self._lanes.values():
            if lane.name != MAIN_LANE:
                continue
            for axes, head in lane.heads.items():
                times = self._behind_s.setdefault(axes, {})
                at, seconds = times.get(lane.rank, (head, 0.0))
                # The newest step of a lane is not final, and those of others are: it must be still as well.
                is_still = head == at and lane.still_s >= self._silence_s
                is_behind = is_still and head < most[self._group(lane, axes)]
                times[lane.rank] = head, seconds + dt_s if is_behind else 0.0


def _silent_s(heart: _Lane, lanes: Sequence[_Lane]) -> float:
    """For how long a rank has given no sign of life that it should have given: whoever writes lives too."""
    return max(0.0, min(heart.still_s - HEART_S, *(lane.still_s for lane in lanes)))


def _text(record: Mapping[str, Any]) -> str:
    about = record.get("rid") or record.get("node") or record.get("purpose") or ""
    phase = record.get("phase") or ""
    return " ".join(str(word) for word in (record.get("kind", "-"), phase, about) if word != "")


def _state(lane: _Lane) -> str:
    if lane.torn:
        return "torn"
    if lane.is_over:
        return "ended"
    own = lane.inside
    if own is None:
        return "running"
    if own.meeting is not None:
        return f"waits in {own.meeting.get('group', '?')} #{own.meeting.get('group_seq', '?')}"
    if own.calls:
        return f"in {own.calls[-1].get('kind', '?')}"
    return own.state or "still"
