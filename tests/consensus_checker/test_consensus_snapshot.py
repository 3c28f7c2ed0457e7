"""A rank whose decisions are recorded can be asked for its stacks, from `configure` to `shutdown`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from consensus_checker import configure, shutdown
from tests.support.consensus import asked_for
from tracer.snapshot.recorder import Recorder, find_recorder


def test_a_rank_is_armed_while_it_is_configured(tmp_path: Path) -> None:
    with asked_for(tmp_path / "run"):
        configure([[0, 1]], rank=0, watcher=None, warn=lambda _: None)
        card = json.loads((tmp_path / "run" / "rank0000.signals.json").read_text())
        found = find_recorder(os.getpid())
        shutdown()
    assert (card["pid"], card["rank"]) == (os.getpid(), 0)
    assert isinstance(found, Recorder)
    assert found.card is not None and found.card.signal == card["signal"]
    assert not list((tmp_path / "run").glob("*.signals.*"))


def test_a_rank_that_writes_nothing_is_not_armed(tmp_path: Path) -> None:
    with asked_for(tmp_path / "run") as environment:
        environment.setenv("HICACHE_TRACE", "off")
        configure([[0, 1]], rank=0, watcher=None, warn=lambda _: None)
        assert not isinstance(find_recorder(os.getpid()), Recorder)
        shutdown()
