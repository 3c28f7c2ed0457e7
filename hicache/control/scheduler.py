"""One rank's scheduler lane: continuous batching, one iteration a step.

    receive requests -> event round -> admit and load back -> forward -> insert, back up, finish

The first rank of a replica has the front door; what it receives is broadcast along cp and tp and relayed
down the pipeline, so every rank sees the same requests in the same order. A step prefills the requests
that were admitted, or else decodes those that run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hicache.control import keys, locks
from hicache.control.admission import Active, Admission
from hicache.control.cache import Cache
from hicache.control.event_round import EventRound
from hicache.core import DIGEST_BYTES, TOKEN_BYTES, Request
from hicache.ledger import FORWARD as WRITTEN_BY_FORWARD
from hicache.ledger import Ledger, split_digests
from hicache.loop import PAUSE, never
from hicache.ports import Source, Transport
from hicache.probes import Probes

CHANNEL = "main"
# Why a request ended that got its whole answer, as the finish record has it.
SERVED = "stop"
# Steps in which nothing was received, applied, admitted or computed, before a rank says that it is stuck.
IDLE_STEPS_MAX = 5_000


@dataclass(frozen=True, slots=True)
class Mail:
    """What one iteration's broadcast carries."""

    requests: Sequence[Request]
    is_last: bool


class Scheduler:
    """The scheduler lane of one rank. Ends when the front door has closed and nothing is left to do."""

    def __init__(
        self,
        *,
        cache: Cache,
        admission: Admission,
        event_round: EventRound,
        transport: Transport,
        ledger: Ledger,
        probes: Probes,
        source: Source | None,
        pp_rank: int,
        cache_output: bool,
        decode_steps: Literal["one", "all"],
        digest_key: bytes,
    ) -> None:
        self._cache = cache
        self._admission = admission
        self._event_round = event_round
        self._transport = transport
        self._ledger = ledger
        self._probes = probes
        self._source = source
        self._pp_rank = pp_rank
        self._cache_output = cache_output
        self._decode_steps = decode_steps
        self._digest_key = digest_key
        self._page_tokens = cache.tree.page_size_bytes // TOKEN_BYTES
        self._waiting: deque[Active] = deque()
        self._running: list[Active] = []
        self._order = 0
        self._idle_steps = 0
        self.step = 0

    async def run(self) -> None:
        while await self._iterate():
            self.step += 1
            # A rank that meets nobody would otherwise run to its end before another starts.
            await PAUSE
        self._audit()

    async def _iterate(self) -> bool:
        """One step; False when there will be no other."""
        self._probes.tracer.step = self.step
        mail = await self._receive()
        if mail.is_last:
            return False
        for request in mail.requests:
            self._enqueue(request)
        has_events = await self._event_round.run()
        admitted, refused = self._admission.form(self._waiting, len(self._running))
        for active in refused:
            self._close(active, active.abort_reason)
        if admitted:
            await self._prefill(admitted)
        elif self._running:
            await self._decode()
        elif not (mail.requests or has_events or refused):
            await self._stand_idle()
            return True
        self._idle_steps = 0
        return True

    async def _stand_idle(self) -> None:
        """Nothing happens while a copy is under way; but not for ever.

        Every rank counts the same steps, so all of them stop at the same place, outside of any meeting.
        """
        self._idle_steps += 1
        if self._idle_steps > IDLE_STEPS_MAX:
            cache = self._cache
            await never(
                f"nothing for {IDLE_STEPS_MAX} steps: {len(self._waiting)} requests waiting, "
                f"{len(cache.writes)} writes and {len(cache.loads)} loads in flight"
            )

    # Requests

    async def _receive(self) -> Mail:
        transport = self._transport
        mail: Mail | None = None
        if self._pp_rank == 0:
            if self._source is not None:
                requests = self._source.poll()
                is_last = not requests and self._source.is_exhausted and self._is_idle
                mail = Mail(requests, is_last)
            mail = await transport.broadcast("cp", mail, purpose="receive_requests", channel=CHANNEL)
            mail = await transport.broadcast("tp", mail, purpose="receive_requests", channel=CHANNEL)
        else:
            mail = await transport.receive_previous(numel=1, purpose="receive_requests", channel=CHANNEL)
        await transport.send_next(mail, numel=1, purpose="receive_requests", channel=CHANNEL)
        assert mail is not None
        return mail

    @property
    def _is_idle(self) -> bool:
        return not self._waiting and not self._running and self._cache.is_idle

    def _enqueue(self, request: Request) -> None:
        self._probes.request(
            self._order,
            request.rid,
            request.input_tokens,
            request.output_tokens,
            request.conversation,
            request.arrival_ms,
        )
        self._order += 1
        self._waiting.append(Active(request, request.tokens))

    # Batches

    async def _prefill(self, batch: list[Active]) -> None:
        self._cache.start_loading()
        computed = [active.request.input_tokens - active.prefix_tokens for active in batch]
        await self._forward("extend", batch, computed)
        for active in batch:
            self._cache_prompt(active)
        for active in batch:
            steps = max(0, active.request.output_tokens - 1)
            active.decode_steps_left = min(steps, 1) if self._decode_steps == "one" else steps
            if active.decode_steps_left:
                self._running.append(active)
            else:
                self._finish(active)

    async def _decode(self) -> None:
        batch = self._running
        await self._forward("decode", batch, [1] * len(batch))
        still: list[Active] = []
        for active in batch:
            active.decode_steps_left -= 1
            if active.decode_steps_left:
                still.append(active)
            else:
                self._finish(active)
        self._running = still

    async def _forward(
        self, mode: Literal["extend", "decode"], batch: list[Active], tokens: list[int]
    ) -> None:
        """The model: stage by stage, in step with the stage's other ranks.

        The meeting is as long as the batch has tokens, so ranks that disagree on a prefix do not fit
        together here.
        """
        cache, transport = self._cache, self._transport
        numel = sum(tokens)
        rids = [active.rid for active in batch]
        self._probes.batch(mode, rids, numel, len(self._waiting), len(self._running), cache.device_pages_free)
        if self._pp_rank > 0:
            await transport.receive_previous(numel=numel, purpose="forward", channel=CHANNEL)
        if mode == "extend":
            await cache.wait_for_loads()
            counted = [self._compute(active) for active in batch]
        else:
            counted = tokens
        await transport.rendezvous("cp", numel=numel, purpose="forward", channel=CHANNEL)
        await transport.rendezvous("tp", numel=numel, purpose="forward", channel=CHANNEL)
        await transport.send_next(None, numel=numel, purpose="forward", channel=CHANNEL)
        self._probes.forward(mode, numel, rids, counted)

    def _compute(self, active: Active) -> int:
        """Read the prefix's pages, write those of the rest; returns the prompt tokens gone through."""
        prefix_pages = active.owned_pages
        device = self._ledger.device
        wrong = device.check(active.slots[:prefix_pages], active.digests[: prefix_pages * DIGEST_BYTES])
        if wrong is not None:
            self._probes.wrong_page(
                active.rid,
                wrong.page_index,
                wrong.slot,
                wrong.writer,
                wrong.found.hex(),
                wrong.expected.hex(),
            )
        own = split_digests(active.digests[prefix_pages * DIGEST_BYTES :])
        device.write(active.slots[prefix_pages : prefix_pages + len(own)], own, writer=WRITTEN_BY_FORWARD)
        return len(active.computed) // TOKEN_BYTES

    # The tree

    def _cache_prompt(self, active: Active) -> None:
        """Hand the prompt's whole pages to the tree, so that the next request may have them."""
        self._insert(active, active.request.input_tokens // self._page_tokens)

    def _insert(self, active: Active, page_count: int) -> None:
        cache = self._cache
        facts = (cache.device_pages_free, cache.host_pages_free, len(cache.writes))
        done = cache.insert(
            active.tokens,
            active.slots[:page_count],
            active.digests,
            owned_pages=active.owned_pages,
            counted_pages=active.inserted_pages,
        )
        self._probes.insert(
            active.rid,
            done.node.id,
            done.duplicate_pages,
            page_count * self._page_tokens,
            done.new_pages * self._page_tokens,
            *facts,
            done.new_digests.hex(),
        )
        # The request moves over to the tree's pages before anything is evicted for a backup.
        assert active.node is not None
        locks.lock(cache.tree, done.node)
        locks.unlock(cache.tree, active.node)
        active.node = done.node
        active.slots[:page_count] = cache.tree.device_slots(done.node)
        active.owned_pages = active.inserted_pages = page_count
        cache.apply(done.actions)

    def _finish(self, active: Active) -> None:
        request = active.request
        if self._cache_output and request.output_tokens > 1:
            self._cache_answer(active)
        cache = self._cache
        assert active.node is not None
        cache.free_device(active.slots[active.owned_pages :])
        locks.unlock(cache.tree, active.node)
        active.node = None
        self._close(active, SERVED)

    def _cache_answer(self, active: Active) -> None:
        """Prompt and answer as one key; the answer's last token has no KV, having never been fed back."""
        request = active.request
        active.tokens = request.tokens + request.output[: (request.output_tokens - 1) * TOKEN_BYTES]
        page_size_bytes = self._cache.tree.page_size_bytes
        page_count = len(active.tokens) // page_size_bytes
        known = len(active.digests) // DIGEST_BYTES
        fresh = keys.chain_digests(
            active.tokens,
            first_page=known,
            page_size_bytes=page_size_bytes,
            previous=active.digests[-DIGEST_BYTES:],
            key=self._digest_key,
        )
        active.digests += fresh
        self._ledger.device.write(
            active.slots[known:page_count], split_digests(fresh), writer=WRITTEN_BY_FORWARD
        )
        self._insert(active, page_count)

    def _close(self, active: Active, reason: str) -> None:
        output_tokens = active.request.output_tokens if reason == SERVED else 0
        self._probes.finish(active.rid, reason, output_tokens)
        if self._source is not None:
            self._source.finished(active.rid, is_served=reason == SERVED)

    def _audit(self) -> None:
        """The books at the end: every page is free or in the tree, as this rank and the group count."""
        tree, tiers = self._cache.tree, self._cache.tiers
        for node in tree.walk():
            assert not (node.lock_count or node.host_lock_count or node.write_pending), (
                f"{node} is still held at the end: host locks {node.host_lock_count}, "
                f"write pending {node.write_pending}"
            )
        for pool, memory, room, evictable, protected in (
            ("device", tiers.device, tiers.device_room, tree.evictable_pages, tree.protected_pages),
            ("host", tiers.host, tiers.host_room, tree.host_pages, 0),
        ):
            if memory is None:
                continue
            used = evictable + protected
            assert memory.pages_used == used, (
                f"{pool}: {memory.pages_used} pages in use, the tree has {evictable} evictable "
                f"+ {protected} protected"
            )
            available = total = None
            if room.page_count:
                available, total = room.pages_free, room.page_count
                assert available + used == total, f"{pool}: {available} available + {used} used != {total}"
            self._probes.pool_audit(pool, available, evictable, protected, total)
