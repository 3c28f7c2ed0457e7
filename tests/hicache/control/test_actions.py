"""What an insert asks its owner to do, and when it waits until that is done."""

from __future__ import annotations

from hicache.control import locks
from hicache.control.actions import Action, BackUp, FreeDevice, SplitNotice
from hicache.control.keys import chain_digests, pack
from hicache.control.node import Node
from hicache.control.tree import Insert, Tree

PAGE_TOKENS = 64
PAGE_BYTES = 4 * PAGE_TOKENS


def begin(
    tree: Tree, pages: list[int], *, first_slot: int = 0, owned: int = 0, counted: int = 0, prompt: int = 0
) -> Insert:
    text = b"".join(pack([page] * PAGE_TOKENS) for page in pages)
    digests = chain_digests(text, first_page=0, page_size_bytes=PAGE_BYTES, previous=b"", key=b"k")
    slots = list(range(first_slot, first_slot + len(pages)))
    return tree.insert(text, slots, digests, owned_pages=owned, counted_pages=counted, prompt_pages=prompt)


def carry_out(tree: Tree, actions: list[Action], *, room_pages: int = 1_000) -> int:
    """Back up what is asked for as far as there is room; returns the room that is left."""
    for action in actions:
        if isinstance(action, BackUp):
            for node in action.nodes:
                if node.page_count > room_pages:
                    break
                room_pages -= node.page_count
                back_up(tree, node)
    return room_pages


def back_up(tree: Tree, node: Node) -> None:
    if node.host is None:
        tree.set_host(node, [100 + node.id] * node.page_count)
    if node.device_state and node.host_state is None:
        tree.set_host_state(node, 100 + node.id)


def grow(tree: Tree, pages: list[int], *, room_pages: int = 1_000) -> list[Action]:
    """A whole insert by a request that has inserted nothing before."""
    done = begin(tree, pages)
    actions = list(done.actions)
    room_pages = carry_out(tree, done.actions, room_pages=room_pages)
    while not done.is_finished:
        done = tree.resume()
        actions += done.actions
        room_pages = carry_out(tree, done.actions, room_pages=room_pages)
    return actions


def backups(actions: list[Action]) -> list[BackUp]:
    return [action for action in actions if isinstance(action, BackUp)]


def test_d5_a_new_node_is_backed_up_behind_its_unbacked_ancestors_and_again_when_next_hit() -> None:
    """root -> A (128 tokens, not backed) -> B (64, not backed); its own request adds C below B."""
    tree = Tree(PAGE_BYTES, backup_threshold=1)
    a = begin(tree, [1, 2]).node
    b = begin(tree, [1, 2, 3], owned=2, counted=2).node
    done = begin(tree, [1, 2, 3, 4], owned=3, counted=3)
    c = done.node
    # A and B were inserted by this request: 192 tokens that it does not count again.
    assert [node.hit_count for node in (a, b, c)] == [1, 1, 1]
    assert (done.nodes_counted, done.is_finished) == (1, True)
    assert done.actions == [BackUp([a, b, c], "threshold")]
    # The host has room for A and B alone.
    assert carry_out(tree, done.actions, room_pages=3) == 0
    assert [node.host is not None for node in (a, b, c)] == [True, True, False]
    # The next request that inserts C hits it, and C alone is still to be copied.
    again = begin(tree, [1, 2, 3, 4])
    assert [node.hit_count for node in (a, b, c)] == [2, 2, 2]
    assert not again.is_finished
    assert again.actions == [FreeDevice([0, 1, 2, 3]), BackUp([c], "threshold")]
    carry_out(tree, again.actions)
    assert tree.resume().actions == []


def test_a_match_is_no_hit_and_asks_for_no_backup() -> None:
    tree = Tree(PAGE_BYTES, backup_threshold=2)
    begin(tree, [1])
    assert tree.match(pack([1] * PAGE_TOKENS), 1).actions == []
    assert backups(grow(tree, [2])) == []


def test_the_second_inserting_request_triggers_a_selective_backup() -> None:
    tree = Tree(PAGE_BYTES, backup_threshold=2)
    assert backups(grow(tree, [1, 2])) == []
    a = tree.match(pack([1] * PAGE_TOKENS + [2] * PAGE_TOKENS), 2).node
    assert backups(grow(tree, [1, 2, 3])) == [BackUp([a], "threshold")]


def test_without_a_threshold_nothing_is_backed_up() -> None:
    tree = Tree(PAGE_BYTES, backup_threshold=0)
    assert backups(grow(tree, [1])) == []
    assert backups(grow(tree, [1])) == []


def test_an_insert_waits_at_every_node_that_is_to_be_backed_up() -> None:
    """What comes after depends on whether the host had room."""
    tree = Tree(PAGE_BYTES, backup_threshold=2)
    a = begin(tree, [1]).node
    b = begin(tree, [1, 2], owned=1, counted=1).node
    first = begin(tree, [1, 2, 3], owned=1)
    assert (first.is_finished, first.node, first.nodes_counted) == (False, a, 1)
    assert first.actions == [BackUp([a], "threshold")]
    carry_out(tree, first.actions)
    second = tree.resume()
    assert (second.is_finished, second.node, second.nodes_counted) == (False, b, 2)
    assert second.actions == [FreeDevice([1]), BackUp([b], "threshold")]
    carry_out(tree, second.actions)
    third = tree.resume()
    assert (third.is_finished, third.new_pages, third.duplicate_pages, third.nodes_counted) == (True, 1, 1, 3)
    assert third.actions == []


def test_a_refused_ancestor_is_asked_for_again_with_its_descendant() -> None:
    tree = Tree(PAGE_BYTES, backup_threshold=2)
    a = begin(tree, [1]).node
    b = begin(tree, [1, 2], owned=1, counted=1).node
    asked = backups(grow(tree, [1, 2], room_pages=0))
    assert asked == [BackUp([a], "threshold"), BackUp([a, b], "threshold")]


def test_prompt_and_answer_are_one_backup() -> None:
    tree = Tree(PAGE_BYTES, backup_threshold=1)
    done = begin(tree, [1, 2, 3], prompt=2)
    assert done.actions == [BackUp(tree.path(done.node), "threshold")]
    assert len(tree.path(done.node)) == 2


def test_a_backup_that_is_under_way_is_not_asked_for_again() -> None:
    """Its host pages may not be there yet."""
    tree = Tree(PAGE_BYTES, backup_threshold=1)
    a = begin(tree, [1]).node
    a.write_pending = True
    done = begin(tree, [1, 2], owned=1)
    assert done.actions == [BackUp([done.node], "threshold")]


def test_a_new_leaf_is_counted_only_behind_what_the_request_has_counted() -> None:
    tree = Tree(PAGE_BYTES, backup_threshold=1)
    done = begin(tree, [1, 2], counted=2)
    assert (done.node.hit_count, done.nodes_counted, done.actions) == (0, 0, [])


def test_a_split_is_told_before_what_follows_from_it() -> None:
    tree = Tree(PAGE_BYTES, backup_threshold=1)
    node = begin(tree, [1, 2]).node
    tree.set_host(node, [50, 51])
    node.write_pending = True
    done = begin(tree, [1, 3])
    front = done.node.parent
    assert front is not None
    assert done.actions == [SplitNotice(front, node), FreeDevice([0]), BackUp([done.node], "threshold")]


def test_a_backup_that_makes_room_on_the_host_does_not_mislead_the_rest_of_the_insert() -> None:
    """While the insert waits at A, the host forgets another node: ids and slots stay right."""
    tree = Tree(PAGE_BYTES, backup_threshold=2)
    other = begin(tree, [9]).node
    tree.set_host(other, [50])
    tree.clear_device(other)
    a = begin(tree, [1]).node
    done = begin(tree, [1, 2], first_slot=20)
    assert done.actions == [FreeDevice([20]), BackUp([a], "threshold")]
    victim = tree.host_leaves.pop()
    assert victim is other
    tree.clear_host(victim)
    tree.remove(victim)
    carry_out(tree, done.actions)
    done = tree.resume()
    assert (done.is_finished, done.node.device, done.new_pages) == (True, [21], 1)


# Recurrent states


def test_a_new_state_on_a_backed_node_is_a_backup_of_its_own() -> None:
    tree = Tree(PAGE_BYTES, backup_threshold=1, has_state=True)
    grow(tree, [1, 2])
    front = tree.match(pack([1] * PAGE_TOKENS), 1).device_node
    assert front is tree.root, "the front of the split has no state"
    done = begin(tree, [1])
    assert done.actions == [FreeDevice([0]), BackUp([done.node], "side_pool")]
    assert done.is_finished
    carry_out(tree, done.actions)
    assert done.node.host_state is not None
    assert backups(grow(tree, [1])) == []


def test_under_write_back_a_new_state_on_a_backed_node_waits_for_its_eviction() -> None:
    tree = Tree(PAGE_BYTES, backup_threshold=0, has_state=True, requires_backed_parent=False)
    node = begin(tree, [1]).node
    tree.set_host(node, [50])
    assert begin(tree, [1]).actions == [FreeDevice([0])]


def test_a_state_waits_while_the_node_is_being_copied() -> None:
    tree = Tree(PAGE_BYTES, backup_threshold=1, has_state=True)
    grow(tree, [1, 2])
    done = begin(tree, [1])
    done.node.write_pending = True
    assert backups(begin(tree, [1]).actions) == []
    done.node.write_pending = False
    assert backups(begin(tree, [1]).actions) == [BackUp([done.node], "side_pool")]


def test_a_state_is_there_before_its_new_node_is_backed_up() -> None:
    tree = Tree(PAGE_BYTES, backup_threshold=1, has_state=True)
    done = begin(tree, [1])
    assert done.actions == [BackUp([done.node], "threshold")]
    assert done.node.device_state


def test_a_locked_path_survives_an_insert_that_waits() -> None:
    tree = Tree(PAGE_BYTES, backup_threshold=2)
    a = begin(tree, [1]).node
    receipt = locks.lock(tree, a)
    begin(tree, [1, 2], owned=1)
    assert tree.device_leaves.pop() is None
    tree.resume()
    locks.unlock(tree, receipt)
    leaf = tree.device_leaves.pop()
    assert leaf is not None and leaf.parent is a
