"""Runs of the simulator for tests: in memory, and compared rank by rank without the checker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from consensus_checker.check import check
from consensus_checker.history import MemoryLane
from consensus_checker.verdict import Verdict
from hicache.agentic import Agentic, AgenticSpec
from hicache.config import Config
from hicache.core import Abort, Request
from hicache.probes import KINDS
from hicache.schedule import Schedule
from hicache.sim.faults import Fault, FaultPlan
from hicache.sim.world import Plan, Result, simulate
from hicache.workload import parse_commands
from tracer.record import OWN_KINDS

KIND_BY_NAME = {kind.name: kind for kind in (*KINDS, *OWN_KINDS)}


@dataclass
class Listed:
    """Requests that come whenever they may. Implements `workload.Workload`.

    Args:
        pause_polls: polls of the front door from an answer to the next request.
        leave_after: rid -> polls after which its client goes away; who is not in it stays.
    """

    requests: list[Request]
    pause_polls: int = 0
    leave_after: Mapping[str, int] = field(default_factory=dict)
    sent: int = 0
    polls: int = 0
    next_at: int = 0
    leaving: dict[int, list[str]] = field(default_factory=dict)

    def poll(self) -> list[Abort]:
        self.polls += 1
        return [Abort(rid) for rid in self.leaving.pop(self.polls, ())]

    def next(self) -> Request | None:
        if self.is_exhausted or self.polls < self.next_at:
            return None
        self.sent += 1
        request = self.requests[self.sent - 1]
        if request.rid in self.leave_after:
            self.leaving.setdefault(self.polls + self.leave_after[request.rid], []).append(request.rid)
        return request

    def finished(self, rid: str) -> None:
        self.next_at = self.polls + 1 + self.pause_polls

    def aborted(self, rid: str) -> None:
        self.finished(rid)

    @property
    def is_exhausted(self) -> bool:
        return self.sent == len(self.requests)

    @property
    def fraction(self) -> float:
        return 1.0


def agentic_plan(
    config: Config, spec: AgenticSpec, *, seed: int = 1, faults: Sequence[str] = (), commands: str = ""
) -> Plan:
    topology = config.topology
    return Plan(
        config=config,
        workload_name=f"agentic {spec.text()}",
        workload=lambda replica: Agentic(spec, replica, topology.dp),
        schedule=Schedule(seed=seed),
        faults=FaultPlan([Fault.parse(text, topology) for text in faults]),
        fault_texts=list(faults),
        commands=parse_commands(commands),
    )


def run_in_memory(plan: Plan) -> tuple[Result, dict[int, list[dict[str, Any]]]]:
    """The result, and the records of each rank's scheduler between header and trailer."""
    result = simulate(plan, trace="memory")
    return result, {rank: records(lines) for rank, lines in result.lines.items()}


def lanes(result: Result) -> list[MemoryLane]:
    """Every lane of a run that was traced to memory, as the checker reads it."""
    found = []
    for (rank, lane), lines in result.lane_lines.items():
        top, *entries, trailer = (msgspec.json.decode(line) for line in lines)
        found.append(MemoryLane(rank, lane, top, KIND_BY_NAME, entries, trailer))
    return found


def verdict(result: Result) -> Verdict:
    return check(lanes(result))


def records(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    rows = [msgspec.json.decode(line) for line in lines]
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
