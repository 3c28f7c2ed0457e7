"""A run that went on and was slow when its logs end, by its own measure: steps took many times as long.

    step    ... 40   41   42 | 43    44    45            usual: what nine steps in ten before took
    rank 0      9    9    9  | 90    91    90   ms       waits in meetings for 82 of them
    rank 1      9    9    9  | 90    91    90   ms       waits for nobody: it is what the others wait for

Each rank is measured by its own clock. Whoever is slow without waiting is named where the others waited for
it; where none stands out, nobody is.
"""

from __future__ import annotations

from dataclasses import dataclass

from consensus_checker.finding import Evidence, Finding
from consensus_checker.history import History, Lane
from consensus_checker.stall import NS_PER_S
from consensus_checker.words import ranks_text
from tracer.record import IDLE_STEPS, MAIN_LANE

RULE = "slow"
# Steps at the end that must all be slow, and steps before them that say what is usual.
STEPS_SLOW = 3
STEPS_BEFORE_MIN = 16
SLOW_PARTS = 5
# What is shorter hurts nobody.
SLOW_NS_MIN = NS_PER_S // 10
# Of its own time a rank is slow if it took so many times as long as before, and so much of the step.
OWN_PARTS = 3


@dataclass(frozen=True, slots=True)
class Step:
    """One step: how long it took, how much of that inside meetings, and its first record."""

    number: int
    took_ns: int
    waited_ns: int
    seq: int

    @property
    def own_ns(self) -> int:
        return self.took_ns - self.waited_ns


def slow(history: History) -> Finding | None:
    """The finding, where all ranks' last steps are slow; None where they are not, or too few are there."""
    meetings = frozenset(kind.name for kind in history.kinds.values() if kind.role == "meeting")
    lanes = {rank: lane for rank in history.ranks if (lane := history.lane(rank, MAIN_LANE)) is not None}
    steps = {rank: steps_of(lane, meetings) for rank, lane in lanes.items()}
    if not steps or any(len(own) < STEPS_BEFORE_MIN + STEPS_SLOW for own in steps.values()):
        return None
    counts = {rank: _slow_steps(own) for rank, own in steps.items()}
    count = min(counts.values())
    if count < STEPS_SLOW:
        return None
    usual = {rank: _high([step.took_ns for step in own[:-count]]) for rank, own in steps.items()}
    took = {rank: _median([step.took_ns for step in own[-count:]]) for rank, own in steps.items()}
    odd = tuple(rank for rank, own in steps.items() if _is_own_fault(own, count))
    is_named = bool(odd) and 2 * len(odd) < len(steps)
    culprit = odd if is_named else ()
    rank = culprit[0] if culprit else min(steps)
    factor = took[rank] / max(1, usual[rank])
    seconds = took[rank] / NS_PER_S
    text = f"the last {count} steps took {seconds:.2g} s each, {factor:.0f} times as long as usual"
    who = f"; the others wait for {ranks_text(culprit)}" if culprit else "; no rank stands out"
    named = culprit or tuple(sorted(steps))
    role = "culprit" if culprit else "unknown"
    return Finding(
        "slow",
        17,
        RULE,
        text + who,
        "medium" if culprit else "low",
        (
            f"usual is what nine steps in ten took before: {usual[rank] / NS_PER_S:.2g} s",
            *(("it spends these steps outside of any meeting",) if culprit else ()),
        ),
        culprit=culprit,
        victims=tuple(sorted(set(steps) - set(culprit))) if culprit else (),
        unknown=() if culprit else named,
        evidence=tuple(
            Evidence(lanes[one].file_of(steps[one][-count].seq), steps[one][-count].seq, f"{part} {one}")
            for one in sorted(steps)
            for part in [role if one in named else "victim"]
        ),
    )


def steps_of(lane: Lane, meetings: frozenset[str]) -> list[Step]:
    """Steps of a lane that stand there in full, without the last one, which may not have ended."""
    found: list[Step] = []
    begin: tuple[int, int, int] | None = None
    entered = waited = 0
    is_idle = False
    for record in lane.ending.records():
        time, number = record.get("time_ns"), record["step"]
        if type(time) is not int:
            return []
        if record["kind"] == IDLE_STEPS.name:
            # Whatever stands around idle steps is no measure.
            begin, is_idle = None, True
            continue
        if begin is None or number != begin[0]:
            if begin is not None and not is_idle:
                found.append(Step(begin[0], time - begin[1], waited, begin[2]))
            begin, waited, is_idle = (number, time, int(record["seq"])), 0, False
        if record["kind"] in meetings:
            if record.get("phase") == "enter":
                entered = time
            elif record.get("phase") == "leave" and entered:
                waited += time - entered
                entered = 0
    return found


def _slow_steps(steps: list[Step]) -> int:
    """How many of the last steps are slow against what is usual in the first half of them all."""
    half = max(STEPS_BEFORE_MIN, len(steps) // 2)
    limit = max(SLOW_NS_MIN, SLOW_PARTS * _high([step.took_ns for step in steps[:half]]))
    count = 0
    for step in reversed(steps[half:]):
        if step.took_ns < limit:
            break
        count += 1
    return count


def _is_own_fault(steps: list[Step], count: int) -> bool:
    """Whether these steps took long outside of meetings."""
    own = _median([step.own_ns for step in steps[-count:]])
    before = _high([step.own_ns for step in steps[:-count]])
    took = _median([step.took_ns for step in steps[-count:]])
    return own >= OWN_PARTS * max(1, before) and 2 * own >= took


def _median(values: list[int]) -> int:
    return sorted(values)[len(values) // 2] if values else 0


def _high(values: list[int]) -> int:
    """What nine in ten do not exceed."""
    return sorted(values)[(9 * len(values)) // 10] if values else 0
