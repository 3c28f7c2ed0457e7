"""A correct runtime stays in lockstep, whatever the world does to it."""

from __future__ import annotations

import random

import pytest

from hicache.config import Config
from hicache.topology import Topology
from hicache.workload import AgenticSpec
from tests.support.runs import agentic_plan, lockstep, of_kind, run_in_memory

TOPOLOGIES = {
    "tp=4": Topology(tp=4),
    "tp=2,pp=2": Topology(tp=2, pp=2),
    "cp=2,tp=2": Topology(cp=2, tp=2),
    "pp=4": Topology(pp=4),
    "dp=2,tp=2": Topology(dp=2, tp=2),
    "pp=2,cp=2,tp=2": Topology(pp=2, cp=2, tp=2),
    "one rank": Topology(),
}


def disturbed(topology: Topology, chance: random.Random) -> list[str]:
    """Late copies on several ranks and host memory that fails on several."""
    faults = []
    for _ in range(6):
        rank = chance.randrange(topology.world_size)
        queue = chance.choice(["write", "load"])
        faults.append(
            f"delay_done:rank={rank},queue={queue},op={chance.randint(1, 12)},steps={chance.randint(1, 9)}"
        )
    for _ in range(4):
        rank = chance.randrange(topology.world_size)
        faults.append(f"alloc_fail:rank={rank},pool=host,nth={chance.randint(1, 30)}")
    return faults


# `make fast` takes the first seed of each.
SEEDS = [pytest.param(seed, marks=[pytest.mark.slow] if seed > 1 else []) for seed in range(1, 6)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_ranks_decide_alike_under_late_copies_and_failing_host_memory(name: str, seed: int) -> None:
    topology = TOPOLOGIES[name]
    chance = random.Random(f"{name}/{seed}")
    config = Config(
        topology=topology,
        device_pages=chance.randint(105, 160),
        host_pages=chance.choice([60, 150, 300]),
        concurrency=chance.randint(1, 6),
        transfer_polls_max=chance.choice([0, 2, 7]),
        seed=seed,
    )
    spec = AgenticSpec(conversations=5, rounds=6, max_context=3600, output=24, shared_prefix=128, seed=seed)
    faults = disturbed(topology, chance)
    result, rows = run_in_memory(agentic_plan(config, spec, seed=seed, faults=faults))

    where = f"{config} {faults} seed {seed}"
    assert (result.outcome, result.error) == ("completed", ""), where
    assert result.served == spec.conversations * spec.rounds, where
    for rank, own in rows.items():
        at = topology.coordinates(rank)
        leader = topology.rank_at(dp=at.dp, pp=0, cp=0, tp=0)
        stage = topology.rank_at(dp=at.dp, pp=at.pp, cp=0, tp=0)
        assert lockstep(own, axes={"tp", "cp", "pp"}) == lockstep(rows[leader], axes={"tp", "cp", "pp"}), (
            where
        )
        assert lockstep(own, axes={"tp", "cp"}) == lockstep(rows[stage], axes={"tp", "cp"}), where
        assert of_kind(own, "wrong_page") == [], where
        for audit in of_kind(own, "pool_audit"):
            assert audit["available"] + audit["evictable"] + audit["protected"] == audit["total"], where
            assert audit["protected"] == 0, where


def test_the_faults_of_the_sweep_do_strike() -> None:
    """Otherwise the sweep above would prove nothing."""
    topology = Topology(tp=4)
    config = Config(topology=topology, device_pages=120, host_pages=150, concurrency=3)
    spec = AgenticSpec(conversations=5, rounds=6, max_context=3600, output=24, shared_prefix=128)
    plan = agentic_plan(config, spec, faults=disturbed(topology, random.Random("strike")))
    _, rows = run_in_memory(plan)
    assert {fired.split(" ", 1)[0] for fired in plan.faults.fired} == {"alloc_fail", "delay_done"}
    for kind in ("backup_cancel", "evict", "evict_host", "load_back", "write_backup"):
        assert of_kind(rows[0], kind), f"no {kind} in this world"


def test_the_same_plan_gives_the_same_bytes() -> None:
    config = Config(topology=Topology(tp=2, pp=2), device_pages=110, host_pages=200, concurrency=3)
    spec = AgenticSpec(conversations=4, rounds=5, max_context=3000, output=16, shared_prefix=64)
    first, _ = run_in_memory(agentic_plan(config, spec, seed=7))
    second, _ = run_in_memory(agentic_plan(config, spec, seed=7))
    other, _ = run_in_memory(agentic_plan(config, spec, seed=8))
    assert first.lines == second.lines
    assert first.lines != other.lines


def test_later_stages_never_poll_their_own_copies() -> None:
    config = Config(topology=Topology(pp=3), device_pages=110, host_pages=200, concurrency=3)
    spec = AgenticSpec(conversations=4, rounds=5, max_context=3000, output=16, shared_prefix=64)
    _, rows = run_in_memory(agentic_plan(config, spec))
    for rank in (1, 2):
        calls = [row for row in of_kind(rows[rank], "event_round") if row["phase"] == "call"]
        assert calls
        assert {(row["writes_done"], row["loads_done"]) for row in calls} == {(None, None)}


def test_a_request_that_can_never_fit_is_refused_and_the_rest_is_served() -> None:
    config = Config(topology=Topology(tp=2), device_pages=20, host_pages=50, concurrency=2)
    spec = AgenticSpec(conversations=2, rounds=4, max_context=2000, output=8, shared_prefix=0)
    result, rows = run_in_memory(agentic_plan(config, spec))
    reasons = {row["rid"]: row["reason"] for row in of_kind(rows[1], "finish")}
    assert result.outcome == "completed"
    assert reasons["c0.t2"] == "stop"
    # Turn 3 has 1,500 tokens, 24 pages of 64; the device has 20.
    assert reasons["c0.t3"] == "too_long"
