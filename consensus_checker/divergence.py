"""From a difference between ranks to a finding: who, which call, how, and because of what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cmp_to_key

from consensus_checker.consensus_words import fields_of
from consensus_checker.context import Stand, compared_fields, key_of, look
from consensus_checker.custody import Break, by_custody, find_breaks
from consensus_checker.finding import (
    Alternative,
    DivergenceKind,
    Evidence,
    FieldDiff,
    Finding,
    FirstDivergence,
    Level,
)
from consensus_checker.given import find_given
from consensus_checker.history import History, Scope
from consensus_checker.misapplied import Misapplied, find_misapplied
from consensus_checker.precedent import Precedent, find_precedent, weigh
from consensus_checker.reenact import Question, Reenact, Ruling, ruled
from consensus_checker.refused_with_room import Refusal, find_refusal
from consensus_checker.resembles import resembles
from consensus_checker.rules.agreement import Comparison, Key, Vote, exact, sides_of, vote
from consensus_checker.rules.alignment import classify
from consensus_checker.trigger import Suspect, suspects
from consensus_checker.words import call_text, ranks_text, value_text
from tracer.record import MAIN_LANE, Record

RULE = "agreement"
CONFIG = "config_differs"
# Fields that say what a call is about, and how that is called in a sentence.
ABOUT = {"rid": "request", "node": "node"}
# Agreed records of a kind that a fact must have come through to be more than a guess.
PRECEDENTS_MIN = 8
# Why ranks part that were handed different things.
GIVEN = "the call was given something else"
# What a rank did whose decision, taken again, is another one.
DEED = "decided what does not follow from its own inputs"


@dataclass(frozen=True, slots=True)
class Divergence:
    """A finding and where it stands in each rank's log, so that the earliest can be told."""

    finding: Finding
    scope: Scope
    lane: str
    # rank -> step, seq of the record that differs, and the rank's clock there
    at: Mapping[int, tuple[int, int]]
    times: Mapping[int, int]

    @property
    def order(self) -> tuple[int, bool, int]:
        """The smallest step; in one step, the lane that decides goes before those that work for it."""
        step, seq = min(self.at.values())
        return step, self.lane != MAIN_LANE, seq

    @property
    def is_voted(self) -> bool:
        """Whether it names somebody by a count, or by a leader: not by a precedent alone."""
        return bool(self.finding.culprit) and not self.finding.basis[0].startswith("tie")

    def settles(self, other: Divergence) -> bool:
        """Whether it has the vote on what `other` could not decide by one: the same step, seen from wider.

        A stage of two ranks is a tie, and what they part at is often a meeting, which only they compare; the
        replica sees the next decision.
        """
        return (
            self.is_voted
            and not other.is_voted
            and self.lane == other.lane
            and set(other.scope.ranks) < set(self.scope.ranks)
            and set(self.finding.culprit) <= set(other.scope.ranks)
            and any(rank in other.at and place[0] == other.at[rank][0] for rank, place in self.at.items())
        )


def divergence(history: History, comparison: Comparison, reenact: Reenact | None = None) -> Divergence:
    """Explain the difference of one comparison.

    Args:
        reenact: asked only where neither the count nor anything else names somebody.
    """
    assert comparison.difference is not None
    scope, difference = comparison.scope, comparison.difference
    stands = {
        rank: stand
        for rank, stand in look(history, scope, comparison.lane, comparison.index).items()
        if rank in difference
    }
    meetings = frozenset(one.name for one in history.kinds.values() if one.role == "meeting")
    judged = _judged(history, comparison, stands, meetings, reenact)
    ballot, told = judged.ballot, judged.told
    kind = _kind(history, scope, stands, ballot.majority[0], _aside(ballot)[0])
    # In a tie the smaller side stands on the right-hand side of the comparison, accused of nothing.
    aside = _aside(ballot)
    place = (history, scope, comparison.lane, comparison.index, stands)
    found, is_split = _suspects(place, ballot, aside)
    trigger = found[0].trigger if found else None
    if (own_word := judged.broken or judged.own_word) is not None:
        trigger = own_word.trigger
    handed = None
    if trigger is None and len(ballot.sides) == 2:
        handed = find_given(history.kinds, stands, aside, ballot.majority, is_tie=not ballot.odd)
        trigger = handed
    kind, call = _call(kind, stands, ballot.majority[0], aside[0], meetings)
    level, reason = _confidence(history, judged, found, is_split=is_split, is_given=handed is not None)
    if comparison.index == comparison.start > 0:
        # They may have come apart earlier, in what the ring no longer has.
        level = _at_most(level, "medium")
        reason = (*reason, "the records before it are gone")
    first = _first_divergence(comparison, stands, ballot, aside, kind, call)
    summary = _summary(history, first, ballot, scope, stands)
    if judged.contradicts and told is not None:
        summary += f"; most ranks are one way, but {told.text}"
    alternatives = [Alternative(suspect.trigger.summary, RULE) for suspect in found[1:]]
    finding = Finding(
        "divergence",
        10,
        RULE,
        summary,
        level,
        (ballot.basis, *reason),
        resembles(history, kind, stands, trigger),
        culprit=ballot.odd,
        victims=ballot.followers,
        unknown=ballot.unclear
        if ballot.odd
        else tuple(sorted(rank for side in ballot.sides for rank in side)),
        first_divergence=first,
        trigger=trigger,
        evidence=_evidence(stands, ballot),
        alternatives=(
            *(_readings_of_it(ballot, told) if judged.contradicts and told is not None else ()),
            *alternatives,
            *_configured(history, ballot),
        ),
    )
    at = {
        rank: (int(stand.record["step"]), int(stand.record["seq"]))
        for rank, stand in stands.items()
        if stand.record is not None
    }
    times = {
        rank: time
        for rank, stand in stands.items()
        if stand.record is not None and type(time := stand.record.get("time_ns")) is int
    }
    return Divergence(finding, scope, comparison.lane, at, times)


@dataclass(frozen=True, slots=True)
class _Judged:
    """Who is odd, after all that speaks for or against it.

    Attributes:
        told: what all ranks did before at such a place, where that was asked.
        contradicts: vote and precedent name different ranks, so nobody is named.
        broken: where a value changed in an odd rank's hands.
        own_word: what an odd rank's log says against it: that it was refused what it had room for, or went
            by another count than follows from all ranks' own.
        all_follow: every rank's decision follows from its own inputs: they were given different ones.
    """

    ballot: Vote
    told: Precedent | None = None
    contradicts: bool = False
    broken: Break | None = None
    own_word: Refusal | Misapplied | None = None
    all_follow: bool = False


def _judged(
    history: History,
    comparison: Comparison,
    stands: Mapping[int, Stand],
    meetings: frozenset[str],
    reenact: Reenact | None,
) -> _Judged:
    """The count, and what goes before it or against it."""
    assert comparison.difference is not None
    scope, difference = comparison.scope, comparison.difference
    leader = _leader(history, scope, difference)
    if leader is not None:
        breaks = find_breaks(stands, leader, meetings)
        if (led := by_custody(difference, breaks, history.places, leader)) is not None:
            return _Judged(led, broken=next(one for one in breaks if one.rank in led.odd))
    ballot = vote(difference, scope, history.places, leader)
    told: Precedent | None = None
    contradicts = False
    if _kind(history, scope, stands, ballot.majority[0], _aside(ballot)[0]) != "value":
        sides = ballot.majority, _aside(ballot)
        told = find_precedent(history, scope, comparison.lane, comparison.index, stands, *sides)
        is_widest = not any(set(scope.ranks) < set(other.ranks) for other in history.scopes)
        ballot, contradicts = weigh(ballot, told, is_widest=is_widest)
    if ballot.odd:
        return _Judged(ballot, told, contradicts)
    ruling = _ruling(comparison, stands, reenact) if reenact is not None else Ruling((), ())
    if ruling.is_clear:
        basis = f"reenact, against {ballot.basis}"
        return _Judged(_by_deed(difference, ruling.odd, ruling.others, basis, DEED), told)
    all_follow = set(ruling.others) == set(difference)
    own_word: Refusal | Misapplied | None = find_refusal(
        history.kinds, {rank: stand.record for rank, stand in stands.items()}
    )
    if own_word is None and set(stands) == set(scope.ranks):
        own_word = find_misapplied(history.kinds, stands)
    if own_word is None or all_follow or contradicts:
        return _Judged(ballot, told, contradicts, all_follow=all_follow)
    basis = f"{own_word.basis}, against {ballot.basis}"
    voted = _by_deed(difference, own_word.odd, own_word.others, basis, own_word.deed)
    return _Judged(voted, told, own_word=own_word)


def _by_deed(
    difference: Mapping[int, Key], odd: tuple[int, ...], others: Sequence[int], basis: str, deed: str
) -> Vote:
    """The vote where not a count but what a rank did is the evidence."""
    groups = sides_of(difference)
    side = tuple(rank for group in groups for rank in group if rank in others)
    followers = tuple(sorted(set(difference) - {*side, *odd}))
    return Vote(side, odd, groups, basis, True, followers, (), deed)


def _ruling(comparison: Comparison, stands: Mapping[int, Stand], reenact: Reenact) -> Ruling:
    """What somebody says who can take the decision again."""
    records = {rank: stand.record for rank, stand in stands.items()}
    question = Question(comparison.scope.name, comparison.lane, comparison.index, records)
    return ruled(reenact(question), records)


def _aside(ballot: Vote) -> tuple[int, ...]:
    return ballot.odd or tuple(rank for side in ballot.sides if side != ballot.majority for rank in side)


def _suspects(
    place: tuple[History, Scope, str, int, Mapping[int, Stand]], ballot: Vote, aside: Sequence[int]
) -> tuple[list[Suspect], bool]:
    """Facts that explain all odd ranks together; else those of each odd side, and True."""
    is_tie = not ballot.odd
    if is_tie and len(ballot.sides) > 2:
        return [], False
    found = suspects(*place, aside, ballot.majority, is_tie=is_tie)
    sides = [
        own
        for side in ballot.sides
        if side != ballot.majority and (own := [rank for rank in side if rank in aside])
    ]
    if found or len(sides) < 2:
        return found, False
    each = [suspects(*place, side, ballot.majority, is_tie=is_tie) for side in sides]
    return [suspect for own in each for suspect in own], True


def _readings_of_it(ballot: Vote, told: Precedent) -> tuple[Alternative, ...]:
    """Both readings of a difference in which vote and precedent contradict each other."""
    many, few = ranks_text(told.novel), ranks_text(told.follows)
    return (
        Alternative(f"{many} did what was never done before: {told.text}", RULE),
        Alternative(f"{few} left the majority ({ballot.basis.removeprefix('majority ')})", RULE),
    )


def _configured(history: History, ballot: Vote) -> tuple[Alternative, ...]:
    """Ranks that were started otherwise may well decide otherwise."""
    if len(history.config_sides) < 2:
        return ()
    others = tuple(sorted(rank for side in history.config_sides[1:] for rank in side))
    return (Alternative(f"{ranks_text(others)} ran with another config (config_digest)", CONFIG),)


def in_causal_order(found: Sequence[Divergence]) -> list[Divergence]:
    """Earliest first; the same record seen from two scopes counts once, where it can be decided best.

    Two places in one rank's lane are ordered by that lane, two lanes of one rank by the clock that they
    share, if every rank's says the same. Where no rank is in both, the smaller step is taken to be earlier,
    which is the best that logs without a common clock can say.
    """

    def compare(one: Divergence, two: Divergence) -> int:
        shared = sorted(set(one.at) & set(two.at)) if one.lane == two.lane else []
        for rank in shared:
            if one.at[rank] != two.at[rank]:
                return -1 if one.at[rank][1] < two.at[rank][1] else 1
        if shared:
            return 0
        if one.lane != two.lane:
            both = set(one.times) & set(two.times)
            signs = {
                (one.times[rank] > two.times[rank]) - (one.times[rank] < two.times[rank]) for rank in both
            }
            if len(signs) == 1 and 0 not in signs:
                return signs.pop()
        return (one.order > two.order) - (one.order < two.order)

    # The stable sort leaves the widest scope with a vote in front among equals.
    ranked = sorted(
        found,
        key=lambda one: (not one.is_voted, -len(one.scope.ranks), not one.finding.culprit, one.order),
    )
    ordered: list[Divergence] = []
    for one in sorted(ranked, key=cmp_to_key(compare)):
        is_seen = any(
            one.lane == kept.lane and any(kept.at.get(rank) == place for rank, place in one.at.items())
            for kept in ordered
        )
        settled = [number for number, kept in enumerate(ordered) if one.settles(kept)]
        if settled:
            ordered[settled[0]] = one
            for number in reversed(settled[1:]):
                del ordered[number]
        elif not is_seen:
            ordered.append(one)
    return ordered


def _leader(history: History, scope: Scope, difference: Mapping[int, Key]) -> str | None:
    """The leading axis of the kind that all ranks wrote, if every field that differs is a led one."""
    if len({key[:2] for key in difference.values()}) > 1:
        return None
    keys = list(difference.values())
    kind = history.kinds.get(keys[0][0])
    if kind is None or kind.leader is None:
        return None
    names = scope.fields[kind.name]
    differing = {
        name for at, name in enumerate(names, start=2) if len({exact(key[at : at + 1]) for key in keys}) > 1
    }
    return kind.leader if differing <= set(kind.led) else None


def _kind(
    history: History, scope: Scope, stands: Mapping[int, Stand], reference: int, odd: int
) -> DivergenceKind:
    def keys(rank: int) -> list[Key]:
        stand = stands[rank]
        return [key_of(record, scope) for record in (stand.record, *stand.after) if record is not None]

    meetings = frozenset(kind.name for kind in history.kinds.values() if kind.role == "meeting")

    def shape(key: Key) -> Key:
        """What a call is about, without the counters that shift where one is left out."""
        names = scope.fields[key[0]]
        about = [
            value
            for name, value in zip(names, key[2:], strict=True)
            if name in ABOUT or (key[0] in meetings and isinstance(value, str))
        ]
        return (*key[:2], *about)

    return classify(keys(reference), keys(odd), meetings, shape)


def _call(
    kind: DivergenceKind,
    stands: Mapping[int, Stand],
    reference: int,
    odd: int,
    meetings: frozenset[str],
) -> tuple[DivergenceKind, str]:
    """The call to name: the one with two results, the one too many, or the one that all are inside of.

    Where the order differs, the odd rank's record is that call with another value or at another place if
    the others make it a little later, and one too many if they don't. Where the others hang inside of a call
    that it did not make, what they would have done next is not known: that call is missing.
    """
    here, there = stands[reference].record, stands[odd].record
    if kind in ("order", "collective") and _hangs_inside(stands[reference], stands[odd], meetings):
        assert here is not None
        return "missing", str(here["kind"])
    if kind == "extra" and there is not None:
        return kind, str(there["kind"])
    own = str((here or there or {"kind": "?"})["kind"])
    if kind in ("value", "missing"):
        return kind, own
    if kind == "order" and here is not None and there is not None:
        later = [here, *stands[reference].after]
        return ("order" if any(_is_same_call(there, one) for one in later) else "extra"), str(there["kind"])
    open_call = stands[reference].open_call
    return kind, str(open_call["kind"]) if open_call is not None else own


def _hangs_inside(stand: Stand, odd: Stand, meetings: frozenset[str]) -> bool:
    """Whether a rank's record is a call in whose meeting it hangs, and the odd rank never made that call."""
    here, there = stand.record, odd.record
    if here is None or there is None or here.get("phase") != "call" or stand.lane.outcome != "hung":
        return False
    if not stand.after or stand.after[-1]["kind"] not in meetings or stand.after[-1].get("phase") != "enter":
        return False
    is_open = not any(one["kind"] == here["kind"] and one.get("phase") == "return" for one in stand.after)
    made = [one for one in (there, *odd.after) if one["step"] == here["step"]]
    return is_open and not any(_is_same_call(here, one) for one in made)


def _is_same_call(one: Record, two: Record) -> bool:
    """Whether two records are of one kind and about one thing, as far as they say."""
    return (one["kind"], one.get("phase")) == (two["kind"], two.get("phase")) and all(
        one.get(name) == two.get(name) for name in ABOUT
    )


def _confidence(
    history: History, judged: _Judged, found: Sequence[Suspect], *, is_split: bool, is_given: bool
) -> tuple[Level, tuple[str, ...]]:
    ballot, told = judged.ballot, judged.told
    reasons: list[str] = []
    rounds = "" if told is None else "1 round" if told.count == 1 else f"{told.count} rounds"
    if told is not None and told.novel == ballot.odd:
        reasons.append(f"precedent {rounds}")
    elif told is not None and ballot.basis.startswith("majority"):
        reasons.append(f"precedent {rounds} against it")
    if not ballot.odd:
        if judged.all_follow:
            reasons.append("each decision follows from its own rank's inputs")
        return "undetermined", tuple(reasons)
    level, reason = _explained(found, is_split=is_split)
    reasons.append(reason if not is_given else GIVEN)
    if ballot.is_tied or len(history.config_sides) > 1:
        level = _at_most(level, "medium")
    if judged.broken is not None:
        # No fact explains it, and none has to: the rank contradicts itself.
        level, reasons[-1] = "high", "the digests of one value in its own log differ"
    elif judged.own_word is not None:
        level, reasons[-1] = "medium", judged.own_word.text
    elif ballot.deed:
        level = "high"
    if len(history.config_sides) > 1:
        reasons.append("the ranks were configured differently")
    if not ballot.is_sure and not ballot.is_tied:
        level = "medium" if level == "high" else "low"
        reasons.append("not every rank's log reaches this call")
    return level, tuple(reasons)


def _explained(found: Sequence[Suspect], *, is_split: bool) -> tuple[Level, str]:
    """How far the facts explain it, and in which words."""
    if not found:
        return "medium", "no local fact in the log explains it"
    first = found[0]
    fact = first.trigger.fact
    if is_split:
        return "medium", "no one fact explains all odd ranks"
    if first.is_earlier:
        level: Level = "medium" if len(found) == 1 else "low"
        return level, f"{fact} is known only from the decision before"
    if len(found) > 1:
        return "medium", f"{len(found)} local facts could explain it"
    if first.strength == 0:
        return "high", f"declared need of {fact}"
    if first.precedents < PRECEDENTS_MIN:
        return (
            "medium",
            f"only {fact} tells the ranks apart; earlier calls to judge it by: {first.precedents}",
        )
    return "high", f"only {fact} tells the ranks apart"


def _at_most(level: Level, most: Level) -> Level:
    order: tuple[Level, ...] = ("undetermined", "low", "medium", "high")
    return order[min(order.index(level), order.index(most))]


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
    # Who sent another value than it goes by has the same as the others, and its followers don't.
    accused = (*ballot.odd, *(ballot.followers if ballot.deed else ())) or tuple(sorted(shown))
    diffs = tuple(
        FieldDiff(
            name,
            reference.get(name) if ballot.odd else None,
            {
                rank: shown[rank].get(name)
                for rank in accused
                if not ballot.odd or repr(shown[rank].get(name)) != repr(reference.get(name))
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
        request=_request(shown[ballot.majority[0]]) or _request(shown[aside[0]]),
        by_rank={rank: {name: fields.get(name) for name in differing} for rank, fields in shown.items()},
        field_diff=diffs,
        about=_about(call, stands[aside[0]], stands[ballot.majority[0]]),
    )


def _about(call: str, *stands: Stand) -> str | None:
    """What the call was about, from the first of some ranks that says so."""
    for stand in stands:
        for record in (stand.record, stand.open_call):
            if record is not None and record["kind"] == call:
                for name, word in ABOUT.items():
                    if name in record:
                        return f"{call} of {word} {value_text(record[name])}"
    return None


def _request(fields: Mapping[str, object]) -> str | None:
    """The request that a record is about: its `rid`, or that of one of its objects."""
    if "rid" in fields:
        return str(fields["rid"])
    found = (value for name, value in fields.items() if name.endswith(".rid") and isinstance(value, str))
    return next(found, None)


def _shown(record: Record | None, scope: Scope) -> dict[str, object]:
    if record is None:
        return {"kind": "trailer"}
    phase = {"phase": record["phase"]} if "phase" in record else {}
    found: dict[str, object] = {"kind": record["kind"], **phase}
    for name, value in compared_fields(record, scope).items():
        # Of an object the field that differs says more than the object.
        found |= fields_of(name, value)
    return found


def _summary(
    history: History, first: FirstDivergence, ballot: Vote, scope: Scope, stands: Mapping[int, Stand]
) -> str:
    where = f"call {first.index} ({call_text(first.call)}), step {first.step}, scope {first.scope}"
    if not ballot.odd:
        sides = " against ".join(ranks_text(side) for side in ballot.sides)
        return f"{sides}: they part at {where}; the logs alone do not say who is right"
    who = f"{ranks_text(ballot.odd)} left "
    if ballot.deed:
        who = f"{ranks_text(ballot.odd)} {ballot.deed},"
    elif ballot.is_led:
        who += f"the leader, {ranks_text(ballot.majority)},"
    else:
        who += f"the majority ({len(ballot.majority)} of {len(scope.ranks)})"
    if ballot.is_tied:
        who = f"{ranks_text(ballot.odd)} did what was never done before,"
    diff = first.field_diff[0] if first.field_diff else None
    how = ""
    if diff is not None and first.kind == "value":
        values: dict[str, list[int]] = {}
        for rank in sorted(diff.values):
            values.setdefault(value_text(diff.values[rank]), []).append(rank)
        odd = ", ".join(
            value + (f" on {ranks_text(ranks)}" if len(values) > 1 else "") for value, ranks in values.items()
        )
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
        return f"it entered the meeting `{own}`, which the others did not"
    if theirs == own:
        return f"it entered the meeting `{own}` with another shape"
    return f"it entered the meeting `{own}` where the others entered `{theirs}`"


def _evidence(stands: Mapping[int, Stand], ballot: Vote) -> tuple[Evidence, ...]:
    """One line of each accused rank's log, and one of the majority's to hold it against."""
    named = [(rank, "culprit" if ballot.odd else "unknown") for rank in ballot.odd or sorted(stands)]
    if ballot.odd:
        named += [(rank, "victim") for rank in ballot.followers]
        named += [(rank, "unknown") for rank in ballot.unclear]
        named.append((ballot.majority[0], "leader" if ballot.is_led else "majority"))
    entries = []
    for rank, role in named:
        stand = stands[rank]
        # A lane that ended before is held by its last record.
        record = stand.record or (stand.before[-1] if stand.before else None)
        seq = int(record["seq"]) if record else 0
        entries.append(Evidence(stand.lane.file_of(seq), seq, f"{role} {rank}"))
    return tuple(entries)
