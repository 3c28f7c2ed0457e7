"""The records of all ranks in one order of time, for exports that draw them beside each other.

For people only: no rule of the checker reads it. Inside a lane the order is always that of the log; a clock
that runs backwards stands still here. Between ranks it is that of their clocks, moved where the log itself
proves that they do not share one:

    rank 0   enter |----------------| leave           all_reduce, 40 s on rank 0's clock
    rank 1             enter |------| leave           the same call, 7 s on its own: 33 s are added

Whoever leaves a call in which every member waits for every other one must have been there when the last one
came. Where a clock says otherwise, the median difference of leaving is what it is off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice
from statistics import median_low
from typing import Any

from tracer.log import LaneLog, Run
from tracer.record import MAIN_LANE

MEETING = "meeting"
# Calls that a member may leave before another one has come.
ONE_SIDED = frozenset({"broadcast", "send", "recv"})
# Records of a rank that its clock is judged by: a start-up's worth, and some steps.
SAMPLE_RECORDS = 2000
MISSING_NAMED_MAX = 8

# How often somebody who waits is told, and what he is told: records that were read so far.
PROGRESS_RECORDS = 10_000
Progress = Callable[[int], None]
# Time in nanoseconds, the lane's position in `run.lanes`, the record.
Moment = tuple[int, int, dict[str, Any]]
# Of one call on one rank: when it was entered, and when it was left.
Stay = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Clocks:
    """How far the ranks' clocks are off.

    Attributes:
        shifts: rank -> nanoseconds to add to its times; empty where nothing says that the clocks are not one.
        errors: rank -> nanoseconds by which its shift may be wrong, against the first rank that it has met,
            directly or by way of others; of the same ranks.
    """

    shifts: Mapping[int, int] = field(default_factory=dict)
    errors: Mapping[int, int] = field(default_factory=dict)


def timeline(run: Run, shifts: Mapping[int, int]) -> Iterator[Moment]:
    """Every readable record, by time, then lane; memory for one block of each lane.

    A record whose own time is behind that of the one before it has it in `log_time_ns`.

    Args:
        shifts: rank -> nanoseconds to add, as `clock_shifts` has them.
    """
    return merge(*(_moments(lane, index, shifts.get(lane.rank, 0)) for index, lane in enumerate(run.lanes)))


def begin_ns(lane: LaneLog, shifts: Mapping[int, int]) -> int:
    """The time before which nothing of a lane is drawn: its header's."""
    time_ns: int = lane.header["time_ns"]
    return time_ns + shifts.get(lane.rank, 0)


def end_ns(lane: LaneLog, shifts: Mapping[int, int], last_ns: int) -> int:
    """Where a lane ends that has been read: its trailer, or its last record, which was at `last_ns`."""
    time_ns = (lane.trailer or {}).get("time_ns")
    return max(last_ns, time_ns + shifts.get(lane.rank, 0)) if type(time_ns) is int else last_ns


def clocks(run: Run) -> Clocks:
    """What the meetings of the ranks say of their clocks; reads the beginning of each rank's log."""
    calls: dict[tuple[str, int], dict[int, Stay]] = defaultdict(dict)
    for lane in run.lanes:
        if lane.lane == MAIN_LANE:
            for call, stay in _stays(lane):
                calls[call][lane.rank] = stay
    leads: dict[tuple[int, int], list[int]] = defaultdict(list)
    is_contradicted = False
    for stays in calls.values():
        first = min(stays)
        last_enter = max(enter for enter, _leave in stays.values())
        for rank, (_enter, leave) in stays.items():
            is_contradicted = is_contradicted or leave < last_enter
            if rank != first:
                leads[first, rank].append(stays[first][1] - leave)
    if not is_contradicted:
        return Clocks()
    return _spread({pair: (median_low(found), _error(found)) for pair, found in leads.items()}, run.ranks)


def clock_shifts(run: Run) -> dict[int, int]:
    """Rank -> nanoseconds to add to its times; empty where nothing says that the clocks are not one."""
    return dict(clocks(run).shifts)


def limits(run: Run) -> list[str]:
    """What is missing from the logs, each as a sentence: ranks, files, records.

    Lanes that nobody has read to their end are, for this.
    """
    for lane in run.lanes:
        if not lane.count and lane.torn is None and lane.trailer is None:
            lane.extents()
    found = list(run.unreadable)
    if missing := run.missing_ranks:
        named = ", ".join(map(str, missing[:MISSING_NAMED_MAX]))
        more = f" and {len(missing) - MISSING_NAMED_MAX:,} more" if len(missing) > MISSING_NAMED_MAX else ""
        found.append(f"no log of {'rank' if len(missing) == 1 else 'ranks'} {named}{more}")
    for lane in run.lanes:
        found += [note for note in (lane.begin, lane.cut, lane.loss) if note]
    return found


def _moments(lane: LaneLog, index: int, shift: int) -> Iterator[Moment]:
    last_ns = lane.header["time_ns"] + shift
    # Much of a log that was spoilt in the middle is worth more than its first half.
    for record in lane.records(is_lenient=True):
        time_ns = record["time_ns"] + shift
        if time_ns < last_ns:
            record["log_time_ns"] = record["time_ns"]
        else:
            last_ns = time_ns
        yield last_ns, index, record


def _stays(lane: LaneLog) -> Iterator[tuple[tuple[str, int], Stay]]:
    """Calls that the lane has entered and left, in which everybody waits for everybody."""
    entered: dict[tuple[str, int], int] = {}
    for record in islice(lane.records(), SAMPLE_RECORDS):
        if record["kind"] != MEETING or record.get("peer") is not None:
            continue
        op, group, group_seq = record.get("op"), record.get("group"), record.get("group_seq")
        if type(op) is not str or op in ONE_SIDED or type(group) is not str or type(group_seq) is not int:
            continue
        if record.get("phase") == "enter":
            entered[group, group_seq] = record["time_ns"]
        elif (enter := entered.pop((group, group_seq), None)) is not None:
            yield (group, group_seq), (enter, record["time_ns"])


def _error(leads: Sequence[int]) -> int:
    """How far the middle half of these lies from their median."""
    middle = median_low(leads)
    distances = sorted(abs(lead - middle) for lead in leads)
    return distances[len(distances) // 2]


def _spread(leads: Mapping[tuple[int, int], tuple[int, int]], ranks: Sequence[int]) -> Clocks:
    """From differences between neighbours to one shift a rank; ranks that never met keep their own clock."""
    neighbours: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for (first, rank), (lead, error) in sorted(leads.items()):
        neighbours[first].append((rank, lead, error))
        neighbours[rank].append((first, -lead, error))
    shifts: dict[int, int] = {}
    errors: dict[int, int] = {}
    for start in ranks:
        if start in shifts:
            continue
        shifts[start] = errors[start] = 0
        reached = [start]
        for rank in reached:
            for other, lead, error in neighbours[rank]:
                if other not in shifts:
                    shifts[other] = shifts[rank] + lead
                    errors[other] = errors[rank] + error
                    reached.append(other)
    return Clocks(shifts, errors)
