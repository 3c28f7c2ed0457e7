"""Block traces (Mooncake and its like): requests to come, without what any cache made of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tracer.errors import HitsError
from tracer.importers.sniff import File, Imported
from tracer.places import quoted

FORMAT = "block_trace"


def is_mine(line: bytes) -> bool:
    return b'"hash_ids"' in line and b'"input_length"' in line


def read(files: Sequence[File]) -> Imported:
    path: Path = files[0].path
    raise HitsError(
        f"{path} is a block trace: it has requests, and not what a cache made of them",
        expected="logs of a run, or a file that a server has written",
        hint=f"hicache run --workload {quoted(path)} --out runs/trace, then hicache hits runs/trace",
    )
