"""Digests of values under a key that the ranks of a job share and that no log holds.

Equal values have equal digests on all of them; without the key nobody finds a value by trying some.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

# Every environment has this one.
COMMON_ALGORITHM = "blake2b-64"
FAST_ALGORITHM = "xxh3-64"
KEY_BITS = 64

# 16 hex characters.
Digest = Callable[[bytes | memoryview], str]


def best_algorithm() -> str:
    """The fastest one that this environment has."""
    return COMMON_ALGORITHM if _xxh3(0) is None else FAST_ALGORITHM


def keyed_digest(algorithm: str, key: int) -> Digest:
    """The digest of that name under `key`, 0..2**64-1.

    Raises:
        ValueError: this environment has no such algorithm.
    """
    digest = _blake2b(key) if algorithm == COMMON_ALGORITHM else None
    if algorithm == FAST_ALGORITHM:
        digest = _xxh3(key)
    if digest is None:
        raise ValueError(f"no digest {algorithm!r} here, only up to {best_algorithm()}")
    return digest


def _blake2b(key: int) -> Digest:
    fresh = blake2b(digest_size=8, key=key.to_bytes(KEY_BITS // 8, "big"))

    def digest(data: bytes | memoryview) -> str:
        own = fresh.copy()
        own.update(data)
        return own.hexdigest()

    return digest


def _xxh3(key: int) -> Digest | None:
    try:
        from xxhash import xxh3_64_hexdigest
    except ImportError:
        return None

    def digest(data: bytes | memoryview) -> str:
        return xxh3_64_hexdigest(data, key)

    return digest
