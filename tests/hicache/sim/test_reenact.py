"""Decisions taken again from logs: healthy ones all come out, a bug's first one does not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cli.app import main
from cli.reenacting import reenacting
from consensus_checker.check import check
from consensus_checker.reenact import Question
from hicache.sim.reenact import Reenacted, reenact
from hicache.sim.reenact_prompts import Prompts
from hicache.sim.world import simulate
from hicache.zoo import SCENARIOS
from tracer.log import Run, find_logs

A, B, C, D = (letter * 16 for letter in "abcd")
STORAGE = [
    *("--hicache-storage-backend", "memory"),
    *("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 16}'),
]
SMALL = "conversations=3,rounds=4,max-context=900,output=8"
TIGHT = ["--page-size", "4", "--device-pages", "150", "--host-pages", "200"]


def run(out: Path, *words: object) -> Run:
    assert main(["run", *map(str, words), "--out", str(out), "--quiet"]) == 0
    return find_logs(out)


def again(found: Run) -> dict[int, Reenacted]:
    return {rank: reenact(found.lanes, rank) for rank in found.ranks}


def assert_same(found: Run) -> None:
    for rank, done in again(found).items():
        assert done.is_same, (rank, done)
        assert done.records > 50


@pytest.mark.parametrize(
    "words",
    [
        ["--tp", 2, "--pp", 2, *STORAGE, "--hicache-storage-prefetch-policy", "timeout"],
        ["--cp", 2, "--tp", 2, *STORAGE, "--hicache-storage-prefetch-policy", "best_effort"],
        ["--pp", 3, *STORAGE, "--hicache-storage-prefetch-policy", "wait_complete", "--in-band-digest"],
        ["--dp", 2, "--hicache-write-policy", "write_back", "--radix-eviction-policy", "lfu"],
        ["--tp", 2, "--hicache-write-policy", "write_through_selective", "--chunked-prefill-size", 64],
        ["--tp", 2, "--side-pools", "mamba,draft", "--side-pool-slots", 20, *STORAGE],
        [*STORAGE, "--admin", "detach@30,attach@60,flush@90"],
    ],
    ids=lambda words: " ".join(str(word).removeprefix("--") for word in words)[:40],
)
def test_a_healthy_ranks_decisions_all_follow_from_its_log(tmp_path: Path, words: Sequence[object]) -> None:
    agentic = f"{SMALL},aborts=20,priorities=3,namespaces=2,think=3,seed=4"
    assert_same(run(tmp_path / "run", *TIGHT, "--agentic", agentic, *words))


@pytest.mark.parametrize("axis", ["--pp", "--dp"])
def test_a_rank_that_has_its_stage_to_itself_decides_by_its_own_memory_and_clock(
    tmp_path: Path, axis: str
) -> None:
    """Nobody is there to agree with, so its own slots and its own deadline are what the group heard."""
    soon = '{"prefetch_threshold": 4, "prefetch_timeout_base": 0.001, "prefetch_timeout_per_ki_token": 0}'
    storage = ["--hicache-storage-backend", "memory", "--hicache-storage-backend-extra-config", soon]
    slow = [
        f"storage_slow:rank=0,call={call},nth={nth},steps=40" for call in ("exists", "get") for nth in (2, 4)
    ]
    faults = ["alloc_fail:rank=0,pool=host,nth=3", "alloc_fail:rank=0,pool=host,nth=7", *slow]
    words = [word for fault in faults for word in ("--fault", fault)]
    agentic = f"{SMALL},think=9,shared-prefix=40"
    sizes = ["--page-size", 4, "--device-pages", 240, "--host-pages", 120]
    found = run(tmp_path / "run", axis, 2, *sizes, *storage, *words, "--agentic", agentic)
    (lane,) = [each for each in found.lanes if (each.rank, each.lane) == (0, "scheduler")]
    records = list(lane.records())
    assert any(each["kind"] == "backup_cancel" and not each["reserved"] for each in records)
    assert any(each["kind"] == "prefetch_poll" and each["is_late"] for each in records)
    assert_same(found)


def test_a_rank_that_has_its_stage_to_itself_applies_no_more_than_it_has_counted(tmp_path: Path) -> None:
    plugin = tmp_path / "one_less.py"
    plugin.write_text(ONE_LESS)
    found = run(tmp_path / "run", *TIGHT, "--pp", 2, "--plugin", plugin, "--agentic", SMALL)
    done = again(found)
    assert done[0].difference is not None
    assert (done[0].difference.logged["kind"], done[1].is_same) == ("event_round", True)
    # The same as it counted, and one less than it applied.
    told = done[0].difference
    assert told.done is not None
    assert told.done["writes_agreed"] == told.logged["writes_agreed"] + 1


ONE_LESS = """
from hicache.control.agreement import MinThenChain


class OneLess(MinThenChain):
    is_due = True

    async def reduce(self, local, **words):
        values = await super().reduce(local, **words)
        if self.is_due and values[0]:
            self.is_due = False
            values[0] -= 1
        return values


def wire(parts):
    parts.agreement = lambda transport, pp_rank: OneLess(transport, pp_rank=pp_rank)
"""


@pytest.mark.parametrize("mode", ["threads", pytest.param("gloo", marks=[pytest.mark.slow])])
@pytest.mark.xdist_group("processes")
@pytest.mark.usefixtures("forked")
def test_logs_of_threads_and_of_processes_can_be_done_again_too(tmp_path: Path, mode: str) -> None:
    words = ["--mode", mode, "--tp", 2, "--pp", 2, *STORAGE, "--agentic", SMALL]
    assert_same(run(tmp_path / "run", *TIGHT, *words))


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("seed", [1])
def test_a_bug_shows_first_where_it_was_triggered_and_its_twin_nowhere(
    tmp_path: Path, name: str, seed: int
) -> None:
    scenario = SCENARIOS[name]
    simulate(scenario.plan(seed), out=tmp_path / "bug")
    simulate(scenario.plan(seed, twin=True), out=tmp_path / "twin")
    assert_same(find_logs(tmp_path / "twin"))
    verdict = check(find_logs(tmp_path / "bug"))
    (culprit,) = verdict.finding.culprit
    (line,) = [each for each in verdict.finding.evidence if each.supports == f"culprit {culprit}"]
    differing = {
        (done.difference.step, done.difference.seq): rank
        for rank, done in again(find_logs(tmp_path / "bug")).items()
        if done.difference is not None
    }
    # Others go another way behind it, for the bug is in everybody's code.
    first = min(differing)
    assert (first[1], differing[first]) == (line.record, culprit)


def without_first_file(folder: Path) -> str:
    first = folder / "rank0000.scheduler.000.jsonl"
    lines = first.read_bytes().splitlines(keepends=True)
    head = json.loads(lines[0])
    # A ring whose first file is gone: its second one begins later.
    rest = [line for line in lines[40:] if b'"kind":"block"' not in line]
    head |= {"seq": json.loads(rest[0])["seq"], "version": [1, 0]}
    first.write_bytes(json.dumps(head).encode() + b"\n" + b"".join(rest))
    return "the oldest records are gone"


def of_another_program(folder: Path) -> str:
    for file in folder.glob("rank0000.*.jsonl"):
        file.write_bytes(file.read_bytes().replace(b'"page_size_tokens"', b'"page_size_in_tokens"', 1))
    return "not one of this runtime"


def without_scheduler(folder: Path) -> str:
    for file in folder.glob("rank0000.scheduler.*"):
        file.unlink()
    return "left no log of its scheduler"


@pytest.mark.parametrize("spoil", [without_first_file, of_another_program, without_scheduler])
def test_what_cannot_be_done_again_is_said(tmp_path: Path, spoil: Callable[[Path], str]) -> None:
    run(tmp_path / "run", *TIGHT, "--tp", 2, *STORAGE, "--agentic", SMALL)
    told = spoil(tmp_path / "run")
    done = reenact(find_logs(tmp_path / "run").lanes, 0)
    assert told in done.limits
    assert (done.records, done.difference) == (0, None)
    assert main(["replay", str(tmp_path / "run"), "--reenact", "--quiet"]) == 4


def test_a_log_that_was_cut_is_done_again_up_to_its_end(tmp_path: Path) -> None:
    found = run(tmp_path / "run", *TIGHT, "--tp", 2, *STORAGE, "--agentic", SMALL)
    whole = reenact(found.lanes, 0)
    chance = random.Random(7)
    log = tmp_path / "run" / "rank0000.scheduler.000.jsonl"
    data = log.read_bytes()
    for _ in range(6):
        log.write_bytes(data[: chance.randrange(len(data) // 4, len(data))])
        cut = reenact(find_logs(tmp_path / "run").lanes, 0)
        assert cut.difference is None, cut
        assert cut.records <= whole.records


def test_a_lane_without_a_log_is_made_up_from_what_the_scheduler_took(tmp_path: Path) -> None:
    run(tmp_path / "run", *TIGHT, "--tp", 2, *STORAGE, "--agentic", SMALL)
    for lane in ("prefetch", "sync", "backup"):
        (tmp_path / "run" / f"rank0001.{lane}.000.jsonl").unlink()
    assert reenact(find_logs(tmp_path / "run").lanes, 1).is_same


def test_a_changed_number_in_a_log_is_found_at_its_record(tmp_path: Path) -> None:
    run(tmp_path / "run", *TIGHT, "--tp", 1, "--agentic", SMALL)
    log = tmp_path / "run" / "rank0000.scheduler.000.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    at = next(at for at, line in enumerate(lines) if b'"kind":"evict"' in line)
    record = json.loads(lines[at]) | {"pages_freed": 12345}
    head = json.loads(lines[0]) | {"version": [1, 0]}
    plain = [*lines[1:at], json.dumps(record).encode() + b"\n", *lines[at + 1 :]]
    kept = [line for line in plain if b'"kind":"block"' not in line]
    log.write_bytes(json.dumps(head).encode() + b"\n" + b"".join(kept))
    done = reenact(find_logs(tmp_path / "run").lanes, 0)
    assert done.difference is not None
    assert (done.difference.seq, done.difference.logged["pages_freed"]) == (record["seq"], 12345)


def test_prompts_share_as_many_pages_as_their_digests_do() -> None:
    records: list[dict[str, Any]] = [
        {"kind": "request", "order": 0, "rid": "r0", "input_tokens": 13, "output_tokens": 0},
        {"kind": "request", "order": 1, "rid": "r1", "input_tokens": 9, "output_tokens": 0},
        {"kind": "insert", "phase": "return", "rid": "r0", "parent_digest": "", "new_digests": A + B + C},
        {"kind": "match", "rid": "r1", "purpose": "admit", "hit_digest": B, "miss_digest": D},
    ]
    prompts = Prompts(records, 4, has_answers=True)
    first, second = (prompts.request(record).tokens for record in records[:2])
    page = 4 * 4
    assert (len(first), len(second)) == (13 * 4, 9 * 4)
    assert first[: 2 * page] == second[: 2 * page]
    # The second one has a page and a token, of which no page is known to be like any other.
    assert first[2 * page : 3 * page] != second[2 * page :][:page]


def test_a_log_whose_digests_run_in_a_circle_ends() -> None:
    request = {"kind": "request", "order": 0, "rid": "r0", "input_tokens": 8, "output_tokens": 0}
    circle = [
        {"kind": "insert", "phase": "return", "rid": "r0", "parent_digest": A, "new_digests": B},
        {"kind": "insert", "phase": "return", "rid": "r0", "parent_digest": B, "new_digests": A},
    ]
    assert len(Prompts([request, *circle], 4, has_answers=False).request(request).tokens) == 32


def test_where_a_log_is_cut_is_said_and_one_without_a_decision_is_not_the_same(tmp_path: Path) -> None:
    run(tmp_path / "run", *TIGHT, "--tp", 2, "--agentic", SMALL)
    log = tmp_path / "run" / "rank0001.scheduler.000.jsonl"
    data = log.read_bytes()
    for size, records in ((data.index(b"\n") + 1, 0), (len(data) // 2, 50)):
        log.write_bytes(data[:size])
        done = reenact(find_logs(tmp_path / "run").lanes, 1)
        assert (done.records >= records, done.difference) == (True, None)
        assert "reading stopped before record" in done.cut + done.limits
        assert (not done.records) == bool(done.limits)
        assert main(["replay", str(tmp_path / "run"), "--reenact", "--quiet"]) == 4


def test_what_an_insert_did_is_not_judged_where_its_end_is_cut_off(tmp_path: Path) -> None:
    """Two requests that came together share pages of which only the second one's insert tells."""
    agentic = "conversations=4,rounds=2,max-context=500,output=1,shared-prefix=40"
    words = ["--page-size", 4, "--agentic", agentic, "--seed", 2, "--concurrency", 4]
    words += ["--hicache-write-policy", "write_through_selective", "--no-cache-output"]
    run(tmp_path / "run", *words)
    log = tmp_path / "run" / "rank0000.scheduler.000.jsonl"
    lines = [line for line in log.read_bytes().splitlines(keepends=True) if b'"kind":"block"' not in line]
    inside = next(at for at, line in enumerate(lines) if b'"kind":"write_backup"' in line)
    head = json.dumps(json.loads(lines[0]) | {"version": [1, 0]}).encode() + b"\n"
    log.write_bytes(head + b"".join(lines[1 : inside + 1]))
    done = reenact(find_logs(tmp_path / "run").lanes, 0)
    assert (done.difference, done.is_reached) == (None, False)
    last = json.loads(lines[inside])["seq"]
    (lane,) = [each for each in find_logs(tmp_path / "run").lanes if each.lane == "scheduler"]
    record = next(each for each in lane.records() if each["seq"] == last)
    # Nor is it said to be right.
    assert reenacting([lane])(Question("dp0", "scheduler", 0, {0: record})) == {}
