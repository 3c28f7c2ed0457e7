"""What the checker says about one thing that went wrong: plain values, no text layout, no colour.

Every class knows its own part of `hicache.verdict.v1`; maps by rank are written in rank order, so
equal findings give equal bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

VerdictKind = Literal[
    "consistent",
    "divergence",
    "stall",
    "mismatch",
    "dead",
    "frozen",
    "slow",
    "invariant",
    "undetermined",
    "nothing_compared",
    "incomplete",
]
# Where a victim stands, as evidence without steps says it.
STEP_UNKNOWN = -1
DivergenceKind = Literal["value", "missing", "extra", "order", "collective"]
Level = Literal["high", "medium", "low", "undetermined"]


def by_rank(values: Mapping[int, Any]) -> dict[str, Any]:
    """A map from rank as JSON carries it: names, in rank order."""
    return {str(rank): values[rank] for rank in sorted(values)}


@dataclass(frozen=True, slots=True)
class FieldDiff:
    """One field that differs: the majority's value (None in a tie) and that of each odd rank."""

    field: str
    majority: Any
    values: Mapping[int, Any]

    def to_json(self) -> dict[str, Any]:
        return {"field": self.field, "majority": self.majority, "values": by_rank(self.values)}


@dataclass(frozen=True, slots=True)
class FirstDivergence:
    """Where ranks of one scope first differ.

    Attributes:
        step: of the odd rank, or of the first rank in a tie.
        index: position in the lockstep sequence of (scope, lane), from 0.
        call: the call that differs; `kind` says how.
        by_rank: rank -> the fields that differ, as that rank wrote them.
        about: what the call was about, such as `write_backup of node 34`; for text.
    """

    scope: str
    lane: str
    step: int
    index: int
    call: str
    phase: str | None
    kind: DivergenceKind
    request: str | None
    by_rank: Mapping[int, Mapping[str, Any]]
    field_diff: tuple[FieldDiff, ...]
    about: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "scope": self.scope,
            "lane": self.lane,
            "step": self.step,
            "index": self.index,
            "call": self.call,
            "phase": self.phase,
            "kind": self.kind,
            "request": self.request,
            "last_agreement": self.index - 1 if self.index else None,
            "by_rank": by_rank({rank: dict(values) for rank, values in self.by_rank.items()}),
            "field_diff": [diff.to_json() for diff in self.field_diff],
        }


@dataclass(frozen=True, slots=True)
class Trigger:
    """The local fact that explains a divergence, and the kind of record (`call`) that has it.

    `rank` is None in a tie; `need` if none is declared. Since `since_step` it has told the odd ranks from the
    others in every record that has it; None where that is not known.
    """

    rank: int | None
    step: int
    fact: str
    values: Mapping[int, Any]
    summary: str
    need: Any = None
    call: str = ""
    since_step: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "step": self.step,
            "fact": self.fact,
            "since_step": self.since_step,
            "values": by_rank(self.values),
            "summary": self.summary,
        }


@dataclass(frozen=True, slots=True)
class Victim:
    """Where it showed.

    Attributes:
        step: of the first of them; -1 where other evidence than our logs tells it.
        calls_later: lockstep records on a victim since the divergence.
        seconds_later: the same distance by that victim's own clock; None where its log has no time.
    """

    ranks: tuple[int, ...]
    where: str
    step: int
    calls_later: int | None
    seconds_later: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "ranks": list(self.ranks),
            "where": self.where,
            "step": self.step,
            "calls_later": self.calls_later,
            "seconds_later": self.seconds_later,
        }


@dataclass(frozen=True, slots=True)
class Evidence:
    """A line of a log: `record` is its seq. Both are None for a rank that left no log."""

    file: str | None
    record: int | None
    supports: str

    def to_json(self, number: int) -> dict[str, Any]:
        return {"id": number, "file": self.file, "record": self.record, "supports": self.supports}


@dataclass(frozen=True, slots=True)
class Alternative:
    summary: str
    rule: str
    resembles: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"summary": self.summary, "rule": self.rule, "resembles": list(self.resembles)}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, who did it as far as that is known, and why we think so."""

    kind: VerdictKind
    code: int
    rule: str
    summary: str
    level: Level
    basis: tuple[str, ...] = ()
    resembles: tuple[str, ...] = ()
    culprit: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()
    first_divergence: FirstDivergence | None = None
    trigger: Trigger | None = None
    victim: Victim | None = None
    consequence: tuple[str, int] | None = None
    evidence: tuple[Evidence, ...] = ()
    # hypothesis, because
    ruled_out: tuple[tuple[str, str], ...] = field(default=())
    alternatives: tuple[Alternative, ...] = ()

    def to_json(self) -> dict[str, Any]:
        part = self.first_divergence
        return {
            "verdict": {
                "kind": self.kind,
                "code": self.code,
                "rule": self.rule,
                "resembles": list(self.resembles),
                "summary": self.summary,
                "confidence": {"level": self.level, "basis": list(self.basis)},
            },
            "ranks": {
                "culprit": list(self.culprit),
                "victims": list(self.victims),
                "silent": list(self.silent),
                "unknown": list(self.unknown),
            },
            "first_divergence": part.to_json() if part else None,
            "trigger": self.trigger.to_json() if self.trigger else None,
            "victim": self.victim.to_json() if self.victim else None,
            "consequence": {"kind": self.consequence[0], "code": self.consequence[1]}
            if self.consequence
            else None,
            "evidence": [entry.to_json(number) for number, entry in enumerate(self.evidence, start=1)],
            "ruled_out": [{"hypothesis": name, "because": because} for name, because in self.ruled_out],
            "alternatives": [entry.to_json() for entry in self.alternatives],
        }
