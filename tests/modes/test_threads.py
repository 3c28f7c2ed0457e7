"""The same ranks on threads: what a thread more or less may not change, and what ends such a run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hicache.config import Config, StorageConfig
from hicache.errors import WorkloadError
from hicache.job import PlanSpec, Result
from hicache.sim.world import simulate
from hicache.threads import run_threads
from hicache.topology import Topology
from hicache.zoo import SCENARIOS
from tests.support.runs import lockstep, records
from tracer.blocks import last_line

SPEC = "conversations=5,rounds=6,max-context=3600,output=24,shared-prefix=128"
TOPOLOGIES = {
    "tp=4": Topology(tp=4),
    "tp=2,pp=2": Topology(tp=2, pp=2),
    "cp=2,tp=2": Topology(cp=2, tp=2),
    "pp=4": Topology(pp=4),
    "dp=2,tp=2": Topology(dp=2, tp=2),
    "one rank": Topology(),
}


def disturbed(topology: Topology, seed: int) -> tuple[str, ...]:
    """Late copies, host memory that fails, an external tier that is slow, short or fails, here and there."""
    chance = random.Random(f"threads/{seed}")
    faults = []
    for _ in range(4):
        rank = chance.randrange(topology.world_size)
        faults += [
            f"delay_done:rank={rank},queue=write,op={chance.randint(1, 12)},steps={chance.randint(1, 9)}",
            f"alloc_fail:rank={rank},pool=host,nth={chance.randint(1, 30)}",
            f"storage_slow:rank={rank},call=get,nth={chance.randint(1, 9)},steps={chance.randint(1, 20)}",
            f"storage_fail:rank={rank},call=set,nth={chance.randint(1, 9)}",
            f"storage_short:rank={rank},nth={chance.randint(1, 9)},pages=2",
        ]
    return tuple(faults)


@pytest.mark.parametrize("backend", ["none", "memory"])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_ranks_on_threads_decide_alike_whatever_the_system_makes_of_them(name: str, backend: str) -> None:
    topology = TOPOLOGIES[name]
    config = Config(
        topology=topology,
        device_pages=120,
        host_pages=200,
        concurrency=4,
        storage=StorageConfig(backend=backend, prefetch_threshold_tokens=64),  # type: ignore[arg-type]
    )
    faults = disturbed(topology, 1)
    result = run_threads(PlanSpec(config, agentic=SPEC, faults=faults).plan(), trace="memory")
    where = f"{config} {faults}"
    assert (result.outcome, result.error, result.served) == ("completed", "", 30), where
    for (rank, lane), lines in result.lane_lines.items():
        at = topology.coordinates(rank)
        leader = topology.rank_at(dp=at.dp, pp=0, cp=0, tp=0)
        first = result.lane_lines[leader, lane]
        axes = {"tp", "cp", "pp"}
        assert lockstep(records(lines), axes=axes) == lockstep(records(first), axes=axes), (where, rank, lane)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_ends_on_threads_as_it_does_in_the_simulator(name: str) -> None:
    simulated = simulate(SCENARIOS[name].plan(3), trace="memory")
    threaded = run_threads(SCENARIOS[name].plan(3), trace="memory", timeout_s=20)
    assert (threaded.outcome, threaded.parked) == (simulated.outcome, simulated.parked)


def test_a_hang_on_threads_is_seen_at_once(tmp_path: Path) -> None:
    plan = SCENARIOS["skip_collective_when_empty"].plan(3)
    result = run_threads(plan, out=tmp_path, timeout_s=1000)
    assert result.outcome == "hung"
    summary = json.loads((tmp_path / "run.json").read_text())
    assert (summary["mode"], summary["outcome"]) == ("threads", "hung")
    assert summary["ranks"] == dict.fromkeys("0123", "hung")


def test_a_rank_that_crashes_takes_the_others_with_it(tmp_path: Path) -> None:
    """Its log says that it crashed; those of the others that they were stopped."""
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from hicache.control.agreement import MinThenChain\n"
        "class Greedy(MinThenChain):\n"
        "    rounds = 0\n"
        "    async def agree(self, local, **more):\n"
        "        self.rounds += 1\n"
        "        assert self.rounds < 20, 'the books do not match'\n"
        "        return await super().agree(local, **more)\n"
        "def wire(parts):\n"
        "    if parts.rank == 1:\n"
        "        parts.agreement = lambda transport, pp_rank: Greedy(transport, pp_rank=pp_rank)\n"
    )
    config = Config(topology=Topology(tp=3), concurrency=2)
    result = run_threads(PlanSpec(config, agentic=SPEC, plugins=(str(plugin),)).plan(), trace="memory")
    assert (result.outcome, result.error) == ("crashed", "rank 1: the books do not match")
    trailers = [json.loads(result.lines[rank][-1])["outcome"] for rank in range(3)]
    assert trailers == ["stopped", "crashed", "stopped"]


STRAY = """
from hicache.control.agreement import MinThenChain

class Stray(MinThenChain):
    rounds = 0

    async def reduce(self, local, *, op, purpose, transfers_in_flight):
        self.rounds += 1
        if self.rounds == 20:
            await self._transport.all_reduce("tp", local, op=op, purpose="stray", channel="events")
        return await super().reduce(local, op=op, purpose=purpose, transfers_in_flight=transfers_in_flight)

def wire(parts):
    if parts.rank == 1:
        parts.agreement = lambda transport, pp_rank: Stray(transport, pp_rank=pp_rank)
"""


@pytest.mark.parametrize("run", [simulate, run_threads])
def test_the_guard_ends_a_run_at_the_first_wrong_pairing_where_an_open_one_hangs_a_call_later(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    """One rank makes a call too many; from there on its votes meet the others' votes of a round before."""
    plugin = tmp_path / "stray.py"
    plugin.write_text(STRAY)
    config = Config(topology=Topology(tp=2), device_pages=120, host_pages=300, concurrency=3)
    open_run = run(PlanSpec(config, agentic=SPEC, plugins=(str(plugin),)).plan(), trace="memory")
    assert (open_run.outcome, open_run.parked[1]) == ("hung", "all_reduce tp0/events #20")
    guarded = replace(config, meeting_guard=True)
    result = run(PlanSpec(guarded, agentic=SPEC, plugins=(str(plugin),)).plan(), trace="memory")
    assert (result.outcome, result.steps) == ("crashed", 20)
    assert "meeting guard: in call 19 on tp0/events this rank means" in result.error
    told = [row for lines in result.lines.values() for row in records(lines) if row["kind"] == "mispaired"]
    meant = {"event_round": "rank 1: stray #19 all_reduce 5", "stray": "rank 0: event_round #19 all_reduce 5"}
    assert told
    assert all(row["others"] == [meant[row["purpose"]]] for row in told)


def test_a_workload_that_is_damaged_later_on_closes_the_logs_and_is_told(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 16, "output_length": 2, "hash_ids": [1]}
    trace.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n{cut")
    config = Config(topology=Topology(tp=2), page_size_tokens=16, cache_output=False, concurrency=1)
    out = tmp_path / "out"
    with pytest.raises(WorkloadError, match="line 3"):
        run_threads(PlanSpec(config, workload=str(trace)).plan(), out=out)
    for log in out.glob("*.jsonl"):
        assert json.loads(last_line(log, 1 << 16))["kind"] == "trailer"


def test_an_interrupt_in_a_rank_leaves_logs_that_can_be_read(tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from hicache.control.agreement import MinThenChain\n"
        "class Interrupting(MinThenChain):\n"
        "    async def agree(self, local, **more):\n"
        "        raise KeyboardInterrupt\n"
        "def wire(parts):\n"
        "    parts.agreement = lambda transport, pp_rank: Interrupting(transport, pp_rank=pp_rank)\n"
    )
    out = tmp_path / "out"
    config = Config(topology=Topology(tp=2))
    with pytest.raises(KeyboardInterrupt):
        run_threads(PlanSpec(config, agentic=SPEC, plugins=(str(plugin),)).plan(), out=out)
    assert json.loads((out / "run.json").read_text())["outcome"] == "interrupted"
