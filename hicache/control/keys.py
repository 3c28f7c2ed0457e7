"""Keys of the tree: packed tokens, whole pages, namespaces, and two chains over the pages.

A prompt is one `bytes` of little-endian u32 tokens, so comparing two prefixes is one memory compare.
Both chains give a page a name that stands for it and everything before it, and start from the namespace:

    digests  8 bytes, keyed by the run: a log that carries them can't be searched for a guessed prompt
    hashes   32 bytes, SHA-256, the same everywhere and always: what an external store calls the page
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise

from hicache.core import DIGEST_BYTES, HASH_BYTES, PLAIN, TOKEN_BYTES

# What every namespace's seed begins with, so that it can never be the hash of a page.
NAMESPACE_TAG = b"sglang-cache-namespace-v1"
TOKEN_MAX = (1 << 32) - 1
WIDE_TOKEN_MAX = (1 << 63) - 1
# First byte of a page that has a token above `TOKEN_MAX`, before its tokens as u64.
WIDE_MARK = b"\xff"


def pack(tokens: Iterable[int]) -> bytes:
    """Tokens (0..2**32-1) as packed little-endian u32."""
    values = array("I", tokens)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def page_bytes(page_size_tokens: int) -> int:
    return page_size_tokens * TOKEN_BYTES


def chain_digests(
    tokens: bytes, *, first_page: int, page_size_bytes: int, previous: bytes, key: bytes
) -> bytes:
    """Digests of the whole pages of `tokens` from `first_page` on, 8 bytes each.

    Args:
        previous: digest of page `first_page - 1`; at the start of the prompt its namespace.
        key: 1 to 64 bytes, one a run.
    """
    # A copy of a keyed state costs less than setting the key anew for each page.
    start = hashlib.blake2b(digest_size=DIGEST_BYTES, key=key).copy
    found = []
    end = len(tokens) - page_size_bytes + 1
    for at in range(first_page * page_size_bytes, end, page_size_bytes):
        state = start()
        state.update(previous + tokens[at : at + page_size_bytes])
        previous = state.digest()
        found.append(previous)
    return b"".join(found)


def chain_hashes(tokens: bytes, *, first_page: int, page_size_bytes: int, previous: bytes) -> bytes:
    """Hashes of the whole pages of `tokens` from `first_page` on, 32 bytes each.

    Args:
        previous: hash of page `first_page - 1`; at the start of the prompt its namespace.
    """
    sha256 = hashlib.sha256
    found = []
    end = len(tokens) - page_size_bytes + 1
    for at in range(first_page * page_size_bytes, end, page_size_bytes):
        previous = sha256(previous + tokens[at : at + page_size_bytes]).digest()
        found.append(previous)
    return b"".join(found)


def hash_names(hashes: bytes) -> list[str]:
    """The name of each page in an external store: 64 hex characters."""
    text = hashes.hex()
    width = 2 * HASH_BYTES
    return [text[at : at + width] for at in range(0, len(text), width)]


def namespace(extra_key: str, cache_salt: str) -> bytes:
    """What the first page of a prompt is chained to: 32 bytes, or none where nothing sets it apart."""
    if not extra_key and not cache_salt:
        return PLAIN
    return hashlib.sha256(NAMESPACE_TAG + _part(extra_key) + _part(cache_salt)).digest()


def _part(text: str) -> bytes:
    """Unambiguous whatever the text holds: absent, or its length and then itself."""
    if not text:
        return b"\x00"
    # Half a surrogate pair must not stop a whole replica.
    encoded = text.encode("utf-8", "surrogatepass")
    return b"\x01" + struct.pack("<Q", len(encoded)) + encoded


def page_hash(tokens: Sequence[int], prior: bytes = PLAIN, *, is_bigram: bool = False) -> bytes:
    """The hash of one page of any kind; `chain_hashes` is the same for many plain ones.

    Args:
        tokens: the page's tokens. A bigram page of n units has n + 1 of them, and unit i is
            `tokens[i], tokens[i + 1]`.
        prior: hash of the page before, or the namespace.
    Raises:
        ValueError: a token below 0 or above 2**63 - 1.
    """
    words = [word for pair in pairwise(tokens) for word in pair] if is_bigram else tokens
    for word in words:
        if not 0 <= word <= WIDE_TOKEN_MAX:
            raise ValueError(f"token {word}: expected 0 to {WIDE_TOKEN_MAX}")
    if max(words, default=0) > TOKEN_MAX:
        payload = WIDE_MARK + struct.pack(f"<{len(words)}Q", *words)
    else:
        payload = struct.pack(f"<{len(words)}I", *words)
    return hashlib.sha256(prior + payload).digest()
