"""What followed the last common record in the history on which all ranks agree.

A vote counts ranks, and a bug is in everybody's code: most ranks may be the wrong ones. What the same
ranks did at the same place before, all of them together, is evidence of another kind.

    agreed so far   call -> meeting   call -> meeting   call -> meeting
    rank 0          call -> return      never seen before: novel
    rank 1          call -> meeting     3 precedents

Counted are shapes: kind, phase and, for a meeting, its names (purpose, op, axis), not its numbers. It
speaks only where exactly one side does what was always done. A single precedent can take an accusation
back; it takes several to make one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from consensus_checker.context import Stand
from consensus_checker.history import History, Scope, is_lockstep
from consensus_checker.rules.agreement import Vote
from consensus_checker.words import call_text
from tracer.record import Record

# Precedents it takes to name the novel side, or to say that a majority is wrong.
PRECEDENTS_MIN = 3
# Which decision comes next is much a matter of chance: without a meeting on either side it takes more.
DECISIONS_MIN = 8
# To take back the accusation of a rank that entered a meeting, as everybody had before, one is enough:
# which meetings a program enters is less a matter of chance than which decision comes next.
MEETINGS_MIN = 1

Shape = tuple[str, str | None, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Precedent:
    """One side does what had always been done after `after`, the other what never had.

    Attributes:
        follows, novel: the two sides.
        count: how often the agreed history has what `follows` does.
        usual: what that is, in words; is_meeting: whether it is a meeting.
        is_at_meeting: whether one of the two sides is at one.
    """

    follows: tuple[int, ...]
    novel: tuple[int, ...]
    count: int
    after: str
    usual: str
    is_meeting: bool
    is_at_meeting: bool = True

    @property
    def text(self) -> str:
        times = "once" if self.count == 1 else f"{self.count} times"
        return f"{self.after} was followed by {self.usual} {times} before, never by what the others did"


def find_precedent(
    history: History,
    scope: Scope,
    lane_name: str,
    index: int,
    stands: Mapping[int, Stand],
    one: Sequence[int],
    two: Sequence[int],
) -> Precedent | None:
    """Which of two sides does what was done before; None where that does not tell them apart."""
    shapes = [_common(history, stands, ranks) for ranks in (one, two)]
    lane = history.lane(one[0], lane_name)
    if shapes[0] is None or shapes[1] is None or shapes[0] == shapes[1] or lane is None or not index:
        return None
    begin = lane.begin(scope.fields) or 0
    after: Shape | None = None
    previous: Shape | None = None
    counts: dict[tuple[Shape | None, Shape], int] = {}
    position = begin
    for record in lane.records():
        if not is_lockstep(record, scope):
            continue
        if position == index:
            after = previous
            break
        position += 1
        shape = _shape(history, record)
        counts[previous, shape] = counts.get((previous, shape), 0) + 1
        previous = shape
    found = [counts.get((after, shape), 0) for shape in shapes if shape is not None]
    if after is None or (found[0] > 0) == (found[1] > 0):
        return None
    at = 0 if found[0] else 1
    usual = shapes[at]
    assert usual is not None
    roles = {history.kinds[shape[0]].role for shape in shapes if shape is not None}
    return Precedent(
        tuple((one, two)[at]),
        tuple((two, one)[at]),
        found[at],
        _words(after),
        _words(usual),
        history.kinds[usual[0]].role == "meeting",
        "meeting" in roles,
    )


def weigh(ballot: Vote, told: Precedent | None, *, is_widest: bool) -> tuple[Vote, bool]:
    """The vote in the light of a precedent, and whether the two contradict each other.

    What decision comes next is seen by every scope that the ranks are in: the vote of the widest goes
    before any precedent, and of a part of it no precedent of decisions alone speaks.
    """
    if told is None or ballot.is_led:
        return ballot, False
    if ballot.odd:
        contradicts = told.novel == ballot.majority
        enough = MEETINGS_MIN if told.is_meeting else PRECEDENTS_MIN
        if contradicts and told.count >= enough and (told.is_at_meeting or not is_widest):
            return replace(ballot, odd=(), is_sure=False), True
        return ballot, False
    enough = PRECEDENTS_MIN if told.is_at_meeting else DECISIONS_MIN
    if len(ballot.sides) == 2 and told.count >= enough and (told.is_at_meeting or is_widest):
        return replace(ballot, majority=told.follows, odd=told.novel), False
    return ballot, False


def _common(history: History, stands: Mapping[int, Stand], ranks: Sequence[int]) -> Shape | None:
    """The shape that all `ranks` have there; None when they differ or one of them had ended."""
    records = [stands[rank].record for rank in ranks]
    shapes = {_shape(history, record) for record in records if record is not None}
    return shapes.pop() if len(shapes) == 1 and all(record is not None for record in records) else None


def _shape(history: History, record: Record) -> Shape:
    kind = history.kinds[record["kind"]]
    names: list[str] = []
    if kind.role == "meeting":
        names = [value for name in kind.compared if isinstance(value := record.get(name), str) and value]
        # The purpose comes first: it is what people know a meeting by.
        names.sort(key=lambda value: value != record.get("purpose"))
    return kind.name, record.get("phase"), tuple(names)


def _words(shape: Shape) -> str:
    kind, phase, names = shape
    if names:
        return f"{phase or 'meeting'} {call_text(names[0])} ({' '.join(names[1:])})"
    return call_text(kind) + (f" ({phase})" if phase else "")
