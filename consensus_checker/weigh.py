"""From what each rule claims to one finding: whom evidence of two kinds names, whom nothing contradicts.

    claims -> second look -> cleared by another rule? -> do others agree? -> in causal order -> findings

Owns four rules. A rank that one claim accuses and another clears is named by nobody. Claims of one class that
accuse different ranks accuse nobody. What needs a second look accuses nobody unless evidence that does not
need one names the same ranks. Evidence of another kind that names the same ranks makes a claim surer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from consensus_checker.claim import Claim
from consensus_checker.finding import Alternative, Evidence, Finding, Level
from consensus_checker.words import ranks_text

# Causal order: what comes first goes before what follows from it.
ORDER = (14, 10, 16, 11, 12, 13, 15, 17, 18, 20, 4, 0)
STALLS = (11, 12, 13, 15)
LEVELS: tuple[Level, ...] = ("undetermined", "low", "medium", "high")
# A job that one look alone was had at.
ONE_LOOK = "one_look"


@dataclass(frozen=True, slots=True)
class Weighed:
    """What is left of the claims.

    Attributes:
        findings: the first in causal order in front; empty where no rule claims anything.
        missing: ranks that some kind of evidence lacks.
        cleared: rank -> why it is ruled out, by the rule that says so.
    """

    findings: tuple[Finding, ...]
    missing: tuple[int, ...] = ()
    cleared: Mapping[int, tuple[str, str]] = field(default_factory=dict)


def weigh(claims: Sequence[Claim]) -> Weighed:
    """The findings of all claims, in causal order, each as sure as all evidence together makes it."""
    cleared: dict[int, dict[str, str]] = {}
    for claim in claims:
        for rank, why in claim.cleared.items():
            cleared.setdefault(rank, {}).setdefault(claim.finding.rule, why)
    for claim in claims:
        # Who is seen waiting is not gone, whoever has heard nothing of it.
        for finding in (other.finding for other in claims if _is_absence(other.finding)):
            for rank in set(finding.culprit) & set(claim.finding.victims):
                if _are_apart(finding, claim.finding):
                    cleared.setdefault(rank, {}).setdefault(claim.finding.rule, "it waits there")
    accusing = [claim for claim in claims if claim.finding.kind != "consistent"]
    found = [_once_more(claim, accusing) for claim in accusing]
    found = [_without_cleared(finding, cleared) for finding in found]
    found = _agreed(found)
    found = _undisputed(found)
    found.sort(key=_place)
    found += [claim.finding for claim in claims if claim.finding.kind == "consistent"]
    missing = tuple(sorted({rank for claim in claims for rank in claim.missing}))
    first = {rank: min(rules.items()) for rank, rules in sorted(cleared.items())}
    return Weighed(tuple(found), missing, first)


def _place(finding: Finding) -> tuple[int, int, int, bool]:
    """Where a finding stands among others: what is only guessed comes behind what is seen."""
    is_guess = finding.level == "low" or (finding.level == "undetermined" and finding.code in STALLS)
    order = ORDER.index(finding.code) if finding.code in ORDER else len(ORDER)
    late = ORDER.index(20)
    return (
        max(order, late) if is_guess and order < late else order,
        order,
        -LEVELS.index(finding.level),
        not finding.culprit,
    )


def _once_more(claim: Claim, claims: Sequence[Claim]) -> Finding:
    """The finding of a claim; of one that needs a second look, what can be said without."""
    finding = claim.finding
    if not claim.needs_second_look or finding.code in (0, 4, 20):
        return finding
    own = set(finding.culprit)
    others = [other.finding for other in claims if not other.needs_second_look]
    if own and any(own == set(other.culprit) and _are_apart(finding, other) for other in others):
        return finding
    return replace(
        unnamed(finding, finding.culprit),
        kind="incomplete",
        code=4,
        rule=ONE_LOOK,
        summary=f"one look at a job that may be alive can't tell slow from stuck: {finding.summary}",
        level="undetermined",
        victims=(),
        basis=("one look", *finding.basis),
        alternatives=(Alternative(finding.summary, finding.rule, finding.resembles), *finding.alternatives),
    )


def _without_cleared(finding: Finding, cleared: Mapping[int, Mapping[str, str]]) -> Finding:
    """The finding without the ranks that another rule rules out."""
    against = {
        rank: (rule, why)
        for rank in finding.culprit
        for rule, why in sorted(cleared.get(rank, {}).items())
        if rule != finding.rule
    }
    if not against:
        return finding
    told = "; ".join(f"{rule} clears rank {rank}: {why}" for rank, (rule, why) in sorted(against.items()))
    left = unnamed(finding, sorted(against))
    if left.culprit:
        return replace(left, level=_lower(finding.level), basis=(*finding.basis, told))
    return replace(
        left,
        kind="undetermined",
        code=20,
        summary=f"{finding.rule} names {ranks_text(finding.culprit)}, and other evidence clears it: {told}",
        level="undetermined",
        basis=(*finding.basis, told),
        alternatives=(Alternative(finding.summary, finding.rule, finding.resembles), *finding.alternatives),
    )


def _agreed(findings: Sequence[Finding]) -> list[Finding]:
    """Findings, surer where evidence of another kind names the same ranks."""
    agreed = []
    for finding in findings:
        own = set(finding.culprit)
        others = [
            other
            for other in findings
            if own and other is not finding and set(other.culprit) == own and _are_apart(finding, other)
        ]
        # That nothing is heard of a rank is one thing, by however many who would have heard it.
        others = [other for other in others if not (_is_absence(finding) and _is_absence(other))]
        rules = tuple(dict.fromkeys(f"also {other.rule}" for other in others))
        level = _higher(finding.level) if others else finding.level
        agreed.append(replace(finding, level=level, basis=(*finding.basis, *rules)))
    return agreed


def _is_absence(finding: Finding) -> bool:
    """Whether a finding accuses ranks for nothing but that nothing is heard of them."""
    return bool(finding.culprit) and set(finding.culprit) <= set(finding.silent)


def _undisputed(findings: Sequence[Finding]) -> list[Finding]:
    """Stalls that accuse different ranks by different evidence: of two that are as sure, neither does."""
    stalls = [finding for finding in findings if finding.code in STALLS and finding.culprit]
    settled: list[Finding] = []
    for finding in findings:
        against = [
            other
            for other in stalls
            if finding in stalls
            and not set(other.culprit) & set(finding.culprit)
            and _are_apart(finding, other)
            and LEVELS.index(other.level) >= LEVELS.index(finding.level)
        ]
        if not against:
            settled.append(finding)
            continue
        told = "; ".join(f"{other.rule} names {ranks_text(other.culprit)}" for other in against)
        settled.append(
            replace(
                unnamed(finding, finding.culprit),
                kind="undetermined",
                code=20,
                summary=f"{finding.rule} names {ranks_text(finding.culprit)}, and {told}",
                level="undetermined",
                basis=(*finding.basis, told),
                alternatives=tuple(
                    Alternative(other.summary, other.rule, other.resembles) for other in (finding, *against)
                ),
            )
        )
    return settled


def named(finding: Finding) -> tuple[int, ...]:
    """Every rank that a finding speaks of."""
    return (*finding.culprit, *finding.victims, *finding.silent, *finding.unknown)


def unnamed(finding: Finding, ranks: Iterable[int]) -> Finding:
    """The finding with these culprits among the ranks of which nobody knows."""
    out = set(ranks) & set(finding.culprit)
    evidence = tuple(
        replace(entry, supports=f"unknown {rank}")
        if (rank := _rank_of(entry.supports, "culprit")) in out
        else entry
        for entry in finding.evidence
    )
    return replace(
        finding,
        culprit=tuple(rank for rank in finding.culprit if rank not in out),
        unknown=tuple(sorted({*finding.unknown, *out})),
        evidence=evidence,
    )


def _rank_of(supports: str, role: str) -> int | None:
    words = supports.split()
    is_role = len(words) >= 2 and words[0] == role and words[1].rstrip(":").isdigit()
    return int(words[1].rstrip(":")) if is_role else None


def _are_apart(one: Finding, two: Finding) -> bool:
    """Whether two findings stand on different files: two rules over one dump are one witness."""
    files = {entry.file for entry in one.evidence} - {None}
    others = {entry.file for entry in two.evidence} - {None}
    return bool(files and others) and not files & others


def _higher(level: Level) -> Level:
    return LEVELS[min(len(LEVELS) - 1, LEVELS.index(level) + 1)]


def _lower(level: Level) -> Level:
    return LEVELS[max(1, LEVELS.index(level) - 1)]


def with_evidence(finding: Finding, why: Callable[[int], str]) -> Finding:
    """The finding with an entry for every rank that it names, also where there is nothing to show."""
    roles = {
        "culprit": finding.culprit,
        "victim": finding.victims,
        "silent": finding.silent,
        "unknown": finding.unknown,
    }
    told = {rank for entry in finding.evidence for rank in _ranks_of(entry.supports)}
    more = tuple(
        Evidence(None, None, f"{role} {rank}: {why(rank)}")
        for role, ranks in roles.items()
        for rank in ranks
        if rank not in told
    )
    return replace(finding, evidence=(*finding.evidence, *more)) if more else finding


def _ranks_of(supports: str) -> set[int]:
    """Ranks that an entry speaks of: `victim 0`, `silent 3: no log`, `unknown 0-2, 5`."""
    words = supports.partition(":")[0].partition(" ")[2]
    found: set[int] = set()
    for part in words.replace("ranks", "").replace("rank", "").split(","):
        low, _, high = part.strip().partition("-")
        if low.isdigit() and (not high or high.isdigit()):
            found.update(range(int(low), int(high or low) + 1))
    return found
