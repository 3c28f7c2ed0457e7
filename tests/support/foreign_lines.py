"""Logs of other programs for tests: written as text, read as `hicache diagnose` reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tracer.importers.dossier import Dossier, Line
from tracer.importers.evidence import LINES, WHOLE
from tracer.importers.gather import gathered
from tracer.importers.sniff import File


def dossier(folder: Path, **logs: str) -> Dossier:
    """What is in these logs: `rank_0="..."` is a file of that name."""
    for name, text in logs.items():
        (folder / f"{name}.log").write_text(text, encoding="utf-8")
    with gathered([folder], whole=WHOLE, lines=LINES) as found:
        return found.dossier


def read(importer: Any, folder: Path, data: bytes | str) -> Dossier:
    """One file through one importer."""
    path = folder / "server.log"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    into = Dossier()
    importer.read(File(path, path.name), into.begin(path.name), into)
    return into


def told(found: Dossier) -> list[tuple[int | None, str, Mapping[str, Any]]]:
    """Rank, event and fields of every line."""
    return [(line.who.rank, line.event, line.fields) for line in found.lines]


def events(found: Dossier) -> list[str]:
    return [line.event for line in found.lines]


def only(found: Dossier, event: str) -> Line:
    (line,) = [line for line in found.lines if line.event == event]
    return line


def watchdog(
    rank: int, enqueued: int, completed: int, *, group: str = "PG ID 0 PG GUID 0(default_pg)", by: int = 5120
) -> str:
    """The line of NCCL's watchdog with a group's counters."""
    return (
        f"[rank{rank}]:[E203 04:10:08.000000003 ProcessGroupNCCL.cpp:1785] [{group} Rank {rank}] Exception "
        f"(either an error or timeout) detected by watchdog at work: {by}, last enqueued NCCL work: "
        f"{enqueued}, last completed NCCL work: {completed}.\n"
    )


def timed_out(
    rank: int, seq: int, op: str = "ALLREDUCE", numel: int = 4096, *, group: str = "PG ID 2 PG GUID 7(tp)"
) -> str:
    """The line of NCCL's watchdog about one work."""
    return (
        f"[rank{rank}]:[E203 04:10:08.000000001 ProcessGroupNCCL.cpp:616] [{group} Rank {rank}] Watchdog "
        f"caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, "
        f"NumelOut={numel}, Timeout(ms)=600000) ran for 600042 milliseconds before timing out.\n"
    )


def status(rank: int, running: Sequence[str] = (), queued: Sequence[str] = ()) -> str:
    """The line in which a scheduler says what it holds."""
    event: dict[str, Any] = {"event": "scheduler.status", "rank": rank}
    event |= {"running_rids": list(running), "queued_rids": list(queued)}
    return f"[2031-02-03 04:05:06] {json.dumps(event)}\n"


def poll(
    time: str,
    counts: Mapping[int, int],
    missing: Mapping[int, Mapping[str, bool]] | None = None,
    *,
    others: Mapping[int, int] | None = None,
) -> dict[str, Any]:
    """A poll of one communicator, as `ncclras -f json` writes it; host and pid are made from the rank.

    Args:
        counts: rank -> calls of AllReduce; of Broadcast, `others`.
    """
    fine = {"init_state": 0, "async_error": 0, "finalize_called": False, "abort_flag": False}
    return {
        "nccl_version": "2.29.1",
        "timestamp": time,
        "communicators_count": 1,
        "communicators": [
            {
                "hash": "a1",
                "secondary_hash": "b2",
                "size": len(counts) + len(missing or {}),
                "ranks": [
                    {
                        **{"rank": rank, "host": "h", "pid": 300 + rank, "cuda_dev": rank, "status": fine},
                        "collective_counts": {
                            **{"AllReduce": count, "Send": rank},
                            **({"Broadcast": others[rank]} if others else {}),
                        },
                    }
                    for rank, count in counts.items()
                ],
                "missing_ranks": [
                    {"rank": rank, "host": "h", "pid": 300 + rank, "status": status}
                    for rank, status in (missing or {}).items()
                ],
            }
        ],
        "ras": {"collection_time_sec": 0.1, "timeouts_count": 0},
    }


GLOO_TIMEOUT = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting "
    "3000ms for recv operation to complete\n"
)
GLOO_CLOSED = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:41703\n"
)
GLOO_RESET = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:14988: "
    "Connection reset by peer\n"
)
GLOO_SIZES = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    "  what():  [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] "
    "op.preamble.length <= op.nbytes. 16 vs 8. Received data size doesn't match expected size.\n"
)
