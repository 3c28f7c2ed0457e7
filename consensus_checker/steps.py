"""Steps that a log does not hold in full: idle ones, of which one record counts many, and those left out.

Owns what must be done so that ranks can be compared record by record all the same. Steps that were idle on
all ranks are alike and stay counted; where only some were idle, theirs are written out again, from the step
that they are like. Steps that some rank left out, because recording took too much time, are compared on none.

    0   10  idle 11..20         21        0   10  idle 11..14  15*  idle 16..20  21
    1   10  idle 11..14  15  16 ...   ->  1   10  idle 11..14  15   16 ...           * written out
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from tracer.record import IDLE_STEPS, OWN_KINDS, THROTTLE, Kind, Record
from tracer.throttle import ONE_IN_MAX, is_written

# First and last step.
Interval = tuple[int, int]
OWN = frozenset(kind.name for kind in OWN_KINDS)
# More records of idle steps than anybody will wait for to be written out again.
WRITTEN_OUT_MAX = 1 << 20
# What no lane can have written: whoever reads on stops at it.
TORN: Record = {}
LATEST = 1 << 62


@dataclass
class Gaps:
    """What of one lane's steps is not there in full, in the order of the log.

    Attributes:
        idle: runs of idle steps that were counted.
        throttled: step -> from the next one on, of so many windows of steps one is written.
    """

    idle: list[Interval] = field(default_factory=list)
    throttled: list[tuple[int, int]] = field(default_factory=list)

    def note(self, record: Record) -> None:
        """Take a record of the recorder's own into account."""
        if record["kind"] == IDLE_STEPS.name and (count := _idle_count(record)):
            self.idle.append((record["step"] - count + 1, record["step"]))
        elif record["kind"] == THROTTLE.name:
            one_in = record.get("one_in")
            if type(one_in) is int and 1 <= one_in <= ONE_IN_MAX:
                self.throttled.append((record["step"], one_in))

    @property
    def is_empty(self) -> bool:
        return not self.idle and not self.throttled


def _idle_count(record: Record) -> int | None:
    """How many steps it stands for; 0 where its writer died over it, None when it can't be believed."""
    first, count = record.get("first_step"), record.get("count")
    if type(first) is not int or type(count) is not int:
        return None
    is_sound = count == 0 or (count > 0 and first + count - 1 == record["step"])
    return count if is_sound else None


@dataclass(frozen=True)
class Plan:
    """How the steps of all lanes are read so that they can be held against each other.

    Attributes:
        idle: runs of steps that were idle on every lane.
        throttled: each lane's, where it has any.
    """

    idle: tuple[Interval, ...]
    throttled: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(cls, lanes: Sequence[tuple[Gaps, int | None]]) -> Plan:
        """For lanes, each with its last step where it was cut: what came behind that is not known."""
        common: list[Interval] = [(0, LATEST)]
        for gaps, cut_step in lanes:
            runs = gaps.idle + ([(cut_step + 1, LATEST)] if cut_step is not None else [])
            common = list(_intersected(common, _merged(runs)))
        throttled = tuple(tuple(gaps.throttled) for gaps, _ in lanes if gaps.throttled)
        return cls(tuple(common), throttled)

    def is_read(self, step: int) -> bool:
        """Whether no lane has left this step out."""
        for changes in self.throttled:
            at = bisect_right(changes, (step - 1, LATEST)) - 1
            if at >= 0 and not is_written(step, changes[at][1]):
                return False
        return True

    def written_out(self, first: int, last: int) -> Iterator[Interval]:
        """Runs of steps from `first` to `last` that are idle on some lanes only."""
        at = max(0, bisect_right(self.idle, (first, LATEST)) - 1)
        while first <= last:
            idle_first, idle_last = self.idle[at] if at < len(self.idle) else (last + 1, last + 1)
            if first < idle_first:
                yield first, min(idle_first - 1, last)
            first = max(first, idle_last + 1)
            at += 1


def _intersected(one: Sequence[Interval], two: Sequence[Interval]) -> Iterator[Interval]:
    at = 0
    for first, last in one:
        while at < len(two) and two[at][1] < first:
            at += 1
        here = at
        while here < len(two) and two[here][0] <= last:
            yield max(first, two[here][0]), min(last, two[here][1])
            here += 1
        at = max(at, here - 1)


def _merged(runs: Iterable[Interval]) -> list[Interval]:
    """In order and apart, whatever a log says."""
    found: list[Interval] = []
    for first, last in sorted(runs):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


# Where no idle step of any lane is known to be so on all: every one is written out.
EVERY_STEP = Plan((), ())


def in_full(
    records: Iterable[Record], plan: Plan, kinds: Mapping[str, Kind], *, is_from_inside: bool = False
) -> Iterator[Record]:
    """The records of one lane as `plan` has them read. Those that are written out have their counter's `seq`.

    It is torn where an idle record can't be believed, or stands for too much.

    Args:
        is_from_inside: the first records are those of a step that is not there from its beginning; idle steps
            that come before any other can't be written out then, and are left out.
    """
    current: list[Record] = []
    step = reached = -1
    left = WRITTEN_OUT_MAX
    is_read = True
    for record in records:
        if record["step"] != step and record["kind"] not in OWN:
            step = reached = record["step"]
            current = []
            is_read = plan.is_read(step)
        if record["kind"] == IDLE_STEPS.name:
            count = _idle_count(record)
            if count == 0 or (is_from_inside and step < 0):
                continue
            first = record["step"] - (count or 0) + 1
            if count is None or first <= reached or not _fits(record, current, kinds):
                yield TORN
                return
            reached = record["step"]
            runs = list(plan.written_out(first, reached))
            left -= sum(last - first + 1 for first, last in runs) * max(1, len(current))
            if left < 0:
                yield TORN
                return
            for idle_step in chain.from_iterable(range(first, last + 1) for first, last in runs):
                if plan.is_read(idle_step):
                    yield from _written_out(current, record, idle_step, kinds)
        elif record["kind"] not in OWN:
            current.append(record)
        if is_read:
            yield record


def _fits(idle: Record, current: Sequence[Record], kinds: Mapping[str, Kind]) -> bool:
    """Whether the step before is the one that `idle` counts: as many records, and as many counters."""
    advance = idle.get("advance")
    return (
        idle.get("records") == len(current)
        and isinstance(advance, list)
        and all(type(value) is int for value in advance)
        and len(advance) == sum(len(_counters(record, kinds)) for record in current)
    )


def _counters(record: Record, kinds: Mapping[str, Kind]) -> list[str]:
    kind = kinds.get(record["kind"])
    return [name for name in (kind.counters if kind else ()) if type(record.get(name)) is int]


def _written_out(
    current: Sequence[Record], idle: Record, step: int, kinds: Mapping[str, Kind]
) -> Iterator[Record]:
    advance = iter(idle["advance"])
    for record in current:
        copy: dict[str, Any] = {**record, "seq": idle["seq"], "step": step}
        for name in _counters(record, kinds):
            copy[name] = record[name] + next(advance) * (step - record["step"])
        yield copy
