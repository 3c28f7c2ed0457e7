"""What one rule makes of foreign evidence: a finding, and whom the same evidence clears.

A rule never decides the verdict. It says what it sees and how surely; `diagnose` weighs the claims of all
rules, and a rank that one accuses and another clears is named by nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from consensus_checker.finding import Finding
from tracer.importers.dossier import Dossier


@dataclass(frozen=True, slots=True)
class Claim:
    """One finding of one rule.

    Attributes:
        cleared: rank -> why this evidence rules it out, in words.
        needs_second_look: true of a job that is alive, where one look can't tell slow from stuck.
        missing: ranks that ought to be in this kind of evidence, and are not.
    """

    finding: Finding
    cleared: dict[int, str] = field(default_factory=dict)
    needs_second_look: bool = False
    missing: tuple[int, ...] = ()


class ForeignRule(Protocol):
    """A module of `consensus_checker.rules` that looks at foreign evidence."""

    RULE: str

    def find(self, dossier: Dossier) -> list[Claim]:
        """What this rule sees, the surest first; nothing where its kind of evidence is not there."""
