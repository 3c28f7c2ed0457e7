from __future__ import annotations

from hicache.control.active import Active
from hicache.control.waiting import Waiting
from hicache.core import Request


def active(rid: str, order: int, priority: int = 0) -> Active:
    return Active(Request(rid, b"\0\0\0\0", b"", 1, priority=priority), order, b"\0\0\0\0")


def queue(*added: Active, by_priority: bool) -> str:
    waiting = Waiting(by_priority=by_priority)
    for each in added:
        waiting.add(each)
    return "".join(each.rid for each in waiting)


def test_who_comes_first_is_first_whatever_the_priority() -> None:
    assert queue(active("a", 0), active("b", 1, 9), active("c", 2, 3), by_priority=False) == "abc"


def test_a_retracted_request_goes_to_the_end() -> None:
    assert queue(active("c", 2), active("d", 3), active("a", 0), by_priority=False) == "cda"


def test_a_higher_priority_goes_first_and_then_who_came_first() -> None:
    added = (active("a", 0, 1), active("b", 1, 2), active("c", 2, 1), active("d", 3, 2), active("e", 4, -5))
    assert queue(*added, by_priority=True) == "bdace"


def test_by_priority_a_retracted_request_has_its_place_by_arrival_again() -> None:
    assert queue(active("c", 2), active("d", 3), active("a", 0), by_priority=True) == "acd"


def test_the_queue_may_change_while_somebody_goes_through_it() -> None:
    waiting = Waiting()
    for rid in "abc":
        waiting.add(active(rid, 0))
    seen = []
    for each in waiting:
        seen.append(each.rid)
        waiting.remove(each)
    assert (seen, len(waiting)) == (["a", "b", "c"], 0)


def test_a_request_is_found_by_its_id() -> None:
    waiting = Waiting()
    waiting.add(active("a", 0))
    found = waiting.find("a")
    assert found is not None and found.rid == "a"
    assert waiting.find("b") is None
