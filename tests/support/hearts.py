"""Histories with clocks and hearts: ranks that stand still, or are silent, in logs that nobody closed.

    beating("0 match:r1=64 events! #killed", {0: 40.0})

draws rank 0 with a record every 10 ms, and a heart whose last beat comes 40 s behind the last record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from consensus_checker.history import MemoryLane
from tests.support.history import KINDS, lanes
from tests.support.logs import line
from tracer.record import HEART_LANE, OWN_KINDS
from tracer.sinks import segment_name

NS_PER_S = 1_000_000_000
RECORD_S = 0.01
Pauses = Mapping[tuple[int, str], Mapping[int, float]]


def beating(
    text: str,
    still_s: Mapping[int, float],
    *,
    pauses: Pauses | None = None,
    clocks_s: Mapping[int, float] | None = None,
    **drawn: Any,
) -> list[MemoryLane]:
    """The drawn lanes with times, and the hearts of the ranks in `still_s`.

    Args:
        still_s: rank -> seconds between the last record of its main lane and its last beat.
        pauses: (rank, lane) -> number of a record -> seconds by which it comes later than usual.
        clocks_s: rank -> by how much its clock is off.
    """
    made = [
        _timed(lane, (pauses or {}).get((lane.rank, lane.lane), {}), (clocks_s or {}).get(lane.rank, 0.0))
        for lane in lanes(text, **drawn)
    ]
    hearts = []
    for rank, seconds in still_s.items():
        own = [lane for lane in made if lane.rank == rank]
        main = next(lane for lane in own if lane.lane == "scheduler")
        now_ns = _last_ns(main) + round(seconds * NS_PER_S)
        hearts.append(_heart(own, now_ns))
    return [*made, *hearts]


def _timed(lane: MemoryLane, pauses: Mapping[int, float], clock_s: float) -> MemoryLane:
    entries = []
    now_s = 1.0 + clock_s
    for record in lane.entries:
        now_s += RECORD_S + pauses.get(int(record["seq"]), 0.0)
        entries.append({**record, "time_ns": round(now_s * NS_PER_S)})
    trailer = lane.trailer
    if trailer is not None:
        trailer = {**trailer, "time_ns": round((now_s + RECORD_S) * NS_PER_S)}
    return replace(lane, entries=entries, trailer=trailer)


def _last_ns(lane: MemoryLane) -> int:
    return int(lane.entries[-1]["time_ns"]) if lane.entries else NS_PER_S


def _heart(own: Sequence[MemoryLane], now_ns: int) -> MemoryLane:
    main = next(lane for lane in own if lane.lane == "scheduler")
    beat = {
        "seq": 1,
        "step": 0,
        "time_ns": now_ns,
        "kind": "heartbeat",
        "count": 9,
        "lanes": [lane.lane for lane in own],
        "seqs": [len(lane.entries) + 1 for lane in own],
        "steps": [0 for _ in own],
        "still_ns": [max(0, now_ns - _last_ns(lane)) for lane in own],
    }
    kinds = {kind.name: kind for kind in (*KINDS, *OWN_KINDS)}
    header = {**main.header, "lane": HEART_LANE}
    return MemoryLane(main.rank, HEART_LANE, header, kinds, [beat], None, is_unsealed=True)


def write_logs(folder: Path, made: Sequence[MemoryLane]) -> Path:
    """The lanes as files; one that nobody closed ends in room that was never written."""
    folder.mkdir(parents=True, exist_ok=True)
    for lane in made:
        every: list[Mapping[str, Any]] = [{"kind": "header", **lane.header}, *lane.entries]
        if lane.trailer is not None:
            every.append({**lane.trailer, "records": len(every)})
        data = b"".join(line(seq, record) for seq, record in enumerate(every))
        if lane.is_unsealed:
            data += b"\0" * 4096
        (folder / segment_name(lane.rank, lane.lane, 0)).write_bytes(data)
    return folder
