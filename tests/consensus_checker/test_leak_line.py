from __future__ import annotations

from pathlib import Path

import pytest

from consensus_checker.rules.leak_line import find
from tests.support.foreign_lines import dossier


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ("available=640, evictable=20480, protected=0, total=20480", ": 640 tokens too many"),
        (
            "self.max_total_num_tokens=100, available_size=20, evictable_size=30, protected_size=40",
            ": 10 tokens too few",
        ),
        ("and no counts", ""),
    ],
)
def test_a_pool_that_does_not_add_up_is_an_invariant_broken(tmp_path: Path, counts: str, told: str) -> None:
    text = f"[2031-02-03 04:05:06 TP0] x\n[2031-02-03 04:05:06 TP1] pool memory leak detected! {counts}\n"
    (claim,) = find(dossier(tmp_path, server=text))
    found = claim.finding
    assert (found.code, found.culprit, found.level) == (18, (1,), "high")
    assert f"a pool's counts do not add up on rank 1{told}" == found.summary
