"""What each request waited for, from a trace: the chain that led to its end, and which tier the run hung on.

    scheduler   request --- submit ---------- hit taken ------------- ack taken, admit - batch ==== finish
    prefetch                   \\-- ask, agree --/ \\                     /
    io, sync                                       \\-- read -- agree --/

A scheduler does one thing after the other, so what it did is the path of the run: a forward, a wait for a
copy, for other ranks, or nothing. Where it did nothing, what came in the round that ended it is followed
back through the lanes to where it began. A request that was admitted in the very step in which its prefetch
was taken over has waited for that chain, whatever the scheduler did meanwhile; any other for the scheduler.

Only differences of one rank's own clock are used. What a log does not tell is a tier of its own, `unknown`,
or a sentence in `limits`; nothing is made up for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tracer.log import LaneLog, Run
from tracer.path_lanes import Lanes, followed
from tracer.path_moments import (
    FORWARD,
    KEPT,
    LAG,
    LANES,
    LINES,
    NEVER,
    PEERS,
    QUEUE,
    TIERS,
    Line,
    Moment,
    Pause,
    Piece,
    between,
    clipped,
    sums,
    union,
)
from tracer.path_walk import Request, Walk
from tracer.record import MAIN_LANE
from tracer.uncollected import uncollected


@dataclass(frozen=True, slots=True)
class RequestPath:
    """What one request waited for.

    Attributes:
        begin, end: nanoseconds of its first and its last moment.
        begin_index, end_index: which moments these are.
        is_gated: it was let in as soon as its prefetch had been taken over.
        pieces: from `begin` to `end`, without a gap.
    """

    rid: str
    begin: int
    end: int
    begin_index: int
    end_index: int
    is_gated: bool
    pieces: tuple[Piece, ...]

    @property
    def ns(self) -> int:
        return self.end - self.begin

    @property
    def by_tier(self) -> dict[str, int]:
        return sums(self.pieces)

    @property
    def chain(self) -> tuple[tuple[str, int], ...]:
        """The pieces as tier and nanoseconds, one after the other, neighbours that are alike as one."""
        told: list[tuple[str, int]] = []
        for piece in self.pieces:
            ns = piece.end - piece.begin
            if told and told[-1][0] == piece.tier:
                ns += told.pop()[1]
            told.append((piece.tier, ns))
        return tuple(told)

    @property
    def bound(self) -> str:
        """What most of it went into, of all there is."""
        told = self.by_tier
        return max(told, key=lambda tier: told[tier], default="")


@dataclass(slots=True, eq=False)
class RankPath:
    """The path of a run on one rank.

    Attributes:
        moments, pauses: what it was made from; many, and not needed to show it.
        place: coordinates, such as `{"dp": 0, "pp": 1, "cp": 0, "tp": 0}`.
        requests: that began and ended in the log, in the order in which they came.
        pieces: what the scheduler's time went into, from the first of them to the end of the last.
        busy: tier -> nanoseconds in which something of it was under way, seen or not.
        limits: why something is not known, each as a sentence.
    """

    rank: int
    place: Mapping[str, int]
    moments: list[Moment] = field(repr=False)
    pauses: list[Pause] = field(repr=False)
    requests: tuple[RequestPath, ...] = ()
    pieces: tuple[Piece, ...] = ()
    busy: Mapping[str, int] = field(default_factory=dict)
    limits: tuple[str, ...] = ()

    @property
    def ns(self) -> int:
        return self.pieces[-1].end - self.pieces[0].begin if self.pieces else 0

    @property
    def by_tier(self) -> dict[str, int]:
        return sums(self.pieces)

    @property
    def bound(self) -> str:
        """What most of the path went into, of what has a speed; "" where nothing of it has one."""
        told = self.by_tier
        return max((tier for tier in TIERS if told.get(tier)), key=lambda tier: told[tier], default="")

    def forget(self) -> None:
        """Keep what is shown."""
        self.moments, self.pauses = [], []


def critical_path(run: Run, rank: int) -> RankPath:
    """The path of one rank that has a log; reads it once."""
    with uncollected():
        return _rank_path(rank, [lane for lane in run.lanes if lane.rank == rank])


def leading(paths: Iterable[RankPath]) -> list[RankPath]:
    """Of each replica the rank that waited least for others: the one that they waited for."""
    by_dp: dict[int, list[RankPath]] = {}
    for path in paths:
        by_dp.setdefault(path.place.get("dp", 0), []).append(path)

    def waited(path: RankPath) -> tuple[bool, float, int]:
        return not path.requests, path.by_tier.get(PEERS, 0) / max(1, path.ns), path.rank

    return [min(members, key=waited) for _dp, members in sorted(by_dp.items())]


def _rank_path(rank: int, lanes: Sequence[LaneLog]) -> RankPath:
    place = dict(lanes[0].coordinates)
    limits: list[str] = []
    lines: list[tuple[int, int, str, Line]] = []
    kinds: set[str] = set()
    for number, lane in enumerate(sorted(lanes, key=lambda lane: lane.lane != MAIN_LANE)):
        if lane.lane != MAIN_LANE and lane.lane not in LANES:
            continue
        if lane.lane == MAIN_LANE:
            kinds |= set(lane.kinds)
        latest = -NEVER
        for line in lane.decoded(LINES):
            if line.kind in KEPT:
                # A clock that was set back must not turn a lane's order round.
                latest = max(latest, line.time_ns)
                lines.append((latest, number, lane.lane, line))
        limits += [told for told in (lane.begin, lane.cut, lane.loss) if told]
    lines.sort(key=lambda entry: entry[:2])
    moments = [Moment(index, at, lane, line) for index, (at, _n, lane, line) in enumerate(lines)]
    walk = Walk(is_admitted_late="plan" in kinds)
    for moment in moments:
        walk.see(moment)
    walk.close()
    begins = [piece.begin for piece in walk.pieces]
    requests = tuple(
        RequestPath(
            request.rid,
            request.asked.at,
            request.ended.at,
            request.asked.index,
            request.ended.index,
            request.gate is not None,
            tuple(_of_request(request, walk.lanes, walk.pieces, begins)),
        )
        for request in walk.requests
    )
    pieces: tuple[Piece, ...] = ()
    if requests:
        end = max(request.end for request in requests)
        pieces = tuple(between(walk.pieces, begins, requests[0].begin, end))
    spans = {**walk.lanes.spans, FORWARD: [(each.begin, each.end) for each in pieces if each.tier == FORWARD]}
    busy = {tier: union(each) for tier, each in spans.items() if each}
    limits += _limits(walk, kinds)
    return RankPath(rank, place, moments, walk.pauses, requests, pieces, busy, tuple(limits))


def _of_request(
    request: Request, lanes: Lanes, pieces: Sequence[Piece], begins: Sequence[int]
) -> Iterator[Piece]:
    first = request.asked.at
    if request.gate is not None:
        submit = lanes.of_prefetch("prefetch_submit", request.gate.line)
        begin = max(first, submit.at if submit is not None else first)
        yield from _as_seen(request, between(pieces, begins, first, begin))
        for piece in clipped(followed(request.gate, begin), begin, request.gate.at):
            if piece.tier != LAG:
                yield piece
            else:
                yield from _as_seen(request, between(pieces, begins, piece.begin, piece.end))
        first = request.gate.at
    yield from _as_seen(request, between(pieces, begins, first, request.ended.at))


def _as_seen(request: Request, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """A forward that a request is not in is a queue to it."""
    admitted = request.admitted.at if request.admitted is not None else request.ended.at
    for piece in pieces:
        is_own = piece.begin >= admitted and (not piece.rids or request.rid in piece.rids)
        if piece.tier == FORWARD and not is_own:
            yield Piece(piece.begin, piece.end, QUEUE)
        else:
            yield piece


def _limits(walk: Walk, kinds: set[str]) -> Iterator[str]:
    def said(count: int, what: str) -> str:
        return f"{count:,} {'request' if count == 1 else 'requests'} {what}"

    if walk.unasked:
        yield said(walk.unasked, "ended that came before the log begins")
    if unfinished := len(walk.open):
        yield said(unfinished, "had not ended where the log ends")
    if walk.requests and "transfer_done" not in kinds:
        yield "no record says when a copy was done, so waits for d2h and h2d are not seen"
    if walk.requests and not walk.has_batches:
        yield "no record says when a forward began; its time is counted as the scheduler's"
    if walk.is_blind:
        yield "no log of the lanes that read from storage, so waits for it are not seen"
    if walk.deadlines:
        yield said(walk.deadlines, "waited for storage until a deadline, which another speed may spare")
