"""Device and host locks: what keeps a node where it is while somebody needs it.

    root ---- a ---- b ---- c        lock(b)        device: a and b, whoever reads b reads the path
                                     lock_host(b)   host: b alone, and whatever a split makes of it

A device lock covers the path to the root, nodes included that are not on the device, so an unlocked node
never has a locked descendant. A running request holds one on its last node, a backup on its node until
the ack, a load back on its node until the ack. A host lock is held by a load back on what it reads, by a
prefetch on its anchor and by a backup to storage on its node.

Each lock is a receipt, good for one release.
"""

from __future__ import annotations

from dataclasses import dataclass

from hicache.control.node import Node
from hicache.control.tree import Tree


@dataclass(slots=True, eq=False)
class DeviceLock:
    """Holds the path from the root to `node` on the device."""

    node: Node
    is_held: bool = True


@dataclass(slots=True, eq=False)
class HostLock:
    """Holds the pages from `first_page` to the end of `node` on the host.

    Splits cut the span into nodes, but move neither of its ends: the release finds all of them by walking
    up from `node` to the one that begins at `first_page`.
    """

    node: Node
    first_page: int
    is_held: bool = True


def lock(tree: Tree, node: Node) -> DeviceLock:
    """Hold the path from the root to `node` on the device."""
    assert node.is_alive, f"lock of {node}, which is not in the tree"
    receipt = DeviceLock(node)
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
    return receipt


def unlock(tree: Tree, receipt: DeviceLock) -> None:
    """Let go of what `lock` held, or of what splits have made of it."""
    node = receipt.node
    _release(receipt)
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


def lock_host(tree: Tree, node: Node) -> HostLock:
    """Hold `node` on the host. The root needs no holding."""
    assert node.is_alive, f"host lock of {node}, which is not in the tree"
    tree.host_locks += 1
    if node is not tree.root:
        node.host_lock_count += 1
    return HostLock(node, node.first_page)


def unlock_host(tree: Tree, receipt: HostLock) -> None:
    """Let go of what `lock_host` held, all that splits have made of it."""
    node = receipt.node
    _release(receipt)
    tree.host_locks -= 1
    if node is tree.root:
        return
    while True:
        assert node.host_lock_count > 0, f"host unlock of {node}, which is not locked"
        node.host_lock_count -= 1
        tree.host_leaves.offer(node)
        if node.first_page == receipt.first_page:
            return
        assert node.parent is not None and node.first_page > receipt.first_page, (
            f"host lock of {receipt.node} from page {receipt.first_page}: {node} begins at {node.first_page}"
        )
        node = node.parent


def _release(receipt: DeviceLock | HostLock) -> None:
    assert receipt.is_held, f"{receipt.node}: a lock is released a second time"
    assert receipt.node.is_alive, f"{receipt.node} has left the tree under a lock"
    receipt.is_held = False
