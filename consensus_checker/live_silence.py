"""Who is silent, and who waits for whom, while a run goes on: said from posts, never from clocks of ranks.

Owns the rules. All times are the finder's own: how long it has watched a post, or a lane, not change.

    1  a rank's posts stop                        its process is gone, or stuck with the interpreter held
    2  a lane is in a call that others never
       came to                                    they are the silent ones; whoever is in it waits
    3  a rank stands still behind its peers       it skipped something, or hangs in what they are through with
    4  a lane that works for another never
       came back from a store or its peers        told, and never a reason to end a process

Ranks that are equal and in no call are quiet for ever: an idle server is healthy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from consensus_checker.deaths import DEAD
from consensus_checker.ending import FROZEN, STALL, UNFINISHED
from consensus_checker.finding import Evidence, Finding, Level, Victim
from consensus_checker.live_own import GONE
from consensus_checker.live_posts import Inside, LanePost, Post, meeting_key
from consensus_checker.words import call_text, place_text, ranks_text
from tracer.record import BACKEND, COLLECTIVE, Kind

# Who stands where another has waited for long enough waits too, a little shorter; and a rank that has not
# been heard for so long may be about to be found dead, which says more.
WITH_PARTS = 2
FADING_PARTS = 4
# Who has been silent for nearly as long as one that is dead is waited for, a little.
DYING_PART, DYING_PARTS_MAX = 0.75, 1.2
# Stores may be slow, and so may a collective that all have joined: only what is far beyond is told.
SLOW_PARTS = 5


@dataclass(frozen=True, slots=True)
class Member:
    """One rank as the finder sees it.

    Attributes:
        age_s: for how long no new post has come.
        still_s: lane -> for how long it has written nothing.
        fate: what is known of its process when posts have stopped, or "".
    """

    rank: int
    post: Post
    age_s: float
    still_s: Mapping[str, float]
    fate: str = ""

    def lane(self, name: str) -> LanePost | None:
        return next((lane for lane in self.post.lanes if lane.name == name), None)

    def head(self, name: str, axes: tuple[str, ...]) -> int:
        lane = self.lane(name)
        return (
            next((chain.head for chain in lane.chains if frozenset(chain.axes) == frozenset(axes)), 0)
            if lane
            else 0
        )


@dataclass(frozen=True, slots=True)
class View:
    """All that the rules look at.

    Attributes:
        main: the lane that decides.
        behind_s: axes -> rank -> for how long its main lane has stood behind another's without moving.
        unheard: members that have never posted, for longer than a start takes.
    """

    members: Mapping[int, Member]
    kinds: Mapping[str, Kind]
    main: str
    silence_s: float
    behind_s: Mapping[tuple[str, ...], Mapping[int, float]] = field(default_factory=dict)
    unheard: tuple[int, ...] = ()

    @property
    def dead(self) -> tuple[int, ...]:
        return tuple(
            rank
            for rank, member in sorted(self.members.items())
            if member.age_s >= self.silence_s and not member.post.ended
        )

    @property
    def live(self) -> list[Member]:
        """Members that run and can be heard."""
        return [
            member
            for rank, member in sorted(self.members.items())
            if rank not in self.dead and not member.post.ended
        ]

    @property
    def fading(self) -> frozenset[int]:
        """Members of which it is not yet known whether they still run."""
        return frozenset(
            rank
            for rank, member in self.members.items()
            if member.age_s >= self.silence_s / FADING_PARTS and not member.post.ended
        )

    @property
    def are_more_dying(self) -> bool:
        """Whether others fell silent at about the same time: those are told together, a moment later."""
        ages_s = [member.age_s for member in self.members.values() if not member.post.ended]
        is_about = any(DYING_PART * self.silence_s <= age_s < self.silence_s for age_s in ages_s)
        return is_about and max(ages_s) < DYING_PARTS_MAX * self.silence_s

    def longest(self, ranks: Sequence[int]) -> float:
        """For how long the first of them has stood still."""
        return max(self.members[rank].still_s.get(self.main, 0.0) for rank in ranks)

    def partners(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Members that must agree with `rank` along `axes`, itself among them."""
        own = _fixed(self.members[rank].post, axes)
        return tuple(other for other, one in self.members.items() if _fixed(one.post, axes) == own)


@dataclass(frozen=True, slots=True)
class Alarm:
    """A finding, and what tells it from others: the same `key` is told once.

    Attributes:
        culprits: ranks whose going on would end it.
    """

    finding: Finding
    key: str
    may_abort: bool
    culprits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Wait:
    """Ranks in one place, and those without whom it does not end."""

    where: str
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    step: int


def _fixed(post: Post, axes: Sequence[str]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((axis, value) for axis, value in post.coordinates.items() if axis not in axes))


def judge(view: View) -> list[Alarm]:
    """What is wrong, the gravest first; empty where nothing is."""
    waits = _waits(view)
    found: list[Alarm] = []
    if view.dead:
        if not view.are_more_dying:
            found.append(_dead(view, waits))
    elif blocked := [wait for wait in waits if wait.missing]:
        if not view.fading & {rank for wait in blocked for rank in wait.missing}:
            found.append(_stalled(view, blocked))
    elif waits:
        found.append(_all_joined(view, waits[0]))
    else:
        found += _behind(view)
    return [*found, *_background(view)]


def _waits(view: View) -> list[_Wait]:
    """Places in which a main lane has been for long enough, first those that most are in."""
    found: dict[tuple[str, tuple[int, ...]], tuple[list[int], int]] = {}
    for member in view.live:
        lane = member.lane(view.main)
        still_s = member.still_s.get(view.main, 0)
        if lane is None or lane.inside is None or still_s < view.silence_s / WITH_PARTS:
            continue
        place = _place(view, member, lane, lane.inside)
        if place is not None:
            ranks, _ = found.setdefault(place, ([], lane.step))
            ranks.append(member.rank)
    waits = [_Wait(where, tuple(ranks), missing, step) for (where, missing), (ranks, step) in found.items()]
    # A call that all have joined is a slow one as far as anybody knows.
    slow = [
        wait
        for wait in waits
        if view.longest(wait.ranks) >= (view.silence_s if wait.missing else SLOW_PARTS * view.silence_s)
    ]
    return sorted(slow, key=lambda wait: (-len(wait.ranks), wait.ranks))


def _place(view: View, member: Member, lane: LanePost, inside: Inside) -> tuple[str, tuple[int, ...]] | None:
    """Where a lane waits, and for whom; None where it waits for nobody, or is itself behind."""
    if inside.meeting is not None:
        return place_text(inside.meeting), _not_joined(view, member.rank, inside, inside.meeting)
    for call in reversed(inside.calls):
        kind = view.kinds.get(str(call.get("kind")))
        if kind is None or not kind.agree:
            continue
        head = member.head(lane.name, kind.agree)
        others = [rank for rank in view.partners(member.rank, kind.agree) if rank != member.rank]
        if not others or any(view.members[rank].head(lane.name, kind.agree) > head for rank in others):
            return None
        missing = tuple(
            rank for rank in others if not _is_in(view.members[rank].lane(lane.name), kind.name)
        ) + tuple(view.unheard)
        # A call that all are in is a slow one as far as anybody knows.
        return (_call_text(call), missing) if missing else None
    return None


def _is_in(lane: LanePost | None, kind: str) -> bool:
    return (
        lane is not None
        and lane.inside is not None
        and any(call.get("kind") == kind for call in lane.inside.calls)
    )


def _not_joined(
    view: View, rank: int, inside: Inside, meeting: Mapping[str, Any], name: str = ""
) -> tuple[int, ...]:
    """Members of the meeting's group whose lane `name`, else the main one, has not come to it."""
    seq, peer = int(meeting.get("group_seq", 0)), meeting.get("peer")
    is_message = type(peer) is int
    wanted = [peer] if type(peer) is int else inside.members
    key = meeting_key(meeting, answer_to=rank if is_message else None)
    missing = []
    for other in wanted:
        member = view.members.get(other)
        if other == rank or (member is None and other not in view.unheard):
            continue
        lane = member.lane(name or view.main) if member is not None else None
        own = lane.inside if lane is not None else None
        # One that moves has not said where it is: it is not in this call, or it would stand still.
        reached = -1 if own is None else max(own.entered.get(key, -1), own.left.get(key, -1))
        if reached < seq:
            missing.append(other)
    return tuple(missing)


def _dead(view: View, waits: Sequence[_Wait]) -> Alarm:
    dead = view.dead
    seconds = max(view.members[rank].age_s for rank in dead)
    told = [f"{ranks_text((rank,))} said nothing for {view.members[rank].age_s:.1f} s" for rank in dead[:4]]
    fates = {view.members[rank].fate for rank in dead if view.members[rank].fate}
    text = "; ".join(
        f"{said}{_fate(view.members[rank])}; its last call: {_last(view, rank)}"
        for said, rank in zip(told, dead, strict=False)
    )
    waiting = tuple(sorted({rank for wait in waits for rank in wait.ranks}))
    text += _waiting_text(waits)
    # One that is there may go on: it holds the interpreter, or its thread has ended.
    level: Level = "high" if fates and fates <= set(GONE) else "medium"
    finding = Finding(
        "dead",
        14,
        DEAD,
        text,
        level,
        (f"no post for {seconds:.1f} s", *sorted(fates)),
        culprit=dead,
        victims=waiting,
        silent=dead,
        victim=_victim(waits),
        evidence=_evidence(view, dead, "silent", waiting),
    )
    return Alarm(finding, f"dead {dead}", True, dead)


def _fate(member: Member) -> str:
    return f" ({member.fate})" if member.fate else ""


def _stalled(view: View, waits: Sequence[_Wait]) -> Alarm:
    waiting = tuple(sorted({rank for wait in waits for rank in wait.ranks}))
    missing = tuple(sorted({rank for wait in waits for rank in wait.missing}))
    silent = tuple(rank for rank in missing if rank not in waiting)
    if not silent:
        return _circle(view, waits, waiting)
    wait = next(wait for wait in waits if set(wait.missing) & set(silent))
    seconds = view.longest(wait.ranks)
    stands = "; ".join(_stand_text(view, rank) for rank in silent[:4])
    # Who waits alone may be the one that came to what nobody else was to come to.
    is_majority = len(waiting) > len(silent)
    is_tie = not is_majority
    finding = Finding(
        "stall",
        11,
        STALL,
        f"{ranks_text(silent)} did not come to {wait.where} for {seconds:.1f} s: {stands}"
        + _waiting_text(waits),
        "medium" if is_majority else "low",
        (
            f"{len(waiting)} of {len(waiting) + len(silent)} wait",
            *(("those who wait are not more than those who did not come",) if is_tie else ()),
        ),
        culprit=silent if is_majority else (),
        victims=waiting if is_majority else (),
        silent=silent,
        unknown=() if is_majority else tuple(sorted({*waiting, *silent})),
        victim=_victim(waits),
        evidence=_evidence(view, silent, "silent", waiting),
    )
    return Alarm(finding, f"stall {silent} {wait.where}", True, silent)


def _circle(view: View, waits: Sequence[_Wait], waiting: tuple[int, ...]) -> Alarm:
    """Everybody who is waited for waits too, at another place."""
    crowd = waits[0].ranks
    is_crowd = 2 * len(crowd) > len(waiting)
    odd = tuple(rank for rank in waiting if rank not in crowd) if is_crowd else ()
    places = "; ".join(f"{ranks_text(wait.ranks)} in {wait.where}" for wait in waits)
    finding = Finding(
        "stall",
        11,
        STALL,
        f"{ranks_text(waiting)} wait for each other: {places}",
        "medium" if is_crowd else "undetermined",
        (f"{len(crowd)} of {len(waiting)} are in one place",),
        culprit=odd,
        victims=crowd if is_crowd else (),
        silent=odd,
        unknown=() if is_crowd else waiting,
        victim=_victim(waits),
        evidence=_evidence(view, odd, "silent", crowd if is_crowd else waiting),
    )
    return Alarm(finding, f"circle {places}", True, odd or waiting)


def _all_joined(view: View, wait: _Wait) -> Alarm:
    seconds = view.longest(wait.ranks)
    finding = Finding(
        "stall",
        13,
        UNFINISHED,
        f"every member entered {wait.where} and none has left it for {seconds:.1f} s",
        "low",
        ("all joined; it may only be slow",),
        victims=wait.ranks,
        victim=_victim([wait]),
        evidence=_evidence(view, (), "silent", wait.ranks),
    )
    return Alarm(finding, f"joined {wait.where}", False, wait.ranks)


def _behind(view: View) -> list[Alarm]:
    """Ranks that stand still, while others that must agree with them are through with more."""
    running = {member.rank for member in view.live} - view.fading
    for axes, times in sorted(view.behind_s.items()):
        late = sorted(
            rank
            for rank, seconds in times.items()
            if rank in running
            and seconds >= view.silence_s
            and view.members[rank].still_s.get(view.main, 0) >= view.silence_s
        )
        if late:
            return [_stands_behind(view, axes, late)]
    return []


def _stands_behind(view: View, axes: tuple[str, ...], late: Sequence[int]) -> Alarm:
    heads = {
        rank: view.members[rank].head(view.main, axes)
        for rank in view.partners(late[0], axes)
        if rank in {member.rank for member in view.live}
    }
    ahead = tuple(sorted(rank for rank in heads if rank not in late))
    seconds = min(view.behind_s[axes][rank] for rank in late)
    most, least = max(heads.values()), min(heads[rank] for rank in late if rank in heads)
    calls = "1 call" if most - least == 1 else f"{most - least} calls"
    is_majority = len(ahead) > len(late)
    stands = "; ".join(_stand_text(view, rank) for rank in late[:4])
    did = "is" if len(ahead) == 1 else "are"
    odd = tuple(late) if is_majority else ahead if len(late) > len(ahead) else ()
    finding = Finding(
        "frozen",
        15,
        FROZEN,
        f"{ranks_text(late)} stood still for {seconds:.1f} s at call {least}: {stands}; "
        f"{ranks_text(ahead)} {did} {calls} further on",
        "medium" if is_majority else "low",
        (f"{len(ahead)} of {len(heads)} ranks are ahead",),
        culprit=odd,
        silent=tuple(late) if is_majority else (),
        unknown=() if odd else tuple(sorted(heads)),
        victims=() if not odd else tuple(sorted(set(heads) - set(odd))),
        evidence=_evidence(view, late, "silent", ahead),
    )
    return Alarm(finding, f"behind {late} {least}", is_majority, tuple(late))


def _background(view: View) -> list[Alarm]:
    """Lanes that work for the one that decides, and that never came back: first those that are in a store.

    Who waits in a collective for the rank of such a lane is told with it, and not by itself.
    """
    found = []
    stuck = _stuck(view)
    for member in view.live:
        for lane in member.post.lanes:
            seconds = member.still_s.get(lane.name, 0)
            inside = lane.inside
            if lane.name == view.main or inside is None or seconds < SLOW_PARTS * view.silence_s:
                continue
            if inside.state not in (BACKEND, COLLECTIVE) and not inside.calls and inside.meeting is None:
                continue
            if inside.state != BACKEND and stuck & set(_awaited(view, member.rank, lane)):
                continue
            found.append((inside.state != BACKEND, _lane_alarm(view, member, lane, inside, seconds)))
    return [alarm for _, alarm in sorted(found, key=lambda entry: entry[0])]


def _stuck(view: View) -> frozenset[int]:
    """Ranks of which a lane is in a store, and has been for a good part of what is told."""
    return frozenset(
        member.rank
        for member in view.live
        for lane in member.post.lanes
        if lane.name != view.main
        and lane.inside is not None
        and lane.inside.state == BACKEND
        and member.still_s.get(lane.name, 0) >= SLOW_PARTS * view.silence_s / WITH_PARTS
    )


def _awaited(view: View, rank: int, lane: LanePost) -> tuple[int, ...]:
    """For whom a lane waits in a collective."""
    inside = lane.inside
    if inside is None or inside.meeting is None:
        return ()
    return _not_joined(view, rank, inside, inside.meeting, lane.name)


def _lane_alarm(view: View, member: Member, lane: LanePost, inside: Inside, seconds: float) -> Alarm:
    where = place_text(inside.meeting) if inside.meeting is not None else ""
    where = where or (f"the {inside.state}" if inside.state else "") or _call_text(inside.calls[-1])
    op = inside.last.get("op")
    where += f" with op {op}" if inside.state == BACKEND and type(op) is int else ""
    text = f"rank {member.rank}: its {lane.name} lane has been in {where} for {seconds:.1f} s"
    waiting: dict[str, list[int]] = {}
    if inside.state == BACKEND:
        for other in view.live:
            for own in other.post.lanes:
                if own.name != view.main and member.rank in _awaited(view, other.rank, own):
                    assert own.inside is not None
                    assert own.inside.meeting is not None
                    waiting.setdefault(place_text(own.inside.meeting), []).append(other.rank)
    for place, ranks in waiting.items():
        text += f"; {ranks_text(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {place}"
    victims = tuple(sorted({rank for ranks in waiting.values() for rank in ranks}))
    finding = Finding(
        "frozen",
        15,
        FROZEN,
        text,
        "low",
        ("it works for the lane that decides, and may only be slow",),
        unknown=(member.rank,),
        victims=victims,
        evidence=(Evidence(None, lane.seq - 1, f"unknown {member.rank}"),),
    )
    return Alarm(finding, f"background {member.rank} {lane.name} {lane.seq}", False, (member.rank,))


def _victim(waits: Sequence[_Wait]) -> Victim | None:
    return Victim(waits[0].ranks, waits[0].where, waits[0].step, None) if waits else None


def _waiting_text(waits: Sequence[_Wait]) -> str:
    return "".join(
        f"; {ranks_text(wait.ranks)} {'waits' if len(wait.ranks) == 1 else 'wait'} in {wait.where}"
        for wait in waits[:3]
    )


def _stand_text(view: View, rank: int) -> str:
    """Where a rank is that others wait for."""
    member = view.members.get(rank)
    if member is None:
        return f"{ranks_text((rank,))} was never heard"
    lane = member.lane(view.main)
    own = lane.inside if lane is not None else None
    if own is None:
        step = f" in step {lane.step}" if lane is not None else ""
        return f"{ranks_text((rank,))} goes on elsewhere{step}"
    if own.meeting is not None:
        return f"{ranks_text((rank,))} is in {place_text(own.meeting)}"
    if own.calls:
        return f"{ranks_text((rank,))} is in {_call_text(own.calls[-1])}"
    return f"{ranks_text((rank,))} is in no call, its last: {_last(view, rank)}"


def _last(view: View, rank: int) -> str:
    member = view.members[rank]
    lane = member.lane(view.main)
    if lane is None:
        return "unknown"
    own = lane.inside
    if own is None or not own.last:
        return f"unknown, in step {lane.step}"
    call = own.calls[-1] if own.calls else own.last
    return f"{_call_text(call)}, step {call.get('step', lane.step)}"


def _call_text(call: Mapping[str, Any]) -> str:
    """A record in a few words: its name, and what it is about."""
    if "group" in call and "group_seq" in call:
        return place_text(call)
    about = call.get("rid") or (f"node {call['node']}" if call.get("node") is not None else "")
    return f"{call_text(str(call.get('kind', '?')))} {about or call.get('site') or ''}".rstrip()


def _evidence(view: View, odd: Sequence[int], role: str, victims: Sequence[int]) -> tuple[Evidence, ...]:
    entries = []
    for rank, part in [*((rank, role) for rank in odd), *((rank, "victim") for rank in victims)]:
        member = view.members.get(rank)
        lane = member.lane(view.main) if member is not None else None
        seq = lane.seq - 1 if lane is not None else None
        entries.append(Evidence(None, seq, f"{part} {rank}"))
    return tuple(entries)
