from __future__ import annotations

from dataclasses import replace

import pytest

from consensus_checker.stack_looks import Place, scopes
from tests.support.stacks import dossier_of
from tracer.importers.dossier import Dossier


def place(text: str) -> Place:
    return Place.of(dossier_of(f"0  {text}").stacks[0])


@pytest.mark.parametrize(
    ("text", "doing", "purpose"),
    [
        ("all_reduce  _all_reduce_attn_groups hybrid.py:9, event_loop scheduler.py:1", "meeting", "cache"),
        ("all_reduce  vote unified_radix_cache.py:9, event_loop scheduler.py:1", "meeting", "cache"),
        ("broadcast  broadcast_pyobj utils.py:9, recv_requests scheduler.py:2", "meeting", "requests"),
        ("all_reduce  forward model.py:9, run_batch scheduler.py:2", "meeting", ""),
        ("get  event_loop_normal scheduler.py:3", "idle", ""),
        ("get  drain_prefetch hiradix_cache.py:3", "helper", "cache"),
        ("-  recv_requests scheduler.py:3  state=active", "idle", "requests"),
        ("-  recv_requests scheduler.py:3  state=active+gil", "running", "requests"),
        ("-  step scheduler.py:3  state=active", "running", ""),
        ("lock  step scheduler.py:3", "lock", ""),
        ("read  step scheduler.py:3", "storage", ""),
        ("device  step scheduler.py:3", "device", ""),
    ],
    ids=repr,
)
def test_a_place_says_what_a_rank_does_and_what_for(text: str, doing: str, purpose: str) -> None:
    assert (doing, purpose) == (place(text).doing, place(text).purpose)


def test_a_loop_that_goes_on_in_a_collective_has_not_moved_as_far_as_anybody_can_tell() -> None:
    assert place("all_reduce  f a.py:1").is_same(place("all_reduce  f a.py:2"))
    assert not place("-  f a.py:1").is_same(place("-  f a.py:2"))


def test_the_tool_that_looked_most_often_is_taken() -> None:
    twice = dossier_of("0  all_reduce  f a.py:1", "0  all_reduce  f a.py:1", tool="faulthandler")
    once = dossier_of("0  all_reduce  g a.py:1")
    files = len(twice.files)
    twice.files += once.files
    twice.stacks += [replace(s, at=s.at._replace(file=files)) for s in once.stacks]
    (scope,) = scopes(twice)
    assert (scope.stands[0].place.where.partition(",")[0], scope.stands[0].is_same) == ("f", True)


def test_looks_in_one_folder_are_put_together_by_their_number() -> None:
    found = dossier_of("0  all_reduce  f a.py:1\n1  -  g a.py:1", "0  all_reduce  f a.py:1\n1  -  g a.py:1")
    for file in found.files:
        file.name = file.name.replace("/", "_")
    (scope,) = scopes(found)
    assert [(stand.rank, len(scope.looks[stand.rank]), stand.is_same) for stand in scope.stands] == [
        (0, 2, True),
        (1, 2, True),
    ]


def test_rows_without_a_rank_are_nobodys() -> None:
    found = dossier_of("0  all_reduce  f a.py:1")
    found.stacks = [replace(s, who=replace(s.who, rank=None)) for s in found.stacks]
    assert scopes(found) == []
    assert scopes(Dossier()) == []


def test_replicas_and_stages_are_apart_where_their_places_are_known() -> None:
    places = {0: {"dp": 0, "tp": 0}, 1: {"dp": 1, "tp": 0}}
    found = scopes(dossier_of("0  -  f a.py:1\n1  -  f a.py:1", places=places))
    assert [scope.name for scope in found] == ["dp0.pp0", "dp1.pp0"]
    (alone,) = scopes(dossier_of("0  -  f a.py:1\n1  -  f a.py:1"))
    assert (alone.name, alone.is_placed) == ("", False)
