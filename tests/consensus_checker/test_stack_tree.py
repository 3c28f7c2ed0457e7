from __future__ import annotations

from consensus_checker.stack_tree import merged_tree, rank_set
from tests.support.stacks import dossier_of
from tracer.importers.dossier import Dossier

LOOP = "event_loop_overlap scheduler.py:1100, main launch.py:9"
CHECK = "writing_check hiradix_cache.py:700, next scheduler.py:1310"
VOTE = f"all_reduce  _reduce hiradix_cache.py:650, {CHECK}, {LOOP}"
ASK = f"broadcast  broadcast_pyobj utils.py:90, recv_requests scheduler.py:1210, {LOOP}"


def test_ranks_are_together_up_to_where_they_part() -> None:
    look = f"0  {VOTE}\n1  {ASK}\n2  {ASK}\n3  {ASK}"
    assert merged_tree(dossier_of(look, look)) == [
        "ranks 0-3",
        "main  launch.py:9",
        "event_loop_overlap  scheduler.py:1100",
        "  1-3  recv_requests  scheduler.py:1210",
        "       broadcast_pyobj  utils.py:90",
        "       = waits in broadcast, not moved between looks",
        "  0    next  scheduler.py:1310",
        "       writing_check  hiradix_cache.py:700",
        "       _reduce  hiradix_cache.py:650",
        "       = waits in all_reduce, not moved between looks",
    ]


def test_where_there_is_little_room_wrappers_go_first() -> None:
    look = f"0  {VOTE}\n1  {ASK}\n2  {ASK}\n3  {ASK}"
    assert merged_tree(dossier_of(look), lines_max=9) == [
        "ranks 0-3",
        "main  launch.py:9",
        "event_loop_overlap  scheduler.py:1100",
        "  1-3  recv_requests  scheduler.py:1210",
        "       broadcast_pyobj  utils.py:90",
        "       = waits in broadcast",
        "  0    .. 2 frames",
        "       writing_check  hiradix_cache.py:700",
        "       = waits in all_reduce",
    ]
    assert merged_tree(dossier_of(look), lines_max=4) == [
        "ranks 0-3",
        "main  launch.py:9",
        "event_loop_overlap  scheduler.py:1100",
        ".. 6 more lines",
    ]


def test_a_function_is_one_node_whatever_line_its_ranks_are_at() -> None:
    look = "0  broadcast  share u.py:80\n1  broadcast  share u.py:95\n2  -  share u.py:70  state=active"
    assert merged_tree(dossier_of(look)) == [
        "ranks 0-2",
        "share  u.py:70,80,95",
        "  0-1  = waits in broadcast",
        "  2    = runs",
    ]


def test_a_rank_that_was_not_seen_at_the_end_is_told() -> None:
    looks = ("0  all_reduce  f a.py:1\n1  -  g a.py:2", "0  all_reduce  h a.py:3")
    assert merged_tree(dossier_of(*looks)) == [
        "rank 0",
        "h  a.py:3",
        "= waits in all_reduce, moved between looks",
        "no stack of rank 1 at the end",
    ]


def test_lines_are_never_wider_than_asked_and_many_ways_are_summed_up() -> None:
    look = "\n".join(f"{rank}  -  f{rank} {'x' * 90}.py:{rank}" for rank in range(20))
    lines = merged_tree(dossier_of(look), width=60)
    assert max(map(len, lines)) == 60
    assert lines[-1] == "  .. 12 more ways, ranks 8-19"


def test_stages_have_trees_of_their_own() -> None:
    places = {0: {"pp": 0, "tp": 0}, 1: {"pp": 1, "tp": 0}}
    assert merged_tree(dossier_of("0  -  f a.py:1\n1  -  g a.py:2", places=places)) == [
        *("dp0.pp0: rank 0", "f  a.py:1", "= stands"),
        *("dp0.pp1: rank 1", "g  a.py:2", "= stands"),
    ]


def test_there_is_no_tree_without_stacks() -> None:
    assert merged_tree(Dossier()) == []


def test_sets_of_ranks_are_short() -> None:
    assert rank_set([0, 1, 2, 5]) == "0-2,5"
