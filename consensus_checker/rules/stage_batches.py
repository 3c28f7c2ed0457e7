"""Rule `stage_batches`: stages of a pipeline computed different batches, by their own prefill lines.

Equation, for the n-th prefill line of stages a and b of one replica:

    (new sequences, new tokens, cached tokens)(a, n) = (..)(b, n)

    PP0   .. 2/512/0   1/64/4096   3/900/0
    PP1   .. 2/512/0   1/64/4096   1/300/0      PP1 computes another third batch; what follows is consequence

Lines are put beside each other in the order of each stage, never by time: stages are legally apart by the
microbatches between them. One stage may be some lines behind at the end. Stage 0 leads, so who differs from
it is odd. A line that was lost shows as a shift and accuses nobody, and neither does a difference right at
the end, where a shift would not show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from consensus_checker.claim import Claim
from consensus_checker.finding import Alternative, Evidence, Finding, FirstDivergence
from consensus_checker.said import lines_of
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier, Line

RULE = "stage_batches"
# Lines that two stages must share before a difference means anything, and by which a shift is recognised.
ALIKE_MIN = 8
# Lines that a log may have lost, or by which it may have begun later.
SHIFT_MAX = 64
# Lines from a difference on by which a lost line would be told from another batch.
LEFT_MIN = 3

Batch = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Stage:
    line: Line
    rank: int
    number: int
    batches: Sequence[Batch]


def find(dossier: Dossier) -> list[Claim]:
    replicas: dict[int, dict[int, Stage]] = {}
    for line in lines_of(dossier, ("prefill_batches",)):
        places = line.who.places
        if line.who.rank is not None and "pp" in places:
            stage = Stage(line, line.who.rank, places["pp"], _batches(line))
            # One writer a stage: another attention rank that logs says the same.
            replicas.setdefault(places.get("dp", 0), {}).setdefault(stage.number, stage)
    claims = [_judged(dossier, stages) for _dp, stages in sorted(replicas.items())]
    return [claim for claim in claims if claim is not None]


def _batches(line: Line) -> list[Batch]:
    columns = (line.fields[name] for name in ("new_seqs", "new_tokens", "cached_tokens"))
    return list(zip(*columns, strict=True))


def _judged(dossier: Dossier, stages: Mapping[int, Stage]) -> Claim | None:
    leader = stages.get(0)
    if leader is None or len(stages) < 2:
        return None
    places = {number: _first_difference(leader.batches, stage.batches) for number, stage in stages.items()}
    found = {number: place for number, place in places.items() if place is not None}
    if not found:
        return None
    first = min(own for own, _theirs in found.values())
    odd = [stages[number] for number, place in sorted(found.items()) if place[0] == first]
    ranks = tuple(sorted(stage.rank for stage in odd))
    stage = odd[0]
    theirs = found[stage.number][1]
    left = min(len(leader.batches) - first, *(len(one.batches) - found[one.number][1] for one in odd))
    is_named = left >= LEFT_MIN
    role = "culprit" if is_named else "unknown"
    own, other = leader.batches[first], stage.batches[theirs]
    others = tuple(sorted(one.rank for one in stages.values() if one not in odd))
    finding = Finding(
        "divergence" if is_named else "undetermined",
        10 if is_named else 20,
        RULE,
        f"{ranks_text(ranks)} (stage {stage.number}) computed {_text(other)} where stage 0 computed "
        f"{_text(own)}, in prefill line {first + 1:,}",
        "medium" if is_named else "undetermined",
        basis=("stage 0 leads", f"{first:,} equal prefill lines before"),
        resembles=("HC04", "HC06"),
        culprit=ranks if is_named else (),
        victims=others if is_named else (),
        unknown=() if is_named else ranks,
        first_divergence=FirstDivergence(
            "pp",
            "scheduler",
            0,
            first,
            "prefill_batch",
            None,
            "value",
            None,
            {leader.rank: _fields(own), stage.rank: _fields(other)},
            (),
            f"prefill line {first + 1:,}",
        ),
        evidence=(
            *(_entry(dossier, one, found[one.number][1], f"{role} {one.rank}") for one in odd),
            *(
                _entry(dossier, one, min(first, len(one.batches) - 1), f"victim {one.rank}")
                for one in stages.values()
                if is_named and one not in odd
            ),
        ),
        alternatives=(Alternative("lines of one stage are not in the logs", RULE),),
    )
    return Claim(finding)


def _first_difference(one: Sequence[Batch], two: Sequence[Batch]) -> tuple[int, int] | None:
    """Where two sequences part, as a position in each; None where they do not, or can't be compared."""
    begin = _begin(one, two)
    if begin is None:
        return None
    low, high = begin
    length = min(len(one) - low, len(two) - high)
    at = next((at for at in range(length) if one[low + at] != two[high + at]), None)
    if at is None or at < ALIKE_MIN or _goes_on(one[low + at :], two[high + at :]):
        return None
    return low + at, high + at


def _begin(one: Sequence[Batch], two: Sequence[Batch]) -> tuple[int, int] | None:
    """Where both begin to be the same: logs may have been cut at their beginnings."""
    for shift in range(SHIFT_MAX):
        for low, high in ((shift, 0), (0, shift)):
            ours, theirs = one[low : low + ALIKE_MIN], two[high : high + ALIKE_MIN]
            # Lines that are all alike fit anywhere.
            if len(ours) == ALIKE_MIN and ours == theirs and (not shift or len(set(ours)) > 2):
                return low, high
    return None


def _goes_on(one: Sequence[Batch], two: Sequence[Batch]) -> bool:
    """Whether both go on alike behind lines that one of them lacks; or too little is left to tell."""
    for shift in range(1, SHIFT_MAX):
        for ours, theirs in ((one[shift:], two), (one, two[shift:])):
            length = min(len(ours), len(theirs), ALIKE_MIN)
            if length and ours[:length] == theirs[:length] and (length == ALIKE_MIN or length > 2):
                return True
    return False


def _text(batch: Batch) -> str:
    seqs, new, cached = batch
    return f"{seqs:,} sequences of {new:,} new and {cached:,} cached tokens"


def _fields(batch: Batch) -> dict[str, int]:
    return dict(zip(("new_seqs", "new_tokens", "cached_tokens"), batch, strict=True))


def _entry(dossier: Dossier, stage: Stage, at: int, supports: str) -> Evidence:
    return Evidence(dossier.file_of(stage.line.at), stage.line.fields["records"][at], supports)
