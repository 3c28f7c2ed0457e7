"""A node of the radix tree: one edge, its pages, and where they are."""

from __future__ import annotations

from hicache.core import NodeId, Slot


class Node:
    """One edge of the tree and the place at its end."""

    __slots__ = (
        "children",
        "device",
        "device_children",
        "digests",
        "hit_count",
        "host",
        "host_lock_count",
        "id",
        "is_alive",
        "key",
        "last_access",
        "lock_count",
        "only_child",
        "page_count",
        "parent",
        "write_pending",
    )

    def __init__(
        self, node_id: NodeId, parent: Node | None, key: bytes, page_count: int, digests: bytes
    ) -> None:
        self.id = node_id
        self.parent = parent
        self.key = key
        self.page_count = page_count
        self.digests = digests
        self.children: dict[bytes, Node] = {}
        # The child where there is exactly one: most lookups then need not hash a page.
        self.only_child: Node | None = None
        # Children with device pages; a node with none of them is a leaf as the device sees it.
        self.device_children = 0
        self.device: list[Slot] | None = None
        self.host: list[Slot] | None = None
        self.lock_count = 0
        self.host_lock_count = 0
        self.hit_count = 0
        self.last_access = 0.0
        # A backup of it is queued or in flight: a split must tell the cache.
        self.write_pending = False
        self.is_alive = True

    @property
    def is_device_leaf(self) -> bool:
        """May the device give it up now?"""
        return (
            self.device is not None
            and self.device_children == 0
            and self.lock_count == 0
            and self.parent is not None
            and self.is_alive
        )

    @property
    def is_host_leaf(self) -> bool:
        """May the host give it up now?"""
        return (
            self.host is not None
            and self.device is None
            and not self.children
            and self.lock_count == 0
            and self.host_lock_count == 0
            and self.is_alive
        )

    def __repr__(self) -> str:
        places = "".join(tier for tier, slots in (("D", self.device), ("H", self.host)) if slots is not None)
        return f"Node({self.id}, {self.page_count} pages, {places or '-'}, locks {self.lock_count})"
