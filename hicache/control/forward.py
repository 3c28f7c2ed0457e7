"""The model's place in a step: stage by stage, in step with the stage's other ranks.

No model is here. A forward is a meeting as long as its batch has tokens, so ranks that disagree on a prefix
do not fit together; and it reads and writes page tags, so that a page in the wrong place is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hicache.control.active import Active
from hicache.control.cache import Cache
from hicache.core import DIGEST_BYTES
from hicache.ledger import FORWARD as WRITTEN_BY_FORWARD
from hicache.ledger import Ledger, split_digests
from hicache.ports import Transport
from hicache.probes import Probes

CHANNEL = "main"


class Forward:
    """One rank's share of the model."""

    def __init__(
        self, cache: Cache, transport: Transport, ledger: Ledger, probes: Probes, *, pp_rank: int
    ) -> None:
        self._cache = cache
        self._transport = transport
        self._ledger = ledger
        self._probes = probes
        self._pp_rank = pp_rank

    async def run(
        self,
        mode: Literal["extend", "decode"],
        batch: Sequence[Active],
        tokens: list[int],
        *,
        waiting_count: int,
        running_count: int,
    ) -> None:
        """Compute `tokens` of each request of the batch; of a prompt, the next `chunk_tokens`."""
        cache, transport = self._cache, self._transport
        numel = sum(tokens)
        rids = [active.rid for active in batch]
        self._probes.batch(mode, rids, numel, waiting_count, running_count, cache.device_pages_free)
        if self._pp_rank > 0:
            await transport.receive_previous(numel=numel, purpose="forward", channel=CHANNEL)
        if mode == "extend":
            await cache.wait_for_loads()
            for active in batch:
                self._extend(active)
        await transport.rendezvous("cp", numel=numel, purpose="forward", channel=CHANNEL)
        await transport.rendezvous("tp", numel=numel, purpose="forward", channel=CHANNEL)
        await transport.send_next(None, numel=numel, purpose="forward", channel=CHANNEL)
        self._probes.forward(mode, numel, rids, tokens)

    def _extend(self, active: Active) -> None:
        """Read the pages before the chunk, write those of the chunk."""
        device, digests, slots = self._ledger.device, active.digests, active.slots
        first = active.computed_tokens // self._cache.page_tokens
        wrong = device.check(slots[:first], digests[: first * DIGEST_BYTES])
        if wrong is not None:
            self._probes.wrong_page(
                active.rid,
                wrong.page_index,
                wrong.slot,
                wrong.writer,
                wrong.found.hex(),
                wrong.expected.hex(),
            )
        active.computed_tokens += active.chunk_tokens
        self._write(active, first, active.computed_tokens // self._cache.page_tokens)

    def write_answer(self, active: Active) -> None:
        """Tags of the pages that an answer has completed, once its tokens have joined the prompt's."""
        known = len(active.digests) // DIGEST_BYTES
        self._cache.name_answer(active)
        self._write(active, known, len(active.digests) // DIGEST_BYTES)

    def _write(self, active: Active, first: int, end: int) -> None:
        tags = split_digests(active.digests[first * DIGEST_BYTES : end * DIGEST_BYTES])
        self._ledger.device.write(active.slots[first:end], tags, writer=WRITTEN_BY_FORWARD)
