"""What a span is, which rank it is from, and what of a record may get into one.

Owns the parts of a span, the origin that a rank's spans share, and the rule that no free text gets out of a
log: a field that should be a word and isn't one is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from tracer.log import LaneLog, Run
from tracer.plausible import INTEGER_MAX
from tracer.record import Record
from tracer.sinks import meta_name

AXES = ("dp", "pp", "cp", "tp")
SERVICE_NAME = "hicache"
META_BYTES_MAX = 64 * 1024
WORDS_KEPT = 4096
# What an id or a short enum looks like: no spaces, no letters beyond ASCII.
WORD = re.compile(r"[!-~]{1,128}")

INTERNAL, SERVER, CLIENT = 1, 2, 3

AttributeValue = int | str | bool | tuple[str, ...]
Attributes = dict[str, AttributeValue]


class SpanEvent(msgspec.Struct, frozen=True):
    """One moment inside a span."""

    name: str
    time_ns: int
    attributes: Attributes


class SpanLink(msgspec.Struct, frozen=True):
    """Another span that this one belongs with; `is_remote` when it is another rank's."""

    trace_id: str
    span_id: str
    is_remote: bool = False


class Span(msgspec.Struct, frozen=True):
    """One thing that took time, on one rank.

    Attributes:
        trace_id, span_id, parent_id: 32, 16 and 16 hex characters; `parent_id` is "" for a root.
        kind: as OTLP counts them.
        start_ns, end_ns: Unix time where the rank's side file tells it, else the log's own; 0 where the
            log's can't be a time. `end_ns` is None when the log does not hold the end.
    """

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int | None
    attributes: Attributes
    events: tuple[SpanEvent, ...]
    links: tuple[SpanLink, ...]

    @property
    def is_open(self) -> bool:
        return self.end_ns is None


@dataclass(frozen=True, slots=True)
class Origin:
    """Where spans come from: one rank of one run.

    Attributes:
        instance: `host:pid`, or `rank:N` where the rank left no side file.
        time_offset_ns: added to the log's time to make Unix time; 0 where nobody knows.
        attributes: what an OTLP resource says of it.
    """

    run_id: str
    rank: int
    instance: str
    time_offset_ns: int
    tool_version: str
    attributes: Mapping[str, AttributeValue]


def origins(run: Run) -> dict[tuple[str, int], Origin]:
    """The origin of each rank of each run."""
    folder = run.path if run.path.is_dir() else run.path.parent
    metas = {rank: _meta(folder / meta_name(rank)) for rank in run.ranks}
    # Ranks of one process share a clock, in the simulator to the nanosecond: they must share its start too.
    starts: dict[tuple[str, int], int] = {}
    for meta in metas.values():
        if meta is not None:
            starts[meta.process] = min(starts.get(meta.process, meta.wall_clock_ns), meta.wall_clock_ns)
    found = {}
    for lane in run.lanes:
        key = lane.run_id, lane.rank
        if key not in found:
            meta = metas[lane.rank]
            found[key] = _origin(lane, meta, 0 if meta is None else starts[meta.process])
    return found


@dataclass(frozen=True, slots=True)
class _Meta:
    host: str
    pid: int
    wall_clock_ns: int

    @property
    def process(self) -> tuple[str, int]:
        return self.host, self.pid


def _meta(path: Path) -> _Meta | None:
    """A rank's side file, or None when there is none that can be believed."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(META_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    host, pid = word(found.get("host")), integer(found.get("pid"))
    wall_clock_ns = integer(found.get("wall_clock_ns"))
    if host is None or pid is None or pid < 0:
        return None
    return _Meta(host, pid, max(0, wall_clock_ns or 0))


def _origin(lane: LaneLog, meta: _Meta | None, start_ns: int) -> Origin:
    instance = f"rank:{lane.rank}" if meta is None else f"{meta.host}:{meta.pid}"
    told: dict[str, AttributeValue] = {"service.name": SERVICE_NAME, "service.instance.id": instance}
    if meta is not None:
        told |= {"host.name": meta.host, "process.pid": meta.pid}
    if word(lane.run_id) is not None:
        told["hicache.run_id"] = lane.run_id
    told |= {"hicache.rank": lane.rank, "hicache.world_size": lane.header["world_size"]}
    told |= {f"{axis}_rank": lane.coordinates[axis] for axis in AXES if axis in lane.coordinates}
    told["hicache.time_offset_ns"] = start_ns
    version = word(lane.header.get("tool_version")) or ""
    return Origin(lane.run_id, lane.rank, instance, start_ns, version, told)


@lru_cache(maxsize=WORDS_KEPT)
def _is_word(text: str) -> bool:
    return WORD.fullmatch(text) is not None


def word(value: Any) -> str | None:
    """The value if it is an id or a short enum; None for anything that could be text."""
    return value if type(value) is str and _is_word(value) else None


def integer(value: Any) -> int | None:
    """The value if it is a whole number of 64 bits."""
    return value if type(value) is int and -INTEGER_MAX <= value <= INTEGER_MAX else None


def page_tokens(lane: LaneLog) -> int:
    """Tokens a page, or 0 where the header doesn't say."""
    size = integer(lane.header.get("config", {}).get("page_size_tokens"))
    return max(0, size or 0)


# Field of a record -> attribute, for numbers and for words.
Table = tuple[tuple[str, str], ...]


def attributes_of(record: Record, numbers: Table, words: Table = ()) -> Attributes:
    found: Attributes = {}
    for name, key in numbers:
        number = record.get(name)
        if type(number) is int and -INTEGER_MAX <= number <= INTEGER_MAX:
            found[key] = number
    for name, key in words:
        text = record.get(name)
        if type(text) is str and _is_word(text):
            found[key] = text
    return found
