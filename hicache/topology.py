"""Who is who: coordinates of a rank and the named groups it belongs to.

Ranks are numbered with tp fastest: `rank = ((dp * PP + pp) * CP + cp) * TP + tp`. A group's name says
its axis, its number along the other axes, and its purpose: `tp0/main`, `tp0/events`. Two groups with
the same members are still two orders of calls.
"""

from __future__ import annotations

from dataclasses import dataclass

from hicache.errors import ConfigError
from tracer.record import Place

AXES = ("dp", "pp", "cp", "tp")
# Requests, batches and forwards meet on `main`; the event round has a group of its own. The minimum hit and
# the read progress are reduced by background lanes, each lane on groups of its own.
PURPOSES = ("main", "events", "hits", "progress")
WORLD_SIZE_MAX = 1024


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of the four axes; world size is their product."""

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if size < 1:
                raise ConfigError(f"--{axis} {size}: a parallel size is at least 1")
        if self.world_size > WORLD_SIZE_MAX:
            raise ConfigError(
                f"dp {self.dp} x pp {self.pp} x cp {self.cp} x tp {self.tp} = {self.world_size} ranks; "
                f"at most {WORLD_SIZE_MAX}"
            )

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    def rank_at(self, *, dp: int, pp: int, cp: int, tp: int) -> int:
        return ((dp * self.pp + pp) * self.cp + cp) * self.tp + tp

    def coordinates(self, rank: int) -> Coordinates:
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        dp, pp = divmod(rest, self.pp)
        return Coordinates(dp=dp, pp=pp, cp=cp, tp=tp)

    def members(self, axis: str, at: Coordinates) -> tuple[int, ...]:
        """Global ranks that differ from `at` on `axis` only, in order of that axis."""
        place = {name: getattr(at, name) for name in AXES}
        return tuple(self.rank_at(**{**place, axis: index}) for index in range(getattr(self, axis)))

    def groups(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Every group of more than one member that `rank` belongs to, by name."""
        at = self.coordinates(rank)
        found: dict[str, tuple[int, ...]] = {}
        for axis in ("cp", "tp", "pp"):
            members = self.members(axis, at)
            if len(members) > 1:
                for purpose in PURPOSES:
                    found[self.group_name(axis, purpose, at)] = members
        return found

    def group_name(self, axis: str, purpose: str, at: Coordinates) -> str:
        """Name of the group along `axis` through `at`; groups of an axis are numbered by their first rank."""
        number = 0
        for name in AXES:
            if name != axis:
                number = number * getattr(self, name) + getattr(at, name)
        return f"{axis}{number}/{purpose}"

    def place(self, rank: int) -> Place:
        at = self.coordinates(rank)
        return Place(
            rank=rank,
            coordinates={name: getattr(at, name) for name in AXES},
            sizes={name: getattr(self, name) for name in AXES},
            groups=self.groups(rank),
        )


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where one rank stands on each axis, from 0."""

    dp: int
    pp: int
    cp: int
    tp: int
