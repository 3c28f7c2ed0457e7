"""What a real server's scheduler leaves of a few requests, literally: two rounds, a prefill, a prefetch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Record = dict[str, Any]
CONFIG: Mapping[str, Any] = {
    "server": "sglang",
    "version": "0.5.23",
    "page_size_tokens": 16,
    "hicache_storage_backend": "file",
    "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "wait_complete",
    "prefetch_threshold_tokens": 32,
}
ROOM: Mapping[str, int] = {"device_pages_free": 80, "host_pages_free": 97}
PAGES = "a" * 12 + "b" * 12
OTHER_PAGES = "a" * 12 + "c" * 12


def event_round(number: int, *, waiting: int = 0, of: str = "00", **counts: int) -> list[Record]:
    """Its two records."""
    about = {"kind": "event_round", "round": number}
    call = {"waiting": [waiting, of], "evictable_pages": 0, **ROOM}
    agreed = {f"{name}_agreed": counts.get(name, 0) for name in ("writes", "loads", "hits", "prefetch_acks")}
    agreed |= {"storage_acks_agreed": 0, "releases_agreed": 0, "side_releases_agreed": []}
    done = {"writes_done": counts.get("writes", 0), "loads_done": counts.get("loads", 0)}
    return [{**about, "phase": "call", **call}, {**about, "phase": "return", **agreed, **done}]


def arrival(rid: str, order: int, pages: str | None = PAGES, *, outcome: str = "issued") -> list[Record]:
    """A request of 40 tokens, what was looked up of it, and the prefetch that was asked for."""
    request = {"kind": "request", "rid": rid, "order": order, "content": f"c-{rid}", "input_tokens": 40}
    asked = {"kind": "prefetch_submit", "rid": rid, "attempt": 0, "op": order, "outcome": outcome}
    return [{**request, "pages": pages}, match(rid), asked]


def match(rid: str) -> Record:
    return {"kind": "match", "rid": rid, "content": f"m-{rid}", "tokens": 39, "node": 1}


def poll(rid: str, verdict: str = "wait") -> Record:
    return {"kind": "prefetch_poll", "rid": rid, "attempt": 0, "verdict": verdict}


def prefill(rid: str, *, pages: int = 2, content: str = "", room: int = 80) -> list[Record]:
    """What is computed of it is inserted, and written to the host."""
    about = {"pages_wanted": 3, "pages": 3, "device_pages_free": room}
    return [
        {"kind": "alloc", "purpose": "pages", **about},
        {"kind": "admit", "rid": rid, "extend_tokens": 40},
        {"kind": "forward", "mode": "extend", "tokens": 40},
        {"kind": "alloc_host", "pool": "", "pages_wanted": 2, "pages": pages, "host_pages_free": 97},
        {"kind": "write_backup", "node": 2, "pages": 2, "tokens": 16 * pages},
        {"kind": "insert", "content": content or f"i-{rid}", "tokens": 32, "prefix_tokens": 0},
        {"kind": "checkpoint_insert", "rid": rid, "up_to": 40},
    ]


def finish(rid: str, pages: str = "d" * 12) -> list[Record]:
    """It has put out 8 tokens, of which all but the last were computed."""
    return [
        {"kind": "insert", "content": f"f-{rid}", "tokens": 32, "prefix_tokens": 32},
        {"kind": "checkpoint_insert", "rid": rid, "up_to": 47},
        {"kind": "finish", "rid": rid, "reason": "FINISH_LENGTH", "output_tokens": 8, "pages": pages},
    ]


def flush(*nodes: int) -> list[Record]:
    return [{"kind": "transfer_enqueue", "queue": "write", "nodes": list(nodes), "slot": None, "pages": 2}]


def joined(*parts: Record | Sequence[Record]) -> list[Record]:
    found: list[Record] = []
    for part in parts:
        found += [part] if isinstance(part, dict) else part
    return found


def run_of_two() -> list[Record]:
    """Two requests, of which the first is computed and has come to its end."""
    return joined(
        event_round(1),
        arrival("r1", 0),
        event_round(2, waiting=1),
        poll("r1"),
        event_round(3, waiting=1, hits=1),
        {"kind": "prefetch_outcome", "rid": "r1", "outcome": "revoked"},
        match("r1"),
        prefill("r1"),
        flush(2),
        arrival("r2", 1, OTHER_PAGES),
        event_round(4, waiting=1, writes=1),
        {"kind": "transfer_ack", "queue": "write", "node": 2},
        {"kind": "acks", "queue": "write", "count": 1},
        poll("r2"),
        finish("r1"),
        event_round(5, waiting=1),
    )
