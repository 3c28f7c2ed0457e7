"""An operator's commands: on all ranks at the same step, or on none.

A command is refused unless the whole rank is idle. That is no local test: nothing waits, nothing runs and
nothing is queued or in flight, as counted by what has been received and by acks that the group has agreed
on, so every rank refuses or none does. Then attach and detach are put to a vote; see `prefetch`.
"""

from __future__ import annotations

from hicache.control.cache import Cache
from hicache.core import Command
from hicache.probes import Probes

DONE, REFUSED = "done", "refused"
# A reason: some rank has not reached the external tier.
UNREACHABLE = "unreachable"


async def carry_out(command: Command, cache: Cache, probes: Probes, *, is_idle: bool) -> str:
    """Do it, or refuse it with the reason that is returned."""
    reason = _why_not(command, cache, is_idle=is_idle)
    error = ""
    if not reason and command.verb == "flush":
        cache.flush()
    elif not reason:
        is_done, error = await _change_storage(command, cache)
        reason = "" if is_done else UNREACHABLE
    # `error` is what this rank has met with, and may be met with by this rank alone.
    probes.command(command.verb, reason, REFUSED if reason else DONE, not error, error, cache.host_pages_free)
    return reason


def _why_not(command: Command, cache: Cache, *, is_idle: bool) -> str:
    """What every rank can see for itself, or ""."""
    if not is_idle:
        return "not_idle"
    if command.verb == "flush":
        return ""
    if cache.prefetches is None:
        return "no_storage_backend"
    if cache.prefetches.is_attached == (command.verb == "attach"):
        return "attached_already" if cache.prefetches.is_attached else "not_attached"
    return ""


async def _change_storage(command: Command, cache: Cache) -> tuple[bool, str]:
    assert cache.prefetches is not None
    if command.verb == "attach":
        return await cache.prefetches.attach()
    return await cache.prefetches.detach()
