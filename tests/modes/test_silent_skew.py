"""A vote left out that no collective library can see: both watchers name the first that was mis-paired."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from consensus_checker.check import check
from hicache.forks import Forks
from tests.support.processes import outputs, start_ranks
from tracer.log import find_logs

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

MODULE = "tests.support.skewed_votes"


Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Both ranks with these words, and what each has said in the end."""
    monkeypatch.setenv("HICACHE_TRACE_DIR", str(tmp_path))
    return lambda *words: [
        json.loads(out) for out, _ in outputs(start_ranks(forks, 2, MODULE, *words), timeout_s=300)
    ]


def test_the_first_mispaired_vote_is_named_while_the_votes_go_on(run: Run) -> None:
    said = run("--votes", "600", "--skip", "200")
    for rank in said:
        # 600 votes, of which the last is not held and 200 were right.
        assert rank["wrong"] == 399
        (screen,) = rank["told"]
        assert "DIVERGED" in screen and "> 400   vote r200 vote r201" in screen
        # Two ranks are a tie: both sides are shown, and nobody is accused.
        assert "rank 0 ?" in screen and "rank 1 ?" in screen and "<<" not in screen


def test_votes_of_which_none_is_left_out_are_told_by_nobody(run: Run, tmp_path: Path) -> None:
    said = run("--votes", "300", "--skip", "-1")
    assert [(rank["wrong"], rank["told"]) for rank in said] == [(0, []), (0, [])]
    verdict = check(find_logs(tmp_path))
    # Call and return of each vote, on two ranks.
    assert (verdict.kind, verdict.coverage.compared_calls) == ("consistent", 600)
