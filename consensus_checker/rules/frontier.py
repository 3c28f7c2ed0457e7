"""Rules `fr_not_joined`, `fr_device_behind`, `fr_all_joined`: who is missing where a group stands.

Equation, for a group with members m, enqueued(m) and completed(m), and p = the newest collective that has
ended anywhere, so that all have joined it:

    n = the oldest collective behind p that is open on a member

    enqueued(m) < n            m did not join                                          11
    all have joined n          and completed(m) < p: m's device is behind              12
                               and nobody is: nobody gets further                      13

    rank 0  #42 done  #43 open
    rank 1  #42 done  #43 open      n = 43: rank 2 did not join
    rank 2  #42 done

Not joined goes before behind: with gloo the state of who waits lags by one. Somebody is named where more
members wait than did not come, and nobody is who waits in another group: what it waits for explains it. A
rank missed in an inner group explains those that are missed in outer ones only. A rank without a dump is
named where the others wait for exactly it. One look at gloo, which dumps only when asked, needs a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from consensus_checker.claim import Claim
from consensus_checker.finding import Alternative, Evidence, Finding, Level
from consensus_checker.frontier_graph import Frontier, Stand, frontier
from consensus_checker.recorded_groups import Place, recorded
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Call, Dossier

RULE = "fr_not_joined"
BEHIND = "fr_device_behind"
ALL_JOINED = "fr_all_joined"
RULES = (RULE, BEHIND, ALL_JOINED)
# Groups that are told in a sentence.
NAMED_MAX = 3


def find(dossier: Dossier) -> list[Claim]:
    """What the dumps say of who is missing; nothing where nobody waits."""
    found = frontier(recorded(dossier))
    case = _Case(dossier, found)
    if not found.stands:
        return [case.device_behind(found.lagging)] if found.lagging else []
    if found.roots:
        return [case.not_joined()]
    if found.circle:
        return [case.in_a_circle()]
    # Of a rank that moves on nobody can say that it did not join; whoever misses it may wait for it by right.
    whole = [stand for stand in found.stands if not stand.absent]
    if doubtful := [stand for stand in whole if stand.unheard]:
        return [case.unheard(doubtful)]
    if behind := [stand for stand in whole if stand.behind]:
        return [case.device_behind(behind)]
    return [case.all_joined(whole)] if whole else []


@dataclass(frozen=True, slots=True)
class _Case:
    """The frontier, while a claim is made of it."""

    dossier: Dossier
    found: Frontier

    def not_joined(self) -> Claim:
        found = self.found
        sure = {rank for rank, stands in found.roots.items() if any(self._outvoted(one) for one in stands)}
        doubtful = {rank: why for rank in sorted(sure) if (why := self._doubt(rank, sure))}
        named = tuple(sorted(sure - doubtful.keys()))
        unknown = tuple(sorted(found.roots.keys() - set(named)))
        missed = [stand for stand in found.stands if set(stand.absent) & set(named or unknown)]
        missed.sort(key=lambda stand: not self._outvoted(stand))
        first = missed[0]
        if named:
            summary = f"{ranks_text(named)} did not join {first.call}{self._more(missed)}"
        elif len(first.waiting) < len(first.absent):
            summary = (
                f"{ranks_text(first.waiting)} {_verb(first.waiting, 'waits', 'wait')} in {first.call}, "
                f"which {ranks_text(first.absent)} did not join: a call too many, or a stall before it"
            )
        else:
            summary = (
                f"{ranks_text(unknown)} did not join {first.call}, "
                f"in which {ranks_text(first.waiting)} {_verb(first.waiting, 'waits', 'wait')}"
            )
        basis = [self._counts(stand) for stand in missed[:NAMED_MAX]]
        basis += [f"rank {rank}: {why}" for rank, why in doubtful.items()]
        idle = sorted({rank for stand in missed for rank in stand.idle} & set(named))
        if idle:
            basis.append(f"how many calls {ranks_text(idle)} made is not known, only that none is open")
        is_sure = any(not stand.unheard for stand in missed) and not idle
        return self._claim(
            RULE,
            11,
            summary,
            self._level(missed, is_sure=is_sure) if named else "undetermined",
            stands=missed,
            culprit=named,
            unknown=unknown,
            silent=sorted({rank for stand in missed for rank in stand.unheard}),
            basis=basis,
            alternatives=(
                *self._behind_too({*named, *unknown}),
                *self._left_out(doubtful),
                *([] if named else [_extra_call(first)]),
            ),
        )

    def in_a_circle(self) -> Claim:
        circle = self.found.circle
        stands = [
            stand
            for stand in self.found.stands
            if set(stand.absent) & set(circle) and set(stand.waiting) & set(circle)
        ]
        told = "; ".join(
            f"{ranks_text(stand.waiting)} in {stand.call} for {ranks_text(stand.absent)}"
            for stand in stands[:NAMED_MAX]
        )
        return self._claim(
            RULE,
            11,
            f"{ranks_text(circle)} wait for each other: {told}",
            "undetermined",
            stands=stands,
            unknown=circle,
            basis=["a circle of waits: calls in another order, or one too few or too many"],
        )

    def unheard(self, stands: Sequence[Stand]) -> Claim:
        """All that have told have joined; who has not told may be missing."""
        silent = sorted({rank for stand in stands for rank in stand.unheard})
        confused = self.found.recorded.confused
        waiting = sorted({rank for stand in stands for rank in stand.waiting})
        # Who did not join elsewhere waits here, and may be what keeps the others there.
        unknown = sorted(self.found.explained)
        lost = {rank for group in self.found.recorded.groups for rank in group.unheard} | set(silent)
        is_named = len(lost) == 1 and silent[0] not in confused and not unknown
        is_old = set(silent) <= self.found.old
        why = "has a dump from before that only" if is_old else "left no dump that tells it"
        summary = f"{ranks_text(waiting)} {_verb(waiting, 'waits', 'wait')} in {stands[0].call}"
        summary += f", and {ranks_text(silent)} {why if len(silent) == 1 else 'left none that tells it'}"
        return self._claim(
            RULE,
            11 if is_named else 20,
            summary,
            # A file that nobody collected looks like this too.
            "low" if is_named else "undetermined",
            stands=stands,
            culprit=silent if is_named else (),
            unknown=unknown,
            silent=silent,
            basis=[
                *(f"{ranks_text([rank])} did not join elsewhere, and waits here" for rank in unknown),
                *(["its peers wait for nobody else, and no other rank lacks a dump"] if is_named else []),
                *(f"rank {rank}: {confused[rank]}" for rank in silent if rank in confused),
                *(self._counts(stand) for stand in stands[:NAMED_MAX]),
            ],
            alternatives=(
                Alternative(f"all have joined {stands[0].call}, and nobody gets further", ALL_JOINED),
                *([Alternative("its newest dump was not collected", RULE)] if is_named else []),
            ),
        )

    def device_behind(self, stands: Sequence[Stand]) -> Claim:
        behind = sorted({rank for stand in stands for rank in stand.behind})
        first = stands[0]
        is_named = 2 * len(first.behind) < len(first.joined)
        return self._claim(
            BEHIND,
            12,
            f"all have joined {first.call}, and the device of {ranks_text(behind)} has not done what others' "
            "have done before it",
            self._level(stands, is_sure=True) if is_named else "undetermined",
            stands=stands,
            culprit=behind if is_named else (),
            unknown=() if is_named else behind,
            basis=[
                f"#{stand.proven} of {stand.group.label} ended on "
                f"{len(stand.joined) - len(stand.behind)} of {len(stand.joined)}"
                for stand in stands[:NAMED_MAX]
            ],
            alternatives=(Alternative("its watchdog looks more seldom than the others'", BEHIND),),
        )

    def all_joined(self, stands: Sequence[Stand]) -> Claim:
        """Whoever left no dump is in no group of gloo's, which has no members: all that told is not all."""
        first = stands[0]
        is_whole = all(stand.group.group.members is not None for stand in stands)
        who = "all" if is_whole else "all that left a dump"
        silent = Alternative(
            "a member that left no dump did not join: the dumps do not say who is a member", RULE
        )
        return self._claim(
            ALL_JOINED,
            13,
            f"{who} have joined {first.call}, and it does not end{self._more(stands)}",
            "medium" if is_whole else "low",
            stands=stands,
            basis=[self._counts(stand) for stand in stands[:NAMED_MAX]],
            alternatives=(
                *([] if is_whole else [silent]),
                Alternative("members came with different calls, which these dumps don't show", "fr_mismatch"),
            ),
        )

    def _claim(
        self,
        rule: str,
        code: int,
        summary: str,
        level: Level,
        *,
        stands: Sequence[Stand],
        basis: Sequence[str],
        culprit: Sequence[int] = (),
        unknown: Sequence[int] = (),
        silent: Sequence[int] = (),
        alternatives: tuple[Alternative, ...] = (),
    ) -> Claim:
        named = {*culprit, *unknown}
        waiting = {rank for stand in stands for rank in stand.waiting} - named
        basis = [*basis, *self._looks(stands)]
        finding = Finding(
            "undetermined" if code == 20 else "stall",
            20 if code == 20 else code,
            rule,
            summary,
            level,
            tuple(basis),
            culprit=tuple(culprit),
            victims=tuple(sorted(waiting)),
            silent=tuple(silent),
            unknown=tuple(unknown),
            evidence=(
                *self._evidence("culprit", culprit, stands),
                *self._evidence("unknown", unknown, stands),
                *self._evidence("victim", sorted(waiting), stands),
                *self._evidence("silent", [rank for rank in silent if rank not in named], stands),
            ),
            alternatives=alternatives,
        )
        return Claim(
            finding,
            cleared=dict(self.found.recorded.moved),
            needs_second_look=self._needs_second_look(stands),
            missing=tuple(sorted({rank for stand in stands for rank in stand.group.unheard})),
        )

    def _needs_second_look(self, stands: Sequence[Stand]) -> bool:
        if any(stand.stood or stand.has_timed_out for stand in stands):
            return False
        if not self.found.stands:
            # What ended a moment ago is noticed on one rank before another, in every healthy job.
            return True
        return self.found.is_alive or any(stand.is_gloo for stand in stands)

    def _level(self, stands: Sequence[Stand], *, is_sure: bool) -> Level:
        """High takes every member's word, and a sign that the job stands still."""
        stands_still = any(stand.has_timed_out or stand.stood for stand in stands)
        return "high" if is_sure and stands_still else "medium"

    def _looks(self, stands: Sequence[Stand]) -> list[str]:
        told = []
        if any(stand.has_timed_out for stand in stands):
            told.append("the library's watchdog has given it up")
        if any(stand.stood for stand in stands):
            told.append("two looks show it at the same place")
        return told or ["one look"]

    def _outvoted(self, stand: Stand) -> bool:
        """Whether more came than stayed away without an excuse, and as many if the unheard did too."""
        away = [rank for rank in stand.absent if rank in self.found.roots]
        return len(stand.joined) > len(away) and len(stand.joined) >= len(away) + len(stand.unheard)

    def _doubt(self, rank: int, sure: Iterable[int]) -> str:
        """Why a rank that did not join is not named all the same; empty where nothing speaks against it."""
        own = self.found.roots[rank]
        waiting = {one for stand in own for one in stand.waiting}
        if peers := sorted(waiting & self._p2p_peers(rank)):
            return f"a send or receive between it and {ranks_text(peers)} is open as well"
        inner = min(stand.group.depth for stand in own)
        for other in sorted(sure):
            stands = self.found.roots[other]
            if other != rank and min(stand.group.depth for stand in stands) < inner:
                near = {one for stand in stands for one in (*stand.waiting, *stand.absent)}
                if near & {one for stand in own for one in stand.group.places}:
                    return f"missed in an outer group only, which rank {other} may explain"
        return ""

    def _p2p_peers(self, rank: int) -> set[int]:
        """Ranks with which an open send or receive of this rank is."""
        peers = set()
        for group in self.found.recorded.groups:
            place = group.places.get(rank)
            for call in place.progress.p2p if place is not None else ():
                peer = _peer(call, group.group.members)
                if peer is not None and not call.is_retired and call.state != "completed":
                    peers.add(peer)
        return peers

    def _behind_too(self, named: set[int]) -> list[Alternative]:
        """What else is odd, and may follow from it."""
        behind = sorted({rank for stand in self.found.stands for rank in stand.behind} - named)
        if not behind:
            return []
        told = (
            f"the device of {ranks_text(behind)} has not done what others' have done: a second fault, or none"
        )
        return [Alternative(told, BEHIND)]

    def _left_out(self, doubtful: Iterable[int]) -> list[Alternative]:
        return [Alternative(f"rank {rank} has its own reason not to have joined", RULE) for rank in doubtful]

    def _more(self, stands: Sequence[Stand]) -> str:
        more = len(stands) - 1
        return f", and {more} more {'group stands' if more == 1 else 'groups stand'}" if more else ""

    def _counts(self, stand: Stand) -> str:
        size = len(stand.group.group.members or stand.group.places)
        return f"{len(stand.joined)} of {size} have joined {stand.call}"

    def _evidence(self, role: str, ranks: Iterable[int], stands: Sequence[Stand]) -> list[Evidence]:
        """One entry a rank, of the innermost group that tells something of it."""
        told = []
        for rank in ranks:
            stand = next((one for one in stands if rank in one.group.places), None)
            if stand is None:
                told.append(Evidence(None, None, f"{role} {rank}: no dump"))
                continue
            place = stand.group.places[rank]
            at = place.progress.at
            told.append(
                Evidence(self.dossier.file_of(at), at.record, f"{role} {rank}: {_stands(place, stand)}")
            )
        return told


def _stands(place: Place, stand: Stand) -> str:
    if place.enqueued is None:
        return f"no collective of {stand.group.label} in its dump"
    done = max(0, place.completed or 0)
    return f"called {place.enqueued}, ended {done} of {stand.group.label}"


def _peer(call: Call, members: tuple[int, ...] | None) -> int | None:
    """The other rank of `send 0->3` or `recv 0<-3`, whose numbers count inside the group."""
    arrow = "->" if "->" in call.op else "<-"
    other = call.op.partition(arrow)[2]
    if members is None or not other.isdecimal() or len(other) > 7 or int(other) >= len(members):
        return None
    return members[int(other)]


def _extra_call(stand: Stand) -> Alternative:
    return Alternative(f"{ranks_text(stand.waiting)} made a call too many in {stand.group.label}", RULE)


def _verb(ranks: Sequence[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many
