"""When a rank that has had nothing to do for long says that it is stuck, and how.

Every rank counts the same steps, so all of them stop at the same place, outside of any meeting.
"""

from __future__ import annotations

from collections.abc import Sequence

from hicache.control.active import Active
from hicache.control.cache import Cache

# Steps in which nothing was received, applied, admitted or computed, before a rank says that it is stuck;
# and the same while the external tier is at work, which may be slow without being dead.
IDLE_STEPS_MAX = 5_000
STORAGE_IDLE_STEPS_MAX = 10_000
# Prefetches that are named then.
NAMED_MAX = 3


class Patience:
    """Counts steps without progress in a row.

    Args:
        is_counted: false in real time, where a wait has a limit in seconds (`--timeout`), and steps say
            nothing about how long a store may take.
    """

    def __init__(self, cache: Cache, *, is_counted: bool) -> None:
        self._cache = cache
        self._is_counted = is_counted
        self._steps = 0

    def renew(self) -> None:
        """Something has happened."""
        self._steps = 0

    def spend(self, blocked: Sequence[Active]) -> bool:
        """One more step without progress; False when that was one too many.

        A request that waits for a deadline will see it pass, so such steps do not count.

        Args:
            blocked: requests that were asked for admission and wait for their prefetch.
        """
        prefetches = self._cache.prefetches
        if not self._is_counted:
            return True
        if blocked and prefetches is not None and prefetches.has_timed_waits:
            return True
        self._steps += 1
        is_storage_at_work = prefetches is not None and not prefetches.is_idle
        return self._steps <= (STORAGE_IDLE_STEPS_MAX if is_storage_at_work else IDLE_STEPS_MAX)

    def why(self, blocked: Sequence[Active], *, waiting_count: int, running_count: int) -> str:
        """What there was to do, and which request waits for which operation."""
        cache = self._cache
        parts = [
            f"nothing for {self._steps - 1} steps: {waiting_count} requests waiting, "
            f"{running_count} running, {len(cache.writes)} writes and {len(cache.loads)} loads in flight"
        ]
        if cache.prefetches is None:
            return parts[0]
        for prefetch in list(cache.prefetches.unfinished)[:NAMED_MAX]:
            rid, attempt = prefetch.handle
            parts.append(
                f"{rid} (attempt {attempt}) waits for prefetch {prefetch.op}, "
                f"{prefetch.completed_pages} of {prefetch.pages_asked} pages read"
                if any(cache.prefetches.ongoing(active) is prefetch for active in blocked)
                else f"prefetch {prefetch.op} has not come back, though {rid} waits for it no more"
            )
        backups = [backup.op for backup in cache.prefetches.backups]
        if backups:
            parts.append(f"{len(backups)} backups to storage are not acknowledged, from {backups[0]} on")
        return "; ".join(parts)
