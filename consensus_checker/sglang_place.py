"""Where a rank of a server stands: its coordinates along pp, dp, cp and tp, from the groups that it is in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from consensus_checker.headers import numbered
from tracer.record import Place

# The slowest first, as SGLang numbers its ranks.
AXES = ("pp", "dp", "cp", "tp")
# Where all of a replica's ranks meet, and where those of one stage do.
REPLICA_GROUP, STAGE_GROUP, PIPELINE_GROUP = "replica", "stage", "pp"
# Polls of transfers are agreed on along one axis after the other.
POLLS = "/polls"


def place_of(rank: int, along: Mapping[str, Sequence[int]], members: Sequence[int], world_size: int) -> Place:
    """The place of `rank`.

    Args:
        along: axis cp, tp or pp -> the ranks of this one's group, in their order; one without has size 1.
        members: of the replica.

    Returns:
        A place without sizes where the ranks are not numbered as those sizes would number them; then replicas
        are told apart by their first rank.
    """
    sizes = {axis: len(along.get(axis, ())) or 1 for axis in AXES}
    own = sizes["pp"] * sizes["cp"] * sizes["tp"]
    sizes["dp"] = max(1, world_size // own)
    at = {axis: list(along[axis]).index(rank) if along.get(axis) else 0 for axis in AXES}
    at["dp"] = rank // (sizes["cp"] * sizes["tp"]) % sizes["dp"]
    is_numbered = own * sizes["dp"] == world_size and numbered(rank, sizes) == at
    if not is_numbered:
        at["dp"] = members[0]
    return Place(rank, at, sizes if is_numbered else {}, _groups(along, members, at))


def stage_members(along: Mapping[str, Sequence[int]], members: Sequence[int]) -> tuple[int, ...]:
    """Ranks of the own stage; exact where one of cp and tp has one rank, else by their numbers."""
    cp, tp = tuple(along.get("cp", ())), tuple(along.get("tp", ()))
    if len(cp) < 2 or len(tp) < 2:
        return max(cp, tp, key=len)
    # A grid: from each rank of the own column on, the ranks of a row.
    step = cp[1] - cp[0]
    first = tp[0] - step * sum(rank < min(tp) for rank in cp)
    grid = sorted(first + step * row + (rank - tp[0]) for row in range(len(cp)) for rank in tp)
    return tuple(rank for rank in grid if rank in members)


def _groups(
    along: Mapping[str, Sequence[int]], members: Sequence[int], at: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """The groups that meetings are of, by name; a name stands for the same ranks on each of them."""
    found: dict[str, tuple[int, ...]] = {}
    stage = stage_members(along, members)
    if len(stage) > 1:
        found[f"{STAGE_GROUP}{at['dp']}.{at['pp']}/events"] = stage
    for axis, other in (("tp", "cp"), ("cp", "tp")):
        if len(line := tuple(along.get(axis, ()))) > 1:
            found[f"{axis}{at['dp']}.{at['pp']}.{at[other]}{POLLS}"] = line
    if len(pipeline := tuple(along.get("pp", ()))) > 1:
        found[f"{PIPELINE_GROUP}{at['dp']}.{at['cp']}.{at['tp']}/events"] = pipeline
    if len(members) > 1:
        for purpose in ("hits", "progress"):
            found[f"{REPLICA_GROUP}{at['dp']}/{purpose}"] = tuple(members)
    return found
