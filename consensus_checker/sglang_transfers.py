"""What hooks look at where prefill and decode are servers of their own: polls, and what a queue has given.

Owns what this rank polled, until that is agreed on, and how polls came out last. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracer.keyed import Digest
from tracer.record import Place

# How polls came out last is known of so many places.
PLACES_MAX = 64


class Transfers:
    """Looks of one process.

    Attributes:
        own_polls: what this rank polled, before it was agreed on; None where that is not known.
    """

    def __init__(self) -> None:
        self.own_polls: list[int] | None = None

    def begin(self, digest: Digest, place: Place) -> None:
        """A recording begins."""
        self._digest = digest
        self._has_contexts = place.sizes.get("cp", 1) > 1
        self._polled: dict[tuple[str, int], list[int]] = {}
        self.begin_polls()

    def begin_polls(self) -> None:
        self.own_polls, self._is_polled = None, False

    def note_polls(self, flags: Sequence[int]) -> None:
        """What is about to be agreed on: the first time of a poll it is this rank's own."""
        if not self._is_polled:
            self.own_polls, self._is_polled = list(flags), True

    def has_changed(self, place: str, polls: Sequence[int]) -> bool:
        """Whether polls of so many transfers came out otherwise than last time: what is agreed on decides."""
        key, now = (place, len(polls)), list(polls)
        if self._polled.get(key) == now:
            return False
        if len(self._polled) >= PLACES_MAX:
            self._polled.clear()
        self._polled[key] = now
        return bool(now)

    def has_moved(self, result: Any) -> bool:
        """Whether a queue has given anything: requests, or those and the ones that failed."""
        return bool(_part(result, 0) or _part(result, 1))

    def moved(self, result: Any, at: int) -> list[Any]:
        """How many requests a queue has given, and which, in its order; with 1 those that failed."""
        return self._members([getattr(req, "req", req).rid for req in _part(result, at)])

    def ring(self, result: Any, at: int) -> list[Any]:
        """The same of ids that have no order."""
        return self._members(sorted(_part(result, at)))

    def _members(self, rids: Sequence[str]) -> list[Any]:
        return [len(rids), self._digest("\0".join(rids).encode()) if rids else ""]

    def pages_sent(self, indices: Any, page_size: int) -> int:
        return -(-len(indices) // page_size)

    def without_cp(self, value: Any) -> Any:
        """Of ranks that share a context some send nothing, and are told nothing."""
        return None if self._has_contexts else value

    def restored(self, request: Any) -> str:
        """How far the restore of a prefix has come."""
        return str(getattr(request.hicache_restore_status, "value", ""))


def _part(result: Any, at: int) -> Sequence[Any]:
    """Of what a queue has given: all of it, or one of the two lists."""
    is_pair = isinstance(result, tuple | list) and bool(result) and isinstance(result[0], tuple | list)
    parts = result if is_pair else (result,)
    return (parts[at] or ()) if at < len(parts) else ()
