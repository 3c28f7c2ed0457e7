"""Rings as the tracer writes them: four ranks, each with noise of its own, aligned and compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from consensus_checker.check import check
from tests.support.logs import DECIDE, NOTE, SMALL_KINDS, place
from tracer.log import find_logs
from tracer.record import header
from tracer.segments import SegmentSink
from tracer.tracer import Tracer

RANKS = 4
LIMIT_BYTES = 256 * 1024


def write(folder: Path, *, odd: int = -1, at: int = -1, count: int = 20_000) -> None:
    """Equal decisions on every rank, a note now and then; rank `odd` decides otherwise once."""
    for rank in range(RANKS):
        head = header(
            place(rank, {"tp": RANKS}), SMALL_KINDS, lane="scheduler", run_id="run-a", tool_version="test"
        )
        tracing = Tracer(SegmentSink(folder, rank, "scheduler", limit_bytes=LIMIT_BYTES), head, lambda: 7)
        decide, note = tracing.emitter(DECIDE), tracing.emitter(NOTE)
        for node in range(count):
            tracing.step = node // 10
            if node % (7 + rank) == 0:
                note("x" * (node % (20 + rank)))
            is_odd = (rank, node) == (odd, at)
            decide(node, 1, 0 if is_odd else 64, 0 if is_odd else 5)
        tracing.close("completed")


def test_rings_of_equal_ranks_accuse_nobody(tmp_path: Path) -> None:
    write(tmp_path)
    verdict = check(find_logs(tmp_path))
    assert (verdict.finding.culprit, verdict.code in (0, 4)) == ((), True)
    starts = {lanes["scheduler"] for lanes in verdict.coverage.dropped_up_to.values()}
    assert len(starts) == RANKS
    assert 0 < verdict.coverage.compared_calls < 4000


@pytest.mark.parametrize(("at", "code"), [(19_990, 10), (5000, 4)])
def test_a_divergence_is_found_where_the_ring_still_has_it(tmp_path: Path, at: int, code: int) -> None:
    write(tmp_path, odd=2, at=at)
    verdict = check(find_logs(tmp_path))
    first = verdict.finding.first_divergence
    if code == 10:
        assert first is not None
        assert (verdict.finding.culprit, first.index, verdict.finding.level) == ((2,), at, "high")
    else:
        assert (verdict.finding.culprit, first, verdict.code in (0, 4)) == ((), None, True)


def test_a_rank_killed_in_the_middle_of_its_ring_accuses_nobody(tmp_path: Path) -> None:
    write(tmp_path)
    for rank, count in ((1, 3), (3, 1)):
        files = sorted(tmp_path.glob(f"rank{rank:04d}.*"))
        for file in files[count:]:
            file.unlink()
    verdict = check(find_logs(tmp_path))
    assert (verdict.code, verdict.finding.culprit, verdict.coverage.truncated) == (4, (), (1, 3))
