"""A correct runtime stays in lockstep, whatever the world does to it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hicache.agentic import AgenticSpec
from hicache.config import Config
from hicache.control.keys import pack
from hicache.core import Abort, Request
from hicache.schedule import Schedule
from hicache.sim.faults import FaultPlan
from hicache.sim.world import Plan, simulate
from hicache.topology import Topology
from hicache.zoo import SCENARIOS
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


# `make fast` takes the first seed of each, `make soak` two hundred of such worlds.
SEEDS = [pytest.param(seed, marks=[pytest.mark.slow] if seed > 1 else []) for seed in range(1, 4)]


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
    replica = {rank: lockstep(own, axes={"tp", "cp", "pp"}) for rank, own in rows.items()}
    stage = {rank: lockstep(own, axes={"tp", "cp"}) for rank, own in rows.items()}
    for rank, own in rows.items():
        at = topology.coordinates(rank)
        assert replica[rank] == replica[topology.rank_at(dp=at.dp, pp=0, cp=0, tp=0)], where
        assert stage[rank] == stage[topology.rank_at(dp=at.dp, pp=at.pp, cp=0, tp=0)], where
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
    first = simulate(agentic_plan(config, spec, seed=7), trace="memory")
    second = simulate(agentic_plan(config, spec, seed=7), trace="memory")
    other = simulate(agentic_plan(config, spec, seed=8), trace="memory")
    assert first.lines == second.lines
    assert first.lines != other.lines


def test_a_recorded_schedule_replays_the_same_bytes_but_for_its_name() -> None:
    config = Config(topology=Topology(tp=2, pp=2), device_pages=110, host_pages=200, concurrency=3)
    spec = AgenticSpec(conversations=4, rounds=5, max_context=3000, output=16, shared_prefix=64)
    plan = agentic_plan(config, spec, seed=7)
    first = simulate(plan, trace="memory")
    replay = replace(agentic_plan(config, spec), schedule=Schedule(answers=plan.schedule.answers))
    second = simulate(replay, trace="memory")
    assert first.run_id != second.run_id
    # The header, line 0, carries the run id; everything behind it is equal.
    assert {rank: lines[1:] for rank, lines in first.lines.items()} == {
        rank: lines[1:] for rank, lines in second.lines.items()
    }


def test_two_lists_are_two_runs() -> None:
    config = Config()
    spec = AgenticSpec(conversations=1, rounds=1, max_context=200, output=4, shared_prefix=0)
    plans = [
        replace(agentic_plan(config, spec), schedule=Schedule(answers=answers))
        for answers in ([1], [1, 2], [])
    ]
    assert len({simulate(plan, trace="memory").run_id for plan in plans}) == 3


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_bug_does_no_harm_where_no_fault_strikes(scenario: str, name: str) -> None:
    plan = SCENARIOS[scenario].plan(3)
    config = replace(plan.config, topology=TOPOLOGIES[name], transfer_polls_max=0)
    result = simulate(replace(plan, config=config, faults=FaultPlan(), fault_texts=[]), trace="off")
    assert (result.outcome, result.error) == ("completed", "")


def test_one_round_applies_write_acks_oldest_first_and_then_load_acks() -> None:
    """The order of 2.4: what was agreed is applied queue by queue, each from its front."""
    config = Config(
        topology=Topology(tp=2),
        device_pages=130,
        host_pages=300,
        concurrency=4,
        decode_steps="one",
        transfer_polls_max=3,
    )
    spec = AgenticSpec(conversations=6, rounds=6, max_context=3600, output=12, shared_prefix=64)
    rounds: list[list[tuple[str, int]]] = []
    for seed in range(4):
        _, rows = run_in_memory(agentic_plan(config, spec, seed=seed))
        by_step: dict[int, list[tuple[str, int]]] = {}
        for row in of_kind(rows[0], "transfer_ack"):
            by_step.setdefault(row["step"], []).append((row["queue"], row["op"]))
        rounds += by_step.values()
    assert any({queue for queue, _ in acks} == {"write", "load"} for acks in rounds), "no round had both"
    assert any(acks[0][0] == acks[1][0] == "write" for acks in rounds if len(acks) > 1), "none had two writes"
    for acks in rounds:
        assert acks == sorted(acks, key=lambda ack: (ack[0] == "load", ack[1]))


def test_a_decode_takes_one_step_a_token_after_the_first_or_one_step() -> None:
    def steps(decode_steps: str, output: int) -> int:
        config = Config(concurrency=1, decode_steps=decode_steps)  # type: ignore[arg-type]
        spec = AgenticSpec(conversations=1, rounds=1, max_context=200, output=output, shared_prefix=0)
        _, rows = run_in_memory(agentic_plan(config, spec))
        return sum(row["mode"] == "decode" for row in of_kind(rows[0], "forward"))

    assert [steps("all", 1), steps("all", 2), steps("all", 9)] == [0, 1, 8]
    assert [steps("one", 1), steps("one", 2), steps("one", 9)] == [0, 1, 1]


def test_an_answer_takes_pages_for_all_but_its_last_token() -> None:
    """Prompt 128, answer 65: 192 tokens have KV, exactly 3 pages of 64."""
    config = Config(concurrency=1, device_pages=50)
    spec = AgenticSpec(conversations=1, rounds=1, max_context=128, output=65, shared_prefix=0)
    _, rows = run_in_memory(agentic_plan(config, spec))
    (admit,) = of_kind(rows[0], "admit")
    (audit,) = [row for row in of_kind(rows[0], "pool_audit") if row["pool"] == "device"]
    assert (admit["pages"], audit["evictable"]) == (3, 3)


def test_both_pools_are_audited_at_the_end() -> None:
    _, rows = run_in_memory(agentic_plan(Config(device_pages=200, host_pages=400), AgenticSpec()))
    assert [row["pool"] for row in of_kind(rows[0], "pool_audit")] == ["device", "host"]


def test_requests_are_counted_in_the_order_in_which_they_came() -> None:
    _, rows = run_in_memory(agentic_plan(Config(topology=Topology(pp=2)), AgenticSpec()))
    for rank in (0, 1):
        assert [row["order"] for row in of_kind(rows[rank], "request")] == list(range(48))


def test_nobody_overtakes_a_request_that_waits_for_room() -> None:
    config = Config(device_pages=110, host_pages=300, concurrency=6)
    spec = AgenticSpec(conversations=6, rounds=5, max_context=5000, output=12, shared_prefix=64)
    _, rows = run_in_memory(agentic_plan(config, spec))
    assert any(row["verdict"] == "no_room" for row in of_kind(rows[0], "admit")), "nobody had to wait"
    received = [row["rid"] for row in of_kind(rows[0], "request")]
    admitted = [row["rid"] for row in of_kind(rows[0], "admit") if row["verdict"] == "admitted"]
    assert admitted == received


def test_an_eviction_frees_what_is_short_and_stops_at_the_first_victim_that_suffices() -> None:
    config = Config(device_pages=110, host_pages=120, concurrency=2)
    spec = AgenticSpec(conversations=6, rounds=6, max_context=3600, output=12, shared_prefix=64)
    _, rows = run_in_memory(agentic_plan(config, spec))
    sizes = {row["node"]: row["pages"] for row in of_kind(rows[0], "write_backup")}
    for kind in ("evict", "evict_host"):
        evictions = [row for row in of_kind(rows[0], kind) if row["pages_freed"] >= row["pages_wanted"]]
        assert evictions
        for row in evictions:
            last = sizes.get(row["nodes"][-1])
            assert last is None or row["pages_freed"] - last < row["pages_wanted"], row


def test_a_request_of_a_batch_keeps_the_prefix_it_matched() -> None:
    """Pages for the batch are taken when all of it is chosen: P1 is matched before anything is evicted.

    device 7 pages: P1 (2 pages), P2 (2 pages); then A (4 new pages) and B (P1 and one token) together
    """

    def request(rid: str, tokens: list[int]) -> Request:
        return Request(rid, pack(tokens), b"", 1)

    p1, p2 = [1] * 8, [2] * 8
    waves = [[request("p1", p1)], [request("p2", p2)], [request("a", [3] * 16), request("b", [*p1, 9])]]
    config = Config(
        page_size_tokens=4, device_pages=7, hierarchical_cache=False, concurrency=2, cache_output=False
    )
    plan = Plan(config, "waves", lambda replica: Waves(waves), Schedule(seed=1))
    _, rows = run_in_memory(plan)
    admits = {row["rid"]: row["device_tokens"] for row in of_kind(rows[0], "admit")}
    assert admits["b"] == 8
    batches = [row["rids"] for row in of_kind(rows[0], "batch") if row["mode"] == "extend"]
    assert batches[-1] == ["a", "b"]


class Waves:
    """Requests that come together, wave by wave, each when the one before has been answered."""

    def __init__(self, waves: list[list[Request]]) -> None:
        self._waves = [list(wave) for wave in waves]
        self._open = 0

    def poll(self) -> list[Abort]:
        return []

    def next(self) -> Request | None:
        if not self._waves or (not self._waves[0] and self._open):
            return None
        if not self._waves[0]:
            self._waves.pop(0)
            return self.next()
        self._open += 1
        return self._waves[0].pop(0)

    def finished(self, rid: str) -> None:
        self._open -= 1

    def aborted(self, rid: str) -> None:
        raise AssertionError("nobody goes away here")

    @property
    def is_exhausted(self) -> bool:
        return not any(self._waves)

    @property
    def fraction(self) -> float:
        return 0.0


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
