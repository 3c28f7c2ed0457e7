"""What to do about a finding: what may be restarted, and which setting avoids its class.

The truth about restarts is that ranks which share a process group live and die together: a rank can't come
back into a group alone. What shares no group with them may stay, and so may the router in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from consensus_checker.finding import Finding
from consensus_checker.words import ranks_text

# Calls that a rank makes for each request that waits for pages from the store.
PREFETCH_CALLS = frozenset(
    {"prefetch_poll", "progress", "prefetch_progress", "check_prefetch_progress", "can_terminate_prefetch"}
)
POLICY = (
    "--hicache-storage-prefetch-policy best_effort or wait_complete",
    "only `timeout` makes ranks vote on each request that waits for the store",
)
HOST_ROOM = (
    "a larger --hicache-size (or --hicache-ratio), the same on every rank",
    "a rank whose host memory is full decides otherwise than its peers",
)
SETTINGS = {"HC02": HOST_ROOM, "HC03": POLICY, "HC05": POLICY}
LAST_RESORT = (
    "start without --enable-hierarchical-cache until it is mended",
    "slower, and this decision is then not taken at all",
)
# What the system says of a process, as `rules.process_state` names it.
PROCESS_STATE = "process_state"
# Evidence that contradicts itself, as `linking` names it.
CONTRADICTION = "contradiction"
# Codes after which no rank of the groups concerned goes on by itself.
STUCK = (10, 11, 12, 13, 14, 15, 16, 18)


@dataclass(frozen=True, slots=True)
class World:
    """Who lives and dies together.

    Attributes:
        replica: ranks that share a process group with those that were named; empty where nobody knows.
        others: ranks that share none with them.
    """

    replica: tuple[int, ...] = ()
    others: tuple[int, ...] = ()


def advice(finding: Finding, world: World, *, is_running: bool = False) -> tuple[tuple[str, str], ...]:
    """What to do, and why; nothing where nothing is wrong.

    Args:
        is_running: ranks went on in spite of it.
    """
    if finding.code in (0, 4):
        return ()
    if finding.rule == CONTRADICTION:
        return (("give the files of one job alone", "logs and dumps of two jobs can't agree"),)
    if finding.code == 17:
        slow = ranks_text(finding.culprit) if finding.culprit else "the ranks"
        return ((f"restart nothing yet: look at {slow}", "the job goes on; a restart would lose its caches"),)
    steps: list[tuple[str, str]] = []
    if finding.rule == PROCESS_STATE and "stopped" in finding.summary:
        steps.append(("kill -CONT PID, if nobody meant to stop it", "a process that is stopped can go on"))
    if _is_in_store(finding):
        steps.append(
            (
                "restart the store or its backend first; it may be restarted alone",
                "a rank that waits in it goes on when it answers",
            )
        )
    if finding.code == 12:
        device = ranks_text(finding.culprit) if finding.culprit else "the ranks that are behind"
        steps.append((f"look at the devices of {device} first", "work was launched there and has not ended"))
    if finding.code in STUCK or (finding.code == 20 and not is_running):
        steps.append(_restart(world))
    return (*steps, *_settings(finding))


def _restart(world: World) -> tuple[str, str]:
    who = ranks_text(world.replica) if world.replica else "all ranks of the replica"
    why = "no rank can come back into its process groups alone"
    if world.others:
        return f"restart {who} together", f"{why}; {ranks_text(world.others)} and the router may stay"
    return f"restart {who} together", f"{why}; other replicas and the router may stay"


def _settings(finding: Finding) -> list[tuple[str, str]]:
    first = finding.first_divergence
    found = [SETTINGS[name] for name in finding.resembles if name in SETTINGS]
    if first is not None and first.call in PREFETCH_CALLS:
        found.append(POLICY)
    if finding.resembles and finding.code in (10, 11):
        found.append(LAST_RESORT)
    return list(dict.fromkeys(found))


def _is_in_store(finding: Finding) -> bool:
    words = (finding.summary, *finding.basis, finding.victim.where if finding.victim else "")
    return finding.code in (11, 15) and any(
        word in text for text in words for word in ("the store", "the backend", "storage")
    )


def world_of(named: Sequence[int], groups: Sequence[Sequence[int]], everybody: Sequence[int]) -> World:
    """The ranks that are tied to those that were named, through whatever groups they share."""
    reached = set(named)
    rest = [set(group) for group in groups if group]
    while found := [group for group in rest if group & reached]:
        rest = [group for group in rest if not group & reached]
        reached.update(*found)
    if not reached or not groups:
        return World()
    return World(tuple(sorted(reached)), tuple(sorted(set(everybody) - reached)))
