from __future__ import annotations

from pathlib import Path

from cli.screens.run import ending
from hicache.sim.world import Result
from hicache.zoo import find_scenario

HUNG = Result(
    outcome="hung",
    error="",
    parked={
        0: "all_reduce_min tp0/events #57",
        1: "all_reduce_min tp0/events #57",
        2: "broadcast tp0/main #114",
    },
    served=1200,
    refused=0,
    steps=57,
    run_id="0123456789abcdef",
    schedule="seed:1",
    lines={},
)


def test_the_end_of_a_run_reads_as_agreed() -> None:
    plan = find_scenario("skip_collective_when_empty").plan(1)
    fault = plan.fault_texts[0]
    assert [str(line) for line in ending(plan, HUNG, Path("runs/my run"))] == [
        "HUNG      1,200 requests served in 57 steps on 4 ranks (dp=1 pp=1 cp=1 tp=4)",
        "  waits   ranks 0-1 in all_reduce_min tp0/events #57",
        "  waits   rank 2 in broadcast tp0/main #114",
        "  bug     skip_collective_when_empty",
        f"  fault   {fault} did not strike",
        "  logs    'runs/my run'  (one a rank, and run.json)",
        "  next    hicache check 'runs/my run'",
    ]
