"""What a leader decided, on its way down the stages: whose hands it left as another value than it came in.

Owns the comparison of three digests of one rank: what it was sent, what it goes by, what it has sent on.
A leader decides, so a count accuses whoever differs from it; but a leader that goes by one value and sends
another has led nobody, and neither has a stage between.

    pp0   decided 1, sent 1      decided 1, sent 2     decided 2, sent 1
    pp1   got 1, goes by 2  <<   got 2, goes by 2      got 1, goes by 1
          this one               pp0, in this chain    pp0 again
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from consensus_checker.context import Stand
from consensus_checker.finding import Trigger
from consensus_checker.history import Lane
from consensus_checker.rules.agreement import Key, Vote, sides_of
from tracer.record import Record

# The note in which a rank says by which value it goes from there on.
ADOPTED = "adopted"


@dataclass(frozen=True, slots=True)
class Break:
    """One rank in whose hands a value became another one.

    Attributes:
        text: between which two of the three digests.
        value: the digest by which it goes.
        other: that of what it was sent, or has sent on.
    """

    rank: int
    text: str
    step: int
    value: int
    other: int

    @property
    def trigger(self) -> Trigger:
        """The break as the fact that the divergence comes from."""
        return Trigger(
            rank=self.rank,
            step=self.step,
            fact="value",
            values={self.rank: [self.value, self.other]},
            summary=f"rank {self.rank} {self.text}: two digests of one value in its own log",
            call=ADOPTED,
            since_step=self.step,
        )


def find_breaks(stands: Mapping[int, Stand], axis: str, kinds: frozenset[str]) -> tuple[Break, ...]:
    """Ranks whose value changed in their own hands, in rank order, where their logs tell.

    Args:
        stands: the ranks at the place where they differ.
        axis: the leader's; values travel along it.
        kinds: names of the kinds that are meetings.
    """
    found = []
    for rank in sorted(stands):
        record = stands[rank].record
        if record is not None and (own := _broken(stands[rank].lane, record, axis, kinds)) is not None:
            found.append(own)
    return tuple(found)


def by_custody(
    difference: Mapping[int, Key],
    breaks: Sequence[Break],
    places: Mapping[int, Mapping[str, int]],
    axis: str,
) -> Vote | None:
    """The vote where a value changed in somebody's hands: the first stage where it did, whatever the count.

    None where it changed nowhere. The others are those who have what the leader decided, if it can be asked.
    """
    if not breaks:
        return None
    stage = {rank: places.get(rank, {}).get(axis, 0) for rank in difference}
    first = min(stage[one.rank] for one in breaks)
    own = [one for one in breaks if stage[one.rank] == first]
    odd = tuple(one.rank for one in own)
    groups = sides_of(difference)
    sides = [side for group in groups if (side := tuple(rank for rank in group if rank not in odd))]
    if not sides:
        return None
    side = next((side for side in sides if any(not stage[rank] for rank in side)), sides[0])
    followers = tuple(sorted(set(difference) - set(side) - set(odd)))
    return Vote(side, odd, groups, f"custody along {axis}", True, followers, (), own[0].text)


def _broken(lane: Lane, until: Record, axis: str, kinds: frozenset[str]) -> Break | None:
    """What is wrong with the last value that a lane adopted before one of its records, if anything is."""
    # Purpose -> what came, what went; only of the step that the record belongs to.
    came: dict[str, int] = {}
    went: dict[str, int] = {}
    adopted: Record | None = None
    step = until["step"]
    for record in lane.records():
        if record["seq"] >= until["seq"]:
            break
        if record["step"] != step:
            continue
        if record["kind"] == ADOPTED:
            adopted = record
        elif record["kind"] in kinds and record.get("axis") == axis and "value" in record:
            side = went if record.get("op") == "send" else came
            side[str(record.get("purpose"))] = record["value"]
    if adopted is None or type(value := adopted.get("value")) is not int:
        return None
    purpose = str(adopted.get("purpose"))
    if came.get(purpose, value) != value:
        return Break(lane.rank, "goes by another value than it was sent", step, value, came[purpose])
    if went.get(purpose, value) != value:
        return Break(lane.rank, "sent on another value than it goes by", step, value, went[purpose])
    return None
