"""The background lanes of one rank: query, read, agree on progress, write on.

Each is serial, so the order of its work is the order in which the scheduler submitted it, which is equal
on every rank. That order is all that pairs the collectives of two lanes:

    prefetch   ask the store -> MIN over cp, tp, pp (`hits`)     -> hit queue
    io         read batches of 128 pages; one progress a batch, whether or not anything was read
    sync       MIN over cp, tp, pp (`progress`) for each progress -> ack queue
    backup     write to the store -> ack queue

A lane that returned before its collective, because of an error or because nothing is wanted any more,
would pair every later call with another prefetch's. So it never does: it reports nothing instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from hicache.config import StorageConfig
from hicache.control.queues import Hit, Prefetch, Progress, Queues, StorageBackup
from hicache.core import POOL_NAMES, SidePool
from hicache.ledger import TierTags, split_digests
from hicache.ports import Axis, Found, Storage, Transport
from hicache.probes import Probes

AXES: tuple[Axis, ...] = ("cp", "tp", "pp")
HITS_CHANNEL = "hits"
PROGRESS_CHANNEL = "progress"
# Writer of host pages that came from the external tier: this less the prefetch's number.
WRITTEN_BY_PREFETCH = -1000
UNKNOWN = -1


def _told(problem: Exception) -> str:
    """What a store has raised. Whatever it was, the lane goes on: its peers are waiting in a collective."""
    return str(problem) or type(problem).__name__


async def _minimum(transport: Transport, values: Sequence[int], purpose: str, channel: str) -> list[int]:
    agreed = list(values)
    for axis in AXES:
        agreed = await transport.all_reduce(axis, agreed, op="min", purpose=purpose, channel=channel)
    return agreed


class PrefetchLane:
    """Asks the store how much of each span it has, and agrees on the least."""

    def __init__(
        self,
        queues: Queues,
        storage: Storage,
        transport: Transport,
        probes: Probes,
        *,
        pools: Sequence[SidePool],
        page_tokens: int,
    ) -> None:
        self._queues = queues
        self._storage = storage
        self._transport = transport
        self._probes = probes
        self._pools = pools
        self._page_tokens = page_tokens
        self._has_trailing = any(pool.policy == "trailing" for pool in pools)

    async def run(self) -> None:
        queues, probes = self._queues, self._probes
        while True:
            probes.lane_state("idle", None)
            prefetch = await queues.prefetch.get()
            if prefetch is None:
                probes.lane_state("ended", None)
                return
            found, error = await self._ask(prefetch)
            probes.lane_state("collective", prefetch.op)
            agreed = await self._agree(found, prefetch.pages_asked)
            publish_seq = queues.hits.put_count + 1
            boundaries = [found.boundaries.get(pool.name, UNKNOWN) for pool in self._pools]
            probes.query(
                prefetch.op,
                prefetch.handle[0],
                prefetch.handle[1],
                prefetch.pages_asked,
                publish_seq,
                agreed,
                found.kv_pages,
                boundaries,
                error,
            )
            queues.hits.put(Hit(prefetch, agreed, publish_seq))

    async def _ask(self, prefetch: Prefetch) -> tuple[Found, str]:
        """What the store has of the span, as this rank sees it; nothing where the call failed."""
        if prefetch.is_terminated:
            return Found(0), "terminated"
        pages = prefetch.pages_asked
        known = prefetch.known_pages
        names = [pool.name for pool in self._pools]
        if known and not self._has_trailing:
            # An earlier try has proved these pages; what it could not hold is not asked for again.
            return Found(known, dict.fromkeys(names, known)), ""
        self._probes.lane_state("backend", prefetch.op)
        try:
            found = await self._storage.exists(prefetch.names(0, pages), pools=names, prefix=prefetch.prefix)
        except Exception as problem:
            return Found(0), _told(problem)
        return found, ""

    async def _agree(self, found: Found, pages_asked: int) -> int:
        """Pages that every rank can restore.

        A recurrent state exists at some lengths only, so ranks intersect the lengths they could restore;
        the least of their longest lengths may be one that somebody can't.
        """
        # A store that claims more than it was asked for has nothing to say about the rest.
        pages = min([pages_asked, found.kv_pages, *found.boundaries.values()])
        if self._has_trailing:
            lengths = set(found.restorable)
            head = [1] + [int(length in lengths) for length in range(1, pages_asked + 1)]
        else:
            head = [pages * self._page_tokens]
        tail = [
            found.kv_pages if name == "kv" else found.boundaries.get(name, UNKNOWN) for name in POOL_NAMES
        ]
        agreed = await _minimum(self._transport, [*head, *tail], "prefetch_hit", HITS_CHANNEL)
        if self._has_trailing:
            return max(length for length in range(pages_asked + 1) if agreed[length])
        return agreed[0] // self._page_tokens


class IoLane:
    """Reads the pages of each prefetch into its host slots, batch by batch."""

    def __init__(
        self,
        queues: Queues,
        storage: Storage,
        host: TierTags,
        probes: Probes,
        config: StorageConfig,
        *,
        pools: Sequence[SidePool],
        page_tokens: int,
    ) -> None:
        self._queues = queues
        self._storage = storage
        self._host = host
        self._probes = probes
        self._batch_pages = config.batch_pages
        self._kv_pools = ["kv", *(pool.name for pool in pools if pool.policy == "all_pages")]
        self._trailing = [pool.name for pool in pools if pool.policy == "trailing"]
        self._page_tokens = page_tokens

    async def run(self) -> None:
        queues, probes = self._queues, self._probes
        while True:
            probes.lane_state("idle", None)
            prefetch = await queues.buffer.get()
            if prefetch is None:
                probes.lane_state("ended", None)
                return
            await self._read(prefetch)

    async def _read(self, prefetch: Prefetch) -> None:
        """One progress a batch, one for the side pools if there are any, and the completion: always."""
        done_pages = 0
        is_reading = prefetch.slots is not None
        for number, first in enumerate(range(0, prefetch.page_count, self._batch_pages)):
            count = min(self._batch_pages, prefetch.page_count - first)
            good, error = 0, ""
            is_reading = is_reading and not prefetch.is_terminated
            if is_reading:
                good, error = await self._read_batch(prefetch, first, count)
                done_pages += good
                is_reading = good == count
            self._probes.read(prefetch.op, number, count, good * self._page_tokens, error)
            self._queues.sync.put(Progress(prefetch, "progress", done_pages))
        if self._trailing:
            is_whole = done_pages == prefetch.page_count and not prefetch.is_terminated
            hits = int(is_whole and await self._read_states(prefetch))
            self._queues.sync.put(Progress(prefetch, "pool_hits", hits))
        self._queues.sync.put(Progress(prefetch, "completed", done_pages))

    async def _read_batch(self, prefetch: Prefetch, first: int, count: int) -> tuple[int, str]:
        """Leading pages of a batch that every pool could give; they are in their slots then."""
        names = prefetch.names(first, count)
        self._probes.lane_state("backend", prefetch.op)
        good = count
        pages: list[bytes | None] = []
        try:
            for pool in self._kv_pools:
                got = await self._storage.get(pool, names, prefix=prefetch.prefix)
                pages = pages or got
                good = min(good, len(got), next((at for at, page in enumerate(got) if page is None), count))
        except Exception as problem:
            return 0, _told(problem)
        assert prefetch.slots is not None
        tags = [page for page in pages[:good] if page is not None]
        self._host.write(
            prefetch.slots.pages[first : first + good], tags, writer=WRITTEN_BY_PREFETCH - prefetch.op
        )
        return good, ""

    async def _read_states(self, prefetch: Prefetch) -> bool:
        last = prefetch.names(prefetch.page_count - 1, 1)
        self._probes.lane_state("backend", prefetch.op)
        try:
            for pool in self._trailing:
                got = await self._storage.get(pool, last, prefix=prefetch.prefix)
                if not got or got[0] is None:
                    return False
        except Exception:
            return False
        return True


class SyncLane:
    """Agrees on how far every rank has read, once for each progress, and publishes it."""

    def __init__(self, queues: Queues, transport: Transport, probes: Probes, *, page_tokens: int) -> None:
        self._queues = queues
        self._transport = transport
        self._probes = probes
        self._page_tokens = page_tokens

    async def run(self) -> None:
        queues, probes = self._queues, self._probes
        while True:
            probes.lane_state("idle", None)
            local = await queues.sync.get()
            if local is None:
                probes.lane_state("ended", None)
                return
            prefetch = local.prefetch
            probes.lane_state("collective", prefetch.op)
            agreed = await self._agree(local)
            publish_seq = queues.acks.put_count + 1
            unit = 1 if local.ack == "pool_hits" else self._page_tokens
            probes.progress(prefetch.op, local.ack, publish_seq, agreed * unit, local.pages * unit)
            queues.acks.put(Progress(prefetch, local.ack, agreed, publish_seq))

    async def _agree(self, local: Progress) -> int:
        if local.ack == "progress":
            values = [local.pages * self._page_tokens]
            agreed = await _minimum(self._transport, values, "prefetch_progress", PROGRESS_CHANNEL)
            return agreed[0] // self._page_tokens
        if local.ack == "pool_hits":
            values = [local.pages if name == "mamba" else UNKNOWN for name in POOL_NAMES]
            agreed = await _minimum(self._transport, values, "prefetch_pool_hits", PROGRESS_CHANNEL)
            return agreed[POOL_NAMES.index("mamba")]
        # The completion carries no collective: it says that this rank's lanes are done with the slots,
        # and nothing about how much of them it could fill.
        return local.prefetch.page_count


class BackupLane:
    """Writes acknowledged pages on to the store: side pools first, so that KV there implies them."""

    def __init__(
        self,
        queues: Queues,
        storage: Storage,
        host: TierTags,
        probes: Probes,
        config: StorageConfig,
        *,
        pools: Sequence[SidePool],
    ) -> None:
        self._queues = queues
        self._storage = storage
        self._host = host
        self._probes = probes
        self._batch_pages = config.batch_pages
        self._side = [pool.name for pool in pools if pool.policy == "all_pages"]
        self._trailing = [pool.name for pool in pools if pool.policy == "trailing"]

    async def run(self) -> None:
        queues, probes = self._queues, self._probes
        while True:
            probes.lane_state("idle", None)
            backup = await queues.backup.get()
            if backup is None:
                probes.lane_state("ended", None)
                return
            probes.lane_state("backend", backup.op)
            side_written, error = await self._write_side(backup)
            if not error:
                error = await self._write_pages(backup)
            probes.storage_write(backup.op, len(backup.slots), backup.written_pages, side_written, error)
            # Acknowledged whatever came of it: the host lock must go on every rank alike.
            queues.backup_acks.put(backup)

    async def _write_side(self, backup: StorageBackup) -> tuple[int, str]:
        written = 0
        tags = split_digests(backup.digests)
        try:
            for pool in self._side:
                kept = await self._storage.set(pool, backup.names, tags, prefix=backup.prefix)
                written += sum(kept)
            if backup.has_state:
                for pool in self._trailing:
                    kept = await self._storage.set(pool, backup.names[-1:], tags[-1:], prefix=backup.prefix)
                    written += sum(kept)
        except Exception as problem:
            return written, _told(problem)
        return written, ""

    async def _write_pages(self, backup: StorageBackup) -> str:
        """KV in batches; the first that is not written whole ends it. What was written stays."""
        for first in range(0, len(backup.slots), self._batch_pages):
            slots = backup.slots[first : first + self._batch_pages]
            names = backup.names[first : first + self._batch_pages]
            try:
                kept = await self._storage.set("kv", names, self._host.read(slots), prefix=backup.prefix)
            except Exception as problem:
                return _told(problem)
            backup.written_pages += sum(kept)
            if sum(kept) < len(slots):
                return f"{len(slots) - sum(kept)} of {len(slots)} pages not written"
        return ""
