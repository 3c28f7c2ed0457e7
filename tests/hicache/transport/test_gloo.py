"""Real processes pair calls as the simulator does. Four of them, started once for all of these tests."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from hicache.errors import ConfigError
from hicache.forks import Forks
from hicache.topology import Topology
from hicache.transport.gloo import GlooWorld, first_line
from tests.support.processes import ROOT, outputs, start_ranks

pytestmark = pytest.mark.xdist_group("processes")

Got = dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def got(forks: Forks) -> Got:
    """Rank -> what its lane found out, on a world of two stages with two tensor ranks each."""
    said = outputs(start_ranks(forks, 4, "tests.support.gloo_lanes"))
    found = [
        json.loads(out) if out.strip() else {"rank": rank, "failed": err}
        for rank, (out, err) in enumerate(said)
    ]
    assert [each for each in found if "failed" in each] == []
    return {each["rank"]: each for each in found}


@pytest.mark.slow
def test_reductions_are_over_the_members_of_the_group(got: Got) -> None:
    assert [got[rank]["min"] for rank in range(4)] == [[0, -1], [0, -1], [2, -3], [2, -3]]
    assert [got[rank]["sum"] for rank in range(4)] == [[1, -1], [1, -1], [5, -5], [5, -5]]
    assert [got[rank]["pp max"] for rank in range(4)] == [[2, 0], [3, -1], [2, 0], [3, -1]]
    assert [got[rank]["cp"] for rank in range(4)] == [[7]] * 4


@pytest.mark.slow
def test_calls_of_other_purpose_are_paired_all_the_same(got: Got) -> None:
    assert [got[rank]["blind"] for rank in range(4)] == [[1], [1], [3], [3]]


@pytest.mark.slow
def test_a_broadcast_carries_bytes_of_any_length_numbers_or_nothing(got: Got) -> None:
    for rank in range(4):
        assert got[rank]["broadcast bytes"] == ["bytes", True]
        assert got[rank]["broadcast empty"] == ["bytes", True]
        assert got[rank]["broadcast none"] == ["NoneType", True]
        assert got[rank]["broadcast numbers"] == ["list", True]


@pytest.mark.slow
def test_a_stage_receives_in_order_what_was_sent_before_it_asked(got: Got) -> None:
    for rank in (2, 3):
        assert got[rank]["messages"] == [[3, -4], None, True, True]
    assert [got[rank]["drained"] for rank in (0, 1)] == [True, True]


@pytest.mark.slow
def test_the_guard_lets_calls_of_one_meaning_pass(got: Got) -> None:
    assert [got[rank]["guarded"] for rank in range(4)] == [[0], [0], [2], [2]]


@pytest.mark.slow
def test_the_guard_names_what_the_others_meant_before_the_payload_is_used(got: Got) -> None:
    assert got[0]["refused call"][0].startswith("rank 1: odd #")
    assert got[0]["refused call"][0].endswith("all_reduce 2")
    assert got[3]["refused call"][0].startswith("rank 2: odd #")
    assert got[2]["refused message"][0].startswith("rank 0: verdict #")


def test_the_runtime_does_not_import_torch_before_somebody_asks_for_it() -> None:
    code = "import hicache.launch, hicache.worker, hicache.threads, sys; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"


def test_a_process_that_nobody_started_as_a_rank_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="RANK is '': this process was not started by torchrun"):
        GlooWorld(Topology(), channels=("main",), timeout_s=1)


def test_as_many_processes_are_needed_as_there_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="3 processes were started for 2 ranks"):
        GlooWorld(Topology(tp=2), channels=("main",), timeout_s=1)


def test_an_error_of_torch_is_told_without_its_place_and_its_advice() -> None:
    text = (
        "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:18564. "
        "This is typically caused by a remote worker crashing. Check the logs.\nException raised from ..."
    )
    assert first_line(RuntimeError(text)) == "Connection closed by peer [127.0.0.1]:18564"
