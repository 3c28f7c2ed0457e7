"""Reading logs while they are written: records as they come, file after file, without a word to the writer.

Owns the rule of what of a growing file may be taken as final. A writer takes lines back: a step in which
nothing happened is folded into an `idle` record, and that record is rewritten while more such steps follow,
checkpoints between them or not. It does so only with the newest step and only in the block that is being
written. So the newest step waits, and what stands between it and the step before, until a later one has
begun, a checksum stands behind it, or the lane ends.

    line | line | block | line step 7 | line step 7 | idle | checkpoint | line step 99 | zero bytes
    |------------------ final ----------------------|---------------- waits -----------|

A file is read twice, and what the second reading does not confirm waits too: a store may have come between.
Checksums are not checked: whoever wants the whole truth reads the finished log.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from itertools import takewhile
from os import pread
from pathlib import Path
from typing import Any

import msgspec

from tracer.blocks import LINE_BYTES_MAX, opened, pieces
from tracer.errors import LogError
from tracer.log import LaneLog, Run, find_logs
from tracer.places import SEGMENT, demand_there
from tracer.plausible import INTEGER_MAX
from tracer.record import BLOCK, CHECKPOINT, HEADER, IDLE_STEPS, MAIN_LANE, TRAILER
from tracer.sinks import segment_name

READ_BYTES = 256 * 1024
# Until files without a readable header are given up: a header is there in a moment, or never.
HEADERLESS_S_MAX = 5.0
PACKED = ".gz"
# A run of idle steps goes on behind these.
BETWEEN_STEPS = (IDLE_STEPS.name, CHECKPOINT.name)

_RECORD = msgspec.json.Decoder(dict[str, Any])

Records = list[dict[str, Any]]


class _TornError(Exception):
    """A line that no reader would take."""


class LaneTail:
    """One lane that is read while it grows.

    Attributes:
        lane: its header and place; it is not read through this.
        is_over: nothing more will come, because its trailer was read or a line makes no sense.
        torn: why reading stopped before a trailer, as a sentence, or "".
        lost: what a ring had dropped before it was read, each as a sentence.
    """

    def __init__(self, folder: Path, lane: LaneLog) -> None:
        self.lane = lane
        self.is_over = False
        self.torn = ""
        self.lost: list[str] = []
        self._folder = folder
        self._index = lane.segments[0].index
        self._file: FileIO | None = None
        # Of the file that is open: where the first line that is not final begins.
        self._offset = 0
        self._is_header_due = True
        self._due = lane.segments[0].header["seq"]

    def poll(self, *, is_last: bool = False) -> Iterator[Records]:
        """What has become final since the last time; with `is_last` all that is there, final or not."""
        try:
            while not self.is_over:
                # Asked before reading: what is there then is all that the file will ever hold.
                has_next = self._has_next()
                if self._file is None and not self._open():
                    if not self._skip_gap():
                        return
                    continue
                yield from self._grown(is_final=has_next or is_last)
                if self.is_over or not has_next:
                    return
                self._next()
        except _TornError as error:
            self._tear(error)
        except OSError as error:
            self._end(f"{self._name}: it can't be read on: {error.strerror}")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _tear(self, error: _TornError) -> None:
        self._end(f"{self._name}: reading stopped before record {self._due}: {error}")

    def _end(self, torn: str = "") -> None:
        self.is_over, self.torn = True, torn
        self.close()

    @property
    def _name(self) -> str:
        return segment_name(self.lane.rank, self.lane.lane, self._index)

    def _path(self, index: int) -> Path | None:
        plain = self._folder / segment_name(self.lane.rank, self.lane.lane, index)
        for path in (plain, plain.with_name(plain.name + PACKED)):
            if path.exists():
                return path
        return None

    def _has_next(self) -> bool:
        """Whether the writer has gone on behind the open file; a ring may have dropped even that by now."""
        if self._path(self._index + 1) is not None:
            return True
        return self._file is not None and self._path(self._index) is None

    def _open(self) -> bool:
        path = self._path(self._index)
        with suppress(FileNotFoundError):
            if path is not None:
                # Kept open: a file that is packed or dropped meanwhile can still be read to its end.
                self._file = opened(path)
        return self._file is not None

    def _next(self) -> None:
        self.close()
        self._index += 1
        self._offset = 0
        self._is_header_due = True

    def _skip_gap(self) -> bool:
        """Go on at the oldest file that is left, where a ring has dropped the one that was due."""
        indexes = [
            int(match["index"])
            for file in self._folder.iterdir()
            if (match := SEGMENT.fullmatch(file.name))
            and (int(match["rank"]), match["lane"]) == (self.lane.rank, self.lane.lane)
        ]
        later = [index for index in indexes if index > self._index]
        if not later:
            return False
        self._index, self._offset, self._is_header_due = min(later), 0, True
        return True

    def _grown(self, *, is_final: bool) -> Iterator[Records]:
        """What is new in the open file, a piece at a time; all of it when nobody writes it any more."""
        assert self._file is not None
        if is_packed(self._file):
            yield from self._unpacked()
            return
        size = READ_BYTES
        while not self.is_over:
            data = self._stable(size)
            whole = data[: data.rfind(b"\n") + 1]
            final = len(whole) if is_final else _final_bytes(whole)
            if not final and len(data) == size:
                if size > LINE_BYTES_MAX:
                    raise _TornError("a line or a step in it has no end")
                size *= 2
                continue
            self._offset += final
            if final:
                yield self._taken(whole[:final])
            if len(data) < size:
                return

    def _unpacked(self) -> Iterator[Records]:
        """A compressed file is final, so that it is read once."""
        if self._offset:
            return
        self._offset = 1
        # Gone since it was opened: the next header tells how much is lost.
        with suppress(FileNotFoundError):
            for piece in pieces(self._folder / f"{self._name}{PACKED}"):
                if piece.damage:
                    raise _TornError(piece.damage)
                yield self._taken(piece.data)

    def _stable(self, size: int) -> bytes:
        """The bytes from the offset on, up to the first zero, as far as two readings agree."""
        assert self._file is not None
        fd = self._file.fileno()
        first, again = (pread(fd, size, self._offset).partition(b"\0")[0] for _ in range(2))
        return first if again.startswith(first) else _agreed(first, again)

    def _taken(self, lines: bytes) -> Records:
        """The records of these lines, up to the trailer, or to the first line that makes no sense."""
        records: Records = []
        try:
            for line in lines.split(b"\n")[:-1]:
                if (record := self._record(line)) is not None:
                    records.append(record)
                if self.is_over:
                    break
        except _TornError as error:
            self._tear(error)
        return records

    def _record(self, line: bytes) -> dict[str, Any] | None:
        """The record of a line, if it holds one."""
        record = self._checked(line)
        kind = record["kind"]
        if kind == BLOCK:
            return None
        if self._is_header_due:
            self._header(record)
            return None
        if record["seq"] != self._due:
            raise _TornError(f"it carries seq {record['seq']}: the log has a gap")
        if kind == HEADER:
            raise _TornError("a header in the middle of a file")
        self._due += 1
        if kind == TRAILER:
            self._end()
            return None
        return record

    def _header(self, record: dict[str, Any]) -> None:
        if record["kind"] != HEADER:
            raise _TornError("it does not start with a header")
        if record.get("run_id") != self.lane.run_id:
            raise _TornError("it belongs to another run")
        seq = record["seq"]
        if seq < self._due:
            raise _TornError(f"it goes on with record {seq} where {self._due} is due")
        if seq > self._due:
            self.lost.append(f"{self._name}: {seq - self._due:,} records were gone before they were read")
        # The lane's first header is its line 0; later ones repeat it and have no number of their own.
        self._due = seq + (1 if seq == 0 else 0)
        self._is_header_due = False

    def _checked(self, line: bytes) -> dict[str, Any]:
        try:
            record: dict[str, Any] = _RECORD.decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise _TornError(f"the line is not a JSON object ({error})") from None
        if record.get("kind") == BLOCK:
            return record
        numbers = [record.get(name) for name in ("seq", "step", "time_ns")]
        if any(type(number) is not int or abs(number) > INTEGER_MAX for number in numbers):
            raise _TornError("its seq, step or time_ns is not a number of 64 bits")
        if type(record.get("kind")) is not str or type(record.get("phase", "")) is not str:
            raise _TornError("its kind or phase is not a word")
        return record


def is_packed(file: FileIO) -> bool:
    return pread(file.fileno(), 2, 0) == b"\x1f\x8b"


def _agreed(first: bytes, again: bytes) -> bytes:
    """The lines that both begin with."""
    pairs = zip(first.splitlines(keepends=True), again.splitlines(keepends=True), strict=False)
    return b"".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class _Step(msgspec.Struct):
    """What is looked at of a line to tell whether it may be taken back."""

    kind: str = ""
    step: int = 0


_STEP = msgspec.json.Decoder(_Step)


def _final_bytes(lines: bytes) -> int:
    """How many bytes of these lines, the newest of a file that is written, can't be taken back."""
    end, newest = len(lines), None
    while end:
        start = lines.rfind(b"\n", 0, end - 1) + 1
        try:
            line = _STEP.decode(lines[start:end])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            # Half of an `idle` record and half of what it is rewritten to; or damage, which is told later.
            end = start
            continue
        if line.kind in (BLOCK, TRAILER, HEADER):
            return end
        if newest is None:
            newest = line.step
        if line.step != newest and line.kind not in BETWEEN_STEPS:
            return end
        end = start
    return 0


class Follower:
    """All lanes of a folder, or of the one lane that a file is of, while they are written."""

    def __init__(self, place: Path) -> None:
        demand_there(place)
        self._place = place
        self._folder = place if place.is_dir() else place.parent
        self._tails: dict[tuple[int, str], LaneTail] = {}
        self._names: frozenset[tuple[str, str]] = frozenset()
        self._headerless_since_s: float | None = None
        self._is_gone = False
        self.run: Run | None = None

    @property
    def tails(self) -> list[LaneTail]:
        return [tail for _key, tail in sorted(self._tails.items())]

    @property
    def is_over(self) -> bool:
        """Whether every rank that the headers promise is there and all of its lanes have ended.

        Without its folder nothing more can come.
        """
        if self._is_gone:
            return True
        if self.run is None or not all(tail.is_over for tail in self._tails.values()):
            return False
        if self._place != self._folder:
            return True
        seen = {rank for rank, lane in self._tails if lane == MAIN_LANE}
        return len(seen) >= self.run.world_size

    def poll(self, *, is_last: bool = False) -> Iterator[tuple[LaneTail, Records]]:
        """What is new, lane by lane.

        Raises:
            LogError: what is there is no log of ours; nothing at all is no error, for it may yet come.
        """
        self._discover()
        for tail in self.tails:
            for records in tail.poll(is_last=is_last):
                yield tail, records

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()

    def _discover(self) -> None:
        try:
            names = frozenset(
                (match["rank"], match["lane"])
                for file in self._folder.iterdir()
                if (match := SEGMENT.fullmatch(file.name)) and self._is_wanted(match)
            )
        except OSError:
            self._is_gone = True
            return
        if names == self._names:
            return
        try:
            self.run = find_logs(self._place)
        except LogError:
            now_s = time.monotonic()
            if self._headerless_since_s is None:
                self._headerless_since_s = now_s
            if self._tails or now_s - self._headerless_since_s <= HEADERLESS_S_MAX:
                return
            raise
        for lane in self.run.lanes:
            self._tails.setdefault((lane.rank, lane.lane), LaneTail(self._folder, lane))
        if len(self._tails) == len(names):
            self._names = names

    def _is_wanted(self, match: re.Match[str]) -> bool:
        if self._place == self._folder:
            return True
        given = SEGMENT.fullmatch(self._place.name)
        return given is not None and (given["rank"], given["lane"]) == (match["rank"], match["lane"])
