"""What the system said of a process when `hicache snapshot` looked at it: one JSON file a process and look.

    {"schema": "hicache.process.v1", "look": 1, "rank": 3, "host": "n1", "pid": 42, "status": {"state": "T"},
     "threads": [{"tid": 42, "state": "T", "wchan": "do_signal_stop", "user_ticks": 310, ...}, ...], ...}

A row for each, with the event `process`. Ticks of its threads tell between two looks whether anything in it
has computed; command lines and variables are for people, and are left where they are.
"""

from __future__ import annotations

import json
from typing import Any

from tracer.errors import HitsError
from tracer.importers.dossier import At, Dossier, Line, Who
from tracer.importers.sniff import File, is_too_deep, printable

FORMAT = "process_state"
VERSION = 1
EVENT = "process"
MARK = b'"schema": "hicache.process.v1"'
BYTES_MAX = 16 << 20
TEXT_CHARS_MAX = 100


def votes(head: bytes) -> int:
    return 3 if head.startswith(b"{") and MARK in head[:200] else 0


def read(file: File, index: int, into: Dossier) -> None:
    own = into.files[index]
    own.format, own.version = FORMAT, VERSION
    try:
        data = b""
        for chunk in file.chunks():
            data += chunk
            if len(data) > BYTES_MAX:
                own.refused = f"more than {BYTES_MAX >> 20} MiB for one process"
                return
        if is_too_deep(data):
            own.refused = "it is nested too deep"
            return
        told = json.loads(data)
    except (HitsError, OSError, ValueError, RecursionError) as error:
        own.refused = f"no whole JSON: {printable(str(error))[:TEXT_CHARS_MAX]}"
        return
    if not isinstance(told, dict) or not isinstance(told.get("status"), dict):
        own.refused = "nothing in it says what state the process was in"
        return
    own.records = 1
    into.lines.append(Line(_who(told), EVENT, _fields(told), At(index, 0)))


def _who(told: dict[str, Any]) -> Who:
    rank, pid, host = told.get("rank"), told.get("pid"), told.get("host")
    return Who(
        rank if type(rank) is int and rank >= 0 else None,
        pid if type(pid) is int and pid > 0 else None,
        printable(host)[:TEXT_CHARS_MAX] if isinstance(host, str) else "",
    )


def _fields(told: dict[str, Any]) -> dict[str, Any]:
    """State, look, and of all threads: how many, what they computed, and what the first one waits in."""
    status, threads = told["status"], told.get("threads")
    rows = [one for one in threads if isinstance(one, dict)] if isinstance(threads, list) else []
    first = next((one for one in rows if one.get("tid") == told.get("pid")), {})
    ticks = [one.get(name) for one in rows for name in ("user_ticks", "system_ticks")]
    return {
        "state": _text(status.get("state")),
        "look": told["look"] if type(told.get("look")) is int else 0,
        "threads": len(rows),
        "ticks": sum(count for count in ticks if type(count) is int),
        "wchan": _text(first.get("wchan")),
    }


def _text(value: Any) -> str:
    return printable(value)[:TEXT_CHARS_MAX] if isinstance(value, str) else ""
