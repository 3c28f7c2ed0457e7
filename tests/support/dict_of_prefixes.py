"""A prefix cache as one plain dict: prefix -> what is known of its last page. No code of the tree is used.

A prefix is a tuple: its namespace, then its pages. There are no nodes, only pages that say whether a node
ends with them; all else (who is whose parent, what a leaf is, how much can be evicted) is looked for in the
whole dict each time it is asked. Slow, and right for reasons that can be seen.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

Prefix = tuple[Hashable, ...]


@dataclass(eq=False)
class Page:
    """One page after one prefix."""

    device: int | None = None
    host: int | None = None
    is_end: bool = False
    hits: int = 0
    priority: int = 0
    created: int = 0
    used: int = 0
    locks: int = 0
    host_locks: int = 0
    is_pending: bool = False
    device_state: bool = False
    host_state: int | None = None


@dataclass(frozen=True)
class Found:
    """A match: the prefixes that can be used at once, with copies, and were there at all."""

    on_device: Prefix
    usable: Prefix
    known: Prefix


@dataclass(frozen=True)
class Inserted:
    """An insert; `backups` are the prefixes for which a backup is due, were none of them carried out."""

    new: list[Prefix]
    unevicted: list[Prefix]
    duplicates: list[int]
    ends_counted: int
    backups: list[Prefix]


@dataclass(frozen=True)
class HostInserted:
    matched: list[int]
    loaded: list[int]
    dropped: list[int]
    new: list[Prefix]


class DictOfPrefixes:
    """The rules of the tree, page by page."""

    def __init__(self, policy: str, *, threshold: int, has_state: bool, requires_backed_parent: bool) -> None:
        self.policy = policy
        self.threshold = threshold
        self.has_state = has_state
        self.requires_backed_parent = requires_backed_parent
        self.pages: dict[Prefix, Page] = {}
        self.root_priority = -(2**63)
        self.clock = 0

    def now(self) -> int:
        self.clock += 1
        return self.clock

    # Who is where

    def prefixes(self, prefix: Prefix) -> list[Prefix]:
        """All that it begins with and has at least one page, itself included, the shortest first."""
        return [prefix[:length] for length in range(2, len(prefix) + 1)]

    def longer(self, prefix: Prefix) -> Iterator[Prefix]:
        """Prefixes of exactly one page more."""
        for other in self.pages:
            if len(other) == len(prefix) + 1 and other[:-1] == prefix:
                yield other

    def longest_known(self, prefix: Prefix) -> Prefix:
        known = [each for each in self.prefixes(prefix) if each in self.pages]
        return known[-1] if known else prefix[:1]

    def ends(self) -> list[Prefix]:
        return [prefix for prefix, page in self.pages.items() if page.is_end]

    def ends_on(self, prefix: Prefix) -> list[Prefix]:
        """The nodes on its path, by their ends."""
        return [each for each in self.prefixes(prefix) if self.pages[each].is_end]

    def node(self, end: Prefix) -> list[Prefix]:
        """The pages of the node that ends there."""
        assert self.pages[end].is_end
        found = [end]
        while len(found[0]) > 2 and not self.pages[found[0][:-1]].is_end:
            found.insert(0, found[0][:-1])
        return found

    def cut(self, prefix: Prefix) -> None:
        """A node ends here from now on; what was one node has just been used."""
        if len(prefix) == 1 or self.pages[prefix].is_end:
            return
        end = prefix
        while not self.pages[end].is_end:
            (end,) = self.longer(end)
        now = self.now()
        for each in self.node(end):
            self.pages[each].used = now
        self.pages[prefix].is_end = True

    def touch(self, prefixes: list[Prefix]) -> None:
        now = self.now()
        for each in prefixes:
            self.pages[each].used = now

    # Lookup and growth

    def match(self, prefix: Prefix) -> Found:
        known = self.longest_known(prefix)
        self.cut(known)
        usable = known
        while self.has_state and len(usable) > 1 and not self._has_any_state(usable):
            usable = usable[:-1]
        on_device = usable
        while len(on_device) > 1 and not self._is_on_device(on_device):
            on_device = on_device[:-1]
        self.touch(self.prefixes(usable))
        return Found(on_device, usable, known)

    def _has_any_state(self, prefix: Prefix) -> bool:
        return self.pages[prefix].device_state or self.pages[prefix].host_state is not None

    def _is_on_device(self, prefix: Prefix) -> bool:
        page = self.pages[prefix]
        return page.device is not None and (page.device_state or not self.has_state)

    def insert(
        self,
        prefix: Prefix,
        slots: list[int],
        *,
        owned_pages: int,
        counted_pages: int,
        priority: int,
        prompt_pages: int,
    ) -> Inserted:
        page_count = len(prefix) - 1
        prompt = prompt_pages if 0 < prompt_pages < page_count and not self.has_state else 0
        known = self.longest_known(prefix)
        if prompt and prompt < len(known):
            self.cut(prefix[: prompt + 1])
        self.cut(known)
        now = self.now()
        new = [each for each in self.prefixes(prefix) if each not in self.pages]
        for each in new:
            self.pages[each] = Page(created=now, priority=priority)
        if new:
            self.pages[prefix].is_end = True
            if prompt and len(new[0]) <= prompt + 1:
                self.pages[prefix[: prompt + 1]].is_end = True
        unevicted: list[Prefix] = []
        duplicates: list[int] = []
        self.root_priority = max(self.root_priority, priority + bool(prompt))
        for position, (each, slot) in enumerate(zip(self.prefixes(prefix), slots, strict=True)):
            page = self.pages[each]
            page.used = now
            page.priority = max(page.priority, priority + (position < prompt))
            if page.device is None:
                page.device = slot
                if each not in new:
                    unevicted.append(each)
            elif position >= owned_pages:
                duplicates.append(slot)
        if self.has_state and page_count:
            self.pages[prefix].device_state = True
        counted = [end for end in self.ends_on(prefix) if len(end) - 1 > counted_pages]
        if not self.requires_backed_parent:
            counted = []
        for end in counted:
            for each in self.node(end):
                self.pages[each].hits += 1
        due = [end for end in counted if self._is_backup_due(end)]
        # Two new nodes are one backup.
        backups = [end for end in due if end not in new or end == prefix]
        return Inserted(new, unevicted, duplicates, len(counted), backups)

    def _is_backup_due(self, end: Prefix) -> bool:
        page = self.pages[end]
        is_missing = page.host is None and not page.is_pending
        return is_missing and 0 < self.threshold <= page.hits

    def is_state_backup_due(self, prefix: Prefix, inserted: Inserted) -> bool:
        """Has the end of an insert everything on the host but its state? To be asked when it has ended."""
        if len(prefix) == 1 or inserted.new or not self.threshold:
            return False
        page = self.pages[prefix]
        is_missing = page.device_state and page.host_state is None
        return is_missing and page.host is not None and not page.is_pending

    def backup_chain(self, end: Prefix) -> list[Prefix]:
        """Ends of the nodes that have to be copied for this one to be of use on the host."""
        return [
            each
            for each in self.ends_on(end)
            if self.pages[each].host is None and not self.pages[each].is_pending
        ]

    def can_anchor(self, end: Prefix) -> bool:
        return len(end) == 1 or self.pages[end].host is not None

    def host_insert(self, anchor: Prefix, prefix: Prefix, slots: list[int]) -> HostInserted:
        """`prefix` begins with `anchor`, and `slots` are for the pages behind it."""
        if self.requires_backed_parent and not self.can_anchor(anchor):
            return HostInserted([], [], slots, [])
        if len(anchor) > 1:
            self.touch(self.node(anchor))
        known = self.longest_known(prefix)
        if known != anchor:
            self.cut(known)
        matched: list[int] = []
        loaded: list[int] = []
        new: list[Prefix] = []
        now = self.now()
        for each, slot in zip(self.prefixes(prefix)[len(anchor) - 1 :], slots, strict=True):
            if each not in self.pages:
                priority = self.pages[each[:-1]].priority if len(each) > 2 else self.root_priority
                self.pages[each] = Page(host=slot, created=now, priority=priority)
                new.append(each)
                loaded.append(slot)
            elif self.pages[each].host is None and self.requires_backed_parent:
                self.pages[each].host = slot
                loaded.append(slot)
            else:
                matched.append(slot)
            self.pages[each].used = now
        if new:
            self.pages[prefix].is_end = True
        return HostInserted(matched, loaded, [], new)

    # Residency

    def forget(self, prefixes: list[Prefix]) -> None:
        for each in prefixes:
            del self.pages[each]

    def device_leaves(self) -> list[Prefix]:
        return [
            end
            for end in self.ends()
            if self.pages[end].device is not None
            and not self.pages[end].locks
            and all(self.pages[each].device is None for each in self.longer(end))
        ]

    def host_leaves(self) -> list[Prefix]:
        found = []
        for end in self.ends():
            page = self.pages[end]
            is_free = not page.locks and not page.host_locks
            if page.host is not None and page.device is None and is_free and not any(self.longer(end)):
                found.append(end)
        return found

    def next_to_go(self, leaves: list[Prefix]) -> Prefix | None:
        return min(leaves, key=self._order, default=None)

    def _order(self, end: Prefix) -> tuple[float, ...]:
        page = self.pages[end]
        if self.policy == "mru":
            return (-page.used,)
        first = {
            "lru": 0,
            "tlru": 0,
            "lfu": page.hits,
            "fifo": page.created,
            "filo": -page.created,
            "priority": page.priority,
            "slru": int(page.hits >= 2),
        }[self.policy]
        return (first, page.used)

    # Books

    def evictable_pages(self) -> int:
        return sum(page.device is not None and not page.locks for page in self.pages.values())

    def protected_pages(self) -> int:
        return sum(page.device is not None and page.locks > 0 for page in self.pages.values())

    def host_pages(self) -> int:
        return sum(page.host is not None for page in self.pages.values())

    def states_host(self) -> int:
        return sum(page.host_state is not None for page in self.pages.values())
