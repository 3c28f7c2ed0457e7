"""The real runtime with a stage in whose hands a value changes: that stage is named, not who adopted it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest

from hicache.agentic import AgenticSpec
from hicache.config import Config
from hicache.control.agreement import CHANNEL, Agreement, MinThenChain
from hicache.ports import Transport
from hicache.rank import Parts
from hicache.sim.bugs import Wire
from hicache.sim.world import simulate
from hicache.topology import Topology
from tests.support.runs import agentic_plan, verdict

SPEC = AgenticSpec.parse("conversations=6,rounds=4,max-context=2048,output=20")
Where = Literal["sent", "kept"]


class ChangesOne:
    """An agreement of stage 0 that takes one ack off once: of what it sends, or of what it keeps."""

    def __init__(self, transport: Transport, where: Where) -> None:
        self._right = MinThenChain(transport, pp_rank=0)
        self._transport = transport
        self._where = where
        self._is_done = False

    async def agree(
        self, local: Sequence[int], *, op: Literal["min", "max"], purpose: str, transfers_in_flight: int
    ) -> list[int]:
        values = await self._right.reduce(
            local, op=op, purpose=purpose, transfers_in_flight=transfers_in_flight
        )
        changed = list(values)
        if values[0] and not self._is_done:
            self._is_done = True
            changed[0] -= 1
        sent, kept = (changed, values) if self._where == "sent" else (values, changed)
        await self._transport.send_next(sent, numel=len(sent), purpose=purpose, channel=CHANNEL)
        return kept


def changing(rank: int, where: Where) -> Wire:
    def wire(parts: Parts) -> None:
        if parts.rank == rank:
            parts.agreement = lambda transport, _pp_rank: _agreement(transport, where)

    return wire


def _agreement(transport: Transport, where: Where) -> Agreement:
    return ChangesOne(transport, where)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("where", ["sent", "kept"])
@pytest.mark.parametrize(("pp", "tp", "rank"), [(2, 2, 1), (4, 1, 0), (2, 1, 0), (3, 2, 0)])
@pytest.mark.parametrize("seed", range(3))
def test_a_leader_in_whose_hands_a_value_changes_is_named(
    pp: int, tp: int, rank: int, where: Where, seed: int
) -> None:
    config = Config(topology=Topology(pp=pp, tp=tp), seed=seed)
    plan = replace(agentic_plan(config, SPEC, seed=seed), wires=(changing(rank, where),))
    finding = verdict(simulate(plan, trace="memory")).finding
    assert finding.kind == "divergence"
    assert finding.culprit == (rank,), finding.summary
    assert finding.trigger is not None and finding.trigger.rank == rank
    first = finding.first_divergence
    assert first is not None and (first.call, first.kind) == ("event_round", "value")


@pytest.mark.parametrize("seed", range(3))
def test_its_twin_without_the_change_is_consistent(seed: int) -> None:
    config = Config(topology=Topology(pp=3, tp=2), seed=seed)
    assert verdict(simulate(agentic_plan(config, SPEC, seed=seed), trace="memory")).code == 0
