"""The same ranks as processes: they complete, they agree, and when one of them dies the run ends."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache import launch
from hicache.config import Config, StorageConfig
from hicache.errors import ConfigError, WorkloadError
from hicache.job import PlanSpec, Result
from hicache.launch import run_gloo
from hicache.sim.world import simulate
from hicache.topology import Topology
from hicache.zoo import SCENARIOS
from tests.cli.conftest import Hicache
from tests.support.processes import ROOT, children, free_port, links, outputs, wait_until_ended
from tracer.blocks import last_line

# One after the other: four processes at a time are enough for any machine.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes"), pytest.mark.usefixtures("forked")]

SMALL = "conversations=4,rounds=5,max-context=2000,output=8,shared-prefix=64"
LONG = "conversations=60,rounds=40,max-context=8000,output=64,shared-prefix=64"

# For `hicache run`: two stages of two ranks, with evictions from both tiers.
THREE_HUNDRED = (
    *("--mode", "gloo", "--tp", "2", "--pp", "2"),
    *("--agentic", "conversations=20,rounds=15,max-context=8000,output=16"),
    *("--device-pages", "600", "--host-pages", "1500", "--concurrency", "8"),
)


def run(spec: PlanSpec, out: Path, *, timeout_s: float = 60) -> Result:
    out.mkdir(exist_ok=True)
    return run_gloo(spec, spec.plan(), out=out, timeout_s=timeout_s)


def checked(hicache: Hicache, out: Path) -> dict[str, Any]:
    """The verdict on a folder of logs."""
    document: dict[str, Any] = json.loads(hicache("check", out, "--json").out)
    return document


def trailers(out: Path) -> dict[str, str]:
    """Rank and lane -> how its log was closed; "" where it was not."""
    found: dict[str, str] = {}
    for log in sorted(out.glob("*.jsonl")):
        last = last_line(log, 1 << 16)
        is_closed = b'"kind":"trailer"' in last
        found[log.name.rsplit(".", 2)[0]] = json.loads(last)["outcome"] if is_closed else ""
    return found


def test_three_hundred_agentic_requests_complete_on_four_processes_and_agree(
    tmp_path: Path, hicache: Hicache
) -> None:
    """With one seed; `make soak` takes three."""
    said = hicache("run", *THREE_HUNDRED, "--seed", 1, "--out", tmp_path, "--json")
    document = json.loads(said.out)
    assert (said.code, document["outcome"], document["requests_served"]) == (0, "completed", 300), document
    assert checked(hicache, tmp_path)["verdict"]["kind"] == "consistent"
    assert set(trailers(tmp_path).values()) == {"completed"}


def test_all_lanes_run_over_gloo_with_an_external_tier_and_the_guard(
    tmp_path: Path, hicache: Hicache
) -> None:
    storage = StorageConfig(backend="file", directory=str(tmp_path / "store"), prefetch_threshold_tokens=64)
    config = Config(
        topology=Topology(tp=2, pp=2),
        device_pages=90,
        host_pages=120,
        concurrency=3,
        storage=storage,
        meeting_guard=True,
        in_band_digest=True,
    )
    faults = ("storage_fail:rank=1,call=set,nth=2", "storage_slow:rank=2,call=exists,nth=2,steps=20")
    result = run(PlanSpec(config, agentic=SMALL, faults=faults, commands="flush@9000"), tmp_path / "out")
    assert (result.outcome, result.error, result.served) == ("completed", "", 20)
    assert checked(hicache, tmp_path / "out")["verdict"]["kind"] == "consistent"
    # Five lanes and a heart.
    assert len(trailers(tmp_path / "out")) == 4 * 6
    assert list((tmp_path / "store").iterdir()) != []


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_gives_the_verdict_that_it_gives_in_the_simulator(
    name: str, tmp_path: Path, hicache: Hicache
) -> None:
    """Same rule, same call, same odd rank."""
    scenario, seed = SCENARIOS[name], 3
    config = scenario.config(seed)
    fault = scenario.fault(random.Random(f"{name}/{seed}"), config.topology.world_size)
    spec = PlanSpec(
        config,
        agentic=scenario.spec(seed).text(),
        faults=(fault,),
        bugs=(scenario.bug,),
        schedule=f"seed:{seed}",
    )
    (tmp_path / "sim").mkdir()
    simulate(spec.plan(), out=tmp_path / "sim")
    run(spec, tmp_path / "gloo", timeout_s=8)
    simulated, real = (checked(hicache, tmp_path / mode) for mode in ("sim", "gloo"))
    assert real["verdict"]["rule"] == simulated["verdict"]["rule"]
    assert real["ranks"]["culprit"] == simulated["ranks"]["culprit"]
    assert real["first_divergence"]["call"] == simulated["first_divergence"]["call"]


def when_served(action: Callable[[], None]) -> Callable[[int, float], None]:
    """Does something, once, when the run is well on its way."""
    done: list[bool] = []

    def look(served: int, fraction: float) -> None:
        if served >= 8 and not done:
            done.append(True)
            action()

    return look


def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Filled with the crew of the run that comes."""
    crews: list[Any] = []
    make = launch._Crew.__init__

    def init(self: Any, *given: Any) -> None:
        make(self, *given)
        crews.append(self)

    monkeypatch.setattr(launch._Crew, "__init__", init)
    return crews


TWO, FOUR = Topology(tp=2), Topology(tp=2, pp=2)


def ended_after(
    number: signal.Signals,
    rank: int,
    topology: Topology,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    timeout_s: float = 60,
) -> tuple[Result, float]:
    """A long run in which one worker gets a signal; seconds from there to the end."""
    crews = started(monkeypatch)
    since: list[float] = []

    def strike() -> None:
        since.append(time.monotonic())
        os.kill(crews[0]._processes[rank].handle.pid, number)

    spec = PlanSpec(Config(topology=topology, device_pages=300, host_pages=900, concurrency=4), agentic=LONG)
    out.mkdir(exist_ok=True)
    result = run_gloo(spec, spec.plan(), out=out, timeout_s=timeout_s, progress=when_served(strike))
    return result, time.monotonic() - since[0]


# The one that the others have met at, and one of the last stage.
@pytest.mark.parametrize(("rank", "topology"), [(0, TWO), (3, FOUR)])
def test_a_process_that_is_killed_ends_the_run_with_a_verdict_and_not_with_a_hang(
    rank: int, topology: Topology, tmp_path: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, seconds = ended_after(signal.SIGKILL, rank, topology, tmp_path, monkeypatch)
    assert (result.outcome, result.error) == (
        "crashed",
        f"rank {rank}: its process died, killed by SIGKILL",
    )
    assert seconds < 40
    others = [result.endings[other].outcome for other in range(topology.world_size) if other != rank]
    assert others == ["stopped"] * (topology.world_size - 1)
    closed = trailers(tmp_path)
    assert closed.pop(f"rank000{rank}.scheduler") == ""
    assert closed.pop(f"rank000{rank}.heart") == ""
    assert set(closed.values()) == {"stopped"}
    assert json.loads((tmp_path / "run.json").read_text())["outcome"] == "crashed"
    assert checked(hicache, tmp_path)["coverage"]["compared_calls"] > 0


def test_a_process_that_is_told_to_end_closes_its_log_and_the_others_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, seconds = ended_after(signal.SIGTERM, 1, TWO, tmp_path, monkeypatch)
    assert (result.outcome, result.error) == ("stopped", "rank 1: told to end by a signal")
    assert seconds < 40
    assert set(trailers(tmp_path).values()) == {"stopped"}


def test_a_process_that_is_frozen_is_a_hang_after_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, seconds = ended_after(signal.SIGSTOP, 1, TWO, tmp_path, monkeypatch, timeout_s=6)
    assert result.outcome == "hung"
    assert "longer than --timeout 6 seconds" in result.error
    assert seconds < 50
    assert result.endings[1].error == "it did not end by itself"


def test_an_exception_in_one_process_names_the_rank_and_what_it_said(tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from hicache.control.agreement import MinThenChain\n"
        "class Broken(MinThenChain):\n"
        "    async def agree(self, local, **more):\n"
        "        raise TypeError('an int where a list was expected')\n"
        "def wire(parts):\n"
        "    if parts.rank == 1:\n"
        "        parts.agreement = lambda transport, pp_rank: Broken(transport, pp_rank=pp_rank)\n"
    )
    spec = PlanSpec(Config(topology=Topology(tp=2)), agentic=SMALL, plugins=(str(plugin),))
    result = run(spec, tmp_path / "out")
    assert result.outcome == "crashed"
    assert result.error == "rank 1: TypeError: an int where a list was expected"


def test_what_a_process_can_not_start_with_is_told_and_costs_nobodys_logs(tmp_path: Path) -> None:
    spec = PlanSpec(Config(), agentic=SMALL)
    out = tmp_path / "out"
    assert run(spec, out).outcome == "completed"
    before = {file.name: file.read_bytes() for file in out.glob("*.jsonl")}
    with pytest.raises(ConfigError, match="holds logs of rank 0 already"):
        run(spec, out)
    assert before == {file.name: file.read_bytes() for file in out.glob("*.jsonl")}


def test_a_workload_that_is_damaged_later_on_is_the_error_of_the_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 16, "output_length": 2, "hash_ids": [1]}
    trace.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n{cut")
    config = Config(topology=Topology(tp=2), page_size_tokens=16, cache_output=False, concurrency=1)
    with pytest.raises(WorkloadError, match="line 3"):
        run(PlanSpec(config, workload=str(trace)), tmp_path / "out")
    assert "" not in trailers(tmp_path / "out").values()


def torchrun(plan: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    """Two ranks."""
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    return subprocess.Popen(
        [sys.executable, *words, "-m", "hicache.worker", "--plan", str(plan), "--out", str(out), *more],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_torchrun_starts_the_same_ranks(tmp_path: Path, hicache: Hicache) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    words = ("--agentic", SMALL, "--tp", 2, "--plan-out", plan, "--out", out)
    assert hicache("run", *words).code == 0
    process = torchrun(plan, out)
    ((said, err),) = outputs([process])
    assert process.returncode == 0, err
    assert said.startswith("COMPLETED  20 requests served in ")
    summary = json.loads((out / "run.json").read_text())
    assert (summary["mode"], summary["outcome"], summary["ranks"]) == (
        "gloo",
        "completed",
        {"0": "completed", "1": "completed"},
    )
    assert checked(hicache, out)["verdict"]["kind"] == "consistent"


def test_under_torchrun_a_rank_that_hangs_is_told_by_the_others_as_a_hang(tmp_path: Path) -> None:
    """Nobody watches them here: each finds out by itself, and rank 0 tells."""
    name, seed = "skip_collective_when_empty", 3
    scenario = SCENARIOS[name]
    config = replace(scenario.config(seed), topology=Topology(tp=2))
    spec = PlanSpec(
        config,
        agentic=scenario.spec(seed).text(),
        faults=("delay_done:rank=1,queue=write,op=5,steps=2",),
        bugs=(scenario.bug,),
    )
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    plan.write_text(spec.to_json())
    process = torchrun(plan, out, "--timeout", "8")
    ((said, err),) = outputs([process])
    assert said.startswith("HUNG  "), err
    assert set(trailers(out).values()) == {"hung"}


def test_a_port_that_somebody_else_has_taken_costs_a_second_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = [taken.getsockname()[1], free_port()]
        monkeypatch.setattr(launch, "_free_port", lambda: ports.pop(0))
        assert run(PlanSpec(Config(), agentic=SMALL), tmp_path / "out").outcome == "completed"
    assert ports == []


def test_ranks_end_when_whoever_started_them_is_gone(tmp_path: Path) -> None:
    """Its end closes their stdin; they close their logs, and nothing of it stays."""
    words = ["run", "--mode", "gloo", "--tp", "2", "--agentic", LONG, "--out", str(tmp_path)]
    process = subprocess.Popen([sys.executable, "-m", "cli.app", *words], cwd=ROOT)
    logs = [tmp_path / f"rank000{rank}.scheduler.001.jsonl" for rank in (0, 1)]
    until = time.monotonic() + 60
    while not all(log.exists() for log in logs) and time.monotonic() < until:
        time.sleep(0.1)
    (server,) = children(process.pid)
    ranks = children(server)
    assert links(server) == links(ranks[0]) & links(ranks[1]) == set()
    process.kill()
    process.wait()
    for pid in (*ranks, server):
        wait_until_ended(pid, timeout_s=60)
    while "" in trailers(tmp_path).values() and time.monotonic() < until:
        time.sleep(0.1)
    assert set(trailers(tmp_path).values()) == {"stopped"}
