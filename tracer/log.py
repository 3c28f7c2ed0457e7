"""Reading logs: which files belong together, and the records in them up to where they stop making sense.

Owns the rule of what can be trusted: a record counts when its line is whole, is a JSON object and
carries the next `seq` of its lane. Reading stops at the first line that doesn't, says where and
why, and never raises for it. It knows lines, never what a kind means.

The first segments of a lane may be gone, as they are where a ring was written: it begins later then. Where
lines are spoilt, as their checksum says, a checker must stop; whoever only counts may go on behind them.

    folder -> Run -> LaneLog (one writer, one or more segments) -> records
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tracer.blocks import block_start, first_line, is_packed, pieces
from tracer.errors import LogError
from tracer.places import SEGMENT, demand_there, no_logs
from tracer.plausible import INTEGER_MAX, Count, Header, Integer
from tracer.record import FORMAT, HEADER, TRAILER, VERSION, Kind

# Minor version since which lines stand in blocks under a checksum.
BLOCKS_SINCE = 1
SPECIAL = frozenset({HEADER, TRAILER})
UNSEALED = "zero bytes, so the writer stopped without closing it"


class Stamp(msgspec.Struct):
    """What every line carries, when the rest of it isn't wanted."""

    seq: Count
    kind: str
    step: Integer
    time_ns: Integer
    phase: str = ""


_RECORD = msgspec.json.Decoder(dict[str, Any])
_STAMP = msgspec.json.Decoder(Stamp)


class _HeaderStamp(msgspec.Struct):
    seq: Count
    step: Integer
    time_ns: Integer
    kind: str


_HEADER_STAMP = msgspec.json.Decoder(_HeaderStamp)
_HEADER_KIND = b'"kind":"header"'
_COUNTS = b',"counts_before":{'


class _Counted(msgspec.Struct):
    counts_before: dict[str, Count]


_COUNTED = msgspec.json.Decoder(_Counted)


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of a lane, with the header that it starts with."""

    path: Path
    index: int
    header: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Extent:
    """The readable start of one file: header, records, trailer and block lines, in bytes.

    Attributes:
        is_plain: whether those bytes of the file are all that can be read of it. Otherwise it is compressed,
            or spoilt in the middle: `LaneLog.copy_readable` has the lines.
    """

    path: Path
    valid_bytes: int
    file_bytes: int
    is_plain: bool = True


@dataclass(frozen=True, slots=True)
class Behind:
    """A place in a lane whose files are not compressed: the end of the line with `seq`, a byte of a file.

    Attributes:
        file: number of the file among the lane's.
        end: the byte behind the line.
    """

    file: int
    end: int
    seq: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How lines are decoded for one pass, and where `seq` and `kind` are in what comes out.

    `is_sound` tells whether the common fields of decoded lines have their types, where decoding does not.
    """

    decode: Callable[[bytes], Any]
    decode_lines: Callable[[bytes], list[Any]]
    seq_of: Callable[[Any], int]
    kind_of: Callable[[Any], str]
    is_sound: Callable[[Sequence[Any]], bool]


def _are_sound(records: Sequence[dict[str, Any]]) -> bool:
    """Whether every record's common fields have their types; a block at a time, for it is on every pass."""
    numbers = [*map(itemgetter("step"), records), *map(itemgetter("time_ns"), records)]
    seqs = map(itemgetter("seq"), records)
    words = set(map(itemgetter("kind"), records))
    words.update([record["phase"] for record in records if "phase" in record])
    return (
        set(map(type, chain(numbers, seqs))) <= {int}
        and set(map(type, words)) <= {str}
        and (not numbers or (min(numbers) >= -INTEGER_MAX and max(numbers) <= INTEGER_MAX))
    )


WHOLE = Layout(_RECORD.decode, _RECORD.decode_lines, itemgetter("seq"), itemgetter("kind"), _are_sound)
STAMPS = Layout(
    _STAMP.decode, _STAMP.decode_lines, attrgetter("seq"), attrgetter("kind"), lambda stamps: True
)


class LaneLog:
    """The log of one lane of one rank.

    Attributes:
        rank, lane, run_id, header: from the first segment's header.
        kinds: from all of them; a kind that became known later is in later headers only.
        coordinates: axis -> coordinate of this rank.
        files: the segments' paths, oldest first.
        last_dropped_seq: the newest record before the first one that is here; 0 where none is missing.
        counts_before: kind -> records of it that were dropped; None where some were and nobody counted.
        is_unsealed: the last file was never cut to what was used: its process died, or still runs.

    After `records()` has been read to its end:
        torn: why reading stopped before the end of the files, with file and record; None if it didn't.
        trailer: the last line, as a dictionary; None when the lane was cut.
        count: records read, without header and trailer.
        kinds_seen: kinds of which there is a record.
        damage: what was spoilt and left out, each as a sentence; only where reading went on behind it.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        first = segments[0].header
        self.rank: int = first["rank"]
        self.lane: str = first["lane"]
        self.run_id: str = first["run_id"]
        self.header: dict[str, Any] = first
        declared: dict[str, Any] = {}
        for segment in segments:
            declared = segment.header.get("kinds", {}) | declared
        self.kinds: dict[str, Kind] = {
            name: Kind.from_declaration(name, parts) for name, parts in declared.items()
        }
        self.coordinates: dict[str, int] = first.get("coordinates", {})
        self.segments = tuple(segments)
        self.files: tuple[Path, ...] = tuple(segment.path for segment in segments)
        self._first_seq: int = first["seq"]
        self.last_dropped_seq = max(0, self._first_seq - 1)
        uncounted: dict[str, int] | None = None if self._first_seq else {}
        self.counts_before: dict[str, int] | None = first.get("counts_before", uncounted)
        self.is_unsealed = False
        self.torn: str | None = None
        self.trailer: dict[str, Any] | None = None
        self.count = 0
        self.kinds_seen: set[str] = set()
        self._damage: list[str] = []
        self._damage_told: tuple[str, ...] = ()
        self._seq = 0
        self._valid_bytes: list[int] = []
        self._spoilt: set[int] = set()
        # Behind a gap: the next line may carry a later `seq`.
        self._gap = ""

    @property
    def damage(self) -> tuple[str, ...]:
        """The same object as long as nothing more is found."""
        if len(self._damage_told) != len(self._damage):
            self._damage_told = tuple(self._damage)
        return self._damage_told

    @property
    def is_complete(self) -> bool:
        """Whether the last pass reached a trailer and nothing was wrong before it."""
        return self.trailer is not None and self.torn is None and not self.damage

    @property
    def outcome(self) -> str | None:
        """What the trailer says; None when there is none."""
        outcome = (self.trailer or {}).get("outcome")
        return outcome if isinstance(outcome, str) else None

    @property
    def dropped(self) -> dict[str, int]:
        """Kind -> records that the writer lost, by the trailer: that kind is missing from some record on."""
        dropped = (self.trailer or {}).get("dropped")
        if not isinstance(dropped, dict):
            return {}
        return {
            kind: lost
            for kind, lost in sorted(dropped.items())
            if type(lost) is int and 0 < lost <= INTEGER_MAX
        }

    @property
    def loss(self) -> str:
        """The same as a sentence, or nothing."""
        if not self.dropped:
            return ""
        kinds = ", ".join(f"{lost:,} of {kind}" for kind, lost in self.dropped.items())
        return f"{self.files[-1].name}: records that could not be written are missing: {kinds}"

    @property
    def cut(self) -> str:
        """Why the lane is not complete, as a sentence, or nothing."""
        if self.is_complete:
            return ""
        if self.damage:
            more = f" (and {len(self.damage) - 1} more places)" if len(self.damage) > 1 else ""
            return self.damage[0] + more
        return self.torn or f"{self.files[-1].name}: cut behind record {self._seq - 1}, without a trailer"

    @property
    def begin(self) -> str:
        """What is missing before the first record, as a sentence, or nothing."""
        if not self.last_dropped_seq:
            return ""
        return f"{self.files[0].name}: the oldest records are gone, up to record {self.last_dropped_seq:,}"

    def records(self, *, is_lenient: bool = False) -> Iterator[dict[str, Any]]:
        """Every readable record, oldest first, without headers and trailer; constant memory.

        Args:
            is_lenient: go on behind what is spoilt or missing, and note it in `damage`.
        """
        for records in self._pass(WHOLE, is_lenient=is_lenient):
            yield from records

    def decoded(self, layout: Layout, *, is_lenient: bool = True) -> Iterator[Any]:
        """As `records`, each line as `layout` decodes it; for passes that want few fields of many lines."""
        for records in self._pass(layout, is_lenient=is_lenient):
            yield from records

    def records_behind(self, place: Behind) -> Iterator[dict[str, Any]]:
        """The records behind a line, as `records` has them; what that sets is of these lines alone."""
        for _position, _lines, records in self._blocks(WHOLE, is_lenient=False, behind=place):
            yield from records

    def extents(self) -> list[Extent]:
        """Check every line and say how far each file is readable; sets what a lenient `records` sets."""
        for _records in self._pass(STAMPS, is_lenient=True):
            pass
        valid_bytes = self._valid_bytes
        return [
            Extent(
                path,
                valid_bytes[index] if index < len(valid_bytes) else 0,
                _size(path),
                index not in self._spoilt and not _is_packed(path),
            )
            for index, path in enumerate(self.files)
        ]

    def copy_readable(self, index: int, target: BinaryIO) -> None:
        """Write the lines of file number `index` that a lenient pass reads, header and trailer too."""
        for position, lines, _records in self._blocks(STAMPS, is_lenient=True):
            if position == index:
                target.write(lines)
            elif position > index:
                return

    @property
    def file_bytes(self) -> int:
        """Bytes of its files, as they are now."""
        return sum(map(_size, self.files))

    def file_of(self, seq: int) -> Path:
        """The file that holds record `seq`."""
        found = self.segments[0]
        for segment in self.segments[1:]:
            if segment.header.get("seq", 0) > seq:
                break
            found = segment
        return found.path

    def _pass(self, layout: Layout, *, is_lenient: bool) -> Iterator[list[Any]]:
        for _position, _lines, records in self._blocks(layout, is_lenient=is_lenient):
            yield records

    def _blocks(
        self, layout: Layout, *, is_lenient: bool, behind: Behind | None = None
    ) -> Iterator[tuple[int, bytes, list[Any]]]:
        """Number of the file, lines and records of each block that can be read."""
        self._begin()
        first = 0
        if behind is not None:
            first, self._seq = behind.file, behind.seq + 1
            self._valid_bytes = [0] * first
        due = self.segments[first].index
        for position, segment in enumerate(self.segments[first:], start=first):
            self._valid_bytes.append(0)
            if segment.index != due:
                gone = f"segment {due:03d}, which comes before it, is missing"
                if not self._spoil(segment.path, position, gone, is_lenient=is_lenient):
                    return
            elif segment.header and segment.header["run_id"] != self.run_id:
                self._tear(
                    segment.path, f"it belongs to run {segment.header['run_id']}, not to {self.run_id}"
                )
                return
            due = segment.index + 1
            end = behind.end if behind is not None and position == first else 0
            for lines, records in self._file(segment, position, layout, is_lenient=is_lenient, end=end):
                yield position, lines, records
            if self.torn is not None:
                if not is_lenient or self.trailer is not None or position == len(self.segments) - 1:
                    break
                self._gap, self.torn, self.is_unsealed = self._gap or self.torn, None, False
        if self._gap:
            self._damage.append(f"{self._gap}: nothing that can be read comes behind it")

    def _begin(self) -> None:
        self.torn = None
        self.trailer = None
        self.count = 0
        self.kinds_seen = set()
        self.is_unsealed = False
        self._damage = []
        self._seq = self._first_seq
        self._valid_bytes = []
        self._spoilt = set()
        self._gap = ""

    def _file(
        self, segment: Segment, position: int, layout: Layout, *, is_lenient: bool, end: int = 0
    ) -> Iterator[tuple[bytes, list[Any]]]:
        """Lines and records of each block of a file, from byte `end` on."""
        path = segment.path
        is_header_due = not end
        version = segment.header.get("version") or [1, BLOCKS_SINCE]
        try:
            start = block_start(path, end) if end else 0
            skipped_bytes = end - start
            for piece in pieces(path, is_blocked=version[1] >= BLOCKS_SINCE, start=start):
                # What comes before is checked with the block that it is in.
                lines = piece.data[skipped_bytes:]
                skipped_bytes = max(0, skipped_bytes - len(piece.data) - piece.more_bytes)
                if piece.damage:
                    # A header that is spoilt is no record that is lost.
                    self._seq += is_header_due and position == 0 and not self._first_seq
                    is_header_due = False
                    if not self._spoil(path, position, piece.damage, is_lenient=is_lenient):
                        return
                    continue
                if lines.startswith(b"\0"):
                    # A successor that goes on with the next `seq` proves that nothing is lost here.
                    if path == self.files[-1]:
                        self.is_unsealed = True
                        self._tear(path, UNSEALED)
                    return
                header = b""
                if is_header_due:
                    end = lines.find(b"\n") + 1
                    header = lines[:end]
                    if not self._header(path, header, position):
                        return
                    is_header_due = False
                    lines = lines[end:]
                records, valid_bytes = self._block(path, lines, layout) if lines else ([], 0)
                self._valid_bytes[position] += valid_bytes + (0 if self.torn else piece.more_bytes)
                self.count += len(records)
                yield header + lines[:valid_bytes], records
                if self.torn is not None:
                    return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # Our own shortage; the log may be whole.
                raise LogError(
                    "too many open files: every rank's log is read at once",
                    where=str(path),
                    hint="ulimit -n with more than two for each rank",
                ) from None
            self._tear(path, f"it can't be read on: {error.strerror}")
        if is_header_due and self.torn is None:
            # Its writer was killed between making the file and allocating it.
            self.is_unsealed = path == self.files[-1]
            self._tear(path, "it is empty")

    def _header(self, path: Path, line: bytes, position: int) -> bool:
        try:
            stamp = _STAMP.decode(line)
            line.decode()
        except (msgspec.MsgspecError, ValueError, RecursionError):
            stamp = None
        if not line or stamp is None or stamp.kind != HEADER:
            self._tear(path, "it does not start with a header")
        elif not self._is_due(path, stamp.seq):
            self._tear(path, f"it goes on with record {stamp.seq} where {self._seq} is due: records are lost")
        elif self.trailer is not None:
            self._tear(path, "it comes after the trailer")
        else:
            self._valid_bytes[position] = len(line)
            # The lane's first header is its line 0; later ones repeat it and have no number of their own.
            self._seq += position == 0 and not self._first_seq
            return True
        return False

    def _is_due(self, path: Path, seq: int) -> bool:
        """Whether `seq` may come next; behind a gap any later one may, and says how much is lost."""
        if self._gap and seq >= self._seq:
            lost = seq - self._seq
            records = "record is" if lost == 1 else "records are"
            self._damage.append(f"{self._gap}: {lost:,} {records} lost before record {seq}")
            self._gap = ""
            self._seq = seq
        return seq == self._seq

    def _spoil(self, path: Path, position: int, why: str, *, is_lenient: bool) -> bool:
        """Lines are spoilt or missing here: a gap in the readable part, or else, and then false, its end."""
        self._spoilt.add(position)
        if is_lenient:
            self._gap = self._gap or f"{path.name}: {why} (behind record {self._seq - 1})"
        else:
            self._tear(path, why)
        return is_lenient

    def _block(self, path: Path, block: bytes, layout: Layout) -> tuple[list[Any], int]:
        """The block's good records and the bytes that they and a trailer take."""
        if self._gap:
            end = block.find(b"\n") + 1
            with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
                self._is_due(path, _STAMP.decode(block[:end]).seq)
        if self.trailer is None:
            try:
                if not block.isascii():
                    # What is not looked at is not decoded either, and every way of reading must stop at it.
                    block.decode()
                records = layout.decode_lines(block)
                seqs = list(map(layout.seq_of, records))
                kinds = set(map(layout.kind_of, records))
                is_sound = layout.is_sound(records)
            except (msgspec.MsgspecError, ValueError, LookupError, TypeError, RecursionError):
                return self._careful(path, block, layout)
            is_gapless = seqs == list(range(self._seq, self._seq + len(seqs)))
            if (
                is_sound
                and is_gapless
                and len(seqs) == block.count(b"\n")
                and block.endswith(b"\n")
                and not kinds & SPECIAL
            ):
                self._seq += len(seqs)
                self.kinds_seen |= kinds
                return records, len(block)
        return self._careful(path, block, layout)

    def _careful(self, path: Path, block: bytes, layout: Layout) -> tuple[list[Any], int]:
        """Line by line, to find the one at which reading stops."""
        records: list[Any] = []
        valid_bytes = 0
        for line in BytesIO(block):
            reason = self._reason_to_stop(line)
            if reason:
                self._tear(path, reason)
                break
            if self.trailer is None:
                record = layout.decode(line)
                self.kinds_seen.add(layout.kind_of(record))
                records.append(record)
            valid_bytes += len(line)
            self._seq += 1
        return records, valid_bytes

    def _reason_to_stop(self, line: bytes) -> str:
        """Why this line can't be taken, or nothing; a trailer that fits is kept."""
        if self.trailer is not None:
            return "something stands behind the trailer"
        if line.startswith(b"\0"):
            self.is_unsealed = True
            return UNSEALED
        if not line.endswith(b"\n"):
            # A process that was killed over a line leaves the zero bytes of its file behind it.
            self.is_unsealed = line.endswith(b"\0")
            return "the line was not finished"
        try:
            record = _RECORD.decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return f"the line is not a JSON object ({error})"
        seq, kind = record.get("seq"), record.get("kind")
        if type(seq) is not int or type(kind) is not str:
            return "the line has no seq and kind"
        if seq != self._seq:
            return f"it carries seq {seq}: the log has a gap"
        if kind == HEADER:
            return "a header in the middle of a file"
        if kind == TRAILER:
            self.trailer = record
            if record.get("records") != seq:
                return f"the trailer counts {record.get('records')} lines before it, there are {seq}"
            return ""
        for name in ("step", "time_ns"):
            value = record.get(name)
            if type(value) is not int or abs(value) > INTEGER_MAX:
                return f"its {name} is {value!r:.40}, not a number of 64 bits"
        if type(record.get("phase", "")) is not str:
            return f"its phase is {record['phase']!r:.40}, not a word"
        return ""

    def _tear(self, path: Path, reason: str) -> None:
        self.torn = f"{path.name}: reading stopped before record {self._seq}: {reason}"


@dataclass(frozen=True, slots=True)
class Run:
    """The logs found at one place.

    Attributes:
        path: the folder or file they were found at.
        lanes: by run id, rank and lane; `scheduler` before the other lanes of its rank.
        unreadable: files named like logs from which no header can be read, each with its reason.
    """

    path: Path
    lanes: tuple[LaneLog, ...]
    unreadable: tuple[str, ...] = ()

    @property
    def run_ids(self) -> tuple[str, ...]:
        return tuple(sorted({lane.run_id for lane in self.lanes}))

    @property
    def run_id(self) -> str:
        """The only run id; callers that may meet several go through `by_run_id`."""
        assert len(self.run_ids) == 1, f"{self.path} holds {len(self.run_ids)} runs: {self.run_ids}"
        return self.run_ids[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({lane.rank for lane in self.lanes}))

    @property
    def world_size(self) -> int:
        """As the headers say; the largest when they differ."""
        return max(int(lane.header["world_size"]) for lane in self.lanes)

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        seen = set(self.ranks)
        return tuple(rank for rank in range(self.world_size) if rank not in seen)

    @property
    def config(self) -> Mapping[str, Any]:
        config: Mapping[str, Any] = self.lanes[0].header.get("config", {})
        return config

    def by_run_id(self) -> tuple[Run, ...]:
        """One `Run` for each run id, in the order of the ids."""
        return tuple(
            Run(self.path, tuple(lane for lane in self.lanes if lane.run_id == run_id), self.unreadable)
            for run_id in self.run_ids
        )


def find_logs(path: str | os.PathLike[str]) -> Run:
    """The logs in a folder, or the one that a file holds.

    Only headers are read here. A file whose header can't be read is listed, not refused, as long as
    another one can: one rank that died early must not hide the others.

    Raises:
        LogError: nothing there, no header readable, not our format, or another major version.
    """
    place = Path(path)
    demand_there(place)
    unreadable: list[str] = []
    segments: list[Segment] = []
    sound: dict[bytes, dict[str, Any]] = {}
    for file, rank, lane, index in _candidates(place):
        try:
            header = _read_header(file, sound)
        except FileNotFoundError:
            # A ring that is still written has dropped it since the folder was listed.
            continue
        except _HeaderError as error:
            unreadable.append(f"{file.name}: {error}")
            # Kept in its lane if there is one, so that the lane is seen to be torn there.
            header = {}
        segments.append(Segment(file, index, header or {"rank": rank, "lane": lane}))
    lanes = _lanes(segments)
    if not lanes:
        if unreadable:
            raise LogError(
                f"no readable log in {place}",
                where=unreadable[0],
                expected=f"a first line with kind {HEADER} and format {FORMAT}",
                hint="another folder, or run it again",
            )
        raise no_logs(place)
    return Run(place, lanes, tuple(unreadable))


def _size(path: Path) -> int:
    """Bytes of a file; 0 when it is gone, for then it was not read either."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _is_packed(path: Path) -> bool:
    try:
        return is_packed(path)
    except OSError:
        return False


class _HeaderError(Exception):
    """The file does not start with a readable header; its rank may have died before it had one."""


def _candidates(place: Path) -> list[tuple[Path, int, str, int]]:
    """Files to look into, with rank, lane and segment index as their names say.

    A file named as a segment stands for its lane: the others of the lane beside it are read with it.
    """
    given = SEGMENT.fullmatch(place.name) if place.is_file() else None
    if given is None and place.is_file():
        return [(place, -1, "", 0)]
    found = []
    # A packer that was killed leaves both a file and its compressed form; the shorter name comes first.
    seen = set()
    try:
        for file in sorted((place.parent if given else place).iterdir()):
            match = SEGMENT.fullmatch(file.name)
            if match is None or not file.is_file():
                continue
            if match.groups() in seen:
                continue
            seen.add(match.groups())
            if given is None or (match["rank"], match["lane"]) == (given["rank"], given["lane"]):
                found.append((file, int(match["rank"]), match["lane"], int(match["index"])))
    except OSError as error:
        if given is not None:
            return [(place, int(given["rank"]), given["lane"], int(given["index"]))]
        raise LogError(f"{place} can't be listed: {error.strerror}", hint="check its permissions") from None
    return found


def _lanes(segments: Sequence[Segment]) -> tuple[LaneLog, ...]:
    grouped: dict[tuple[str, int, str], list[Segment]] = {}
    orphans: list[Segment] = []
    for segment in segments:
        header = segment.header
        if "run_id" in header:
            grouped.setdefault((header["run_id"], header["rank"], header["lane"]), []).append(segment)
        else:
            orphans.append(segment)
    for orphan in orphans:
        for (_run_id, rank, lane), group in grouped.items():
            if (rank, lane) == (orphan.header["rank"], orphan.header["lane"]):
                group.append(Segment(orphan.path, orphan.index, {}))
                break
    lanes = []
    for (run_id, rank, lane), group in grouped.items():
        group.sort(key=lambda segment: segment.index)
        # Without a header nobody knows the records in front of the first one that can be read.
        while not group[0].header:
            group = group[1:]
        lanes.append(((run_id, rank, lane != "scheduler", lane), LaneLog(group)))
    lanes.sort(key=itemgetter(0))
    return tuple(lane for _key, lane in lanes)


def _read_header(path: Path, sound: dict[bytes, dict[str, Any]]) -> dict[str, Any]:
    """The header that a file starts with.

    Args:
        sound: what stands behind the stamp of a header -> one that was judged: a lane's files repeat it.

    Raises:
        _HeaderError: there is none that can be read.
        LogError: there is one, of another format or major version.
    """
    try:
        line = first_line(path)
        if not line.strip(b"\0"):
            raise _HeaderError("it is empty: its writer stopped before the header was written")
        if not line.endswith(b"\n"):
            raise _HeaderError("its first line was not finished")
        stamp, kind, body = line.partition(_HEADER_KIND)
        # In a ring each has counts of its own in front of what all repeat.
        counts = b""
        if body.startswith(_COUNTS):
            counts, end, body = body.partition(b"}")
            counts += end
        if kind and body in sound:
            common = msgspec.structs.asdict(_HEADER_STAMP.decode(stamp + kind + b"}"))
            counted = msgspec.structs.asdict(_COUNTED.decode(b"{" + counts[1:] + b"}")) if counts else {}
            return sound[body] | common | counted
        header: dict[str, Any] = _RECORD.decode(line)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _HeaderError(f"it can't be read: {error.strerror}") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _HeaderError(f"its first line is not a JSON object ({error})") from None
    if header.get("kind") != HEADER or "format" not in header:
        raise _HeaderError("its first line is not a header")
    _demand_version(path, header)
    try:
        parsed = msgspec.convert(header, Header)
        for name, parts in parsed.kinds.items():
            Kind.from_declaration(name, parts)
        if wrong := parsed.contradiction():
            raise ValueError(wrong)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise _HeaderError(f"its header is damaged: {error}") from None
    if kind:
        # What is its own, the counts, is not for the others.
        sound[body] = {name: value for name, value in header.items() if name != "counts_before"}
    return header


def _demand_version(path: Path, header: Mapping[str, Any]) -> None:
    """Refuse what another program, or another major version, means by its fields."""
    found, version = header["format"], header.get("version")
    if found != FORMAT:
        raise LogError(f"format {found!r} is not {FORMAT}", where=str(path), expected=FORMAT)
    is_pair = isinstance(version, list) and len(version) == 2 and all(type(part) is int for part in version)
    if not is_pair:
        raise LogError(
            f"version {version!r} is not [major, minor]", where=str(path), expected=str(list(VERSION))
        )
    assert isinstance(version, list)
    if version[0] != VERSION[0]:
        raise LogError(
            f"log version {version[0]}.{version[1]}, this reader knows {VERSION[0]}.x",
            where=str(path),
            hint=f"the hicache-toolkit that wrote it: {header.get('tool_version', 'unknown')}",
        )
