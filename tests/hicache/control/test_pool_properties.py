"""Pools, locks and queues beside their equations, over random operations on one cache.

After every few operations each count is derived again from who holds what; nothing here asks the code under
test for a sum.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from hicache.config import StorageConfig
from hicache.control.active import Active
from hicache.control.pools import Room, SlotMemory
from hicache.control.queues import Hit, Prefetch, Progress
from hicache.core import SIDE_POOLS
from tests.support.bench import PAGE_TOKENS, Bench, EagerEngine, run

OPERATIONS = 4_000
CHECK_EVERY = 20


class Play:
    """Random operations on a bench; the lanes and the other ranks are played by chance."""

    def __init__(self, seed: int, write_policy: str, *, with_states: bool) -> None:
        self.chance = random.Random(f"pools/{write_policy}/{with_states}/{seed}")
        self.bench = Bench(
            device_pages=24,
            host_pages=18,
            write_policy=write_policy,  # type: ignore[arg-type]
            storage=StorageConfig(
                "memory", prefetch_threshold_tokens=PAGE_TOKENS, prefetch_policy="best_effort"
            ),
            pools=[SIDE_POOLS["mamba"]] if with_states else (),
            state_slots=6 if with_states else 0,
            engine=EagerEngine(),
        )
        self.running: list[Active] = []
        self.waiting: list[Active] = []
        self.reading: list[tuple[Prefetch, int]] = []
        self.operations = 0

    def prompt(self) -> list[int]:
        """Pages with many prefixes in common."""
        family = self.chance.randrange(3)
        return [
            family * 10 + min(depth, self.chance.randrange(4) + depth)
            for depth in range(self.chance.randint(1, 7))
        ]

    def step(self) -> None:
        self.operations += 1
        self.chance.choice(
            (
                self.admit,
                self.admit,
                self.end,
                self.write,
                self.acknowledge,
                self.load,
                self.ask,
                self.answer,
                self.read,
                self.complete,
                self.store,
                self.release,
                self.abort,
                self.evict,
            )
        )()

    def admit(self) -> None:
        bench, cache = self.bench, self.bench.cache
        active = bench.request(*self.prompt())
        match = cache.match(active, active.usable_pages(PAGE_TOKENS), "admit")
        lock = cache.lock(match.node)
        host_pages, _ = cache.load_back_size(match, None)
        if match.host_pages and not host_pages:
            whole, lock = lock, cache.lock(match.device_node)
            cache.unlock(whole)
        total = -(-active.prompt_tokens // PAGE_TOKENS)
        if len(self.running) > 3 or not run(cache.make_room(total - match.device_pages), pauses=1):
            cache.unlock(lock)
            return
        if host_pages:
            run(cache.load_back(match), pauses=1)
        active.lock = lock
        active.slots = bench.tree.device_slots(lock.node)
        active.owned_pages = len(active.slots)
        active.slots += run(cache.alloc_device(total - len(active.slots), "extend"), pauses=1)
        if self.chance.random() < 0.8:
            cache.insert(active, active.prompt_tokens // PAGE_TOKENS)
        self.running.append(active)

    def end(self) -> None:
        if self.running:
            self.bench.cache.release(self.running.pop(self.chance.randrange(len(self.running))))

    def write(self) -> None:
        if self.chance.random() < 0.2:
            self.bench.host.failures = 1
        queued = len(self.bench.cache.write_queue)
        run(
            self.bench.cache.start_writing(
                min(self.bench.cache.backups_ballot(), self.chance.randint(0, queued))
            )
        )

    def acknowledge(self) -> None:
        cache = self.bench.cache
        run(cache.apply_writes(self.chance.randint(0, len(cache.writes))))
        run(cache.apply_loads(self.chance.randint(0, len(cache.loads))))

    def load(self) -> None:
        self.bench.cache.start_loading()

    def ask(self) -> None:
        bench = self.bench
        active = bench.request(*self.prompt())
        match = bench.cache.match(active, active.usable_pages(PAGE_TOKENS), "submit")
        if bench.fetching.submit(active, match) == "issued":
            self.waiting.append(active)

    def answer(self) -> None:
        queues = self.bench.fetching.queues
        if not len(queues.prefetch):
            return
        prefetch = run(queues.prefetch.get())
        assert prefetch is not None
        queues.hits.put(Hit(prefetch, self.chance.randint(0, prefetch.pages_asked), 1))
        run(self.bench.fetching.drain_hits(1))

    def read(self) -> None:
        queues = self.bench.fetching.queues
        if len(queues.buffer):
            prefetch = run(queues.buffer.get())
            assert prefetch is not None
            self.reading.append((prefetch, 0))
        if not self.reading:
            return
        at = self.chance.randrange(len(self.reading))
        prefetch, pages = self.reading[at]
        if prefetch.slots is not None:
            pages = self.chance.randint(pages, prefetch.page_count)
        self.reading[at] = (prefetch, pages)
        queues.acks.put(Progress(prefetch, "progress", pages))
        run(self.bench.fetching.drain_acks(1))

    def complete(self) -> None:
        if not self.reading:
            return
        prefetch, _ = self.reading.pop(self.chance.randrange(len(self.reading)))
        queues = self.bench.fetching.queues
        queues.acks.put(Progress(prefetch, "pool_hits", self.chance.randint(0, 1)))
        queues.acks.put(Progress(prefetch, "completed", prefetch.page_count))
        run(self.bench.fetching.drain_acks(2))

    def store(self) -> None:
        queues = self.bench.fetching.queues
        if len(queues.backup):
            queues.backup_acks.put(run(queues.backup.get()))
            run(self.bench.fetching.drain_backups(1))

    def release(self) -> None:
        queues = self.bench.fetching.queues
        run(
            self.bench.fetching.drain_releases(
                self.chance.randint(0, len(queues.releases)),
                self.chance.randint(0, len(queues.state_releases)),
            )
        )

    def abort(self) -> None:
        if not self.waiting:
            return
        active = self.waiting.pop(self.chance.randrange(len(self.waiting)))
        if self.chance.random() < 0.5:
            self.bench.fetching.cancelled(active)
        else:
            assert run(self.bench.fetching.check(active)) is True

    def evict(self) -> None:
        run(self.bench.cache.evict(self.chance.randint(1, 4)), pauses=1)

    def finish(self) -> None:
        """Everything that is under way comes to its end."""
        bench = self.bench
        while self.running:
            self.end()
        for active in self.waiting:
            bench.fetching.cancelled(active)
        cache, fetching, queues = bench.cache, bench.fetching, bench.fetching.queues
        cache.start_loading()
        run(cache.start_writing(cache.backups_ballot()))
        run(cache.apply_writes(len(cache.writes)))
        run(cache.apply_loads(len(cache.loads)))
        while len(queues.prefetch):
            self.answer()
        while len(queues.buffer):
            self.read()
        while self.reading:
            self.complete()
        while len(queues.backup):
            self.store()
        run(fetching.drain_releases(len(queues.releases), len(queues.state_releases)))


def assert_equations(play: Play) -> None:
    bench, cache, tree, tiers = play.bench, play.bench.cache, play.bench.tree, play.bench.tiers
    device: list[int] = [slot for active in play.running for slot in active.slots[active.owned_pages :]]
    host: list[int] = []
    states: list[int] = []
    counted_pages = counted_states = 0
    locks: Counter[int] = Counter()
    moving = [*cache.writes, *cache.loads]
    held = [active.lock for active in play.running]
    held += [queued.lock for queued in (*cache.write_queue, *cache.load_queue)]
    held += [lock for each in moving for lock in each.device_locks]
    for lock in held:
        assert lock is not None
        locks.update(node.id for node in tree.path(lock.node))
    evictable = protected = 0
    for node in tree.walk():
        assert node.lock_count == locks[node.id], f"{node}: {locks[node.id]} holders"
        if node.device is not None:
            device += node.device
            evictable += node.page_count * (node.lock_count == 0)
            protected += node.page_count * (node.lock_count > 0)
        if node.host is not None:
            host += node.host
            counted_pages += node.page_count
        if node.host_state is not None:
            states.append(node.host_state)
            counted_states += 1
    for queued in cache.write_queue:
        counted_pages += queued.page_count
        counted_states += queued.state_count
        if queued.slots is not None:
            host += queued.slots.pages
            states += queued.slots.states
    for prefetch in bench.fetching.unfinished:
        counted_pages += prefetch.page_count - prefetch.given_pages
        counted_states += prefetch.state_count
        if prefetch.slots is not None:
            host += prefetch.slots.pages[prefetch.given_pages :]
            states += prefetch.slots.states
    queues = bench.fetching.queues
    counted_pages += len(queues.releases)
    counted_states += len(queues.state_releases)
    host += [slot for slot in queues.releases._items if slot is not None]
    states += [slot for slot in queues.state_releases._items if slot is not None]

    assert (evictable, protected) == (tree.evictable_pages, tree.protected_pages)
    for slots, memory in ((device, bench.device), (host, bench.host), (states, bench.states)):
        assert len(slots) == len(set(slots)) == memory.pages_used
    device_room = tiers.device_room
    assert device_room.pages_free + len(device) == device_room.page_count
    assert tiers.host_room.pages_free + counted_pages == tiers.host_room.page_count
    assert tiers.states_room.pages_free + counted_states == tiers.states_room.page_count
    occupied = sum(prefetch.pages_asked for prefetch in bench.fetching._ongoing.values())
    assert bench.fetching.books.occupied_pages == occupied


@pytest.mark.parametrize("with_states", [False, True])
@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_free_and_what_is_held_add_up_after_any_operations(
    seed: int, write_policy: str, with_states: bool
) -> None:
    play = Play(seed, write_policy, with_states=with_states)
    while play.operations < OPERATIONS:
        play.step()
        if play.operations % CHECK_EVERY == 0:
            assert_equations(play)
    play.finish()
    assert_equations(play)
    assert play.bench.cache.is_idle
    assert all(node.lock_count == 0 and node.host_lock_count == 0 for node in play.bench.tree.walk())
    assert play.bench.written("prefetch_insert") and play.bench.written("evict_host"), "nothing much happened"


def test_slots_and_room_of_a_pool_are_a_set_and_its_size() -> None:
    """30,000 operations beside a plain set."""
    chance = random.Random("slots")
    memory, room = SlotMemory(50), Room(50)
    taken: set[int] = set()
    for _ in range(30_000):
        count = chance.randint(0, 12)
        if chance.random() < 0.55:
            slots = memory.alloc(count)
            assert (slots is None) == (len(taken) + count > 50) == (room.shortage(count) > 0)
            if slots is not None:
                assert taken.isdisjoint(slots) and len(set(slots)) == count
                taken.update(slots)
                room.take(count)
        else:
            gone = chance.sample(sorted(taken), min(count, len(taken)))
            memory.free(gone)
            room.give_back(len(gone))
            taken.difference_update(gone)
        assert (memory.pages_used, memory.pages_free, room.pages_free) == (
            len(taken),
            50 - len(taken),
            50 - len(taken),
        )
