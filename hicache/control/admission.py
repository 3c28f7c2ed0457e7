"""Admission: which waiting requests start now, and with how much of their prompt already cached.

    0           device             host                          input
    |- on device -|- load back ------|- to compute (at least 1) -|

The loop ends at the first request that finds no room, so its trip count must come from agreed facts
alone: agreed room and this tree's own counters, which are equal on every rank. Pages to load back are
taken inside the loop; pages to compute only after it, for the whole batch, so that no request of a
batch loses the prefix that another one's pages are taken from.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hicache.control import keys, locks
from hicache.control.cache import Cache
from hicache.control.node import Node
from hicache.control.tree import Match
from hicache.core import DIGEST_BYTES, TOKEN_BYTES, Request, Slot
from hicache.probes import Probes


@dataclass(slots=True, eq=False)
class Active:
    """A request on this rank, from its arrival to its end.

    Attributes:
        tokens: prompt, and later the answer as far as it enters the tree.
        digests: 8 bytes for each whole page of `tokens` that has been hashed.
        slots: its device page slots, position by position.
        owned_pages: leading slots that are the tree's; it may free only those behind.
        inserted_pages: leading pages it has handed to the tree itself.
        node: where its device lock is.
        prefix_tokens: tokens it did not have to compute.
        pages_due: pages it has been promised and gets when the batch is complete.
    """

    request: Request
    tokens: bytes
    digests: bytes = b""
    slots: list[Slot] = field(default_factory=list)
    owned_pages: int = 0
    inserted_pages: int = 0
    node: Node | None = None
    prefix_tokens: int = 0
    pages_due: int = 0
    decode_steps_left: int = 0
    abort_reason: str = ""

    @property
    def rid(self) -> str:
        return self.request.rid

    @property
    def computed(self) -> bytes:
        """The part of the prompt that its prefill computes, packed."""
        return self.tokens[self.prefix_tokens * TOKEN_BYTES :]


class Admission:
    """Forms prefill batches.

    Args:
        cache_output: whether an answer takes pages; they are then reserved here, so that decode never
            runs out.
        load_back_min_tokens: a shorter host hit is computed again.
        digest_key: key of the run's page digests.
    """

    def __init__(
        self,
        cache: Cache,
        probes: Probes,
        *,
        cache_output: bool,
        load_back_min_tokens: int,
        digest_key: bytes,
    ) -> None:
        self._cache = cache
        self._probes = probes
        self._cache_output = cache_output
        self._load_back_min_tokens = load_back_min_tokens
        self._digest_key = digest_key
        self._page_size_bytes = cache.tree.page_size_bytes
        self._page_tokens = self._page_size_bytes // TOKEN_BYTES

    def form(self, waiting: deque[Active], running_count: int) -> tuple[list[Active], list[Active]]:
        """Take requests from the front of `waiting`: those to prefill now, and those that can never fit."""
        admitted: list[Active] = []
        refused: list[Active] = []
        while waiting:
            active = waiting[0]
            pages_due = sum(earlier.pages_due for earlier in admitted)
            verdict = self._admit(active, running_count + len(admitted), pages_due)
            if verdict == "no_room":
                break
            waiting.popleft()
            if verdict == "admitted":
                admitted.append(active)
            else:
                active.abort_reason = verdict
                refused.append(active)
        for active in admitted:
            active.slots += self._cache.alloc_device(active.pages_due)
            active.pages_due = 0
        return admitted, refused

    def _admit(self, active: Active, running_count: int, pages_due: int) -> str:
        """Decide on one request and lock its prefix; `pages_due` are promised to others of the batch."""
        cache, request = self._cache, active.request
        input_tokens = request.input_tokens
        # At least one token must be computed: its hidden state is what the answer starts from.
        usable_pages = (input_tokens - 1) // self._page_tokens
        match = cache.match(active.tokens, usable_pages)
        self._hash(active, match)
        self._record_match(active, match, usable_pages)
        locks.lock(cache.tree, match.node)

        pages_total = self._pages_total(request)
        host_pages, declined = self._load_back_size(match)
        pages_needed = pages_total - match.device_pages
        facts = (
            cache.device_pages_free,
            cache.tree.evictable_pages,
            cache.host_pages_free,
            running_count,
        )
        verdict = "admitted"
        room = cache.tiers.device_room
        if room.page_count and pages_total > room.page_count:
            verdict = "too_long"
        elif not cache.can_hold(pages_needed + pages_due):
            verdict = "no_room"
        if verdict != "admitted":
            self._probes.admit(request.rid, verdict, pages_needed, 0, 0, 0, 0, *facts)
            locks.unlock(cache.tree, match.node)
            return verdict
        page_tokens = self._page_tokens
        device_tokens, host_tokens = match.device_pages * page_tokens, host_pages * page_tokens
        extend_tokens = input_tokens - device_tokens - host_tokens
        self._probes.admit(
            request.rid, verdict, pages_needed, device_tokens, host_tokens, 0, extend_tokens, *facts
        )
        if match.host_pages:
            self._probes.load_back(
                request.rid,
                match.node.id,
                declined,
                match.host_pages,
                host_tokens,
                cache.device_pages_free,
                cache.host_pages_free,
                len(cache.loads),
            )
        self._take(active, match, host_pages, pages_needed)
        return verdict

    def _take(self, active: Active, match: Match, host_pages: int, pages_needed: int) -> None:
        """Lock what `active` reads, start loading what the host has, and promise it the rest."""
        cache = self._cache
        node = match.node
        if host_pages:
            cache.load_back(match)
        elif match.host_pages:
            locks.lock(cache.tree, match.device_node)
            locks.unlock(cache.tree, match.node)
            node = match.device_node
        prefix_pages = match.device_pages + host_pages
        active.node = node
        active.slots = cache.tree.device_slots(node)
        active.pages_due = pages_needed - host_pages
        active.owned_pages = prefix_pages
        active.inserted_pages = 0
        active.prefix_tokens = prefix_pages * self._page_tokens

    def _pages_total(self, request: Request) -> int:
        """Device pages for the prompt, and for the answer where it is kept.

        The last token of an answer is never fed back, so it has no KV.
        """
        tokens = request.input_tokens
        if self._cache_output:
            tokens += max(0, request.output_tokens - 1)
        return -(-tokens // self._page_tokens)

    def _load_back_size(self, match: Match) -> tuple[int, str]:
        """Host pages to load, and why not if none."""
        if match.host_pages * self._page_tokens < self._load_back_min_tokens:
            return 0, "too_short" if match.host_pages else ""
        return match.host_pages, ""

    def _hash(self, active: Active, match: Match) -> None:
        """Digests of the whole prompt's pages; those of a known prefix are the tree's, not hashed again."""
        if active.digests:
            return
        known = self._cache.tree.path_digests(match.node)
        active.digests = known + keys.chain_digests(
            active.tokens,
            first_page=len(known) // DIGEST_BYTES,
            page_size_bytes=self._page_size_bytes,
            previous=known[-DIGEST_BYTES:],
            key=self._digest_key,
        )

    def _record_match(self, active: Active, match: Match, usable_pages: int) -> None:
        cache = self._cache
        found_pages = match.device_pages + match.host_pages
        at = found_pages * DIGEST_BYTES
        missed = active.digests[at : at + DIGEST_BYTES].hex() if found_pages < usable_pages else ""
        self._probes.match(
            active.rid,
            match.node.id,
            match.host_pages * self._page_tokens,
            match.device_pages * self._page_tokens,
            cache.device_pages_free,
            cache.host_pages_free,
            len(cache.writes),
            missed,
            usable_pages * self._page_tokens,
        )
