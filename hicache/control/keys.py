"""Keys of the tree: packed tokens, whole pages, chained keyed page digests.

A prompt is one `bytes` of little-endian u32 tokens, so comparing two prefixes is one memory compare.
A digest stands for a page and everything before it; it is keyed by the run, so a log that carries
digests can't be searched for a guessed prompt.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from hicache.core import DIGEST_BYTES, TOKEN_BYTES


def pack(tokens: Iterable[int]) -> bytes:
    """Tokens (0..2**32-1) as packed little-endian u32."""
    values = list(tokens)
    return struct.pack(f"<{len(values)}I", *values)


def page_bytes(page_size_tokens: int) -> int:
    return page_size_tokens * TOKEN_BYTES


def chain_digests(
    tokens: bytes, *, first_page: int, page_size_bytes: int, previous: bytes, key: bytes
) -> bytes:
    """Digests of the whole pages of `tokens` from `first_page` on, 8 bytes each.

    Args:
        previous: digest of page `first_page - 1`, or empty at the start of the prompt.
        key: 1 to 64 bytes, one a run.
    """
    blake = hashlib.blake2b
    found = []
    end = len(tokens) - page_size_bytes + 1
    for at in range(first_page * page_size_bytes, end, page_size_bytes):
        previous = blake(
            previous + tokens[at : at + page_size_bytes], digest_size=DIGEST_BYTES, key=key
        ).digest()
        found.append(previous)
    return b"".join(found)
