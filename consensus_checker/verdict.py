"""The one typed value that every rendering comes from: `hicache.verdict.v1`, and the exit codes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from consensus_checker.finding import Finding, by_rank

SCHEMA = "hicache.verdict.v1"
# Rule of a verdict in which no rule fired: it speaks of how much was compared.
COVERAGE = "coverage"

# What a file may say of a rank, as `Sources.ranks` names it.
EVIDENCE = ("logs", "divergence lines", "dumps", "stacks", "lines", "statuses", "polls")

Reading = Literal["lines", "checkpoints", "checksums"]

# The exit code of a command is the verdict.
EXIT_CODES = {
    0: "enough was checked, nothing wrong found",
    1: "internal error",
    2: "usage error",
    3: "input unreadable or refused",
    4: "nothing compared, or equal only as far as the logs go",
    10: "decision divergence",
    11: "stall: a rank did not join",
    12: "stall: device behind",
    13: "stall: all joined, nobody completes",
    14: "process dead or unreachable",
    15: "frozen or idle: no progress and no collective waiting",
    16: "mismatch of op, shape, dtype or purpose in a collective",
    17: "slow: progress, but beyond the run's own baseline",
    18: "invariant broken",
    20: "something is wrong but undetermined",
    130: "interrupted",
}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of somebody else's, and what became of it; nobody knows it where `format` is None."""

    name: str
    format: str | None
    records: int
    unparsed: int
    refused: str | None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "format": self.format,
            "records": self.records,
            "unparsed": self.unparsed,
            "refused": self.refused,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class Sources:
    """What `diagnose` has read beside logs of ours.

    Attributes:
        ranks: kind of evidence -> ranks that it covers.
        notes: what of the places was left out.
    """

    files: tuple[SourceFile, ...]
    ranks: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "files": [file.to_json() for file in self.files],
            "ranks": {kind: list(self.ranks[kind]) for kind in EVIDENCE if kind in self.ranks},
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class Coverage:
    """What was looked at, without which a verdict means nothing.

    Attributes:
        ranks_expected: world size as the headers state it; the rest are ranks with a log of this run.
        truncated: ranks with a lane that was cut, torn or is not there.
        compared_calls: rows of lockstep records compared, summed over scopes and lanes; a row is one
            record a rank, of at least two ranks.
        decisions_compared_fraction: of each rank's decision records read up to its first difference,
            the part that was compared with another rank; the smallest over ranks. None: no decisions.
        other_runs: files of another run that lie in the same place and were not compared.
        doubts: what headers contradict each other in, or can't be; each forbids `consistent`.
        dropped_kinds: kind -> ranks that dropped it; left out of every scope that one of them is in.
        dropped_up_to: rank -> lane -> newest of its oldest records that a ring has dropped.
        compared_from: scope and lane, as `dp0 scheduler` -> index of the first call compared, where
            records were dropped.
        throttled: rank -> first step behind which some are left out there, because recording took too much of
            the loop's time; such steps are compared on no rank.
        read: `lines` where all of them were read; `checkpoints` where of a large run only what those left
            open was; `checksums` where besides every block of lines was held against its checksum.
        sources: what else was read; None where that was not asked for.
    """

    ranks_expected: int
    ranks_seen: int
    missing: tuple[int, ...]
    truncated: tuple[int, ...]
    compared_calls: int
    decisions_compared_fraction: float | None
    other_runs: tuple[str, ...]
    doubts: tuple[str, ...] = ()
    dropped_kinds: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dropped_up_to: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    compared_from: Mapping[str, int] = field(default_factory=dict)
    throttled: Mapping[int, int] = field(default_factory=dict)
    read: Reading = "lines"
    sources: Sources | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "ranks_expected": self.ranks_expected,
            "ranks_seen": self.ranks_seen,
            "missing": list(self.missing),
            "truncated": list(self.truncated),
            "compared_calls": self.compared_calls,
            "decisions_compared_fraction": self.decisions_compared_fraction,
            "other_runs": list(self.other_runs),
            "doubts": list(self.doubts),
            "dropped_kinds": {kind: list(ranks) for kind, ranks in self.dropped_kinds.items()},
            "dropped_up_to": by_rank({rank: dict(lanes) for rank, lanes in self.dropped_up_to.items()}),
            "compared_from": dict(self.compared_from),
            "throttled": by_rank(dict(self.throttled)),
            "read": self.read,
            **({"sources": self.sources.to_json()} if self.sources is not None else {}),
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """The earliest finding in causal order, what was covered, the other findings, what to do next.

    Attributes:
        next: command, and why.
        advice: what to do that is no command of ours, such as a restart, and why.
    """

    finding: Finding
    coverage: Coverage
    findings: tuple[Finding, ...] = ()
    next: tuple[tuple[str, str], ...] = ()
    advice: tuple[tuple[str, str], ...] = ()

    @property
    def code(self) -> int:
        return self.finding.code

    @property
    def kind(self) -> str:
        return self.finding.kind

    def to_json(self) -> dict[str, Any]:
        """The document, in the order of its fields; values of JSON only."""
        return {
            "schema": SCHEMA,
            **self.finding.to_json(),
            "coverage": self.coverage.to_json(),
            "findings": [finding.to_json() for finding in self.findings],
            "next": [{"command": command, "why": why} for command, why in self.next],
            **({"advice": [{"do": what, "why": why} for what, why in self.advice]} if self.advice else {}),
        }

    def to_text(self) -> str:
        """The document as it is printed: equal logs give equal bytes."""
        return json.dumps(self.to_json(), ensure_ascii=False, indent=1) + "\n"
