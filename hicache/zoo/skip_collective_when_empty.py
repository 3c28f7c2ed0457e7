"""A copy is late on one rank, which finds nothing to report and stays away from the reduction.

    rank 0  event round: 1 write done -> all_reduce tp0/events #57 ... waits
    rank 1  event round: 0 writes done -> returns                  -> all_reduce tp0/main (forward) ... waits

Each waits for the other in a different collective. Nothing times out for half an hour.
"""

from __future__ import annotations

from hicache.zoo.scenario import Scenario, varied_config, varied_spec

SCENARIO = Scenario(
    name="skip_collective_when_empty",
    story="A copy is late on one rank; with nothing finished it skips the reduction its peers are in.",
    resembles="HC01",
    source="sglang issues 26921 (fixed in 26923) and 27489",
    bug="skip_collective_when_empty",
    fact="writes_done",
    # Copies of equal length end together here: the only rank that is late is the one disturbed.
    config=lambda seed: varied_config(seed, transfer_polls_max=0),
    spec=varied_spec,
    fault=lambda chance, world_size: (
        f"delay_done:rank={chance.randrange(world_size)},queue=write,"
        f"op={chance.randint(1, 10)},steps={chance.randint(1, 3)}"
    ),
)
