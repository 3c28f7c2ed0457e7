"""Reading large logs from their checkpoints: what need not be read, so that the verdict is the same.

What stands before a checkpoint at which all ranks are equal is not compared again (`digests`); of what led to
a difference only some is looked at (`context.past`); how a lane ended is read from its last checkpoints on.

    rank 0   ======= c ======= c ==== ... c ----x------ c ----- ... ----- c -------- c ---- trailer
    rank 1   ======= c ======= c ==== ... c ----y------ c ----- ... ----- c -------- c ---- trailer
                               |            difference                   |
                            the past       | compared                    the ending

Owns the rule of when that may be: a run is read in full where it could tell something else, since kinds or
steps were left out of its logs, or its ranks declare kinds differently. Behind the first record that must be
seen, such as one that counts idle steps, a lane is read to its end.
"""

from __future__ import annotations

from itertools import pairwise

from consensus_checker.history import History, Scope
from consensus_checker.stall import Stall, find_stall
from consensus_checker.steps import EVERY_STEP
from consensus_checker.verdict import Reading
from tracer.blocks import all_blocks_are_sound
from tracer.checkpoints import Checkpoints
from tracer.log import LaneLog
from tracer.record import IDLE_STEPS, MAIN_LANE

# Logs smaller than this in all are read in full.
BYTES_MIN = 64 << 20
# Of each lane at least so much of its end is read, and so many checkpoints more where that says too little.
TAIL_BYTES = 1 << 14
FURTHER = 8
# The version of a log since which checkpoints count records.
COUNTED_SINCE = [1, 2]


def arm(history: History, *, bytes_min: int = BYTES_MIN, is_verified: bool = False) -> Reading:
    """Have the lanes of a large run read from their checkpoints on, if its verdict is the same then.

    Args:
        is_verified: read every block before, and all lines of a run in which one is spoilt.
    """
    logs = [(lane, lane.source) for lane in history.lanes if isinstance(lane.source, LaneLog)]
    if sum(log.file_bytes for _, log in logs) < bytes_min or not _is_comparable(history):
        return "lines"
    if is_verified and not all_blocks_are_sound(path for _, log in logs for path in log.files):
        return "lines"
    armed = []
    is_written_out = False
    for lane, log in logs:
        checkpoints = Checkpoints(log)
        checkpoints.end = max(0, checkpoints.bytes - TAIL_BYTES)
        tail = checkpoints.before(checkpoints.end)
        if tail is not None and tail.notes:
            if log.last_dropped_seq and set(tail.notes) <= {IDLE_STEPS.name}:
                # What a ring has kept is looked at between idle steps, which are all written out.
                tail = checkpoints.settled(tail)
                is_written_out = True
            else:
                # Behind the first of what must be seen every line is read.
                tail = checkpoints.last_of(lambda place: not place.notes)
        if tail is not None:
            checkpoints.end = tail.at + 1
            lane.skip(checkpoints, tail)
            armed.append(lane)
    mains = [lane for lane in history.lanes if lane.name == MAIN_LANE] if is_written_out else []
    # Steps can only be written out where every rank's are.
    is_whole = all(lane in armed for lane in mains)
    if armed and is_whole and _is_plain(history):
        for lane in mains:
            lane.plan = EVERY_STEP
        return "checksums" if is_verified else "checkpoints"
    for lane in armed:
        lane.skip(None, None)
    return "lines"


def _is_comparable(history: History) -> bool:
    """Whether digests are over what is compared: one rule for all ranks, and every decision in some scope.

    Where a ring has dropped records its header must say how many: checkpoints count from the first one on.
    """
    first = {lane.name: lane for lane in reversed(history.lanes)}
    for lane in history.lanes:
        other = first[lane.name]
        if lane.source.kinds != other.source.kinds or lane.header.get("chain") != other.header.get("chain"):
            return False
        if lane.source.counts_before is None or lane.header.get("version", []) < COUNTED_SINCE:
            return False
    compared = {name for scope in history.scopes for name in scope.fields}
    decisions = {kind.name for kind in history.kinds.values() if kind.role == "decision"}
    return decisions <= compared and all(_is_ordered(history, scope) for scope in history.scopes)


def _is_ordered(history: History, scope: Scope) -> bool:
    """Whether each chain of a scope knows its place among the others: they agree along more and more axes."""
    chains = sorted({frozenset(history.kinds[name].agree) for name in scope.fields}, key=len)
    return all(one < two for one, two in pairwise(chains))


def _is_plain(history: History) -> bool:
    """Whether no lane lacks anything of what it was to hold: neither a kind, nor steps that were left out."""
    return not history.dropped and not history.throttled


def ending(history: History) -> Stall:
    """Where the ranks stand at the end, from so much of each lane as says so.

    A lane in whose part nothing is heard of a group that somebody waits in is read from further back.
    """
    parts = {(lane.rank, lane.name): lane.ending for lane in history.lanes}
    while True:
        stall = find_stall(history.with_lanes(parts.values()))
        further = {
            place: lane
            for place in _unheard(stall)
            if (lane := parts.get(place)) is not None and lane.is_part
        }
        if not further:
            return stall
        parts |= {place: lane.from_further_back(FURTHER) for place, lane in further.items()}


def _unheard(stall: Stall) -> set[tuple[int, str]]:
    """Lanes of whose place in a group too little is known to say how it was before somebody's wait there."""
    heard = {
        (one.lane.rank, one.lane.name, group)
        for one in stall.standings
        for group in (*one.left, *(group for group, _way, _peer in one.messages))
    }
    return {
        (rank, wait.lane)
        for wait in stall.waits
        for rank in wait.members
        if wait.group_seq and (rank, wait.lane, wait.group) not in heard
    }
