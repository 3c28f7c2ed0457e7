"""Which local fact made a rank decide otherwise.

A decision that differs was taken from something the ranks did not share. The kind's declaration
lists the local facts that were known when it was taken. A fact explains the difference when

    needs       it has a declared need, `fact >= need` is true on one side and false on the other, the
                side that lacks it has the lesser result, and no agreed record before had ranks on
                both sides of their need
    threshold   some limit lies between the odd ranks' values and all others', such that no earlier
                agreed record of the kind had values on both sides of that limit

The second is the argument of an experiment: had the decision turned on that limit, the ranks would
have parted at the earlier record already. So facts that differed alike before and led to nothing are
exonerated. A text or a bool has no limits; there the pair of values must never have met before. A null
says that the rank had no such fact, so it explains nothing.

    rank        0  1  2  3
    earlier     5  5  9  5      agreed: limits 6..9 are exonerated
    here        5  5  5  0      limits 1..5 are left: the fact explains

Limits of the idea: a fact that is not in the log can't be found; a fact that merely goes along with
the true cause looks the same; a decision that turns on two facts at once shows either or both. With
a short history little is exonerated. That is why more than one survivor, or few earlier records,
lowers the confidence and all are listed, and why no survivor is an answer too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from consensus_checker.context import Stand, agreed_rows, compared_fields
from consensus_checker.finding import Trigger
from consensus_checker.history import History, Scope
from consensus_checker.words import call_text, ranks_text, value_text
from tracer.record import Record


@dataclass(frozen=True, slots=True)
class Suspect:
    """A fact that explains the difference.

    Attributes:
        strength: 0 needs, 1 never differed before, 2 it did.
        precedents: agreed records of the kind before, each of which could have exonerated it.
        is_earlier: it is from the decision before, not from the call at which they part.
    """

    trigger: Trigger
    strength: int
    precedents: int
    is_earlier: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """One fact of one kind of record as every rank saw it where they part.

    Attributes:
        seqs: rank -> its record; the record itself is no precedent.
        need_field: declared need of the fact, where this is the record that differs; `need` its value.
        results: rank -> the field that the kind declares as its result; empty when that is equal.
    """

    kind: str
    phase: str | None
    fact: str
    values: Mapping[int, Any]
    steps: Mapping[int, int]
    seqs: Mapping[int, int]
    need_field: str | None
    need: Any
    results: Mapping[int, Any] | None
    is_earlier: bool


def suspects(
    history: History,
    scope: Scope,
    lane: str,
    index: int,
    stands: Mapping[int, Stand],
    odd: Sequence[int],
    others: Sequence[int],
    *,
    is_tie: bool,
) -> list[Suspect]:
    """Facts that explain why `odd` parted from `others` at `index`, the most telling first."""
    if not odd or not others:
        return []
    readings = _readings(history, scope, stands, (*odd, *others))
    if not readings:
        return []
    past = {(reading.kind, reading.phase, reading.fact): _Past() for reading in readings}
    apart = {reading.fact: _Apart(odd, others) for reading in readings}
    carriers = (name for name, kind in history.kinds.items() if not apart.keys().isdisjoint(kind.local))
    kinds = frozenset(carriers) & frozenset(scope.fields)
    ranks = sorted(stands)
    anchor = ranks.index(odd[0])
    for row in agreed_rows(history, scope, lane, index, kinds, ranks):
        kind, phase, seq = row[anchor]["kind"], row[anchor].get("phase"), row[anchor]["seq"]
        for fact, own_apart in apart.items():
            if fact in row[anchor]:
                own_apart.add(dict(zip(ranks, row, strict=True)), fact)
        for reading in readings:
            if (reading.kind, reading.phase) == (kind, phase) and reading.seqs[odd[0]] != seq:
                own = past[kind, phase, reading.fact]
                own.add([record.get(reading.fact) for record in row])
                if reading.need_field is not None:
                    own.add_needs(row, reading.fact, reading.need_field)
    found: dict[str, Suspect] = {}
    for reading in readings:
        own = past[reading.kind, reading.phase, reading.fact]
        strength = _strength(reading, own, odd, others)
        if strength is not None:
            trigger = _trigger(reading, strength, odd, others, is_tie, apart[reading.fact].since_step)
            # One fact read twice, in the call and inside of it, is one explanation.
            found.setdefault(reading.fact, Suspect(trigger, strength, own.count, reading.is_earlier))
    return sorted(found.values(), key=lambda suspect: suspect.strength)


def _readings(
    history: History, scope: Scope, stands: Mapping[int, Stand], ranks: Sequence[int]
) -> list[Reading]:
    """Facts of the differing record, of the call it is in, or else of the decision before it."""
    here = [stands[rank].record for rank in ranks]
    calls = [stands[rank].open_call for rank in ranks]
    decisions = [stands[rank].last_decision for rank in ranks]
    differing = _differing(scope, here)
    first = here[0] or {}
    led = frozenset(history.kinds[first["kind"]].led if first.get("kind") in history.kinds else ())
    if led and "phase" in first and not differing <= led:
        # State that differs when the leader's count is taken was decided earlier.
        return []
    readings = _facts(history, scope, ranks, here, is_here=True, differing=differing)
    readings += _facts(history, scope, ranks, calls, differing=differing)
    return readings or _facts(history, scope, ranks, decisions, is_earlier=True, differing=differing)


def _counted(history: History) -> frozenset[str]:
    """Facts of which a leader makes its count, wherever they are written: they explain nothing but that."""
    kinds = history.kinds.values()
    needed = {fact for kind in kinds for fact in kind.needs}
    return frozenset(fact for kind in kinds if kind.led for fact in kind.local) - needed


def _differing(scope: Scope, records: Sequence[Record | None]) -> frozenset[str]:
    """Compared fields in which records of one kind and phase differ; empty where they are different calls."""
    found = [record for record in records if record is not None]
    if len(found) < len(records) or len({(record["kind"], record.get("phase")) for record in found}) > 1:
        return frozenset()
    fields = [compared_fields(record, scope) for record in found]
    names = frozenset(name for own in fields for name in own)
    return frozenset(name for name in names if len({repr(own.get(name)) for own in fields}) > 1)


def _facts(
    history: History,
    scope: Scope,
    ranks: Sequence[int],
    found: Sequence[Record | None],
    *,
    is_here: bool = False,
    is_earlier: bool = False,
    differing: frozenset[str] = frozenset(),
) -> list[Reading]:
    records = [record for record in found if record is not None]
    if len(records) < len(ranks):
        return []
    kind, phase = records[0]["kind"], records[0].get("phase")
    declared = history.kinds.get(kind)
    if declared is None or any((record["kind"], record.get("phase")) != (kind, phase) for record in records):
        return []
    if phase == "call" and declared.led and not differing <= frozenset(declared.led):
        # What was ready when the call began is what the leader's count is made of, and nothing else.
        return []
    results: dict[int, Any] | None = None
    if declared.result is not None:
        results = {rank: record.get(declared.result) for rank, record in zip(ranks, records, strict=True)}
    is_needed = is_here and any(
        compared_fields(record, scope) != compared_fields(records[0], scope) for record in records
    )
    readings = []
    counted = _counted(history) if not differing <= frozenset(declared.led) else frozenset()
    for fact in declared.local:
        if differing and declared.feeds.get(fact, fact) not in (fact, *differing):
            # It goes into another field, and that one is equal.
            continue
        if fact not in counted and all(fact in record for record in records):
            need_field = declared.needs.get(fact) if is_needed else None
            # Who declines may write that it took 0: the need is what the others wrote.
            needs = [record[need_field] for record in records if need_field in record] if need_field else []
            readings.append(
                Reading(
                    kind,
                    phase,
                    fact,
                    {rank: record[fact] for rank, record in zip(ranks, records, strict=True)},
                    {rank: int(record["step"]) for rank, record in zip(ranks, records, strict=True)},
                    {rank: int(record["seq"]) for rank, record in zip(ranks, records, strict=True)},
                    need_field,
                    max(needs) if needs and all(_is_number(need) for need in needs) else None,
                    results,
                    is_earlier,
                )
            )
    return readings


class _Apart:
    """Since when one fact has told the odd ranks from all others, without a break."""

    def __init__(self, odd: Sequence[int], others: Sequence[int]) -> None:
        self._odd = odd
        self._others = others
        self.since_step: int | None = None

    def add(self, row: Mapping[int, Record], fact: str) -> None:
        """Take an agreed record into account, of whatever kind: a fact has one meaning."""
        ours = [row[rank].get(fact) for rank in self._odd]
        theirs = [row[rank].get(fact) for rank in self._others]
        if any(value is None for value in (*ours, *theirs)) or not _are_apart(ours, theirs):
            self.since_step = None
        elif self.since_step is None:
            self.since_step = int(row[self._odd[0]]["step"])


def _are_apart(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Whether a limit lies between two sides, or no value is on both."""
    if all(_is_number(value) for value in (*ours, *theirs)):
        return bool(max(ours) < min(theirs) or max(theirs) < min(ours))
    return not {repr(value) for value in ours} & {repr(value) for value in theirs}


class _Past:
    """What one fact did in agreed records: limits that ranks stood on both sides of, pairs that met."""

    def __init__(self) -> None:
        # Disjoint intervals (low, high], ascending.
        self.straddled: list[tuple[float, float]] = []
        self.pairs: set[frozenset[str]] = set()
        self.count = 0
        # Whether an agreed record had ranks that had what they needed, and ranks that had not.
        self.is_need_straddled = False

    @property
    def has_differed(self) -> bool:
        return bool(self.straddled or self.pairs)

    def add(self, values: Sequence[Any]) -> None:
        self.count += 1
        values = [value for value in values if value is not None]
        if not values or all(value == values[0] and type(value) is type(values[0]) for value in values):
            return
        if not all(_is_number(value) for value in values):
            names = sorted({repr(value) for value in values})
            self.pairs.update(frozenset((one, two)) for one in names for two in names if one < two)
            return
        low, high = min(values), max(values)
        at = bisect_left(self.straddled, low, key=lambda interval: interval[1])
        end = at
        while end < len(self.straddled) and self.straddled[end][0] <= high:
            low, high = min(low, self.straddled[end][0]), max(high, self.straddled[end][1])
            end += 1
        self.straddled[at:end] = [(low, high)]

    def add_needs(self, row: Sequence[Record], fact: str, need_field: str) -> None:
        pairs: list[tuple[Any, Any]] = [(record.get(fact), record.get(need_field)) for record in row]
        had = {bool(value >= need) for value, need in pairs if _is_number(value) and _is_number(need)}
        self.is_need_straddled = self.is_need_straddled or len(had) == 2

    def leaves(self, low: float, high: float) -> bool:
        """Whether some limit in (low, high] was never straddled."""
        return not any(one <= low and high <= two for one, two in self.straddled)


def _strength(reading: Reading, past: _Past, odd: Sequence[int], others: Sequence[int]) -> int | None:
    ours = [reading.values[rank] for rank in odd]
    theirs = [reading.values[rank] for rank in others]
    if any(value is None for value in (*ours, *theirs)):
        return None
    if all(_is_number(value) for value in (*ours, *theirs)):
        if _is_lacking(reading, odd, others) and not past.is_need_straddled:
            return 0
        if max(ours) < min(theirs):
            gap = (max(ours), min(theirs))
        elif max(theirs) < min(ours):
            gap = (max(theirs), min(ours))
        else:
            return None
        if not past.leaves(*gap):
            return None
    else:
        mine, other = {repr(value) for value in ours}, {repr(value) for value in theirs}
        if mine & other or any(frozenset((one, two)) in past.pairs for one in mine for two in other):
            return None
    return 2 if past.has_differed else 1


def _is_lacking(reading: Reading, odd: Sequence[int], others: Sequence[int]) -> bool:
    """Whether one side alone lacks what was needed, and has the lesser result for it."""
    if reading.need is None:
        return False
    ours = {reading.values[rank] >= reading.need for rank in odd}
    theirs = {reading.values[rank] >= reading.need for rank in others}
    if len(ours) != 1 or len(theirs) != 1 or ours == theirs:
        return False
    if reading.results is None:
        return True
    lacking, having = (others, odd) if True in ours else (odd, others)
    less = [reading.results[rank] for rank in lacking]
    more = [reading.results[rank] for rank in having]
    return all(_is_number(value) for value in (*less, *more)) and max(less) < min(more)


def _trigger(
    reading: Reading,
    strength: int,
    odd: Sequence[int],
    others: Sequence[int],
    is_tie: bool,
    since_step: int | None,
) -> Trigger:
    need = reading.need if strength == 0 else None
    parts = [
        f"{_values_text(reading.values, ranks)} on {ranks_text(ranks)}"
        for ranks in (tuple(odd), tuple(others))
    ]
    summary = f"{reading.fact} was {parts[0]} and {parts[1]}"
    if need is not None:
        summary += f" (needed {need})"
    if since_step is not None and since_step < reading.steps[odd[0]]:
        summary += f", apart since step {since_step}"
    if reading.is_earlier:
        summary += f", at the {call_text(reading.kind)} before, on which they agreed"
    return Trigger(
        rank=None if is_tie else odd[0],
        step=reading.steps[odd[0]],
        fact=reading.fact,
        values=dict(sorted(reading.values.items())),
        summary=summary,
        need=need,
        call=reading.kind,
        since_step=since_step if since_step is not None else reading.steps[odd[0]],
    )


def _values_text(values: Mapping[int, Any], ranks: Sequence[int]) -> str:
    found = [values[rank] for rank in ranks]
    if all(value == found[0] for value in found):
        return value_text(found[0])
    if all(_is_number(value) for value in found):
        return f"{min(found)} to {max(found)}"
    return ", ".join(sorted({value_text(value) for value in found}))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
