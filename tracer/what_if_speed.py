"""What would be if a tier were faster or slower: the moments of a trace, put at other times in two ways.

    in order    no step begins before what it took over is there; what ran beside stays beside
    in place    each wait takes its time at the other speed, where it stands; nothing hides more or less

The first keeps every decision and makes the scheduler stand still until what it took over has come; the
second keeps every overlap. A run at the other speed decides for itself, so that both are estimates: they are
told as a range, with the number of takings that would have come in another step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tracer.critical_path import RankPath, RequestPath
from tracer.path_moments import (
    FORWARD,
    QUEUE,
    STORAGE_READ,
    STORAGE_WRITE,
    TAKEN,
    TIERS,
    Moment,
    Piece,
    copy_tier,
)
from tracer.record import MAIN_LANE

# What one word stands for, too: the tier behind the host in both directions.
TOGETHER = {"l3": (STORAGE_READ, STORAGE_WRITE), "storage": (STORAGE_READ, STORAGE_WRITE)}
Speeds = Mapping[str, float]
# A tier that is a million times faster or slower says nothing that a hundred times does not.
SPEED_MIN, SPEED_MAX = 1e-6, 1e6


@dataclass(frozen=True, slots=True)
class Estimate:
    """Nanoseconds before, and after by the two readings."""

    before: int
    in_order: int
    in_place: int

    @property
    def low(self) -> int:
        return min(self.in_order, self.in_place)

    @property
    def high(self) -> int:
        return max(self.in_order, self.in_place)


@dataclass(frozen=True, slots=True)
class WhatIfSpeed:
    """One rank's run at other speeds.

    Attributes:
        run: from the first request to the end of the last.
        requests: as in `RankPath.requests`.
        taken: takings-over that the log has with what they took.
        moved: of those, how many would have come in another step, so that decisions might have changed.
    """

    speeds: Speeds
    run: Estimate
    requests: tuple[Estimate, ...]
    taken: int
    moved: int


def what_if_speed(path: RankPath, speeds: Speeds) -> WhatIfSpeed:
    """Both readings of one rank's run, where each tier of `speeds` is so many times as fast."""
    assert set(speeds) <= set(TIERS), f"speeds of {sorted(speeds)}"
    assert all(SPEED_MIN <= speed <= SPEED_MAX for speed in speeds.values()), str(speeds)
    takes = {tier: 1 / speed for tier, speed in speeds.items()}
    order = _InOrder(path, takes)
    order.run()
    requests = tuple(_request(request, order.times, takes) for request in path.requests)
    run = Estimate(0, 0, 0)
    if path.requests:
        first = order.times[path.requests[0].begin_index]
        last = max(order.times[request.end_index] for request in path.requests)
        run = Estimate(path.ns, round(last - first), _in_place(path.pieces, takes))
    return WhatIfSpeed(dict(speeds), run, requests, order.taken, order.moved)


def _request(request: RequestPath, times: list[float], takes: Mapping[str, float]) -> Estimate:
    in_order = times[request.end_index] - times[request.begin_index]
    return Estimate(request.ns, round(in_order), _in_place(request.pieces, takes))


def _in_place(pieces: Iterable[Piece], takes: Mapping[str, float]) -> int:
    total = 0.0
    for piece in pieces:
        # Behind others' forwards one waits for forwards.
        tier = FORWARD if piece.tier == QUEUE else piece.tier
        total += (piece.end - piece.begin) * takes.get(tier, 1.0)
    return round(total)


class _InOrder:
    """Every moment's time in the first reading, from that of the first one on, in one pass."""

    def __init__(self, path: RankPath, takes: Mapping[str, float]) -> None:
        self._path = path
        self._takes = takes
        self.times: list[float] = [0.0] * len(path.moments)
        self.taken = self.moved = 0
        # Wall clocks count more nanoseconds than a float can tell apart.
        self._zero = path.moments[0].at if path.moments else 0
        # Of each pause the moment from which its end counts, as long as it lasts.
        self._pauses = {id(pause): pause for pause in path.pauses}
        self._anchors: dict[int, float] = {}
        # The latest look of the scheduler at what has come, and the one before, in both times.
        self._rounds: list[tuple[float, float]] = []

    def run(self) -> None:
        for moment in self._path.moments:
            pause = moment.pause
            if pause is not None and id(pause) in self._pauses and self._is_in(moment):
                self.times[moment.index] = self._in_pause(moment)
            else:
                self.times[moment.index] = self._outside(moment)
            if moment.line.kind == "event_round" and moment.line.phase != "return":
                self._rounds = [*self._rounds[-1:], (moment.at, self.times[moment.index])]

    def _is_in(self, moment: Moment) -> bool:
        """Behind what ended it, a step goes on as any other."""
        end = moment.pause.end if moment.pause is not None else None
        return end is not None and moment.index <= end.index

    def _in_pause(self, moment: Moment) -> float:
        """A scheduler that stands still looks again and again: only what it waits for has its time."""
        pause = moment.pause
        assert pause is not None
        begin = self.times[pause.begin.index]
        anchor = self._anchors.get(id(pause), begin)
        if moment.line.kind in TAKEN and moment.after is not None:
            ready, seen = self._ready(moment)
            time = anchor = max(anchor, max(begin, ready) + moment.at - max(seen, pause.begin.at))
        else:
            time = begin + moment.at - pause.begin.at
            if moment.line.kind == "request":
                # It came from outside, when it came.
                anchor = max(anchor, time)
        self._anchors[id(pause)] = anchor
        return time

    def _ready(self, moment: Moment) -> tuple[float, int]:
        """When what is taken over at a moment is there, at these speeds and in the trace."""
        after = moment.after
        assert after is not None
        if after.line.kind == "transfer_done" and after.after is not None:
            return self._copied(after), after.at
        return self.times[after.index], after.at

    def _copied(self, done: Moment) -> float:
        begun = done.after
        assert begun is not None
        took = (done.at - begun.at) * self._takes.get(copy_tier(done.line.queue), 1.0)
        return self.times[begun.index] + took

    def _outside(self, moment: Moment) -> float:
        before, after = moment.before, moment.after
        if before is None:
            # What a lane begins with may have been given to it.
            if after is None:
                return moment.at - self._zero
            return self.times[after.index] + moment.at - after.at
        came = self.times[before.index]
        if moment.is_start or (moment.lane != MAIN_LANE and after is not None):
            return self._begun(moment, came)
        if moment.is_copy:
            return max(came, self._copied(moment))
        time = came + (moment.at - before.at) * self._takes.get(moment.tier, 1.0)
        if moment.line.kind not in TAKEN or after is None:
            return time
        ready, _seen = self._ready(moment)
        self._count(moment, time, ready)
        return max(time, ready)

    def _begun(self, moment: Moment, came: float) -> float:
        """A lane beside the scheduler begins when it is free and has been given something."""
        before, after = moment.before, moment.after
        assert before is not None
        given, seen = (self.times[after.index], after.at) if after is not None else (came, before.at)
        if moment.is_start:
            return max(came, given) + max(0, moment.at - max(before.at, seen))
        return max(came, given) + (moment.at - max(before.at, seen)) * self._takes.get(moment.tier, 1.0)

    def _count(self, moment: Moment, time: float, ready: float) -> None:
        """Would it have been taken over in this step, and not in one before?"""
        self.taken += 1
        after = moment.after
        assert after is not None
        is_late = ready > time + 1
        is_early = False
        if len(self._rounds) > 1:
            (then, now), _latest = self._rounds
            is_early = after.at > then and ready <= now
        self.moved += is_late or is_early
