"""Bugs: right parts replaced by wrong ones, so that the checker has something true to find.

Each is a mistake that was made in production, reduced to the one decision that was taken from a fact
that the other ranks did not share. A bug is wired into every rank alike; it does harm where the fault plan
has disturbed one of them. Its healthy twin is the same world without it.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from hicache.control.agreement import EVENT_ROUND, MinThenChain, ReserveThenVote
from hicache.control.pools import HostSlots
from hicache.errors import ConfigError
from hicache.rank import Parts

Wire = Callable[[Parts], None]


class SkipWhenNothingFinished(MinThenChain):
    """Stays away from the reduction when none of this rank's own copies has finished.

    The belief behind it: copies are submitted alike on every rank, so they finish alike. With
    nothing in flight it takes part, so that it differs from the right way only where a rank's own
    completions decide.
    Source: sglang issues 26921 and 27489.
    """

    async def reduce(
        self, local: Sequence[int], *, op: Literal["min", "max"], purpose: str, transfers_in_flight: int
    ) -> list[int]:
        # An event round's vector begins with the writes and the loads that are done.
        if purpose == EVENT_ROUND and transfers_in_flight and not any(local[:2]):
            return list(local)
        return await super().reduce(local, op=op, purpose=purpose, transfers_in_flight=transfers_in_flight)


class OwnMemoryDecides(ReserveThenVote):
    """Refuses a backup when this rank's own host memory is full, and asks nobody.

    Source: sglang issue 28429.
    """

    def stands(self, slots: HostSlots | None) -> bool:
        return slots is not None

    def committed(self, queue_len: int, agreed: int) -> int:
        return queue_len


def skip_collective_when_empty(parts: Parts) -> None:
    parts.agreement = lambda transport, pp_rank: SkipWhenNothingFinished(transport, pp_rank=pp_rank)


def local_host_room_decides_backup(parts: Parts) -> None:
    parts.reservations = OwnMemoryDecides


BUGS: dict[str, Wire] = {
    "local_host_room_decides_backup": local_host_room_decides_backup,
    "skip_collective_when_empty": skip_collective_when_empty,
}


def find_bugs(names: Sequence[str]) -> list[Wire]:
    """The substitutions called `names`.

    Raises:
        ConfigError: a name that is none of them.
    """
    for name in names:
        if name not in BUGS:
            raise ConfigError(f"--bug {name!r}: expected one of {', '.join(sorted(BUGS))}")
    return [BUGS[name] for name in names]


def load_plugin(path: Path) -> Wire:
    """A user's own substitution: a Python file with a function `wire(parts)`.

    Raises:
        ConfigError: the file can't be read or run, or has no such function.
    """
    try:
        if not path.is_file():
            raise ConfigError(f"--plugin {path}: no such file; expected Python with a function wire(parts)")
        wire = runpy.run_path(str(path)).get("wire")
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--plugin {path}: {type(error).__name__}: {error}") from error
    if not callable(wire):
        raise ConfigError(f"--plugin {path}: no function wire(parts) in it")

    def wire_or_say(parts: Parts) -> None:
        try:
            wire(parts)
        except Exception as error:
            raise ConfigError(
                f"--plugin {path}: wire(parts) failed on rank {parts.rank}: {type(error).__name__}: {error}"
            ) from error

    return wire_or_say
