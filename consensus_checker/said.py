"""What rules over foreign lines have in common: who said what, whom a majority leaves out, and the evidence.

It decides nothing: each rule says what a difference means.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from consensus_checker.claim import Claim
from consensus_checker.finding import Alternative, Evidence
from consensus_checker.weigh import unnamed
from tracer.importers.dossier import At, Dossier, Line

Value = TypeVar("Value", bound=Hashable)
# Lines by which a rank says that another one, or the network, did not do its part.
WAITED = (
    *("watchdog_timeout", "watchdog_exception", "watchdog_abort", "desync_timeout"),
    *("gloo_timeout", "monitored_barrier"),
)
LOST = ("gloo_closed", "gloo_reset", "gloo_lost", "store_lost")


class Row(Protocol):
    @property
    def at(self) -> At: ...


def lines_of(dossier: Dossier, events: Iterable[str]) -> list[Line]:
    wanted = frozenset(events)
    return [line for line in dossier.lines if line.event in wanted]


def by_rank(lines: Iterable[Line]) -> dict[int, list[Line]]:
    """The lines of each rank, in their order; those of nobody known are left out."""
    found: dict[int, list[Line]] = {}
    for line in lines:
        if line.who.rank is not None:
            found.setdefault(line.who.rank, []).append(line)
    return dict(sorted(found.items()))


def entry(dossier: Dossier, row: Row, supports: str) -> Evidence:
    return Evidence(dossier.file_of(row.at), row.at.record, supports)


def entries(dossier: Dossier, rows: Mapping[int, Row], ranks: Sequence[int], role: str) -> list[Evidence]:
    """One entry for each of these ranks that has a row."""
    return [entry(dossier, rows[rank], f"{role} {rank}") for rank in ranks if rank in rows]


@dataclass(frozen=True, slots=True)
class Sides:
    """Ranks by what they have, the largest side first.

    Attributes:
        odd: the ranks that a strict majority leaves out; nobody in a tie.
    """

    sides: tuple[tuple[Any, tuple[int, ...]], ...]
    odd: tuple[int, ...]

    @property
    def is_split(self) -> bool:
        return len(self.sides) > 1

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for _value, ranks in self.sides for rank in ranks))

    @property
    def others(self) -> tuple[int, ...]:
        """The majority; nobody in a tie."""
        return self.sides[0][1] if self.odd else ()


def sides_of(values: Mapping[int, Value]) -> Sides:
    """Who stands with whom, and whom the majority leaves out."""
    ranks: dict[Value, list[int]] = {}
    for rank in sorted(values):
        ranks.setdefault(values[rank], []).append(rank)
    order = sorted(ranks, key=lambda value: (-len(ranks[value]), ranks[value]))
    sides = tuple((value, tuple(ranks[value])) for value in order)
    has_majority = len(sides) > 1 and 2 * len(sides[0][1]) > len(values)
    odd = tuple(sorted(rank for _value, ranks in sides[1:] for rank in ranks)) if has_majority else ()
    return Sides(sides, odd)


def unless_circle(claims: Sequence[Claim]) -> list[Claim]:
    """The claims of one rule over several groups; nobody is named where two groups name different ranks.

    Ranks that wait for each other stand behind in one group each, whoever of them took the wrong turn.
    """
    named = [set(claim.finding.culprit) for claim in claims if claim.finding.culprit]
    if all(one & other for one in named for other in named):
        return list(claims)
    told = "ranks wait for each other: another group names another rank"
    return [
        replace(
            claim,
            finding=replace(
                unnamed(claim.finding, claim.finding.culprit),
                kind="undetermined",
                code=20,
                level="undetermined",
                basis=(*claim.finding.basis, told),
                alternatives=(Alternative(claim.finding.summary, claim.finding.rule),),
            ),
        )
        if claim.finding.culprit
        else claim
        for claim in claims
    ]


def expected_ranks(dossier: Dossier) -> tuple[int, ...]:
    """Every rank of the job, as far as any evidence speaks of it: numbers begin at 0 and have no holes."""
    known = dossier.ranks()
    for dump in dossier.dumps:
        for progress in dump.groups:
            known += progress.group.members or ()
    return tuple(range(1 + max(known))) if known else ()
