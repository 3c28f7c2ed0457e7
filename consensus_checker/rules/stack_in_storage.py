"""One rank is in a call to the external store, and all others wait for it in a collective.

    Let    s(r) = rank r's main thread, or the one that reads for its prefetches, is in the store
    Then   s(r) ends, and r joins
    However  s(r) holds in two looks for one r, while the others' threads of that kind wait in a collective

    rank 0   prefetch_sync_thread   all_reduce
    rank 1   prefetch_sync_thread   get (queue)      prefetch_io_thread   batch_get

The store may answer slowly and not never: the alternative is always given.
"""

from __future__ import annotations

from consensus_checker.claim import Claim
from consensus_checker.finding import Alternative, Finding
from consensus_checker.stack_looks import Place, Scope, Stand, helpers, scopes
from consensus_checker.stack_missed import claims
from consensus_checker.stack_words import evidence_of, within
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier, Stack

RULE = "stack_in_storage"


def find(dossier: Dossier) -> list[Claim]:
    lanes = (_lane(dossier, scope) for scope in scopes(dossier))
    return [*claims(dossier, RULE), *(claim for claim in lanes if claim is not None)]


def _lane(dossier: Dossier, scope: Scope) -> Claim | None:
    """A kind of helper thread that waits in a collective on all ranks but one, which reads."""
    for kind, own in sorted(helpers(scope).items()):
        if len(own) != len(scope.fresh) or len(own) < 2:
            continue
        waiting = {rank: stack for rank, stack in own.items() if stack.wait == "collective"}
        absent = sorted(set(own) - set(waiting))
        if len(absent) != 1 or not waiting:
            continue
        is_still = all(_is_still(scope, rank, stack) for rank, stack in waiting.items())
        stand = next(stand for stand in scope.fresh if stand.rank == absent[0])
        reader = _reader(scope, stand)
        if reader is not None and is_still:
            return _claim(dossier, scope, kind, waiting, stand, reader)
    return None


def _claim(
    dossier: Dossier, scope: Scope, kind: str, waiting: dict[int, Stack], stand: Stand, reader: Stack
) -> Claim:
    rank = stand.rank
    place = Place.of(reader)
    others = tuple(sorted(waiting))
    finding = Finding(
        "stall",
        11,
        RULE,
        f"{within(scope)}rank {rank} is in a call to the external store ({place.where}) while thread "
        f"{kind} of {ranks_text(others)} waits in a collective",
        "medium",
        ("the same place in two looks",),
        ("HC05",),
        culprit=(rank,),
        victims=others,
        evidence=(
            evidence_of(dossier, reader, f"culprit {rank}: in a call to the external store ({place.where})"),
            *(
                evidence_of(dossier, stack, f"victim {other}: {kind} waits in a collective")
                for other, stack in sorted(waiting.items())
            ),
        ),
        alternatives=(Alternative("the store only takes long: look once more", "slow"),),
    )
    return Claim(finding, dict.fromkeys(others, f"its {kind} waits in the collective"))


def _reader(scope: Scope, stand: Stand) -> Stack | None:
    stacks = (stack for stack in stand.look.threads if stack.wait == "storage")
    return next((stack for stack in stacks if _is_still(scope, stand.rank, stack)), None)


def _is_still(scope: Scope, rank: int, stack: Stack) -> bool:
    """Whether the look before had this thread at the same place."""
    looks = scope.looks[rank]
    if len(looks) < 2:
        return False
    before = [other for other in looks[-2].threads if other.thread_id == stack.thread_id]
    return any(Place.of(other).is_same(Place.of(stack)) for other in before)
