"""Rule `ras_counts`: a rank has called fewer collectives than all others, and still has ten seconds later.

Equation, for a communicator, its members a and b, an op o, and two polls p, q at least 10 s apart:

    count(a, o, q) = count(b, o, q)      or      count(a, o, q) > count(a, o, p)      for the odd one a

    10:00:00   member 0 AllReduce 412   member 1 AllReduce 411   member 2 AllReduce 412
    10:00:15   member 0 AllReduce 412   member 1 AllReduce 411   member 2 AllReduce 412
               member 1 has not joined #412, and does not come

One poll of a job that runs may show any difference. Point-to-point calls differ legally. More of one op and
fewer of another is another call, not a missing one. With a member that does not answer, it may be that one.
"""

from __future__ import annotations

from collections.abc import Mapping

from consensus_checker.claim import Claim
from consensus_checker.finding import Alternative, Evidence, Finding, VerdictKind
from consensus_checker.polled import Looks, Process, global_ranks, looks, members_text, named
from consensus_checker.said import Sides, sides_of, unless_circle
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier, Poll

RULE = "ras_counts"
POINT_TO_POINT = ("send", "recv")

Counts = tuple[tuple[str, int], ...]


def find(dossier: Dossier) -> list[Claim]:
    numbers = global_ranks(dossier)
    found = [_judged(dossier, look, numbers) for look in looks(dossier)]
    claims = unless_circle([claim for claim in found if claim is not None])
    return sorted(claims, key=lambda claim: not claim.finding.culprit)


def _judged(dossier: Dossier, look: Looks, numbers: Mapping[Process, int]) -> Claim | None:
    poll = look.newest
    sides = sides_of(_counts(poll))
    if not sides.is_split:
        return None
    odd = sides.odd or sides.ranks
    before = _counts(look.earlier) if look.earlier is not None else {}
    counts = _counts(poll)
    if look.earlier is not None and any(before.get(rank) != counts[rank] for rank in odd):
        # It goes on: late at most.
        return None
    # A member that does not answer may be the one that all wait for.
    absent = tuple(sorted(set(poll.members) - set(counts)))
    is_named = bool(sides.odd) and not absent and len(counts) > 2
    ranks = named(poll, odd, numbers)
    kind, code, told = _what(poll, sides, counts, ranks)
    victims = named(poll, sides.others, numbers) if is_named else ()
    is_named = is_named and bool(ranks)
    role = "culprit" if is_named else "unknown"
    finding = Finding(
        kind if is_named else "undetermined",
        code if is_named else 20,
        RULE,
        told,
        "medium" if is_named else "undetermined",
        basis=(
            f"{len(counts)} of {poll.size} members polled",
            "two polls" if look.earlier is not None else "one poll",
            *([f"no answer of {members_text(poll, absent)}"] if absent else []),
        ),
        culprit=ranks if is_named else (),
        victims=victims,
        unknown=() if is_named else ranks,
        evidence=(
            *(_entry(dossier, poll, f"{role} {rank}") for rank in ranks),
            *(_entry(dossier, poll, f"victim {rank}") for rank in victims),
            *(() if ranks else (_entry(dossier, poll, "counts that differ"),)),
            *(() if look.earlier is None else (_entry(dossier, look.earlier, "the same counts before"),)),
        ),
        alternatives=(Alternative("the others made calls that were not to be made", RULE),)
        if is_named and code == 11
        else (),
    )
    return Claim(finding, needs_second_look=look.earlier is None)


def _what(
    poll: Poll, sides: Sides, counts: Mapping[int, Counts], ranks: tuple[int, ...]
) -> tuple[VerdictKind, int, str]:
    """Kind, code and summary: a call that is missing, one too many, or another one."""
    if not sides.odd:
        told = "; ".join(f"{members_text(poll, side)}: {_text(value)}" for value, side in sides.sides[:3])
        return "undetermined", 20, f"calls of communicator {poll.communicator} differ, a tie: {told}"
    own, others = dict(counts[sides.odd[0]]), dict(counts[sides.others[0]])
    less = sorted(op for op in others if own.get(op, 0) < others[op])
    more = sorted(op for op in own if own[op] > others.get(op, 0))
    whom = ranks_text(ranks) if ranks else members_text(poll, sides.odd)
    where = f"in communicator {poll.communicator}"
    if less and more:
        return "mismatch", 16, f"{whom} called {more[0]} where the others called {less[0]}, {where}"
    op = (less or more)[0]
    numbers = f"{own.get(op, 0):,} {op} calls, the others {others.get(op, 0):,}"
    if less:
        return "stall", 11, f"{whom} did not join: {numbers}, {where}"
    return "stall", 11, f"{whom} called what nobody else did: {numbers}, {where}"


def _counts(poll: Poll) -> dict[int, Counts]:
    return {
        rank: tuple(
            sorted((op, count) for op, count in own.items() if count and op.lower() not in POINT_TO_POINT)
        )
        for rank, own in poll.counts.items()
    }


def _text(counts: Counts) -> str:
    return ", ".join(f"{op} {count:,}" for op, count in counts[:4]) or "no calls"


def _entry(dossier: Dossier, poll: Poll, supports: str) -> Evidence:
    return Evidence(dossier.file_of(poll.at), poll.at.record, supports)
