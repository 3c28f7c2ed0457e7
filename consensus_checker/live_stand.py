"""Where a lane of this rank is, read from the end of its own log: a lane that hangs can't say so.

Owns what is read of files that are still written: the last lines, and the records around some links. It reads
as any reader does, up to the first zero byte, and takes nothing for granted: no file is no answer.

    ... call A | call B | return B | enter tp0/events #412 | zero bytes
        A is open                    the lane is in this meeting
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from consensus_checker.context import follow_calls
from consensus_checker.live_posts import CALLS_MAX, GROUPS_MAX, Inside, meeting_key, place_of
from tracer.chain import digest_of
from tracer.record import BLOCK, CHECKPOINT, HEADER, IDLE_STEPS, LANE_STATE, OWN_KINDS, TRAILER, Kind, Record

TAIL_BYTES = 64 << 10
# Files looked through for the checkpoint before a link.
FILES_MAX = 8
# Lines sent behind the last link, such as a call that has not returned, and in all.
LINES_BEHIND = 32
LINES_MAX = 1024

_RECORD = msgspec.json.Decoder(dict[str, Any])
_OWN = frozenset(kind.name for kind in OWN_KINDS)


@dataclass(frozen=True, slots=True)
class Links:
    """Links of a chain from number `first` on, each as kind and phase; `start` to `stop` are asked for."""

    first: int
    links: Sequence[tuple[str, str]]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Lines:
    """Records around some links, as the log has them.

    Attributes:
        records_of: axes -> records that agree along them before the first line; empty if nobody counted.
    """

    lines: tuple[bytes, ...]
    records_of: Mapping[str, int]
    file: str


def inside(folder: Path, rank: int, lane: str, groups: Mapping[str, Sequence[int]]) -> Inside | None:
    """Where the lane is by the end of its newest file; None where there is none."""
    found = tail_of(folder, rank, lane, groups)
    return found[1] if found is not None else None


def tail_of(
    folder: Path, rank: int, lane: str, groups: Mapping[str, Sequence[int]]
) -> tuple[str, Inside] | None:
    """A digest of the end of the lane's newest file, which is another when it has moved; and where it is."""
    files = _files(folder, rank, lane)
    if not files:
        return None
    try:
        data = _written(files[-1])
    except OSError:
        return None
    tail = data[-TAIL_BYTES:]
    if len(data) > TAIL_BYTES:
        tail = tail[tail.find(b"\n") + 1 :]
    records = [record for line in tail.split(b"\n")[:-1] if (record := _record(line)) is not None]
    return digest_of(tail), _inside(records, groups)


def _inside(records: Sequence[Record], groups: Mapping[str, Sequence[int]]) -> Inside:
    calls: list[Record] = []
    entered: dict[str, int] = {}
    left: dict[str, int] = {}
    meeting: Record | None = None
    for record in records:
        phase = record.get("phase")
        follow_calls(calls, record)
        if phase == "raise":
            follow_calls(calls, {**record, "phase": "return"})
        group, seq = record.get("group"), record.get("group_seq")
        if type(group) is str and type(seq) is int and phase in ("enter", "leave"):
            key = meeting_key(record)
            part = entered if phase == "enter" else left
            # The newest last, so that they are the ones that are sent.
            part.pop(key, None)
            part[key] = seq
            meeting = record if phase == "enter" else None
        elif record["kind"] not in _OWN:
            # Whoever goes on to something else is not in it: its leave was not written.
            meeting = None
    last = records[-1] if records else {}
    return Inside(
        last=place_of(dict(last)),
        calls=[place_of(dict(call)) for call in calls[-CALLS_MAX:]],
        meeting=place_of(dict(meeting)) if meeting is not None else None,
        members=[int(member) for member in groups.get(str(meeting.get("group")), ())] if meeting else [],
        entered=dict(list(entered.items())[-GROUPS_MAX:]),
        left=dict(list(left.items())[-GROUPS_MAX:]),
        state=str(last.get("state", "")) if last.get("kind") == LANE_STATE else "",
    )


def declared(folder: Path, rank: int, lane: str) -> dict[str, Any]:
    """Declarations of kinds in the header of the newest file: some are made while the lane is written."""
    files = _files(folder, rank, lane)
    try:
        header = _RECORD.decode(_written(files[-1]).partition(b"\n")[0]) if files else {}
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return {}
    kinds = header.get("kinds")
    return kinds if isinstance(kinds, dict) else {}


def lines_around(
    folder: Path, rank: int, lane: str, kinds: Mapping[str, Kind], axes: tuple[str, ...], chain: Links
) -> Lines | None:
    """The lines of the log from behind link `chain.start - 1` on; None where they can't be had for sure."""
    place = _checkpoint_before(_files(folder, rank, lane), ",".join(axes), chain.start)
    if place is None or place.count < chain.first:
        return None
    chain_of = {name: ",".join(kind.agree) for name, kind in kinds.items() if kind.agree}
    walk = _Walk(
        chain,
        {name for name, kind in kinds.items() if frozenset(kind.agree) == frozenset(axes)},
        place.count,
        {**dict.fromkeys(chain_of.values(), 0), **place.records_of},
    )
    for name, line, record in place.records_behind():
        if not walk.take(name, line, record, chain_of):
            break
    if walk.number < min(chain.stop, chain.first + len(chain.links)):
        return None
    return Lines(tuple(walk.lines), walk.records_of if place.is_counted else {}, walk.file)


class _Walk:
    """A log read beside the links of one chain, so that each link finds the record that made it."""

    def __init__(self, chain: Links, own: set[str], number: int, records_of: dict[str, int]) -> None:
        self.number = number
        self.records_of = records_of
        self.lines: list[bytes] = []
        self.file = ""
        self._chain = chain
        self._own = own
        self._behind = 0
        self._step, self._links_of_step = -1, 0
        self._of_step: dict[str, int] = {}

    def take(self, file: str, line: bytes, record: Mapping[str, Any], chain_of: Mapping[str, str]) -> bool:
        """The next record; false when there is no need for more, or no more sense in it."""
        kind = record["kind"]
        if kind == IDLE_STEPS.name:
            return self._skip(record)
        if record["step"] != self._step and kind not in _OWN:
            self._step, self._links_of_step, self._of_step = record["step"], 0, {}
        if self.number >= self._chain.start:
            self.lines.append(line)
            self.file = file
        elif kind in chain_of:
            name = chain_of[kind]
            self.records_of[name] = self.records_of.get(name, 0) + 1
            self._of_step[name] = self._of_step.get(name, 0) + 1
        at = self.number - self._chain.first
        is_open = kind in self._own and at < len(self._chain.links)
        if is_open and (kind, record.get("phase", "")) == self._chain.links[at]:
            self.number += 1
            self._links_of_step += 1
        if self.number >= self._chain.stop:
            self._behind += 1
        return self._behind <= LINES_BEHIND and len(self.lines) < LINES_MAX

    def _skip(self, record: Mapping[str, Any]) -> bool:
        """Steps that were taken back have left their links."""
        count = record.get("count")
        if type(count) is not int:
            return True
        skipped = self._links_of_step * count
        is_inside = self.number < self._chain.start < self.number + skipped
        if is_inside or (skipped and self.lines):
            self.number = -1
            return False
        self.number += skipped
        for name, records in self._of_step.items():
            self.records_of[name] += records * count
        return True


def names_of(links: Sequence[Any]) -> list[tuple[str, str]]:
    """Kind and phase of each link."""
    data = msgspec.json.encode(list(links))
    return [(str(link[0]), str(link[1])) for link in msgspec.json.decode(data, type=list[list[Any]])]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where reading begins: behind the checkpoint over `count` links, or at the very first line.

    Attributes:
        records_of: axes -> records before it, where `is_counted`.
    """

    files: Sequence[Path]
    offset: int
    count: int
    records_of: Mapping[str, int]
    is_counted: bool

    def records_behind(self) -> Iterator[tuple[str, bytes, dict[str, Any]]]:
        """Name of the file, line and record."""
        for number, path in enumerate(self.files):
            data = _written(path)[self.offset if number == 0 else 0 :]
            for line in data.split(b"\n")[:-1]:
                if (record := _record(line)) is not None:
                    yield path.name, line, record


def _checkpoint_before(files: Sequence[Path], name: str, start: int) -> _Place | None:
    """The newest checkpoint of the chain over at most `start` links."""
    for number in range(len(files) - 1, max(-1, len(files) - 1 - FILES_MAX), -1):
        try:
            data = _written(files[number])
        except OSError:
            return None
        end = len(data)
        while (at := data.rfind(b'"kind":"%s"' % CHECKPOINT.name.encode(), 0, end)) >= 0:
            begin, stop = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
            record = _record(data[begin:stop]) if stop >= 0 else None
            end = begin
            count = _count_of(record, name) if record is not None else None
            if record is not None and count is not None and count <= start:
                counts = record.get("records_of")
                known = counts if isinstance(counts, dict) else {}
                return _Place(files[number:], stop + 1, count, known, bool(known))
        if number == 0 and re.search(r"\.000\.jsonl", files[0].name):
            return _Place(files, 0, 0, {}, True)
    return None


def _count_of(record: Mapping[str, Any], name: str) -> int | None:
    """Links of the chain under a checkpoint: it may be of a wider one, which closes this one too."""
    chains = record.get("chains")
    entry = chains.get(name) if isinstance(chains, dict) else None
    count = entry[0] if isinstance(entry, list) and entry else None
    if count is None and record.get("axes") == name:
        count = record.get("count")
    return count if type(count) is int else None


def _record(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None for one that says nothing of the lane, or nothing at all."""
    try:
        record = _RECORD.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    is_sound = type(record.get("kind")) is str and type(record.get("step")) is int
    return record if is_sound and record["kind"] not in (BLOCK, HEADER, TRAILER) else None


def _files(folder: Path, rank: int, lane: str) -> list[Path]:
    """The lane's files, oldest first; of one that is being packed the plain one."""
    pattern = re.compile(rf"rank{rank:04d}\.{re.escape(lane)}\.(\d{{3,}})\.jsonl(\.gz)?")
    found: dict[int, Path] = {}
    try:
        for path in sorted(folder.iterdir()):
            if match := pattern.fullmatch(path.name):
                found.setdefault(int(match[1]), path)
    except OSError:
        return []
    return [found[index] for index in sorted(found)]


def _written(path: Path) -> bytes:
    """What has been written of a file, packed or not."""
    data = path.read_bytes()
    if data.startswith(b"\x1f\x8b"):
        try:
            data = gzip.decompress(data)
        except (EOFError, ValueError) as error:
            raise OSError(f"{path.name}: {error}") from None
    return data.partition(b"\0")[0]
