"""What a header must look like to be believed.

A header comes from anywhere: a damaged disk, another program, another version. What it claims is counted
to and multiplied by later readers, so that it is judged once, here.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

# A thousand times the largest job that anybody has; above it a number is damage, and nobody counts to it.
WORLD_SIZE_MAX = 1_000_000
# What a table, and most readers of JSON, can hold.
INTEGER_MAX = 2**63 - 1

Count = Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]
Size = Annotated[int, msgspec.Meta(ge=1, le=WORLD_SIZE_MAX)]
Integer = Annotated[int, msgspec.Meta(ge=-INTEGER_MAX, le=INTEGER_MAX)]


class Header(msgspec.Struct, frozen=True):
    """What a header must look like to be believed; parts that are not here are not looked at."""

    kind: str
    seq: Count
    run_id: str
    rank: Count
    lane: str
    world_size: Size
    kinds: dict[str, dict[str, Any]]
    step: Integer
    time_ns: Integer
    tool_version: str = ""
    attempt: Count = 0
    coordinates: dict[str, Count] = {}
    sizes: dict[str, Size] = {}
    groups: dict[str, list[Count]] = {}
    config: dict[str, Any] = {}
    counts_before: dict[str, Count] = {}

    def contradiction(self) -> str:
        """What of its place in the job can't be true, or nothing; without sizes little can be judged."""
        if self.rank >= self.world_size:
            return f"rank {self.rank} in a world of {self.world_size}"
        outside = [rank for ranks in self.groups.values() for rank in ranks if rank >= self.world_size]
        if outside:
            return f"rank {outside[0]} in a group, in a world of {self.world_size}"
        if not self.sizes:
            return ""
        product = 1
        for size in self.sizes.values():
            product *= size
        if product != self.world_size:
            return f"sizes {dict(self.sizes)} make {product} ranks, not {self.world_size}"
        if set(self.coordinates) != set(self.sizes):
            return f"coordinates on {sorted(self.coordinates)}, sizes of {sorted(self.sizes)}"
        numbered = 0
        for axis, size in self.sizes.items():
            if self.coordinates[axis] >= size:
                return f"{axis} {self.coordinates[axis]} of {size}"
            numbered = numbered * size + self.coordinates[axis]
        if numbered != self.rank:
            return f"coordinates {dict(self.coordinates)} are those of rank {numbered}, not {self.rank}"
        return ""
