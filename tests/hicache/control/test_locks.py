"""Locks, their receipts, and what splits make of both."""

from __future__ import annotations

import pytest

from hicache.control import locks
from hicache.control.actions import Action, SplitNotice
from hicache.control.keys import pack
from hicache.control.node import Node
from hicache.control.tree import Tree

PAGE_BYTES = 16


def tokens(*pages: int) -> bytes:
    return b"".join(pack([page] * 4) for page in pages)


def tree_of(*pages: int) -> tuple[Tree, Node]:
    """A tree of one node."""
    tree = Tree(PAGE_BYTES, backup_threshold=0)
    return tree, grow(tree, *pages)


def grow(tree: Tree, *pages: int, owned: int = 0) -> Node:
    slots = list(range(len(pages)))
    text = tokens(*pages)
    return tree.insert(text, slots, bytes(8 * len(pages)), owned_pages=owned, counted_pages=0).node


def split(tree: Tree, node: Node, page_count: int) -> Node:
    return tree.split(node, page_count, [])


# Device


def test_a_device_lock_holds_the_node_and_its_path() -> None:
    tree, parent = tree_of(1, 2)
    child = grow(tree, 1, 2, 3, owned=2)
    other = grow(tree, 1, 2, 4, owned=2)
    receipt = locks.lock(tree, child)
    assert (parent.lock_count, child.lock_count, other.lock_count) == (1, 1, 0)
    assert (tree.protected_pages, tree.evictable_pages) == (3, 1)
    assert tree.device_leaves.pop() is other
    assert tree.device_leaves.pop() is None
    locks.unlock(tree, receipt)
    assert (tree.protected_pages, tree.evictable_pages) == (0, 4)
    assert tree.device_leaves.pop() is child


def test_pages_are_protected_until_the_last_lock_goes() -> None:
    tree, node = tree_of(1, 2)
    first, second = locks.lock(tree, node), locks.lock(tree, node)
    locks.unlock(tree, first)
    assert (tree.protected_pages, tree.evictable_pages) == (2, 0)
    locks.unlock(tree, second)
    assert (tree.protected_pages, tree.evictable_pages) == (0, 2)


def test_a_device_lock_covers_nodes_that_only_the_host_has() -> None:
    tree, node = tree_of(1, 2)
    tree.set_host(node, [50, 51])
    tree.clear_device(node)
    receipt = locks.lock(tree, node)
    assert (tree.protected_pages, tree.evictable_pages) == (0, 0)
    assert tree.host_leaves.pop() is None, "the host may not forget what somebody is about to load"
    tree.set_device(node, [7, 8])
    assert (tree.protected_pages, tree.evictable_pages) == (2, 0)
    locks.unlock(tree, receipt)
    assert (tree.protected_pages, tree.evictable_pages) == (0, 2)


def test_a_lock_released_without_the_device_offers_the_node_to_the_host_queue() -> None:
    tree, node = tree_of(1)
    tree.set_host(node, [50])
    tree.clear_device(node)
    receipt = locks.lock(tree, node)
    assert tree.host_leaves.pop() is None
    locks.unlock(tree, receipt)
    assert tree.host_leaves.pop() is node


def test_a_split_node_is_released_on_both_halves_by_the_one_receipt() -> None:
    tree, node = tree_of(1, 2, 3)
    receipt = locks.lock(tree, node)
    front = split(tree, node, 1)
    assert (front.lock_count, node.lock_count) == (1, 1)
    assert (tree.protected_pages, tree.evictable_pages) == (3, 0)
    locks.unlock(tree, receipt)
    assert (front.lock_count, node.lock_count) == (0, 0)
    assert (tree.protected_pages, tree.evictable_pages) == (0, 3)


def test_a_lock_on_the_root_holds_nothing() -> None:
    tree = Tree(PAGE_BYTES)
    locks.unlock(tree, locks.lock(tree, tree.root))
    locks.unlock_host(tree, locks.lock_host(tree, tree.root))
    assert (tree.root.lock_count, tree.root.host_lock_count) == (1, 0)


def test_a_receipt_is_good_for_one_release() -> None:
    tree, node = tree_of(1)
    first = locks.lock(tree, node)
    locks.lock(tree, node)
    locks.unlock(tree, first)
    with pytest.raises(AssertionError, match="second time"):
        locks.unlock(tree, first)


def test_an_unlock_too_many_is_a_programmers_error() -> None:
    tree, node = tree_of(1)
    with pytest.raises(AssertionError, match="not locked"):
        locks.unlock(tree, locks.DeviceLock(node))
    with pytest.raises(AssertionError, match="not locked"):
        locks.unlock_host(tree, locks.HostLock(node, 0))


def test_what_has_left_the_tree_can_not_be_locked() -> None:
    tree, node = tree_of(1)
    tree.clear_device(node)
    tree.remove(node)
    with pytest.raises(AssertionError, match="not in the tree"):
        locks.lock(tree, node)
    with pytest.raises(AssertionError, match="not in the tree"):
        locks.lock_host(tree, node)


# Host


def test_a_host_lock_keeps_a_node_on_the_host_and_its_release_offers_it() -> None:
    tree, node = tree_of(1)
    tree.set_host(node, [50])
    receipt = locks.lock_host(tree, node)
    tree.clear_device(node)
    assert tree.host_leaves.pop() is None
    with pytest.raises(AssertionError, match="1 locks"):
        tree.clear_host(node)
    locks.unlock_host(tree, receipt)
    assert tree.host_leaves.pop() is node


def test_a_host_lock_is_for_one_node() -> None:
    tree, parent = tree_of(1)
    child = grow(tree, 1, 2, owned=1)
    locks.lock_host(tree, child)
    assert (parent.host_lock_count, child.host_lock_count) == (0, 1)


def test_a_host_lock_covers_all_that_splits_make_of_its_node() -> None:
    tree, parent = tree_of(9)
    node = grow(tree, 9, 1, 2, 3, owned=1)
    receipt = locks.lock_host(tree, node)
    middle = split(tree, node, 2)
    front = split(tree, middle, 1)
    held = [front, middle, node]
    assert [each.host_lock_count for each in (parent, *held)] == [0, 1, 1, 1]
    locks.unlock_host(tree, receipt)
    assert [each.host_lock_count for each in (parent, *held)] == [0, 0, 0, 0]


def test_host_locks_taken_before_and_after_a_split_end_where_they_began() -> None:
    tree, node = tree_of(1, 2, 3)
    before = locks.lock_host(tree, node)
    front = split(tree, node, 1)
    after = locks.lock_host(tree, node)
    middle = split(tree, node, 1)
    on_front = locks.lock_host(tree, front)
    assert [each.host_lock_count for each in (front, middle, node)] == [2, 2, 2]
    locks.unlock_host(tree, after)
    assert [each.host_lock_count for each in (front, middle, node)] == [2, 1, 1]
    locks.unlock_host(tree, before)
    assert [each.host_lock_count for each in (front, middle, node)] == [1, 0, 0]
    locks.unlock_host(tree, on_front)
    assert [each.host_lock_count for each in (front, middle, node)] == [0, 0, 0]


def test_a_split_of_a_node_under_a_host_lock_is_told() -> None:
    tree, node = tree_of(1, 2)
    locks.lock_host(tree, node)
    actions: list[Action] = []
    front = tree.split(node, 1, actions)
    assert actions == [SplitNotice(front, node)]


def test_a_split_of_a_node_that_nothing_carries_is_not_told() -> None:
    tree, node = tree_of(1, 2)
    locks.lock(tree, node)
    actions: list[Action] = []
    tree.split(node, 1, actions)
    assert actions == []
