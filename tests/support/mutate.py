"""Damaged copies of a sample: what a full disk, a cut transfer or an enemy makes of a file.

Equal sample, count and seed give equal copies, so a failure is found again by its number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

# Numbers that readers trip over: beyond 64 bits, beyond a float, beyond what int() turns into text.
HUGE = (b"-1", b"0", b"NaN", b"-Infinity", b"1e999", b"9" * 20, b"-" + b"9" * 40, b"9" * 5000)
SPAN_MAX = 64
ROUNDS_MAX = 4


def mutations(sample: bytes, count: int, seed: int) -> Iterator[bytes]:
    """`count` damaged copies, each with one to four wounds; now and then one is equal to the sample."""
    random = Random(seed)
    for _ in range(count):
        mutant = sample
        for _ in range(random.randint(1, ROUNDS_MAX)):
            mutant = random.choice(WOUNDS)(mutant, random)
        yield mutant


def truncations(sample: bytes) -> Iterator[bytes]:
    """The sample cut before each of its bytes, the empty file first."""
    return (sample[:length] for length in range(len(sample)))


def _flip(data: bytes, random: Random) -> bytes:
    if not data:
        return b"\x80"
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]


def _overwrite(data: bytes, random: Random) -> bytes:
    start, end = _span(data, random)
    return data[:start] + random.randbytes(end - start) + data[end:]


def _delete(data: bytes, random: Random) -> bytes:
    start, end = _span(data, random)
    return data[:start] + data[end:]


def _duplicate(data: bytes, random: Random) -> bytes:
    start, end = _span(data, random)
    return data[:end] + data[start:end] * random.choice((1, 2, 100)) + data[end:]


def _splice(data: bytes, random: Random) -> bytes:
    """A piece from elsewhere in the sample, so that what is wrong is only its place."""
    start, end = _span(data, random)
    at = random.randrange(len(data) + 1)
    return data[:at] + data[start:end] + data[at:]


def _huge_number(data: bytes, random: Random) -> bytes:
    """A run of digits becomes a number that nobody expects."""
    at = random.randrange(len(data) + 1)
    start = next((i for i in range(at, len(data)) if data[i : i + 1].isdigit()), None)
    if start is None:
        return data + random.choice(HUGE)
    end = start
    while data[end : end + 1].isdigit():
        end += 1
    return data[:start] + random.choice(HUGE) + data[end:]


def _cut(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _span(data: bytes, random: Random) -> tuple[int, int]:
    start = random.randrange(len(data) + 1)
    return start, min(len(data), start + random.randint(1, SPAN_MAX))


WOUNDS: tuple[Callable[[bytes, Random], bytes], ...] = (
    *(_flip, _flip, _overwrite, _delete, _duplicate, _splice, _huge_number, _huge_number, _cut),
)
