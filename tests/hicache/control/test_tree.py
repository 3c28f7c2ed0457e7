"""The tree beside a plain dictionary of prefixes, and its moves one by one."""

from __future__ import annotations

import random

import pytest

from hicache.control import locks
from hicache.control.actions import BackUp, FreeDevice, SplitNotice
from hicache.control.keys import chain_digests, pack
from hicache.control.node import Node
from hicache.control.tree import Tree

PAGE = 4
PAGE_BYTES = PAGE * 4


def tokens(*pages: int) -> bytes:
    """One page of equal tokens for each number."""
    return b"".join(pack([page] * PAGE) for page in pages)


def digests(packed: bytes) -> bytes:
    return chain_digests(packed, first_page=0, page_size_bytes=PAGE_BYTES, previous=b"", key=b"k")


def insert(tree: Tree, pages: list[int], slots: list[int], *, owned: int = 0, counted: int = 0):  # type: ignore[no-untyped-def]
    key = tokens(*pages)
    return tree.insert(key, slots, digests(key), owned_pages=owned, counted_pages=counted)


def test_an_empty_tree_matches_nothing() -> None:
    tree = Tree(PAGE_BYTES)
    match = tree.match(tokens(1, 2), 2)
    assert (match.node, match.device_pages, match.host_pages) == (tree.root, 0, 0)


def test_a_match_stops_at_the_page_limit_and_cuts_the_node_there() -> None:
    tree = Tree(PAGE_BYTES)
    leaf = insert(tree, [1, 2, 3], [10, 11, 12]).node
    match = tree.match(tokens(1, 2, 3), 2)
    assert match.device_pages == 2
    assert match.node is leaf.parent
    assert (match.node.device, leaf.device) == ([10, 11], [12])
    assert (leaf.id, match.node.id) == (1, 2)


def test_a_diverging_prompt_splits_the_node_and_keeps_both_ends() -> None:
    tree = Tree(PAGE_BYTES)
    first = insert(tree, [1, 2, 3], [10, 11, 12]).node
    done = insert(tree, [1, 2, 4], [20, 21, 22], owned=0)
    assert done.node.device == [22]
    assert [action for action in done.actions if isinstance(action, FreeDevice)] == [FreeDevice([20, 21])]
    assert done.node.parent is first.parent
    assert tree.device_slots(done.node) == [10, 11, 22]


def test_pages_that_a_request_took_over_from_the_tree_are_no_duplicates() -> None:
    tree = Tree(PAGE_BYTES)
    insert(tree, [1, 2], [10, 11])
    done = insert(tree, [1, 2, 3], [10, 11, 22], owned=2)
    assert (done.new_pages, done.duplicate_pages) == (1, 0)


def test_an_insert_asks_for_a_backup_of_the_whole_unbacked_path_root_first() -> None:
    tree = Tree(PAGE_BYTES, backup_threshold=2)
    a = insert(tree, [1, 2], [10, 11]).node
    done = insert(tree, [1, 2, 3], [20, 21, 22])
    b = done.node
    assert [action for action in done.actions if isinstance(action, BackUp)] == [BackUp([a])]
    again = insert(tree, [1, 2, 3], [30, 31, 32])
    assert [action for action in again.actions if isinstance(action, BackUp)] == [BackUp([a, b])]


def test_a_request_counts_a_node_once() -> None:
    tree = Tree(PAGE_BYTES, backup_threshold=2)
    a = insert(tree, [1, 2], [10, 11]).node
    insert(tree, [1, 2, 3], [10, 11, 12], owned=2, counted=2)
    assert a.hit_count == 1


def test_a_page_lost_by_the_device_is_replaced_by_the_requests_own() -> None:
    tree = Tree(PAGE_BYTES)
    node = insert(tree, [1, 2], [10, 11]).node
    tree.set_host(node, [50, 51])
    tree.clear_device(node)
    assert tree.match(tokens(1, 2), 2).host_pages == 2
    done = insert(tree, [1, 2], [20, 21])
    assert (node.device, node.host, done.new_pages, done.duplicate_pages) == ([20, 21], [50, 51], 2, 0)
    assert done.new_digests == b"", "the host never lost them"


def test_splitting_a_node_under_a_copy_tells_the_cache() -> None:
    tree = Tree(PAGE_BYTES)
    node = insert(tree, [1, 2, 3], [10, 11, 12]).node
    node.write_pending = True
    locks.lock(tree, node)
    match = tree.match(tokens(1), 1)
    (notice,) = match.actions
    assert notice == SplitNotice(match.node, node)
    assert (match.node.lock_count, match.node.write_pending) == (1, True)
    locks.unlock(tree, node)
    assert (tree.evictable_pages, tree.protected_pages) == (3, 0)


def test_leaves_go_least_recently_used_first() -> None:
    tree = Tree(PAGE_BYTES)
    a = insert(tree, [1], [10]).node
    b = insert(tree, [2], [11]).node
    c = insert(tree, [3], [12]).node
    tree.match(tokens(1), 1)
    order = []
    while (node := tree.device_leaves.pop()) is not None:
        order.append(node)
        tree.clear_device(node)
        tree.remove(node)
    assert order == [b, c, a]


def test_a_parent_goes_after_its_children() -> None:
    tree = Tree(PAGE_BYTES)
    parent = insert(tree, [1], [10]).node
    child = insert(tree, [1, 2], [10, 11], owned=1).node
    tree.match(tokens(1), 1)
    assert tree.device_leaves.pop() is child
    tree.clear_device(child)
    tree.remove(child)
    assert tree.device_leaves.pop() is parent


def test_a_locked_node_and_its_path_stay() -> None:
    tree = Tree(PAGE_BYTES)
    insert(tree, [1], [10])
    child = insert(tree, [1, 2], [10, 11], owned=1).node
    locks.lock(tree, child)
    assert tree.device_leaves.pop() is None
    assert (tree.evictable_pages, tree.protected_pages) == (0, 2)
    locks.unlock(tree, child)
    assert tree.device_leaves.pop() is child


def test_an_unlock_too_many_is_a_programmers_error() -> None:
    tree = Tree(PAGE_BYTES)
    node = insert(tree, [1], [10]).node
    with pytest.raises(AssertionError, match="not locked"):
        locks.unlock(tree, node)


def test_an_insert_makes_its_whole_path_recent() -> None:
    tree = Tree(PAGE_BYTES)
    insert(tree, [1], [10])
    other = insert(tree, [2], [11]).node
    insert(tree, [1], [12])
    assert tree.device_leaves.pop() is other


def test_of_one_path_the_deeper_node_is_the_newer() -> None:
    tree = Tree(PAGE_BYTES)
    parent = insert(tree, [1], [10]).node
    child = insert(tree, [1, 2], [10, 11], owned=1).node
    assert parent.last_access < child.last_access
    tree.match(tokens(1, 2), 2)
    assert parent.last_access < child.last_access


def test_both_halves_of_a_split_are_as_old_as_the_node_was() -> None:
    tree = Tree(PAGE_BYTES)
    node = insert(tree, [1, 2], [10, 11]).node
    node.hit_count = 3
    before = node.last_access
    front = tree.split(node, 1, [])
    assert (front.last_access, node.last_access) == (before, before)
    assert (front.hit_count, node.hit_count) == (3, 3)


def test_a_split_under_a_load_keeps_the_host_lock_on_both_halves() -> None:
    tree = Tree(PAGE_BYTES)
    node = insert(tree, [1, 2], [10, 11]).node
    tree.set_host(node, [50, 51])
    locks.lock_host(node)
    actions: list[object] = []
    front = tree.split(node, 1, actions)  # type: ignore[arg-type]
    assert actions == [SplitNotice(front, node)]
    assert (front.host_lock_count, node.host_lock_count) == (1, 1)


def test_a_host_lock_keeps_a_node_on_the_host_and_its_release_offers_it() -> None:
    tree = Tree(PAGE_BYTES)
    node = insert(tree, [1], [10]).node
    tree.set_host(node, [50])
    locks.lock_host(node)
    tree.clear_device(node)
    assert tree.host_leaves.pop() is None
    locks.unlock_host(tree, node)
    assert tree.host_leaves.pop() is node


def test_a_parent_on_the_host_alone_is_offered_when_its_last_child_goes() -> None:
    tree = Tree(PAGE_BYTES)
    parent = insert(tree, [1], [10]).node
    child = insert(tree, [1, 2], [10, 11], owned=1).node
    for node, slot in ((parent, 50), (child, 51)):
        tree.set_host(node, [slot])
    for node in (child, parent):
        tree.clear_device(node)
    assert tree.host_leaves.pop() is child
    assert tree.host_leaves.pop() is None
    tree.clear_host(child)
    tree.remove(child)
    assert tree.host_leaves.pop() is parent


def test_the_leaf_queue_holds_a_node_once_however_often_it_is_offered() -> None:
    tree = Tree(PAGE_BYTES)
    node = insert(tree, [1], [10]).node
    for _ in range(1000):
        tree.match(tokens(1), 1)
        locks.lock(tree, node)
        locks.unlock(tree, node)
    assert len(tree.device_leaves._heap) == 1
    assert tree.device_leaves.pop() is node


class Mirror:
    """What the tree should know: every page path on the device, and those on the host only."""

    def __init__(self) -> None:
        self.device: dict[tuple[int, ...], int] = {}
        self.host: set[tuple[int, ...]] = set()

    def prefix(self, pages: list[int], limit: int) -> tuple[int, int]:
        """(device pages, host pages behind them) of the longest known prefix."""
        on_device = 0
        while on_device < limit and tuple(pages[: on_device + 1]) in self.device:
            on_device += 1
        known = on_device
        while known < limit and tuple(pages[: known + 1]) in self.host:
            known += 1
        return on_device, known - on_device


def path_of(node: Node) -> list[int]:
    pages: list[int] = []
    while node.parent is not None:
        ids = [int.from_bytes(node.key[at : at + 4], "little") for at in range(0, len(node.key), PAGE_BYTES)]
        pages = ids + pages
        node = node.parent
    return pages


@pytest.mark.parametrize("seed", range(4))
def test_the_tree_agrees_with_a_dictionary_of_prefixes(seed: int) -> None:
    """25,000 random operations a seed: match, insert, lock, unlock, demote, drop, forget."""
    chance = random.Random(seed)
    tree = Tree(PAGE_BYTES)
    mirror = Mirror()
    locked: list[Node] = []
    next_slot = 0
    for step in range(25_000):
        where = f"seed {seed} step {step}"
        pages = [chance.randrange(3) for _ in range(chance.randint(1, 7))]
        action = chance.random()
        if action < 0.35:
            limit = chance.randint(0, len(pages))
            match = tree.match(tokens(*pages), limit)
            assert (match.device_pages, match.host_pages) == mirror.prefix(pages, limit), where
            if match.host_pages == 0:
                found = tree.device_slots(match.node)
                assert found == [mirror.device[tuple(pages[: at + 1])] for at in range(len(found))], where
        elif action < 0.6:
            slots = list(range(next_slot, next_slot + len(pages)))
            next_slot += len(pages)
            done = insert(tree, pages, slots)
            freed = {slot for act in done.actions if isinstance(act, FreeDevice) for slot in act.slots}
            for at, slot in enumerate(slots):
                path = tuple(pages[: at + 1])
                assert (path in mirror.device) == (slot in freed), where
                mirror.device.setdefault(path, slot)
            assert path_of(done.node) == pages, where
        elif action < 0.7:
            match = tree.match(tokens(*pages), len(pages))
            locks.lock(tree, match.node)
            locked.append(match.node)
        elif action < 0.8 and locked:
            locks.unlock(tree, locked.pop(chance.randrange(len(locked))))
        elif action < 0.97:
            node = tree.device_leaves.pop()
            if node is None:
                continue
            held = {tuple(path_of(other)) for other in locked}
            own = tuple(path_of(node))
            assert not any(path[: len(own)] == own for path in held), where
            paths = [own[: len(own) - back] for back in range(node.page_count)]
            keeps_host = node.host is not None or bool(node.children) or chance.random() < 0.5
            if keeps_host and node.host is None:
                # Like write-through: what lies above is backed first.
                for step_node in tree.path(node):
                    if step_node.host is None:
                        tree.set_host(step_node, [0] * step_node.page_count)
                        whole = path_of(step_node)
                        mirror.host |= {
                            tuple(whole[: len(whole) - back]) for back in range(step_node.page_count)
                        }
            assert tree.clear_device(node) == [mirror.device.pop(path) for path in reversed(paths)], where
            if not keeps_host:
                tree.remove(node)
        else:
            node = tree.host_leaves.pop()
            if node is not None:
                whole = path_of(node)
                mirror.host -= {tuple(whole[: len(whole) - back]) for back in range(node.page_count)}
                tree.clear_host(node)
                tree.remove(node)
        assert tree.evictable_pages + tree.protected_pages == len(mirror.device), where
    on_host = sum(node.page_count for node in tree.walk() if node.host is not None)
    assert on_host == tree.host_pages == len(mirror.host)
    protected = sum(node.page_count for node in tree.walk() if node.lock_count and node.device is not None)
    assert protected == tree.protected_pages
