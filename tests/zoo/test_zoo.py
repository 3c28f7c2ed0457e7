"""Every scenario over 20 seeds: the bug is found where it is, and its healthy twin stays silent.

The truth does not come from the checker: it is the first record in which a rank's log differs from its own
twin's, under the same schedule and faults.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from consensus_checker.check import check
from consensus_checker.verdict import Verdict
from hicache.sim.world import Result, simulate
from hicache.zoo import SCENARIOS
from hicache.zoo.scenario import Scenario
from tests.support.runs import records
from tracer.log import find_logs

pytestmark = pytest.mark.usefixtures("impatient")

SEEDS = range(1, 21)
# `make fast` takes the first few.
FEW = 3
SOME_SLOW = [pytest.param(seed, marks=[pytest.mark.slow] if seed > FEW else []) for seed in SEEDS]
# What a scenario's runs are needed for, one process has: it simulates each of them once.
BY_SCENARIO = [pytest.param(name, marks=pytest.mark.xdist_group(f"zoo {name}")) for name in SCENARIOS]


@dataclass(frozen=True)
class Truth:
    """The first record that a rank would not have written without the bug."""

    rank: int
    step: int
    seq: int
    call: str


@dataclass(frozen=True)
class Played:
    """A run, and the faults that struck in it."""

    result: Result
    fired: tuple[str, ...]


@functools.cache
def play(name: str, seed: int, *, twin: bool) -> Played:
    plan = SCENARIOS[name].plan(seed, twin=twin)
    result = simulate(plan, trace="memory")
    return Played(result, tuple(plan.faults.fired))


@functools.cache
def truth_of(name: str, seed: int) -> Truth | None:
    return truth(play(name, seed, twin=False).result, play(name, seed, twin=True).result)


def write_logs(result: Result, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for rank, lines in result.lines.items():
        path = folder / f"rank{rank:04d}.scheduler.000.jsonl"
        path.write_bytes(b"".join(line + b"\n" for line in lines))
    return folder


def truth(bug: Result, twin: Result) -> Truth | None:
    found: list[Truth] = []
    for rank in bug.lines:
        at = first_difference(bug.lines[rank], twin.lines[rank])
        if at is None:
            continue
        ours, theirs = records(bug.lines[rank]), records(twin.lines[rank])
        found.append(Truth(rank, ours[at]["step"], ours[at]["seq"], _call(ours, theirs, at)))
    return min(found, key=lambda truth: (truth.step, truth.seq)) if found else None


def first_difference(ours: Sequence[bytes], theirs: Sequence[bytes]) -> int | None:
    """Index of the first record that differs, between header and trailer."""
    pairs = enumerate(zip(ours[1:-1], theirs[1:-1], strict=False))
    return next((at for at, (one, two) in pairs if one != two and json.loads(one) != json.loads(two)), None)


def _call(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], at: int) -> str:
    """The decision that differs, or the call in which a meeting was left out."""
    if "meeting" not in (ours[at]["kind"], theirs[at]["kind"]):
        return str(ours[at]["kind"])
    return next(row["kind"] for row in reversed(ours[:at]) if row.get("phase") == "call")


def disturbed_rank(scenario: Scenario, seed: int) -> int:
    (text,) = scenario.plan(seed).fault_texts
    found = re.search(r"rank=(\d+)", text)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("seed", SOME_SLOW)
@pytest.mark.parametrize("name", BY_SCENARIO)
def test_the_bug_is_found_with_its_rank_its_call_and_its_fact(name: str, seed: int, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    expected = truth_of(name, seed)
    verdict = check(find_logs(write_logs(play(name, seed, twin=False).result, tmp_path)))
    if expected is None:
        assert verdict.kind == "consistent"
        return
    assert expected.rank == disturbed_rank(scenario, seed), "the fault plan and the twin agree on who it was"
    first, trigger = verdict.finding.first_divergence, verdict.finding.trigger
    assert first is not None
    assert trigger is not None
    assert (verdict.kind, verdict.code) == ("divergence", 10)
    assert verdict.finding.culprit == (expected.rank,)
    assert (first.call, first.step) == (expected.call, expected.step)
    assert (trigger.fact, trigger.rank) == (scenario.fact, expected.rank)
    assert verdict.finding.resembles == (scenario.resembles,)
    culprit = f"culprit {expected.rank}"
    assert [entry.record for entry in verdict.finding.evidence if entry.supports == culprit] == [expected.seq]


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_SCENARIO)
def test_at_least_half_of_the_seeds_make_ranks_differ(name: str) -> None:
    forked = [seed for seed in SEEDS if truth_of(name, seed)]
    assert len(forked) >= len(SEEDS) / 2


@pytest.mark.parametrize("seed", SOME_SLOW)
@pytest.mark.parametrize("name", BY_SCENARIO)
def test_the_healthy_twin_is_consistent_and_nearly_everything_was_compared(
    name: str, seed: int, tmp_path: Path
) -> None:
    played = play(name, seed, twin=True)
    assert played.fired, "without a fault there is nothing to survive"
    verdict = check(find_logs(write_logs(played.result, tmp_path)))
    assert (verdict.kind, verdict.code) == ("consistent", 0)
    fraction = verdict.coverage.decisions_compared_fraction
    assert fraction is not None
    assert fraction >= 0.95


def renamed(result: Result) -> Result:
    """The same logs of a run about which nothing but its records is known."""

    def rewrite(line: bytes) -> bytes:
        row = json.loads(line)
        if row["kind"] == "header":
            row.update(config={}, config_digest="", run_id="0" * 16)
        if "rid" in row:
            row["rid"] = "x" + row["rid"]
        if "rids" in row:
            row["rids"] = ["x" + rid for rid in row["rids"]]
        return json.dumps(row).encode()

    lines = {rank: [rewrite(line) for line in own] for rank, own in result.lines.items()}
    return replace(result, lines=lines)


def without_names(verdict: Verdict) -> str:
    return re.sub(r"\bx?c(\d+)\.t(\d+)", r"request \1 \2", verdict.to_text())


@pytest.mark.parametrize("seed", [1, 5, 9])
@pytest.mark.parametrize("name", BY_SCENARIO)
def test_the_verdict_does_not_depend_on_config_or_names(name: str, seed: int, tmp_path: Path) -> None:
    bug = play(name, seed, twin=False).result
    known = check(find_logs(write_logs(bug, tmp_path / name)))
    unknown = check(find_logs(write_logs(renamed(bug), tmp_path / "somewhere")))
    assert known.kind == "divergence"
    assert without_names(known) == without_names(unknown)


@pytest.mark.parametrize("name", BY_SCENARIO)
def test_a_cut_log_never_accuses_another_rank(name: str, tmp_path: Path) -> None:
    """Each rank's log cut at other places, as if the process had been killed."""
    seed = 5
    bug = play(name, seed, twin=False).result
    expected = truth_of(name, seed)
    assert expected is not None
    kinds = set()
    for shift in range(40):
        lines = {
            rank: own[:-1][: max(2, expected.seq - 20 + shift * (1 + rank % 3))]
            for rank, own in bug.lines.items()
        }
        cut = replace(bug, lines=lines)
        verdict = check(find_logs(write_logs(cut, tmp_path / str(shift))))
        kinds.add(verdict.kind)
        assert verdict.finding.culprit in ((), (expected.rank,)), shift
        assert verdict.code in (4, 10), shift
    assert kinds == {"incomplete", "divergence"}
