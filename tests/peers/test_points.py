"""Points of what the rig does not run, in SGLang's own functions, in two processes that meet over gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from consensus_checker.check import check
from tests.peers.rig import KIT, LACKING, PEERS, ROOT, has_rig
from tracer.log import find_logs

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_rig(), reason=LACKING)]

LIMIT_S = 150
PARTS = ["receive", "plan", "batch", "command", "prefill", "decode", "prealloc", "restore", "rings", "drafts"]


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("calls")
    for name in ("tp", "pp"):
        (out / name).mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    stubs = Path(KIT) / "stubs"
    own = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{stubs}",
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HICACHE_DIGEST_KEY": "of this job",
    }
    script = str(Path(__file__).with_name("point_calls.py"))
    ranks = []
    try:
        for rank in (0, 1):
            with (out / f"rank{rank}.log").open("w") as log:
                command = [str(Path(PEERS) / "bin" / "python"), script, str(rank), str(port), str(out)]
                ranks.append(subprocess.Popen(command, env=own, stdout=log, stderr=log))
        codes = [rank.wait(LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0, 0], (out / "rank0.log").read_text()[-2000:]
    return out


def records(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    (found,) = [log for log in find_logs(folder).lanes if (log.rank, log.lane) == (rank, "scheduler")]
    return list(found.records())


def of(kind: str, folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    common = {"seq", "step", "time_ns", "kind"}
    return [
        {name: value for name, value in one.items() if name not in common}
        for one in records(folder, rank)
        if one["kind"] == kind
    ]


def test_every_look_at_every_function_went_well(called: Path) -> None:
    for rank in (0, 1):
        told = json.loads((called / f"rank{rank}.json").read_text())
        assert (told["errors"], told["missing"]) == ({}, [])
        assert told["called"] == [*PARTS, "pools", "stages"]


def test_ranks_that_poll_and_clear_otherwise_and_agree_are_consistent(called: Path) -> None:
    verdict = check(find_logs(called / "tp"))
    assert (verdict.kind, verdict.coverage.compared_calls > 50) == ("consistent", True)
    polls = [[one["polls"] for one in of("pd_poll", called / "tp", rank)] for rank in (0, 1)]
    assert polls[0] == polls[1]
    own = [[one["own_polls"] for one in of("pd_poll", called / "tp", rank)] for rank in (0, 1)]
    assert (own[0][0], own[1][0], polls[0][0]) == ([2, 0], [1, 0], [1, 0])
    outcomes = [
        [one.get("outcome") for one in of("command", called / "tp", rank) if one["verb"] == "clear"]
        for rank in (0, 1)
    ]
    assert outcomes == [["done"], ["refused"]]


def test_what_is_received_and_planned_is_there_in_its_order(called: Path) -> None:
    (received,) = of("receive", called / "tp")
    assert (received["count"], received["types"]) == (2, ["AbortReq"])
    (plan,) = of("plan", called / "tp")
    assert (plan["mode"], plan["rids"][0], plan["tokens"], plan["extend"][0]) == ("extend", 2, 48, 2)
    verbs = [(one["verb"], one["verdict"]) for one in of("command", called / "tp")]
    assert verbs == [
        ("flush", "refused"),
        ("attach", "refused"),
        ("detach", "refused"),
        ("clear", "asked"),
        ("reset", "done"),
    ]


def test_both_sides_say_how_much_of_a_prompt_is_there_already(called: Path) -> None:
    found = [(one["side"], one["rid"], one["decode_prefix_len"]) for one in of("pd_prefix", called / "tp")]
    assert found == [("prefill", "p1", 32), ("decode", "d4", 32)]
    restored = [(one["rid"], one["verdict"]) for one in of("pd_restore", called / "tp")]
    assert restored == [("h16", "queued"), ("h16", "committed"), ("h0", "failed")]


def test_how_each_transfer_ended_is_there(called: Path) -> None:
    found = [(one["rid"], one["outcome"]) for one in of("pd_transfer", called / "tp")]
    assert found == [
        ("p2", "not_bootstrapped"),
        ("p4", "not_sent"),
        ("d2", "not_received"),
        ("d3", "held"),
    ]
    moved = [(one["queue"], one["length"], one["rids"][0]) for one in of("pd_queue", called / "tp")]
    assert moved == [("bootstrap", 1, 1), ("inflight", 2, 1), ("inflight", 1, 1), ("transfer", 1, 1)]


def test_a_ring_of_stages_is_compared_without_its_order(called: Path) -> None:
    for rank in (0, 1):
        rings = [
            (one["ring"], one["rids"][0], one["failed"][0]) for one in of("pd_ring", called / "tp", rank)
        ]
        assert rings == [
            ("prefill_transferred", 2, 0),
            ("decode_transferred", 2, 0),
            ("retracted", 1, 0),
            ("prealloc", 1, 1),
        ]


def test_of_a_draft_the_accepted_lengths_and_the_next_steps_are_there(called: Path) -> None:
    (accept,) = of("accept", called / "tp")
    assert (accept["drafts_accepted"], accept["tokens"]) == ([2, 0], 4)
    assert of("spec_steps", called / "tp") == [{"steps": 5}]


def test_side_pools_say_what_they_gave_and_whose_pages(called: Path) -> None:
    found = [(one["purpose"], one["pages_wanted"], one["pages"]) for one in of("alloc", called / "tp")]
    assert found == [("state", 3, 3), ("state", 9, 0), ("token", 5, 5)]
    (own,) = of("own_pages", called / "tp")
    assert (own["owners"], own["tokens"]) == ([1], 48)


def test_polls_are_handed_from_stage_to_stage_with_one_digest(called: Path) -> None:
    found = [
        (one["op"], one["phase"], one["value"])
        for rank in (0, 1)
        for one in of("meeting", called / "pp", rank)
    ]
    values = {value for _, _, value in found if value is not None}
    assert len(values) == 1
    assert [(op, phase) for op, phase, _ in found] == [
        ("send", "enter"),
        ("send", "leave"),
        ("recv", "enter"),
        ("recv", "leave"),
    ]
