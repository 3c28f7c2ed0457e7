"""How a run ended: outcome, what was done, who waits for what, where the logs are, what to do next."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from cli.theme import BAD, DOUBT, GOOD, headline, next_step, paragraph
from consensus_checker.words import ranks_text

if TYPE_CHECKING:
    from hicache.job import Mode, Plan, Result

SCHEMA = "hicache.run.v1"
STYLES = {"completed": GOOD, "hung": BAD, "crashed": BAD, "stopped": DOUBT}
WAITS_MAX = 4


def ending(plan: Plan, result: Result, out: Path, *, is_traced: bool = True) -> list[Text]:
    """The final screen of `run` and `zoo run`."""
    topology = plan.config.topology
    lines = headline(result.outcome.upper(), _told(plan, result), STYLES[result.outcome])
    if result.error:
        lines += paragraph("error", result.error)
    for names, reason in _waits(result.parked)[:WAITS_MAX]:
        lines += paragraph("waits", f"{names} in {reason}")
    if plan.bug_names:
        lines += paragraph("bug", ", ".join(plan.bug_names))
    if plan.faults.fired:
        lines += paragraph("fault", "; ".join(plan.faults.fired))
    elif plan.fault_texts:
        lines += paragraph("fault", f"{', '.join(plan.fault_texts)} did not strike")
    if not is_traced:
        return [*lines, *paragraph("logs", f"none; {out / 'run.json'} says how it ended")]
    each = "one a rank" if plan.config.storage.backend == "none" else "one for each lane of a rank"
    lines += paragraph("logs", f"{shlex.quote(str(out))}  ({each}, and run.json)")
    # One rank has nobody to be compared with.
    is_alone = topology.world_size == topology.dp
    return [*lines, *(next_step("hits", out) if is_alone else next_step("check", out))]


def in_one_line(plan: Plan, result: Result) -> list[Text]:
    """The same under --quiet: the first sentence, whole on its line."""
    word = result.outcome.upper()
    return [Text.assemble((word, STYLES[result.outcome]), f"  {_told(plan, result)}")]


def _told(plan: Plan, result: Result) -> str:
    topology = plan.config.topology
    sizes = " ".join(f"{axis}={getattr(topology, axis)}" for axis in ("dp", "pp", "cp", "tp"))
    ranks = f"{topology.world_size} rank{'s' if topology.world_size > 1 else ''}"
    refused = f", {result.refused:,} refused as too long" if result.refused else ""
    aborted = f", {result.aborted:,} aborted" if result.aborted else ""
    return (
        f"{result.served:,} requests served{refused}{aborted} in {result.steps:,} steps on {ranks} ({sizes})"
    )


def run_document(plan: Plan, result: Result, out: Path, *, mode: Mode = "sim") -> dict[str, Any]:
    """The same facts for a program."""
    return {
        "schema": SCHEMA,
        "out": str(out),
        "run_id": result.run_id,
        "mode": mode,
        "outcome": result.outcome,
        "error": result.error,
        "requests_served": result.served,
        "requests_refused": result.refused,
        "requests_aborted": result.aborted,
        "steps": result.steps,
        "world_size": plan.config.topology.world_size,
        "ranks": {str(rank): ending.outcome for rank, ending in sorted(result.endings.items())},
        "parked": {str(rank): reason for rank, reason in sorted(result.parked.items())},
        "workload": plan.workload_name,
        "schedule": result.schedule,
        "bugs": list(plan.bug_names),
        "faults": list(plan.fault_texts),
        "faults_fired": list(plan.faults.fired),
    }


def _waits(parked: dict[int, str]) -> list[tuple[str, str]]:
    """Ranks that wait for the same thing, together; the largest group first."""
    groups: dict[str, list[int]] = {}
    for rank, reason in sorted(parked.items()):
        groups.setdefault(reason, []).append(rank)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1]))
    return [(ranks_text(ranks), reason) for reason, ranks in ordered]
