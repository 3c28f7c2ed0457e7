"""Runs of the simulator for tests: in memory, and compared rank by rank without the checker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hicache.agentic import Agentic, AgenticSpec
from hicache.config import Config
from hicache.probes import KINDS
from hicache.schedule import Schedule
from hicache.sim.faults import Fault, FaultPlan
from hicache.sim.world import Plan, Result, simulate

KIND_BY_NAME = {kind.name: kind for kind in KINDS}


def agentic_plan(config: Config, spec: AgenticSpec, *, seed: int = 1, faults: Sequence[str] = ()) -> Plan:
    topology = config.topology
    return Plan(
        config=config,
        workload_name=f"agentic {spec.text()}",
        workload=lambda replica: Agentic(spec, replica, topology.dp),
        schedule=Schedule(seed=seed),
        faults=FaultPlan([Fault.parse(text, topology) for text in faults]),
        fault_texts=list(faults),
    )


def run_in_memory(plan: Plan) -> tuple[Result, dict[int, list[dict[str, Any]]]]:
    """The result, and each rank's records between header and trailer."""
    result = simulate(plan, trace="memory")
    return result, {rank: records(lines) for rank, lines in result.lines.items()}


def records(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in lines]
    assert (rows[0]["kind"], rows[-1]["kind"]) == ("header", "trailer")
    return rows[1:-1]


def lockstep(rows: Sequence[dict[str, Any]], *, axes: set[str]) -> list[tuple[Any, ...]]:
    """What ranks that differ on `axes` only must have in common, in order."""
    found = []
    for row in rows:
        kind = KIND_BY_NAME[row["kind"]]
        if axes <= set(kind.agree):
            found.append((row["kind"], row.get("phase"), *(str(row.get(name)) for name in kind.compared)))
    return found


def of_kind(rows: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == kind]
