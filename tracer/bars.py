"""What is under way on one rank, as rows of a timeline: operations of its queues, requests, and counters.

    queue write     | write 7 ...................... | write 9 ...
                    | moving ..... | done, not acked |
    queue write 2      | write 8 ...... |
    requests        | c0.t1 ........................ ...
                    | waiting | running ...

A bar is two slices, all of it and where it is now. Bars that overlap have rows of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from tracer.chrome import OPEN, ChromeWriter, Thread, args_at_end, args_of

# Where a rank's rows stand below each other: its lanes, its requests, its queues.
REQUESTS_SORT, QUEUES_SORT = 1_000, 1_000_000
ROWS_SORT = 100_000


@dataclass(frozen=True, slots=True)
class Move:
    """What a record does to an operation of a queue, if it says `value` in `field`.

    Attributes:
        queue: its name, or "" where the record says it.
        value: None stands for any number above 0.
    """

    queue: str
    event: str
    field: str = ""
    value: str | None = ""

    def applies(self, record: Mapping[str, Any]) -> bool:
        if not self.field:
            return True
        found = record.get(self.field)
        return found == self.value if self.value is not None else type(found) is int and found > 0


# The same as in the view `queues`.
MOVES: Mapping[str, tuple[Move, ...]] = {
    "transfer_enqueue": (Move("", "enqueue"),),
    "transfer_done": (Move("", "done"),),
    "transfer_ack": (Move("", "ack"),),
    "prefetch_submit": (Move("prefetch", "enqueue", "outcome", "issued"),),
    "query": (Move("prefetch", "done"),),
    "prefetch_hit": (Move("prefetch", "ack"), Move("read", "enqueue", "tokens", None)),
    "progress": (Move("read", "done", "ack", "completed"),),
    "prefetch_ack": (Move("read", "ack", "ack", "completed"),),
    "storage_backup": (Move("backup", "enqueue"),),
    "storage_write": (Move("backup", "done"),),
    "storage_ack": (Move("backup", "ack"),),
}
# What a request goes through.
LIVES = frozenset({"request", "admit", "retract", "finish"})
# Drawn in their queue alone; the others are decisions and events of their lanes as well.
MOVES_ALONE = frozenset({"transfer_enqueue", "transfer_done", "transfer_ack"})
UNTIL_DONE = {"prefetch": "asking", "read": "reading", "backup": "writing"}


@dataclass(slots=True)
class Rows:
    """The rows of a queue, or of the requests: whoever starts gets the first that is free."""

    name: str
    sort: int
    threads: list[Thread] = field(default_factory=list)
    free: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Bar:
    """An operation or a request that is under way: two slices in one row, all of it and where it is now."""

    rows: Rows
    row: int
    arrow: int = 0
    is_done: bool = False

    @property
    def thread(self) -> Thread:
        return self.rows.threads[self.row]


class Process:
    """One rank: its threads, and what is under way in it."""

    def __init__(self, writer: ChromeWriter, rank: int) -> None:
        self._writer = writer
        self._process = Thread(rank, 0)
        self._threads = 0
        self._rows: dict[str, Rows] = {}
        # (queue, op) or (request id,) -> what has not ended.
        self._bars: dict[tuple[Any, ...], Bar] = {}
        # Counter and series -> the value that was written last.
        self.counts: dict[tuple[str, str], int] = {}

    def thread(self, name: str, sort: int | None = None) -> Thread:
        """A new row of the trace; below those before it, if nothing else is said."""
        self._threads += 1
        thread = Thread(self._process.rank, self._threads)
        self._writer.meta(thread.rank, "thread_name", {"name": name}, thread.tid)
        order = {"sort_index": self._threads if sort is None else sort}
        self._writer.meta(thread.rank, "thread_sort_index", order, thread.tid)
        return thread

    def count(self, time_ns: int, counter: tuple[str, str], value: Any) -> None:
        """A counter's series has this value from now on; anything that is no number says nothing."""
        if type(value) is int and self.counts.get(counter) != value:
            self.counts[counter] = value
            self._writer.counter(self._process, time_ns, *counter, value)

    def move(self, time_ns: int, move: Move, record: Mapping[str, Any], around: Thread | None) -> bool:
        """An operation goes on: enqueued, done (its bytes have moved), acked (it was applied).

        Args:
            around: the thread of the lane that says so, if a slice is open there: arrows begin and end in it.
        Returns:
            False where there is no such operation: it was enqueued before the log begins.
        """
        queue, op = move.queue or record.get("queue"), record.get("op")
        if type(queue) is not str or type(op) is not int:
            return False
        bar = self._bars.get((queue, op))
        if move.event == "enqueue":
            if bar is not None:
                self._break_off(time_ns, (queue, op))
                self._add(time_ns, queue, enqueued=-1, done=-bar.is_done)
            self._enqueue(time_ns, queue, op, record, around)
        elif bar is None:
            return False
        elif move.event == "done" and not bar.is_done:
            bar.is_done = True
            self._writer.end(bar.thread, time_ns, args_at_end(record, "done"))
            self._writer.begin(bar.thread, time_ns, "done, not acked", "queue")
            self._writer.arrow(bar.thread, time_ns, "t", "operation", bar.arrow)
            self._add(time_ns, queue, done=1)
        elif move.event == "ack":
            self._writer.arrow(around or bar.thread, time_ns, "f", "operation", bar.arrow)
            self._writer.end(bar.thread, time_ns)
            self._writer.end(bar.thread, time_ns, args_at_end(record, "ack"))
            self._leave_row((queue, op))
            self._add(time_ns, queue, enqueued=-1, done=-bar.is_done)
        return True

    def live(self, time_ns: int, kind: str, rid: str, record: Mapping[str, Any]) -> None:
        """A request is received, admitted, retracted or finished."""
        bar = self._bars.get((rid,))
        if kind == "request":
            if bar is not None:
                self._break_off(time_ns, (rid,))
            bar = self._bars[rid,] = self._bar("requests", REQUESTS_SORT)
            self._writer.begin(bar.thread, time_ns, rid, "request", args_of(record), keep=False)
            self._writer.begin(bar.thread, time_ns, "waiting", "request")
        elif bar is None:
            return
        elif kind == "finish":
            self._writer.end(bar.thread, time_ns)
            self._writer.end(bar.thread, time_ns, args_at_end(record, "finish"))
            self._leave_row((rid,))
        elif kind == "retract" or record.get("verdict") == "admitted":
            name = "waiting, retracted" if kind == "retract" else "running"
            self._writer.end(bar.thread, time_ns)
            self._writer.begin(bar.thread, time_ns, name, "request", args_of(record))

    def end(self, time_ns: int) -> None:
        """Whatever is still under way ends here."""
        for known_by in list(self._bars):
            self._break_off(time_ns, known_by)

    def _enqueue(
        self, time_ns: int, queue: str, op: int, record: Mapping[str, Any], around: Thread | None
    ) -> None:
        bar = self._bars[queue, op] = self._bar(f"queue {queue}", QUEUES_SORT)
        bar.arrow = self._writer.new_arrow()
        self._writer.begin(bar.thread, time_ns, f"{queue} {op}", "queue", args_of(record), keep=False)
        self._writer.begin(bar.thread, time_ns, UNTIL_DONE.get(queue, "moving"), "queue")
        self._writer.arrow(around or bar.thread, time_ns, "s", "operation", bar.arrow)
        self._add(time_ns, queue, enqueued=1)

    def _add(self, time_ns: int, queue: str, *, enqueued: int = 0, done: int = 0) -> None:
        for series, change in (("in flight", enqueued), ("done, not acked", done)):
            counter = (f"queue {queue}", series)
            self.count(time_ns, counter, self.counts.get(counter, 0) + change)

    def _bar(self, name: str, sort: int) -> Bar:
        rows = self._rows.get(name)
        if rows is None:
            rows = self._rows[name] = Rows(name, sort + ROWS_SORT * len(self._rows))
        if rows.free:
            return Bar(rows, heappop(rows.free))
        row = len(rows.threads)
        rows.threads.append(self.thread(f"{name} {row + 1}" if row else name, rows.sort + row))
        return Bar(rows, row)

    def _break_off(self, time_ns: int, known_by: tuple[Any, ...]) -> None:
        """It has no end in the log."""
        thread = self._bars[known_by].thread
        self._writer.end(thread, time_ns, OPEN)
        self._writer.end(thread, time_ns, OPEN)
        self._leave_row(known_by)

    def _leave_row(self, known_by: tuple[Any, ...]) -> None:
        bar = self._bars.pop(known_by)
        heappush(bar.rows.free, bar.row)
