"""Members that came to one collective with different calls, by flight recorders."""

from __future__ import annotations

import pytest

from consensus_checker.rules.call_mismatch import compared, find, what
from tests.support.recorded import dossier


def test_a_majority_names_the_rank_with_another_size() -> None:
    dumps = dossier("""
        0  tp: 25 26:all_reduce[4]~
        1  tp: 25 26:all_reduce[2]
        2  tp: 25 26:all_reduce[4]~
    """)
    (claim,) = find(dumps)
    finding = claim.finding
    assert (finding.rule, finding.kind, finding.code) == ("fr_mismatch", "mismatch", 16)
    assert (finding.culprit, finding.victims, finding.level) == ((1,), (0, 2), "high")
    assert finding.summary == (
        "members came to #26 of tp with different calls: ranks 0, 2 all_reduce 4:Float -> 4:Float; "
        "rank 1 all_reduce 2:Float -> 2:Float"
    )
    assert finding.evidence[0].supports == "culprit 1: #26 all_reduce 2:Float -> 2:Float"


def test_of_eight_ranks_the_one_that_is_odd_is_accused_and_not_the_seven() -> None:
    # Whoever compares all with the first rank accuses seven.
    lines = [f"{rank}  tp: 4 5:{'broadcast' if rank == 0 else 'all_reduce'}~" for rank in range(8)]
    (claim,) = find(dossier("\n".join(lines)))
    assert (claim.finding.culprit, claim.finding.victims) == ((0,), (1, 2, 3, 4, 5, 6, 7))
    assert claim.finding.basis == ("majority 7/8",)


def test_the_first_call_that_differs_counts() -> None:
    dumps = dossier("""
        0  tp: 25:broadcast 26:all_reduce
        1  tp: 25:all_reduce 26:broadcast
        2  tp: 25:broadcast 26:all_reduce
    """)
    (claim,) = find(dumps)
    assert claim.finding.first_divergence is not None
    assert (claim.finding.culprit, claim.finding.first_divergence.index) == ((1,), 25)


def test_two_members_that_differ_are_a_tie() -> None:
    dumps = dossier("""
        0  tp: 26:all_reduce[4]~
        1  tp: 26:all_reduce[2]~
    """)
    (claim,) = find(dumps)
    assert (claim.finding.culprit, claim.finding.unknown, claim.finding.level) == ((), (0, 1), "undetermined")


def test_one_against_one_is_a_tie_also_where_a_third_is_not_heard() -> None:
    dumps = dossier(
        """
        0  tp: 26:all_reduce[4]~
        1  tp: 26:all_reduce[2]~
    """,
        members={"tp": [0, 1, 2]},
    )
    (claim,) = find(dumps)
    assert (claim.finding.culprit, claim.finding.unknown, claim.missing) == ((), (0, 1), (2,))


def test_only_what_rings_still_hold_is_compared() -> None:
    dumps = dossier("""
        0  tp: 1:broadcast 2:broadcast 3 4
        1  tp: 3 4 5 6
    """)
    assert find(dumps) == []
    assert compared(dumps) == 2


def test_a_coalesced_call_whose_front_the_ring_dropped_is_left_out() -> None:
    dumps = dossier("""
        0  tp: 3:all_reduce[8] 3:all_reduce[4] 4
        1  tp: 3:all_reduce[4] 4
        2  tp: 3:all_reduce[8] 3:all_reduce[4] 4
    """)
    assert find(dumps) == []


def test_parts_of_a_coalesced_call_are_one_call() -> None:
    dumps = dossier("""
        0  tp: 2 3:all_reduce[8] 3:all_reduce[4]
        1  tp: 2 3:all_reduce[4] 3:all_reduce[8]
        2  tp: 2 3:all_reduce[8] 3:all_reduce[4]
    """)
    (claim,) = find(dumps)
    assert claim.finding.culprit == (1,)


@pytest.mark.parametrize(
    ("shape", "common"),
    [
        ("all_reduce 4x2:Float -> 4x2:Float", "all_reduce 8:Float -> 8:Float"),
        ("all_reduce 8:Float -> 8:Float", "all_reduce 8:Float -> 8:Float"),
        ("reduce 4:Float -> -", "reduce 4:Float"),
        ("all_to_all 4027x5120:BFloat16 -> 4099x5120:BFloat16", "all_to_all BFloat16"),
        ("gather 4:Float -> -", "gather"),
        ("scatter - -> 4:Float", "scatter"),
        ("all_gather 5:Float -> 5:Float,7:Float", "all_gather Float"),
        ("all_reduce ?:Float -> ?:Float", "all_reduce"),
        ("barrier", "barrier"),
        ("all_reduce 1:Float -> 1:Float + broadcast 2:Long -> 2:Long",
         "all_reduce 1:Float -> 1:Float + broadcast 2:Long -> 2:Long"),
    ],
)  # fmt: skip
def test_members_need_to_have_in_common_what_the_op_needs(shape: str, common: str) -> None:
    assert what(shape) == common


def test_what_each_member_gives_its_own_size_of_is_no_mismatch() -> None:
    dumps = dossier("""
        0  ep: 5:all_to_all[4027x5120]
        1  ep: 5:all_to_all[12x5120]
    """)
    assert find(dumps) == []


def test_a_reshaped_tensor_is_no_mismatch() -> None:
    dumps = dossier("""
        0  tp: 5:all_reduce[4x2]
        1  tp: 5:all_reduce[8]
    """)
    assert find(dumps) == []


def test_groups_of_one_name_and_other_members_are_not_compared() -> None:
    dumps = dossier("""
        0  a: 5:broadcast
        1  a: 5:broadcast
        2  b: 5:all_reduce
        3  b: 5:all_reduce
    """)
    for dump in dumps.dumps:
        assert [group.group.name for group in dump.groups] in (["a"], ["b"])
    assert find(dumps) == []
