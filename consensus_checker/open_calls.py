"""Logs with calls and no collectives, that nobody closed: who stands in a call that others never came to.

    0  ... load_back | load_back returns | forward called        open, its heart says: still for 41 s
    1  ... load_back | load_back returns | forward called        open, still for 41 s
    2  ... load_back called                                      open, still for 41 s: it is behind

Code that carries a decorator says when a call began and ended, and not for whom it waited inside. Ranks that
must agree make the same calls, so those who stand further on, all in one call, wait for whoever is behind.

Owns that rule. It is never surer than `medium`: a call that is open may only take long, on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from consensus_checker.deaths import ALIVE, DEAD, HELD
from consensus_checker.ending import FROZEN, STALL
from consensus_checker.finding import Alternative, Evidence, Finding, Victim
from consensus_checker.hearts import LONG_NS_MIN, LONG_PARTS, Beat, Pace
from consensus_checker.history import History, Scope
from consensus_checker.stall import NS_PER_S, Stall, Standing
from consensus_checker.words import call_text, ranks_text
from tracer.heart import PERIOD_S
from tracer.record import MAIN_LANE, Record

# A heart that was heard of last a moment ago is not silent: its next beat may not have been due.
SILENT_NS_MIN = 3 * round(PERIOD_S * NS_PER_S)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one rank's log breaks off.

    Attributes:
        call: the innermost call that has not returned, if ranks must agree on it.
        head: records so far on which ranks must agree.
        still_ns: for how long its last beat had seen nothing new; `is_long` if that was long for it.
    """

    standing: Standing
    call: Record | None
    head: int
    still_ns: int
    is_long: bool

    @property
    def rank(self) -> int:
        return self.standing.rank

    def evidence(self, role: str) -> Evidence:
        last = self.standing.last
        seq = int(last["seq"]) if last is not None else 0
        return Evidence(self.standing.lane.file_of(seq), seq, f"{role} {self.rank}")


def behind_in_calls(history: History, stall: Stall, beats: Mapping[int, Beat]) -> Finding | None:
    """Ranks that never came to the call in which all others stand; None where that can't be said.

    Args:
        stall: of this history, with no wait in it: where there are collectives they say more.
    """
    if stall.waits:
        return None
    for scope in history.scopes:
        places = _places(history, stall, beats, scope)
        if places and (finding := _judged(places)) is not None:
            return finding
    return None


def _places(history: History, stall: Stall, beats: Mapping[int, Beat], scope: Scope) -> list[_Place]:
    """Where every rank of a scope stands; nothing unless that is known of all of them."""
    found = []
    for rank in scope.ranks:
        lane, standing, beat = history.lane(rank, MAIN_LANE), stall.standing(rank, MAIN_LANE), beats.get(rank)
        if lane is None or lane.is_closed or beat is None or standing is None or standing.last is None:
            return []
        begin = lane.begin(scope.fields)
        if begin is None:
            return []
        head = begin + lane.count(scope.fields, 0, int(standing.last["seq"]) + 1)
        still_ns = beat.still_ns.get(MAIN_LANE, 0)
        usual_ns = Pace.of(lane, frozenset()).gap
        is_long = still_ns >= max(LONG_NS_MIN, LONG_PARTS * usual_ns)
        call = standing.open_call
        is_agreed = call is not None and call["kind"] in scope.fields
        found.append(_Place(standing, call if is_agreed else None, head, still_ns, is_long))
    return found


def _judged(places: list[_Place]) -> Finding | None:
    most = max(place.head for place in places)
    ahead = [place for place in places if place.head == most]
    late = [place for place in places if place.head < most]
    calls = {str(place.call["kind"]) if place.call is not None else "" for place in ahead}
    if not late or len(calls) > 1 or "" in calls or not all(place.is_long for place in ahead):
        return None
    waited_ns = min(place.still_ns for place in ahead)
    is_telling = waited_ns >= SILENT_NS_MIN
    silent = [
        place
        for place in late
        if is_telling and not place.is_long and place.still_ns * LONG_PARTS < waited_ns
    ]
    if len(silent) not in (0, len(late)) or not all(place.is_long or place in silent for place in late):
        # One of them moved until the end.
        return None
    return _finding(ahead, late, is_silent=bool(silent), seconds=waited_ns / NS_PER_S)


def _finding(ahead: list[_Place], late: list[_Place], *, is_silent: bool, seconds: float) -> Finding:
    waiting, odd = tuple(place.rank for place in ahead), tuple(place.rank for place in late)
    first = ahead[0].call
    assert first is not None
    name = call_text(str(first["kind"]))
    step = int(first["step"])
    is_majority = len(ahead) > len(late)
    stands = "; ".join(f"{ranks_text((place.rank,))} {_stands(place)}" for place in late)
    told = f"in which {ranks_text(waiting)} had been for {seconds:.1f} s"
    text = (
        f"{ranks_text(odd)} said nothing more, and did not come to {name}, {told}: {stands}"
        if is_silent
        else f"{ranks_text(odd)} did not come to {name}, {told}: {stands}"
    )
    return Finding(
        "dead" if is_silent else "stall",
        14 if is_silent else 11,
        DEAD if is_silent else STALL,
        text,
        "medium" if is_majority else "undetermined",
        (
            f"{len(ahead)} of {len(ahead) + len(late)} stand in one call",
            "its heart was the first to stop" if is_silent else "its heart beat on",
        ),
        culprit=odd if is_majority else (),
        victims=waiting if is_majority else (),
        unknown=() if is_majority else tuple(sorted((*waiting, *odd))),
        victim=Victim(waiting, name, step, None),
        evidence=(
            *(place.evidence("culprit" if is_majority else "unknown") for place in late),
            *(place.evidence("victim" if is_majority else "unknown") for place in ahead),
        ),
        alternatives=(
            Alternative(ALIVE + HELD, DEAD)
            if is_silent
            else Alternative(f"{name} waits for no other rank, and only takes long", FROZEN),
        ),
    )


def _stands(place: _Place) -> str:
    call, last = place.call, place.standing.last
    if call is not None:
        return f"is in {call_text(str(call['kind']))}"
    return f"is in no call, its last: {call_text(str(last['kind']))}" if last is not None else "wrote nothing"
