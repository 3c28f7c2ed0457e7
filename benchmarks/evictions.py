"""Hits under eviction: the runtime beside a naive cache of nodes, and beside one of single pages.

The first two must be equal, request by request. The third is what a cache would keep whose leaves are pages
and not whole nodes: the price of a radix tree's eviction unit.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from benchmarks.conversation import PAGE_TOKENS, config, plan
from hicache.sim.world import simulate
from tests.support.naive_cache import LeafNodeCache, LeafPageCache, read_trace
from tracer.hits import hits
from tracer.log import find_logs


def runtime_hits(path: Path, device_pages: int) -> list[int]:
    folder = Path(tempfile.mkdtemp(prefix="hicache-bench-"))
    try:
        simulate(plan(path, config(device_pages=device_pages, hierarchical_cache=False)), out=folder)
        return [request.device // PAGE_TOKENS for request in hits(find_logs(folder)).requests]
    finally:
        shutil.rmtree(folder)


def naive_hits(cache: LeafNodeCache | LeafPageCache, path: Path) -> list[int]:
    return [cache.request(length, ids, PAGE_TOKENS) for length, ids in read_trace(path)]


def main(path: Path) -> None:
    tokens = sum(length for length, _ in read_trace(path))
    print("conversation trace, no host tier: token hit rate under eviction (%)")
    print("  device pages   runtime   naive, nodes   naive, pages   requests that differ from `nodes`")
    for device_pages in (1_000, 10_000):
        ours = runtime_hits(path, device_pages)
        nodes = naive_hits(LeafNodeCache(device_pages), path)
        pages = naive_hits(LeafPageCache(device_pages), path)
        rates = [100 * PAGE_TOKENS * sum(found) / tokens for found in (ours, nodes, pages)]
        differing = sum(one != two for one, two in zip(ours, nodes, strict=True))
        print(f"  {device_pages:>12,}   {rates[0]:7.3f}   {rates[1]:12.3f}   {rates[2]:12.3f}   {differing}")
