"""`replay` over a million transfer events: the index, and any step of it.

.venv/bin/python -m benchmarks.transfers [EVENTS]
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.logs import write_lane
from tracer.blocks import BLOCK_BYTES
from tracer.log import find_logs
from tracer.record import Kind
from tracer.transfers import replay

EVENTS = 1_000_000
RANKS = 4
KINDS = tuple(
    Kind(name, "note") for name in ("transfer_enqueue", "transfer_done", "transfer_ack", "event_round")
)
INDEX_BUDGET_S, STEP_BUDGET_S = 4.0, 0.1
LOOKS = 200


def records(transfers: int, seed: int) -> Iterator[dict[str, Any]]:
    """One transfer a step, done one to three steps later, acked in order; an event round a step."""
    chance = random.Random(seed)
    due: list[tuple[int, int]] = []
    acked = 0
    for step in range(transfers + 8):
        at = {"step": step, "time_ns": step * 1000}
        done = [op for when, op in due if when <= step]
        yield from ({"kind": "transfer_done", "op": op, "queue": "write", **at} for op in done)
        due = [entry for entry in due if entry[0] > step]
        oldest = min((op for _when, op in due), default=min(step, transfers))
        yield {"kind": "event_round", "phase": "call", "round": step, "writes_done": oldest - acked, **at}
        yield {"kind": "event_round", "phase": "return", "round": step, "writes_agreed": oldest - acked, **at}
        for op in range(acked, oldest):
            yield {"kind": "transfer_ack", "op": op, "queue": "write", "nodes": [op], "pages": 4, **at}
        acked = oldest
        if step < transfers:
            yield {
                "kind": "transfer_enqueue",
                "op": step,
                "queue": "write",
                "nodes": [step],
                "pages": 4,
                **at,
            }
            due.append((step + chance.randint(1, 3), step))


def seal(path: Path) -> None:
    """Put the lines under checksums, as a recorder writes them."""
    data = path.read_bytes()
    start = 0
    with path.open("wb") as file:
        while start < len(data):
            end = data.rfind(b"\n", start, start + BLOCK_BYTES) + 1
            block = data[start:end]
            file.write(
                block + b'{"kind":"block","bytes":%d,"crc32":"%08x"}\n' % (len(block), zlib.crc32(block))
            )
            start = end


def main(events: int = EVENTS) -> bool:
    """Print what was measured; whether it is within the budgets."""
    transfers = events // 3 // RANKS
    with tempfile.TemporaryDirectory() as name:
        for rank in range(RANKS):
            seal(
                write_lane(Path(name), records(transfers, rank), rank=rank, sizes={"tp": RANKS}, kinds=KINDS)
            )
        run = find_logs(Path(name))
        # Of this process alone: what else the machine does is not replay's.
        began = time.process_time()
        found = replay(run, "write")
        index_s = time.process_time() - began
        counted = sum(3 * len(own.transfers) for own in found.ranks)
        assert all(not own.at(own.last_step) for own in found.ranks), "a transfer was never acked"
        looks = []
        for look in range(LOOKS):
            step = look * (found.last_step // LOOKS)
            began = time.perf_counter()
            for own in found.ranks:
                own.at(step)
                own.moves_in(step)
                own.round_at(step)
            looks.append(time.perf_counter() - began)
    print(f"replay: {counted:,} transfer events on {RANKS} ranks")
    print(f"        index: {index_s:.2f} s of processor time (budget 4 s)")
    print(f"        any step: {1000 * max(looks):.2f} ms at most of {LOOKS} (budget 100 ms)")
    return index_s < INDEX_BUDGET_S and max(looks) < STEP_BUDGET_S


if __name__ == "__main__":
    sys.exit(not main(*map(int, sys.argv[1:])))
