"""The order in which leaves go, policy by policy."""

from __future__ import annotations

import random

import pytest

from hicache.config import EvictionPolicy
from hicache.control.eviction import POLICIES, STALE_MAX, LeafQueue, Policy, tail_lru
from hicache.control.node import Node


def leaf(
    node_id: int,
    *,
    last_access: float = 0,
    created: float = 0,
    hit_count: int = 0,
    priority: int = 0,
    under: Node | None = None,
    pages: int = 1,
) -> Node:
    """A node on the device, under a root of its own unless a parent is given."""
    parent = under if under is not None else Node(0, None, b"", 0)
    node = Node(node_id, parent, b"", pages, priority=priority, now=created)
    node.device = [0] * pages
    node.last_access = last_access
    node.hit_count = hit_count
    return node


def order(policy: Policy, nodes: list[Node]) -> list[int]:
    queue = LeafQueue("is_device_leaf", policy)
    for node in nodes:
        queue.offer(node)
    found = []
    while (node := queue.pop()) is not None:  # type: ignore[assignment]
        found.append(node.id)
    return found


def test_lru_takes_the_one_that_has_not_been_used_for_longest() -> None:
    nodes = [leaf(1, last_access=3), leaf(2, last_access=1), leaf(3, last_access=2)]
    assert order(POLICIES["lru"], nodes) == [2, 3, 1]


def test_mru_takes_the_one_that_has_just_been_used() -> None:
    nodes = [leaf(1, last_access=3), leaf(2, last_access=1), leaf(3, last_access=2)]
    assert order(POLICIES["mru"], nodes) == [1, 3, 2]


def test_lfu_takes_the_one_with_fewest_hits_and_of_those_the_one_used_longest_ago() -> None:
    nodes = [
        leaf(1, hit_count=2, last_access=1),
        leaf(2, hit_count=1, last_access=9),
        leaf(3, hit_count=1, last_access=8),
    ]
    assert order(POLICIES["lfu"], nodes) == [3, 2, 1]


def test_fifo_takes_the_oldest_and_filo_the_youngest_however_they_are_used() -> None:
    nodes = [
        leaf(1, created=2, last_access=9),
        leaf(2, created=1, last_access=8),
        leaf(3, created=3, last_access=3),
    ]
    assert order(POLICIES["fifo"], nodes) == [2, 1, 3]
    assert order(POLICIES["filo"], nodes) == [3, 1, 2]


def test_priority_takes_the_lowest_and_of_those_the_one_used_longest_ago() -> None:
    nodes = [
        leaf(1, priority=1, last_access=1),
        leaf(2, priority=-1, last_access=9),
        leaf(3, priority=-1, last_access=8),
    ]
    assert order(POLICIES["priority"], nodes) == [3, 2, 1]


def test_slru_protects_what_two_requests_have_inserted() -> None:
    nodes = [
        leaf(1, hit_count=2, last_access=1),
        leaf(2, hit_count=1, last_access=9),
        leaf(3, hit_count=7, last_access=2),
        leaf(4, hit_count=0, last_access=8),
    ]
    assert order(POLICIES["slru"], nodes) == [4, 2, 1, 3]


def test_tlru_takes_first_what_the_next_prompt_can_do_without() -> None:
    """Threshold 4 pages, growth 1: of a conversation of 10 pages, the first 7 are needed."""
    history = leaf(1, pages=7, last_access=1)
    tail = leaf(2, under=history, pages=3, last_access=9)
    short = leaf(3, pages=6, last_access=2)
    for node in (history, tail):
        node.history_pages = 10
    history.device_children = 1
    assert order(tail_lru(4, 1), [tail, short]) == [2, 3]
    # One page more of the conversation is needed, and the tail begins before it.
    assert order(tail_lru(4, 2), [tail, short]) == [3, 2]


def test_a_tail_that_has_gone_does_not_make_the_rest_of_the_conversation_a_tail() -> None:
    """Else it would be eaten from its end, page after page."""
    rest = leaf(1, pages=7, last_access=9)
    rest.history_pages = 10
    short = leaf(2, pages=6, last_access=1)
    short.history_pages = 6
    assert order(tail_lru(4, 1), [rest, short]) == [2, 1]


def test_a_conversation_below_the_threshold_needs_nothing() -> None:
    assert order(tail_lru(4, 1), [leaf(1, pages=3, last_access=9), leaf(2, pages=9, last_access=1)]) == [1, 2]


def test_tlru_without_a_threshold_is_lru() -> None:
    conversation = leaf(1, pages=7, last_access=1)
    tail = leaf(2, under=conversation, pages=3, last_access=3)
    nodes = [tail, leaf(3, last_access=2), leaf(4, last_access=4)]
    assert order(POLICIES["tlru"], nodes) == order(POLICIES["lru"], nodes) == [3, 2, 4]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_is_equal_goes_by_node_id(policy: EvictionPolicy) -> None:
    assert order(POLICIES[policy], [leaf(3), leaf(1), leaf(2)]) == [1, 2, 3]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_leaf_used_since_it_was_offered_goes_where_it_belongs_now(policy: EvictionPolicy) -> None:
    """Accesses and hits raise most keys; whoever lowers one offers the leaf again."""
    chance = random.Random(policy)
    key = POLICIES[policy]
    queue = LeafQueue("is_device_leaf", key)
    nodes = [
        leaf(number, created=chance.randrange(100), priority=chance.randrange(3)) for number in range(1, 40)
    ]
    for node in nodes:
        queue.offer(node)
    for now in range(1, 400):
        node = chance.choice(nodes)
        node.last_access = now
        node.hit_count += chance.random() < 0.3
        node.priority += chance.random() < 0.1
        if policy == "mru":
            queue.offer(node)
    expected = sorted(nodes, key=lambda node: (key(node), node.id))
    assert [queue.pop() for _ in nodes] == expected
    assert queue.pop() is None


def test_a_leaf_whose_key_has_fallen_is_offered_again_and_goes_once() -> None:
    a, b = leaf(1, last_access=1), leaf(2, last_access=2)
    queue = LeafQueue("is_device_leaf", POLICIES["mru"])
    queue.offer(a)
    queue.offer(b)
    a.last_access = 3
    queue.offer(a)
    assert [queue.pop(), queue.pop(), queue.pop()] == [a, b, None]


def test_a_key_that_fell_and_rose_again_leaves_one_valid_entry() -> None:
    node = leaf(1, last_access=5)
    queue = LeafQueue("is_device_leaf", POLICIES["lru"])
    queue.offer(node)
    node.last_access = 3
    queue.offer(node)
    node.last_access = 5
    assert [queue.pop(), queue.pop()] == [node, None]


def test_what_has_been_popped_is_out_of_line_until_it_is_offered_again() -> None:
    node = leaf(1)
    queue = LeafQueue("is_device_leaf", POLICIES["lru"])
    queue.offer(node)
    assert node in queue
    assert queue.pop() is node
    assert node not in queue
    assert queue.pop() is None
    queue.offer(node)
    assert queue.pop() is node


def test_what_is_no_leaf_is_not_taken_in_line() -> None:
    locked = leaf(1)
    locked.lock_count = 1
    queue = LeafQueue("is_device_leaf", POLICIES["lru"])
    queue.offer(locked)
    assert locked not in queue


def test_what_has_ceased_to_be_a_leaf_is_passed_over_and_forgotten() -> None:
    a, b = leaf(1, last_access=1), leaf(2, last_access=2)
    queue = LeafQueue("is_device_leaf", POLICIES["lru"])
    queue.offer(a)
    queue.offer(b)
    a.lock_count = 1
    assert queue.pop() is b
    assert queue.pop() is None
    a.lock_count = 0
    assert queue.pop() is None, "its release has to offer it"
    queue.offer(a)
    assert queue.pop() is a


def test_a_queue_holds_a_leaf_once_however_often_it_is_offered() -> None:
    node = leaf(1)
    queue = LeafQueue("is_device_leaf", POLICIES["lru"])
    for now in range(1000):
        node.last_access = now
        queue.offer(node)
    assert len(queue._heap) == 1
    assert [queue.pop(), queue.pop()] == [node, None]


def test_stale_entries_of_falling_keys_are_swept() -> None:
    nodes = [leaf(number) for number in range(1, 5)]
    queue = LeafQueue("is_device_leaf", POLICIES["mru"])
    for now in range(3 * STALE_MAX):
        node = nodes[now % 4]
        node.last_access = now
        queue.offer(node)
    assert len(queue._heap) <= STALE_MAX + 2 * len(nodes)
    last = 3 * STALE_MAX - 1
    assert [node.last_access for node in iter(queue.pop, None)] == [last - back for back in range(4)]
