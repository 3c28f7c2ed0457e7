"""A trace through the runtime, one request after the other, and beside a cache that is obviously right.

The suite takes the beginning of a trace, `tests.soak` all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hicache.config import Config
from hicache.schedule import Schedule
from hicache.sim.world import Plan, simulate
from hicache.topology import Topology
from hicache.workload import TraceFile
from tests.support.naive_cache import LeafNodeCache, read_trace, unlimited_hits
from tracer.hits import hits
from tracer.log import find_logs

CONVERSATION = "traces/mooncake_conversation_b512.jsonl.gz"
PAGE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Compared:
    """What the runtime and the other cache said.

    Attributes:
        differences: requests whose hits differ, or whose tokens have no place or two.
        evictions: nodes that the naive cache gave up.
    """

    requests: int
    hit_percent: float
    differences: list[str]
    evictions: int = 0


def beside_seen_pages(path: Path, out: Path, *, topology: Topology, limit: int | None = None) -> Compared:
    """The conversation trace in a cache without limits: a page that was seen is a hit."""
    document = run_trace(path, out, PAGE_TOKENS, limit=limit, topology=topology)
    return _compared(document, unlimited_hits(path, PAGE_TOKENS)[:limit])


def beside_naive_cache(path: Path, out: Path, *, device_pages: int, limit: int | None = None) -> Compared:
    """The conversation trace in a cache that must evict, without a host tier."""
    options = {"device_pages": device_pages, "hierarchical_cache": False}
    document = run_trace(path, out, PAGE_TOKENS, limit=limit, **options)
    naive = LeafNodeCache(device_pages)
    rows = islice(read_trace(path), limit)
    return _compared(
        document, [naive.request(length, ids, PAGE_TOKENS) for length, ids in rows], naive.evictions
    )


def run_trace(
    path: Path, out: Path, page_size: int, *, limit: int | None = None, **options: object
) -> dict[str, Any]:
    """The JSON of `hits --by request` after a run that takes one request after the other."""
    config = Config(
        page_size_tokens=page_size,
        concurrency=1,
        cache_output=False,
        decode_steps="one",
        **options,  # type: ignore[arg-type]
    )
    plan = Plan(config, path.name, lambda replica: TraceFile(path, page_size, limit=limit), Schedule(seed=1))
    result = simulate(plan, out=out)
    assert (result.outcome, result.error) == ("completed", "")
    return hits(find_logs(out), by="request").to_json()


def misplaced(document: dict[str, Any]) -> list[str]:
    """Requests whose prompt tokens are not on one place each."""
    found = [f"unaccounted: {document['unaccounted']}"] if "unaccounted" in document else []
    for row in document["rows"]:
        parts = row["device"] + row["host"] + row["storage"] + row["computed"]
        if parts != row["input_tokens"]:
            found.append(f"{row['rid']}: {parts} of {row['input_tokens']} tokens have a place")
    return found


def _compared(document: dict[str, Any], expected_pages: list[int], evictions: int = 0) -> Compared:
    rows = document["rows"]
    differences = misplaced(document)
    expected = [(f"r{index}", PAGE_TOKENS * pages) for index, pages in enumerate(expected_pages)]
    found = [(row["rid"], row["device"]) for row in rows]
    differences += [
        f"{ours}, and {theirs} expected"
        for ours, theirs in zip(found, expected, strict=False)
        if ours != theirs
    ]
    if len(found) != len(expected):
        differences.append(f"{len(found)} requests, and {len(expected)} expected")
    return Compared(document["requests"], round(100 * document["hit_rate"], 1), differences, evictions)
