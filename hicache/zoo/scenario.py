"""What a scenario is: a bug, the world in which it bites, and what is true about it.

The seed moves everything that may move: the conversations, the schedule, which rank is disturbed and when.
The twin is the same plan without the bug.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from hicache.agentic import Agentic, AgenticSpec
from hicache.config import Config
from hicache.schedule import Schedule
from hicache.sim.bugs import find_bugs
from hicache.sim.faults import Fault, FaultPlan
from hicache.sim.world import Plan
from hicache.topology import Topology


def varied_spec(seed: int) -> AgenticSpec:
    """Conversations of another number, length and answer for each seed."""
    chance = random.Random(f"conversations/{seed}")
    rounds = chance.randint(5, 9)
    return AgenticSpec(
        conversations=chance.randint(6, 9),
        rounds=rounds,
        max_context=rounds * chance.randint(300, 700),
        output=chance.randint(8, 48),
        shared_prefix=chance.randint(64, 256),
        seed=seed,
    )


def varied_config(seed: int, *, transfer_polls_max: int) -> Config:
    """Four tensor ranks whose device holds a few conversations, and whose host holds some more."""
    chance = random.Random(f"world/{seed}")
    return Config(
        topology=Topology(tp=4),
        device_pages=chance.randint(105, 135),
        host_pages=chance.randint(250, 500),
        concurrency=chance.randint(2, 3),
        transfer_polls_max=transfer_polls_max,
        seed=seed,
    )


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way in which ranks have come apart.

    Attributes:
        resembles: class of the bug corpus.
        source: public reports of it.
        fact: the local fact that the wrong decision was taken from; the tests hold the checker to it.
        config, spec: seed -> the world and its conversations.
        fault: chance, world size -> the fault that disturbs one rank.
    """

    name: str
    story: str
    resembles: str
    source: str
    bug: str
    fact: str
    config: Callable[[int], Config]
    spec: Callable[[int], AgenticSpec]
    fault: Callable[[random.Random, int], str]

    def plan(self, seed: int, *, twin: bool = False) -> Plan:
        """The run of `seed`; with `twin`, the same world without the bug."""
        config = self.config(seed)
        spec = self.spec(seed)
        topology = config.topology
        fault_text = self.fault(random.Random(f"{self.name}/{seed}"), topology.world_size)
        bug_names = [] if twin else [self.bug]
        return Plan(
            config=config,
            workload_name=f"agentic {spec.text()}",
            workload=lambda replica: Agentic(spec, replica, topology.dp),
            schedule=Schedule(seed=seed),
            faults=FaultPlan([Fault.parse(fault_text, topology)]),
            fault_texts=[fault_text],
            bug_names=bug_names,
            wires=find_bugs(bug_names),
        )
