"""Exactly the right ranks, or nobody: the shapes of a group and of the disagreement in it."""

from __future__ import annotations

import pytest

from consensus_checker.check import check
from tests.support.history import history

# Calls before the one that differs, and after it.
BEFORE, AFTER = 20, 3


def drawn(world_size: int, odd: tuple[int, ...], *, is_last: bool = False, agrees: bool = True) -> str:
    """A history in which ranks of `odd` match other tokens once; all the same, or each its own."""
    lines = []
    for rank in range(world_size):
        tokens = [f"match:r{number}=64" for number in range(BEFORE + (0 if is_last else AFTER))]
        if rank in odd:
            tokens[-1 if is_last else BEFORE - 1] = f"match:r{BEFORE - 1}={32 if agrees else rank}"
        lines.append(f"{rank} {' '.join(tokens)}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("world_size", "odd"),
    [(3, (1,)), (8, (5,)), (8, (0, 3, 7)), (5, (2, 4)), (64, (63,)), (64, (0,)), (256, (17,))],
)
@pytest.mark.parametrize("is_last", [False, True])
def test_a_minority_is_named_to_the_rank(world_size: int, odd: tuple[int, ...], is_last: bool) -> None:
    finding = check(history(drawn(world_size, odd, is_last=is_last))).finding
    first = finding.first_divergence
    assert first is not None
    assert (finding.culprit, finding.unknown) == (odd, ())
    assert (first.call, first.request, first.index) == ("match", f"r{BEFORE - 1}", BEFORE - 1)
    assert first.field_diff[0].majority == 64
    assert dict(first.field_diff[0].values) == dict.fromkeys(odd, 32)


def test_odd_ranks_may_each_differ_in_their_own_way() -> None:
    finding = check(history(drawn(8, (1, 2, 6), agrees=False))).finding
    assert finding.culprit == (1, 2, 6)


@pytest.mark.parametrize(("world_size", "odd"), [(2, (1,)), (2, (0,)), (4, (1, 2)), (8, (0, 1, 2, 3))])
def test_a_tie_names_nobody_and_shows_both_sides(world_size: int, odd: tuple[int, ...]) -> None:
    finding = check(history(drawn(world_size, odd))).finding
    first = finding.first_divergence
    assert first is not None
    assert (finding.culprit, finding.level) == ((), "undetermined")
    assert finding.unknown == tuple(range(world_size))
    assert {first.by_rank[rank]["tokens"] for rank in odd} == {32}
    assert {first.by_rank[rank]["tokens"] for rank in set(range(world_size)) - set(odd)} == {64}


def test_four_stages_with_an_odd_first_one_name_it_where_every_rank_decides_for_itself() -> None:
    assert check(history(drawn(4, (0,)), pp=4)).finding.culprit == (0,)


def test_one_odd_rank_in_one_replica_of_four_is_not_outvoted_by_the_other_replicas() -> None:
    finding = check(history(drawn(8, (5,)), dp=4)).finding
    # A replica has two ranks, and their tie is theirs alone.
    assert (finding.culprit, finding.unknown) == ((), (4, 5))
