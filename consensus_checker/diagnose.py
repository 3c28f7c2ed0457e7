"""All evidence in, one verdict out: our logs, and whatever other programs have written of the same ranks.

    our runs  -> hearts tell who hung -> check ------+
    lines of SGLang's own checker -> judge_lines ----+--> which comes first --> linked --> verdict, advice
    the dossier -> rules of foreign evidence -> weigh+

Composes: `own_evidence` and the rules find, `weigh` and `linking` decide between them. What is added here is
the coverage, a line of evidence for each rank that is named, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from consensus_checker import advice
from consensus_checker.claim import Claim
from consensus_checker.finding import Finding
from consensus_checker.foreign import FOREIGN_RULES
from consensus_checker.history import History
from consensus_checker.linking import joined
from consensus_checker.own_evidence import Case, Own, first_of, own_evidence
from consensus_checker.reenact import Reenacting
from consensus_checker.unclaimed import compared_calls, ranks_of, seen_again, without_claims
from consensus_checker.verdict import Coverage, SourceFile, Sources, Verdict
from consensus_checker.weigh import ONE_LOOK, named, weigh, with_evidence
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier
from tracer.importers.gather import Gathered

SECOND_LOOK = ("hicache snapshot --match sglang -o evidence", "two looks at processes that are still there")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The verdict, and what it takes to draw it.

    Attributes:
        history: of the run that the verdict's calls are from; None where it rests on others' evidence.
        claims: of all rules, as they were made.
    """

    verdict: Verdict
    history: History | None
    dossier: Dossier
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()


def diagnose(found: Gathered, *, reenacting: Reenacting | None = None) -> Diagnosis:
    """Judge everything that was gathered.

    Raises:
        LogError: there are logs of ours and none can be read, and nothing else is there.
    """
    case = Case(found, notes=list(found.notes))
    own_evidence(case, reenacting)
    claims = tuple(claim for rule in FOREIGN_RULES for claim in rule.find(found.dossier))
    weighed = weigh(claims)
    own = first_of(case.owns)
    runs = sum(not one.is_lines for one in case.owns)
    if own is not None and runs > 1:
        case.doubts.append(f"{runs} runs are here, and this is {own.name}")
    finding, rest = joined(
        own, weighed, without_claims(found.dossier, weighed), alive=seen_again(found.dossier)
    )
    for other in case.owns:
        if other is not own:
            found_there = (other.verdict.finding, *other.verdict.findings)
            rest += [
                replace(one, summary=f"{other.name}: {one.summary}")
                for one in found_there
                if one.code not in (0, 4)
            ]
    coverage = _coverage(case, own, claims, finding)
    finding = _complete(_proven(finding, coverage), coverage)
    rest = [_complete(one, coverage) for one in rest]
    verdict = Verdict(
        finding,
        coverage,
        tuple(rest),
        _next(finding, own),
        advice.advice(finding, _world(finding, own, found.dossier)),
    )
    history = own.history if own is not None and _is_of(finding, own) else None
    return Diagnosis(verdict, history, found.dossier, claims, case.told())


def _coverage(case: Case, own: Own | None, claims: Sequence[Claim], finding: Finding) -> Coverage:
    dossier = case.found.dossier
    ranks = ranks_of(dossier)
    if own is not None:
        # Of several runs one is told of; what others say of theirs is among the findings.
        ranks["divergence lines" if own.is_lines else "logs"] = set(own.history.ranks)
    sources = Sources(
        tuple(
            SourceFile(file.name, file.format, file.records, file.unparsed, file.refused, tuple(file.notes))
            for file in dossier.files
        ),
        {kind: tuple(sorted(found)) for kind, found in ranks.items()},
        (*case.told(), *case.found.stored),
    )
    seen = {rank for found in ranks.values() for rank in found}
    expected = _expected(dossier, seen, claims, finding)
    if own is not None:
        told = own.verdict.coverage
        expected = max(told.ranks_expected, expected)
        return replace(
            told,
            ranks_expected=expected,
            ranks_seen=len(seen),
            missing=tuple(rank for rank in range(expected) if rank not in seen),
            other_runs=tuple(sorted({*told.other_runs, *case.other_runs})),
            doubts=(*told.doubts, *(doubt for doubt in case.doubts if doubt not in told.doubts)),
            sources=sources,
        )
    return Coverage(
        ranks_expected=expected,
        ranks_seen=len(seen),
        missing=tuple(rank for rank in range(expected) if rank not in seen),
        truncated=(),
        compared_calls=compared_calls(dossier),
        decisions_compared_fraction=None,
        other_runs=(),
        doubts=tuple(case.doubts),
        sources=sources,
    )


def _expected(dossier: Dossier, seen: Iterable[int], claims: Sequence[Claim], finding: Finding) -> int:
    """Ranks are numbered from 0, so whoever is named by anybody is there, and all before it."""
    known = {rank for dump in dossier.dumps for own in dump.groups for rank in own.group.members or ()}
    known |= {rank for claim in claims for rank in claim.missing}
    sizes = [poll.size for poll in dossier.polls]
    return max([*(rank + 1 for rank in (*seen, *known, *named(finding))), *sizes], default=0)


def _proven(finding: Finding, coverage: Coverage) -> Finding:
    """The finding; sound is only what was compared, of all ranks."""
    if finding.code != 0 or (coverage.compared_calls and not coverage.missing):
        return finding
    lacking = (
        f"nothing is there of {ranks_text(coverage.missing)}" if coverage.missing else "no call was compared"
    )
    return replace(
        finding,
        kind="incomplete",
        code=4,
        summary=f"{finding.summary}; {lacking}",
        level="undetermined",
    )


def _complete(finding: Finding, coverage: Coverage) -> Finding:
    """The finding with ranks that nobody has heard among the silent, and evidence for each that is named."""
    seen = {rank for ranks in (coverage.sources.ranks.values() if coverage.sources else ()) for rank in ranks}
    told = {*finding.culprit, *finding.victims, *finding.unknown}
    silent = {*finding.silent, *(rank for rank in coverage.missing if rank not in told)}
    if finding.code != 0:
        finding = replace(finding, silent=tuple(sorted(silent)))
    return with_evidence(
        finding, lambda rank: "nothing of it but that" if rank in seen else "no evidence of this rank"
    )


def _is_of(finding: Finding, own: Own) -> bool:
    """Whether a finding's calls are those of a run's own records."""
    first, told = finding.first_divergence, own.verdict.finding.first_divergence
    return own.verdict.finding.rule == finding.rule and (first is None) == (told is None)


def _world(finding: Finding, own: Own | None, dossier: Dossier) -> advice.World:
    told = [*finding.culprit, *finding.victims, *finding.unknown]
    groups: list[Sequence[int]] = []
    everybody: set[int] = set()
    if own is not None and not own.is_lines:
        for lane in own.history.lanes:
            found: Mapping[str, Sequence[int]] = lane.header.get("groups", {})
            groups += [tuple(members) for members in found.values()]
        everybody = set(range(own.history.world_size))
    else:
        members = {own.group.members for dump in dossier.dumps for own in dump.groups}
        groups = [group for group in members if group]
        everybody = {rank for group in groups for rank in group}
    # The group of the whole job ties replicas only while it starts.
    smaller = [group for group in groups if set(group) != everybody]
    return advice.world_of(told, smaller or groups, sorted(everybody))


def _next(finding: Finding, own: Own | None) -> tuple[tuple[str, str], ...]:
    told: tuple[tuple[str, str], ...] = ()
    if own is not None and _is_of(finding, own):
        told = own.verdict.next
    if finding.rule == ONE_LOOK or (finding.code == 4 and own is None):
        return (*told, SECOND_LOOK)
    if finding.code in (0, 4):
        return told
    page = finding.resembles[0] if finding.resembles else finding.rule
    what = "what this class of bugs is, and what is known of it" if finding.resembles else "what this means"
    return (*told[:1], (f"hicache explain {page}", what), *told[1:])
