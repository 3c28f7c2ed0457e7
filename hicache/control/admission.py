"""Admission: which waiting requests start now, and with how much of their prompt already cached.

    0           device             host                                        prompt
    |- on device -|- load back ------|- to compute: this batch -|- next batch ----|

The loop ends where the batch's tokens are spent or at the first request that finds no room, so its trip
count must come from agreed facts alone: agreed room and this tree's own counters, which are equal on every
rank. It matters, since asking for a prefetch may be a meeting. Pages to load back are taken inside the
loop; pages to compute only after it, for the whole batch, so that no request of a batch loses the prefix
that another one's pages are taken from.

A request is admitted with all the pages it will need promised, also those of later chunks: what has been
admitted can always go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hicache.config import Config
from hicache.control.active import Active
from hicache.control.cache import Cache, pages_to_load
from hicache.control.chunks import Budget
from hicache.control.locks import DeviceLock
from hicache.control.retraction import kv_tokens_at_end
from hicache.control.tree import Match
from hicache.control.waiting import Waiting
from hicache.errors import PromiseError
from hicache.probes import Probes


@dataclass(slots=True)
class Batch:
    """One prefill batch.

    Attributes:
        admitted: those that compute now, the one that goes on from the last batch first.
        refused: those that can never fit, with their `abort_reason`.
        blocked: those whose prefetch is not to be cut short yet, in the order of the queue.
        chunked: the one of `admitted` that will go on in the next batch.
    """

    admitted: list[Active] = field(default_factory=list)
    refused: list[Active] = field(default_factory=list)
    blocked: list[Active] = field(default_factory=list)
    chunked: Active | None = None

    @property
    def pages_due(self) -> int:
        """Promised to its members and not taken yet."""
        return sum(active.pages_due for active in self.admitted)


class Admission:
    """Forms prefill batches."""

    def __init__(self, cache: Cache, probes: Probes, config: Config) -> None:
        self._cache = cache
        self._probes = probes
        self._cache_output = config.cache_output
        self._batch_tokens = config.chunked_prefill_tokens
        self._reserve_percent = config.decode_reserve_percent
        self._page_tokens = config.page_size_tokens

    async def form(
        self, waiting: Waiting, running_count: int, *, chunked: Active | None = None, is_full: bool = False
    ) -> Batch:
        """The next prefill batch; takes those that are in it, and those that can never fit, off the queue.

        Args:
            chunked: the request that is between two chunks; it goes on first.
            is_full: nobody new is admitted, since those who run are short of memory.
        """
        batch = Batch()
        budget = Budget(self._batch_tokens, self._page_tokens)
        if chunked is not None:
            self._join(chunked, batch, budget)
        if not is_full:
            await self._fill(batch, budget, waiting, running_count)
        await self._take_pages(batch)
        return batch

    async def _fill(self, batch: Batch, budget: Budget, waiting: Waiting, running_count: int) -> None:
        prefetches = self._cache.prefetches
        for active in waiting:
            if budget.is_spent:
                return
            if prefetches is not None and not await prefetches.check(active):
                batch.blocked.append(active)
                continue
            verdict = await self._admit(active, batch, budget, running_count + len(batch.admitted))
            if verdict == "no_room":
                return
            if verdict == "lost":
                batch.blocked.append(active)
                continue
            waiting.remove(active)
            if verdict != "admitted":
                active.abort_reason = verdict
                batch.refused.append(active)

    async def _admit(self, active: Active, batch: Batch, budget: Budget, running_count: int) -> str:
        """Decide on one request; if it is admitted, lock and load what it reads."""
        cache = self._cache
        # At least one token must be computed: its hidden state is what the answer starts from.
        page_limit = active.usable_pages(self._page_tokens)
        match = cache.match(active, page_limit, "admit")
        if cache.prefetches is not None and cache.prefetches.is_lost(active, match):
            return "lost"
        lock = cache.lock(match.node)
        host_pages, declined = cache.load_back_size(match, self._quota(batch.pages_due))
        if match.host_pages and not host_pages:
            whole, lock = lock, cache.lock(match.device_node)
            cache.unlock(whole)
        pages_loaded = pages_to_load(match) if host_pages else 0
        pages_there = match.device_pages + host_pages - pages_loaded
        pages_needed = self._pages_reserved(active) - pages_there
        verdict = await self._verdict(active, pages_needed + batch.pages_due)
        self._record(active, verdict, match, host_pages, pages_needed, running_count)
        if verdict != "admitted":
            cache.unlock(lock)
            return verdict
        if match.host_pages:
            self._record_load_back(active, match, declined, host_pages)
        await self._take_prefix(active, match, lock, host_pages)
        active.pages_due = pages_needed - pages_loaded
        self._join(active, batch, budget)
        if cache.prefetches is not None:
            prefix_pages = match.device_pages + host_pages
            cache.prefetches.admitted(active, used_pages=self._storage_overlap(active, 0, prefix_pages))
        return verdict

    async def _verdict(self, active: Active, pages_needed: int) -> str:
        """Does it fit now, later, or never? Never is measured by its whole answer, whatever is reserved."""
        room = self._cache.tiers.device_room
        if room.page_count and self._pages(self._tokens_at_end(active)) > room.page_count:
            return "too_long"
        return "admitted" if await self._cache.make_room(pages_needed) else "no_room"

    def _quota(self, pages_due: int) -> int | None:
        """Device pages that a load back may take: what is free or could be, less what is promised."""
        room = self._cache.tiers.device_room
        if not room.page_count:
            return None
        return room.pages_free + self._cache.tree.evictable_pages - pages_due

    async def _take_prefix(self, active: Active, match: Match, lock: DeviceLock, host_pages: int) -> None:
        """Start loading what the host has; the prefix is then the request's to read.

        Raises:
            PromiseError: a load back is for all of the pages that were found, or for none.
        """
        cache = self._cache
        if host_pages:
            await cache.load_back(match)
        prefix_pages = match.device_pages + host_pages
        active.lock = lock
        active.slots = cache.tree.device_slots(lock.node)
        if len(active.slots) != prefix_pages:
            raise PromiseError(
                f"{active.rid}: {prefix_pages} pages of its prefix were promised, "
                f"{match.device_pages} on the device and {host_pages} to load; {len(active.slots)} are there"
            )
        node = lock.node
        if cache.tree.has_state and node is not cache.tree.root and not node.device_state:
            raise PromiseError(f"{active.rid}: {node} was to be started from, and its state is gone")
        active.owned_pages = prefix_pages
        active.inserted_pages = 0
        active.prefix_tokens = active.computed_tokens = prefix_pages * self._page_tokens

    def _join(self, active: Active, batch: Batch, budget: Budget) -> None:
        """Put a request into the batch with as much of its prompt as there is budget for."""
        tokens_left = active.prompt_tokens - active.computed_tokens
        active.chunk_tokens = budget.take(tokens_left)
        batch.admitted.append(active)
        if active.chunk_tokens < tokens_left:
            batch.chunked = active

    async def _take_pages(self, batch: Batch) -> None:
        """Device pages for what the batch computes, at once; with a last chunk goes all that is still due."""
        counts = [self._pages_now(active) for active in batch.admitted]
        if not sum(counts):
            return
        slots = await self._cache.alloc_device(sum(counts), "extend")
        at = 0
        for active, count in zip(batch.admitted, counts, strict=True):
            active.slots += slots[at : at + count]
            active.pages_due -= count
            at += count

    def _pages_now(self, active: Active) -> int:
        end = active.computed_tokens + active.chunk_tokens
        if end == active.prompt_tokens:
            return active.pages_due
        return end // self._page_tokens - len(active.slots)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens)

    def _tokens_at_end(self, active: Active) -> int:
        return kv_tokens_at_end(active) if self._cache_output else active.prompt_tokens

    def _pages_reserved(self, active: Active) -> int:
        """Device pages for the prompt, and for the share of its answer that is set aside at once."""
        answer_tokens = self._tokens_at_end(active) - active.prompt_tokens
        return self._pages(active.prompt_tokens + answer_tokens * self._reserve_percent // 100)

    # Records

    def _storage_overlap(self, active: Active, first: int, end: int) -> int:
        """Pages from `first` to before `end` that a prefetch has brought for this request."""
        storage_end = active.storage_first_page + active.storage_pages
        return max(0, min(end, storage_end) - max(first, active.storage_first_page))

    def _record(
        self,
        active: Active,
        verdict: str,
        match: Match,
        host_pages: int,
        pages_needed: int,
        running_count: int,
    ) -> None:
        """The verdict, and by tier what the prompt is made of: device, host, storage, computed."""
        cache, page_tokens = self._cache, self._page_tokens
        tokens = (0, 0, 0, 0)
        if verdict == "admitted":
            device_tokens, loaded_tokens = match.device_pages * page_tokens, host_pages * page_tokens
            # Of what is there, that belongs to storage which a prefetch has brought for this request,
            # whoever has loaded it since.
            on_device = self._storage_overlap(active, 0, match.device_pages) * page_tokens
            on_host = (
                self._storage_overlap(active, match.device_pages, match.device_pages + host_pages)
                * page_tokens
            )
            extend_tokens = active.prompt_tokens - device_tokens - loaded_tokens
            tokens = (device_tokens - on_device, loaded_tokens - on_host, on_device + on_host, extend_tokens)
        self._probes.admit(
            active.rid,
            verdict,
            pages_needed,
            *tokens,
            cache.device_pages_free,
            cache.tree.evictable_pages,
            cache.host_pages_free,
            running_count,
        )

    def _record_load_back(self, active: Active, match: Match, declined: str, host_pages: int) -> None:
        cache = self._cache
        self._probes.load_back(
            active.rid,
            match.node.id,
            declined,
            match.host_pages,
            (pages_to_load(match) if host_pages else 0) * self._page_tokens,
            cache.device_pages_free,
            cache.host_pages_free,
            len(cache.loads),
        )
