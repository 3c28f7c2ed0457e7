"""Where the ranks of a run that stopped are standing, and for whom they wait.

A meeting with `enter` and no `leave` is open. A rank in one waits for every member of the group that
has not entered the same call of that group; a send or a receive waits for its peer alone.

    0  enter tp0/events #412                     waits for 3
    1  enter tp0/events #412                     waits for 3
    3  leave tp0/events #411, enter tp0/main #90 did not join #412; waits for 0 and 1

A rank is several lanes, and a group belongs to one of them. A lane that is in no meeting and that others
wait for is not accused for that: it waits for work from its own rank, so the wait goes on there, to a lane
that is in the external store, or else to the one that decides.

    0/sync  enter tp0/progress #12               waits for 1/sync
    1/sync  idle                                 waits for 1/io
    1/io    in the backend                       waits for nobody: there it is

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
from tracer.record import BACKEND, MAIN_LANE, Record

# A lane of a rank.
Node = tuple[int, str]
NS_PER_S = 1_000_000_000
# A run whose oldest wait is older than this hung for a while before it was cut. Waits younger than a tenth
# of that one are where lanes that went on happened to stand at the cut.
LASTING_MIN_NS = NS_PER_S
MOMENTARY_PARTS = 10
# A lane may be silent because it is in that very wait: then its trailer came long after its last record.
SILENT_PARTS = 2
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

    @property
    def node(self) -> Node:
        return self.lane.rank, self.lane.name

    @property
    def is_in_backend(self) -> bool:
        """Whether its last word is that it asks an external store."""
        state = self.lane.state
        return not self.open and state is not None and state.get("state") == BACKEND


@dataclass(frozen=True, slots=True)
class Wait:
    """Ranks that wait in one call of one group, and the members that have not come.

    Attributes:
        enters: rank -> its open `enter` record.
        gone: members that have left this very call.
        lost: members that came, and whose log was cut: they may have died in it.
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
    lost: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.enters))

    @property
    def parties(self) -> frozenset[int]:
        """Whoever can still end it: a message has two ends, whether or not the other one has come."""
        return frozenset((*self.enters, *self.absent, *(self.members if self.is_message else self.lost)))

    @property
    def is_message(self) -> bool:
        return _peer(self.first) is not None

    @property
    def lane(self) -> str:
        """The lane that the group belongs to."""
        return self.lanes[self.ranks[0]].name

    @property
    def waiting(self) -> tuple[Node, ...]:
        return tuple((rank, self.lanes[rank].name) for rank in self.ranks)

    @property
    def missed(self) -> tuple[Node, ...]:
        """The lanes that have not come, or of which nobody knows whether they still are in it."""
        return tuple((rank, self.lane) for rank in (*self.absent, *self.lost))

    def without(self, ranks: Sequence[int]) -> Wait | None:
        """The same wait as the other ranks see it; None if none of them is in it."""
        enters = {rank: record for rank, record in self.enters.items() if rank not in ranks}
        return replace(self, enters=enters) if enters else None

    def age(self, ends: Mapping[int, int]) -> int:
        """How long the longest of them has waited, up to the last word of its rank."""
        return max(_age(record, ends.get(rank)) for rank, record in self.enters.items())

    @property
    def silence(self) -> int:
        """How long after they came their logs were closed; 0 where no trailer says."""
        ends = {rank: (lane.source.trailer or {}).get("time_ns") for rank, lane in self.lanes.items()}
        return max(_age(record, ends[rank]) for rank, record in self.enters.items())

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
    """All waits of a run, earliest first, and what the wait-for graph says.

    Attributes:
        edges: lane -> the lanes that it waits for.
        roots: groups of lanes that wait for nobody outside themselves.
    """

    standings: tuple[Standing, ...]
    waits: tuple[Wait, ...]
    edges: Mapping[Node, frozenset[Node]]
    roots: tuple[tuple[Node, ...], ...]

    @classmethod
    def of(cls, standings: tuple[Standing, ...], waits: Sequence[Wait]) -> Stall:
        edges = _edges(standings, waits)
        ordered = tuple(sorted(waits, key=lambda wait: wait.order))
        return cls(standings, ordered, edges, tuple(roots(edges)))

    @property
    def blamed(self) -> frozenset[Node]:
        """Lanes at the root that somebody waits for."""
        targets = {node for nodes in self.edges.values() for node in nodes}
        return frozenset(node for group in self.roots for node in group if node in targets)

    def lasting(self) -> Stall:
        """The same without the waits that were momentary, where another had lasted: see `LASTING_MIN_NS`.

        Every age is told by the clock of the rank that waits, up to its last record: no two clocks are
        compared. Of several roots those that have been in the backend for as long go before the others.
        """
        ends = {rank: max(times) for rank, times in self._times().items()}
        ages = {id(wait): wait.age(ends) for wait in self.waits}
        oldest = max(ages.values(), default=0)
        if oldest <= LASTING_MIN_NS:
            return self
        kept = tuple(
            wait
            for wait in self.waits
            if ages[id(wait)] * MOMENTARY_PARTS >= oldest or wait.silence * SILENT_PARTS >= oldest
        )
        found = Stall.of(self.standings, kept)
        stuck = {
            one.node
            for one in self.standings
            if one.is_in_backend and _age(one.last, ends.get(one.rank)) * MOMENTARY_PARTS >= oldest
        }
        preferred = tuple(group for group in found.roots if stuck & set(group) & found.blamed)
        return replace(found, roots=preferred) if preferred else found

    def _times(self) -> dict[int, list[int]]:
        """Rank -> when its lanes wrote their last records."""
        found: dict[int, list[int]] = {}
        for one in self.standings:
            if one.last is not None and type(time := one.last.get("time_ns")) is int:
                found.setdefault(one.rank, []).append(time)
        return found

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

    def wait_of(self, rank: int, lane: str | None = None) -> Wait | None:
        """The wait that a rank is in, or one lane of it."""
        return next(
            (
                wait
                for wait in self.waits
                if rank in wait.enters and (lane is None or wait.lanes[rank].name == lane)
            ),
            None,
        )

    def standing(self, rank: int, lane: str | None = None) -> Standing | None:
        """Where a lane of a rank ended; the one that decides, if there is that, when none is named."""
        own = [one for one in self.standings if one.rank == rank and lane in (None, one.lane.name)]
        return min(own, key=lambda one: (one.last is None, one.lane.name != MAIN_LANE), default=None)

    def in_backend(self, ranks: Sequence[int]) -> tuple[Standing, ...]:
        """Lanes of `ranks` that ended inside an external store."""
        return tuple(one for one in self.standings if one.rank in ranks and one.is_in_backend)

    def lanes_for(self, rank: int) -> tuple[str, ...]:
        """The lanes that say why a rank did not come: the one that is missed, then those at the root."""
        missed = [lane for wait in self.waits for member, lane in wait.missed if member == rank]
        at_root = [lane for member, lane in sorted(self.blamed) if member == rank]
        stuck = [one.lane.name for one in self.in_backend((rank,))]
        return tuple(dict.fromkeys([*missed[:1], *at_root] or stuck or [MAIN_LANE]))


def _age(record: Record | None, end: Any) -> int:
    """Nanoseconds from a record to a later time of the same clock; 0 where one of them says none."""
    begin = None if record is None else record.get("time_ns")
    return end - begin if type(begin) is int and type(end) is int else 0


def _edges(standings: tuple[Standing, ...], waits: Sequence[Wait]) -> dict[Node, frozenset[Node]]:
    """Lane -> lanes that it waits for: in a meeting, or for work from its own rank."""
    edges: dict[Node, set[Node]] = {}
    for wait in waits:
        for node in wait.waiting:
            edges.setdefault(node, set()).update(set(wait.missed) - {node})
    own: dict[int, dict[str, Standing]] = {}
    for standing in standings:
        own.setdefault(standing.rank, {})[standing.lane.name] = standing
    todo = [node for wait in waits for node in wait.missed]
    while todo:
        node = todo.pop()
        if node in edges:
            continue
        edges[node] = _waits_inside(node, own.get(node[0], {}))
        todo += edges[node]
    return {node: frozenset(targets) for node, targets in edges.items()}


def _waits_inside(node: Node, lanes: Mapping[str, Standing]) -> set[Node]:
    """The lanes of its own rank that a lane in no meeting waits for."""
    rank, name = node
    standing = lanes.get(name)
    if standing is None or standing.is_in_backend:
        return set()
    busy = {(rank, other) for other, one in lanes.items() if one.is_in_backend}
    if busy or name == MAIN_LANE:
        return busy
    return {(rank, MAIN_LANE)} if MAIN_LANE in lanes else set()


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
    """Where a rank is, in a few words; of its lanes, those that matter to whoever waits."""
    texts = [_lane_text(stall, rank, lane) for lane in stall.lanes_for(rank)]
    return ", ".join(dict.fromkeys(texts))


def _lane_text(stall: Stall, rank: int, lane: str) -> str:
    own = "" if lane == MAIN_LANE else f"its {lane} lane "
    wait = stall.wait_of(rank, lane)
    if wait is not None:
        return f"{own}waits in {wait.where}"
    standing = stall.standing(rank, lane)
    if standing is None:
        return "left no log" if stall.standing(rank) is None else f"{own}left no log"
    if standing.lane.outcome is None:
        return "its log was cut"
    if standing.last is None:
        return f"{own}wrote nothing"
    if standing.is_in_backend:
        return f"{own}is in the backend{_since(stall, standing)}"
    if standing.lane.is_idle:
        return f"{own}is idle"
    inside = standing.open_call or standing.last
    return f"{own}last seen in {inside['kind']}, step {standing.last['step']}"


def _since(stall: Stall, standing: Standing) -> str:
    """With which op a lane is where it is, and for how long by its rank's own clock."""
    state = standing.lane.state
    assert state is not None
    op = state.get("op")
    told = "" if op is None else f" with op {op}"
    times = [one.last.get("time_ns") for one in stall.standings if one.rank == standing.rank and one.last]
    known = [time for time in (*times, state.get("time_ns")) if type(time) is int]
    if type(state.get("time_ns")) is not int or not known:
        return told
    seconds = (max(known) - state["time_ns"]) / NS_PER_S
    return f"{told} for {seconds:.1f} s" if seconds >= 0.05 else told


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
    lost = tuple(rank for rank, lane in sorted(lanes.items()) if lane.outcome is None)
    return Wait(group, group_seq, members, enters, lanes, absent, tuple(sorted(gone)), mismatch, lost)


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
    # What it sent may never have left it.
    lost = (peer,) if came and all(standing.lane.outcome is None for standing in came) else ()
    enters, lanes = {own.rank: record}, {own.rank: own.lane}
    return Wait(group, group_seq, members, enters, lanes, absent, (), mismatch, lost)


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
