"""Signs of life of one process, from a thread of its own: a lane that hangs can't say that it does.

Owns the lane `heart` of a rank. A beat says what every lane had come to; while nobody has moved it is written
over in place, and a busy process adds one now and then, so that an hour of it is a hundred kilobytes.

    beat 1  scheduler 4,711  io 17  |  beat 11  scheduler 9,802  io 17  |  beat 12, written over each second

It also hears when somebody asks to keep what a ring still has, or how the process stands: by a file `freeze`,
or `snapshot`, in the folder of the logs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event, Thread
from typing import Protocol

import msgspec

from tracer.freeze import REQUEST_NAME, freeze
from tracer.record import FREEZE, HEARTBEAT, Outcome
from tracer.sinks import Position, Sink
from tracer.snapshot.armed import Answers
from tracer.tracer import Tracer

PERIOD_S = 1.0
# Beats between two that are kept, while somebody moves.
KEPT_EVERY = 10
# Room for the numbers of a beat to grow while it is written over.
SPARE_BYTES = 96


class Lane(Protocol):
    """What a heart looks at: a tracer of this process."""

    step: int
    seq: int


class Heart:
    """Beats until it is stopped. Nothing that goes wrong here reaches the process.

    Args:
        tracer, sink: of the lane that it writes; `tracer` is over `sink`.
        lanes: name -> tracer of each lane, looked at and never written to.
        folder: where the rank's files are.
        clock: nanoseconds, the one that the lanes' records carry.
        main: the lane whose step a beat carries.
    """

    def __init__(
        self,
        tracer: Tracer,
        sink: Sink,
        lanes: Mapping[str, Lane],
        folder: Path,
        rank: int,
        *,
        clock: Callable[[], int],
        main: str,
        period_s: float = PERIOD_S,
    ) -> None:
        self._tracer = tracer
        self._sink = sink
        self._lanes = dict(lanes)
        self._folder = folder
        self._rank = rank
        self._clock = clock
        self._main = main
        self._period_s = period_s
        self._encode = msgspec.json.Encoder().encode
        self._count = 0
        self._seen = [-1] * len(self._lanes)
        self._moved_ns = [clock()] * len(self._lanes)
        # The beat that is written over: where, its `seq`, and how long it may be.
        self._at: Position | None = None
        self._at_count = self._at_seq = self._width = 0
        # Of the request that was carried out last.
        self._request_ns = 0
        self._answers = Answers(folder, rank)
        self._stop = Event()
        self._pid = os.getpid()
        self._thread = Thread(target=self._work, name=f"hicache heart {rank}", daemon=True)

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:
            # No thread can be had: the lanes write all the same.
            return

    def stop(self, outcome: Outcome) -> None:
        """The last beat and the trailer; waits for a beat that is under way."""
        self._stop.set()
        if self._thread.is_alive() and self._pid == os.getpid():
            self._thread.join(timeout=5 * PERIOD_S)
        self.beat()
        self._tracer.close(outcome)

    def abandon(self) -> None:
        """No more beats, and no last line."""
        self._stop.set()

    def _work(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                self.beat()
                self.look_for_request()
                self._answers.look()
            except Exception:
                # A heart that fails stops; the run goes on.
                return

    def beat(self) -> None:
        """One sign of life, now."""
        now_ns = self._clock()
        seqs = [lane.seq for lane in self._lanes.values()]
        has_moved = False
        for at, (seq, before) in enumerate(zip(seqs, self._seen, strict=True)):
            if seq != before:
                self._moved_ns[at] = now_ns
                has_moved = True
        self._seen = seqs
        self._count += 1
        is_kept = self._at is None or (has_moved and self._count >= self._at_count + KEPT_EVERY)
        if not is_kept and self._at is not None:
            line = self._line(self._at_seq, now_ns).ljust(self._width)
            if len(line) == self._width and self._sink.rewrite(self._at, line):
                return
        self._append(now_ns)

    def _append(self, now_ns: int) -> None:
        seq = self._tracer.seq
        line = self._line(seq, now_ns)
        self._width = len(line) + SPARE_BYTES
        at = self._sink.position()
        self._sink.write(line.ljust(self._width))
        self._tracer.seq = seq + 1
        self._at = at if self._sink.position()[0] == at[0] else None
        self._at_seq, self._at_count = seq, self._count

    def _line(self, seq: int, now_ns: int) -> bytes:
        main = self._lanes.get(self._main)
        return self._encode(
            {
                "seq": seq,
                "step": main.step if main is not None else 0,
                "time_ns": now_ns,
                "kind": HEARTBEAT.name,
                "count": self._count,
                "lanes": list(self._lanes),
                "seqs": self._seen,
                "steps": [lane.step for lane in self._lanes.values()],
                "still_ns": [now_ns - moved for moved in self._moved_ns],
            }
        )

    def look_for_request(self) -> None:
        """Keep the rank's files if somebody has asked for it since the last look."""
        try:
            asked_ns = os.stat(self._folder / REQUEST_NAME).st_mtime_ns
        except OSError:
            return
        if asked_ns == self._request_ns:
            return
        self._request_ns = asked_ns
        kept = freeze(self._folder, self._rank, asked_ns)
        self._tracer.step = self._lanes[self._main].step if self._main in self._lanes else 0
        self._tracer.note(FREEZE, kept.folder, kept.reason, kept.files)
        # What came last can't be written over any more.
        self._at = None
