"""The waiting queue: first come, first served, or by priority.

Its order is a function of what was received and of agreed retractions, so it is the same on every rank.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from hicache.control.active import Active


def _by_priority(active: Active) -> tuple[int, int]:
    return -active.request.priority, active.order


class Waiting:
    """Requests that have not been admitted, those to be asked first in front.

    Args:
        by_priority: a higher `Request.priority` goes first, then who arrived first, also after a retraction.
            Without it a retracted request goes to the end. Nobody who runs is ever preempted.
    """

    __slots__ = ("_by_priority", "_queue")

    def __init__(self, *, by_priority: bool = False) -> None:
        self._by_priority = by_priority
        self._queue: list[Active] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Active]:
        """In order, as the queue is now: it may change while somebody goes through it."""
        return iter(list(self._queue))

    def in_order(self) -> list[Active]:
        return list(self._queue)

    def add(self, active: Active) -> None:
        if self._by_priority:
            insort(self._queue, active, key=_by_priority)
        else:
            self._queue.append(active)

    def remove(self, active: Active) -> None:
        self._queue.remove(active)

    def find(self, rid: str) -> Active | None:
        return next((active for active in self._queue if active.rid == rid), None)
