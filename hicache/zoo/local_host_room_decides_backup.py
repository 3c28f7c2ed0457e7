"""Host memory runs out on one rank only, and that rank decides alone not to back a node up.

    rank 0  backup 64 | ... ack 1 node | evict: demote      | match 512 | forward 128
    rank 2  backup  0 | ... nothing    | evict: node dropped | match 448 | forward 192   <- hang

From there on the trees differ: another ack count, another lock, another victim, another prefix.
"""

from __future__ import annotations

from hicache.zoo.scenario import Scenario, varied_config, varied_spec

SCENARIO = Scenario(
    name="local_host_room_decides_backup",
    story="One rank's host memory is full for a moment; it refuses a backup that its peers make.",
    resembles="HC02",
    source="sglang issue 28429 (fix tried in 31425)",
    bug="local_host_room_decides_backup",
    fact="host_pages_free",
    config=lambda seed: varied_config(seed, transfer_polls_max=2),
    spec=varied_spec,
    fault=lambda chance, world_size: (
        f"alloc_fail:rank={chance.randrange(world_size)},pool=host,nth={chance.randint(8, 40)}"
    ),
)
