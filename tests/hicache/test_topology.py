from __future__ import annotations

import pytest

from hicache.errors import ConfigError
from hicache.topology import Coordinates, Topology


def test_tp_is_the_fastest_axis() -> None:
    topology = Topology(dp=2, pp=2, cp=2, tp=2)
    assert [topology.rank_at(dp=0, pp=0, cp=0, tp=1), topology.rank_at(dp=0, pp=0, cp=1, tp=0)] == [1, 2]
    assert [topology.rank_at(dp=0, pp=1, cp=0, tp=0), topology.rank_at(dp=1, pp=0, cp=0, tp=0)] == [4, 8]


def test_coordinates_and_ranks_are_inverse() -> None:
    topology = Topology(dp=2, pp=3, cp=2, tp=4)
    for rank in range(topology.world_size):
        at = topology.coordinates(rank)
        assert topology.rank_at(dp=at.dp, pp=at.pp, cp=at.cp, tp=at.tp) == rank


def test_a_rank_is_in_one_group_an_axis_and_purpose() -> None:
    topology = Topology(pp=2, tp=2)
    purposes = ("main", "events", "hits", "progress")
    expected = {f"tp1/{purpose}": (2, 3) for purpose in purposes}
    expected |= {f"pp1/{purpose}": (1, 3) for purpose in purposes}
    assert topology.groups(3) == expected


def test_axes_of_size_1_have_no_group() -> None:
    assert Topology().groups(0) == {}


def test_groups_with_other_members_have_other_names() -> None:
    topology = Topology(dp=2, pp=2, cp=2, tp=2)
    members: dict[str, tuple[int, ...]] = {}
    for rank in range(topology.world_size):
        for name, ranks in topology.groups(rank).items():
            assert members.setdefault(name, ranks) == ranks, name


def test_members_come_in_order_of_their_axis() -> None:
    assert Topology(pp=2, tp=2).members("pp", Coordinates(dp=0, pp=1, cp=0, tp=1)) == (1, 3)


def test_a_size_below_1_is_refused() -> None:
    with pytest.raises(ConfigError, match="--tp 0"):
        Topology(tp=0)
