from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cli.screens.run import ending, lost_files
from hicache.job import Ending
from hicache.sim.world import Result
from hicache.workload import parse_commands
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


def test_a_store_that_does_not_return_is_told_before_who_waits_for_it() -> None:
    idle = "nothing for 10000 steps: 4 requests waiting, 0 running, 0 writes and 0 loads in flight; "
    idle += "c0.t1 (attempt 0) waits for prefetch 1, 0 of 21 pages read; "
    parked = {
        0: idle + "prefetch: all_reduce tp0/hits #0",
        1: idle + "prefetch: storage exists that does not return",
        2: "nothing for 500 steps: 1 requests waiting, 0 running, 0 writes and 0 loads in flight",
    }
    plan = find_scenario("skip_collective_when_empty").plan(1)
    lines = [str(line) for line in ending(plan, replace(HUNG, parked=parked), Path("x"))]
    assert lines[1:7] == [
        "  waits   rank 1 in storage exists that does not return (prefetch lane); its",
        "          scheduler did nothing for 10000 steps, 4 requests waiting",
        "  waits   rank 0 in all_reduce tp0/hits #0 (prefetch lane); its scheduler did",
        "          nothing for 10000 steps, 4 requests waiting",
        "  waits   rank 2: its scheduler did nothing for 500 steps, 1 request waiting",
        "  bug     skip_collective_when_empty",
    ]


def test_what_was_not_written_is_told_and_nothing_is_suggested(tmp_path: Path) -> None:
    plan = find_scenario("skip_collective_when_empty").plan(1)
    result = replace(HUNG, endings={rank: Ending(rank, "hung") for rank in range(4)})
    (tmp_path / "run.json").write_text("")
    whole = '{"kind":"header"}\n{"kind":"trailer"}\n'
    for rank, text in enumerate((whole, whole, '{"kind":"header"}\n')):
        (tmp_path / f"rank000{rank}.scheduler.000.jsonl").write_text(text)
    lost = lost_files(plan, result, tmp_path, is_traced=True)
    assert lost == ["run.json was not written", "logs of rank 3 are missing", "logs of rank 2 are cut"]
    lines = [str(line) for line in ending(plan, result, tmp_path, lost=lost)]
    assert "  lost    run.json was not written; logs of rank 3 are missing; logs of rank 2" in lines
    assert not any("next" in line for line in lines)


def test_a_killed_process_is_not_a_full_disk(tmp_path: Path) -> None:
    plan = find_scenario("skip_collective_when_empty").plan(1)
    result = replace(HUNG, endings={rank: Ending(rank, "crashed") for rank in range(4)})
    (tmp_path / "run.json").write_text("{}\n")
    assert lost_files(plan, result, tmp_path, is_traced=True) == []


def test_what_became_of_an_operators_commands_is_told() -> None:
    plan = find_scenario("skip_collective_when_empty").plan(1)
    plan = replace(plan, commands=tuple(parse_commands("flush@3,attach@4")))
    result = replace(HUNG, endings={0: Ending(0, "hung", commands=("flush refused: not_idle",))})
    lines = [str(line) for line in ending(plan, result, Path("x"))]
    assert "  admin   flush refused: not_idle; 1 not carried out" in lines
