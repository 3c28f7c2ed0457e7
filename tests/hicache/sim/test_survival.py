"""A correct runtime with an external tier survives what the world does to it, and stays in lockstep.

Each world is small and full of trouble (`tests/support/survival.py`); the last tests prove that the trouble
does strike.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hicache.agentic import AgenticSpec
from hicache.config import Config, StorageConfig
from hicache.control.scheduler import Scheduler
from hicache.schedule import Schedule
from hicache.sim.faults import VERBS
from hicache.sim.world import Plan, Result, simulate
from hicache.topology import Topology
from tests.support.invariants import assert_invariants
from tests.support.runs import agentic_plan, verdict
from tests.support.survival import PREFETCH_POLICIES, TOPOLOGIES, TROUBLES, WRITE_POLICIES, survive, world

# The last tests look again at worlds that the first have run; one process has them all.
pytestmark = pytest.mark.xdist_group("survival")

ROOT = Path(__file__).parents[3]
# `make soak` takes a hundred.
SEEDS = range(1, 4)
WORLDS = [
    # `make fast` takes one topology and one seed.
    pytest.param(name, trouble, seed, marks=[pytest.mark.slow] if (name, seed) != ("tp=2,pp=2", 1) else [])
    for name, trouble, seed in itertools.product(TOPOLOGIES, TROUBLES, SEEDS)
]


@pytest.mark.parametrize(("name", "trouble", "seed"), WORLDS)
def test_a_world_of_trouble_is_survived_in_lockstep(name: str, trouble: str, seed: int) -> None:
    assert survive(name, trouble, seed).complaints == (), f"world({name!r}, {trouble!r}, {seed})"


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed > 6 else []) for seed in range(6, 10)]
)
def test_every_rank_keeps_its_books_after_every_step(
    trouble: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterate = Scheduler._iterate

    async def iterate_and_look(self: Scheduler) -> bool:
        goes_on = await iterate(self)
        assert_invariants(self)
        return goes_on

    monkeypatch.setattr(Scheduler, "_iterate", iterate_and_look)
    name = list(TOPOLOGIES)[seed % len(TOPOLOGIES)]
    result = simulate(world(name, trouble, seed).plan(), trace="off")
    assert (result.outcome, result.error) == ("completed", ""), f"world({name!r}, {trouble!r}, {seed})"


def test_the_worlds_have_all_pairs_of_policies() -> None:
    configs = [world("tp=4", trouble, 1).config for trouble in TROUBLES]
    pairs = {(config.write_policy, config.storage.prefetch_policy) for config in configs}
    assert pairs == set(itertools.product(WRITE_POLICIES, PREFETCH_POLICIES))


def digest(result: Result) -> str:
    """Of all that every lane has written."""
    lines = (line for _, own in sorted(result.lane_lines.items()) for line in own)
    return hashlib.sha256(b"\n".join(lines)).hexdigest()


def test_the_same_world_gives_the_same_bytes_in_every_process() -> None:
    """Equal hashes of strings in all processes would hide that something iterates over a set."""
    code = (
        "from tests.hicache.sim.test_survival import digest, simulate, world;"
        "print(digest(simulate(world('tp=2,pp=2', 'everything', 1).plan(), trace='memory')))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    here = digest(simulate(world("tp=2,pp=2", "everything", 1).plan(), trace="memory"))
    assert found == {f"{here}\n"}


def test_a_recorded_schedule_replays_a_world_of_trouble() -> None:
    made = world("cp=2,tp=2", "everything", 2)
    plan = made.plan()
    first = simulate(plan, trace="memory")
    again = simulate(replace(made.plan(), schedule=Schedule(answers=plan.schedule.answers)), trace="memory")
    # The header, line 0, carries the run id, which names the schedule.
    assert {place: lines[1:] for place, lines in first.lane_lines.items()} == {
        place: lines[1:] for place, lines in again.lane_lines.items()
    }


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("policy", ["timeout", "best_effort"])
def test_a_lookup_that_never_returns_costs_hits_and_no_request(policy: str) -> None:
    """All are served; only the end waits for the call, and the verdict says whose it is."""
    result, plan = never("exists", policy)
    assert plan.faults.fired == ["storage_never on rank 1: exists 4"]
    assert (result.outcome, result.served) == ("hung", 20)
    found = verdict(result)
    assert (found.kind, found.finding.culprit) == ("stall", (1,))
    assert "its prefetch lane is in the backend" in found.finding.summary


@pytest.mark.usefixtures("impatient")
def test_with_wait_complete_a_read_that_never_returns_keeps_its_request_and_is_named() -> None:
    result, _ = never("get", "wait_complete")
    assert result.outcome == "hung"
    assert result.served < 20
    assert "waits for prefetch" in result.parked[0]
    assert "io: storage get that does not return" in result.parked[1]


def never(call: str, policy: str) -> tuple[Result, Plan]:
    """Two ranks, 20 requests; the 4th call of a kind on rank 1 does not come back."""
    storage = StorageConfig(
        backend="memory",
        prefetch_policy=policy,  # type: ignore[arg-type]
        prefetch_threshold_tokens=8,
        prefetch_timeout_base_s=0.01,
    )
    config = Config(
        topology=Topology(tp=2),
        page_size_tokens=8,
        device_pages=60,
        host_pages=90,
        storage=storage,
        concurrency=2,
    )
    spec = AgenticSpec(conversations=5, rounds=4, max_context=300, output=6, shared_prefix=16)
    plan = agentic_plan(config, spec, faults=[f"storage_never:rank=1,call={call},nth=4"])
    return simulate(plan, trace="memory"), plan


@pytest.mark.slow
def test_the_faults_of_the_worlds_do_strike() -> None:
    """Otherwise the sweep above would prove nothing."""
    struck = {verb for place in _places() for verb in survive(*place).fired}
    # A call that never returns is a hang with most policies, and has scenarios of its own.
    assert struck == set(VERBS) - {"storage_never"}


@pytest.mark.slow
def test_the_worlds_reach_what_they_are_for() -> None:
    seen = frozenset().union(*(survive(*place).seen for place in _places()))
    wanted = {
        *("abort.place=waiting", "abort.place=running", "abort.place=chunked", "abort.place="),
        *("retract", "reclaim", "backup_cancel", "load_back", "evict", "evict_host", "release"),
        *("storage_backup", "storage_write", "storage_ack", "transfer_done.reordered"),
        *("prefetch_hit.outcome=allocated", "prefetch_hit.outcome=partial", "prefetch_hit.outcome=miss"),
        *("prefetch_hit.outcome=host_capacity", "prefetch_hit.outcome=stale"),
        *("prefetch_insert.outcome=loaded", "prefetch_insert.outcome=hybrid_discard"),
        *("prefetch_outcome.reason=deadline", "prefetch_outcome.reason=storage_transfer"),
        *("prefetch_retry.verdict=issued", "prefetch_retry.cause=device_loss"),
        *("command.verdict=done", "command.verdict=refused"),
        *("admit.verdict=no_room", "admit.verdict=too_long"),
    }
    assert wanted - seen == set()


def _places() -> list[tuple[str, str, int]]:
    return list(itertools.product(TOPOLOGIES, TROUBLES, SEEDS))
