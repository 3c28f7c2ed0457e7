"""One rank's records, put together: what its scheduler did, and the chain behind what it took over.

A scheduler does one thing after the other. Where it has no batch although there is somebody to serve it
pauses, and what came in the round that ended the pause is followed back through the lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

from tracer.path_lanes import Lanes, followed
from tracer.path_moments import (
    DEADLINE,
    FORWARD,
    IDLE,
    LAG,
    LANES,
    NEVER,
    NO_REQUEST,
    PEERS,
    SCHEDULER,
    UNKNOWN,
    Line,
    Moment,
    Pause,
    Piece,
    between,
    clipped,
    copy_tier,
)
from tracer.record import MAIN_LANE

# Verdicts after which a request is asked again.
WAITS = ("no_room", "lost")


@dataclass(slots=True, eq=False)
class Request:
    """One request while the log is read; `gate` is where its prefetch was taken over, if that let it in."""

    rid: str
    asked: Moment
    ended: Moment
    admitted: Moment | None = None
    gate: Moment | None = None


class Walk:
    """One pass over a rank's moments, in the order of its clock.

    Args:
        is_admitted_late: admission is recorded when the first part has been computed.
    """

    def __init__(self, *, is_admitted_late: bool) -> None:
        self._is_admitted_late = is_admitted_late
        self.requests: list[Request] = []
        self.open: dict[str, Request] = {}
        self.unasked = self.deadlines = 0
        self.has_batches = False
        self.lanes = Lanes()
        self.pieces: list[Piece] = []
        self._last: dict[str, Moment] = {}
        self._batch: Line | None = None
        self._has_returned = False
        # Of the step that runs: what was taken over in it, on whom it decided, whose deadline has passed.
        self._taken: list[Moment] = []
        self._decided: list[str] = []
        self._ends: set[str] = set()
        self._pause: Pause | None = None
        self._was_refused = False
        self.pauses: list[Pause] = []
        self._polled: dict[str, int] = {}
        self._gates: dict[str, Moment] = {}

    @property
    def is_blind(self) -> bool:
        """Somebody was to be read for, and no lane tells of it."""
        return self.lanes.has_submits and not LANES.keys() & self._last.keys()

    def close(self) -> None:
        """The log has ended."""
        if self._pause is not None:
            self._close_pause(self._pause, None, UNKNOWN if self.open else NO_REQUEST)
        self.requests.sort(key=lambda request: request.asked.index)
        self.pieces = [each for each in self.pieces if each.end > each.begin]

    def see(self, moment: Moment) -> None:
        moment.before = self._last.get(moment.lane)
        self._last[moment.lane] = moment
        if moment.lane == MAIN_LANE:
            self._main(moment)
        else:
            self.lanes.see(moment)

    # The scheduler

    def _main(self, moment: Moment) -> None:
        line, before = moment.line, moment.before
        if before is not None and line.step != before.line.step:
            self._begin_step(moment, before)
        rids: tuple[str, ...] = ()
        if before is not None:
            moment.tier, rids = self._spent_on(moment, before)
            if moment.at > before.at:
                self.pieces.append(Piece(before.at, moment.at, moment.tier, rids))
        moment.pause = self._pause
        handle = getattr(self, f"_see_{line.kind}", None)
        if handle is not None:
            handle(moment)

    def _begin_step(self, moment: Moment, before: Moment) -> None:
        self._has_returned = False
        self._batch = None
        self._taken, self._decided, self._ends = [], [], set()
        if self._pause is None:
            # Taken back where this step turns out to have a batch.
            self._pause = Pause(before)
            self._was_refused = False

    def _spent_on(self, moment: Moment, before: Moment) -> tuple[str, tuple[str, ...]]:
        line = moment.line
        is_copy = line.kind == "transfer_done" and copy_tier(line.queue) != UNKNOWN
        if line.kind == "meeting" and line.phase == "leave":
            return PEERS, ()
        if line.step == before.line.step and is_copy and self._has_returned:
            return copy_tier(line.queue), ()
        if self._batch is not None:
            told = self._batch.rids if type(self._batch.rids) is list else []
            return FORWARD, tuple(rid for rid in told if type(rid) is str)
        return (IDLE if self._pause is not None else SCHEDULER), ()

    def _see_event_round(self, moment: Moment) -> None:
        self._has_returned = moment.line.phase != "call"

    def _see_request(self, moment: Moment) -> None:
        rid = moment.line.rid
        if type(rid) is str and rid not in self.open:
            if not self.open and self._pause is not None:
                # Nobody was there to be served until now.
                self._close_pause(self._pause, None, NO_REQUEST)
                self._pause = Pause(moment)
            self.open[rid] = Request(rid, moment, moment)

    def _see_finish(self, moment: Moment) -> None:
        request = self.open.pop(moment.line.rid, None) if type(moment.line.rid) is str else None
        if request is None:
            self.unasked += 1
            return
        request.ended = moment
        self.requests.append(request)
        if self._pause is not None and (request.rid in self._decided or not self.open):
            # Refused, or gone: what it waited for ends here, without a batch.
            self._be_busy(moment)
            self._pause = Pause(moment)

    def _see_prefetch_submit(self, moment: Moment) -> None:
        line = moment.line
        if line.outcome == "issued" and type(line.rid) is str:
            self.lanes.submitted(moment)

    def _see_prefetch_poll(self, moment: Moment) -> None:
        line = moment.line
        if type(line.rid) is not str:
            return
        if line.verdict == "wait":
            self._polled[line.rid] = line.step
        elif line.verdict == "end" and line.rid in self._polled and not self._is_taken_over(line.rid):
            self._ends.add(line.rid)

    def _is_taken_over(self, rid: str) -> bool:
        """SGLang's plugin tells so before it tells of the poll; else a poll ends what has not come yet."""
        return any(
            each.line.kind == "prefetch_insert" and self.lanes.key(each.line)[0] == rid
            for each in self._taken
        )

    def _see_prefetch_hit(self, moment: Moment) -> None:
        self._take(moment, self.lanes.of_prefetch("query", moment.line))
        self.lanes.note(moment)

    def _see_prefetch_ack(self, moment: Moment) -> None:
        self._take(moment, self.lanes.of_prefetch("progress", moment.line))

    _see_prefetch_insert = _see_prefetch_ack

    def _take(self, moment: Moment, published: Moment | None) -> None:
        moment.after = published
        self._taken.append(moment)
        rid = self.lanes.key(moment.line)[0]
        if published is not None and rid in self.open and rid not in self._ends:
            self._gates[rid] = moment

    def _see_transfer_enqueue(self, moment: Moment) -> None:
        self.lanes.remember(moment)

    def _see_transfer_done(self, moment: Moment) -> None:
        line = moment.line
        begun = self.lanes.recall("transfer_enqueue", line)
        self.lanes.remember(moment)
        moment.after = begun
        moment.is_copy = begun is not None and self._has_returned
        tier = copy_tier(line.queue)
        if begun is not None and tier != UNKNOWN:
            self.lanes.spans[tier].append((begun.at, moment.at))

    def _see_transfer_ack(self, moment: Moment) -> None:
        moment.after = self.lanes.recall("transfer_done", moment.line)
        self._taken.append(moment)

    def _see_storage_backup(self, moment: Moment) -> None:
        self.lanes.remember(moment)

    def _see_storage_ack(self, moment: Moment) -> None:
        moment.after = self.lanes.recall("storage_write", moment.line)
        self._taken.append(moment)

    def _see_admit(self, moment: Moment) -> None:
        line = moment.line
        if line.verdict in WAITS:
            self._still_waits(moment)
            return
        request = self.open.get(line.rid) if type(line.rid) is str else None
        if request is None:
            return
        self._decided.append(request.rid)
        self.deadlines += request.rid in self._ends
        if request.admitted is None and line.verdict == "admitted":
            request.admitted = moment
        gate = self._gates.pop(request.rid, None)
        late_steps = int(self._is_admitted_late)
        waited = self._polled.pop(request.rid, None)
        if gate is not None and waited is not None and line.step - gate.line.step <= late_steps:
            # It was let in as soon as its prefetch had been taken over.
            request.gate = gate

    def _still_waits(self, moment: Moment) -> None:
        """Asked again later. If its prefetch has only now come, it waits for room from here on."""
        line, pause = moment.line, self._pause
        gate = self._gates.get(line.rid) if type(line.rid) is str else None
        is_new = gate is not None and gate.line.step == line.step and line.rid in self._polled
        if is_new and pause is not None and pause.begin.line.step < line.step - 1:
            del self._gates[line.rid], self._polled[line.rid]
            self._close_pause(pause, gate, UNKNOWN)
            self._pause = Pause(moment)
        self._was_refused = True

    def _see_batch(self, moment: Moment) -> None:
        self.has_batches = True
        # SGLang's plugin plans before and tells of the batch when it has run.
        self._batch = None if self._is_admitted_late else moment.line
        self._be_busy(moment)

    def _see_plan(self, moment: Moment) -> None:
        self._batch = moment.line
        self._be_busy(moment)

    def _see_forward(self, moment: Moment) -> None:
        self._batch = None
        self._be_busy(moment)

    def _be_busy(self, moment: Moment) -> None:
        """This step has a batch: whatever pause there was has been ended by what came in it."""
        pause, self._pause = self._pause, None
        if pause is None:
            return
        is_step_alone = pause.begin.line.step == moment.line.step - 1
        begins_here = pause.begin.line.step == moment.line.step
        if is_step_alone or begins_here:
            # No idle step lies between: this is what any step takes.
            self._close_pause(pause, None, SCHEDULER)
            return
        end = self._ended_by()
        tier = DEADLINE if end is None and self._ends else UNKNOWN
        self._close_pause(pause, end, tier)

    def _ended_by(self) -> Moment | None:
        """What was taken over in this step and decided on somebody: a prefetch of theirs, else room."""
        let_in = [
            each
            for each in self._taken
            if each.line.kind.startswith("prefetch_")
            and each.after is not None
            and (rid := self.lanes.key(each.line)[0]) in self._decided
            and rid not in self._ends
        ]
        if let_in:
            return let_in[-1]
        if not self._was_refused:
            return None
        for kind in ("transfer_ack", "storage_ack"):
            # Not what an eviction of this step has waited for itself.
            room = [
                (each.after.at, each)
                for each in self._taken
                if each.line.kind == kind and each.after is not None and not each.after.is_copy
            ]
            if room:
                return max(room, key=lambda pair: pair[0])[1]
        return None

    def _close_pause(self, pause: Pause, end: Moment | None, tier: str) -> None:
        pause.end, pause.tier = end, tier
        if end is not None:
            self.pauses.append(pause)
        told: list[Piece] = []
        while self.pieces and self.pieces[-1].begin >= pause.begin.at:
            told.append(self.pieces.pop())
        told.reverse()
        seen = [
            Piece(each.begin, each.end, (SCHEDULER if end is not None else tier), each.rids)
            if each.tier == IDLE
            else each
            for each in told
        ]
        if end is None:
            self.pieces += seen
            return
        begins = [each.begin for each in seen]
        for piece in clipped(followed(end, pause.begin.at), pause.begin.at, end.at):
            # While it was there already, and the scheduler had not looked or others were not so far.
            self.pieces += between(seen, begins, piece.begin, piece.end) if piece.tier == LAG else [piece]
        self.pieces += between(seen, begins, end.at, NEVER)
