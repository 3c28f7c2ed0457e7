"""A rank that was refused what its own log says it had room for: evidence in a tie that no count can break.

A kind declares what its decision needs: a local fact, and the field that says how much of it. Of two ranks
that asked for the same, one got it and one got nothing. Where the one that got nothing had enough of every
fact that is needed, its decision does not follow from what it wrote itself; where it lacked some, it does,
and the fact is what differs.

    0  alloc_host  wants 3, gets 3   host_pages_free 7
    1  alloc_host  wants 3, gets 0   host_pages_free 6  <<   refused with room
    1  alloc_host  wants 3, gets 0   host_pages_free 2       follows: nobody is named

Limits of the idea: a refusal may have a cause that the kind does not declare. That is why the confidence is
no more than medium, and why it speaks only where nothing else does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from consensus_checker.finding import Trigger
from consensus_checker.words import ranks_text, value_text
from tracer.record import Kind, Record

# How the basis of such a verdict begins.
BASIS = "refused with room"
DEED = "was refused what it had room for"
DEED_OF_SEVERAL = "were refused what they had room for"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Ranks that were refused with room, and those that got what all of them wanted; both in rank order.

    Attributes:
        facts: fact -> what the first of the refused had of it; `needs` how much was needed.
    """

    odd: tuple[int, ...]
    others: tuple[int, ...]
    kind: str
    step: int
    facts: Mapping[str, Any]
    needs: Mapping[str, Any]
    values: Mapping[int, Any]

    basis = BASIS

    @property
    def deed(self) -> str:
        return DEED if len(self.odd) == 1 else DEED_OF_SEVERAL

    @property
    def text(self) -> str:
        parts = [f"{fact} {value_text(self.facts[fact])}, needed {need}" for fact, need in self.needs.items()]
        return f"{ranks_text(self.odd)} had {'; '.join(parts)}"

    @property
    def trigger(self) -> Trigger:
        """The room that was there, as the fact that the divergence comes from."""
        fact = next(iter(self.needs))
        return Trigger(
            rank=self.odd[0],
            step=self.step,
            fact=fact,
            values=dict(self.values),
            summary=f"{self.text}, and got nothing",
            need=self.needs[fact],
            call=self.kind,
            since_step=self.step,
        )


def find_refusal(kinds: Mapping[str, Kind], records: Mapping[int, Record | None]) -> Refusal | None:
    """Who of the ranks that differ was refused with room; None where that does not tell them apart.

    Args:
        records: rank -> what it wrote at the place where they part.
    """
    found = {rank: record for rank, record in sorted(records.items()) if record is not None}
    if len(found) < len(records) or len({(one["kind"], one.get("phase")) for one in found.values()}) != 1:
        return None
    kind = kinds.get(next(iter(found.values()))["kind"])
    if kind is None or kind.result is None or not kind.needs or not _want_the_same(kind, found):
        return None
    results = {rank: value for rank, one in found.items() if _is_amount(value := one.get(kind.result))}
    if len(results) < len(found):
        return None
    odd = tuple(rank for rank, value in results.items() if value == 0)
    others = tuple(rank for rank, value in results.items() if value > 0)
    if not odd or not others or not all(_has_room(kind, found[rank]) for rank in odd):
        return None
    first = found[odd[0]]
    fact = next(iter(kind.needs))
    return Refusal(
        odd,
        others,
        kind.name,
        int(first["step"]),
        {name: first[name] for name in kind.needs},
        {name: first[need] for name, need in kind.needs.items()},
        {rank: record.get(fact) for rank, record in found.items()},
    )


def _want_the_same(kind: Kind, found: Mapping[int, Record]) -> bool:
    """Whether the ranks differ in nothing but the result, and need as much."""
    names = {*kind.compared, *kind.needs.values()} - {kind.result}
    return all(len({repr(record.get(name)) for record in found.values()}) == 1 for name in names)


def _has_room(kind: Kind, record: Record) -> bool:
    for fact, need_field in kind.needs.items():
        had, need = record.get(fact), record.get(need_field)
        if not (_is_amount(had) and _is_amount(need) and had >= need > 0):
            return False
    return True


def _is_amount(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float)
