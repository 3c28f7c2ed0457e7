"""Page tags: the data plane's understudy.

Each slot carries the digest of the page that was last written to it and the id of its writer. A wrong
page, a stale slot or a read before the bytes have moved is found by comparing tags, without torch. A
digest is chained and keyed: equal digests mean equal content after equal prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hicache.core import DIGEST_BYTES, OpId, Slot

EMPTY = b"\0" * DIGEST_BYTES
# Writer of pages that the model computed, as opposed to a transfer's op id.
FORWARD: OpId = -1


@dataclass(frozen=True, slots=True)
class WrongPage:
    """A slot that does not hold what its reader was promised."""

    page_index: int
    slot: Slot
    found: bytes
    expected: bytes
    writer: OpId


class TierTags:
    """Tags of one tier's slots on one rank."""

    __slots__ = ("_tags", "_writers")

    def __init__(self) -> None:
        self._tags: list[bytes] = []
        self._writers: list[OpId] = []

    def write(self, slots: Sequence[Slot], tags: Sequence[bytes], *, writer: OpId) -> None:
        assert len(slots) == len(tags), f"{len(slots)} slots, {len(tags)} tags"
        if not slots:
            return
        if (short := max(slots) + 1 - len(self._tags)) > 0:
            grow = max(short, len(self._tags))
            self._tags.extend([EMPTY] * grow)
            self._writers.extend([FORWARD] * grow)
        own_tags, own_writers = self._tags, self._writers
        for slot, tag in zip(slots, tags, strict=True):
            own_tags[slot] = tag
            own_writers[slot] = writer

    def read(self, slots: Sequence[Slot]) -> list[bytes]:
        tags = self._tags
        known = len(tags)
        return [tags[slot] if slot < known else EMPTY for slot in slots]

    def check(self, slots: Sequence[Slot], expected: bytes) -> WrongPage | None:
        """The first slot whose tag differs from its 8 bytes of `expected`, or None."""
        found = self.read(slots)
        if b"".join(found) == expected:
            return None
        for index, (slot, tag) in enumerate(zip(slots, found, strict=True)):
            want = expected[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            if tag != want:
                writer = self._writers[slot] if slot < len(self._writers) else FORWARD
                return WrongPage(index, slot, tag, want, writer)
        raise AssertionError(f"{len(slots)} slots read, {len(expected)} bytes of tags expected")


class Ledger:
    """Tags of both tiers of one rank."""

    __slots__ = ("device", "host")

    def __init__(self) -> None:
        self.device = TierTags()
        self.host = TierTags()


def split_digests(digests: bytes) -> list[bytes]:
    """One 8-byte tag a page."""
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
