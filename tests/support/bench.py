"""One rank's cache on a bench: a literal tree, memories of known size, copies that finish when told to."""

from __future__ import annotations

import json
from collections.abc import Coroutine, Sequence
from typing import Any, Literal

from hicache.config import StorageConfig
from hicache.control.active import Active
from hicache.control.agreement import Agreement, ReserveThenVote
from hicache.control.cache import Cache
from hicache.control.host_memory import HostMemory
from hicache.control.keys import pack
from hicache.control.node import Node
from hicache.control.pools import Room, SlotMemory, Tiers
from hicache.control.prefetch import Prefetches
from hicache.control.queues import Queues
from hicache.control.tree import Match, Tree
from hicache.core import Request, SidePool, Slot, Transfer
from hicache.loop import Signal
from hicache.ports import Transport
from hicache.probes import Probes
from tracer.sinks import MemorySink
from tracer.tracer import Tracer

PAGE_TOKENS = 4
PAGE_BYTES = 4 * PAGE_TOKENS


class ToldEngine:
    """Copies are done when their op is in `done`."""

    def __init__(self) -> None:
        self.done: set[int] = set()
        self.polled: list[int] = []

    def submit(self, transfer: Transfer) -> None:
        pass

    def ready(self, transfer: Transfer) -> bool:
        self.polled.append(transfer.op)
        transfer.is_done = transfer.op in self.done
        return transfer.is_done

    async def wait(self, transfer: Transfer) -> None:
        assert self.ready(transfer), f"op {transfer.op} is waited for and never done"


class EagerEngine(ToldEngine):
    """Copies that somebody waits for get done."""

    async def wait(self, transfer: Transfer) -> None:
        transfer.is_done = True


class Moody(SlotMemory):
    """Memory that fails as often as told, then works."""

    failures = 0

    def alloc(self, page_count: int) -> list[Slot] | None:
        if self.failures:
            self.failures -= 1
            return None
        return super().alloc(page_count)


class Alone:
    """The transport of a rank without peers."""

    async def all_reduce(self, axis: str, values: Sequence[int], **_: Any) -> list[int]:
        return list(values)

    async def send_next(self, message: Any, **_: Any) -> None:
        pass

    async def drain_sends(self, channel: str) -> None:
        pass


class OwnAnswer:
    """An agreement that answers what it is asked; `answers` overrides, in order."""

    def __init__(self, answers: Sequence[list[int]] = ()) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, list[int]]] = []

    async def agree(self, local: Sequence[int], *, purpose: str, **_: Any) -> list[int]:
        self.asked.append((purpose, list(local)))
        return self.answers.pop(0) if self.answers else list(local)


class ToldClock:
    """A clock that stands still until it is set."""

    is_real = False

    def __init__(self) -> None:
        self.time_ns = 0

    def now_ns(self) -> int:
        return self.time_ns

    async def idle(self) -> None:
        self.time_ns += 1_000_000


class NoStorage:
    """A store that is reached and never asked: these tests play the lanes themselves."""

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass


class Bench:
    """A cache on a bench, with everything it has written.

    Args:
        storage: with it there are prefetches; the test plays the background lanes through `queues`.
    """

    def __init__(
        self,
        *,
        device_pages: int = 20,
        host_pages: int = 20,
        write_policy: Literal["write_through", "write_through_selective", "write_back"] = "write_through",
        storage: StorageConfig | None = None,
        pools: Sequence[SidePool] = (),
        state_slots: int = 0,
        engine: ToldEngine | None = None,
        agreement: Agreement | None = None,
        decides_deadline: bool = True,
    ) -> None:
        self.sink = MemorySink()
        self.tracer = Tracer(self.sink, {}, lambda: 0, has_steps=True)
        self.probes = Probes(self.tracer)
        self.engine = engine or ToldEngine()
        self.clock = ToldClock()
        self.device, self.host, self.states = Moody(device_pages), Moody(host_pages), Moody(state_slots)
        self.agreement = agreement or OwnAnswer()
        is_write_back = write_policy == "write_back"
        has_state = any(not pool.shares_slots for pool in pools)
        thresholds = {"write_through": 1, "write_through_selective": 2, "write_back": 0}
        self.tree = Tree(
            PAGE_BYTES,
            backup_threshold=thresholds[write_policy],
            has_state=has_state,
            requires_backed_parent=not is_write_back,
        )
        self.tiers = Tiers(
            self.device,
            Room(device_pages),
            self.host,
            Room(host_pages),
            self.states if has_state else None,
            Room(state_slots),
        )
        memory = HostMemory(self.tree, self.tiers, self.probes, is_write_back=is_write_back)
        self.queues = Queues(lambda reason: Signal(None, reason))
        self.prefetches = None
        if storage is not None:
            transport: Transport = Alone()  # type: ignore[assignment]
            self.prefetches = Prefetches(
                storage,
                self.tree,
                memory,
                self.queues,
                NoStorage(),  # type: ignore[arg-type]
                self.agreement,
                transport,
                self.clock,
                self.probes,
                pools=pools,
                decides_deadline=decides_deadline,
            )
            self.prefetches.is_attached = storage.attached
        self.cache = Cache(
            self.tree,
            self.tiers,
            self.engine,
            self.probes,
            ReserveThenVote(),
            host=memory,
            prefetches=self.prefetches,
            is_write_back=is_write_back,
            digest_key=b"k",
        )
        self._requests = 0

    @property
    def fetching(self) -> Prefetches:
        assert self.prefetches is not None
        return self.prefetches

    def request(self, *pages: int, rid: str = "") -> Active:
        """A request whose prompt is these pages and one token more, each page one token repeated."""
        self._requests += 1
        tokens = b"".join(pack([page] * PAGE_TOKENS) for page in pages) + pack([0])
        request = Request(rid or f"r{self._requests}", tokens, b"", 1)
        return Active(request, self._requests, tokens)

    def add(self, *pages: int) -> Node:
        """Insert a prompt of these pages; backups are queued as the tree asks for them."""
        active = self.request(*pages)
        self.cache.name_answer(active)
        active.lock = self.cache.lock(self.tree.root)
        active.slots = run(self.cache.alloc_device(len(pages), "test"))
        node = self.cache.insert(active, len(pages)).node
        self.cache.release(active)
        return node

    def find(self, *pages: int) -> Match:
        """The match of a prompt of these pages."""
        return self.cache.match(self.request(*pages), len(pages), "admit")

    def write_all(self) -> None:
        run(self.cache.start_writing(len(self.cache.write_queue)))

    def acknowledge_all(self) -> None:
        self.engine.done.update(moving.transfer.op for moving in self.cache.writes)
        run(self.cache.apply_writes(len(self.cache.writes)))

    def store_all(self) -> None:
        """The backup lane writes what is queued, and the event round drains its acks."""
        if self.prefetches is None:
            return
        queues = self.prefetches.queues
        count = len(queues.backup)
        for _ in range(count):
            queues.backup_acks.put(run(queues.backup.get()))
        run(self.prefetches.drain_backups(count))

    def on_host(self, *pages: int) -> Node:
        """A node that only the host holds."""
        node = self.add(*pages)
        self.write_all()
        self.acknowledge_all()
        self.store_all()
        self.cache.free_device(self.tree.clear_device(node))
        return node

    def written(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == kind]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.sink.lines[1:]]


def run(coroutine: Coroutine[Any, Any, Any], *, pauses: int = 0) -> Any:
    """Run a coroutine that never really waits, though it may let others run so many times."""
    for _ in range(pauses + 1):
        try:
            coroutine.send(None)
        except StopIteration as stop:
            return stop.value
    coroutine.close()
    raise AssertionError("it waits for somebody")


def finish(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Resume a coroutine until it ends, whatever it waits for."""
    while True:
        coroutine.send(None)
