"""Samples of files that servers write, by formats that are public; all values are invented.

Whatever must never be seen in any output has one of `CANARIES` in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROMPT, ANSWER, API_KEY, TOKEN = "CANARY-PROMPT", "CANARY-ANSWER", "sk-CANARY-KEY", 7_700_077
CANARIES = (PROMPT, ANSWER, API_KEY, str(TOKEN))


def metrics(rid: str, prompt: int, cached: int | None = 0, **more: Any) -> dict[str, Any]:
    """A line of SGLang's request metrics."""
    return {
        "request_parameters": json.dumps({"text": PROMPT, "input_ids": [TOKEN]}),
        "id": rid,
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": prompt,
        "completion_tokens": 12,
        "cached_tokens": cached,
        "e2e_latency": 1.5,
        "queue_time": 0.01,
        **more,
    }


def received(rid: str) -> str:
    """A line of SGLang's request log at level 3: with the prompt, and the headers."""
    event = {
        "timestamp": "2026-11-20T10:00:00.250000+00:00",
        "event": "request.received",
        "rid": rid,
        "obj": {"text": f'{PROMPT} {{"event"', "input_ids": [TOKEN]},
        "headers": {"authorization": f"Bearer {API_KEY}"},
    }
    return f"[2026-11-20 10:00:00] {json.dumps(event)}"


def finished(rid: str, prompt: int, cached: int | None, **more: Any) -> str:
    meta = {"id": rid, "prompt_tokens": prompt, "cached_tokens": cached, "finish_reason": {"type": "stop"}}
    event = {
        "timestamp": "2026-11-20T10:00:02+00:00",
        "event": "request.finished",
        "rid": rid,
        "obj": {"text": PROMPT},
        "out": {"text": ANSWER, "output_ids": [TOKEN], "meta_info": {**meta, **more}},
    }
    return f"[2026-11-20 10:00:02] {json.dumps(event)}"


def prefill(new: int, cached: int, *, prefix: str = "2026-11-20 10:00:00 DP0 TP0", more: str = "") -> str:
    return (
        f"[{prefix}] Prefill batch, #new-seq: 1, #new-token: {new}, #cached-token: {cached}, "
        f"token usage: 0.31, #running-req: 2, #queue-req: 0, #pending-token: 0, {more}"
        "cuda graph: False, input throughput (token/s): 8123.40"
    )


def benchmark(**more: Any) -> str:
    """A line of bench_serving: no JSON, because of its request rate."""
    run = {
        "tag": None,
        "backend": "sglang",
        "dataset_name": "generated-shared-prefix",
        "request_rate": float("inf"),
        "max_concurrency": 4,
        "server_info": {"api_key": API_KEY, "model_path": "m"},
        "duration": 10.5,
        "completed": 2,
        "total_input_tokens": 300,
        "request_throughput": 0.2,
    }
    return json.dumps({**run, **more})


REPORT = {
    "total_prompt_tokens": 300,
    "total_cached_tokens": 120,
    "cache_hit_rate_pct": 40.0,
    "device_cached_tokens": 100,
    "host_cached_tokens": 20,
    "storage_cached_tokens": None,
    "storage_backend": None,
}
DETAILS = {
    "input_lens": [100, 200],
    "output_lens": [5, 5],
    "ttfts": [0.1, 0.2],
    "itls": [[0.01, 0.02], []],
    "generated_texts": [ANSWER, ANSWER],
    "errors": ["", ""],
    "cached_tokens": [0, 120],
    "cached_tokens_details": [None, {"device": 100, "host": 20}],
}


def stored(*blocks: int, size: int = 16, medium: str | None = "GPU", **more: Any) -> dict[str, Any]:
    """A BlockStored event of SGLang's."""
    told = {} if medium is None else {"medium": medium}
    return {
        "type": "BlockStored",
        "block_hashes": list(blocks),
        "parent_block_hash": None,
        "token_ids": [TOKEN] * (size * len(blocks)),
        "block_size": size,
        "lora_id": None,
        **told,
        **more,
    }


def removed(*blocks: int, medium: str | None = "GPU") -> dict[str, Any]:
    told = {} if medium is None else {"medium": medium}
    return {"type": "BlockRemoved", "block_hashes": list(blocks), **told}


def lookup(rid: str, keys: list[int], mask: int, at: int = 1_763_975_741_000_000) -> dict[str, Any]:
    return {
        "id": rid,
        "source": "1",
        "component": "cache_manager",
        "type": "GetCacheLocation",
        "trigger_time_us": at,
        "query_type": "prefix_match",
        "keys": keys,
        "tokens": [TOKEN],
        "block_mask": mask,
        "sw_size": -1,
        "location_spec_names": [],
    }


def write_started(session: str, keys: list[int]) -> dict[str, Any]:
    common = {
        "id": "w",
        "source": "1",
        "component": "cache_manager",
        "trigger_time_us": 1_763_975_744_000_000,
    }
    return {
        **common,
        "type": "StartWriteCache",
        "write_session_id": session,
        "keys": keys,
        "tokens": [TOKEN],
        "location_spec_group_names": [],
        "write_timeout_seconds": 1800,
    }


def write_finished(session: str) -> dict[str, Any]:
    common = {
        "id": "f",
        "source": "1",
        "component": "cache_manager",
        "trigger_time_us": 1_763_975_745_000_000,
    }
    return {**common, "type": "FinishWriteCache", "write_session_id": session, "success_block": 1}


def write(path: Path, *rows: str | bytes | Mapping[str, Any]) -> Path:
    """A file of lines, each a text or an object as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [json.dumps(row) if isinstance(row, Mapping) else row for row in rows]
    path.write_bytes(b"".join((row if isinstance(row, bytes) else row.encode()) + b"\n" for row in texts))
    return path
