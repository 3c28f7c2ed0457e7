"""Scenarios: one file each, with the story, where it comes from, and how the world is set up for it."""

from __future__ import annotations

from hicache.errors import ConfigError
from hicache.zoo import local_host_room_decides_backup, skip_collective_when_empty
from hicache.zoo.scenario import Scenario

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (local_host_room_decides_backup.SCENARIO, skip_collective_when_empty.SCENARIO)
}


def find_scenario(name: str) -> Scenario:
    """The scenario called `name`.

    Raises:
        ConfigError: there is none; the text lists those there are.
    """
    if name not in SCENARIOS:
        raise ConfigError(f"no scenario {name!r}; expected one of {', '.join(sorted(SCENARIOS))}")
    return SCENARIOS[name]
