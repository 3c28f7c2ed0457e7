"""Before anything else: how many pages each tier has, as the group will count them.

Ranks may be given pools of different sizes (uneven layers, rounding, another process's memory). Whoever
counted on more than its smallest peer has would sooner or later refuse what that peer takes, or the
other way round. So the least is agreed on once, and what a rank has beyond it is never used.
Source: sglang issues 29258 and 29054 (8,023,168 against 7,621,952 slots).
"""

from __future__ import annotations

from hicache.control.pools import Room, Tiers
from hicache.ports import Axis, Memory, Transport
from hicache.probes import Probes

PURPOSE = "capacity"
CHANNEL = "main"
AXES: tuple[Axis, ...] = ("cp", "tp", "pp")
# What a pool without a limit says in the minimum.
UNLIMITED = 1 << 62


async def agree_capacity(tiers: Tiers, transport: Transport, probes: Probes) -> None:
    """Set every room to the least that any rank of the replica has."""
    pools: list[tuple[str, Memory, Room]] = [("device", tiers.device, tiers.device_room)]
    if tiers.host is not None:
        pools.append(("host", tiers.host, tiers.host_room))
    if tiers.states is not None:
        pools.append(("mamba", tiers.states, tiers.states_room))
    own = [memory.page_count or UNLIMITED for _, memory, _ in pools]
    agreed = list(own)
    for axis in AXES:
        agreed = await transport.all_reduce(axis, agreed, op="min", purpose=PURPOSE, channel=CHANNEL)
    for (pool, memory, room), least in zip(pools, agreed, strict=True):
        room.resize(0 if least == UNLIMITED else least)
        probes.capacity(pool, room.page_count, memory.page_count)
