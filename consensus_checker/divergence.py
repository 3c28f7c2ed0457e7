"""From a difference between ranks to a finding: who, which call, how, and because of what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cmp_to_key

from consensus_checker.context import Stand, compared_fields, key_of, look
from consensus_checker.finding import (
    Alternative,
    DivergenceKind,
    Evidence,
    FieldDiff,
    Finding,
    FirstDivergence,
    Level,
)
from consensus_checker.history import History, Scope
from consensus_checker.resembles import resembles
from consensus_checker.rules.agreement import Comparison, Key, Vote, vote
from consensus_checker.rules.alignment import classify
from consensus_checker.trigger import Suspect, suspects
from consensus_checker.words import call_text, ranks_text, value_text
from tracer.record import Record

RULE = "agreement"


@dataclass(frozen=True, slots=True)
class Divergence:
    """A finding and where it stands in each rank's log, so that the earliest can be told."""

    finding: Finding
    scope: Scope
    lane: str
    # rank -> step, seq of the record that differs
    at: Mapping[int, tuple[int, int]]

    @property
    def order(self) -> tuple[int, int]:
        return min(self.at.values())


def divergence(history: History, comparison: Comparison) -> Divergence:
    """Explain the difference of one comparison."""
    assert comparison.difference is not None
    scope, difference = comparison.scope, comparison.difference
    stands = {
        rank: stand
        for rank, stand in look(history, scope, comparison.lane, comparison.index).items()
        if rank in difference
    }
    ballot = vote(difference, scope, history.places, _leader(history, difference))
    is_tie = not ballot.odd
    # In a tie the smaller side stands on the right-hand side of the comparison, accused of nothing.
    aside = ballot.odd or tuple(rank for side in ballot.sides[1:] for rank in side)
    kind = _kind(history, scope, stands, ballot.majority[0], aside[0])
    found = suspects(
        history,
        scope,
        comparison.lane,
        comparison.index,
        stands,
        aside if len(ballot.sides) == 2 or not is_tie else (),
        ballot.majority,
        is_tie=is_tie,
    )
    trigger = found[0].trigger if found else None
    level, reason = _confidence(ballot, found)
    call = _call(kind, stands, ballot.majority[0], aside[0])
    first = _first_divergence(comparison, stands, ballot, aside, kind, call)
    finding = Finding(
        "divergence",
        10,
        RULE,
        _summary(history, first, ballot, scope, stands),
        level,
        (ballot.basis, *reason),
        resembles(history, kind, stands, trigger),
        culprit=ballot.odd,
        unknown=() if ballot.odd else tuple(sorted(difference)),
        first_divergence=first,
        trigger=trigger,
        evidence=_evidence(stands, ballot),
        alternatives=tuple(Alternative(suspect.trigger.summary, RULE) for suspect in found[1:]),
    )
    at = {
        rank: (int(stand.record["step"]), int(stand.record["seq"]))
        for rank, stand in stands.items()
        if stand.record is not None
    }
    return Divergence(finding, scope, comparison.lane, at)


def in_causal_order(found: Sequence[Divergence]) -> list[Divergence]:
    """Earliest first; the same record seen from two scopes counts once, where it can be decided best.

    Two places in one rank's lane are ordered by that lane. Where no rank is in both, the smaller
    step is taken to be earlier, which is the best that logs without a common clock can say.
    """

    def compare(one: Divergence, two: Divergence) -> int:
        shared = sorted(set(one.at) & set(two.at)) if one.lane == two.lane else []
        for rank in shared:
            if one.at[rank] != two.at[rank]:
                return -1 if one.at[rank][1] < two.at[rank][1] else 1
        if shared:
            return 0
        return (one.order > two.order) - (one.order < two.order)

    # The stable sort leaves the widest scope with a named rank in front among equals.
    ranked = sorted(found, key=lambda one: (not one.finding.culprit, -len(one.scope.ranks), one.order))
    ordered: list[Divergence] = []
    for one in sorted(ranked, key=cmp_to_key(compare)):
        is_seen = any(
            one.lane == kept.lane and any(kept.at.get(rank) == place for rank, place in one.at.items())
            for kept in ordered
        )
        if not is_seen:
            ordered.append(one)
    return ordered


def _leader(history: History, difference: Mapping[int, Key]) -> str | None:
    """The leading axis of the kind that all ranks wrote, if it has one."""
    kinds = {key[0] for key in difference.values()}
    kind = history.kinds.get(kinds.pop()) if len(kinds) == 1 else None
    return kind.leader if kind else None


def _kind(
    history: History, scope: Scope, stands: Mapping[int, Stand], reference: int, odd: int
) -> DivergenceKind:
    def keys(rank: int) -> list[Key]:
        stand = stands[rank]
        return [key_of(record, scope) for record in (stand.record, *stand.after) if record is not None]

    meetings = frozenset(kind.name for kind in history.kinds.values() if kind.role == "meeting")
    return classify(keys(reference), keys(odd), meetings)


def _call(kind: DivergenceKind, stands: Mapping[int, Stand], reference: int, odd: int) -> str:
    """The call to name: the one with two results, the one too many, or the one that all are inside of."""
    here, there = stands[reference].record, stands[odd].record
    if kind == "extra" and there is not None:
        return str(there["kind"])
    own = str((here or there or {"kind": "?"})["kind"])
    if kind in ("value", "missing"):
        return own
    open_call = stands[reference].open_call
    return str(open_call["kind"]) if open_call is not None else own


def _confidence(ballot: Vote, found: Sequence[Suspect]) -> tuple[Level, tuple[str, ...]]:
    if not ballot.odd:
        return "undetermined", ()
    if not found:
        level: Level = "medium"
        reason = "no local fact in the log explains it"
    elif len([suspect for suspect in found if suspect.strength == 0]) == 1:
        level, reason = "high", f"declared need of {found[0].trigger.fact}"
    elif len(found) == 1:
        level, reason = "high", f"only {found[0].trigger.fact} tells the ranks apart"
    else:
        level, reason = "medium", f"{len(found)} local facts could explain it"
    if not ballot.is_sure:
        return ("medium" if level == "high" else "low"), (reason, "not every rank's log reaches this call")
    return level, (reason,)


def _first_divergence(
    comparison: Comparison,
    stands: Mapping[int, Stand],
    ballot: Vote,
    aside: Sequence[int],
    kind: DivergenceKind,
    call: str,
) -> FirstDivergence:
    scope = comparison.scope
    shown = {rank: _shown(stand.record, scope) for rank, stand in stands.items()}
    reference = shown[ballot.majority[0]]
    names = list(dict.fromkeys(name for fields in shown.values() for name in fields))
    if len({(fields["kind"], fields.get("phase")) for fields in shown.values()}) > 1:
        # Fields of different kinds have nothing to do with each other.
        names = [name for name in names if name in ("kind", "phase", "purpose")]
    differing = [name for name in names if len({repr(fields.get(name)) for fields in shown.values()}) > 1]
    accused = ballot.odd or tuple(sorted(shown))
    diffs = tuple(
        FieldDiff(
            name,
            reference.get(name) if ballot.odd else None,
            {
                rank: shown[rank].get(name)
                for rank in accused
                if not ballot.odd or shown[rank].get(name) != reference.get(name)
            },
        )
        for name in differing
    )
    told = stands[ballot.majority[0]].record or stands[aside[0]].record or {}
    step_of = stands[aside[0]].record or told
    return FirstDivergence(
        scope=scope.name,
        lane=comparison.lane,
        step=int(step_of.get("step", 0)),
        index=comparison.index,
        call=call,
        phase=told.get("phase"),
        kind=kind,
        request=str(told["rid"]) if "rid" in told else None,
        by_rank={rank: {name: fields.get(name) for name in differing} for rank, fields in shown.items()},
        field_diff=diffs,
    )


def _shown(record: Record | None, scope: Scope) -> dict[str, object]:
    if record is None:
        return {"kind": "trailer"}
    phase = {"phase": record["phase"]} if "phase" in record else {}
    return {"kind": record["kind"], **phase, **compared_fields(record, scope)}


def _summary(
    history: History, first: FirstDivergence, ballot: Vote, scope: Scope, stands: Mapping[int, Stand]
) -> str:
    where = f"call {first.index} ({call_text(first.call)}), step {first.step}, scope {first.scope}"
    if not ballot.odd:
        sides = " against ".join(ranks_text(side) for side in ballot.sides)
        return f"{sides}: they part at {where}; the logs alone do not say who is right"
    who = f"{ranks_text(ballot.odd)} left "
    if ballot.basis.startswith("leader"):
        who += f"the leader, {ranks_text(ballot.majority)},"
    else:
        who += f"the majority ({len(ballot.majority)} of {len(scope.ranks)})"
    diff = first.field_diff[0] if first.field_diff else None
    how = ""
    if diff is not None and first.kind == "value":
        odd = value_text(diff.values[min(diff.values)])
        how = f": {diff.field} {odd} instead of {value_text(diff.majority)}"
    elif first.kind == "missing":
        how = ": the call is missing there"
    elif first.kind == "extra":
        how = ": the call is made only there"
    elif first.kind == "collective":
        how = ": " + _meeting_text(history, ballot, stands)
    return f"{who} at {where}{how}"


def _meeting_text(history: History, ballot: Vote, stands: Mapping[int, Stand]) -> str:
    def purpose(rank: int) -> str | None:
        record = stands[rank].record
        if record is None or history.kinds[record["kind"]].role != "meeting":
            return None
        return str(record.get("purpose", "?"))

    theirs, own = purpose(ballot.majority[0]), purpose(ballot.odd[0])
    if own is None:
        return f"it did not enter the meeting `{theirs}`"
    if theirs is None:
        return f"it entered the meeting `{own}` alone"
    if theirs == own:
        return f"it entered the meeting `{own}` with another shape"
    return f"it entered the meeting `{own}` where the others entered `{theirs}`"


def _evidence(stands: Mapping[int, Stand], ballot: Vote) -> tuple[Evidence, ...]:
    """One line of each accused rank's log, and one of the majority's to hold it against."""
    named = [(rank, "culprit" if ballot.odd else "unknown") for rank in ballot.odd or sorted(stands)]
    if ballot.odd:
        named.append((ballot.majority[0], "leader" if ballot.basis.startswith("leader") else "majority"))
    entries = []
    for rank, role in named:
        stand = stands[rank]
        # A lane that ended before is held by its last record.
        record = stand.record or (stand.before[-1] if stand.before else None)
        seq = int(record["seq"]) if record else 0
        entries.append(Evidence(stand.lane.file_of(seq), seq, f"{role} {rank}"))
    return tuple(entries)
