"""Reading one queue of one rank: what each kind of record does to it.

    write, load   transfer_enqueue ... transfer_done ... transfer_ack      SGLang: ... acks {count, left}
    prefetch      prefetch_submit .. query .. prefetch_hit .. progress .. prefetch_ack | prefetch_insert
    backup        storage_backup .. storage_write .. storage_ack           SGLang: ... storage_acks_agreed

Owns what is known only while a log is read, such as which transfer an ack speaks of. A value of another type
than is due is none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

from tracer.transfer_lines import NEVER, Line, number
from tracer.transfer_queue import ACKED, ANSWERED, COUNTS, GONE, READING, RankQueue, Round, Transfer

Counts = tuple[int | None, ...]
EVENT_ROUND = "event_round"


class Reader:
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
        self.queue = own.queue
        self.open: deque[Transfer] = deque()
        self.by_op: dict[int, Transfer] = {}
        self.handlers: dict[str, Callable[[Line], None]] = {}
        self._known = _Known()
        self._saw_of = attrgetter(*[saw for saw, _applied in COUNTS[own.queue]])
        self._applied_of = attrgetter(*[applied for _saw, applied in COUNTS[own.queue]])
        # The half of a round that stands in its first record.
        self._called: Line | None = None

    def read(self, lines: Iterable[Line]) -> Line | None:
        """Take records in, oldest first, and give back the last one.

        Event rounds are taken in here, without a call, for they are the most frequent records. A log has each
        in two, and counts in either: what this rank counted, and what was applied.
        """
        handler_of = self.handlers.get
        saw_of, applied_of, known = self._saw_of, self._applied_of, self._known
        value: Any
        rounds, called = self.own.rounds, self._called
        line = None
        for line in lines:
            if line.kind != EVENT_ROUND:
                if (handle := handler_of(line.kind)) is not None:
                    handle(line)
            elif line.phase == "call":
                if called is not None:
                    rounds.append(self._unfinished(called))
                called = line
            else:
                value = saw_of(line)
                saw = known[value] if type(value) is int else _told(value)
                if called is not None and None in saw:
                    value = saw_of(called)
                    saw = known[value] if type(value) is int else _told(value)
                called = None
                value = applied_of(line)
                applied = known[value] if type(value) is int else _told(value)
                rounds.append(Round(line.step, number(line.round), saw, applied))
                self.after_round(rounds[-1], line)
        self._called = called
        return line

    def close_round(self) -> None:
        """The last round of a rank that hung, or died, has no second half."""
        if self._called is not None:
            self.own.rounds.append(self._unfinished(self._called))
            self._called = None

    def _unfinished(self, called: Line) -> Round:
        saw = _told(self._saw_of(called))
        return Round(called.step, number(called.round), saw, (None,) * len(saw))

    def begin(
        self, line: Line, nodes: Sequence[Any], middle: list[tuple[int, str]] | None = None
    ) -> Transfer:
        op = number(line.op)
        transfer = Transfer(
            op,
            tuple([node for node in nodes if type(node) is int]),
            number(line.pages),
            line.rid if type(line.rid) is str else "",
            line.step,
            line.time_ns,
            line.seq,
            middle,
        )
        self.own.transfers.append(transfer)
        self.open.append(transfer)
        if op is not None:
            self.by_op[op] = transfer
        return transfer

    def end(self, transfer: Transfer | None, line: Line, word: str = ACKED) -> None:
        if transfer is None:
            self.own.unknown += 1
        elif transfer.end_step == NEVER:
            transfer.end_step, transfer.end_ns, transfer.end = line.step, line.time_ns, word
            if transfer.op is not None:
                self.by_op.pop(transfer.op, None)
            # Nearly always the oldest; whatever has ended further in is dropped when it comes to the front.
            while self.open and self.open[0].end_step != NEVER:
                self.open.popleft()

    def end_oldest(self, count: int, line: Line) -> None:
        while count and self.open:
            self.end(self.open[0], line)
            count -= 1
        self.own.unknown += count

    def after_round(self, found: Round, line: Line) -> None:
        """What a round says of transfers, where it says so."""


class _Known(dict[int, Counts]):
    """A count as a round has it; rounds that count alike, as most do, share it."""

    def __missing__(self, value: int) -> Counts:
        self[value] = (number(value),)
        return self[value]


def _told(values: Any) -> Counts:
    """One value, or a tuple of more than one, as a round has them."""
    return tuple(map(number, values)) if type(values) is tuple else (number(values),)


class Copies(Reader):
    """Device to host and back."""

    def __init__(self, own: RankQueue) -> None:
        super().__init__(own)
        self.handlers |= {
            "transfer_enqueue": self._enqueued,
            "transfer_done": self._done,
            "transfer_ack": self._acked,
            "acks": self._counted,
        }

    def after_round(self, found: Round, line: Line) -> None:
        count = found.saw[0]
        if count:
            # As many of the oldest as this rank counted have moved; the acks that follow take some of them.
            for transfer in islice(self.open, count):
                if line.step < transfer.done_step:
                    transfer.done_step = line.step

    def _enqueued(self, line: Line) -> None:
        if line.queue == self.queue:
            self.begin(line, line.nodes if type(line.nodes) is list else ())

    def _done(self, line: Line) -> None:
        if line.queue == self.queue and type(line.op) is int:
            transfer = self.by_op.get(line.op)
            if transfer is not None and line.step < transfer.done_step:
                transfer.done_step = line.step

    def _acked(self, line: Line) -> None:
        if line.queue == self.queue and not self.is_counted:
            self.end(self.by_op.get(line.op) if type(line.op) is int else None, line)

    def _counted(self, line: Line) -> None:
        if line.queue != self.queue:
            return
        self.end_oldest(number(line.count, 0), line)
        # What is left is told as well: whatever a dropped beginning has put out of order ends here.
        left = number(line.left)
        while left is not None and len(self.open) > left:
            self.end(self.open[0], line)


class Prefetches(Reader):
    """Asked of the external store, answered, read, applied."""

    lanes = ("prefetch", "sync")

    def __init__(self, own: RankQueue) -> None:
        super().__init__(own)
        self._by_rid: dict[tuple[str, int], Transfer] = {}
        self._ops: dict[int, Transfer] = {}
        self.handlers["prefetch_submit"] = self._submitted
        further = ("query", "prefetch_hit", "progress", "prefetch_ack", "prefetch_insert", "prefetch_outcome")
        self.handlers |= dict.fromkeys(further, self._further)

    def _submitted(self, line: Line) -> None:
        if line.outcome == "issued":
            transfer = self.begin(line, [line.node], [])
            self._by_rid[transfer.rid, number(line.attempt, 0)] = transfer
            if transfer.op is not None:
                self._ops[transfer.op] = transfer

    def _of(self, line: Line) -> Transfer | None:
        if type(line.op) is int:
            return self._ops.get(line.op)
        return self._by_rid.get((line.rid, number(line.attempt, 0))) if type(line.rid) is str else None

    def _further(self, line: Line) -> None:
        transfer = self._of(line)
        if transfer is None or transfer.middle is None:
            self.own.unknown += line.kind == "prefetch_hit"
        elif line.kind == "query":
            transfer.middle.append((line.step, ANSWERED))
            for name in ("local_pages", "agreed_pages"):
                if (value := number(getattr(line, name))) is not None:
                    transfer.told = {**(transfer.told or {}), name: value}
        elif line.kind == "prefetch_hit":
            # Whatever the word for it, only one that was given room has tokens to read.
            if number(line.tokens, 0):
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


class Backups(Reader):
    """Host to the external store."""

    lanes = ("backup",)

    def __init__(self, own: RankQueue) -> None:
        super().__init__(own)
        self._in_order = iter(own.transfers)
        self.handlers |= {
            "storage_backup": self._decided,
            "storage_ack": self._acked,
            "storage_write": self._written,
        }

    def after_round(self, found: Round, line: Line) -> None:
        if self.is_counted:
            self.end_oldest(found.applied[0] or 0, line)

    def _decided(self, line: Line) -> None:
        self.begin(line, [line.node])

    def _acked(self, line: Line) -> None:
        self.end(self.by_op.get(line.op) if type(line.op) is int else None, line)

    def _written(self, line: Line) -> None:
        """The lane that writes is serial: its records come in the order in which the backups were decided."""
        transfer = next(self._in_order, None)
        if transfer is None:
            return
        transfer.done_step = line.step
        transfer.pages = transfer.pages if transfer.pages is not None else number(line.pages)
        if (written := number(line.written_pages)) is not None:
            transfer.told = {"written_pages": written}
