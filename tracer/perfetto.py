"""A run as a timeline for Perfetto: one process a rank, one thread a lane and a queue's row.

Owns the lanes and what is drawn where; `bars` owns queues and requests, `chrome` the bytes, `timeline` the
order. A record is drawn by its phase and by its kind's role, so that a kind that nobody here knows is drawn
too; those that move a queue, a request or a collective are known by name.

    rank 3   scheduler    | step 41 .......................... | step 42 ...
                            | event_round ........ || forward extend ..|
                               | all_reduce ... |-----> the same call on the other ranks
             queue write  | write 7 ...................... |
                          | moving ..... | done, not acked |
             requests     | c0.t1 ........................ ...
                          | waiting | running ...

What has not ended is drawn to the end of its rank's log, with `open`. Memory is for a block of every lane and
for what is under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal

from tracer.bars import LIVES, MOVES, MOVES_ALONE, Move, Process
from tracer.chrome import OPEN, ChromeWriter, Thread, args_at_end, args_of, encode
from tracer.log import LaneLog, Run
from tracer.record import LANE_STATE, MAIN_LANE
from tracer.spans import ExportCount
from tracer.timeline import (
    MEETING,
    PROGRESS_RECORDS,
    Progress,
    begin_ns,
    clocks,
    end_ns,
    limits,
    timeline,
)

MISSING_NAMED_MAX = 64
# States in which a lane waits for nothing but work.
AT_REST = frozenset({"idle", "ended"})
CALLS, RETURNS = frozenset({"call", "enter"}), frozenset({"return", "raise", "leave"})
# Slices of a lane that are not a call's; what a call is known by begins with its kind.
STEP, STATE, FORWARD = ("step",), ("state",), ("forward",)

# Field -> counter and its series; written whenever the scheduler tells another value.
GAUGES: Mapping[str, tuple[str, str]] = {
    "device_pages_free": ("pages free", "device"),
    "host_pages_free": ("pages free", "host"),
    "evictable_pages": ("device pages used", "evictable"),
    "protected_pages": ("device pages used", "protected"),
    "waiting_count": ("requests", "waiting"),
    "running_count": ("requests", "running"),
    "write_queue_len": ("backups to be sent", "nodes"),
    "occupied_tokens": ("prefetched", "tokens"),
}


@dataclass(frozen=True, slots=True)
class Mark:
    """Something to say at one record; `is_global` draws it over all ranks."""

    rank: int
    lane: str
    seq: int
    name: str
    text: str
    is_global: bool = False


@dataclass(slots=True)
class Lane:
    """One lane's thread.

    Attributes:
        is_first: the scheduler of a replica's first rank, by which requests are drawn.
        damage: what of the log's damage has been drawn.
        step: whose slice was begun last; `late_step` is the one after it, while a call holds it up.
        stack: what is open, outermost first.
        marks: `seq` -> what to say there.
        plans: kind -> what else there is to do with its records.
    """

    log: LaneLog
    rank: Process
    thread: Thread
    is_main: bool
    is_first: bool
    last_ns: int
    damage: tuple[str, ...] = ()
    step: int | None = None
    late_step: int | None = None
    stack: list[tuple[Any, ...]] = field(default_factory=list)
    marks: dict[int, Mark] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)

    def plan_of(self, kind: str) -> Plan:
        """What a kind's records mean on this lane, by its name and its declaration."""
        found = self.plans.get(kind)
        if found is None:
            declared = self.log.kinds.get(kind)
            names = declared.fields if declared is not None and self.is_main else ()
            found = self.plans[kind] = Plan(
                str(declared.role) if declared is not None else "undeclared",
                tuple((name, counter) for name, counter in GAUGES.items() if name in names),
                MOVES.get(kind, ()),
                self.is_first and kind in LIVES,
            )
        return found


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done with the records of one kind, beside drawing them.

    Attributes:
        gauges: fields that are counters, each with its counter and series.
        moves: what they do to an operation.
        is_life: they change what a request is at.
    """

    role: str
    gauges: tuple[tuple[str, tuple[str, str]], ...]
    moves: tuple[Move, ...]
    is_life: bool


@dataclass(slots=True)
class Meeting:
    """A collective that some of its members have entered; `awaited` counts the others."""

    arrow: int
    awaited: int


def write_perfetto(
    run: Run,
    out: BinaryIO,
    *,
    marks: Sequence[Mark] = (),
    about: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> ExportCount:
    """Write the run as Chrome trace JSON; equal logs give equal bytes.

    Args:
        marks: records to point at, and what to say there.
        about: what else to say of the run as a whole.
        progress: told now and then how many records have been read so far.
    Raises:
        LogError: the logs can't be read on, for a shortage of our own.
        OSError: `out` can't be written to.
    """
    found_clocks = clocks(run)
    shifts = found_clocks.shifts
    zero_ns = min(begin_ns(lane, shifts) for lane in run.lanes)
    writer = ChromeWriter(out, zero_ns)
    drawing = Drawing(run, writer, shifts, marks)
    records = 0
    for time_ns, index, record in timeline(run, shifts):
        drawing.draw(drawing.lanes[index], time_ns, record)
        records += 1
        if progress is not None and not records % PROGRESS_RECORDS:
            progress(records)
    drawing.end(shifts)
    told: dict[str, Any] = {
        **(about or {}),
        "run_id": run.run_id,
        "tool_version": run.lanes[0].header.get("tool_version", ""),
        "world_size": run.world_size,
        "zero_ns": zero_ns,
    }
    if shifts:
        told["clock_shifts_ns"] = {str(rank): shift for rank, shift in sorted(shifts.items())}
        errors = found_clocks.errors
        told["clock_errors_ns"] = {str(rank): error for rank, error in sorted(errors.items())}
    if found := limits(run):
        told["missing"] = found
    writer.close(told)
    return ExportCount(records, writer.events)


class Drawing:
    """A trace while it is written."""

    def __init__(
        self, run: Run, writer: ChromeWriter, shifts: Mapping[int, int], marks: Sequence[Mark]
    ) -> None:
        self.lanes: list[Lane] = []
        self._writer = writer
        self._ranks: dict[int, Process] = {}
        # (group, group_seq) -> who is still awaited there.
        self._meetings: dict[tuple[str, int], Meeting] = {}
        self._members: dict[str, int] = {}
        for log in run.lanes:
            self._begin(log, shifts)
        lanes = {(lane.log.rank, lane.log.lane): lane for lane in self.lanes}
        for mark in marks:
            if (marked := lanes.get((mark.rank, mark.lane))) is not None:
                marked.marks[mark.seq] = mark
        for rank in run.missing_ranks[:MISSING_NAMED_MAX]:
            self._name_process(rank, f"rank {rank}: no log")

    def draw(self, lane: Lane, time_ns: int, record: dict[str, Any]) -> None:
        """One record, which is used up: the rest of it is what the event carries."""
        del record["time_ns"]
        kind, phase = record.pop("kind"), record.pop("phase", "")
        if lane.damage is not lane.log.damage:
            self._gap(lane, time_ns)
        if lane.is_main and record["step"] != lane.step:
            self._turn(lane, time_ns, record["step"])
        lane.last_ns = time_ns
        if lane.marks and record["seq"] in lane.marks:
            self._mark(lane, time_ns, lane.marks[record["seq"]])
        plan = lane.plans.get(kind) or lane.plan_of(kind)
        for gauge, counter in plan.gauges:
            # Asked here first: most records say what the one before has said.
            if (value := record.get(gauge)) != lane.rank.counts.get(counter):
                lane.rank.count(time_ns, counter, value)
        if phase in CALLS:
            self._call(lane, time_ns, kind, record)
        elif phase in RETURNS:
            self._return(lane, time_ns, kind, phase, record)
        elif kind == LANE_STATE:
            self._state(lane, time_ns, record)
        elif kind == "forward" and lane.stack and lane.stack[-1] == FORWARD:
            lane.stack.pop()
            self._writer.end(lane.thread, time_ns, args_at_end(record, "end"))
        elif kind not in MOVES_ALONE:
            self._instant(lane, time_ns, kind, phase, record)
        for move in plan.moves:
            if move.applies(record):
                is_known = lane.rank.move(time_ns, move, record, lane.thread if lane.stack else None)
                if not is_known and kind in MOVES_ALONE:
                    self._instant(lane, time_ns, kind, "", record)
        if plan.is_life and type(rid := record.get("rid")) is str:
            lane.rank.live(time_ns, kind, rid, record)

    def end(self, shifts: Mapping[int, int]) -> None:
        """What is still open ends with its rank's log."""
        ends: dict[int, int] = {}
        for lane in self.lanes:
            number, lane_end = lane.log.rank, end_ns(lane.log, shifts, lane.last_ns)
            ends[number] = max(ends.get(number, lane_end), lane_end)
            self._close_log(lane, lane_end)
            if lane.stack == [STEP] and lane.log.outcome == "completed":
                lane.stack.pop()
                self._writer.end(lane.thread, lane.last_ns)
        for lane in self.lanes:
            self._abandon(lane, ends[lane.log.rank], down_to=0)
        for number, rank in self._ranks.items():
            rank.end(ends[number])

    # A rank's lanes.

    def _begin(self, log: LaneLog, shifts: Mapping[int, int]) -> None:
        rank = self._ranks.get(log.rank)
        if rank is None:
            rank = self._ranks[log.rank] = Process(self._writer, log.rank)
            place = " ".join(f"{axis}{at}" for axis, at in log.coordinates.items())
            self._name_process(log.rank, f"rank {log.rank}  {place}".rstrip())
        is_main = log.lane == MAIN_LANE
        is_first = is_main and not any(at for axis, at in log.coordinates.items() if axis != "dp")
        lane = Lane(log, rank, rank.thread(log.lane), is_main, is_first, begin_ns(log, shifts))
        self.lanes.append(lane)
        self._members.update((name, len(ranks)) for name, ranks in log.header.get("groups", {}).items())
        if log.begin:
            self._say(lane, lane.last_ns, "older records are gone", {"why": log.begin})

    def _close_log(self, lane: Lane, time_ns: int) -> None:
        log = lane.log
        name = f"log ends: {log.outcome}" if log.trailer is not None else "log is cut"
        self._say(lane, time_ns, name, {"why": log.cut} if log.cut else {"records": log.count})

    def _say(self, lane: Lane, time_ns: int, name: str, args: Mapping[str, Any]) -> None:
        """Something about the log itself."""
        self._writer.instant(lane.thread, time_ns, name, "log", args_of(args))

    def _name_process(self, rank: int, name: str) -> None:
        self._writer.meta(rank, "process_name", {"name": name})
        self._writer.meta(rank, "process_sort_index", {"sort_index": rank})

    # Slices and instants of a lane.

    def _turn(self, lane: Lane, time_ns: int, step: int) -> None:
        """The scheduler's next step; the one before has ended with its last record."""
        if lane.stack[-1:] == [FORWARD]:
            self._abandon(lane, lane.last_ns, down_to=len(lane.stack) - 1)
        if lane.stack == [STEP]:
            lane.stack.pop()
            self._writer.end(lane.thread, lane.last_ns)
        if lane.stack:
            # A call goes on over the end of the step, and slices may not cross: the step does, too. One that
            # goes on over the next one's end has no return in the log.
            lane.late_step = step if lane.late_step is None else lane.late_step
            if step == lane.late_step:
                return
            self._abandon(lane, lane.last_ns, down_to=0)
        lane.step, lane.late_step = step, None
        lane.stack.append(STEP)
        self._writer.begin(lane.thread, time_ns, f"step {step}", "step", keep=False)

    def _call(self, lane: Lane, time_ns: int, kind: str, record: dict[str, Any]) -> None:
        lane.stack.append(_known_by(kind, record))
        if kind != MEETING:
            self._writer.begin(lane.thread, time_ns, kind, "call", args_of(record))
            return
        name = f"{_word(record.get('op'))} {_word(record.get('purpose'))}"
        self._writer.begin(lane.thread, time_ns, name, "meeting", args_of(record))
        self._meet(lane, time_ns, record)

    def _return(self, lane: Lane, time_ns: int, kind: str, phase: str, record: dict[str, Any]) -> None:
        known_by = _known_by(kind, record)
        if known_by not in lane.stack:
            # Its call is older than the log.
            self._instant(lane, time_ns, kind, phase, record)
            return
        position = len(lane.stack) - 1 - lane.stack[::-1].index(known_by)
        self._abandon(lane, time_ns, down_to=position + 1)
        lane.stack.pop()
        # A collective's leave says nothing that its enter has not said.
        self._writer.end(lane.thread, time_ns, b"" if kind == MEETING else args_at_end(record, phase))

    def _abandon(self, lane: Lane, time_ns: int, *, down_to: int) -> None:
        """Calls that have no return in the log end with what is around them."""
        while len(lane.stack) > down_to:
            lane.stack.pop()
            self._writer.end(lane.thread, time_ns, OPEN)

    def _state(self, lane: Lane, time_ns: int, record: dict[str, Any]) -> None:
        """What a lane is at, until it is at something else."""
        if STATE in lane.stack:
            position = lane.stack.index(STATE)
            self._abandon(lane, time_ns, down_to=position + 1)
            lane.stack.pop()
            self._writer.end(lane.thread, time_ns)
        state = _word(record.get("state"))
        if state not in AT_REST:
            lane.stack.append(STATE)
            self._writer.begin(lane.thread, time_ns, state, "state", args_of(record))

    def _instant(self, lane: Lane, time_ns: int, kind: str, phase: str, record: dict[str, Any]) -> None:
        role = lane.plan_of(kind).role
        name = f"{kind} {phase}" if phase else kind
        # An anomaly is drawn over all ranks.
        self._writer.instant(lane.thread, time_ns, name, role, args_of(record), is_global=role == "anomaly")
        if kind == "batch" and lane.is_main and "forward" in lane.log.kinds:
            lane.stack.append(FORWARD)
            args = {"seq": record["seq"], "step": record["step"]}
            name = f"forward {_word(record.get('mode'))}"
            self._writer.begin(lane.thread, time_ns, name, "forward", encode(args))

    def _gap(self, lane: Lane, time_ns: int) -> None:
        """What came before this record could not be read, nor the returns of calls that were open."""
        self._abandon(lane, lane.last_ns, down_to=0)
        lane.step = lane.late_step = None
        for sentence in lane.log.damage[len(lane.damage) :]:
            self._say(lane, time_ns, "records are lost", {"why": sentence})
        lane.damage = lane.log.damage

    def _mark(self, lane: Lane, time_ns: int, mark: Mark) -> None:
        args = args_of({"seq": mark.seq, "why": mark.text})
        self._writer.instant(lane.thread, time_ns, mark.name, "mark", args, is_global=mark.is_global)

    def _meet(self, lane: Lane, time_ns: int, record: dict[str, Any]) -> None:
        """An arrow from each member of a collective to the one that comes after it."""
        group, group_seq = record.get("group"), record.get("group_seq")
        if type(group) is not str or type(group_seq) is not int:
            return
        meeting = self._meetings.get((group, group_seq))
        if meeting is None:
            members = self._members.get(group, 2) if record.get("peer") is None else 2
            if members > 1:
                meeting = self._meetings[group, group_seq] = Meeting(self._writer.new_arrow(), members - 1)
                self._writer.arrow(lane.thread, time_ns, "s", "collective", meeting.arrow)
            return
        meeting.awaited -= 1
        phase: Literal["t", "f"] = "t" if meeting.awaited else "f"
        self._writer.arrow(lane.thread, time_ns, phase, "collective", meeting.arrow)
        if not meeting.awaited:
            del self._meetings[group, group_seq]


def _known_by(kind: str, record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the return of a call has in common with it; inner calls of a kind come before outer ones."""
    if kind != MEETING:
        return ("call", kind)
    return ("call", kind, record.get("group"), record.get("group_seq"))


def _word(value: Any) -> str:
    return value if type(value) is str else ""
