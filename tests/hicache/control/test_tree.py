"""The tree's moves one by one; its long lives are in `test_tree_properties.py`."""

from __future__ import annotations

import pytest

from hicache.config import EvictionPolicy
from hicache.control import locks
from hicache.control.actions import Action, BackUp, FreeDevice, SplitNotice
from hicache.control.keys import chain_digests, chain_hashes, namespace, pack
from hicache.control.node import Node
from hicache.control.tree import PRIORITY_MIN, HostInsert, Insert, Tree

PAGE = 4
PAGE_BYTES = PAGE * 4
A, B = namespace("a", ""), namespace("b", "")


def tokens(*pages: int) -> bytes:
    """One page of equal tokens for each number."""
    return b"".join(pack([page] * PAGE) for page in pages)


def digests(*pages: int) -> bytes:
    return chain_digests(tokens(*pages), first_page=0, page_size_bytes=PAGE_BYTES, previous=b"", key=b"k")


def hashes(*pages: int, seed: bytes = b"") -> bytes:
    return chain_hashes(tokens(*pages), first_page=0, page_size_bytes=PAGE_BYTES, previous=seed)


def make(
    *,
    threshold: int = 0,
    policy: EvictionPolicy = "lru",
    has_state: bool = False,
    is_write_back: bool = False,
) -> Tree:
    """A tree that asks for no backups unless a threshold is given."""
    return Tree(
        PAGE_BYTES,
        backup_threshold=threshold,
        eviction_policy=policy,
        has_state=has_state,
        requires_backed_parent=not is_write_back,
    )


def insert(
    tree: Tree,
    pages: list[int],
    slots: list[int],
    *,
    owned: int = 0,
    counted: int = 0,
    space: bytes = b"",
    priority: int = 0,
    prompt: int = 0,
    with_hashes: bool = False,
) -> Insert:
    """An insert whose backups nobody carries out."""
    done = tree.insert(
        tokens(*pages),
        slots,
        digests(*pages),
        owned_pages=owned,
        counted_pages=counted,
        namespace=space,
        priority=priority,
        prompt_pages=prompt,
        hashes=hashes(*pages, seed=space) if with_hashes else b"",
    )
    while not done.is_finished:
        done = tree.resume()
    return done


def fetch(tree: Tree, anchor: Node, pages: list[int], slots: list[int], *, space: bytes = b"") -> HostInsert:
    """`pages` from the start of the prompt; the slots are for those behind the anchor."""
    first = anchor.end_page
    return tree.host_insert(
        anchor,
        tokens(*pages[first:]),
        slots,
        digests(*pages)[8 * first :],
        hashes(*pages, seed=space)[32 * first :],
        namespace=space,
    )


def demote(tree: Tree, node: Node, slots: list[int]) -> None:
    """From the device to the host."""
    tree.set_host(node, slots)
    tree.clear_device(node)


def evict_all(tree: Tree) -> list[Node]:
    found = []
    while (node := tree.device_leaves.pop()) is not None:
        found.append(node)
        tree.clear_device(node)
        tree.remove(node)
    return found


# Match


def test_an_empty_tree_matches_nothing() -> None:
    tree = make()
    match = tree.match(tokens(1, 2), 2)
    assert (match.node, match.device_node) == (tree.root, tree.root)
    assert (match.device_pages, match.host_pages, match.kv_pages) == (0, 0, 0)


def test_a_match_stops_at_the_page_limit_and_cuts_the_node_there() -> None:
    tree = make()
    leaf = insert(tree, [1, 2, 3], [10, 11, 12]).node
    match = tree.match(tokens(1, 2, 3), 2)
    assert match.device_pages == 2
    assert match.node is leaf.parent
    assert (match.node.device, leaf.device) == ([10, 11], [12])
    assert (leaf.id, match.node.id) == (1, 2)


def test_a_match_of_no_pages_is_the_root() -> None:
    tree = make()
    insert(tree, [1], [10])
    assert tree.match(tokens(1), 0).node is tree.root


def test_a_match_counts_device_pages_and_then_host_pages() -> None:
    tree = make()
    top = insert(tree, [1, 2], [10, 11]).node
    bottom = insert(tree, [1, 2, 3], [10, 11, 12], owned=2).node
    tree.set_host(top, [50, 51])
    demote(tree, bottom, [52])
    match = tree.match(tokens(1, 2, 3, 4), 4)
    assert (match.node, match.device_node) == (bottom, top)
    assert (match.device_pages, match.host_pages, match.kv_pages) == (2, 1, 3)


def test_a_match_counts_no_hit() -> None:
    tree = make()
    node = insert(tree, [1], [10]).node
    tree.match(tokens(1), 1)
    assert node.hit_count == 1


def test_a_match_makes_its_path_recent_and_nothing_else() -> None:
    tree = make()
    top = insert(tree, [1], [10]).node
    used = insert(tree, [1, 2], [10, 11], owned=1).node
    unused = insert(tree, [1, 3], [10, 12], owned=1).node
    tree.match(tokens(1, 2), 2)
    assert unused.last_access < top.last_access == used.last_access


# Namespaces


def test_two_namespaces_share_no_page() -> None:
    tree = make()
    a = insert(tree, [1, 2], [10, 11], space=A).node
    b = insert(tree, [1, 2], [20, 21], space=B).node
    plain = insert(tree, [1, 2], [30, 31]).node
    assert [node.device for node in (a, b, plain)] == [[10, 11], [20, 21], [30, 31]]
    for space, node in ((A, a), (B, b), (b"", plain)):
        assert tree.match(tokens(1, 2), 2, space).node is node
    assert tree.match(tokens(1, 2), 2, namespace("c", "")).node is tree.root


def test_a_split_stays_in_its_namespace() -> None:
    tree = make()
    insert(tree, [1, 2], [10, 11])
    back = insert(tree, [1, 2], [20, 21], space=A).node
    front = tree.match(tokens(1), 1, A).node
    assert (front.namespace, front.device, back.device) == (A, [20], [21])
    assert tree.match(tokens(1, 2), 2, A).node is back
    assert tree.match(tokens(1, 2), 2).device_pages == 2


def test_a_node_leaves_its_own_namespace_and_no_other() -> None:
    tree = make()
    plain = insert(tree, [1], [10]).node
    salted = insert(tree, [1], [20], space=A).node
    tree.clear_device(salted)
    tree.remove(salted)
    assert tree.match(tokens(1), 1).node is plain
    assert tree.match(tokens(1), 1, A).node is tree.root


# Insert


def test_a_diverging_prompt_splits_the_node_and_keeps_both_ends() -> None:
    tree = make()
    first = insert(tree, [1, 2, 3], [10, 11, 12]).node
    done = insert(tree, [1, 2, 4], [20, 21, 22])
    assert done.node.device == [22]
    assert done.actions == [FreeDevice([20, 21])]
    assert done.node.parent is first.parent
    assert tree.device_slots(done.node) == [10, 11, 22]
    assert (done.new_pages, done.duplicate_pages, done.new_digests) == (1, 2, digests(1, 2, 4)[16:])


def test_an_insert_of_nothing_ends_at_the_root() -> None:
    tree = make(has_state=True)
    done = insert(tree, [], [])
    assert (done.node, done.new_pages, done.actions) == (tree.root, 0, [])
    assert not tree.root.device_state


def test_pages_that_a_request_took_over_from_the_tree_are_no_duplicates() -> None:
    tree = make()
    insert(tree, [1, 2], [10, 11])
    done = insert(tree, [1, 2, 3], [10, 11, 22], owned=2)
    assert (done.new_pages, done.duplicate_pages) == (1, 0)


def test_only_what_lies_behind_the_owned_pages_is_a_duplicate() -> None:
    tree = make()
    insert(tree, [1, 2, 3], [10, 11, 12])
    assert insert(tree, [1, 2, 3], [10, 21, 22], owned=1).actions == [FreeDevice([21, 22])]


def test_pages_lost_by_the_device_are_replaced_by_the_requests_own() -> None:
    tree = make()
    node = insert(tree, [1, 2], [10, 11]).node
    demote(tree, node, [50, 51])
    assert tree.match(tokens(1, 2), 2).host_pages == 2
    done = insert(tree, [1, 2, 3], [20, 21, 22])
    assert (node.device, node.host) == ([20, 21], [50, 51])
    assert (done.new_pages, done.unevicted_pages, done.duplicate_pages) == (3, 2, 0)
    assert done.new_digests == digests(1, 2, 3)[16:], "the host never lost the others"


def test_a_node_that_gets_its_device_pages_back_is_counted() -> None:
    tree = make()
    node = insert(tree, [1], [10]).node
    demote(tree, node, [50])
    assert insert(tree, [1], [20]).nodes_counted == 1
    assert node.hit_count == 2


def test_each_request_counts_each_node_once() -> None:
    tree = make()
    a = insert(tree, [1, 2], [10, 11]).node
    done = insert(tree, [1, 2, 3], [10, 11, 12], owned=2, counted=2)
    assert (a.hit_count, done.node.hit_count, done.nodes_counted) == (1, 1, 1)
    again = insert(tree, [1, 2, 3], [10, 11, 12], owned=3, counted=3)
    assert (a.hit_count, done.node.hit_count, again.nodes_counted) == (1, 1, 0)


def test_another_request_counts_the_whole_path() -> None:
    tree = make()
    insert(tree, [1, 2], [10, 11])
    insert(tree, [1, 2, 3], [10, 11, 12], owned=2, counted=2)
    done = insert(tree, [1, 2, 3, 4], [20, 21, 22, 23])
    assert [node.hit_count for node in tree.path(done.node)] == [2, 2, 1]
    assert done.nodes_counted == 3


def test_nothing_is_counted_under_write_back() -> None:
    tree = make(is_write_back=True)
    insert(tree, [1], [10])
    done = insert(tree, [1, 2], [20, 21])
    assert [node.hit_count for node in tree.path(done.node)] == [0, 0]
    assert done.nodes_counted == 0


def test_an_insert_raises_priorities_and_never_lowers_them() -> None:
    tree = make()
    low = insert(tree, [1], [10], priority=1).node
    high = insert(tree, [1, 2], [10, 11], owned=1, priority=5).node
    insert(tree, [1, 2], [10, 11], owned=2, priority=3)
    assert (low.priority, high.priority, tree.root.priority) == (5, 5, 5)


def test_an_insert_keeps_the_order_of_use_of_what_it_leaves_behind() -> None:
    tree = make()
    insert(tree, [1], [10])
    other = insert(tree, [2], [11]).node
    insert(tree, [1], [12])
    assert tree.device_leaves.pop() is other


def test_an_insert_while_another_waits_is_a_programmers_error() -> None:
    tree = make(threshold=1)
    insert(tree, [1], [10])
    begun = tree.insert(tokens(1), [20], digests(1), owned_pages=0, counted_pages=0)
    assert not begun.is_finished
    with pytest.raises(AssertionError, match="another one waits"):
        tree.insert(tokens(2), [30], digests(2), owned_pages=0, counted_pages=0)
    assert tree.resume().is_finished
    with pytest.raises(AssertionError, match="no insert waits"):
        tree.resume()


# Prompt and answer


def test_a_new_leaf_over_the_end_of_the_prompt_is_two_nodes() -> None:
    tree = make()
    done = insert(tree, [1, 2, 3], [10, 11, 12], prompt=2, priority=7)
    prompt, answer = tree.path(done.node)
    assert (prompt.device, answer.device) == ([10, 11], [12])
    assert (prompt.priority, answer.priority) == (8, 7)
    assert (prompt.hit_count, answer.hit_count, done.nodes_counted) == (1, 1, 2)
    assert done.new_digests == digests(1, 2, 3)
    assert prompt.created == answer.created


def test_a_leaf_that_ends_with_the_prompt_is_one_node_of_the_plain_priority() -> None:
    tree = make()
    done = insert(tree, [1, 2], [10, 11], prompt=2, priority=7)
    assert [node.priority for node in tree.path(done.node)] == [7]


def test_the_next_turn_makes_the_last_answer_part_of_its_prompt() -> None:
    tree = make()
    insert(tree, [1, 2, 3], [10, 11, 12], prompt=2)
    done = insert(tree, [1, 2, 3, 4, 5], [10, 11, 12, 13, 14], owned=3, prompt=4)
    assert [(node.device, node.priority) for node in tree.path(done.node)] == [
        ([10, 11], 1),
        ([12], 1),
        ([13], 1),
        ([14], 0),
    ]


def test_a_node_that_was_there_is_cut_at_the_end_of_a_later_prompt() -> None:
    tree = make()
    old = insert(tree, [1, 2, 3], [10, 11, 12]).node
    done = insert(tree, [1, 2, 3], [20, 21, 22], prompt=1)
    front, back = tree.path(done.node)
    assert (back, front.device, back.device) == (old, [10], [11, 12])
    assert (front.priority, back.priority) == (1, 0)
    assert (front.hit_count, back.hit_count, done.nodes_counted) == (2, 2, 2)


def test_an_answer_can_be_evicted_without_its_prompt() -> None:
    tree = make(policy="priority")
    done = insert(tree, [1, 2], [10, 11], prompt=1)
    other = insert(tree, [9], [20]).node
    answer = done.node
    assert answer.parent is not None
    assert evict_all(tree) == [answer, other, answer.parent]


def test_a_model_with_states_has_no_node_at_the_end_of_the_prompt() -> None:
    tree = make(has_state=True)
    done = insert(tree, [1, 2, 3], [10, 11, 12], prompt=2)
    assert [node.device for node in tree.path(done.node)] == [[10, 11, 12]]


# Split


def test_the_halves_of_a_split_inherit_and_count_as_just_used() -> None:
    tree = make()
    node = insert(tree, [1, 2], [10, 11], priority=4).node
    node.hit_count = 3
    created, before = node.created, node.last_access
    other = insert(tree, [9], [20]).node
    front = tree.split(node, 1, [])
    assert (front.hit_count, front.priority, front.created) == (3, 4, created)
    assert (node.hit_count, node.priority, node.created) == (3, 4, created)
    assert before < other.last_access < front.last_access == node.last_access


def test_what_a_match_leaves_behind_of_a_node_it_cuts_is_older_than_the_match() -> None:
    tree = make()
    other = insert(tree, [9], [20]).node
    back = insert(tree, [1, 2], [10, 11]).node
    tree.match(tokens(9), 1)
    front = tree.match(tokens(1), 1).node
    assert other.last_access < back.last_access < front.last_access


def test_a_new_leaf_is_newer_than_what_its_insert_left_behind() -> None:
    tree = make()
    back = insert(tree, [1, 2], [10, 11]).node
    leaf = insert(tree, [1, 3], [20, 21]).node
    assert back.last_access < leaf.last_access
    assert evict_all(tree)[:2] == [back, leaf]


def test_a_split_cuts_slots_digests_and_hashes() -> None:
    tree = make()
    node = insert(tree, [1, 2, 3], [10, 11, 12], with_hashes=True).node
    tree.set_host(node, [50, 51, 52])
    front = tree.split(node, 1, [])
    assert (front.device, front.host) == ([10], [50])
    assert (node.device, node.host) == ([11, 12], [51, 52])
    assert (front.digests, node.digests) == (digests(1, 2, 3)[:8], digests(1, 2, 3)[8:])
    assert (front.hashes, node.hashes) == (hashes(1, 2, 3)[:32], hashes(1, 2, 3)[32:])
    assert (front.first_page, front.end_page, node.first_page, node.end_page) == (0, 1, 1, 3)


def test_splitting_a_node_under_a_copy_tells_the_cache() -> None:
    tree = make()
    node = insert(tree, [1, 2, 3], [10, 11, 12]).node
    node.write_pending = True
    receipt = locks.lock(tree, node)
    match = tree.match(tokens(1), 1)
    assert match.actions == [SplitNotice(match.node, node)]
    assert (match.node.lock_count, match.node.write_pending) == (1, True)
    locks.unlock(tree, receipt)
    assert (tree.evictable_pages, tree.protected_pages) == (3, 0)


def test_a_state_stays_with_the_back_of_a_split() -> None:
    tree = make(has_state=True)
    node = insert(tree, [1, 2], [10, 11]).node
    tree.set_host(node, [50, 51], 70)
    front = tree.split(node, 1, [])
    assert (front.device_state, front.host_state) == (False, None)
    assert (node.device_state, node.host_state) == (True, 70)
    assert tree.states_host == 1


# States


def test_a_match_ends_where_a_state_is() -> None:
    tree = make(has_state=True)
    insert(tree, [1, 2, 3], [10, 11, 12])
    with_state = insert(tree, [1, 2], [10, 11], owned=2).node
    match = tree.match(tokens(1, 2, 3), 3)
    assert (match.device_pages, match.kv_pages) == (3, 3)
    match = tree.match(tokens(1, 2, 9), 3)
    assert (match.node, match.device_pages, match.kv_pages) == (with_state, 2, 2)
    match = tree.match(tokens(1, 9), 2)
    assert (match.node, match.device_pages, match.kv_pages) == (tree.root, 0, 1)


def test_pages_behind_the_last_state_are_not_made_recent() -> None:
    tree = make(has_state=True)
    top = insert(tree, [1], [10]).node
    insert(tree, [1, 2, 3], [10, 11, 12], owned=1)
    tree.match(tokens(1, 2), 2)
    (front,) = top.children.values()
    before = front.last_access
    tree.match(tokens(1, 2), 2)
    assert front.last_access == before < top.last_access


def test_a_state_on_the_host_makes_pages_usable_that_the_device_has() -> None:
    """They came back with another request's insert, which ended elsewhere and brought no state here."""
    tree = make(has_state=True)
    node = insert(tree, [1, 2], [10, 11]).node
    tree.set_host(node, [50, 51], 70)
    tree.clear_device(node)
    insert(tree, [1, 2, 3], [20, 21, 22])
    match = tree.match(tokens(1, 2), 2)
    assert (match.node, match.device_node) == (node, tree.root)
    assert (match.device_pages, match.host_pages) == (0, 2)


def test_a_state_leaves_the_device_with_its_pages() -> None:
    tree = make(has_state=True)
    node = insert(tree, [1], [10]).node
    assert node.device_state
    demote(tree, node, [50])
    assert not node.device_state
    assert tree.match(tokens(1), 1).node is tree.root


def test_states_on_the_host_are_counted() -> None:
    tree = make(has_state=True)
    a = insert(tree, [1], [10]).node
    b = insert(tree, [2], [11]).node
    tree.set_host(a, [50], 70)
    tree.set_host(b, [51])
    tree.set_host_state(b, 71)
    assert tree.states_host == 2
    assert tree.clear_host(a) == ([50], 70)
    assert (tree.states_host, a.host_state) == (1, None)


# Eviction order in the tree


def test_leaves_go_least_recently_used_first() -> None:
    tree = make()
    a = insert(tree, [1], [10]).node
    b = insert(tree, [2], [11]).node
    c = insert(tree, [3], [12]).node
    tree.match(tokens(1), 1)
    assert evict_all(tree) == [b, c, a]


def test_under_mru_a_match_makes_its_leaf_the_next_to_go() -> None:
    tree = make(policy="mru")
    a = insert(tree, [1], [10]).node
    b = insert(tree, [2], [11]).node
    c = insert(tree, [3], [12]).node
    tree.match(tokens(1), 1)
    assert evict_all(tree) == [a, c, b]


def test_under_mru_an_insert_makes_its_leaf_the_next_to_go() -> None:
    tree = make(policy="mru")
    a = insert(tree, [1], [10]).node
    b = insert(tree, [2], [11]).node
    insert(tree, [1], [12])
    assert evict_all(tree) == [a, b]


def test_under_tlru_depths_are_kept_and_do_not_shrink() -> None:
    tree = make(policy="tlru")
    top = insert(tree, [1], [10]).node
    leaf = insert(tree, [1, 2, 3, 4], [10, 11, 12, 13], owned=1).node
    assert (top.history_pages, leaf.history_pages) == (4, 4)
    front = tree.split(leaf, 1, [])
    assert (front.history_pages, leaf.history_pages) == (4, 4)
    tree.clear_device(leaf)
    tree.remove(leaf)
    assert (top.history_pages, front.history_pages) == (4, 4)


def test_a_parent_goes_after_its_children() -> None:
    tree = make()
    parent = insert(tree, [1], [10]).node
    child = insert(tree, [1, 2], [10, 11], owned=1).node
    tree.match(tokens(1), 1)
    assert evict_all(tree) == [child, parent]


def test_a_parent_on_the_host_alone_is_offered_when_its_last_child_goes() -> None:
    tree = make()
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


# Residency


def test_the_host_gets_no_node_without_its_parent() -> None:
    tree = make()
    insert(tree, [1], [10])
    child = insert(tree, [1, 2], [10, 11], owned=1).node
    with pytest.raises(AssertionError, match="lacks its parent"):
        tree.set_host(child, [50])


def test_under_write_back_the_host_may_have_a_node_without_its_parent() -> None:
    tree = make(is_write_back=True)
    insert(tree, [1], [10])
    child = insert(tree, [1, 2], [10, 11], owned=1).node
    demote(tree, child, [50])
    assert (tree.host_pages, tree.evictable_pages) == (1, 1)


def test_the_device_gets_no_node_without_its_parent() -> None:
    tree = make()
    top = insert(tree, [1], [10]).node
    bottom = insert(tree, [1, 2], [10, 11], owned=1).node
    tree.set_host(top, [50])
    demote(tree, bottom, [51])
    tree.clear_device(top)
    with pytest.raises(AssertionError, match="the device lacks its parent"):
        tree.set_device(bottom, [7])


def test_a_node_with_children_or_slots_is_not_removed() -> None:
    tree = make()
    parent = insert(tree, [1], [10]).node
    insert(tree, [1, 2], [10, 11], owned=1)
    with pytest.raises(AssertionError, match="still in use"):
        tree.remove(parent)


def test_a_leaf_without_room_on_the_host_goes_with_what_the_host_has_below_it() -> None:
    tree = make(is_write_back=True)
    top = insert(tree, [1], [10]).node
    node = insert(tree, [1, 2], [10, 11], owned=1).node
    one = insert(tree, [1, 2, 3], [10, 11, 12], owned=2).node
    two = insert(tree, [1, 2, 4], [10, 11, 13], owned=2).node
    demote(tree, one, [50])
    demote(tree, two, [51])
    gone = tree.drop_subtree(node)
    assert gone == [two, one, node]
    assert [(each.device, each.host, each.is_alive) for each in gone] == [
        (None, [51], False),
        (None, [50], False),
        ([11], None, False),
    ]
    assert (tree.evictable_pages, tree.host_pages) == (1, 0)
    assert evict_all(tree) == [top]


@pytest.mark.parametrize("what", ["host lock", "device lock", "backup"])
def test_a_subtree_in_use_is_not_dropped(what: str) -> None:
    tree = make(is_write_back=True, has_state=True)
    node = insert(tree, [1], [10]).node
    below = insert(tree, [1, 2], [10, 11], owned=1).node
    tree.set_host(below, [50], 70)
    tree.clear_device(below)
    if what == "host lock":
        locks.lock_host(tree, below)
    elif what == "device lock":
        below.lock_count += 1
    else:
        below.write_pending = True
    assert tree.drop_subtree(node) is None
    assert (tree.evictable_pages, tree.host_pages, tree.states_host) == (1, 1, 1)
    assert tree.match(tokens(1, 2), 2).node is below


def test_a_reset_forgets_everything_and_goes_on_counting_ids() -> None:
    tree = make(has_state=True)
    node = insert(tree, [1, 2], [10, 11], priority=3).node
    tree.set_host(node, [50, 51], 70)
    tree.reset()
    assert not node.is_alive
    assert tree.root.device_children == 0
    assert (tree.evictable_pages, tree.host_pages, tree.states_host) == (0, 0, 0)
    assert tree.match(tokens(1, 2), 2).node is tree.root
    assert tree.device_leaves.pop() is None
    assert insert(tree, [1], [10]).node.id == 2


def test_a_reset_under_a_lock_is_a_programmers_error() -> None:
    tree = make()
    locks.lock(tree, insert(tree, [1], [10]).node)
    with pytest.raises(AssertionError, match="reset while"):
        tree.reset()


# Hashes


def test_a_path_has_the_hashes_of_its_prompt() -> None:
    tree = make()
    insert(tree, [1, 2], [10, 11], space=A, with_hashes=True)
    leaf = insert(tree, [1, 2, 3], [10, 11, 12], owned=2, space=A, with_hashes=True).node
    assert tree.path_hashes(leaf) == hashes(1, 2, 3, seed=A)
    assert tree.last_hash(leaf) == hashes(1, 2, 3, seed=A)[-32:]
    assert tree.path_digests(leaf) == digests(1, 2, 3)


def test_the_root_has_no_last_hash() -> None:
    assert make().last_hash(make().root) == b""


def test_nodes_that_predate_storage_are_hashed_from_the_root_down() -> None:
    tree = make()
    top = insert(tree, [1, 2], [10, 11], space=A).node
    leaf = insert(tree, [1, 2, 3], [10, 11, 12], owned=2, space=A).node
    plain = insert(tree, [1, 2], [20, 21]).node
    assert (top.hashes, leaf.hashes, plain.hashes) == (None, None, None)
    assert tree.backfill_hashes() == 3
    assert tree.path_hashes(leaf) == hashes(1, 2, 3, seed=A)
    assert plain.hashes == hashes(1, 2)
    assert tree.backfill_hashes() == 0


# Pages from storage


def test_pages_from_storage_become_a_node_that_only_the_host_has() -> None:
    tree = make()
    insert(tree, [9], [10], priority=4)
    done = fetch(tree, tree.root, [1, 2], [50, 51])
    assert (done.node.device, done.node.host) == (None, [50, 51])
    assert (done.outcome, done.matched_pages, done.loaded_pages) == ("loaded", 0, 2)
    assert (done.new_digests, done.node.hashes) == (digests(1, 2), hashes(1, 2))
    assert (done.node.hit_count, done.node.priority) == (0, 4)
    assert tree.host_pages == 2
    assert tree.match(tokens(1, 2), 2).host_pages == 2
    assert tree.host_leaves.pop() is done.node


def test_in_an_empty_tree_they_have_the_lowest_priority() -> None:
    tree = make()
    assert fetch(tree, tree.root, [1], [50]).node.priority == PRIORITY_MIN


def test_what_the_host_has_already_comes_back() -> None:
    tree = make()
    node = insert(tree, [1, 2], [10, 11]).node
    tree.set_host(node, [40, 41])
    done = fetch(tree, tree.root, [1, 2, 3], [50, 51, 52])
    assert (done.matched_pages, done.loaded_pages, done.duplicate_slots) == (2, 1, [50, 51])
    assert (node.host, done.node.host, done.node.parent) == ([40, 41], [52], node)
    again = fetch(tree, tree.root, [1, 2, 3], [60, 61, 62])
    assert (again.outcome, again.duplicate_slots, again.node) == ("", [60, 61, 62], done.node)


def test_what_only_the_device_has_gets_its_host_pages() -> None:
    tree = make()
    top = insert(tree, [1], [10], with_hashes=True).node
    tree.set_host(top, [40])
    node = insert(tree, [1, 2, 3], [10, 11, 12], owned=1).node
    done = fetch(tree, top, [1, 2], [50])
    front = done.node
    assert (front.device, front.host, node.device, node.host) == ([11], [50], [12], None)
    assert (done.outcome, done.loaded_pages, done.new_digests) == ("loaded", 1, b"")
    assert front.hashes == hashes(1, 2)[32:]
    assert tree.host_pages == 2


def test_under_write_back_what_the_device_has_needs_no_host_pages() -> None:
    tree = make(is_write_back=True)
    node = insert(tree, [1, 2], [10, 11]).node
    done = fetch(tree, tree.root, [1, 2, 3], [50, 51, 52])
    assert (done.duplicate_slots, done.loaded_pages) == ([50, 51], 1)
    assert (node.host, done.node.host) == (None, [52])


def test_nothing_is_inserted_below_a_node_that_the_host_lacks() -> None:
    tree = make()
    anchor = insert(tree, [1], [10]).node
    assert not tree.can_anchor(anchor)
    done = fetch(tree, anchor, [1, 2], [50])
    assert (done.outcome, done.dropped_slots, done.node) == ("dropped", [50], anchor)
    assert tree.host_pages == 0
    tree.set_host(anchor, [40])
    assert tree.can_anchor(anchor)
    assert fetch(tree, anchor, [1, 2], [50]).outcome == "loaded"


def test_the_root_is_always_an_anchor() -> None:
    tree = make()
    assert tree.can_anchor(tree.root)


def test_pages_from_storage_go_to_their_namespace() -> None:
    tree = make()
    top = fetch(tree, tree.root, [1], [50], space=A).node
    below = fetch(tree, top, [1, 2], [51]).node
    assert (top.namespace, below.namespace, below.parent) == (A, A, top)
    assert tree.match(tokens(1, 2), 2, A).host_pages == 2
    assert tree.match(tokens(1, 2), 2).host_pages == 0


def test_storage_splits_a_node_under_a_copy_and_tells_it() -> None:
    tree = make()
    node = fetch(tree, tree.root, [1, 2], [50, 51]).node
    locks.lock_host(tree, node)
    done = fetch(tree, tree.root, [1, 3], [60, 61])
    front = done.node.parent
    assert front is not None
    assert done.actions == [SplitNotice(front, node)]
    assert (done.matched_pages, done.loaded_pages, done.duplicate_slots) == (1, 1, [60])


def test_only_as_many_pages_are_inserted_as_there_are_slots() -> None:
    tree = make()
    done = tree.host_insert(tree.root, tokens(1, 2, 3), [50, 51], digests(1, 2, 3), hashes(1, 2, 3))
    assert (done.node.page_count, done.node.digests, done.node.hashes) == (2, digests(1, 2), hashes(1, 2))
    assert done.new_digests == digests(1, 2)


def test_node_ids_count_creations() -> None:
    tree = make()
    first = insert(tree, [1, 2], [10, 11]).node
    actions: list[Action] = []
    front = tree.split(first, 1, actions)
    prompt_and_answer = tree.path(insert(tree, [1, 3, 4], [10, 12, 13], owned=1, prompt=2).node)
    fetched = fetch(tree, tree.root, [7], [50]).node
    assert [first.id, front.id, *(node.id for node in prompt_and_answer[1:]), fetched.id] == [1, 2, 3, 4, 5]
    assert tree.nodes_created == 6


def test_backups_are_asked_for_by_threshold_alone() -> None:
    tree = make()
    done = tree.insert(tokens(1), [10], digests(1), owned_pages=0, counted_pages=0)
    assert not any(isinstance(action, BackUp) for action in done.actions)
