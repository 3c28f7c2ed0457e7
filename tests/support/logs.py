"""Small logs for tests: literal records in, files in the documented format out.

Writes the format with `json` alone, not through the tracer, so that a reader is tested against the
page and not against our writer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tracer.record import Kind, Place, header
from tracer.sinks import segment_name

AXES = ("dp", "pp", "cp", "tp")
ONE_RANK = {"dp": 1, "pp": 1, "cp": 1, "tp": 1}

DECIDE = Kind(
    "write_backup",
    "decision",
    agree=("tp", "cp", "pp"),
    compared=("node", "pages", "tokens"),
    local=("host_pages_free",),
    needs={"host_pages_free": "pages"},
)
NOTE = Kind("note", "note", info=("text",))
SMALL_KINDS = (DECIDE, NOTE)

Fields = Mapping[str, Any]


def place(rank: int = 0, sizes: Mapping[str, int] = ONE_RANK) -> Place:
    """Where `rank` stands when ranks are numbered with the last axis fastest."""
    coordinates: dict[str, int] = {}
    rest = rank
    for axis in reversed(AXES):
        rest, coordinates[axis] = divmod(rest, sizes.get(axis, 1))
    in_order = {axis: coordinates[axis] for axis in AXES}
    return Place(rank, in_order, {axis: sizes.get(axis, 1) for axis in AXES}, {})


def lines(
    records: Iterable[Fields],
    *,
    rank: int = 0,
    lane: str = "scheduler",
    sizes: Mapping[str, int] = ONE_RANK,
    kinds: Sequence[Kind] = SMALL_KINDS,
    run_id: str = "run-a",
    outcome: str | None = "completed",
    **changes: Any,
) -> list[bytes]:
    """Header, one line a record, trailer (none when `outcome` is None); each with its newline.

    A record is its fields with `kind`; `step` and `time_ns` default to 0. `changes` replace header fields.
    """
    head = header(place(rank, sizes), kinds, lane=lane, run_id=run_id, tool_version="test") | changes
    every: list[dict[str, Any]] = [{"kind": "header", **head}, *map(dict, records)]
    if outcome is not None:
        every.append({"kind": "trailer", "outcome": outcome, "records": len(every)})
    return [line(seq, record) for seq, record in enumerate(every)]


def line(seq: int, record: Fields) -> bytes:
    """One line with the common fields in front."""
    rest = {name: value for name, value in record.items() if name not in ("seq", "step", "time_ns")}
    common = {"seq": seq, "step": record.get("step", 0), "time_ns": record.get("time_ns", 0)}
    return json.dumps({**common, **rest}, separators=(",", ":")).encode() + b"\n"


def write_lane(folder: Path, records: Iterable[Fields], **options: Any) -> Path:
    """Write one lane as one segment; options as for `lines`."""
    path = folder / segment_name(options.get("rank", 0), options.get("lane", "scheduler"), 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(lines(records, **options)))
    return path


def write_run(folder: Path, ranks: Mapping[int, Sequence[Fields]], **options: Any) -> Path:
    """Write one lane for each rank; without `sizes`, all ranks are one tp group."""
    options.setdefault("sizes", {"tp": max(ranks) + 1})
    for rank, records in ranks.items():
        write_lane(folder, records, rank=rank, **options)
    return folder
