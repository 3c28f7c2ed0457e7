"""The runtime's hits on real traces, request by request, against caches that are obviously right."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from hicache.config import Config
from hicache.schedule import Schedule
from hicache.sim.world import Plan, simulate
from hicache.topology import Topology
from hicache.workload import TraceFile
from tests.support.naive_cache import LeafNodeCache, read_trace, unlimited_hits
from tracer.hits import hits
from tracer.log import find_logs

CONVERSATION = "traces/mooncake_conversation_b512.jsonl.gz"


def run_trace(path: Path, out: Path, page_size: int, **options: object) -> dict[str, object]:
    """The JSON of `hits --by request` after a run that takes one request after the other."""
    config = Config(
        page_size_tokens=page_size,
        concurrency=1,
        cache_output=False,
        decode_steps="one",
        **options,  # type: ignore[arg-type]
    )
    plan = Plan(config, path.name, lambda replica: TraceFile(path, page_size), Schedule(seed=1))
    result = simulate(plan, out=out)
    assert (result.outcome, result.error) == ("completed", "")
    return hits(find_logs(out), by="request").to_json()


def assert_every_token_has_one_place(document: dict[str, object]) -> None:
    assert "unaccounted" not in document
    for row in document["rows"]:  # type: ignore[attr-defined]
        parts = row["device"] + row["host"] + row["storage"] + row["computed"]
        assert parts == row["input_tokens"], row


@pytest.mark.slow
def test_hits_of_the_conversation_trace_are_those_of_a_set_of_seen_pages(
    public_data: Path, tmp_path: Path
) -> None:
    path = public_data / CONVERSATION
    document = run_trace(path, tmp_path, 512, topology=Topology(tp=4))
    rows = document["rows"]
    assert document["requests"] == 12_031
    assert [row["rid"] for row in rows] == [f"r{index}" for index in range(12_031)]  # type: ignore[attr-defined]
    assert [row["device"] for row in rows] == [512 * pages for pages in unlimited_hits(path, 512)]  # type: ignore[attr-defined]
    assert_every_token_has_one_place(document)
    assert round(100 * document["hit_rate"], 1) == 37.3  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "page_size"),
    [("traces/weka_claudecode_a_b64.jsonl.gz", 64), ("traces/lmcache_miniswe_b16.jsonl.gz", 16)],
)
def test_hits_of_agent_traces_are_those_of_a_set_of_seen_pages(
    name: str, page_size: int, public_data: Path, tmp_path: Path
) -> None:
    path = public_data / name
    document = run_trace(path, tmp_path, page_size)
    expected = [page_size * pages for pages in unlimited_hits(path, page_size)]
    assert [row["device"] for row in document["rows"]] == expected  # type: ignore[attr-defined]
    assert_every_token_has_one_place(document)


def test_hits_of_exact_repeats_leave_one_token_to_compute(tmp_path: Path) -> None:
    path = tmp_path / "repeats.jsonl"
    chance = random.Random("repeats")
    lines = []
    for _ in range(200):
        pages = chance.randint(1, 6)
        first = chance.randrange(4)
        # Chained ids: page k of family f is f, 10 + f, 20 + f, ...
        ids = [10 * page + first for page in range(pages)]
        extra = chance.choice([0, 0, 1, 15])
        lines.append(
            {"input_length": 16 * pages + extra, "output_length": 3, "hash_ids": ids + [900] * (extra > 0)}
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    document = run_trace(path, tmp_path / "run", 16)
    rows = document["rows"]
    expected = unlimited_hits(path, 16)
    assert [row["device"] for row in rows] == [16 * pages for pages in expected]  # type: ignore[attr-defined]
    assert_every_token_has_one_place(document)
    whole = [row for row in rows if row["input_tokens"] % 16 == 0 and row["reason"] == "last_token"]  # type: ignore[attr-defined]
    assert len(whole) > 50, "the last-token rule must bite"
    assert {row["computed"] for row in whole} == {16}


@pytest.mark.slow
@pytest.mark.parametrize("device_pages", [1_000, 10_000])
def test_hits_under_eviction_are_those_of_the_naive_leaf_cache(
    device_pages: int, public_data: Path, tmp_path: Path
) -> None:
    path = public_data / CONVERSATION
    document = run_trace(path, tmp_path, 512, device_pages=device_pages, hierarchical_cache=False)
    naive = LeafNodeCache(device_pages)
    expected = [512 * naive.request(length, ids, 512) for length, ids in read_trace(path)]
    assert [row["device"] for row in document["rows"]] == expected  # type: ignore[attr-defined]
    assert_every_token_has_one_place(document)
