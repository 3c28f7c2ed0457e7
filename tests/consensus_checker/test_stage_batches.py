from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from consensus_checker.finding import Finding
from consensus_checker.rules.stage_batches import find
from tests.support.foreign_lines import dossier

# New and cached tokens of each batch.
Batches = Sequence[tuple[int, int]]
SAME: Batches = [(100 + 7 * n, 64 * n) for n in range(20)]


def findings(folder: Path, *stages: Batches) -> list[Finding]:
    text = "".join(
        f"[2031-02-03 04:05:06 PP{stage} TP0] Prefill batch, #new-seq: 1, #new-token: {new}, "
        f"#cached-token: {cached}, token usage: 0.01\n"
        for stage, batches in enumerate(stages)
        for new, cached in batches
    )
    return [claim.finding for claim in find(dossier(folder, server=text))]


def test_a_stage_that_computed_another_batch_is_odd(tmp_path: Path) -> None:
    odd = [*SAME[:10], (900, 0), *((5 * n, 1) for n in range(9))]
    (found,) = findings(tmp_path, SAME, SAME, odd)
    assert (found.code, found.culprit, found.victims, found.level) == (10, (2,), (0, 1), "medium")
    assert found.summary == (
        "rank 2 (stage 2) computed 1 sequences of 900 new and 0 cached tokens where stage 0 computed "
        "1 sequences of 170 new and 640 cached tokens, in prefill line 11"
    )
    assert (
        found.evidence[0].file,
        found.evidence[0].record,
        found.evidence[0].supports,
    ) == ("server.log", 51, "culprit 2")


def test_a_stage_that_is_behind_at_the_end_is_not_odd(tmp_path: Path) -> None:
    assert findings(tmp_path, SAME, SAME[:17]) == []


def test_a_line_that_was_lost_is_a_shift(tmp_path: Path) -> None:
    assert findings(tmp_path, SAME, [*SAME[:9], *SAME[10:]]) == []


def test_a_log_that_begins_later_is_a_shift(tmp_path: Path) -> None:
    assert findings(tmp_path, SAME, SAME[5:]) == []


def test_a_difference_right_at_the_end_names_nobody(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, SAME, [*SAME[:19], (900, 0)])
    assert (found.code, found.culprit, found.unknown) == (20, (), (1,))


def test_logs_with_nothing_in_common_are_not_compared(tmp_path: Path) -> None:
    assert findings(tmp_path, SAME, [(1, n) for n in range(20)]) == []
