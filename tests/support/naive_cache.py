"""Prefix caches written to be obviously right: no heap, no locks. They share no code with the runtime.

Ids of the traces are chained: equal ids mean equal pages after equal prefixes.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


def read_trace(path: Path) -> Iterator[tuple[int, list[int]]]:
    """(input_length, hash_ids) a line."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield row["input_length"], row["hash_ids"]


def unlimited_hits(path: Path, page_size: int) -> list[int]:
    """Cached pages of each request when nothing is ever evicted."""
    seen: set[int] = set()
    found = []
    for input_length, ids in read_trace(path):
        usable = (input_length - 1) // page_size
        pages = 0
        while pages < usable and ids[pages] in seen:
            pages += 1
        found.append(pages)
        seen.update(ids[: input_length // page_size])
    return found


@dataclass(eq=False)
class _Node:
    pages: list[int]
    parent: _Node | None
    used: int = 0
    children: dict[int, _Node] = field(default_factory=dict)


class LeafNodeCache:
    """Nodes as a radix tree would cut them; whole leaves go, least recently used first.

    Nodes of the running request are pinned. A request takes a page for each begun block of its prompt,
    less its hit; when it ends, its whole pages stay and the partly filled one is free again. A node that is
    cut counts as used at that moment, its back as well as its front.
    """

    def __init__(self, page_count: int) -> None:
        self.free = page_count
        self.root = _Node([], None)
        self.nodes: list[_Node] = []
        self.clock = 0
        self.evictions = 0

    def request(self, input_length: int, ids: list[int], page_size: int) -> int:
        """Cached pages of this request."""
        usable = (input_length - 1) // page_size
        path, hit = self._walk(ids[:usable])
        needed = -(-input_length // page_size) - hit
        while self.free < needed:
            leaves = [node for node in self.nodes if not node.children and node not in path]
            victim = min(leaves, key=lambda node: node.used)
            self.evictions += 1
            self.nodes.remove(victim)
            assert victim.parent is not None
            del victim.parent.children[victim.pages[0]]
            self.free += len(victim.pages)
        whole = ids[: input_length // page_size]
        path, known = self._walk(whole)
        if known < len(whole):
            self._add(_Node(whole[known:], path[-1] if path else self.root, self._now()))
            self.free -= len(whole) - known
        return hit

    def _now(self) -> int:
        self.clock += 1
        return self.clock

    def _add(self, node: _Node) -> None:
        assert node.parent is not None
        node.parent.children[node.pages[0]] = node
        self.nodes.append(node)

    def _walk(self, ids: list[int]) -> tuple[list[_Node], int]:
        """The nodes that spell the longest known prefix, the last one cut where the prefix ends."""
        path: list[_Node] = []
        at = 0
        while at < len(ids):
            parent = path[-1] if path else self.root
            child = parent.children.get(ids[at])
            if child is None:
                break
            same = 0
            while same < len(child.pages) and at + same < len(ids) and child.pages[same] == ids[at + same]:
                same += 1
            if same < len(child.pages):
                front = _Node(child.pages[:same], parent, self._now())
                self._add(front)
                child.pages, child.parent, child.used = child.pages[same:], front, self._now()
                front.children[child.pages[0]] = child
                child = front
            path.append(child)
            at += same
        for node in path:
            node.used = self._now()
        return path, at


class LeafPageCache:
    """The same with single pages for leaves: what a cache without nodes would do."""

    def __init__(self, page_count: int) -> None:
        self.free = page_count
        self.used: dict[int, int] = {}
        self.parent: dict[int, int] = {}
        self.children: dict[int, int] = {}
        self.clock = 0

    def request(self, input_length: int, ids: list[int], page_size: int) -> int:
        self.clock += 1
        usable = (input_length - 1) // page_size
        hit = 0
        while hit < usable and ids[hit] in self.used:
            hit += 1
        pinned = set(ids[:hit])
        for page in pinned:
            self.used[page] = self.clock
        needed = -(-input_length // page_size) - hit
        if self.free < needed:
            leaves = sorted(
                (used, page)
                for page, used in self.used.items()
                if not self.children.get(page) and page not in pinned
            )
            while self.free < needed:
                _, victim = leaves.pop(0)
                parent = self.parent.pop(victim, None)
                del self.used[victim]
                self.free += 1
                if parent is not None:
                    self.children[parent] -= 1
                    if not self.children[parent] and parent not in pinned:
                        leaves.append((self.used[parent], parent))
                        leaves.sort()
        whole = ids[: input_length // page_size]
        for at, page in enumerate(whole):
            if page not in self.used:
                self.free -= 1
                if at:
                    self.parent[page] = whole[at - 1]
                    self.children[whole[at - 1]] = self.children.get(whole[at - 1], 0) + 1
            self.used[page] = self.clock
        return hit
