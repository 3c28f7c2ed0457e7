"""The event round: once an iteration, the group agrees how many acks to apply, and applies them.

    local counts -> agreement -> start the backups that stand everywhere -> apply write and load acks

It runs in every iteration, also when there is nothing to report: a rank that stays away because its
own queue is empty leaves its peers waiting, or paired with a call that means something else.
"""

from __future__ import annotations

from hicache.control.agreement import CHANNEL, Agreement, Counts
from hicache.control.cache import Cache
from hicache.ports import Transport
from hicache.probes import Probes


class EventRound:
    """One rank's side of the event rounds."""

    def __init__(
        self, cache: Cache, transport: Transport, agreement: Agreement, probes: Probes, *, is_decider: bool
    ) -> None:
        self._cache = cache
        self._transport = transport
        self._agreement = agreement
        self._probes = probes
        self._is_decider = is_decider
        self._round = 0

    async def run(self) -> bool:
        """Take part in one round; returns whether it applied or started anything."""
        cache, tree = self._cache, self._cache.tree
        await self._transport.drain_sends(CHANNEL)
        self._round += 1
        # A later stage adopts stage 0's counts, so it has no business polling its own copies.
        writes_done = cache.count_done(cache.writes) if self._is_decider else None
        loads_done = cache.count_done(cache.loads) if self._is_decider else None
        backups_reserved = cache.backups_ballot()
        self._probes.event_round_call(
            self._round,
            len(cache.writes),
            len(cache.loads),
            len(cache.write_queue),
            tree.nodes_created,
            tree.evictable_pages,
            tree.protected_pages,
            tree.host_pages,
            writes_done,
            loads_done,
            backups_reserved,
            cache.host_pages_free,
            cache.device_pages_free,
        )
        local = Counts(writes=writes_done or 0, loads=loads_done or 0, backups=backups_reserved)
        in_flight = len(cache.writes) + len(cache.loads)
        agreed = await self._agreement.agree(local, transfers_in_flight=in_flight)
        self._probes.event_round_return(self._round, agreed.writes, agreed.loads, agreed.backups)
        has_queue = bool(cache.write_queue)
        await cache.start_writing(agreed.backups)
        await cache.apply_writes(agreed.writes)
        await cache.apply_loads(agreed.loads)
        return bool(agreed.writes or agreed.loads or has_queue)
