"""Long sweeps: the suite's claims over many more seeds. `make soak` keeps the result in docs/soak.md.

Exits 1 when a claim did not hold; every failure is printed with the seed that repeats it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from consensus_checker.check import check
from hicache.agentic import AgenticSpec
from hicache.config import Config
from hicache.control.scheduler import Scheduler
from hicache.sim.reenact import reenact
from hicache.sim.world import Plan, simulate
from hicache.topology import Topology
from hicache.zoo import SCENARIOS
from tests.hicache.sim.test_invariants import dense_plan
from tests.hicache.sim.test_world import TOPOLOGIES, disturbed
from tests.modes.test_gloo import THREE_HUNDRED
from tests.support import hit_oracle, survival
from tests.support.invariants import assert_invariants
from tests.support.runs import agentic_plan, of_kind, records, verdict
from tests.zoo.test_zoo import disturbed_rank, truth, write_logs
from tracer.log import find_logs

IMPORTERS = "tests/tracer/importers"
# Requests of the public conversation trace; one that is shorter is another trace.
CONVERSATION_REQUESTS = 12_031
# Runs of processes: each has four, beside the other sweeps.
PROCESS_SEEDS = 3


@dataclass
class Tally:
    """What came out of one sweep."""

    name: str
    runs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def row(self) -> str:
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
        return f"| {self.name} | {self.runs} | {outcomes} | {len(self.failures)} |"


Sweep = Callable[[str, int], Tally]


def sweep_scenario(name: str, seeds: int) -> Tally:
    """Bug and twin; the truth is the first record in which a rank's log differs from its twin's."""
    tally = Tally(f"scenario `{name}`, bug and twin")
    scenario = SCENARIOS[name]
    for seed in range(1, seeds + 1):
        bug = simulate(scenario.plan(seed), trace="memory")
        twin = simulate(scenario.plan(seed, twin=True), trace="memory")
        expected = truth(bug, twin)
        with tempfile.TemporaryDirectory() as folder:
            verdict = check(find_logs(write_logs(bug, Path(folder) / "bug")))
            silence = check(find_logs(write_logs(twin, Path(folder) / "twin")))
        tally.runs += 2
        first, trigger = verdict.finding.first_divergence, verdict.finding.trigger
        found = (verdict.finding.culprit, first and (first.call, first.step), trigger and trigger.fact)
        if expected is None:
            is_right = verdict.kind == "consistent"
            tally.outcomes["bug without effect"] += 1
        else:
            wanted = ((expected.rank,), (expected.call, expected.step), scenario.fact)
            is_right = found == wanted and expected.rank == disturbed_rank(scenario, seed)
            tally.outcomes["rank, call and fact right" if is_right else "wrong"] += 1
        if not is_right:
            tally.failures.append(f"{name} seed {seed}: {verdict.kind} {found}, expected {expected}")
        tally.outcomes[f"twin {silence.kind}"] += 1
        if silence.kind != "consistent":
            tally.failures.append(f"{name} seed {seed}, twin: {silence.finding.summary}")
    return tally


def world(name: str, seed: int) -> Plan:
    """A small world of chance: topology, sizes, timing, faults."""
    topology = TOPOLOGIES[name]
    chance = random.Random(f"soak/{name}/{seed}")
    config = Config(
        topology=topology,
        page_size_tokens=chance.choice([16, 64, 64, 128]),
        device_pages=chance.randint(240, 400) if chance.random() < 0.8 else 0,
        host_pages=chance.choice([0, 40, 150, 600]),
        hierarchical_cache=chance.random() < 0.9,
        concurrency=chance.randint(1, 9),
        transfer_polls_max=chance.choice([0, 1, 2, 7, 30]),
        decode_steps=chance.choice(["one", "all"]),
        cache_output=chance.random() < 0.8,
        seed=seed,
    )
    rounds = chance.randint(1, 8)
    spec = AgenticSpec(
        conversations=chance.randint(1, 8),
        rounds=rounds,
        max_context=rounds * chance.randint(60, 450),
        output=chance.randint(1, 40),
        shared_prefix=chance.randint(0, 60),
        seed=seed,
    )
    return agentic_plan(config, spec, seed=seed, faults=disturbed(topology, chance))


def sweep_worlds(name: str, seeds: int) -> Tally:
    """Correct runtimes under faults: completed, consistent, right pages, books balanced."""
    tally = Tally(f"healthy worlds under faults, {name}")
    for seed in range(1, seeds + 1):
        plan = world(name, seed)
        result = simulate(plan, trace="memory")
        tally.runs += 1
        found = verdict(result)
        is_alone = plan.config.topology.world_size == plan.config.topology.dp
        wanted = "nothing_compared" if is_alone else "consistent"
        rows = [row for lines in result.lines.values() for row in records(lines)]
        wrong = len(of_kind(rows, "wrong_page"))
        kept = sum(row["protected"] for row in of_kind(rows, "pool_audit"))
        tally.outcomes[f"{result.outcome}, {found.kind}"] += 1
        if (result.outcome, found.kind, wrong, kept) != ("completed", wanted, 0, 0):
            tally.failures.append(
                f"{name} seed {seed}: {result.outcome} {result.error} {found.finding.summary}, "
                f"{wrong} wrong pages, {kept} pages still protected"
            )
    return tally


def sweep_survival(name: str, seeds: int) -> Tally:
    """With an external tier, all troubles: completed, consistent, right pages, books balanced."""
    tally = Tally(f"worlds of trouble with an external tier, {name}")
    for trouble, seed in itertools.product(survival.TROUBLES, range(1, seeds + 1)):
        # Not the cached one: nothing of a run is kept.
        survived = survival.survive.__wrapped__(name, trouble, seed)
        tally.runs += 1
        tally.outcomes["survived" if not survived.complaints else "not survived"] += 1
        if survived.complaints:
            tally.failures.append(f"world({name!r}, {trouble!r}, {seed}): {survived.complaints[0]}")
    return tally


def sweep_books(name: str, seeds: int) -> Tally:
    """After every step of every rank, all that is kept up to date in small changes is derived again."""
    tally = Tally(f"{name}, books kept after every step")
    iterate = Scheduler._iterate

    async def iterate_and_look(self: Scheduler) -> bool:
        goes_on = await iterate(self)
        assert_invariants(self)
        return goes_on

    Scheduler._iterate = iterate_and_look  # type: ignore[method-assign]
    try:
        for seed in range(1, seeds + 1):
            result = simulate(dense_plan(seed), trace="off")
            tally.runs += 1
            tally.outcomes[result.outcome] += 1
            if result.outcome != "completed":
                tally.failures.append(f"dense_plan({seed}): {result.outcome} {result.error} {result.parked}")
    finally:
        Scheduler._iterate = iterate  # type: ignore[method-assign]
    return tally


def sweep_reenact(name: str, seeds: int) -> Tally:
    """Every decision of a healthy rank follows from its log, under faults and in worlds of trouble."""
    tally = Tally(f"decisions of every rank taken again from its log, {name}")
    troubles = itertools.cycle(survival.TROUBLES)
    for seed, trouble in zip(range(1, seeds + 1), troubles, strict=False):
        made = survival.world(name, trouble, seed) if seed % 2 else None
        plan = made.plan() if made is not None else world(name, seed)
        with tempfile.TemporaryDirectory() as folder:
            simulate(plan, out=Path(folder) / "run")
            run = find_logs(Path(folder) / "run")
            for rank in run.ranks:
                done = reenact(run.lanes, rank)
                tally.runs += 1
                tally.outcomes["same" if done.is_same else done.limits or "different"] += 1
                if done.difference is not None:
                    where = (
                        f"world({name!r}, {trouble!r}, {seed})" if made is not None else f"{name} seed {seed}"
                    )
                    tally.failures.append(f"{where}, rank {rank}: {done.difference}")
    return tally


def sweep_mutations(name: str, count: int) -> Tally:
    """Importers on damaged copies of their samples: pytest's own count, so many copies of each sample."""
    tally = Tally(f"{name}: {count:,} damaged copies of each sample")
    words = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider"]
    words += ["-k", "damaged", IMPORTERS]
    ran = subprocess.run(
        words,
        env={**os.environ, "HICACHE_MUTATIONS": str(count)},
        capture_output=True,
        text=True,
        check=False,
    )
    told = ran.stdout.splitlines()
    lines = [line for line in told if line.startswith("FAILED")]
    tally.runs = sum(int(number) for number in re.findall(r"(\d+) (?:passed|failed)", " ".join(told[-1:])))
    tally.outcomes["passed"] = tally.runs - len(lines)
    if ran.returncode:
        tally.failures += lines or told[-1:]
    return tally


def sweep_trace(name: str, device_pages: int) -> Tally:
    """The whole conversation trace beside a cache that is obviously right; no device pages: no limit."""
    tally = Tally(f"conversation trace by request, {name}")
    path = Path(os.environ.get("HICACHE_DATA", "")) / hit_oracle.CONVERSATION
    if not path.is_file():
        tally.outcomes["not run: HICACHE_DATA names no public traces"] += 1
        return tally
    with tempfile.TemporaryDirectory() as folder:
        if device_pages:
            found = hit_oracle.beside_naive_cache(path, Path(folder), device_pages=device_pages)
        else:
            found = hit_oracle.beside_seen_pages(path, Path(folder), topology=Topology(tp=4))
    tally.name += f", {found.hit_percent} % of the tokens hit"
    tally.runs = found.requests
    tally.outcomes["with other hits"] = len(found.differences)
    tally.outcomes["nodes evicted"] = found.evictions
    tally.failures += [f"{name}: {text}" for text in found.differences]
    if found.requests != CONVERSATION_REQUESTS:
        tally.failures.append(f"{name}: {found.requests} requests, {CONVERSATION_REQUESTS} expected")
    return tally


def sweep_processes(name: str, seeds: int) -> Tally:
    """Four processes over gloo, 300 agentic requests: completed and consistent."""
    tally = Tally(f"{name} over gloo, 300 requests")
    for seed in range(1, seeds + 1):
        with tempfile.TemporaryDirectory() as folder:
            words = ["run", *THREE_HUNDRED, "--seed", str(seed), "--out", folder, "--json"]
            said, found = _hicache(*words), _hicache("check", folder, "--json")
        tally.runs += 1
        seen = (said["outcome"], said["requests_served"], found["verdict"]["kind"])
        tally.outcomes[f"{seen[0]}, {seen[2]}"] += 1
        if seen != ("completed", 300, "consistent"):
            tally.failures.append(f"seed {seed}: {seen}")
    return tally


def _hicache(*words: str) -> dict[str, Any]:
    """What the command says with `--json`."""
    command = [sys.executable, "-m", "cli.app", *words]
    said = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    document: dict[str, Any] = json.loads(said.stdout)
    return document


def timed(sweep: Sweep, name: str, count: int) -> Tally:
    """Run one sweep, in a worker process."""
    start = time.monotonic()
    tally = sweep(name, count)
    tally.seconds = time.monotonic() - start
    print(f"{tally.name}: {tally.runs} runs in {tally.seconds:.0f} s", file=sys.stderr)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--only", default="", help="sweeps whose function has this in its name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="sweeps at a time, a process each")
    options = parser.parse_args()
    seeds = options.seeds
    half = -(-seeds // 2)
    # The longest first, so that no process is left alone with one at the end.
    sweeps: list[tuple[Sweep, str, int]] = [(sweep_survival, name, half) for name in survival.EVERY_TOPOLOGY]
    sweeps.append((sweep_books, "dense prompts", 2 * seeds))
    sweeps.append((sweep_trace, "4 ranks, no limits", 0))
    sweeps += [(sweep_trace, f"{pages:,} device pages", pages) for pages in (1_000, 10_000)]
    sweeps.append((sweep_processes, "4 processes", PROCESS_SEEDS))
    sweeps += [(sweep_worlds, name, seeds) for name in TOPOLOGIES]
    sweeps += [(sweep_scenario, name, seeds) for name in SCENARIOS]
    sweeps += [(sweep_reenact, name, half) for name in TOPOLOGIES]
    sweeps.append((sweep_mutations, "importers", 25 * seeds))
    sweeps = [each for each in sweeps if options.only in each[0].__name__]
    with ProcessPoolExecutor(options.jobs) as pool:
        tallies = list(pool.map(timed, *zip(*sweeps, strict=True)))
    failures = [failure for tally in tallies for failure in tally.failures]
    print("# Soak\n")
    print(
        f"`make soak`, {seeds} seeds a line, and {half} for each of {len(survival.TROUBLES)} troubles. "
        "A failure is a claim of the suite that did not hold.\n"
    )
    print("| sweep | runs | outcomes | failures |\n|---|---:|---|---:|")
    for tally in tallies:
        print(tally.row())
    for failure in failures:
        print(f"\n- {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
