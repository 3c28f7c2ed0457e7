"""Where a rank's decisions are written: one lane, its files, and the heart beside it.

Owns the files of one recording. They are a ring in the folder that the environment names, or in one of its
own that is gone afterwards unless it holds evidence. What can't be written is left out; no call fails by it.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from consensus_checker.consensus_calls import MEMBER, Decorated
from consensus_checker.consensus_ranks import ALONE, Agreed
from tracer.emitters import PARTS, Shape, line_class
from tracer.heart import Heart
from tracer.pack import PACKED, Packer
from tracer.record import HEART_LANE, MAIN_LANE, Kind, Outcome, Place, header
from tracer.segments import SegmentSink, Window
from tracer.sinks import NowhereSink, Sink, Warn, meta_name, segment_name, tell, write_meta
from tracer.snapshot.armed import Armed, arm
from tracer.tracer import Tracer

TRACE_VARIABLE, FOLDER_VARIABLE, LIMIT_VARIABLE = "HICACHE_TRACE", "HICACHE_TRACE_DIR", "HICACHE_TRACE_LIMIT"
TRACES = ("ring", "full", "off")
LIMIT_BYTES = 64 << 20
LIMIT_BYTES_MIN = 1 << 20
# Of a ring's limit, the heart's part.
HEART_PART = 16
PACKING_S = 5.0
PRIVATE = "hicache-records-"
# Ranks that must agree are those of one replica.
REPLICA = "replica"


class Recording:
    """The lane `scheduler` of one rank.

    Attributes:
        lanes: name -> tracer, the scheduler's first.
        folder: None where nothing is written.
        header: what the lane's files begin with; kinds are added to it.
    """

    _armed: Armed | None = None

    def __init__(
        self, place: Place, agreed: Agreed, kinds: Sequence[Kind], *, world_size: int, warn: Warn
    ) -> None:
        self._warn = warn
        self._place = place
        self._trace = trace_asked(warn)
        self._limit_bytes = limit_bytes_asked(warn)
        self._is_own_folder = False
        self.folder = self._folder(agreed)
        self._packer = Packer() if self._trace == "ring" else None
        top = header(
            place,
            kinds,
            lane=MAIN_LANE,
            run_id=agreed.run_id,
            tool_version=tool_version(),
            attempt=agreed.attempt,
        )
        # Without sizes nobody can count them.
        self.header: dict[str, Any] = {
            **top,
            "world_size": world_size,
            "digest": f"{agreed.algorithm} keyed",
        }
        self.tracer = Tracer(self._sink(MAIN_LANE), self.header, time.monotonic_ns, warn=warn)
        self.lanes = {MAIN_LANE: self.tracer}
        self._heart = self._started_heart()
        self._armed = self._arm()

    def declare(self, kinds: Sequence[Kind]) -> None:
        self.header["kinds"] |= {kind.name: kind.declaration() for kind in kinds}
        self.tracer.declare(kinds)

    def parts(self, own: Decorated, kind: Kind) -> dict[str, Any]:
        """What a wrapper writes its records with, by the names that `Binding` has for it."""
        tracer = self.tracer
        found = dict(zip(PARTS, tracer.parts(kind), strict=True))
        lines = {
            f"{phase}_line": line_class(Shape(kind.name, phase, names, names, None))
            for phase, names in own.fields_of.items()
        }
        return {
            "tracer": tracer,
            # One without room sends every line to the sink itself.
            "window": found["window"] or Window(),
            "count": tracer.count_of(kind) if tracer.setting_of(kind).is_counted else [0],
            **{
                name: found[name]
                for name in ("encode", "write", "clock", "link", "links", "links_max", "full")
            },
            **lines,
        }

    def drop(self, kind: Kind, error: Exception) -> None:
        """Say that records of `kind` are missing from here on."""
        found = dict(zip(PARTS, self.tracer.parts(kind), strict=True))
        found["drop"](found["gate"], kind.name, error)

    def close(self, outcome: Outcome, *, is_evidence: bool) -> None:
        """Write the last lines; a folder of its own stays only where it is evidence."""
        if self._armed is not None:
            self._armed.disarm()
        self.tracer.close(outcome)
        if self._heart is not None:
            self._heart.stop(outcome)
        if self._packer is not None:
            self._packer.drain(PACKING_S)
        if self._is_own_folder and self.folder is not None:
            if is_evidence:
                tell(self._warn, f"the records of rank {self._place.rank} are in {self.folder}")
            else:
                _remove(self.folder, self._place.rank)

    def abandon(self) -> None:
        """In a forked child: the files are its parent's."""
        self.folder = None
        if self._heart is not None:
            self._heart.abandon()

    def _folder(self, agreed: Agreed) -> Path | None:
        if self._trace == "off":
            return None
        given = trace_folder()
        if given is not None:
            return _free_folder(given, agreed, self._place.rank)
        try:
            found = _private_folder(agreed.run_id)
        except OSError as error:
            tell(self._warn, f"no folder for the records of rank {self._place.rank}: {error.strerror}")
            self._trace = "off"
            return None
        self._is_own_folder = True
        return found

    def _sink(self, lane: str) -> Sink:
        if self.folder is None:
            return NowhereSink()
        if lane == MAIN_LANE:
            write_meta(self.folder, self._place.rank, warn=self._warn)
        if self._trace == "full":
            return SegmentSink(self.folder, self._place.rank, lane, warn=self._warn)
        return SegmentSink(
            self.folder,
            self._place.rank,
            lane,
            warn=self._warn,
            limit_bytes=self._share(lane),
            packer=self._packer,
        )

    def _share(self, lane: str) -> int:
        """Of the ring's bytes, those of one lane."""
        heart = self._limit_bytes // HEART_PART
        return heart if lane == HEART_LANE else self._limit_bytes - heart

    def _arm(self) -> Armed | None:
        """From here on a signal makes this process write its stacks, for `hicache snapshot`."""
        return arm(self.folder, self._place.rank) if self.folder is not None else None

    def _started_heart(self) -> Heart | None:
        if self.folder is None:
            return None
        sink = self._sink(HEART_LANE)
        tracer = Tracer(sink, {**self.header, "lane": HEART_LANE}, time.monotonic_ns, warn=self._warn)
        heart = Heart(
            tracer,
            sink,
            self.lanes,
            self.folder,
            self._place.rank,
            clock=time.monotonic_ns,
            main=MAIN_LANE,
        )
        heart.start()
        return heart


def place_of(rank: int, members: Sequence[int], world: int, groups: Mapping[str, Sequence[int]]) -> Place:
    """Where the rank stands: in which replica, and which of its members it is.

    Replicas whose ranks are not one behind the other have no number that ranks could be counted by: they are
    called by their first rank, and the header has no sizes.
    """
    count = len(members)
    first, member = members[0], members.index(rank)
    is_regular = tuple(members) == tuple(range(first, first + count)) and not first % count
    if is_regular and not world % count:
        coordinates = {REPLICA: first // count, MEMBER: member}
        return Place(rank, coordinates, {REPLICA: world // count, MEMBER: count}, groups)
    return Place(rank, {REPLICA: first, MEMBER: member}, {}, groups)


def _private_folder(run_id: str) -> Path:
    """A folder that only its owner may look into, the same for all ranks of one host that have met."""
    if run_id == ALONE:
        return Path(tempfile.mkdtemp(prefix=PRIVATE))
    found = Path(tempfile.gettempdir(), PRIVATE + run_id)
    with suppress(FileExistsError):
        os.mkdir(found, 0o700)
    status = os.lstat(found)
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return found
    # Somebody else's, who was there before.
    return Path(tempfile.mkdtemp(prefix=PRIVATE))


def _remove(folder: Path, rank: int) -> None:
    """A rank's own files, and the folder behind the last of them."""
    begin = meta_name(rank).removesuffix("meta.json")
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name.startswith(begin):
                path.unlink()
        folder.rmdir()


def _free_folder(given: Path, agreed: Agreed, rank: int) -> Path:
    """`given`, or one in it: logs of an earlier run are never written over."""
    if not agreed.has_logs:
        return given
    found = given / agreed.run_id
    number = 1
    while has_logs([rank], found):
        number += 1
        found = given / f"{agreed.run_id}-{number}"
    return found


def has_logs(ranks: Sequence[int], folder: Path | None = None) -> bool:
    """Whether a folder, that of the environment if none is given, has files that these ranks would write."""
    folder = folder or trace_folder()
    if folder is None:
        return False
    names = [segment_name(rank, MAIN_LANE, 0) for rank in ranks]
    begins = tuple(name.removesuffix("000.jsonl") for name in names)
    with suppress(OSError):
        return any(
            name.startswith(begins) and name.endswith((".jsonl", PACKED)) for name in os.listdir(folder)
        )
    return False


def trace_folder() -> Path | None:
    text = os.environ.get(FOLDER_VARIABLE, "")
    # The process may go to another folder later.
    return Path(text).absolute() if text else None


def trace_asked(warn: Warn) -> str:
    text = os.environ.get(TRACE_VARIABLE, "").strip().lower() or TRACES[0]
    if text in TRACES:
        return text
    tell(warn, f"{TRACE_VARIABLE} is {text!r:.40}, none of {', '.join(TRACES)}: taken as {TRACES[0]}")
    return TRACES[0]


def limit_bytes_asked(warn: Warn) -> int:
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    if not text:
        return LIMIT_BYTES
    if text.isdecimal() and int(text) >= LIMIT_BYTES_MIN:
        return int(text)
    tell(
        warn,
        f"{LIMIT_VARIABLE} is {text!r:.40}, not a number of bytes from {LIMIT_BYTES_MIN:,} on: "
        f"taken as {LIMIT_BYTES:,}",
    )
    return LIMIT_BYTES


def tool_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("hicache-toolkit")
    except PackageNotFoundError:
        return "unknown"
