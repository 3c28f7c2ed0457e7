"""Transfer queues of every rank, rebuilt from its log: what was in them at any step, and in which state.

    write, load   transfer_enqueue ... transfer_done ... transfer_ack      SGLang: ... acks {count, left}
    prefetch      prefetch_submit .. query .. prefetch_hit .. progress .. prefetch_ack | prefetch_insert
    backup        storage_backup .. storage_write .. storage_ack           SGLang: ... storage_acks_agreed

A step is the only clock: it counts alike on all ranks of a replica, and the lanes beside the scheduler's
carry the step at which it was. *Done* is what this rank saw (its bytes have moved), *acked* what the group
has applied.

What a log does not say is not guessed: an ack of something whose beginning a ring has dropped is counted, an
age without its beginning is none, and where a log ends early the queue is what it was there.
"""

from __future__ import annotations

import gc
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from tracer.log import LaneLog, Layout, Run
from tracer.plausible import Count, Integer
from tracer.record import MAIN_LANE

QUEUES = ("write", "load", "prefetch", "backup")
# What a rank counts by itself at an event round, and what the group makes of it.
COUNTS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "write": (("writes_done", "writes_agreed"),),
    "load": (("loads_done", "loads_agreed"),),
    "prefetch": (("hits_ready", "hits_agreed"), ("prefetch_acks_ready", "prefetch_acks_agreed")),
    "backup": (("storage_acks_ready", "storage_acks_agreed"),),
}
NEVER = (1 << 62) - 1
# Where a transfer is, in words for people and programs alike.
BEGUN, IN_FLIGHT, DONE, ACKED = "begun", "in flight", "done", "acked"
ASKING, ANSWERED, READING, GONE = "asking", "answered", "reading", "ended"


class _Line(msgspec.Struct):
    """The fields that any queue needs; whatever type they have, for only a whole line decides what counts."""

    seq: Count
    kind: str
    step: Integer
    time_ns: Integer
    phase: str = ""
    queue: Any = None
    op: Any = None
    nodes: Any = None
    node: Any = None
    pages: Any = None
    tokens: Any = None
    rid: Any = None
    attempt: Any = None
    outcome: Any = None
    ack: Any = None
    count: Any = None
    left: Any = None
    round: Any = None
    writes_done: Any = None
    writes_agreed: Any = None
    loads_done: Any = None
    loads_agreed: Any = None
    hits_ready: Any = None
    hits_agreed: Any = None
    prefetch_acks_ready: Any = None
    prefetch_acks_agreed: Any = None
    storage_acks_ready: Any = None
    storage_acks_agreed: Any = None
    agreed_pages: Any = None
    local_pages: Any = None
    written_pages: Any = None


_LINE = msgspec.json.Decoder(_Line)
LINES = Layout(_LINE.decode, _LINE.decode_lines, attrgetter("seq"), attrgetter("kind"), lambda records: True)


@dataclass(slots=True, eq=False)
class Transfer:
    """One transfer on one rank; steps are NEVER where the log has no such moment.

    Attributes:
        op: its number in this queue; None where the log counts none.
        pages: of KV; None where not told.
        middle: of a prefetch, the steps at which it came further, with the word for it.
        done_step: this rank has seen its bytes moved.
        end_step: it was applied, or given up; `end` says which.
        end_ns: of that record, by this rank's clock.
        told: what was found or written, in the log's own words.
    """

    op: int | None
    nodes: tuple[int, ...]
    pages: int | None
    rid: str
    begin_step: int
    begin_ns: int
    begin_seq: int
    middle: list[tuple[int, str]] | None = None
    done_step: int = NEVER
    end_step: int = NEVER
    end_ns: int = 0
    end: str = ""
    told: dict[str, int] | None = None

    @property
    def has_ended(self) -> bool:
        return self.end_step != NEVER

    @property
    def steps(self) -> int | None:
        """From its beginning to its end."""
        return self.end_step - self.begin_step if self.has_ended else None

    def moves(self) -> Iterator[tuple[int, str]]:
        """What happened to it when, in order."""
        yield self.begin_step, BEGUN
        yield from self.middle or ()
        if self.done_step != NEVER:
            yield self.done_step, DONE
        if self.has_ended:
            yield self.end_step, self.end

    def to_json(self, step: int) -> dict[str, Any]:
        """As it is at the end of a step. `bytes` is null: no log says how large a page is."""
        return {
            "op": self.op,
            "nodes": list(self.nodes),
            "pages": self.pages,
            "bytes": None,
            "rid": self.rid or None,
            "state": self.state(step),
            "begin_step": self.begin_step,
            "done_step": self.done_step if self.done_step != NEVER else None,
            "end_step": self.end_step if self.has_ended else None,
            "age_steps": step - self.begin_step,
            "seconds": round((self.end_ns - self.begin_ns) / 1e9, 6) if self.has_ended else None,
            **(self.told or {}),
        }

    def state(self, step: int) -> str:
        """Where it is at the end of a step, which is not before its beginning."""
        if self.end_step <= step:
            return self.end
        if self.done_step <= step:
            return DONE
        word = IN_FLIGHT if self.middle is None else ASKING
        for since, then in self.middle or ():
            if since <= step:
                word = then
        return word


class Round(NamedTuple):
    """One event round on one rank: what it counted by itself, and what was applied; None where not told."""

    step: int
    number: int | None
    saw: tuple[int | None, ...]
    applied: tuple[int | None, ...]


@dataclass(slots=True)
class RankQueue:
    """One queue of one rank.

    Attributes:
        place: coordinates, such as `{"dp": 0, "pp": 1, "cp": 0, "tp": 0}`.
        transfers: in the order in which they began.
        rounds: in order of steps.
        unknown: acks of transfers whose beginning is not in the log.
        last_step: the last step that this rank's scheduler has recorded.
        limits: why something is not known, each as a sentence.
    """

    rank: int
    place: Mapping[str, int]
    queue: str
    transfers: list[Transfer] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    unknown: int = 0
    last_step: int = -1
    limits: tuple[str, ...] = ()
    _begins: array[int] = field(default_factory=lambda: array("q"))
    _ends_max: array[int] = field(default_factory=lambda: array("q"))
    _round_steps: array[int] = field(default_factory=lambda: array("q"))

    def seal(self) -> None:
        """Make the index; nothing is added afterwards."""
        for each in self.transfers:
            if each.middle:
                # Lanes are read one after the other; an answer comes before what is made of it.
                each.middle.sort(key=lambda entry: (entry[0], entry[1] != ANSWERED))
        self._begins = array("q", [each.begin_step for each in self.transfers])
        self._ends_max = array("q", accumulate((each.end_step for each in self.transfers), max))
        self._round_steps = array("q", [each.step for each in self.rounds])

    def at(self, step: int) -> list[Transfer]:
        """What is in the queue at the end of a step, oldest first."""
        until = bisect_right(self._begins, step)
        # Up to here all had ended: an end that comes late keeps those behind it, which are looked at.
        since = bisect_right(self._ends_max, step, 0, until)
        return [each for each in self.transfers[since:until] if each.end_step > step]

    def begun_in(self, step: int) -> list[Transfer]:
        """What began in that very step."""
        since = bisect_left(self._begins, step)
        return self.transfers[since : bisect_right(self._begins, step, since)]

    def round_at(self, step: int) -> Round | None:
        """The event round of that very step."""
        at = bisect_right(self._round_steps, step) - 1
        return self.rounds[at] if at >= 0 and self.rounds[at].step == step else None

    def moving_steps(self) -> set[int]:
        """Steps in which something happened."""
        steps = {each.begin_step for each in self.transfers}
        steps |= {each.done_step for each in self.transfers}
        steps |= {each.end_step for each in self.transfers}
        steps |= {since for each in self.transfers if each.middle for since, _word in each.middle}
        return steps - {NEVER}

    def moves_in(self, step: int) -> list[tuple[str, Transfer]]:
        """What happened in that very step, and to which transfer, oldest first."""
        touched = [*self.at(step - 1), *self.begun_in(step)]
        return [(word, each) for each in touched for since, word in each.moves() if since == step]


@dataclass(frozen=True, slots=True)
class Replay:
    """One queue on all ranks, and the steps at which it moved."""

    queue: str
    ranks: tuple[RankQueue, ...]
    steps: tuple[int, ...]
    missing: tuple[int, ...]

    @property
    def counts(self) -> tuple[tuple[str, str], ...]:
        """Fields of an event round that are this queue's: counted by a rank, applied by the group."""
        return COUNTS[self.queue]

    @property
    def last_step(self) -> int:
        return max((each.last_step for each in self.ranks), default=-1)

    def parts_at(self) -> int | None:
        """First step at which ranks of one replica applied different counts; None where they never did."""
        first: int | None = None
        by_dp: dict[int, list[RankQueue]] = {}
        for each in self.ranks:
            by_dp.setdefault(each.place.get("dp", 0), []).append(each)
        for members in by_dp.values():
            applied = [{round_.step: round_.applied for round_ in each.rounds} for each in members]
            common = set(applied[0]).intersection(*applied[1:])
            for step in common:
                if first is not None and step >= first:
                    continue
                told = zip(*(row[step] for row in applied), strict=True)
                if any(len({count for count in counts if count is not None}) > 1 for counts in told):
                    first = step
        return first


def replay(run: Run, queue: str, *, ranks: Sequence[int] | None = None) -> Replay:
    """Rebuild one queue on every rank, or on some.

    Reads each log once; a lane that was cut gives what it has.
    """
    assert queue in QUEUES, queue
    wanted = set(run.ranks if ranks is None else ranks)
    with _uncollected():
        found = [
            _rank_queue(rank, [lane for lane in run.lanes if lane.rank == rank], queue)
            for rank in run.ranks
            if rank in wanted
        ]
    steps = sorted(set[int]().union(*(own.moving_steps() for own in found)))
    missing = tuple(rank for rank in run.missing_ranks if ranks is None or rank in wanted)
    return Replay(queue, tuple(found), tuple(steps), missing)


@contextmanager
def _uncollected() -> Iterator[None]:
    """A million objects that all stay: looking through them for garbage, again and again, takes longest."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _rank_queue(rank: int, lanes: Sequence[LaneLog], queue: str) -> RankQueue:
    own = RankQueue(rank, dict(lanes[0].coordinates), queue)
    reader = {"prefetch": _Prefetches, "backup": _Backups}.get(queue, _Copies)(own)
    limits = []
    # The scheduler's lane first: the others only add to what it has begun.
    for lane in sorted(lanes, key=lambda lane: lane.lane != MAIN_LANE):
        if lane.lane != MAIN_LANE and lane.lane not in reader.lanes:
            continue
        if lane.lane == MAIN_LANE:
            reader.is_counted = "acks" in lane.kinds
        line = None
        handlers = reader.handlers
        for line in lane.decoded(LINES):
            if (handle := handlers.get(line.kind)) is not None:
                handle(line)
        if line is not None and lane.lane == MAIN_LANE:
            own.last_step = line.step
        if lane.lane == MAIN_LANE:
            reader.close_round()
        limits += [told for told in (lane.begin, lane.cut, lane.loss) if told]
    if own.unknown:
        what = "transfer" if own.unknown == 1 else "transfers"
        limits.append(f"rank {rank}: {own.unknown:,} {what} ended whose beginning is not in the log")
    own.limits = tuple(limits)
    own.seal()
    return own


class _Reader:
    """One queue of one rank while it is read.

    Attributes:
        lanes: beside the scheduler's, those that tell of this queue.
        handlers: kind -> what a record of it does.
        is_counted: acks are told as counts, oldest first, and not by their number.
    """

    lanes: tuple[str, ...] = ()
    is_counted = False

    def __init__(self, own: RankQueue) -> None:
        self.own = own
        self.open: deque[Transfer] = deque()
        self.by_op: dict[int, Transfer] = {}
        self.handlers: dict[str, Callable[[_Line], None]] = {"event_round": self.event_round}
        self._saw_names = [saw for saw, _applied in COUNTS[own.queue]]
        self._applied_names = [applied for _saw, applied in COUNTS[own.queue]]
        # The half of a round that stands in its first record.
        self._called: _Line | None = None

    def begin(self, line: _Line, *, pages: Any, nodes: Sequence[Any], is_asked: bool = False) -> Transfer:
        transfer = Transfer(
            _number(line.op),
            tuple(node for node in nodes if type(node) is int),
            _number(pages),
            line.rid if type(line.rid) is str else "",
            line.step,
            line.time_ns,
            line.seq,
            [] if is_asked else None,
        )
        self.own.transfers.append(transfer)
        self.open.append(transfer)
        if transfer.op is not None:
            self.by_op[transfer.op] = transfer
        return transfer

    def end(self, transfer: Transfer | None, line: _Line, word: str = ACKED) -> None:
        if transfer is None:
            self.own.unknown += 1
        elif not transfer.has_ended:
            transfer.end_step, transfer.end_ns, transfer.end = line.step, line.time_ns, word
            if transfer.op is not None:
                self.by_op.pop(transfer.op, None)
            # Nearly always the oldest; whatever has ended further in is dropped when it comes to the front.
            while self.open and self.open[0].has_ended:
                self.open.popleft()

    def end_oldest(self, count: int, line: _Line) -> None:
        for _ in range(count):
            if not self.open:
                self.own.unknown += 1
            else:
                self.end(self.open[0], line)

    def event_round(self, line: _Line) -> None:
        """What a round counted and applied: a log has it in two records, and counts in either."""
        if line.phase == "call":
            self.close_round()
            self._called = line
            return
        called = self._called
        self._called = None
        saw = [_number(getattr(line, name)) for name in self._saw_names]
        if called is not None and None in saw:
            saw = [_number(getattr(called, name)) for name in self._saw_names]
        applied = tuple([_number(getattr(line, name)) for name in self._applied_names])
        self.own.rounds.append(Round(line.step, _number(line.round), tuple(saw), applied))

    def close_round(self) -> None:
        """The last round of a rank that hung, or died, has no second half."""
        called, self._called = self._called, None
        if called is not None:
            saw = tuple([_number(getattr(called, name)) for name in self._saw_names])
            nothing = (None,) * len(saw)
            self.own.rounds.append(Round(called.step, _number(called.round), saw, nothing))


class _Copies(_Reader):
    """Device to host and back."""

    def __init__(self, own: RankQueue) -> None:
        super().__init__(own)
        self.handlers |= {
            "event_round": self._round,
            "transfer_enqueue": self._enqueued,
            "transfer_done": self._done,
            "transfer_ack": self._acked,
            "acks": self._counted,
        }

    def _round(self, line: _Line) -> None:
        self.event_round(line)
        if line.phase != "call" and self.own.rounds[-1].saw[0]:
            self._seen(self.own.rounds[-1])

    def _enqueued(self, line: _Line) -> None:
        if line.queue == self.own.queue:
            self.begin(line, pages=line.pages, nodes=line.nodes if type(line.nodes) is list else ())

    def _done(self, line: _Line) -> None:
        if line.queue == self.own.queue and (transfer := self.by_op.get(_number(line.op, -1))) is not None:
            transfer.done_step = min(transfer.done_step, line.step)

    def _acked(self, line: _Line) -> None:
        if line.queue == self.own.queue and not self.is_counted:
            self.end(self.by_op.get(_number(line.op, -1)), line)

    def _counted(self, line: _Line) -> None:
        if line.queue != self.own.queue:
            return
        self.end_oldest(_number(line.count, 0), line)
        # What is left is told as well: whatever a dropped beginning has put out of order ends here.
        left = _number(line.left)
        while left is not None and len(self.open) > left:
            self.end(self.open[0], line)

    def _seen(self, found: Round) -> None:
        """As many of the oldest as this rank counted have moved; the acks that follow take some of them."""
        for transfer, _ in zip(self.open, range(found.saw[0] or 0), strict=False):
            transfer.done_step = min(transfer.done_step, found.step)


class _Prefetches(_Reader):
    """Asked of the external store, answered, read, applied."""

    lanes = ("prefetch", "sync")

    def __init__(self, own: RankQueue) -> None:
        super().__init__(own)
        self._by_rid: dict[tuple[str, int], Transfer] = {}
        self._ops: dict[int, Transfer] = {}
        self.handlers["prefetch_submit"] = self._submitted
        further = ("query", "prefetch_hit", "progress", "prefetch_ack", "prefetch_insert", "prefetch_outcome")
        self.handlers |= dict.fromkeys(further, self._further)

    def _submitted(self, line: _Line) -> None:
        if line.outcome == "issued":
            transfer = self.begin(line, pages=line.pages, nodes=[line.node], is_asked=True)
            self._by_rid[transfer.rid, _number(line.attempt, 0)] = transfer
            if transfer.op is not None:
                self._ops[transfer.op] = transfer

    def _of(self, line: _Line) -> Transfer | None:
        if type(line.op) is int:
            return self._ops.get(line.op)
        return self._by_rid.get((line.rid, _number(line.attempt, 0))) if type(line.rid) is str else None

    def _further(self, line: _Line) -> None:
        transfer = self._of(line)
        if transfer is None or transfer.middle is None:
            self.own.unknown += line.kind == "prefetch_hit"
        elif line.kind == "query":
            transfer.middle.append((line.step, ANSWERED))
            for name in ("local_pages", "agreed_pages"):
                if (value := _number(getattr(line, name))) is not None:
                    transfer.told = {**(transfer.told or {}), name: value}
        elif line.kind == "prefetch_hit":
            # Whatever the word for it, only one that was given room has tokens to read.
            if _number(line.tokens, 0):
                transfer.middle.append((line.step, READING))
            else:
                self.end(transfer, line, GONE)
        elif line.kind == "progress":
            if line.ack == "completed":
                transfer.done_step = min(transfer.done_step, line.step)
        elif line.kind == "prefetch_outcome":
            # Of those that are never taken over, and of what an applied one did not give.
            if line.outcome == "revoked" and not transfer.has_ended:
                self.end(transfer, line, GONE)
        elif line.kind == "prefetch_insert" or line.ack == "completed":
            self.end(transfer, line)


class _Backups(_Reader):
    """Host to the external store."""

    lanes = ("backup",)

    def __init__(self, own: RankQueue) -> None:
        super().__init__(own)
        self._in_order = iter(own.transfers)
        self.handlers |= {
            "event_round": self._round,
            "storage_backup": self._decided,
            "storage_ack": self._acked,
            "storage_write": self._written,
        }

    def _round(self, line: _Line) -> None:
        self.event_round(line)
        if line.phase != "call" and self.is_counted:
            self.end_oldest(self.own.rounds[-1].applied[0] or 0, line)

    def _decided(self, line: _Line) -> None:
        self.begin(line, pages=line.pages, nodes=[line.node])

    def _acked(self, line: _Line) -> None:
        self.end(self.by_op.get(_number(line.op, -1)), line)

    def _written(self, line: _Line) -> None:
        """The lane that writes is serial: its records come in the order in which the backups were decided."""
        transfer = next(self._in_order, None)
        if transfer is None:
            return
        transfer.done_step = line.step
        transfer.pages = transfer.pages if transfer.pages is not None else _number(line.pages)
        if (written := _number(line.written_pages)) is not None:
            transfer.told = {"written_pages": written}


def _number(value: Any, otherwise: Any = None) -> Any:
    return value if type(value) is int and 0 <= value < NEVER else otherwise
