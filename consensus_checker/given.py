"""What a call was given: ranks part in what it did, because they were handed different things.

A record that is written at a call's end stands behind those of what the call did. Where these differ first,
no fact of theirs explains it, and the record of the call itself comes a little later. A kind declares which
of its compared fields whoever calls hands in; if exactly one of them differs there, the others being equal,
that is what the ranks were given otherwise.

    0   alloc_host 1    write_backup 16    insert content=5f5a tokens=192
    1   alloc_host 9    write_backup 144   insert content=99fb tokens=192   <<  other tokens, and as many

Limits of the idea: that a call was going on is not in the log, only that its record is the next that says
what it was given, in the same step. So all ranks must have the same kind there, about the same request, and
what may follow from an earlier decision, such as a length, must be equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from consensus_checker.context import Stand
from consensus_checker.finding import Trigger
from consensus_checker.words import call_text, ranks_text, value_text
from tracer.record import Kind, Record

# The field that says which request a call is about.
REQUEST = "rid"


def find_given(
    kinds: Mapping[str, Kind],
    stands: Mapping[int, Stand],
    odd: Sequence[int],
    others: Sequence[int],
    *,
    is_tie: bool,
) -> Trigger | None:
    """The one thing that `odd` were given otherwise than `others`, here or by the call around it; or None."""
    found = {rank: _next_given(kinds, stands[rank]) for rank in (*odd, *others)}
    records = {rank: record for rank, record in found.items() if record is not None}
    if not odd or not others or len(records) < len(found):
        return None
    first = records[odd[0]]
    name = first["kind"]
    if any((one["kind"], one.get("phase")) != (name, first.get("phase")) for one in records.values()):
        return None
    if len({one.get("step") for one in records.values()}) > 1:
        return None
    if len({repr(one.get(REQUEST)) for one in records.values()}) > 1:
        # Of another request everything is another.
        return None
    own = tuple(dict.fromkeys(kinds[name].given))
    differing = [field for field in own if len({repr(one.get(field)) for one in records.values()}) > 1]
    if len(differing) != 1 or _is_out_of_order(records, own, stands, odd, others):
        return None
    fact = differing[0]
    values = {rank: one.get(fact) for rank, one in sorted(records.items())}
    ours, theirs = ({repr(values[rank]) for rank in side} for side in (odd, others))
    if len(ours) != 1 or len(theirs) != 1 or None in values.values():
        return None
    if value_text(values[odd[0]]) == value_text(values[others[0]]):
        # They differ behind what a sentence has room for.
        return None
    # The call at which they part, or one that goes on around it.
    is_here = all(records[rank] is stands[rank].record for rank in records)
    where = "it" if is_here else f"the {call_text(name)} around it"
    sides = " and ".join(
        f"{value_text(values[side[0]])} on {ranks_text(tuple(side))}" for side in (odd, others)
    )
    return Trigger(
        rank=None if is_tie else odd[0],
        step=int(first["step"]),
        fact=fact,
        values=values,
        summary=f"{where} was given other {fact}: {sides}",
        call=name,
        since_step=int(first["step"]),
    )


def _is_out_of_order(
    records: Mapping[int, Record],
    given: Sequence[str],
    stands: Mapping[int, Stand],
    odd: Sequence[int],
    others: Sequence[int],
) -> bool:
    """Whether one side made the other's call too, sooner or later: one was left out, or they are swapped."""

    def key(record: Record) -> str:
        return repr([record["kind"], *map(record.get, given)])

    def made(rank: int) -> set[str]:
        stand = stands[rank]
        around = (*stand.before, stand.record, *stand.after)
        return {key(record) for record in around if record is not None}

    return any(
        key(records[one]) in made(two)
        for side, far in ((odd, others), (others, odd))
        for one in side
        for two in far
    )


def _next_given(kinds: Mapping[str, Kind], stand: Stand) -> Record | None:
    """Here or behind it the first record, in the same step, of a kind that says what it was given."""
    if stand.record is None:
        return None
    for record in (stand.record, *stand.after):
        if record.get("step") != stand.record.get("step"):
            return None
        own = kinds.get(record["kind"])
        if own is not None and own.given:
            return record
    return None
