"""Our own evidence and what others wrote, as one finding or as two.

Own logs go first: they know decisions, and what others write knows only where ranks stand. A stall that
misses the very rank that had left the others is what that divergence led to; one that misses another rank is
a finding of its own. Where our logs name nobody, evidence of another kind may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from consensus_checker.advice import CONTRADICTION
from consensus_checker.deaths import DEAD
from consensus_checker.ending import STALL
from consensus_checker.finding import STEP_UNKNOWN, Alternative, Evidence, Finding, Victim
from consensus_checker.own_evidence import Own
from consensus_checker.weigh import LEVELS, Weighed
from consensus_checker.words import ranks_text

HEART = "its heart had stopped"
STALLS = (11, 13, 14, 15)
SURE = ("medium", "high")


def joined(
    own: Own | None, weighed: Weighed, without: Finding, *, alive: frozenset[int] = frozenset()
) -> tuple[Finding, list[Finding]]:
    """The finding and the rest: own logs go first, and a stall may be what a divergence led to.

    Args:
        without: what to say where nobody claims anything.
        alive: ranks that others' evidence saw more than once.
    """
    claims = list(weighed.findings)
    if without.code == 0:
        # What looked like a stall in one look went on in the next.
        claims = [one for one in claims if one.code != 4]
    if own is None:
        return (claims[0], claims[1:]) if claims else (without, [])
    first, rest = own.verdict.finding, list(own.verdict.findings)
    if first.code == 4:
        accusing = [one for one in claims if one.code not in (0, 4)]
        if accusing:
            return accusing[0], [*accusing[1:], *rest]
        if without.code == 0:
            first = _of_a_job_that_goes_on(first)
        return first, [*rest, *(one for one in claims if one.code == 4)]
    if first.code == 0:
        return _beside_sound_logs(own, claims, rest)
    if first.code == 20:
        able = [one for one in claims if one.culprit and LEVELS.index(one.level) >= LEVELS.index("medium")]
        doubted = {*first.unknown, *first.silent}
        helping = next((one for one in able if not doubted or set(one.culprit) <= doubted), None)
        if helping is not None:
            others = [one for one in claims if one is not helping]
            return helping, [first, *rest, *others]
        return first, [*rest, *claims]
    seen = next((one for one in claims if _says_more(first, one, alive)), None)
    if seen is not None:
        others = [one for one in claims if one is not seen]
        told = f"also {first.rule}: {HEART}" if first.rule == DEAD else f"also {first.rule}"
        linked, left = _linked(replace(seen, basis=(*seen.basis, told)), others)
        return linked, [*rest, *left]
    linked, left = _linked(first, claims)
    return linked, [*rest, *left]


def _of_a_job_that_goes_on(first: Finding) -> Finding:
    """Where the logs of a job break off that is seen to go on, nobody has stopped."""
    return replace(
        first,
        alternatives=tuple(one for one in first.alternatives if one.rule != STALL),
        ruled_out=(*first.ruled_out, ("a stall", "two looks show that every rank went on")),
    )


def _says_more(first: Finding, claim: Finding, alive: frozenset[int]) -> bool:
    """Whether others' evidence says the same as our logs, of the same ranks, more surely or more exactly.

    So it does of ranks that are dead by their hearts alone, and were seen later keeping others waiting.
    """
    if first.kind == "divergence" or not claim.culprit or set(claim.culprit) != set(first.culprit):
        return False
    is_by_heart = first.rule == DEAD and first.level != "high"
    if is_by_heart and claim.code in (11, 15) and set(claim.culprit) <= alive:
        return True
    return claim.code == first.code and LEVELS.index(claim.level) > LEVELS.index(first.level)


def _beside_sound_logs(
    own: Own, claims: Sequence[Finding], rest: Sequence[Finding]
) -> tuple[Finding, list[Finding]]:
    """Logs that are equal and complete, and others that say that something is wrong."""
    first = own.verdict.finding
    sure = [one for one in claims if one.code not in (0, 4) and one.level in SURE]
    if not sure:
        doubtful = tuple(
            (one.summary, "every rank closed its log as completed")
            for one in claims
            if one.code not in (0, 4) and own.is_closed
        )
        return replace(first, ruled_out=(*first.ruled_out, *doubtful)), list(rest)
    named = tuple(sorted({rank for one in sure for rank in one.culprit}))
    finding = Finding(
        "undetermined",
        20,
        CONTRADICTION,
        f"the logs are equal and complete, and {sure[0].rule} says: {sure[0].summary}; "
        "the two may be of different runs",
        "undetermined",
        ("own logs against other evidence",),
        unknown=named,
        evidence=tuple(_as_unknown(one) for one in sure[0].evidence),
        alternatives=tuple(Alternative(one.summary, one.rule, one.resembles) for one in sure),
    )
    return finding, [*rest, *claims]


def _in_role(entry: Evidence, finding: Finding) -> Evidence:
    """The entry with the part that its rank has in another finding."""
    role, _, who = entry.supports.partition(" ")
    rank = int(who) if who.isdigit() else None
    if rank in finding.culprit:
        role = "culprit"
    elif role in ("culprit", "unknown") and rank is not None:
        role = "unknown" if rank in finding.unknown else "victim"
    return replace(entry, supports=f"{role} {who}")


def _as_unknown(entry: Evidence) -> Evidence:
    role, _, who = entry.supports.partition(" ")
    return replace(entry, supports=f"unknown {who}") if role == "culprit" else entry


def _linked(first: Finding, claims: Sequence[Finding]) -> tuple[Finding, list[Finding]]:
    """The finding with those claims in it that are about the same ranks, and the other claims."""
    left: list[Finding] = []
    for claim in claims:
        if claim.code in (0, 4):
            continue
        same = set(claim.culprit) & set(first.culprit)
        missed = set(first.culprit) & {*claim.silent, *claim.unknown} if not claim.culprit else set()
        breaks_tie = (
            not first.culprit
            and claim.culprit
            and set(claim.culprit) < set(first.unknown)
            and claim.level in SURE
        )
        is_same = bool(same) and set(claim.culprit) <= set(first.culprit)
        if is_same or (missed and claim.code in STALLS):
            first = _with_claim(first, claim)
        elif breaks_tie:
            first = _with_tie_broken(first, claim)
        else:
            left.append(claim)
    return first, left


def _with_claim(first: Finding, claim: Finding) -> Finding:
    """One sentence of trigger and victim: where the others wait is what became of it."""
    basis = (*first.basis, f"also {claim.rule}")
    more = (_in_role(one, first) for one in claim.evidence)
    evidence = tuple(dict.fromkeys((*first.evidence, *more)))
    level = first.level
    if claim.culprit and level == "low":
        level = "medium"
    if first.kind != "divergence" or claim.code == first.code or claim.code == 10:
        return replace(first, basis=basis, evidence=evidence, level=level)
    if first.victim is not None:
        consequence = first.consequence or (claim.kind, claim.code)
        return replace(first, basis=basis, evidence=evidence, level=level, consequence=consequence)
    waiting = tuple(rank for rank in claim.victims if rank not in (*first.culprit, *first.unknown))
    verb = "waits" if len(waiting) == 1 else "wait"
    victim = claim.victim or Victim(waiting or first.culprit, claim.summary, STEP_UNKNOWN, None)
    where = f" in {claim.victim.where}" if claim.victim is not None else f" ({claim.summary})"
    told = f"; {ranks_text(waiting)} {verb} for it{where}" if waiting else ""
    return replace(
        first,
        summary=first.summary + told,
        basis=basis,
        level=level,
        evidence=evidence,
        victims=tuple(sorted({*first.victims, *waiting})),
        victim=victim,
        consequence=(claim.kind, claim.code),
        ruled_out=tuple(dict.fromkeys((*first.ruled_out, *claim.ruled_out))),
    )


def _with_tie_broken(first: Finding, claim: Finding) -> Finding:
    """Where the logs name nobody, evidence of another kind may."""
    rest = tuple(rank for rank in first.unknown if rank not in claim.culprit)
    evidence = tuple(
        replace(
            entry,
            supports=entry.supports.replace(
                "unknown", "culprit" if _is_about(entry, claim.culprit) else "victim"
            ),
        )
        for entry in first.evidence
    )
    named = replace(
        first,
        summary=f"{first.summary}; {claim.rule} names {ranks_text(claim.culprit)}",
        level="medium",
        culprit=claim.culprit,
        unknown=(),
        victims=tuple(sorted({*first.victims, *rest})),
        evidence=evidence,
    )
    return _with_claim(named, claim)


def _is_about(entry: Evidence, ranks: Sequence[int]) -> bool:
    return entry.supports.split(" ")[-1].isdigit() and int(entry.supports.split(" ")[-1]) in ranks
