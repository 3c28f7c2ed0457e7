"""How a run ended: outcome, what was done, who waits for what, where the logs are, what to do next."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from cli.screens.table import counted
from cli.theme import BAD, DOUBT, GOOD, headline, next_step, paragraph
from consensus_checker.words import ranks_text

if TYPE_CHECKING:
    from hicache.job import Mode, Plan, Result

SCHEMA = "hicache.run.v1"
STYLES = {"completed": GOOD, "hung": BAD, "crashed": BAD, "stopped": DOUBT}
SUMMARY_NAME = "run.json"
TRAILER = "trailer"
WAITS_MAX = 4
LOST_MAX = 4
CLOSED_PROPERLY = ("completed", "hung")
# The last line of a whole log is shorter.
TRAILER_BYTES_MAX = 4096
IDLE = re.compile(r"nothing for (\d+) steps: (\d+) requests waiting")


def ending(
    plan: Plan, result: Result, out: Path, *, is_traced: bool = True, lost: Sequence[str] = ()
) -> list[Text]:
    """The final screen of `run` and `zoo run`.

    Args:
        lost: what the run could not write, as `lost_files` has it; nothing is suggested for such a folder.
    """
    lines = outcome(plan, result)
    if lost:
        lines += paragraph("lost", "; ".join(lost[:LOST_MAX]))
        if more := len(lost) - LOST_MAX:
            lines += paragraph("", f"and {more} more") if more > 0 else []
        return [*lines, *paragraph("logs", f"{shlex.quote(str(out))}  (the rest)")]
    if not is_traced:
        return [*lines, *paragraph("logs", f"none; {out / SUMMARY_NAME} says how it ended")]
    each = "one a rank" if plan.config.storage.backend == "none" else "one for each lane of a rank"
    lines += paragraph("logs", f"{shlex.quote(str(out))}  ({each}, and run.json)")
    # One rank has nobody to be compared with.
    topology = plan.config.topology
    is_alone = topology.world_size == topology.dp
    return [*lines, *(next_step("hits", out) if is_alone else next_step("check", out))]


def outcome(plan: Plan, result: Result) -> list[Text]:
    """How it ended and what was done to it, without where the logs are."""
    lines = headline(result.outcome.upper(), _told(plan, result), STYLES[result.outcome])
    if result.error:
        lines += paragraph("error", result.error)
    for names, reason in _waits(result.parked)[:WAITS_MAX]:
        colon = "" if reason.startswith("in ") else ":"
        lines += paragraph("waits", f"{names}{colon} {reason}")
    if plan.bug_names:
        lines += paragraph("bug", ", ".join(plan.bug_names))
    if plan.faults.fired:
        lines += paragraph("fault", "; ".join(plan.faults.fired))
    elif plan.fault_texts:
        lines += paragraph("fault", f"{', '.join(plan.fault_texts)} did not strike")
    if plan.commands:
        lines += paragraph("admin", _carried_out(plan, result))
    return lines


def lost_files(plan: Plan, result: Result, out: Path, *, is_traced: bool) -> list[str]:
    """What a run should have written to `out` and did not, because the disk was full or is gone."""
    from hicache.rank import lane_names

    lost = []
    if not _is_whole(out / SUMMARY_NAME):
        lost.append(f"{SUMMARY_NAME} was not written")
    if not is_traced:
        return lost
    missing: dict[str, list[int]] = {}
    for rank in range(plan.config.topology.world_size):
        ending = result.endings.get(rank)
        if ending is None or ending.outcome not in CLOSED_PROPERLY:
            # A process that died or was killed has had no time for a last line: not the disk's fault.
            continue
        for state in {_state_of(out, rank, lane) for lane in lane_names(plan.config)} - {"whole"}:
            missing.setdefault(state, []).append(rank)
    for state, ranks in sorted(missing.items(), reverse=True):
        lost.append(f"logs of {ranks_text(ranks)} are {state}")
    return lost


def _state_of(out: Path, rank: int, lane: str) -> str:
    """What is there of one lane: `whole`, `cut` (its last line is missing) or `missing`."""
    from tracer.blocks import last_line

    files = sorted(out.glob(f"rank{rank:04d}.{lane}.*.jsonl*"))
    if not files:
        return "missing"
    try:
        last = last_line(files[-1], TRAILER_BYTES_MAX)
        return "whole" if json.loads(last)["kind"] == TRAILER else "cut"
    except (OSError, ValueError, LookupError, TypeError):
        return "cut"


def _is_whole(summary: Path) -> bool:
    try:
        return summary.read_bytes().endswith(b"}\n")
    except OSError:
        return False


def _carried_out(plan: Plan, result: Result) -> str:
    """What became of an operator's commands, replica by replica."""
    texts = [text for _rank, end in sorted(result.endings.items()) for text in end.commands]
    due = len(plan.commands) * plan.config.topology.dp
    rest = [f"{due - len(texts)} not carried out"] if len(texts) < due else []
    return "; ".join([*texts, *rest])


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


def run_document(
    plan: Plan, result: Result, out: Path, *, mode: Mode = "sim", lost: Sequence[str] = ()
) -> dict[str, Any]:
    """The same facts for a program; `lost` is there only when something is."""
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
        "commands_carried_out": [
            text for _rank, end in sorted(result.endings.items()) for text in end.commands
        ],
        **({"lost": list(lost)} if lost else {}),
    }


def _waits(parked: dict[int, str]) -> list[tuple[str, str]]:
    """Ranks that wait for the same thing, together; a store that does not return before whoever waits for
    it, then the largest group."""
    groups: dict[str, list[int]] = {}
    for rank, reason in sorted(parked.items()):
        groups.setdefault(_stuck_first(reason), []).append(rank)
    ordered = sorted(
        groups.items(), key=lambda item: (not item[0].startswith("in storage "), -len(item[1]), item[1])
    )
    return [(ranks_text(ranks), reason) for reason, ranks in ordered]


def _stuck_first(parked: str) -> str:
    """What a rank waits for, the call that is stuck before the scheduler that has nothing to do for it."""
    from hicache.rank import LANES

    stuck, idle = [], ""
    for part in parked.split("; "):
        lane, _, call = part.partition(": ")
        if lane in LANES and call:
            stuck.append(f"in {call} ({lane} lane)")
        elif found := IDLE.match(part):
            waiting = counted(int(found[2]), "request")
            idle = f"its scheduler did nothing for {found[1]} steps, {waiting} waiting"
        elif not idle:
            # Behind the idle scheduler come its prefetches, one by one; the log has them.
            stuck.append(f"in {part}")
    return "; ".join([*stuck, *filter(None, (idle,))])
