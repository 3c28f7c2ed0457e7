"""One rank's scheduler lane: continuous batching, one iteration a step.

    receive -> enqueue, abort, carry out -> event round -> retries -> stash the chunked request
            -> admit and load back -> alloc -> forward -> insert, finish

The first rank of a replica has the front door; what it receives is broadcast along cp and tp and relayed
down the pipeline, so every rank sees the same arrivals in the same order. A step prefills the requests
that were admitted, or else decodes those that run; nobody who runs is preempted for somebody who waits.

What arrives is dealt with before a batch is formed, and a batch is done with when its step ends. So an abort
finds a request waiting, running or between two chunks, and never in the middle of a batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

from hicache.config import Config
from hicache.control import keys
from hicache.control.active import Active
from hicache.control.admission import Admission, Batch
from hicache.control.audit import audit
from hicache.control.cache import Cache
from hicache.control.capacity import agree_capacity
from hicache.control.commands import REFUSED, UNREACHABLE, carry_out
from hicache.control.event_round import EventRound
from hicache.control.forward import CHANNEL, Forward
from hicache.control.mail import Mail, decode, encode
from hicache.control.patience import Patience
from hicache.control.retraction import by_worth, pages_missing, start_again
from hicache.control.waiting import Waiting
from hicache.core import DIGEST_BYTES, TOKEN_BYTES, Abort, Arrival, Command, Request
from hicache.ledger import Ledger
from hicache.loop import PAUSE, never
from hicache.ports import Clock, Source, Transport
from hicache.probes import Probes

# Why a request ended, as the finish record has it; `too_long` comes from admission.
SERVED = "stop"
ABORTED = "abort"
OUT_OF_MEMORY = "out_of_memory"


class Scheduler:
    """The scheduler lane of one rank. Ends when the front door has closed and nothing is left to do.

    Args:
        source: the front door, on the first rank of a replica.
        digest_key: key of the run's page digests, and of the digest that stands for a namespace.
        on_end: called once, when the lane has ended as it should.
        lanes: probes of the rank's other lanes; what they record carries the scheduler's step.
    """

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
        clock: Clock,
        pp_rank: int,
        config: Config,
        digest_key: bytes,
        on_end: Callable[[], None],
        lanes: Sequence[Probes] = (),
    ) -> None:
        self._cache = cache
        self._admission = admission
        self._event_round = event_round
        self._transport = transport
        self._probes = probes
        self._source = source
        self._clock = clock
        self._pp_rank = pp_rank
        self._config = config
        self._digest_key = digest_key
        self._on_end = on_end
        self._tracer = probes.tracer
        self._lane_tracers = [own.tracer for own in lanes]
        self._page_tokens = config.page_size_tokens
        self._model = Forward(cache, transport, ledger, probes, pp_rank=pp_rank)
        self._patience = Patience(cache, is_counted=not clock.is_real)
        self._waiting = Waiting(by_priority=config.priority_scheduling)
        self._running: list[Active] = []
        # Between two chunks: one request at a time, and it goes on before anybody else is asked.
        self._chunked: Active | None = None
        # Somebody was retracted, and since then nobody who ran has ended: whoever were admitted now would
        # only push the next one out.
        self._is_full = False
        self._order = 0
        self.step = 0

    @property
    def cache(self) -> Cache:
        """What it decides about, for whoever looks at a rank from beside it."""
        return self._cache

    async def run(self) -> None:
        await agree_capacity(self._cache.tiers, self._transport, self._probes)
        if self._config.storage.backend != "none" and self._config.storage.attached:
            await self._attach_at_start()
        while await self._iterate():
            self.step += 1
            # A rank that meets nobody would otherwise run to its end before another starts.
            await PAUSE
        audit(self._cache, self._probes)
        self._on_end()

    async def _attach_at_start(self) -> None:
        """The store that the run was given; it goes on without where some rank can't reach it."""
        prefetches = self._cache.prefetches
        assert prefetches is not None
        is_attached, error = await prefetches.attach()
        if not is_attached:
            self._probes.command(
                "attach", UNREACHABLE, REFUSED, not error, error, self._cache.host_pages_free
            )
            self._tell_operator(Command("attach"), UNREACHABLE)

    async def _iterate(self) -> bool:
        """One step; False when there will be no other."""
        self._tracer.begin_step(self.step)
        for tracer in self._lane_tracers:
            tracer.step = self.step
        mail = await self._receive()
        if mail.is_last:
            return False
        for arrival in mail.arrivals:
            await self._deal_with(arrival)
        has_events = await self._event_round.run()
        if self._cache.prefetches is not None:
            self._cache.prefetches.process_retries(self._waiting)
        self._stash_chunk()
        batch = await self._form_batch()
        if await self._compute_batch(batch) or mail.arrivals or has_events or batch.refused:
            self._patience.renew()
            self._tracer.end_step(is_idle=False)
        else:
            # What the ranks have agreed on, so that they leave the same steps out of their logs.
            self._tracer.end_step(is_idle=self._is_idle)
            await self._stand_idle(batch)
        return True

    # Arrivals

    async def _receive(self) -> Mail:
        transport = self._transport
        mail: Mail | None = None
        message: bytes | None = None
        if self._pp_rank == 0:
            if self._source is not None:
                arrivals = self._source.poll(is_idle=self._is_idle)
                is_last = not arrivals and self._source.is_exhausted and self._is_idle
                mail = Mail(arrivals, is_last)
                message = encode(mail)
            message = await transport.broadcast("cp", message, purpose="receive_requests", channel=CHANNEL)
            message = await transport.broadcast("tp", message, purpose="receive_requests", channel=CHANNEL)
        else:
            message = await transport.receive_previous(numel=1, purpose="receive_requests", channel=CHANNEL)
        await transport.send_next(message, numel=1, purpose="receive_requests", channel=CHANNEL)
        if mail is not None:
            return mail
        assert isinstance(message, bytes), f"mail: received {type(message).__name__}"
        return decode(message)

    @property
    def _is_idle(self) -> bool:
        """Agreed state: equal on every rank at the same step."""
        has_requests = self._waiting or self._running or self._chunked is not None
        return not has_requests and self._cache.is_idle

    async def _deal_with(self, arrival: Arrival) -> None:
        if isinstance(arrival, Request):
            self._enqueue(arrival)
        elif isinstance(arrival, Abort):
            self._abort(arrival.rid)
        else:
            await self._carry_out(arrival)

    async def _carry_out(self, command: Command) -> None:
        reason = await carry_out(command, self._cache, self._probes, is_idle=self._is_idle)
        self._tell_operator(command, reason)

    def _tell_operator(self, command: Command, reason: str) -> None:
        if self._source is not None:
            self._source.carried_out(command, reason)

    def _enqueue(self, request: Request) -> None:
        namespace = keys.namespace(request.extra_key, request.cache_salt)
        self._probes.request(
            self._order,
            request.rid,
            self._digest(namespace),
            self._digest(request.tokens + request.output),
            request.priority,
            request.input_tokens,
            request.output_tokens,
            request.conversation,
            request.arrival_ms,
        )
        active = Active(request, self._order, request.tokens, namespace=namespace)
        self._order += 1
        if request.input_tokens:
            self._wait(active)
        else:
            # There is nothing to compute an answer from.
            self._close(active, "empty_prompt")

    def _digest(self, content: bytes) -> str:
        """What stands for content in the log, from which it can't be guessed; "" for none."""
        if not content:
            return ""
        return hashlib.blake2b(content, key=self._digest_key, digest_size=DIGEST_BYTES).hexdigest()

    def _wait(self, active: Active) -> None:
        """Into the waiting queue; what the tree lacks of its prompt is asked for at once."""
        cache = self._cache
        if cache.prefetches is not None and cache.prefetches.is_attached:
            page_limit = active.usable_pages(self._page_tokens)
            cache.prefetches.submit(active, cache.match(active, page_limit, "submit"))
        self._waiting.add(active)

    def _abort(self, rid: str) -> None:
        """End a request where it sits. One that is not known has ended before its client went away."""
        if waiting := self._waiting.find(rid):
            self._probes.abort(rid, "waiting")
            self._waiting.remove(waiting)
            self._end(waiting, ABORTED)
        elif self._chunked is not None and self._chunked.rid == rid:
            self._probes.abort(rid, "chunked")
            chunked, self._chunked = self._chunked, None
            self._end(chunked, ABORTED)
        elif running := next((active for active in self._running if active.rid == rid), None):
            self._probes.abort(rid, "running")
            self._running.remove(running)
            self._cache_answer(running)
            self._end(running, ABORTED)
        else:
            self._probes.abort(rid, "")

    # Batches

    def _stash_chunk(self) -> None:
        """Hand the tree what the last chunk has computed, so that others may have it and it stays."""
        if self._chunked is not None:
            self._insert(self._chunked, self._chunked.computed_tokens // self._page_tokens)

    async def _form_batch(self) -> Batch:
        batch = await self._admission.form(
            self._waiting, len(self._running), chunked=self._chunked, is_full=self._is_full
        )
        self._chunked = batch.chunked
        for active in batch.refused:
            self._end(active, active.abort_reason)
        return batch

    async def _compute_batch(self, batch: Batch) -> bool:
        """Prefill before decode; False when there was nothing to compute."""
        if batch.admitted:
            await self._prefill(batch)
            return True
        return bool(self._running) and await self._decode()

    async def _prefill(self, batch: Batch) -> None:
        self._cache.start_loading()
        admitted = batch.admitted
        await self._forward("extend", admitted, [active.chunk_tokens for active in admitted])
        whole = [active for active in admitted if active is not batch.chunked]
        for active in whole:
            self._insert(active, active.prompt_tokens // self._page_tokens)
        for active in whole:
            self._start_decode(active)

    def _start_decode(self, active: Active) -> None:
        """The prefill gave the next token of the answer; the rest is decoded."""
        request = active.request
        active.output_tokens_done = min(active.output_tokens_done + 1, request.output_tokens)
        steps = request.output_tokens - active.output_tokens_done
        active.decode_steps_left = min(steps, 1) if self._config.decode_steps == "one" else steps
        if active.decode_steps_left:
            self._running.append(active)
        else:
            self._finish(active)

    async def _decode(self) -> bool:
        if not await self._find_decode_pages():
            return False
        batch = self._running
        if not batch:
            return True
        await self._forward("decode", batch, [1] * len(batch))
        still: list[Active] = []
        for active in batch:
            active.decode_steps_left -= 1
            if active.decode_steps_left:
                active.output_tokens_done += 1
                still.append(active)
            else:
                active.output_tokens_done = active.request.output_tokens
                self._finish(active)
        self._running = still
        return True

    async def _find_decode_pages(self) -> bool:
        """Pages for the next token of all who run, at the cost of some of them if need be.

        False when the last one left has to wait until something in flight lets go of pages.
        """
        if not self._config.cache_output:
            return True
        assert self._chunked is None, "a decode between two chunks, whose pages are promised"
        cache = self._cache
        while not await cache.make_room(sum(missing := pages_missing(self._running, self._page_tokens))):
            if len(self._running) > 1:
                self._retract(by_worth(self._running)[-1])
            elif not cache.is_idle:
                return False
            else:
                self._end(self._running.pop(), OUT_OF_MEMORY)
        if sum(missing):
            slots = await cache.alloc_device(sum(missing), "decode")
            for active, count in zip(self._running, missing, strict=True):
                active.slots += slots[:count]
                del slots[:count]
        return True

    def _retract(self, active: Active) -> None:
        """Somebody who runs gives its pages back and waits again, with its answer so far as prompt."""
        cache = self._cache
        pages = len(active.slots) - active.owned_pages
        self._probes.retract(
            active.rid,
            active.attempt,
            active.output_tokens_done,
            pages,
            cache.device_pages_free,
            cache.host_pages_free,
            len(self._running),
        )
        self._running.remove(active)
        self._release(active)
        start_again(active)
        self._is_full = True
        self._wait(active)

    async def _forward(
        self, mode: Literal["extend", "decode"], batch: list[Active], tokens: list[int]
    ) -> None:
        await self._model.run(
            mode, batch, tokens, waiting_count=len(self._waiting), running_count=len(self._running)
        )

    # The tree

    def _insert(self, active: Active, page_count: int) -> None:
        """Hand a request's first pages to the tree.

        What lies behind the prompt becomes a node of its own, so that an answer can be evicted without it;
        not where nodes carry a state, which there is only at the end.
        """
        prompt_pages = active.request.input_tokens // self._page_tokens
        is_cut = prompt_pages < page_count and not self._cache.tree.has_state
        self._cache.insert(active, page_count, prompt_pages=prompt_pages if is_cut else 0)

    def _cache_answer(self, active: Active) -> None:
        """Prompt and answer as one key, as far as there is KV: the last token was never fed back."""
        fed_back = active.output_tokens_done - 1
        if not self._config.cache_output or fed_back < 1:
            return
        request = active.request
        active.tokens = request.tokens + request.output[: fed_back * TOKEN_BYTES]
        self._model.write_answer(active)
        self._insert(active, len(active.digests) // DIGEST_BYTES)

    # Ends

    def _finish(self, active: Active) -> None:
        self._cache_answer(active)
        self._end(active, SERVED)

    def _end(self, active: Active, reason: str) -> None:
        self._release(active)
        self._close(active, reason)

    def _release(self, active: Active) -> None:
        """The one way out of every queue, whether a request is done, aborted or retracted."""
        if active.lock is None:
            # It still waits, so a prefetch may be under way for it.
            if self._cache.prefetches is not None:
                self._cache.prefetches.cancelled(active)
            return
        self._cache.release(active)
        # Whoever is retracted says after this that memory is short.
        self._is_full = False

    def _close(self, active: Active, reason: str) -> None:
        self._probes.finish(active.rid, reason, active.output_tokens_done)
        if self._source is not None:
            self._source.finished(active.rid, is_served=reason == SERVED)

    async def _stand_idle(self, batch: Batch) -> None:
        """Nothing happens while a copy or the external tier is at work; but not for ever.

        A rank without work waits for its clients as long as they like.
        """
        if not self._is_idle and not self._patience.spend(batch.blocked):
            why = self._patience.why(
                batch.blocked, waiting_count=len(self._waiting), running_count=len(self._running)
            )
            await never(why)
        await self._clock.idle()
