"""The event round: once an iteration, the group agrees how many acks to apply, and applies them.

    local counts -> agreement -> start the backups that stand everywhere -> apply, queue by queue:
    write acks, load acks, prefetch hits, prefetch acks, storage acks, released host pages

It runs in every iteration, also when there is nothing to report: a rank that stays away because its
own queue is empty leaves its peers waiting, or paired with a call that means something else. A later
stage reports zeros, whatever has finished on it, and then consumes exactly what stage 0 has counted; where
its own copy or lane is slower, it waits.

    stage 0   A done, B in flight   writes_done 1 -> agreed 1 --> apply A
    stage 1   A done, B done        (not asked)      adopts 1 --> apply A; B stays for another round
"""

from __future__ import annotations

from dataclasses import dataclass

from hicache.control.agreement import EVENT_ROUND, Agreement
from hicache.control.cache import Cache
from hicache.control.digest import RunningDigest
from hicache.control.prefetch import Prefetches
from hicache.core import vector_digest
from hicache.errors import ForkError
from hicache.ports import Transport
from hicache.probes import Probes

CHANNEL = "events"


@dataclass(frozen=True, slots=True)
class Counts:
    """The vector of an event round: what one rank could apply, or what the group will.

    Attributes:
        writes, loads: leading transfers of a queue whose bytes have moved.
        backups: leading queued backups for which host slots are reserved.
        storage: lengths of storage's queues: hits, prefetch acks, storage acks, released host pages, and
            released slots of each side pool that has its own; empty while no storage is attached.
        digest: what must be equal already; travels with its negative, so that one minimum finds both ends.
    """

    writes: int
    loads: int
    backups: int
    storage: tuple[int, ...]
    digest: int

    def vector(self) -> list[int]:
        """Writes, loads, storage's counts, reserved backups, digest, minus digest."""
        return [self.writes, self.loads, *self.storage, self.backups, self.digest, -self.digest]

    @classmethod
    def of(cls, vector: list[int], own_digest: int) -> Counts:
        """Read an agreed vector.

        Raises:
            ForkError: some rank's digest is not this one's.
        """
        writes, loads, *storage, backups, low, minus_high = vector
        if (low, -minus_high) != (own_digest, own_digest):
            raise ForkError(
                f"event round: running digest {own_digest} here, {low} to {-minus_high} among the ranks: "
                "their decisions have come apart since the last round; see hicache check"
            )
        return cls(writes, loads, backups, tuple(storage), own_digest)


class EventRound:
    """One rank's side of the event rounds.

    Args:
        is_decider: whether this rank's own counts matter: those of stage 0 do.
        has_stages: whether vectors go from stage to stage; then the log says which one is gone by here.
        digest: of the compared decisions; None to send that of reclaims, as SGLang does.
    """

    def __init__(
        self,
        cache: Cache,
        transport: Transport,
        agreement: Agreement,
        probes: Probes,
        *,
        is_decider: bool,
        has_stages: bool = False,
        digest: RunningDigest | None = None,
    ) -> None:
        self._cache = cache
        self._transport = transport
        self._agreement = agreement
        self._probes = probes
        self._is_decider = is_decider
        self._has_stages = has_stages
        self._digest = digest
        self._round = 0

    async def run(self) -> bool:
        """Take part in one round; returns whether it applied or started anything."""
        cache = self._cache
        await self._transport.drain_sends(CHANNEL)
        self._round += 1
        prefetches = cache.prefetches
        if prefetches is not None and not prefetches.is_attached:
            prefetches = None
        own_digest = self._own_digest()
        local = self._count(prefetches, own_digest)
        in_flight = len(cache.writes) + len(cache.loads)
        vector = await self._agreement.agree(
            local.vector(), op="min", purpose=EVENT_ROUND, transfers_in_flight=in_flight
        )
        if self._has_stages:
            self._probes.adopted(EVENT_ROUND, vector_digest(vector))
        agreed = Counts.of(vector, own_digest)
        self._record_agreed(agreed)
        has_queue = bool(cache.write_queue)
        await cache.start_writing(agreed.backups)
        await cache.apply_writes(agreed.writes)
        await cache.apply_loads(agreed.loads)
        if prefetches is not None:
            hits, prefetch_acks, storage_acks, releases, *side_releases = agreed.storage
            await prefetches.drain_hits(hits)
            await prefetches.drain_acks(prefetch_acks)
            await prefetches.drain_backups(storage_acks)
            await prefetches.drain_releases(releases, sum(side_releases))
        return bool(agreed.writes or agreed.loads or has_queue or any(agreed.storage))

    def _own_digest(self) -> int:
        if self._digest is not None:
            return self._digest.value
        host = self._cache.host
        return host.reclaim_digest if host is not None else 0

    def _count(self, prefetches: Prefetches | None, own_digest: int) -> Counts:
        """What this rank could apply now, recorded with the state that all ranks have in common."""
        cache, tree = self._cache, self._cache.tree
        # A later stage adopts stage 0's counts, so it has no business polling its own copies.
        is_decider = self._is_decider
        writes_done = cache.count_done(cache.writes) if is_decider else None
        loads_done = cache.count_done(cache.loads) if is_decider else None
        backups_reserved = cache.backups_ballot()
        facts = (
            self._round,
            len(cache.writes),
            len(cache.loads),
            len(cache.write_queue),
            tree.nodes_created,
            tree.evictable_pages,
            tree.protected_pages,
            tree.host_pages,
            tree.host_locks,
            cache.tiers.device_room.available,
            cache.tiers.host_room.available if cache.host is not None else None,
            own_digest,
            writes_done,
            loads_done,
            backups_reserved,
            cache.host_pages_free,
            cache.device_pages_free,
        )
        storage: tuple[int, ...] = ()
        if prefetches is None:
            self._probes.event_round_call(*facts)
        else:
            queues, books = prefetches.queues, prefetches.books
            ready = (
                len(queues.hits),
                len(queues.acks),
                len(queues.backup_acks),
                len(queues.releases),
            )
            side = [len(queues.state_releases)] if tree.has_state else []
            storage = (*ready, *side) if is_decider else (0,) * (len(ready) + len(side))
            self._probes.event_round_call_storage(
                *facts,
                books.submitted,
                queues.hits.taken_count,
                queues.acks.taken_count,
                books.backups,
                prefetches.occupied_tokens,
                *(ready if is_decider else (None,) * len(ready)),
                side if is_decider else None,
            )
        return Counts(
            writes=writes_done or 0,
            loads=loads_done or 0,
            backups=backups_reserved if is_decider else 0,
            storage=storage,
            digest=own_digest if is_decider else 0,
        )

    def _record_agreed(self, agreed: Counts) -> None:
        values = (self._round, agreed.writes, agreed.loads, agreed.backups)
        if agreed.storage:
            self._probes.event_round_return_storage(*values, *agreed.storage[:4], list(agreed.storage[4:]))
        else:
            self._probes.event_round_return(*values)
