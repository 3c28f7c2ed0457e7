"""Where a rank of a server stands, by the groups that it is in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from consensus_checker.sglang_place import place_of, stage_members
from consensus_checker.sglang_plugin import along


@pytest.mark.parametrize(
    ("rank", "groups", "members", "world_size", "coordinates"),
    [
        (1, {"tp": (0, 1)}, (0, 1), 2, {"pp": 0, "dp": 0, "cp": 0, "tp": 1}),
        (3, {"tp": (2, 3), "pp": (1, 3)}, (0, 1, 2, 3), 4, {"pp": 1, "dp": 0, "cp": 0, "tp": 1}),
        # Attention of two replicas beside each other in each of two stages.
        (7, {"tp": (6, 7), "pp": (3, 7)}, (2, 3, 6, 7), 8, {"pp": 1, "dp": 1, "cp": 0, "tp": 1}),
        (2, {"cp": (0, 2), "tp": (2, 3)}, (0, 1, 2, 3), 4, {"pp": 0, "dp": 0, "cp": 1, "tp": 0}),
    ],
)
def test_coordinates_follow_from_groups(
    rank: int,
    groups: Mapping[str, Sequence[int]],
    members: Sequence[int],
    world_size: int,
    coordinates: Mapping[str, int],
) -> None:
    place = place_of(rank, groups, members, world_size)
    assert coordinates == place.coordinates
    assert world_size == place.world_size


def test_ranks_that_are_numbered_otherwise_have_no_sizes() -> None:
    place = place_of(2, {"tp": (0, 2)}, (0, 2), 4)
    assert (place.sizes, place.coordinates["tp"]) == ({}, 1)


def test_a_stage_of_two_axes_is_all_their_ranks() -> None:
    for rank, cp, tp in ((0, (0, 2), (0, 1)), (3, (1, 3), (2, 3))):
        assert stage_members({"cp": cp, "tp": tp}, range(8)) == (0, 1, 2, 3), rank


def test_groups_of_all_ranks_have_one_name_on_each() -> None:
    places = [
        place_of(rank, {"tp": pair, "pp": line}, range(4), 4)
        for rank, pair, line in ((0, (0, 1), (0, 2)), (1, (0, 1), (1, 3)), (3, (2, 3), (1, 3)))
    ]
    named: dict[str, set[tuple[int, ...]]] = {}
    for place in places:
        for name, ranks in place.groups.items():
            named.setdefault(name, set()).add(tuple(ranks))
    assert all(len(ranks) == 1 for ranks in named.values())
    assert {"stage0.0/events", "stage0.1/events", "pp0.0.0/events", "pp0.0.1/events"} < set(named)


def test_groups_are_taken_for_axes_as_the_server_gives_them() -> None:
    class Group:
        def __init__(self, name: str, *ranks: int) -> None:
            self.unique_name, self.ranks = name, list(ranks)

    cp, tp, pp = Group("attn_cp:0", 0), Group("tp:0", 0, 1), Group("pp:0", 0, 2)
    assert along([cp, tp, pp]) == {"cp": (0,), "tp": (0, 1), "pp": (0, 2)}
    assert along([tp, pp]) == {"tp": (0, 1), "pp": (0, 2)}
    assert along([cp, tp]) == {"cp": (0,), "tp": (0, 1)}
    assert along([[0, 1]]) == {"tp": (0, 1)}
