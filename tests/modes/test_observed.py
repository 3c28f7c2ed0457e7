"""Somebody beside a rank: sees its lanes before they run, hears how it ended, and can't fail it."""

from __future__ import annotations

from pathlib import Path

from hicache.agentic import AgenticSpec
from hicache.config import Config
from hicache.job import Observed
from hicache.threads import run_threads
from hicache.topology import Topology
from tests.support.runs import agentic_plan
from tracer.record import MAIN_LANE, Outcome

SPEC = AgenticSpec.parse("conversations=2,rounds=2,max-context=1024,output=4")


class Looker:
    def __init__(self, observed: Observed) -> None:
        self.observed = observed
        self.first_seq = observed.lanes[MAIN_LANE].seq
        self.outcome: Outcome | None = None

    def stop(self, outcome: Outcome) -> None:
        self.outcome = outcome


def test_every_rank_of_a_run_on_threads_is_looked_at_from_start_to_end(tmp_path: Path) -> None:
    lookers: dict[int, Looker] = {}

    def observe(observed: Observed) -> Looker:
        return lookers.setdefault(observed.rank, Looker(observed))

    plan = agentic_plan(Config(topology=Topology(dp=2, tp=2)), SPEC)
    result = run_threads(plan, out=tmp_path, observe=observe)
    assert result.outcome == "completed"
    assert {rank: one.observed.members for rank, one in sorted(lookers.items())} == {
        0: (0, 1),
        1: (0, 1),
        2: (2, 3),
        3: (2, 3),
    }
    for rank, one in lookers.items():
        # The header is line 0 and nothing has run yet.
        assert one.first_seq == 1 < one.observed.lanes[MAIN_LANE].seq
        assert (one.outcome, one.observed.folder) == ("completed", tmp_path)
        assert one.observed.header["rank"] == rank
        assert one.observed.lanes[MAIN_LANE].chains[("tp", "cp", "pp")].head > 10
