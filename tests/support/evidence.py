"""Small files as other programs leave them, dumps, stacks, lines of logs; and the way in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from consensus_checker.diagnose import Diagnosis, diagnose
from tracer.importers.evidence import LINES, WHOLE
from tracer.importers.gather import gathered

STACK = """\
Thread 0x00007f4ef1efb6c0 (most recent call first):
  File "/srv/torch/distributed/distributed_c10d.py", line 3000 in {call}
  File "/srv/cache.py", line {line} in {func}
  File "/srv/scheduler.py", line 1100 in event_loop_overlap
"""
WATCHDOG = (
    "[rank{rank}]:[E203 04:10:08.000000003 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) "
    "Rank {rank}] Exception (either an error or timeout) detected by watchdog at work: {work}, last enqueued "
    "NCCL work: {enqueued}, last completed NCCL work: {completed}.\n"
)


def dump(
    enqueued: int,
    *,
    open_calls: int = 1,
    group: str = "tp",
    members: Sequence[int] = (0, 1, 2),
    kept: int = 8,
    numel: int = 4,
    is_given_up: bool = False,
) -> bytes:
    """One rank's dump, whose newest call of the group is `enqueued`; the last `open_calls` have not ended.

    Args:
        kept: calls that the ring still holds.
        numel: of the newest call.
        is_given_up: the watchdog has let go of the open ones.
    """
    completed = enqueued - open_calls
    entries = [
        {
            "record_id": seq,
            "pg_id": 1,
            "process_group": ["1", group],
            "collective_seq_id": seq,
            "p2p_seq_id": 0,
            "op_id": seq,
            "profiling_name": "nccl:all_reduce",
            "input_sizes": [[numel if seq == enqueued else 4]],
            "output_sizes": [[numel if seq == enqueued else 4]],
            "input_dtypes": ["Float"],
            "output_dtypes": ["Float"],
            "state": "completed" if seq <= completed else "scheduled",
            "retired": seq <= completed or is_given_up,
            "is_p2p": False,
            "time_created_ns": 1_700_000_000_000_000_000 + seq,
            "timeout_ms": 600_000,
        }
        for seq in range(max(1, enqueued - kept + 1), enqueued + 1)
    ]
    document: dict[str, Any] = {
        "version": "2.10",
        "comm_lib_version": "2.27.3",
        "nccl_comm_state": {},
        "pg_config": {"1": {"name": "1", "desc": group, "ranks": str(list(members))}},
        "pg_status": {
            "1": {
                "last_enqueued_collective": str(enqueued),
                "last_started_collective": str(enqueued),
                "last_completed_collective": str(completed),
            }
        },
        "entries": entries,
    }
    return json.dumps(document).encode()


def put(folder: Path, files: Mapping[str, bytes | str]) -> Path:
    """Write files below a folder; the folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def diagnosed(*paths: Path) -> Diagnosis:
    with gathered(paths, whole=WHOLE, lines=LINES) as found:
        return diagnose(found)
