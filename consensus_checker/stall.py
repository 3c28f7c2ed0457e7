"""Where the ranks of a run that stopped are standing, and for whom they wait.

A meeting with `enter` and no `leave` is open. A rank in one waits for every member of the group that
has not entered the same call of that group; a send or a receive waits for its peer alone.

    0  enter tp0/events #412                     waits for 3
    1  enter tp0/events #412                     waits for 3
    3  leave tp0/events #411, enter tp0/main #90 did not join #412; waits for 0 and 1

Owns the frontier and the graph. It says who did not join; why, only a divergence can say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from consensus_checker.context import follow_calls
from consensus_checker.graph import roots
from consensus_checker.history import History, Lane
from consensus_checker.words import place_text
from tracer.record import Record

PAIRWISE = ("send", "recv", "receive", "isend", "irecv")


@dataclass(frozen=True, slots=True)
class Standing:
    """The end of one lane.

    Attributes:
        open: meetings entered and not left, in which the lane can still be; oldest first.
        entered: group -> the newest meeting entered; left: group -> the newest group_seq left.
        messages: group, direction and peer -> the newest send or receive entered.
        last: the last record of all, or None for an empty lane.
    """

    lane: Lane
    open: tuple[Record, ...]
    entered: Mapping[str, Record]
    left: Mapping[str, int]
    messages: Mapping[tuple[str, str, int], int]
    last: Record | None
    open_call: Record | None

    @property
    def rank(self) -> int:
        return self.lane.rank


@dataclass(frozen=True, slots=True)
class Wait:
    """Ranks that wait in one call of one group, and the members that have not come.

    Attributes:
        enters: rank -> its open `enter` record.
        gone: members that have left this very call.
        mismatch: fields in which the members that did enter this call differ.
    """

    group: str
    group_seq: int
    members: tuple[int, ...]
    enters: Mapping[int, Record]
    lanes: Mapping[int, Lane]
    absent: tuple[int, ...]
    gone: tuple[int, ...]
    mismatch: tuple[str, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.enters))

    @property
    def parties(self) -> frozenset[int]:
        return frozenset((*self.enters, *self.absent))

    def without(self, ranks: Sequence[int]) -> Wait | None:
        """The same wait as the other ranks see it; None if none of them is in it."""
        enters = {rank: record for rank, record in self.enters.items() if rank not in ranks}
        return replace(self, enters=enters) if enters else None

    @property
    def first(self) -> Record:
        return self.enters[self.ranks[0]]

    @property
    def where(self) -> str:
        return place_text(self.first)

    @property
    def order(self) -> tuple[int, int, str, int]:
        record = min(self.enters.values(), key=lambda record: (record["step"], record["seq"]))
        return (int(record["step"]), int(record["seq"]), self.group, self.group_seq)


@dataclass(frozen=True, slots=True)
class Stall:
    """All waits of a run, earliest first, and the roots of the wait-for graph."""

    standings: tuple[Standing, ...]
    waits: tuple[Wait, ...]
    roots: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, standings: tuple[Standing, ...], waits: Sequence[Wait]) -> Stall:
        edges: dict[int, set[int]] = {}
        for wait in waits:
            for rank in wait.ranks:
                edges.setdefault(rank, set()).update(set(wait.absent) - {rank})
        return cls(standings, tuple(sorted(waits, key=lambda wait: wait.order)), tuple(roots(edges)))

    def split(self, ranks: Sequence[int]) -> tuple[Stall, Stall]:
        """The waits that have to do with `ranks`, directly or through other waits; and the rest."""
        reached = set(ranks)
        rest = list(self.waits)
        own: list[Wait] = []
        while found := [wait for wait in rest if wait.parties & reached]:
            own += found
            rest = [wait for wait in rest if not wait.parties & reached]
            reached.update(*(wait.parties for wait in found))
        return Stall.of(self.standings, own), Stall.of(self.standings, rest)

    def completed_everywhere(self, wait: Wait) -> bool:
        """Whether the call before this one, on the same group, was left by every member."""
        left = {
            standing.rank
            for standing in self.standings
            if standing.left.get(wait.group, -1) >= wait.group_seq - 1
        }
        return wait.group_seq > 0 and set(wait.members) <= left

    def wait_of(self, rank: int) -> Wait | None:
        return next((wait for wait in self.waits if rank in wait.enters), None)


def find_stall(history: History) -> Stall:
    """Read every lane to its end and say who waits for whom."""
    meetings = frozenset(kind.name for kind in history.kinds.values() if kind.role == "meeting")
    decisions = frozenset(kind.name for kind in history.kinds.values() if kind.role == "decision")
    standings = tuple(_standing(lane, meetings, decisions) for lane in history.lanes)
    found: dict[tuple[str, int, int], list[tuple[Standing, Record]]] = {}
    for standing in standings:
        for record in standing.open:
            # A pair of ranks has its own place in a group: each sender is another wait.
            pair = standing.rank if _peer(record) is not None else -1
            key = (str(record.get("group", "")), int(record.get("group_seq", 0)), pair)
            found.setdefault(key, []).append((standing, record))
    return Stall.of(
        standings, [_wait(standings, group, seq, entries) for (group, seq, _), entries in found.items()]
    )


def stands_text(history: History, stall: Stall, rank: int) -> str:
    """Where a rank is, in a few words."""
    wait = stall.wait_of(rank)
    if wait is not None:
        return f"waits in {wait.where}"
    standing = next((standing for standing in stall.standings if standing.rank == rank), None)
    if standing is None:
        return "left no log"
    if standing.lane.outcome is None:
        return "its log was cut"
    if standing.last is None:
        return "wrote nothing"
    inside = standing.open_call or standing.last
    return f"last seen in {inside['kind']}, step {standing.last['step']}"


def _standing(lane: Lane, meetings: frozenset[str], decisions: frozenset[str]) -> Standing:
    opened: list[Record] = []
    entered: dict[str, Record] = {}
    left: dict[str, int] = {}
    messages: dict[tuple[str, str, int], int] = {}
    calls: list[Record] = []
    last: Record | None = None
    for record in lane.records():
        kind = record["kind"]
        if kind in ("header", "trailer"):
            continue
        last = record
        follow_calls(calls, record)
        if kind not in meetings:
            if kind in decisions and opened:
                # Whoever decides is not inside a collective: the leave of that one was not written.
                opened = [enter for enter in opened if _peer(enter) is not None]
            continue
        group, seq = str(record.get("group", "")), int(record.get("group_seq", 0))
        peer = _peer(record)
        if record.get("phase") == "enter":
            if peer is None:
                opened = [enter for enter in opened if _peer(enter) is not None]
            else:
                messages[group, _direction(record), peer] = seq
            opened.append(record)
            entered[group] = record
        elif record.get("phase") == "leave":
            left[group] = max(seq, left.get(group, seq))
            opened = [
                enter
                for enter in opened
                if (enter.get("group", ""), enter.get("group_seq", 0)) != (group, seq)
            ]
    # Whoever is done waits for nobody: it was shut down in the middle of a vote. And a lane that lost
    # its meetings from some point on does not say where it stands.
    if lane.outcome == "completed" or meetings & set(lane.dropped):
        opened = []
    return Standing(lane, tuple(opened), entered, left, messages, last, calls[-1] if calls else None)


def _wait(
    standings: tuple[Standing, ...],
    group: str,
    group_seq: int,
    entries: list[tuple[Standing, Record]],
) -> Wait:
    enters = {standing.rank: record for standing, record in entries}
    lanes = {standing.rank: standing.lane for standing, _ in entries}
    peer = _peer(entries[0][1])
    if peer is not None:
        return _wait_for_peer(standings, group, group_seq, entries[0][0], entries[0][1], peer)
    declared = [lane.header.get("groups", {}).get(group, ()) for lane in lanes.values()]
    known = {rank for members in declared for rank in members} | set(enters)
    at: dict[int, int] = {}
    same: list[Record] = []
    for standing in standings:
        record = standing.entered.get(group)
        if record is not None and standing.rank in known:
            at[standing.rank] = max(at.get(standing.rank, -1), int(record.get("group_seq", 0)))
            if record.get("group_seq", 0) == group_seq:
                same.append(record)
    absent = tuple(rank for rank in sorted(known) if at.get(rank, -1) < group_seq)
    gone = {
        standing.rank
        for standing in standings
        if standing.rank in known - set(enters) and standing.left.get(group, -1) >= group_seq
    }
    mismatch = _differing(same, ("op", "numel", "purpose"))
    members = tuple(sorted(known))
    return Wait(group, group_seq, members, enters, lanes, absent, tuple(sorted(gone)), mismatch)


def _wait_for_peer(
    standings: tuple[Standing, ...], group: str, group_seq: int, own: Standing, record: Record, peer: int
) -> Wait:
    """A send waits for the receive of its peer, a receive for the send; nothing else answers it."""
    answer = "recv" if _direction(record) == "send" else "send"
    came = [
        standing
        for standing in standings
        if standing.rank == peer and standing.messages.get((group, answer, own.rank), -1) >= group_seq
    ]
    same = [record]
    for standing in came:
        theirs = standing.entered[group]
        if theirs.get("group_seq", 0) == group_seq and _direction(theirs) == answer:
            same.append(theirs)
    # A send meets a receive: their ops differ by nature.
    mismatch = _differing(same, ("numel", "purpose"))
    members = tuple(sorted({own.rank, peer}))
    absent = () if came else (peer,)
    return Wait(group, group_seq, members, {own.rank: record}, {own.rank: own.lane}, absent, (), mismatch)


def _differing(records: Sequence[Record], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if len({repr(record.get(name)) for record in records}) > 1)


def _direction(record: Record) -> str:
    return "send" if str(record.get("op", "")).removeprefix("i").startswith("send") else "recv"


def _peer(record: Record) -> int | None:
    """The one rank that a send or receive waits for; None for a call of the whole group."""
    peer: Any = record.get("peer")
    if (
        isinstance(peer, int)
        and not isinstance(peer, bool)
        and str(record.get("op", "")).startswith(PAIRWISE)
    ):
        return peer
    return None
