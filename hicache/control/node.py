"""A node of the radix tree: one edge, its pages, and where they are."""

from __future__ import annotations

from hicache.core import PLAIN, NodeId, Slot


class Node:
    """One edge of the tree and the place at its end.

    Attributes:
        end_page: pages from the root to its end. A cut moves where a node begins, never where it ends.
        namespace: what its prompt's first page is chained to.
        digests: 8 bytes a page, keyed. hashes: 32 bytes a page, or None if made without storage.
        device, host: page slots, or None where it is not on that tier.
        device_state, host_state: the recurrent state at its end, for models that have one.
        hit_count: requests that have inserted it, each counted once.
        created, last_access: logical times. The halves of a cut share `created`.
        history_pages: the deepest that anything under it has ever reached; kept for policy tlru alone.
        write_pending: a backup of it is queued or in flight: a split must tell the cache.
    """

    __slots__ = (
        "children",
        "created",
        "device",
        "device_children",
        "device_state",
        "digests",
        "end_page",
        "hashes",
        "history_pages",
        "hit_count",
        "host",
        "host_lock_count",
        "host_state",
        "id",
        "is_alive",
        "key",
        "last_access",
        "lock_count",
        "namespace",
        "only_child",
        "page_count",
        "parent",
        "priority",
        "write_pending",
    )

    def __init__(
        self,
        node_id: NodeId,
        parent: Node | None,
        key: bytes,
        page_count: int,
        *,
        digests: bytes = b"",
        hashes: bytes | None = None,
        namespace: bytes = PLAIN,
        priority: int = 0,
        now: float = 0.0,
    ) -> None:
        self.id = node_id
        self.parent = parent
        self.key = key
        self.page_count = page_count
        self.end_page: int = page_count if parent is None else parent.end_page + page_count
        self.namespace = namespace
        self.digests = digests
        self.hashes = hashes
        self.children: dict[bytes, Node] = {}
        # The child where there is exactly one: most lookups then need not hash a page. Never set at the
        # root, whose children may differ in namespace alone.
        self.only_child: Node | None = None
        # Children with device pages; a node with none of them is a leaf as the device sees it.
        self.device_children = 0
        self.device: list[Slot] | None = None
        self.host: list[Slot] | None = None
        self.device_state = False
        self.host_state: Slot | None = None
        self.lock_count = 0
        self.host_lock_count = 0
        self.hit_count = 0
        self.priority = priority
        self.created = now
        self.last_access = now
        self.history_pages = self.end_page
        self.write_pending = False
        self.is_alive = True

    @property
    def first_page(self) -> int:
        """Pages from the root to its beginning."""
        return self.end_page - self.page_count

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
