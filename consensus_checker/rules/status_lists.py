"""Rule `status_lists`: ranks of one replica hold different requests, twice in a row.

Equation, for the k-th status of ranks a, b of one replica, and a request q:

    place(a, k, q) = place(b, k, q)  or  place(a, k+1, q) = place(b, k+1, q)      place: running, queued, none

    rank 0   #7 running r1 r2  queued r5      #8 running r1 r2  queued r5
    rank 1   #7 running r1 r2  queued -       #8 running r1 r2  queued -      r5 is not on rank 1, twice

Each rank takes its statuses at moments of its own, so one list may be the other a step later: a difference
has to stay in two statuses in a row, and no shift of a few statuses may explain it. Who is compared with whom
is told by the requests: ranks that never hold one in common are of different replicas. Running lists that
share nothing are of different microbatches, and say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from consensus_checker.claim import Claim
from consensus_checker.finding import Alternative, Finding, FirstDivergence
from consensus_checker.said import Sides, entries, sides_of
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier, Status

RULE = "status_lists"
# Statuses by which a rank may have begun later than another.
SHIFT_MAX = 4
# What two ranks must have had in common for a shift to explain anything.
OVERLAP_MIN = 2
RUNNING, QUEUED, NONE = "running", "queued", "none"
WORDS = {RUNNING: "running", QUEUED: "queued", NONE: "nowhere"}


@dataclass(frozen=True, slots=True)
class Difference:
    """A request that ranks have in different places, in samples `sample` and the next.

    Attributes:
        position: of the request in the list of whoever has it.
    """

    sample: int
    request: str
    position: int
    places: Mapping[int, str]


def find(dossier: Dossier) -> list[Claim]:
    samples: dict[int, list[Status]] = {}
    for status in dossier.statuses:
        if status.who.rank is not None:
            samples.setdefault(status.who.rank, []).append(status)
    claims = []
    for replica in _replicas(samples):
        own = {rank: samples[rank] for rank in replica}
        if (found := _first(own)) is not None:
            claims.append(_claim(dossier, own, found))
    return claims


def _replicas(samples: Mapping[int, Sequence[Status]]) -> list[tuple[int, ...]]:
    """Ranks that hold requests in common, and are not known to be of different stages."""
    replicas: list[tuple[set[int], set[str]]] = []
    for rank in sorted(samples):
        requests = {rid for status in samples[rank] for rid in (*status.running, *status.queued)}
        members, held = {rank}, set(requests)
        rest = []
        for others, theirs in replicas:
            if theirs & requests:
                members |= others
                held |= theirs
            else:
                rest.append((others, theirs))
        replicas = [*rest, (members, held)]
    stages: dict[tuple[int, int], list[int]] = {}
    for number, (members, _held) in enumerate(replicas):
        for rank in sorted(members):
            stages.setdefault((number, samples[rank][0].who.places.get("pp", 0)), []).append(rank)
    return [tuple(ranks) for _key, ranks in sorted(stages.items()) if len(ranks) > 1]


def _first(samples: Mapping[int, Sequence[Status]]) -> Difference | None:
    """The first difference that stays."""
    length = min(map(len, samples.values()))
    before: list[Difference] = []
    shifted: dict[tuple[int, int], bool] = {}
    for at in range(length):
        now = {rank: own[at] for rank, own in samples.items()}
        held = {rank: _held(status) for rank, status in now.items()}
        for found in before:
            places = {rank: own.get(found.request, NONE) for rank, own in held.items()}
            if found.places == places and not _is_shift(samples, found, shifted):
                return found
        before = list(_differences(at, now, held)) if _are_comparable(now) else []
    return None


def _held(status: Status) -> dict[str, str]:
    """Where a rank has each of its requests."""
    return dict.fromkeys(status.queued, QUEUED) | dict.fromkeys(status.running, RUNNING)


def _differences(
    sample: int, statuses: Mapping[int, Status], held: Mapping[int, Mapping[str, str]]
) -> Iterator[Difference]:
    """Requests in different places, in the order of the lists."""
    if len({(status.running, status.queued) for status in statuses.values()}) == 1:
        return
    seen: set[str] = set()
    for lists in (
        [status.running for status in statuses.values()],
        [status.queued for status in statuses.values()],
    ):
        for position, rids in enumerate(zip_longest(*lists)):
            for request in rids:
                if request is None or request in seen:
                    continue
                seen.add(request)
                places = {rank: own.get(request, NONE) for rank, own in held.items()}
                if len(set(places.values())) > 1:
                    yield Difference(sample, request, position, places)


def _are_comparable(statuses: Mapping[int, Status]) -> bool:
    """Whether all look at one microbatch: who runs anything shares some of it with the others."""
    running = [set(status.running) for status in statuses.values() if status.running]
    return all(one & running[0] for one in running)


def _is_shift(
    samples: Mapping[int, Sequence[Status]], found: Difference, shifted: dict[tuple[int, int], bool]
) -> bool:
    """Whether the odd ranks' statuses are those of the others, some statuses earlier or later."""
    reference = sides_of(found.places).sides[0][1][0]
    for rank in samples:
        pair = (reference, rank)
        if found.places[rank] == found.places[reference]:
            continue
        if pair not in shifted:
            shifted[pair] = _is_shifted(samples[reference], samples[rank])
        if not shifted[pair]:
            return False
    return True


def _is_shifted(one: Sequence[Status], two: Sequence[Status]) -> bool:
    for shift in range(-SHIFT_MAX, SHIFT_MAX + 1):
        pairs = list(zip(one[max(0, shift) :], two[max(0, -shift) :], strict=False))
        equal = [a for a, b in pairs if (a.running, a.queued) == (b.running, b.queued)]
        told = sum(bool(a.running or a.queued) for a in equal)
        if shift and len(equal) == len(pairs) and told >= OVERLAP_MIN:
            return True
    return False


def _claim(dossier: Dossier, samples: Mapping[int, Sequence[Status]], found: Difference) -> Claim:
    sides: Sides = sides_of(found.places)
    rows = {rank: own[found.sample] for rank, own in samples.items()}
    unknown = () if sides.odd else sides.ranks
    told = "; ".join(f"{WORDS[place]} on {ranks_text(ranks)}" for place, ranks in sides.sides)
    finding = Finding(
        "divergence",
        10,
        RULE,
        f"request {found.request} is in different places, and stays there: {told}",
        "medium" if sides.odd else "undetermined",
        basis=(
            f"majority {len(sides.others)}/{len(rows)}" if sides.odd else f"{len(rows)} ranks, a tie",
            "two statuses in a row",
        ),
        resembles=("HC05", "HC06"),
        culprit=sides.odd,
        victims=sides.others,
        unknown=unknown,
        first_divergence=FirstDivergence(
            "replica",
            "scheduler",
            0,
            found.sample,
            "scheduler_status",
            None,
            "value",
            found.request,
            {rank: {"place": place} for rank, place in found.places.items()},
            (),
            f"request {found.request}",
        ),
        evidence=(
            *entries(dossier, rows, sides.odd, "culprit"),
            *entries(dossier, rows, sides.others, "victim"),
            *entries(dossier, rows, unknown, "unknown"),
        ),
        alternatives=(Alternative("one rank writes its statuses much later than the others", RULE),),
    )
    return Claim(finding)
