"""Decode steps that find no memory: how much a step needs, who goes, and how a request starts again.

A request has KV for its prompt and for each token of its answer but the last, which is never fed back:

    0            input           input + done - 1      input + output - 1
    |--- prompt ---|-- answer so far --|--- still to come ---|
                                       ^ written by the next decode step
"""

from __future__ import annotations

from collections.abc import Iterable

from hicache.control.active import Active
from hicache.core import TOKEN_BYTES


def kv_tokens_at_end(active: Active) -> int:
    """Tokens with KV when its answer is complete."""
    request = active.request
    return request.input_tokens + max(0, request.output_tokens - 1)


def kv_tokens_after_step(active: Active) -> int:
    """Tokens with KV behind its next decode step. One step may stand for several tokens."""
    if active.decode_steps_left == 1:
        return kv_tokens_at_end(active)
    return active.request.input_tokens + active.output_tokens_done


def pages_missing(running: Iterable[Active], page_tokens: int) -> list[int]:
    """Pages that each needs for its next decode step beyond those that it has."""
    return [max(0, -(-kv_tokens_after_step(active) // page_tokens) - len(active.slots)) for active in running]


def by_worth(running: Iterable[Active]) -> list[Active]:
    """Those worth most first; the last one is the first to go.

    Worth is what would be lost: tokens of the answer so far; of equals, who has the shorter prompt stays,
    and of those again who came to the batch first. Source: sglang 0.5.23, retraction by length.
    """
    return sorted(running, key=lambda active: (-active.output_tokens_done, active.request.input_tokens))


def start_again(active: Active) -> None:
    """Turn a request that has been released into one that waits: its answer so far joins the prompt.

    Where the answer's tokens are not known, only their number, it is given again from its first token.
    What it had computed is not handed to the tree: the memory is wanted at once. It counts as another
    request from here on, for prefetches and for hit counts.
    """
    request = active.request
    done = min(active.output_tokens_done, len(request.output) // TOKEN_BYTES)
    active.output_tokens_done = done
    active.tokens = request.tokens + request.output[: done * TOKEN_BYTES]
    active.attempt += 1
    active.prefix_tokens = active.computed_tokens = active.chunk_tokens = 0
    active.pages_due = active.decode_steps_left = 0
