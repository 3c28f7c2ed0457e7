"""A rank that went by another count than the least of what all counted: evidence in a tie.

A kind declares which local fact feeds which agreed field. Where every rank's log has its own fact, and
such fields were always the least of these before, what they had to be this time follows by arithmetic.
That it was the least, and not the greatest or each rank's own, only a round shows in which the ranks
counted differently: where there was none, nobody is named.

    0  writes_done 3   went by 2
    1  writes_done 2   went by 1  <<   the least of 3 and 2 is 2

Limits of the idea: it believes what each rank wrote of its own count, and says by what a rank went, not
whether it was told so or made it up. That is why the confidence is no more than medium.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from consensus_checker.context import Stand
from consensus_checker.finding import Trigger
from consensus_checker.words import ranks_text
from tracer.record import Kind, Record

# How the basis of such a verdict begins.
BASIS = "not the least count"
DEED = "went by another count than the least of what the ranks counted"
# So many rounds of each rank must have been so before.
PRECEDENTS_MIN = 8


@dataclass(frozen=True, slots=True)
class Misapplied:
    """Ranks that went by another count, and those that went by the least; both in rank order.

    Attributes:
        fact: what each rank counted; `counted` has it.
        applied: rank -> by how many it went.
    """

    odd: tuple[int, ...]
    others: tuple[int, ...]
    kind: str
    step: int
    fact: str
    counted: Mapping[int, int]
    applied: Mapping[int, int]

    basis = BASIS

    @property
    def deed(self) -> str:
        return DEED

    @property
    def text(self) -> str:
        went = ", ".join(str(self.applied[rank]) for rank in self.odd)
        return (
            f"{ranks_text(self.odd)} went by {went}, the least {self.fact} was {min(self.counted.values())}"
        )

    @property
    def trigger(self) -> Trigger:
        return Trigger(
            rank=self.odd[0],
            step=self.step,
            fact=self.fact,
            values=dict(self.counted),
            summary=self.text,
            call=self.kind,
            since_step=self.step,
        )


def find_misapplied(kinds: Mapping[str, Kind], stands: Mapping[int, Stand]) -> Misapplied | None:
    """Who of the ranks that differ went by another count; None where that does not tell them apart.

    Args:
        stands: every rank of the scope at the place where they part.
    """
    records = {rank: stands[rank].record for rank in sorted(stands)}
    found = {rank: record for rank, record in records.items() if record is not None}
    if not found or len(found) < len(records):
        return None
    if len({(one["kind"], one.get("phase")) for one in found.values()}) != 1:
        return None
    kind = kinds.get(next(iter(found.values()))["kind"])
    if kind is None or not kind.feeds:
        return None
    differing = [
        name for name in kind.compared if len({repr(record.get(name)) for record in found.values()}) > 1
    ]
    fed = {agreed: fact for fact, agreed in kind.feeds.items()}
    if not differing or not set(differing) <= set(fed):
        return None
    rounds = {rank: list(_rounds(stands[rank], kind)) for rank in found}
    if not _least_was_seen(kind, rounds):
        return None
    each = [own for name in differing if (own := _told_apart(kind, fed[name], name, rounds)) is not None]
    # Whom one field clears another may not accuse.
    if not each or not each[0].others or len({own.odd for own in each}) > 1:
        return None
    return each[0]


def _least_was_seen(kind: Kind, rounds: Mapping[int, Sequence[Record]]) -> bool:
    """Whether in a round before the ranks counted differently, and all went by the least: in any field.

    The fields of one kind are agreed on in one go, so that a field that never differed goes like the others.
    """
    for each in zip(*(own[:-1] for own in rounds.values()), strict=False):
        for fact, agreed in kind.feeds.items():
            pairs = [(one.get(fact), one.get(agreed)) for one in each]
            if _is_least(pairs) and len({counted for counted, _ in pairs}) > 1:
                return True
    return False


def _told_apart(
    kind: Kind, fact: str, agreed: str, rounds: Mapping[int, Sequence[Record]]
) -> Misapplied | None:
    """The ranks by one field, if it was the least of what all counted in every round before.

    `odd` has at least one of them, `others` may have none.
    """
    both = {rank: [(one.get(fact), one.get(agreed)) for one in own] for rank, own in rounds.items()}
    if len({len(own) for own in both.values()}) != 1:
        return None
    *before, last = zip(*both.values(), strict=True)
    if len(before) < PRECEDENTS_MIN or not all(_is_least(each) for each in before):
        return None
    if not all(type(value) is int for pair in last for value in pair):
        return None
    counted = {rank: pair[0] for rank, pair in zip(both, last, strict=True)}
    applied = {rank: pair[1] for rank, pair in zip(both, last, strict=True)}
    least = min(counted.values())
    odd = tuple(rank for rank, value in applied.items() if value != least)
    others = tuple(rank for rank, value in applied.items() if value == least)
    if not odd:
        return None
    step = int(rounds[odd[0]][-1]["step"])
    return Misapplied(odd, others, kind.name, step, fact, counted, applied)


def _is_least(pairs: Sequence[tuple[Any, Any]]) -> bool:
    if not all(type(value) is int for pair in pairs for value in pair):
        return False
    least = min(counted for counted, _ in pairs)
    return all(applied == least for _, applied in pairs)


def _rounds(stand: Stand, kind: Kind) -> Iterator[Record]:
    """Of one rank every round up to the place, its own counts and what was agreed on as one record."""
    assert stand.record is not None
    phase, last = stand.record.get("phase"), stand.record["seq"]
    asked: dict[str, Any] = {}
    for record in stand.lane.records():
        if record["seq"] > last:
            break
        if record["kind"] != kind.name:
            continue
        if record.get("phase") == phase:
            yield {**asked, **record}
            asked = {}
        else:
            # What a rank counted may stand in the record before it asked the others.
            asked = {name: record[name] for name in kind.feeds if name in record}
