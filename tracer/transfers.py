"""Transfer queues of every rank, rebuilt from its log: what was in them at any step, and in which state.

    log -> transfer_lines -> transfer_readers -> transfer_queue, of one rank -> Replay, of all

A step is the only clock: it counts alike on all ranks of a replica, and the lanes beside the scheduler's
carry the step at which it was. *Done* is what this rank saw (its bytes have moved), *acked* what the group
has applied.

What a log does not say is not guessed: an ack of something whose beginning a ring has dropped is counted, an
age without its beginning is none, and where a log ends early the queue is what it was there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tracer.log import LaneLog, Run
from tracer.record import MAIN_LANE
from tracer.transfer_lines import LINES
from tracer.transfer_queue import COUNTS, QUEUES, RankQueue, Transfer
from tracer.transfer_readers import Backups, Copies, Prefetches
from tracer.uncollected import uncollected

__all__ = ["COUNTS", "QUEUES", "RankQueue", "Replay", "Transfer", "replay"]


@dataclass(frozen=True, slots=True)
class Replay:
    """One queue on all ranks, and the steps at which it moved."""

    queue: str
    ranks: tuple[RankQueue, ...]
    steps: tuple[int, ...]
    missing: tuple[int, ...]

    @property
    def counts(self) -> tuple[tuple[str, str], ...]:
        """Fields of an event round that are this queue's: counted by a rank, applied by the group."""
        return COUNTS[self.queue]

    @property
    def last_step(self) -> int:
        return max((each.last_step for each in self.ranks), default=-1)

    def parts_at(self) -> int | None:
        """First step at which ranks of one replica applied different counts; None where they never did."""
        first: int | None = None
        by_dp: dict[int, list[RankQueue]] = {}
        for each in self.ranks:
            by_dp.setdefault(each.place.get("dp", 0), []).append(each)
        for members in by_dp.values():
            applied = [{round_.step: round_.applied for round_ in each.rounds} for each in members]
            common = set(applied[0]).intersection(*applied[1:])
            for step in common:
                if first is not None and step >= first:
                    continue
                told = zip(*(row[step] for row in applied), strict=True)
                if any(len({count for count in counts if count is not None}) > 1 for counts in told):
                    first = step
        return first


def replay(run: Run, queue: str, *, ranks: Sequence[int] | None = None) -> Replay:
    """Rebuild one queue on every rank, or on some.

    Reads each log once; a lane that was cut gives what it has.
    """
    assert queue in QUEUES, queue
    wanted = set(run.ranks if ranks is None else ranks)
    with uncollected():
        found = [
            _rank_queue(rank, [lane for lane in run.lanes if lane.rank == rank], queue)
            for rank in run.ranks
            if rank in wanted
        ]
    steps = sorted(set[int]().union(*(own.moving_steps() for own in found)))
    missing = tuple(rank for rank in run.missing_ranks if ranks is None or rank in wanted)
    return Replay(queue, tuple(found), tuple(steps), missing)


def _rank_queue(rank: int, lanes: Sequence[LaneLog], queue: str) -> RankQueue:
    own = RankQueue(rank, dict(lanes[0].coordinates), queue)
    reader = {"prefetch": Prefetches, "backup": Backups}.get(queue, Copies)(own)
    limits = []
    # The scheduler's lane first: the others only add to what it has begun.
    for lane in sorted(lanes, key=lambda lane: lane.lane != MAIN_LANE):
        if lane.lane != MAIN_LANE and lane.lane not in reader.lanes:
            continue
        if lane.lane == MAIN_LANE:
            reader.is_counted = "acks" in lane.kinds
        line = reader.read(lane.decoded(LINES))
        if line is not None and lane.lane == MAIN_LANE:
            own.last_step = line.step
        if lane.lane == MAIN_LANE:
            reader.close_round()
        limits += [told for told in (lane.begin, lane.cut, lane.loss) if told]
    if own.unknown:
        what = "transfer" if own.unknown == 1 else "transfers"
        limits.append(f"rank {rank}: {own.unknown:,} {what} ended whose beginning is not in the log")
    own.limits = tuple(limits)
    own.seal()
    return own
