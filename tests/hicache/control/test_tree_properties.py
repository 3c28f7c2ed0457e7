"""The tree through long random lives, beside a plain dict of prefixes that always tells the truth.

A life is what a cache does to its tree: requests arrive, load back, insert in chunks, finish or are aborted;
backups are queued, published, acknowledged or cancelled; both tiers are evicted; pages come from storage;
storage is attached and detached; everything is flushed. After each operation the books must be those of the
dict; every now and then every node is taken apart and compared page by page.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from hicache.config import EvictionPolicy
from hicache.control import locks
from hicache.control.actions import Action, BackUp, FreeDevice, SplitNotice
from hicache.control.keys import namespace, pack
from hicache.control.locks import DeviceLock, HostLock
from hicache.control.node import Node
from hicache.control.tree import Insert, Match, Tree
from tests.support.dict_of_prefixes import DictOfPrefixes, Inserted, Page, Prefix
from tests.support.naive_cache import LeafNodeCache

PAGE_TOKENS = 4
PAGE_BYTES = 4 * PAGE_TOKENS
NAMESPACES = {"": b"", "a": namespace("a", ""), "salted": namespace("", "a")}
POLICIES: tuple[EvictionPolicy, ...] = ("lru", "lfu", "fifo", "filo", "mru", "priority", "slru", "tlru")
# Name, backup threshold, is a node on the host only with its parent?, recurrent state.
VARIANTS = (
    ("write_through", 1, True, False),
    ("write_through, states", 1, True, True),
    ("write_through_selective", 2, True, False),
    ("write_back", 0, False, False),
    ("write_back, states", 0, False, True),
    ("no host tier", 0, True, False),
)
OPERATIONS_A_LIFE = 2_100
PAGES_CROWDED = 70


def tokens_of(prefix: Prefix) -> bytes:
    return b"".join(pack([int(str(page))] * PAGE_TOKENS) for page in prefix[1:])


def digests_of(prefix: Prefix, first_page: int = 0) -> bytes:
    """Any names will do that tell prefixes apart."""
    ends = range(first_page + 2, len(prefix) + 1)
    return b"".join(hashlib.md5(repr(prefix[:end]).encode()).digest()[:8] for end in ends)


def hashes_of(prefix: Prefix, first_page: int = 0) -> bytes:
    """The chain of the specification, from its first page on."""
    found = []
    last = NAMESPACES[str(prefix[0])]
    for page in prefix[1:]:
        last = hashlib.sha256(last + tokens_of(("", page))).digest()
        found.append(last)
    return b"".join(found[first_page:])


@dataclass
class Live:
    """A request between its match and its end."""

    prefix: Prefix
    prompt_pages: int
    priority: int
    slots: list[int]
    lock: DeviceLock
    locked: Prefix
    owned: int
    counted: int = 0


@dataclass
class Backup:
    """Nodes that are to be copied, under a lock on the last of them."""

    lock: DeviceLock
    end: Prefix
    nodes: list[Node]
    pages: list[Prefix]
    is_published: bool = False


@dataclass
class Load:
    lock: DeviceLock
    end: Prefix
    nodes: list[Node]
    host_locks: list[tuple[HostLock, list[Prefix]]]


@dataclass
class Life:
    seed: int
    lives: list[Live] = field(default_factory=list)
    backups: list[Backup] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    anchors: list[tuple[HostLock, list[Prefix]]] = field(default_factory=list)
    next_slot: int = 0
    is_storage_on: bool = True

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        policy = POLICIES[self.seed % len(POLICIES)]
        name, threshold, requires_parent, has_state = VARIANTS[self.seed // len(POLICIES) % len(VARIANTS)]
        self.name = f"seed {self.seed} ({policy}, {name})"
        self.has_host = name != "no host tier"
        self.tree = Tree(
            PAGE_BYTES,
            backup_threshold=threshold,
            eviction_policy=policy,
            has_state=has_state,
            requires_backed_parent=requires_parent,
        )
        self.truth = DictOfPrefixes(
            policy, threshold=threshold, has_state=has_state, requires_backed_parent=requires_parent
        )

    # Helpers

    def take(self, count: int) -> list[int]:
        self.next_slot += count
        return list(range(self.next_slot - count, self.next_slot))

    def some_prefix(self) -> Prefix:
        """Often one that continues what is known."""
        space = self.chance.choice(list(NAMESPACES))
        start: Prefix = (space,)
        if self.truth.pages and self.chance.random() < 0.6:
            known = self.chance.choice(list(self.truth.pages))
            start = known[: self.chance.randint(1, len(known))]
        more = tuple(self.chance.randrange(3) for _ in range(self.chance.randint(0, 4)))
        return (start + more)[:9]

    def pages(self, prefixes: list[Prefix]) -> list[Page]:
        return [self.truth.pages[each] for each in prefixes]

    def prefix_of(self, node: Node) -> Prefix:
        path = self.tree.path(node)
        spaces = {value: key for key, value in NAMESPACES.items()}
        found: list[object] = [spaces[path[0].namespace] if path else ""]
        for step in path:
            assert step.namespace == path[0].namespace
            for at in range(0, len(step.key), PAGE_BYTES):
                page = int.from_bytes(step.key[at : at + 4], "little")
                assert step.key[at : at + PAGE_BYTES] == pack([page] * PAGE_TOKENS)
                found.append(page)
        return tuple(found)  # type: ignore[arg-type]

    def is_at(self, node: Node, prefix: Prefix) -> bool:
        return node is self.tree.root if len(prefix) == 1 else self.prefix_of(node) == prefix

    def node_at(self, end: Prefix) -> Node:
        found = self.tree.root
        for node in self.tree.walk():
            if self.prefix_of(node) == end:
                found = node
        return found

    def lock(self, node: Node, end: Prefix) -> DeviceLock:
        for page in self.pages(self.truth.prefixes(end)):
            page.locks += 1
        return locks.lock(self.tree, node)

    def unlock(self, receipt: DeviceLock, end: Prefix) -> None:
        for page in self.pages(self.truth.prefixes(end)):
            page.locks -= 1
        locks.unlock(self.tree, receipt)

    def lock_host(self, node: Node, end: Prefix) -> tuple[HostLock, list[Prefix]]:
        held = self.truth.node(end) if len(end) > 1 else []
        for page in self.pages(held):
            page.host_locks += 1
        return locks.lock_host(self.tree, node), held

    def unlock_host(self, lock: tuple[HostLock, list[Prefix]]) -> None:
        receipt, held = lock
        for page in self.pages(held):
            page.host_locks -= 1
        locks.unlock_host(self.tree, receipt)

    # Requests

    def arrive(self) -> None:
        prefix = self.some_prefix()
        limit = self.chance.randint(0, len(prefix) - 1)
        match = self.check_match(prefix, limit)
        if len(self.lives) > 5:
            return
        node, end = match.device_node, self.prefix_of(match.device_node)
        if match.host_pages and self.chance.random() < 0.6:
            node, end = match.node, self.prefix_of(match.node)
            self.load_back(match, end)
        receipt = self.lock(node, end if node is not self.tree.root else prefix[:1])
        self.lives.append(
            Live(
                prefix,
                self.chance.randint(0, len(prefix) - 1),
                self.chance.choice([-1, 0, 0, 0, 2]),
                self.tree.device_slots(node),
                receipt,
                prefix[: node.end_page + 1],
                node.end_page,
            )
        )

    def check_match(self, prefix: Prefix, limit: int) -> Match:
        found = self.truth.match(prefix[: limit + 1])
        match = self.tree.match(tokens_of(prefix), limit, NAMESPACES[str(prefix[0])])
        self.apply_splits(match.actions)
        assert self.is_at(match.node, found.usable)
        assert self.is_at(match.device_node, found.on_device)
        assert match.device_pages == len(found.on_device) - 1
        assert match.host_pages == len(found.usable) - len(found.on_device)
        assert match.kv_pages == len(found.known) - 1
        slots = [page.device for page in self.pages(self.truth.prefixes(found.on_device))]
        assert self.tree.device_slots(match.device_node) == slots
        return match

    def load_back(self, match: Match, end: Prefix) -> None:
        nodes = [node for node in self.tree.path(match.node) if node.device is None]
        held = [self.lock_host(node, self.prefix_of(node)) for node in nodes]
        for node in nodes:
            slots = self.take(node.page_count)
            self.tree.set_device(node, slots)
            for page, slot in zip(self.pages(self.truth.node(self.prefix_of(node))), slots, strict=True):
                page.device = slot
        for node in [*nodes, match.node]:
            node.device_state = node.device_state or node.host_state is not None
            self.truth.pages[self.prefix_of(node)].device_state = node.device_state
        self.loads.append(Load(self.lock(match.node, end), end, nodes, held))

    def end_load(self) -> None:
        if self.loads:
            load = self.loads.pop(0)
            for held in load.host_locks:
                self.unlock_host(held)
            self.unlock(load.lock, load.end)

    def chunk(self) -> None:
        if self.lives:
            live = self.chance.choice(self.lives)
            self.insert(live, self.chance.randint(live.owned, len(live.prefix) - 1), 0)

    def finish(self) -> None:
        if self.lives:
            live = self.lives.pop(self.chance.randrange(len(self.lives)))
            self.insert(live, len(live.prefix) - 1, live.prompt_pages)
            self.unlock(live.lock, live.locked)

    def abort(self) -> None:
        if self.lives:
            live = self.lives.pop(self.chance.randrange(len(self.lives)))
            self.unlock(live.lock, live.locked)

    def insert(self, live: Live, page_count: int, prompt_pages: int) -> None:
        prefix = live.prefix[: page_count + 1]
        live.slots += self.take(page_count - len(live.slots))
        expected = self.truth.insert(
            prefix,
            live.slots[:page_count],
            owned_pages=live.owned,
            counted_pages=live.counted,
            priority=live.priority,
            prompt_pages=prompt_pages,
        )
        done = self.tree.insert(
            tokens_of(live.prefix),
            live.slots[:page_count],
            digests_of(live.prefix),
            owned_pages=live.owned,
            counted_pages=live.counted,
            namespace=NAMESPACES[str(prefix[0])],
            priority=live.priority,
            prompt_pages=prompt_pages,
            hashes=hashes_of(live.prefix) if self.is_storage_on else b"",
        )
        freed: list[int] = []
        asked: list[BackUp] = []
        while not done.is_finished:
            assert isinstance(done.actions[-1], BackUp), "an insert stops for nothing but a backup"
            self.apply(done.actions, freed, asked)
            done = self.tree.resume()
        state_backups = sum(isinstance(each, BackUp) and each.reason == "side_pool" for each in done.actions)
        assert state_backups == self.truth.is_state_backup_due(prefix, expected)
        self.apply(done.actions, freed, asked)
        self.check_insert(prefix, expected, done, freed, asked)
        receipt = self.lock(done.node, prefix)
        self.unlock(live.lock, live.locked)
        live.lock, live.locked = receipt, prefix
        live.slots[:page_count] = self.tree.device_slots(done.node)
        live.owned = live.counted = page_count

    def check_insert(
        self, prefix: Prefix, expected: Inserted, done: Insert, freed: list[int], asked: list[BackUp]
    ) -> None:
        assert self.is_at(done.node, prefix)
        assert done.new_pages == len(expected.new) + len(expected.unevicted)
        assert done.unevicted_pages == len(expected.unevicted)
        assert freed == expected.duplicates
        assert done.duplicate_pages == len(freed)
        assert done.nodes_counted == expected.ends_counted
        first_new = len(prefix) - 1 - len(expected.new)
        assert done.new_digests == digests_of(prefix, first_new)
        targets = [self.prefix_of(action.nodes[-1]) for action in asked if action.reason == "threshold"]
        assert targets == expected.backups

    # Backups

    def apply(self, actions: list[Action], freed: list[int], asked: list[BackUp]) -> None:
        for action in actions:
            if isinstance(action, FreeDevice):
                freed += action.slots
            elif isinstance(action, BackUp):
                self.back_up(action)
                asked.append(action)
            else:
                self.follow(action)

    def apply_splits(self, actions: list[Action]) -> None:
        for action in actions:
            assert isinstance(action, SplitNotice)
            self.follow(action)

    def follow(self, notice: SplitNotice) -> None:
        assert notice.child.parent is notice.parent
        for carrier in (*self.backups, *self.loads):
            if notice.child in carrier.nodes:
                carrier.nodes.insert(carrier.nodes.index(notice.child), notice.parent)

    def back_up(self, action: BackUp) -> None:
        end = self.prefix_of(action.nodes[-1])
        ends = [self.prefix_of(node) for node in action.nodes]
        if action.reason == "threshold":
            assert ends == self.truth.backup_chain(end)
        else:
            assert ends == [end]
            page = self.truth.pages[end]
            assert page.host is not None and page.device_state and page.host_state is None
        for node, each in zip(action.nodes, ends, strict=True):
            if self.chance.random() < 0.2:
                # No room. Room for a later one may be made from what only the host has.
                self.evict_host()
                return
            held = self.truth.node(each)
            for page in self.pages(held):
                page.is_pending = True
            node.write_pending = True
            self.backups.append(Backup(self.lock(node, each), each, [node], held))
            if self.chance.random() < 0.5:
                self.publish()

    def publish(self) -> None:
        """The oldest backup that has no host pages yet gets them."""
        for backup in self.backups:
            if not backup.is_published:
                for node in backup.nodes:
                    if node.host is None:
                        self.give_host(node, with_state=node is backup.nodes[-1])
                    elif node is backup.nodes[-1]:
                        self.give_host_state(node)
                backup.is_published = True
                return

    def give_host(self, node: Node, *, with_state: bool) -> None:
        slots = self.take(node.page_count)
        (state,) = self.take(1)
        has_state = with_state and node.device_state
        self.tree.set_host(node, slots, state if has_state else None)
        held = self.pages(self.truth.node(self.prefix_of(node)))
        for page, slot in zip(held, slots, strict=True):
            page.host = slot
        if has_state:
            held[-1].host_state = state

    def give_host_state(self, node: Node) -> None:
        if node.device_state and node.host_state is None:
            (state,) = self.take(1)
            self.tree.set_host_state(node, state)
            self.truth.pages[self.prefix_of(node)].host_state = state

    def acknowledge(self) -> None:
        if self.backups and self.backups[0].is_published:
            self.end_backup(self.backups.pop(0))

    def end_backup(self, backup: Backup) -> None:
        assert [
            each for node in backup.nodes for each in self.truth.node(self.prefix_of(node))
        ] == backup.pages
        for node in backup.nodes:
            assert node.write_pending
            node.write_pending = False
        for page in self.pages(backup.pages):
            page.is_pending = False
        self.unlock(backup.lock, backup.end)

    def cancel_backups(self) -> None:
        while self.backups and not self.backups[-1].is_published:
            self.end_backup(self.backups.pop())

    # Eviction

    def evict_device(self) -> None:
        expected = self.truth.next_to_go(self.truth.device_leaves())
        node = self.tree.device_leaves.pop()
        if expected is None or node is None:
            assert (expected, node) == (None, None)
            return
        assert self.prefix_of(node) == expected
        held = self.truth.node(expected)
        if node.host is None and not self.truth.requires_backed_parent:
            if self.chance.random() < 0.4:
                self.drop_subtree(node, expected)
                return
            self.give_host(node, with_state=True)
        slots = [page.device for page in self.pages(held)]
        assert self.tree.clear_device(node) == slots
        for page in self.pages(held):
            page.device = None
            page.device_state = False
        if node.host is None:
            self.tree.remove(node)
            self.truth.forget(held)

    def drop_subtree(self, node: Node, end: Prefix) -> None:
        held = self.truth.node(end)
        below = [each for each in self.truth.pages if each[: len(end)] == end]
        whole = self.pages(held + below)
        gone = self.tree.drop_subtree(node)
        if any(page.locks or page.host_locks or page.is_pending for page in whole):
            assert gone is None
            self.tree.device_leaves.offer(node)
            return
        assert gone is not None and gone[-1] is node
        seen: set[int] = set()
        for each in gone:
            assert all(child.id in seen for child in each.children.values()), "children first"
            seen.add(each.id)
            assert each is node or each.device is None
        slots = sorted(slot for each in gone for slot in [*(each.device or []), *(each.host or [])])
        assert slots == sorted(
            slot
            for page in self.pages(list(dict.fromkeys(held + below)))
            for slot in (page.device, page.host)
            if slot is not None
        )
        self.truth.forget(list(dict.fromkeys(held + below)))

    def evict_host(self) -> None:
        expected = self.truth.next_to_go(self.truth.host_leaves())
        node = self.tree.host_leaves.pop()
        if expected is None or node is None:
            assert (expected, node) == (None, None)
            return
        assert self.prefix_of(node) == expected
        held = self.truth.node(expected)
        pages = self.pages(held)
        assert self.tree.clear_host(node) == ([page.host for page in pages], pages[-1].host_state)
        self.tree.remove(node)
        self.truth.forget(held)

    def reclaim(self) -> None:
        """Under write_back the host gives up what the device has too."""
        if self.truth.requires_backed_parent or not self.truth.pages:
            return
        end = self.chance.choice(self.truth.ends())
        page = self.truth.pages[end]
        if page.host is None or page.device is None or page.host_locks or page.is_pending:
            return
        self.tree.clear_host(self.node_at(end))
        for page in self.pages(self.truth.node(end)):
            page.host = page.host_state = None

    # Storage

    def fetch(self) -> None:
        """Pages from storage, below any node or none."""
        if not self.has_host or not self.is_storage_on:
            return
        end: Prefix = (self.chance.choice(list(NAMESPACES)),)
        if self.truth.pages and self.chance.random() < 0.8:
            end = self.chance.choice(self.truth.ends())
        anchor = self.node_at(end)
        prefix = self.some_prefix()
        prefix = end + prefix[len(end) :]
        if self.chance.random() < 0.5:
            longer = [each for each in self.truth.pages if each[: len(end)] == end]
            prefix = max(longer, key=len, default=prefix)
        slots = self.take(len(prefix) - len(end))
        assert self.tree.can_anchor(anchor) == self.truth.can_anchor(end)
        expected = self.truth.host_insert(end, prefix, slots)
        first = len(end) - 1
        done = self.tree.host_insert(
            anchor,
            tokens_of(prefix)[first * PAGE_BYTES :],
            slots,
            digests_of(prefix, first),
            hashes_of(prefix, first),
            namespace=NAMESPACES[str(prefix[0])] if len(end) == 1 else b"heeded at the root alone",
        )
        self.apply_splits(done.actions)
        assert (done.matched_pages, done.loaded_pages) == (len(expected.matched), len(expected.loaded))
        assert (done.duplicate_slots, done.dropped_slots) == (expected.matched, expected.dropped)
        new_pages = len(expected.new)
        assert done.new_digests == (digests_of(prefix, len(prefix) - 1 - new_pages) if new_pages else b"")
        dropped = bool(slots) and not self.truth.can_anchor(end) and self.truth.requires_backed_parent
        assert (done.outcome == "dropped") == dropped or not slots
        assert (done.outcome == "loaded") == bool(expected.loaded)
        assert self.is_at(done.node, end if expected.dropped or not slots else prefix)
        is_free = done.node.host is not None and done.node.host_state is None
        if self.truth.has_state and is_free and not done.dropped_slots and self.chance.random() < 0.5:
            (state,) = self.take(1)
            self.tree.set_host_state(done.node, state)
            self.truth.pages[self.prefix_of(done.node)].host_state = state

    def anchor(self) -> None:
        if not self.truth.pages or len(self.anchors) > 4:
            return
        end = self.chance.choice([*self.truth.ends(), ("",)])
        if self.truth.can_anchor(end) or not self.truth.requires_backed_parent:
            self.anchors.append(self.lock_host(self.node_at(end), end))

    def weigh_anchor(self) -> None:
        if self.anchors:
            self.unlock_host(self.anchors.pop(self.chance.randrange(len(self.anchors))))

    def toggle_storage(self) -> None:
        if self.is_storage_on:
            assert self.tree.backfill_hashes() == 0
            self.is_storage_on = False
            return
        unnamed = sum(node.hashes is None for node in self.tree.walk())
        assert self.tree.backfill_hashes() == unnamed
        self.is_storage_on = True

    # The end

    def let_go(self) -> None:
        """Everything that holds anything lets go of it."""
        while self.loads:
            self.end_load()
        while self.backups:
            self.publish()
            self.acknowledge()
        while self.lives:
            self.abort()
        while self.anchors:
            self.weigh_anchor()

    def flush(self) -> None:
        self.let_go()
        created = self.tree.nodes_created
        self.tree.reset()
        self.truth.pages.clear()
        self.truth.root_priority = -(2**63)
        assert self.tree.nodes_created == created
        self.check_all()

    def wind_up(self) -> None:
        """With nothing held, eviction empties the tree."""
        self.let_go()
        while self.truth.device_leaves():
            self.evict_device()
        while self.truth.host_leaves():
            self.evict_host()
        assert not self.truth.pages
        assert not self.tree.root.children
        self.check_books()

    # Books

    def check_books(self) -> None:
        tree, truth = self.tree, self.truth
        assert tree.evictable_pages == truth.evictable_pages()
        assert tree.protected_pages == truth.protected_pages()
        assert tree.host_pages == truth.host_pages()
        assert tree.states_host == truth.states_host()

    def check_all(self) -> None:
        self.check_books()
        seen: set[Prefix] = set()
        ids: set[int] = set()
        for node in self.tree.walk():
            end = self.prefix_of(node)
            held = self.truth.node(end)
            assert len(held) == node.page_count == len(node.key) // PAGE_BYTES
            assert node.end_page == len(end) - 1
            seen.update(held)
            assert node.id not in ids and node.id < self.tree.nodes_created and node.is_alive
            ids.add(node.id)
            self.check_places(node, self.pages(held))
            self.check_family(node)
            assert node.digests == digests_of(end, node.first_page)
            assert node.hashes is None or node.hashes == hashes_of(end, node.first_page)
            assert node.hashes is not None or not self.is_storage_on
        assert seen == set(self.truth.pages)
        assert sum(page.is_end for page in self.truth.pages.values()) == len(ids)
        device_leaves = [node for node in self.tree.walk() if node.is_device_leaf]
        assert {self.prefix_of(node) for node in device_leaves} == set(self.truth.device_leaves())
        assert all(node in self.tree.device_leaves for node in device_leaves), "else it is never evicted"
        host_leaves = [node for node in self.tree.walk() if node.is_host_leaf]
        assert {self.prefix_of(node) for node in host_leaves} == set(self.truth.host_leaves())
        assert all(node in self.tree.host_leaves for node in host_leaves), "else it never leaves the host"

    def check_places(self, node: Node, pages: list[Page]) -> None:
        for page, slot in zip(pages, node.device or [None] * len(pages), strict=True):
            assert page.device == slot
        for page, slot in zip(pages, node.host or [None] * len(pages), strict=True):
            assert page.host == slot
        for page in pages:
            assert (page.hits, page.priority) == (node.hit_count, node.priority)
            assert (page.locks, page.host_locks) == (node.lock_count, node.host_lock_count)
            assert page.is_pending == node.write_pending
        assert (pages[-1].device_state, pages[-1].host_state) == (node.device_state, node.host_state)

    def check_family(self, node: Node) -> None:
        tree, parent = self.tree, node.parent
        assert parent is not None
        first = node.key[:PAGE_BYTES]
        assert parent.children[node.namespace + first if parent is tree.root else first] is node
        children = list(node.children.values())
        assert node.only_child is (children[0] if len(children) == 1 else None)
        assert node.device_children == sum(child.device is not None for child in children)
        assert node.device is not None or node.host is not None
        assert node.device is None or parent.device is not None
        assert node.host is None or tree.can_anchor(parent) or not tree.requires_backed_parent
        assert tree.root.only_child is None

    def live(self, operations: int) -> None:
        choices: list[tuple[Callable[[], None], int]] = [
            (self.arrive, 22),
            (self.chunk, 12),
            (self.finish, 12),
            (self.abort, 3),
            (self.end_load, 6),
            (self.publish, 6),
            (self.acknowledge, 8),
            (self.cancel_backups, 1),
            (self.evict_device, 10),
            (self.evict_host, 5),
            (self.reclaim, 2),
            (self.fetch, 8),
            (self.anchor, 4),
            (self.weigh_anchor, 4),
            (self.toggle_storage, 1),
        ]
        weights = [weight for _, weight in choices]
        for step in range(operations):
            crowded = len(self.truth.pages) > PAGES_CROWDED
            (operation,) = self.chance.choices([each for each, _ in choices], weights)
            if crowded and self.chance.random() < 0.5:
                operation = self.chance.choice([self.evict_device, self.evict_host, self.finish])
            if step % 997 == 996:
                operation = self.flush
            try:
                operation()
                self.check_books()
                if step % 50 == 49:
                    self.check_all()
            except AssertionError as error:
                raise AssertionError(f"{self.name}, step {step}, {operation.__name__}: {error}") from error
        self.wind_up()


@pytest.mark.parametrize("variant", range(len(VARIANTS)), ids=[name for name, *_ in VARIANTS])
def test_the_tree_agrees_with_a_dict_of_prefixes(variant: int) -> None:
    """100,800 operations over all variants and policies."""
    for seed in range(variant * len(POLICIES), (variant + 1) * len(POLICIES)):
        Life(seed).live(OPERATIONS_A_LIFE)


@pytest.mark.parametrize("seed", range(6))
def test_hits_under_eviction_are_those_of_a_naive_cache_of_nodes(seed: int) -> None:
    """One request after the other, each with its prompt's whole pages on the device when it ends."""
    chance = random.Random(seed)
    page_count = chance.randint(20, 60)
    tree = Tree(PAGE_BYTES, backup_threshold=0)
    naive = LeafNodeCache(page_count)
    free = page_count
    for step in range(1_000):
        pages = [chance.randrange(3) for _ in range(chance.randint(1, 9))]
        length = PAGE_TOKENS * len(pages) - chance.randrange(PAGE_TOKENS)
        whole = length // PAGE_TOKENS
        # Equal ids after equal prefixes, as in the traces.
        ids = [int("1" + "".join(map(str, pages[: end + 1]))) for end in range(len(pages))]
        expected = naive.request(length, ids, PAGE_TOKENS)
        text = tokens_of(("", *pages))
        match = tree.match(text, (length - 1) // PAGE_TOKENS)
        assert match.device_pages == expected, f"seed {seed}, step {step}"
        receipt = locks.lock(tree, match.node)
        needed = len(pages) - match.device_pages
        while free < needed:
            node = tree.device_leaves.pop()
            assert node is not None
            free += len(tree.clear_device(node))
            tree.remove(node)
        slots = [0] * whole
        done = tree.insert(text, slots, bytes(8 * whole), owned_pages=match.device_pages, counted_pages=0)
        free -= done.new_pages
        locks.unlock(tree, receipt)
        assert free == naive.free, f"seed {seed}, step {step}"
