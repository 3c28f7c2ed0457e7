"""The checker of a process on a few ranks, one after the other: each records its calls into one folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from consensus_checker import consensus
from tracer.log import LaneLog, find_logs

ENVIRONMENT = (
    "RANK",
    "WORLD_SIZE",
    "HICACHE_TRACE",
    "HICACHE_TRACE_DIR",
    "HICACHE_TRACE_LIMIT",
    "HICACHE_DIGEST_KEY",
    "HICACHE_CHECKER_POLICY",
)


@contextmanager
def asked_for(folder: Path) -> Iterator[pytest.MonkeyPatch]:
    """An environment that asks for the checker, with logs in `folder`; nothing is configured afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ENVIRONMENT:
            patch.delenv(name, raising=False)
        patch.setenv(consensus.SWITCH, "1")
        patch.setenv("HICACHE_TRACE_DIR", str(folder))
        try:
            yield patch
        finally:
            consensus.shutdown()


def record(ranks: Sequence[int], body: Callable[[int], Any], **more: Any) -> list[str]:
    """Run `body(rank)` as each of the ranks, which must agree; what was warned of."""
    warnings: list[str] = []
    for rank in ranks:
        consensus.configure([list(ranks)], rank=rank, watcher=None, warn=warnings.append, **more)
        body(rank)
        consensus.shutdown()
    return warnings


def lane_of(folder: Path, rank: int = 0) -> LaneLog:
    lanes = [lane for lane in find_logs(folder).lanes if (lane.rank, lane.lane) == (rank, "scheduler")]
    assert len(lanes) == 1, f"{folder} has {len(lanes)} logs of rank {rank}"
    return lanes[0]


def events(folder: Path, rank: int = 0) -> list[tuple[Any, ...]]:
    """Kind, phase and values of each record."""
    common = {"seq", "step", "time_ns"}
    return [
        tuple(value for name, value in record.items() if name not in common)
        for record in lane_of(folder, rank).records()
    ]
