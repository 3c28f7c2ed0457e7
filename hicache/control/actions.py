"""What the tree asks its owner to do. The tree owns no slot and starts no copy; the cache applies these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hicache.control.node import Node
from hicache.core import Slot


@dataclass(frozen=True, slots=True)
class FreeDevice:
    """Give these device slots back: the tree already holds the same pages elsewhere."""

    slots: list[Slot]


@dataclass(frozen=True, slots=True)
class BackUp:
    """Copy these nodes to the host, root first; a node without its ancestors would be unreachable there.

    Attributes:
        nodes: each without the one after it is still worth a copy, so the first that finds no room ends it.
        reason: `threshold`: enough requests have inserted the last of them. `side_pool`: the one node is on
            the host already, and its recurrent state is not.
    """

    nodes: list[Node]
    reason: Literal["threshold", "side_pool"]


@dataclass(frozen=True, slots=True)
class SplitNotice:
    """`child` was cut and `parent` now holds its front, so transfers that carry `child` carry both."""

    parent: Node
    child: Node


Action = FreeDevice | BackUp | SplitNotice
