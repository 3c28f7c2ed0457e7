"""The runtime's hits on real traces, request by request, against caches that are obviously right."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from hicache.topology import Topology
from tests.support import hit_oracle
from tests.support.hit_oracle import CONVERSATION, run_trace
from tests.support.naive_cache import unlimited_hits


def assert_every_token_has_one_place(document: dict[str, object]) -> None:
    assert hit_oracle.misplaced(document) == []


# The first requests of the trace; `make soak` takes all 12,031, on four ranks and at both sizes.
@pytest.mark.slow
def test_hits_of_the_conversation_trace_are_those_of_a_set_of_seen_pages(
    public_data: Path, tmp_path: Path
) -> None:
    compared = hit_oracle.beside_seen_pages(
        public_data / CONVERSATION, tmp_path, topology=Topology(tp=4), limit=1_000
    )
    assert (compared.requests, compared.differences) == (1_000, [])
    assert compared.hit_percent == 21.5


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
@pytest.mark.parametrize(("device_pages", "evictions"), [(1_000, 2_194), (10_000, 1_736)])
def test_hits_under_eviction_are_those_of_the_naive_leaf_cache(
    device_pages: int, evictions: int, public_data: Path, tmp_path: Path
) -> None:
    compared = hit_oracle.beside_naive_cache(
        public_data / CONVERSATION, tmp_path, device_pages=device_pages, limit=2_500
    )
    assert (compared.requests, compared.differences, compared.evictions) == (2_500, [], evictions)
