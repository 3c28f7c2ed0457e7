"""Device and host locks: what keeps a node where it is while somebody needs it.

A device lock covers the node and its path to the root, so an unlocked node never has a locked
descendant. A running request holds one on its last node, a write-through backup on its node until
the ack, a load back on its node until the ack. A host lock covers one node.
"""

from __future__ import annotations

from hicache.control.node import Node
from hicache.control.tree import Tree


def lock(tree: Tree, node: Node) -> None:
    """Hold the path from the root to `node` on the device."""
    root = tree.root
    moved = 0
    while node is not root:
        if node.lock_count == 0 and node.device is not None:
            moved += node.page_count
        node.lock_count += 1
        assert node.parent is not None
        node = node.parent
    tree.evictable_pages -= moved
    tree.protected_pages += moved


def unlock(tree: Tree, node: Node) -> None:
    """Let go of what `lock` held; the same node, or what a split left of it."""
    root = tree.root
    moved = 0
    offer = tree.device_leaves.offer
    while node is not root:
        assert node.lock_count > 0, f"unlock of {node}, which is not locked"
        node.lock_count -= 1
        if node.lock_count == 0:
            if node.device is not None:
                moved += node.page_count
                offer(node)
            else:
                tree.host_leaves.offer(node)
        assert node.parent is not None
        node = node.parent
    tree.evictable_pages += moved
    tree.protected_pages -= moved


def lock_host(node: Node) -> None:
    node.host_lock_count += 1


def unlock_host(tree: Tree, node: Node) -> None:
    assert node.host_lock_count > 0, f"host unlock of {node}, which is not locked"
    node.host_lock_count -= 1
    tree.host_leaves.offer(node)
