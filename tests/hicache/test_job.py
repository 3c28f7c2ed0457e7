from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hicache.config import Config, StorageConfig
from hicache.errors import ConfigError
from hicache.job import Ending, Logs, PlanSpec, TraceLimits, describe, result_of, write_summary
from hicache.storage.limits import Limits
from hicache.topology import Topology
from hicache.transport.meetings import LOST, LostPeerError

SMALL = "conversations=2,rounds=2,max-context=512,output=4,shared-prefix=64"
SPEC = PlanSpec(
    Config(
        topology=Topology(tp=2, pp=2),
        storage=StorageConfig(backend="memory"),
        side_pools=("draft", "mamba"),
        seed=7,
    ),
    agentic=SMALL,
    limit=3,
    faults=("alloc_fail:rank=2,pool=host,nth=5",),
    bugs=("skip_collective_when_empty",),
    commands="attach@40,flush@120",
    storage_limits={"max_size_bytes": 1000},
)


def test_a_plan_reads_back_what_was_written() -> None:
    assert PlanSpec.from_json(SPEC.to_json()) == SPEC


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"config": 1}', SPEC.to_json().replace('"seed"', '"sede"')], ids=str
)
def test_something_else_is_not_a_plan(text: str) -> None:
    with pytest.raises(ConfigError, match="not a plan of this version"):
        PlanSpec.from_json(text)


@pytest.mark.parametrize(
    ("written", "instead", "told"),
    [
        ('"write_policy": "write_through"', '"write_policy": "wrong"', "config.write_policy is 'wrong'"),
        ('"agentic": "', '"agentic": 5, "x": "', "PlanSpec"),
        ('"backend": "memory"', '"backend": "s3"', "config.storage.backend is 's3'"),
        ('"pp": 2', '"pp": 2.0', "config.topology.pp is 2.0, expected a whole number"),
        ('"limit": 3', '"limit": "3"', "limit is '3', expected a whole number or null"),
        ('"limit": 3', '"limit": -3', "limit is -3"),
        ('"max_size_bytes": 1000', '"max_size": 1000', "max_size"),
        ('"max_size_bytes": 1000', '"max_size_bytes": "1000"', "'<=' not supported"),
        ('"commands": "attach@40,flush@120"', '"commands": []', "commands is \\[\\], expected a text"),
        ('"cache_output": true', '"cache_output": 1', "config.cache_output is 1, expected true or false"),
    ],
)
def test_a_value_that_is_none_of_its_kind_is_named(written: str, instead: str, told: str) -> None:
    text = SPEC.to_json()
    assert written in text
    with pytest.raises(ConfigError, match=told):
        PlanSpec.from_json(text.replace(written, instead))


def test_a_plan_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a plan of this version"):
        PlanSpec.from_json("[" * 100_000)


def test_a_plan_is_the_same_run_in_every_process() -> None:
    one, other = SPEC.plan(), PlanSpec.from_json(SPEC.to_json()).plan()
    assert (one.run_id, one.digest_key, one.workload_name) == (
        other.run_id,
        other.digest_key,
        other.workload_name,
    )
    assert one.workload_name == f"agentic {SMALL},seed=7 limit=3"
    assert [(poll, command.verb) for poll, command in one.commands] == [(40, "attach"), (120, "flush")]
    assert one.storage_limits == Limits(max_size_bytes=1000)


def test_only_the_first_rank_of_a_replica_has_a_front_door() -> None:
    plan = PlanSpec(Config(topology=Topology(dp=2, pp=2, tp=2)), agentic=SMALL).plan()
    assert [rank for rank in range(8) if plan.front_door(rank) is not None] == [0, 4]


def test_a_bug_does_not_move_the_digests_that_its_twin_is_compared_by() -> None:
    twin = PlanSpec(SPEC.config, agentic=SMALL, limit=3)
    assert twin.plan().digest_key == SPEC.plan().digest_key
    assert twin.plan().run_id != SPEC.plan().run_id


def endings(*outcomes: Any, **more: Any) -> dict[int, Ending]:
    return {rank: Ending(rank, outcome, **more) for rank, outcome in enumerate(outcomes)}


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (["completed", "completed"], "completed"),
        (["completed", "stopped"], "stopped"),
        (["stopped", "hung"], "hung"),
        (["hung", "crashed", "stopped"], "crashed"),
    ],
)
def test_the_worst_ending_of_a_rank_is_the_runs(outcomes: list[str], expected: str) -> None:
    assert result_of(SPEC.plan(), endings(*outcomes)).outcome == expected


def test_the_rank_that_is_quoted_is_not_one_that_only_lost_another() -> None:
    found = {
        0: Ending(0, "stopped", f"{LOST}Connection closed by peer"),
        1: Ending(1, "stopped", "told to end by a signal"),
    }
    assert result_of(SPEC.plan(), found).error == "rank 1: told to end by a signal"


def test_a_summary_says_of_every_rank_how_it_ended(tmp_path: Path) -> None:
    found = {0: Ending(0, "hung", "", "all_reduce tp0/main #7", steps=9, served=4), 1: Ending(1, "stopped")}
    plan = SPEC.plan()
    assert write_summary(tmp_path, plan, result_of(plan, found), trace="full", mode="gloo") == ""
    summary = json.loads((tmp_path / "run.json").read_text())
    assert (summary["mode"], summary["outcome"], summary["ranks"]) == (
        "gloo",
        "hung",
        {"0": "hung", "1": "stopped"},
    )
    assert summary["parked"] == {"0": "all_reduce tp0/main #7"}
    assert (summary["counts"]["requests_served"], summary["counts"]["steps"]) == (4, 9)
    assert summary["commands"] == ["attach@40", "flush@120"]


def test_a_summary_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    plan = SPEC.plan()
    said = write_summary(tmp_path / "nope", plan, result_of(plan, endings("completed")), trace="full")
    assert said == f"{tmp_path / 'nope' / 'run.json'} was not written: No such file or directory"


def test_lanes_share_what_a_rank_may_keep_of_its_newest_records(tmp_path: Path) -> None:
    """Half for the scheduler, which says most; the rest for the other four.

    Of its half a file's room is kept for the one that is written, and one for the one that is packed.
    """
    logs = Logs(SPEC.plan(), tmp_path, "ring", limits=TraceLimits(ring_bytes=1 << 20))
    tracers = {lane: logs.tracer(0, lane, lambda: 0) for lane in ("scheduler", "prefetch", "backup")}
    from hicache.probes import LANE_STATE

    for tracer in tracers.values():
        emit = tracer.emitter(LANE_STATE)
        for number in range(100_000):
            emit("idle", number)
        tracer.close("completed")
    sizes = {
        lane: sum(file.stat().st_size for file in tmp_path.glob(f"rank0000.{lane}.*")) for lane in tracers
    }
    assert (1 << 18) - (1 << 17) < sizes["scheduler"] <= 1 << 19
    assert sizes["prefetch"] <= 1 << 17
    assert sizes["backup"] <= 1 << 17


def test_an_error_is_described_by_its_type_where_its_text_does_not_say() -> None:
    assert describe(AssertionError("1 held + 2 free != 4\n  nodes")) == "1 held + 2 free != 4 nodes"
    assert describe(AssertionError()) == "AssertionError"
    assert describe(LostPeerError(f"{LOST}x")) == "lost another rank: x"
    assert describe(KeyError("a")) == "KeyError: 'a'"
