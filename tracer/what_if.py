"""What another agreement would have applied: the ranks' own counts of a trace, consumed in another way.

    local      each rank applies what it has seen itself
    min        the least along tp and cp, in each stage for itself
    pp-sync    stage 0's least, which later stages adopt, and wait for

Where ranks would have applied different counts everything behind would have gone otherwise: nothing is said
of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tracer.transfers import RankQueue, Replay


@dataclass(frozen=True, slots=True)
class Parting:
    """Where ranks would first have applied different counts.

    Attributes:
        counts: rank -> how many it would have applied in all by then.
    """

    step: int
    count_name: str
    counts: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One policy on the trace's own observations.

    Attributes:
        parting: None where ranks would not have parted, as far as they have counted.
        waits: rank -> rounds in which it would have had to wait for a copy that stage 0 had seen done.
        rounds: that were replayed.
        is_own: the policy gives what was applied, at every round.
        blind: ranks that have not counted by themselves, since a stage before decides: what they would have
            applied by their own counts nobody knows.
    """

    policy: str
    parting: Parting | None
    waits: Mapping[int, int]
    rounds: int
    is_own: bool
    blind: tuple[int, ...]


POLICIES = ("pp-sync", "local", "min")


def what_if(found: Replay, policy: str) -> WhatIf:
    """Replay consumption under another agreement.

    What a rank has seen by a round is what was applied before plus what it counted there.
    """
    assert policy in POLICIES, policy
    partings: list[Parting] = []
    waits: dict[int, int] = {}
    blind: set[int] = set()
    total = 0
    is_own = True
    for members in _replicas(found.ranks):
        for index, (name, _applied) in enumerate(found.counts):
            seen = {each.rank: row for each in members if (row := _seen_by(each, index))}
            blind.update(each.rank for each in members if each.rank not in seen)
            rows = list(seen.values())
            stages = {each.rank: each.place.get("pp", 0) for each in members}
            for step in sorted(set(rows[0]).intersection(*rows[1:])) if rows else ():
                total += 1
                own = {rank: row[step][0] for rank, row in seen.items()}
                would = _would(policy, stages, own)
                is_own = is_own and all(row[step][1] in (None, would[rank]) for rank, row in seen.items())
                if len(set(would.values())) > 1:
                    partings.append(Parting(step, name, would))
                    break
                for rank, count in would.items():
                    waits[rank] = waits.get(rank, 0) + (count > own[rank])
    first = min(partings, key=lambda parting: parting.step, default=None)
    told = {rank: count for rank, count in sorted(waits.items()) if count}
    return WhatIf(policy, first, told, total, is_own, tuple(sorted(blind)))


def _replicas(ranks: Iterable[RankQueue]) -> list[list[RankQueue]]:
    by_dp: dict[int, list[RankQueue]] = {}
    for each in ranks:
        by_dp.setdefault(each.place.get("dp", 0), []).append(each)
    return [members for _dp, members in sorted(by_dp.items())]


def _seen_by(own: RankQueue, index: int) -> dict[int, tuple[int, int | None]]:
    """Step -> how many this rank had seen done by then, and how many were applied by its end, if told."""
    applied = 0
    found = {}
    for each in own.rounds:
        saw, took = each.saw[index], each.applied[index]
        if saw is not None:
            found[each.step] = applied + saw, None if took is None else applied + took
        applied += took or 0
    return found


def _would(policy: str, stages: Mapping[int, int], own: Mapping[int, int]) -> dict[int, int]:
    if policy == "local":
        return dict(own)
    counts: dict[int, list[int]] = {}
    for rank, count in own.items():
        counts.setdefault(stages[rank], []).append(count)
    first = min(counts)
    return {rank: min(counts[first if policy == "pp-sync" else stages[rank]]) for rank in own}
