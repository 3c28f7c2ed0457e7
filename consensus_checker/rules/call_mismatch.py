"""Rule `fr_mismatch`: members of a group came to one collective with different calls.

Equation, for every group and every number n that at least two members' rings still hold:

    for all members a, b:  what(a, n) = what(b, n)

    rank 0  all_reduce  4 Float
    rank 1  all_reduce  2 Float      #26: rank 1 is the odd one
    rank 2  all_reduce  4 Float

`what` is the op, and of what the op needs to be equal the number of elements and the type: shapes may differ,
and so may sizes where each member gives its own (all_to_all, gather, scatter, lists of uneven tensors). Sends
and receives are compared with nobody. The first number that differs counts; a majority names the odd ones,
and in a tie nobody is. Where a ring begins, parts of a coalesced call may be gone: such a call is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from consensus_checker.claim import Claim
from consensus_checker.finding import Alternative, Evidence, FieldDiff, Finding, FirstDivergence, Level
from consensus_checker.recorded_groups import Place, RankGroup, recorded
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier
from tracer.importers.recorded_calls import JOINED, RecordedCalls

RULE = "fr_mismatch"
# Ops of which members must give equally many elements of one type; op -> whether outputs count as well.
EQUAL = {
    **{"all_reduce": True, "allreduce": True, "broadcast": True, "reduce": False},
    **{"_all_gather_base": True, "_reduce_scatter_base": True},
    **{"all_gather_into_tensor": True, "reduce_scatter_tensor": True},
}
# Of which each gives its own: the type alone must be equal.
OWN_SIZES = ("all_to_all", "all_to_all_base", "all_gather", "reduce_scatter")
NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Odd:
    """The first collective of a group that members came to with different calls.

    Attributes:
        sides: what -> ranks, the most first.
        shapes: rank -> the call as its dump has it.
    """

    group: RankGroup
    seq: int
    sides: tuple[tuple[str, tuple[int, ...]], ...]
    shapes: Mapping[int, str]


def find(dossier: Dossier) -> list[Claim]:
    """A claim for each group with such a call, inner groups first."""
    claims = [
        _claim(dossier, odd) for group in recorded(dossier).groups if (odd := first_odd(group)) is not None
    ]
    return sorted(claims, key=lambda claim: not claim.finding.culprit)


def compared(dossier: Dossier) -> int:
    """Collectives that at least two members' rings hold: what `find` has compared."""
    count = 0
    for group in recorded(dossier).groups:
        seen: set[int] = set()
        shared: set[int] = set()
        for place in group.places.values():
            for seq in place.progress.calls:
                (shared if seq in seen else seen).add(seq)
        count += len(shared)
    return count


def first_odd(group: RankGroup) -> Odd | None:
    """The first collective that differs; None where none does."""
    numbers: dict[str, int] = {}
    known: dict[int, int] = {}
    odd: set[int] = set()
    for place in group.places.values():
        for seq, number in _whats(place, numbers):
            if known.setdefault(seq, number) != number:
                odd.add(seq)
    for seq in sorted(odd):
        shapes = {
            rank: own.shape
            for rank, place in group.places.items()
            if (own := place.progress.calls.get(seq)) is not None
        }
        texts = _without_cut(group, seq, shapes)
        sides: dict[str, list[int]] = {}
        for rank, shape in texts.items():
            sides.setdefault(what(shape), []).append(rank)
        if len(sides) > 1:
            ordered = sorted(sides.items(), key=lambda side: (-len(side[1]), side[1]))
            return Odd(group, seq, tuple((text, tuple(ranks)) for text, ranks in ordered), shapes)
    return None


def _whats(place: Place, numbers: dict[str, int]) -> Iterator[tuple[int, int]]:
    """(sequence number, number of what was called); `numbers` is shared by all members."""
    calls = place.progress.calls
    if not isinstance(calls, RecordedCalls):
        for seq, call in calls.items():
            yield seq, numbers.setdefault(what(call.shape), len(numbers))
        return
    seqs, shapes = calls.all_shapes()
    own = {
        shape: numbers.setdefault(what(calls.table.shape_texts[shape]), len(numbers)) for shape in set(shapes)
    }
    for seq, shape in zip(seqs, shapes, strict=True):
        yield seq, own[shape]


def _without_cut(group: RankGroup, seq: int, shapes: Mapping[int, str]) -> Mapping[int, str]:
    """Calls without those whose front the ring has dropped: others have what is left of them at their end."""
    cut = {
        rank
        for rank, shape in shapes.items()
        if group.places[rank].progress.first == seq
        and any(other.endswith(JOINED + shape) for other in shapes.values())
    }
    return {rank: shape for rank, shape in shapes.items() if rank not in cut}


def what(shape: str) -> str:
    """What of a call members must have in common, as text: `all_reduce 8:Float`."""
    if JOINED in shape:
        return JOINED.join(what(part) for part in shape.split(JOINED))
    op, _, tensors = shape.partition(" ")
    inputs, _, outputs = tensors.partition(" -> ")
    if op in EQUAL and tensors:
        sizes = [_elements(inputs)] + ([_elements(outputs)] if EQUAL[op] else [])
        if all(sizes):
            return " -> ".join([f"{op} {sizes[0]}", *sizes[1:]])
    if op in OWN_SIZES and (kind := inputs.partition(",")[0].rpartition(":")[2]) and kind != NOTHING:
        return f"{op} {kind}"
    return op


def _elements(tensors: str) -> str:
    """`8:Float` of `4x2:Float`; empty where a size is not known."""
    counted = []
    for tensor in tensors.split(","):
        dimensions, _, kind = tensor.partition(":")
        count = 1
        for dimension in dimensions.split("x"):
            if not dimension.isdecimal():
                return ""
            count *= int(dimension)
        counted.append(f"{count}:{kind}")
    return ",".join(counted)


def _claim(dossier: Dossier, odd: Odd) -> Claim:
    group, seq = odd.group, odd.seq
    (usual, most), *others = odd.sides
    astray = tuple(sorted(rank for _, ranks in others for rank in ranks))
    size = len(group.group.members or group.places)
    unheard = max(0, size - len(most) - len(astray))
    is_named = len(most) > len(astray) and len(most) >= len(astray) + unheard
    is_sure = is_named and len(most) > len(astray) + unheard
    level: Level = "high" if is_sure else "medium" if is_named else "undetermined"
    differing = "; ".join(f"{ranks_text(ranks)} {text}" for text, ranks in odd.sides)
    ended = [rank for rank in odd.shapes if group.places[rank].ended_surely >= seq]
    went_on = len(ended) == len(odd.shapes)
    evidence = [
        *(_evidence(dossier, odd, rank, "culprit" if is_named else "unknown") for rank in astray),
        *(_evidence(dossier, odd, rank, "victim" if is_named else "unknown") for rank in most),
    ]
    finding = Finding(
        "mismatch",
        16,
        RULE,
        f"members came to #{seq} of {group.label} with different calls: {differing}",
        level,
        (
            f"majority {len(most)}/{size}" if is_named else _tie(odd),
            *([f"{unheard} unheard, or their rings begin later"] if unheard else []),
        ),
        resembles=("HC01", "HC03") if _ops(odd) > 1 else (),
        culprit=astray if is_named else (),
        victims=most if is_named else (),
        unknown=() if is_named else tuple(sorted((*most, *astray))),
        first_divergence=_difference(odd, usual if is_named else None),
        evidence=tuple(evidence),
        alternatives=(
            *([Alternative("the call ended on all of them all the same", RULE)] if went_on else []),
            *(
                [Alternative(f"{ranks_text(astray)} missed or made a call before it", RULE)]
                if _ops(odd) > 1
                else []
            ),
        ),
    )
    return Claim(finding, missing=group.unheard)


def _tie(odd: Odd) -> str:
    return "tie " + ":".join(str(len(ranks)) for _, ranks in odd.sides)


def _ops(odd: Odd) -> int:
    return len({text.partition(" ")[0] for text, _ in odd.sides})


def _difference(odd: Odd, usual: str | None) -> FirstDivergence:
    values = {rank: {"call": shape} for rank, shape in sorted(odd.shapes.items())}
    differing = {rank: text for text, ranks in odd.sides for rank in ranks if text != usual}
    first = min(odd.shapes)
    return FirstDivergence(
        scope=odd.group.label,
        lane=odd.group.places[first].thread or "flight recorder",
        step=0,
        index=odd.seq,
        call=odd.shapes[first].partition(" ")[0],
        phase=None,
        kind="collective",
        request=None,
        by_rank=values,
        field_diff=(FieldDiff("call", usual, differing),),
    )


def _evidence(dossier: Dossier, odd: Odd, rank: int, role: str) -> Evidence:
    at = odd.group.places[rank].progress.calls[odd.seq].at
    return Evidence(dossier.file_of(at), at.record, f"{role} {rank}: #{odd.seq} {odd.shapes[rank]}")
