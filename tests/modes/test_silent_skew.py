"""A vote left out that no collective library can see: both watchers name the first that was mis-paired."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from consensus_checker.check import check
from tests.support.processes import outputs, start_ranks
from tracer.log import find_logs

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

MODULE = "tests.support.skewed_votes"


def run(*words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setenv("HICACHE_TRACE_DIR", str(folder))
    return [json.loads(out) for out, _ in outputs(start_ranks(2, MODULE, *words), timeout_s=300)]


def test_the_first_mispaired_vote_is_named_while_the_votes_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = run("--votes", "600", "--skip", "200", folder=tmp_path, monkeypatch=monkeypatch)
    for rank in said:
        # 600 votes, of which the last is not held and 200 were right.
        assert rank["wrong"] == 399
        (screen,) = rank["told"]
        assert "DIVERGED" in screen and "> 400   vote r200 vote r201" in screen
        # Two ranks are a tie: both sides are shown, and nobody is accused.
        assert "rank 0 ?" in screen and "rank 1 ?" in screen and "<<" not in screen


def test_votes_of_which_none_is_left_out_are_told_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = run("--votes", "300", "--skip", "-1", folder=tmp_path, monkeypatch=monkeypatch)
    assert [(rank["wrong"], rank["told"]) for rank in said] == [(0, []), (0, [])]
    verdict = check(find_logs(tmp_path))
    # Call and return of each vote, on two ranks.
    assert (verdict.kind, verdict.coverage.compared_calls) == ("consistent", 600)
