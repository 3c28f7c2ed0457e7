"""What one rank does by itself, four ranks on two stages do alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from hicache.agentic import AgenticSpec
from hicache.config import Config, StorageConfig
from hicache.topology import Topology
from tests.support.runs import agentic_plan, lockstep, of_kind, run_in_memory

CROWDED = AgenticSpec(
    conversations=6, rounds=4, max_context=200, output=24, shared_prefix=8, aborts=60, priorities=3
)
SEEDS = (4, 5)


def crowded(seed: int) -> dict[int, list[dict[str, Any]]]:
    config = Config(
        topology=Topology(tp=2, pp=2),
        page_size_tokens=4,
        device_pages=60,
        host_pages=150,
        concurrency=6,
        chunked_prefill_tokens=8,
        decode_reserve_percent=0,
        priority_scheduling=True,
        seed=seed,
    )
    result, rows = run_in_memory(agentic_plan(config, replace(CROWDED, seed=seed), seed=seed))
    assert (result.outcome, result.error) == ("completed", "")
    return rows


@pytest.fixture(scope="module")
def worlds() -> list[dict[int, list[dict[str, Any]]]]:
    return [crowded(seed) for seed in SEEDS]


@pytest.mark.parametrize("index", range(len(SEEDS)))
def test_ranks_cut_abort_and_retract_alike(worlds: list[dict[int, list[dict[str, Any]]]], index: int) -> None:
    rows = worlds[index]
    for rank, own in rows.items():
        assert lockstep(own, axes={"tp", "cp", "pp"}) == lockstep(rows[0], axes={"tp", "cp", "pp"}), rank
        assert of_kind(own, "wrong_page") == []
        assert {audit["protected"] for audit in of_kind(own, "pool_audit")} == {0}
    ended = Counter(row["reason"] for row in of_kind(rows[0], "finish"))
    assert sum(ended.values()) == CROWDED.conversations * CROWDED.rounds
    assert set(ended) <= {"stop", "abort"}


def test_these_worlds_have_every_kind_of_abort_and_retractions(
    worlds: list[dict[int, list[dict[str, Any]]]],
) -> None:
    """Otherwise the test above would prove little."""
    found: Counter[str] = Counter()
    for rows in worlds:
        found.update(f"abort {row['place']}" for row in of_kind(rows[0], "abort"))
        found.update(row["kind"] for row in of_kind(rows[0], "retract"))
    assert {"abort waiting", "abort running", "abort chunked", "abort ", "retract"} <= set(found), found


def test_all_ranks_attach_or_none_does() -> None:
    """Rank 3 can't reach the store the first time; the second attach finds everybody ready."""
    config = Config(
        topology=Topology(tp=2, pp=2), storage=StorageConfig(backend="memory", attached=False), concurrency=1
    )
    spec = AgenticSpec(conversations=1, rounds=3, max_context=900, output=4, shared_prefix=0, think=100)
    plan = agentic_plan(
        config, spec, faults=["attach_fail:rank=3,nth=1"], commands="attach@60,attach@170,detach@280"
    )
    result, rows = run_in_memory(plan)
    assert (result.outcome, result.error) == ("completed", "")
    for rank, own in rows.items():
        told = [(row["verb"], row["reason"], row["verdict"]) for row in of_kind(own, "command")]
        assert told == [
            ("attach", "unreachable", "refused"),
            ("attach", "", "done"),
            ("detach", "", "done"),
        ], rank
    ready = [[row["is_ready"] for row in of_kind(rows[rank], "command")] for rank in range(4)]
    assert ready == [[True] * 3, [True] * 3, [True] * 3, [False, True, True]]
