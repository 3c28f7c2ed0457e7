"""After every step of every rank, all that is kept up to date in small changes is derived again."""

from __future__ import annotations

import random

import pytest

from hicache.config import Config
from hicache.control.keys import pack
from hicache.control.scheduler import Scheduler
from hicache.core import Request
from hicache.schedule import Schedule
from hicache.sim.faults import Fault, FaultPlan
from hicache.sim.world import Plan
from hicache.topology import Topology
from tests.support.invariants import assert_invariants
from tests.support.runs import Listed, of_kind, run_in_memory
from tests.support.survival import PREFETCH_POLICIES, WRITE_POLICIES, config_of_chance

# `make fast` takes the first few.
SEEDS = [pytest.param(seed, marks=[pytest.mark.slow] if seed > 8 else []) for seed in range(1, 21)]


def dense_requests(chance: random.Random, page_size: int) -> list[Request]:
    """Prompts of two tokens only, that continue, cut and repeat each other."""
    prompts = [[chance.randrange(2) for _ in range(3 * page_size)]]
    requests = []
    for number in range(60):
        base = chance.choice(prompts[-12:])
        kept = chance.randint(1, len(base)) if chance.random() < 0.4 else len(base)
        tokens = base[:kept] + [chance.randrange(2) for _ in range(chance.randint(0, 6 * page_size))]
        if len(tokens) > 24 * page_size:
            tokens = tokens[: 12 * page_size]
        output_tokens = chance.choice([1, 2, page_size, 3 * page_size])
        output = [chance.randrange(2) for _ in range(output_tokens)]
        prompts.append(tokens + output[:-1])
        requests.append(Request(f"q{number}", pack(tokens), pack(output), output_tokens))
    return requests


def dense_plan(seed: int) -> Plan:
    """Half of the worlds have an external tier, and with it all that came later than the thin line."""
    chance = random.Random(f"dense/{seed}")
    page_size = chance.choice([1, 2, 4, 10])
    topology = chance.choice([Topology(), Topology(tp=2), Topology(pp=2), Topology(pp=2, tp=2)])
    config = Config(
        topology=topology,
        page_size_tokens=page_size,
        device_pages=chance.choice([30, 34, 45, 60]),
        host_pages=chance.choice([0, 40, 80, 200]),
        hierarchical_cache=chance.random() < 0.9,
        concurrency=chance.choice([1, 2, 3, 8]),
        cache_output=chance.random() < 0.8,
        decode_steps=chance.choice(["one", "all"]),
        transfer_polls_max=chance.choice([0, 2, 7, 20]),
        load_back_min_tokens=chance.choice([0, 1, 3, 10]),
        seed=seed,
    )
    if seed % 2:
        config = config_of_chance(
            topology,
            chance,
            page=page_size,
            device_pages=config.device_pages,
            write_policy=chance.choice(WRITE_POLICIES),
            prefetch_policy=chance.choice(PREFETCH_POLICIES),
        )
    faults = dense_faults(topology, chance)
    requests = dense_requests(chance, page_size)
    leave_after = {request.rid: chance.randint(1, 20) for request in requests if chance.random() < 0.1}
    return Plan(
        config=config,
        workload_name=f"dense {seed}",
        workload=lambda replica: Listed(requests, leave_after=leave_after),
        schedule=Schedule(seed=seed),
        faults=FaultPlan([Fault.parse(text, topology) for text in faults]),
        fault_texts=faults,
    )


def dense_faults(topology: Topology, chance: random.Random) -> list[str]:
    faults = []
    for _ in range(chance.randint(0, 6)):
        rank = chance.randrange(topology.world_size)
        if chance.random() < 0.6:
            faults.append(f"alloc_fail:rank={rank},pool=host,nth={chance.randint(1, 40)}")
        else:
            queue = chance.choice(["write", "load", "prefetch", "backup"])
            op, steps = chance.randint(1, 15), chance.randint(1, 20)
            faults.append(f"delay_done:rank={rank},queue={queue},op={op},steps={steps}")
    return faults


@pytest.mark.parametrize("seed", SEEDS)
def test_every_rank_keeps_its_books_after_every_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    iterate = Scheduler._iterate
    steps = 0

    async def iterate_and_look(self: Scheduler) -> bool:
        nonlocal steps
        goes_on = await iterate(self)
        assert_invariants(self)
        steps += 1
        return goes_on

    monkeypatch.setattr(Scheduler, "_iterate", iterate_and_look)
    result, rows = run_in_memory(dense_plan(seed))
    assert (result.outcome, result.error) == ("completed", ""), f"seed {seed}"
    assert result.served + result.refused + result.aborted == 60
    assert steps >= result.steps
    assert all(of_kind(own, "wrong_page") == [] for own in rows.values())


def test_the_dense_worlds_reach_what_they_are_for() -> None:
    seen: set[str] = set()
    declined = splits = 0
    for seed in range(1, 9):
        _, rows = run_in_memory(dense_plan(seed))
        seen |= {row["kind"] for row in rows[0]}
        declined += sum(row["declined"] == "too_short" for row in of_kind(rows[0], "load_back"))
        enqueued = {row["op"]: row["nodes"] for row in of_kind(rows[0], "transfer_enqueue")}
        splits += sum(enqueued[row["op"]] != row["nodes"] for row in of_kind(rows[0], "transfer_ack"))
    assert {"evict", "evict_host", "load_back", "backup_cancel", "transfer_ack"} <= seen
    assert {"prefetch_insert", "storage_ack", "abort", "retract"} <= seen
    assert declined, "no load back was declined"
    assert splits, "no node was split under a copy"


def test_a_request_counts_each_of_its_nodes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompt is inserted when it is computed, and again with the answer."""
    seen: dict[int, int] = {}
    iterate = Scheduler._iterate

    async def iterate_and_look(self: Scheduler) -> bool:
        goes_on = await iterate(self)
        seen.update({node.id: node.hit_count for node in self._cache.tree.walk()})
        return goes_on

    monkeypatch.setattr(Scheduler, "_iterate", iterate_and_look)
    request = Request("q", pack([1] * 8), pack([2] * 9), 9)
    config = Config(page_size_tokens=4, concurrency=1)
    run_in_memory(Plan(config, "one", lambda replica: Listed([request]), Schedule(seed=1)))
    assert seen == {1: 1, 2: 1}
