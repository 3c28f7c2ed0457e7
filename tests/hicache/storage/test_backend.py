"""How much of a chain a store has."""

from __future__ import annotations

from hicache.core import SIDE_POOLS, SidePool
from hicache.ports import Found
from hicache.storage.backend import Stats, survey

INDEXER, DRAFT, MAMBA = SIDE_POOLS["indexer"], SIDE_POOLS["draft"], SIDE_POOLS["mamba"]


def found(page_count: int, pools: list[SidePool], **there: list[int]) -> Found:
    """A survey of pages `0`, `1`, ...; `there` lists the page indexes that each pool has."""
    hashes = [str(index) for index in range(page_count)]
    return survey(hashes, pools, lambda pool, page_hash: int(page_hash) in there.get(pool, []))


def test_only_leading_pages_count() -> None:
    assert found(5, [], kv=[0, 1, 3, 4]) == Found(2)


def test_nothing_asked_is_nothing_found() -> None:
    assert found(0, [INDEXER], kv=[0]) == Found(0, {"indexer": 0})


def test_a_pool_needed_for_every_page_has_a_boundary_of_its_own() -> None:
    assert found(5, [INDEXER, DRAFT], kv=[0, 1, 2, 3], indexer=[0, 1, 3], draft=[0, 1, 2, 3, 4]) == Found(
        4, {"indexer": 2, "draft": 4}
    )


def test_a_trailing_pool_restores_where_it_has_a_state() -> None:
    assert found(6, [MAMBA], kv=[0, 1, 2, 3, 4], mamba=[1, 4, 5]) == Found(5, {"mamba": 5}, [2, 5])


def test_lengths_that_another_pool_lacks_are_not_restorable() -> None:
    assert found(6, [INDEXER, MAMBA], kv=[0, 1, 2, 3, 4], indexer=[0, 1, 2, 3], mamba=[1, 4]) == Found(
        5, {"indexer": 4, "mamba": 5}, [2]
    )


def test_a_trailing_pool_without_a_state_restores_nothing() -> None:
    assert found(3, [MAMBA], kv=[0, 1, 2]) == Found(3, {"mamba": 0}, [])


def test_ranks_intersect_what_they_can_restore() -> None:
    """The spec's example: the minimum of each one's longest would be 12, which rank 0 has no state for."""
    pages = list(range(16))
    rank_0 = found(16, [MAMBA], kv=pages, mamba=[3, 7, 15])
    rank_1 = found(16, [MAMBA], kv=pages[:13], mamba=[3, 11, 15])
    assert (list(rank_0.restorable), list(rank_1.restorable)) == ([4, 8, 16], [4, 12])


def test_pages_behind_a_gap_are_not_even_looked_at() -> None:
    asked: list[str] = []

    def has(pool: str, page_hash: str) -> bool:
        asked.append(pool + page_hash)
        return page_hash != "1"

    survey(["0", "1", "2"], [INDEXER, MAMBA], has)
    assert asked == ["kv0", "kv1", "indexer0", "mamba0"]


def test_stats_have_all_their_names_from_the_start() -> None:
    stats = Stats("pages_read", "pages_written")
    stats.add("pages_written", 3)
    assert stats.read() == {"pages_read": 0, "pages_written": 3}
