"""Page slots of a tier, and the count of them that the whole group agrees on.

`SlotMemory` is physical: this rank's slots, which may run out or fail on this rank alone. `Room` is what
decisions read: a count that starts from an agreed capacity and changes only with agreed decisions, so it
is equal on every rank of a replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hicache.core import Slot
from hicache.ports import Memory


class SlotMemory:
    """Slots of one tier on one rank. Implements `ports.Memory`.

    Args:
        page_count: slots there are; 0 means no limit.
    """

    __slots__ = ("_free", "_next", "_used", "page_count")

    def __init__(self, page_count: int) -> None:
        self.page_count = page_count
        self._free: list[Slot] = []
        self._next = 0
        self._used = bytearray()

    @property
    def pages_free(self) -> int | None:
        if self.page_count == 0:
            return None
        return self.page_count - self._next + len(self._free)

    @property
    def pages_used(self) -> int:
        return self._next - len(self._free)

    def alloc(self, page_count: int) -> list[Slot] | None:
        free = self._free
        if self.page_count and page_count > self.page_count - self._next + len(free):
            return None
        reused = min(page_count, len(free))
        slots = free[len(free) - reused :]
        del free[len(free) - reused :]
        if fresh := page_count - reused:
            slots += range(self._next, self._next + fresh)
            self._next += fresh
            self._used.extend(b"\0" * fresh)
        used = self._used
        for slot in slots:
            assert not used[slot], f"slot {slot} is handed out twice"
            used[slot] = 1
        return slots

    def free(self, slots: Sequence[Slot]) -> None:
        used = self._used
        for slot in slots:
            assert used[slot], f"slot {slot} is freed twice"
            used[slot] = 0
        self._free += slots


class Room:
    """Free pages of a tier as the group counts them.

    Args:
        page_count: agreed capacity; 0 means no limit.
    """

    __slots__ = ("page_count", "pages_free")

    def __init__(self, page_count: int) -> None:
        self.page_count = page_count
        self.pages_free = page_count

    @property
    def available(self) -> int | None:
        """Free pages; None where there is no limit."""
        return self.pages_free if self.page_count else None

    def shortage(self, page_count: int) -> int:
        """Pages missing before `page_count` can be taken; 0 when they can."""
        if self.page_count == 0:
            return 0
        return max(0, page_count - self.pages_free)

    def take(self, page_count: int) -> None:
        if self.page_count:
            assert page_count <= self.pages_free, f"{page_count} pages of {self.pages_free} free"
            self.pages_free -= page_count

    def give_back(self, page_count: int) -> None:
        if self.page_count:
            self.pages_free += page_count
            assert self.pages_free <= self.page_count, f"{self.pages_free} free of {self.page_count}"

    def resize(self, page_count: int) -> None:
        """The agreed capacity, before anything has been taken."""
        assert self.pages_free == self.page_count, f"{self.page_count - self.pages_free} pages are taken"
        self.page_count = self.pages_free = page_count


@dataclass(frozen=True, slots=True)
class Tiers:
    """The memories of one rank and the agreed counts over them. Without a host tier `host` is None.

    Attributes:
        states, states_room: host slots of the recurrent states, one a node; None without that pool.
    """

    device: Memory
    device_room: Room
    host: Memory | None
    host_room: Room
    states: Memory | None = None
    states_room: Room = field(default_factory=lambda: Room(0))


@dataclass(frozen=True, slots=True)
class HostSlots:
    """Host slots for the pages of one node or one prefetch, and for its state where it has one."""

    pages: list[Slot]
    states: list[Slot]
