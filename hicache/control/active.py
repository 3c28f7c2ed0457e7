"""A request on this rank, from its arrival to its end, as scheduler, cache and prefetches share it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hicache.control.locks import DeviceLock
from hicache.core import PLAIN, TOKEN_BYTES, Request, Slot


@dataclass(slots=True, eq=False)
class Active:
    """What one rank knows of a request.

    Attributes:
        order: place in the order of arrival, equal on every rank.
        namespace: `keys.namespace` of the request.
        tokens: prompt, and later the answer as far as it enters the tree.
        digests: 8 bytes, keyed, for each whole page of `tokens` that has been digested.
        hashes: 32 bytes for each whole page of `tokens` that has been hashed; empty without storage.
        attempt: how often it has been retracted.
        slots: its device page slots, position by position.
        owned_pages: leading slots that are the tree's; it may free only those behind.
        inserted_pages: leading pages it has handed to the tree itself.
        lock: its device lock; None while it waits.
        prefix_tokens: tokens it did not have to compute.
        computed_tokens: prompt tokens that are on the device by now, prefix included; while it is less than
            the prompt, the request is between two chunks.
        chunk_tokens: prompt tokens that its next forward computes.
        pages_due: pages it has been promised and has not got yet.
        output_tokens_done: tokens of the answer so far.
        storage_first_page, storage_pages: the span of its prompt that a prefetch has brought to the host
            for it, until it is admitted.
        matched_pages_at_submit: device and host pages found when its prefetch was decided.
        abort_reason: why it ends without its answer, or "".
    """

    request: Request
    order: int
    tokens: bytes
    namespace: bytes = PLAIN
    digests: bytes = b""
    hashes: bytes = b""
    attempt: int = 0
    slots: list[Slot] = field(default_factory=list)
    owned_pages: int = 0
    inserted_pages: int = 0
    lock: DeviceLock | None = None
    prefix_tokens: int = 0
    computed_tokens: int = 0
    chunk_tokens: int = 0
    pages_due: int = 0
    decode_steps_left: int = 0
    output_tokens_done: int = 0
    storage_first_page: int = 0
    storage_pages: int = 0
    matched_pages_at_submit: int = 0
    abort_reason: str = ""

    @property
    def rid(self) -> str:
        return self.request.rid

    @property
    def handle(self) -> tuple[str, int]:
        """Who a prefetch is for: a retracted request is another one."""
        return self.request.rid, self.attempt

    def usable_pages(self, page_tokens: int) -> int:
        """Pages of its prompt that may come from a cache: at least one token must be computed."""
        return (self.prompt_tokens - 1) // page_tokens

    @property
    def prompt_tokens(self) -> int:
        """Tokens of `tokens` that its prefill has to have on the device."""
        return len(self.tokens) // TOKEN_BYTES
