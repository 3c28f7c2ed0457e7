from __future__ import annotations

from pathlib import Path

from consensus_checker.rules.gloo_abort import find
from tests.support.foreign_lines import GLOO_CLOSED, GLOO_RESET, GLOO_SIZES, dossier


def test_the_rank_that_gloo_ends_is_not_called_odd(tmp_path: Path) -> None:
    (claim,) = find(dossier(tmp_path, rank_0=GLOO_SIZES, rank_1=GLOO_RESET, rank_2=GLOO_RESET))
    found = claim.finding
    assert (found.code, found.culprit, found.unknown, found.victims) == (16, (), (0,), (1, 2))
    assert found.summary == (
        "rank 0 had room for 8 bytes and was sent 16: ranks brought different sizes to one collective"
    )
    assert [(entry.file, entry.record, entry.supports) for entry in found.evidence] == [
        ("rank_0.log", 2, "unknown 0"),
        ("rank_1.log", 1, "victim 1"),
        ("rank_2.log", 1, "victim 2"),
    ]


def test_a_line_of_nobody_known_is_still_a_mismatch(tmp_path: Path) -> None:
    (claim,) = find(dossier(tmp_path, server=GLOO_SIZES))
    assert (claim.finding.code, claim.finding.culprit, claim.finding.unknown) == (16, (), ())


def test_lost_connections_alone_are_no_mismatch(tmp_path: Path) -> None:
    assert find(dossier(tmp_path, rank_0=GLOO_CLOSED, rank_1=GLOO_RESET)) == []


def test_a_size_that_can_not_be_is_left_out(tmp_path: Path) -> None:
    (claim,) = find(dossier(tmp_path, rank_0=GLOO_SIZES.replace("16 vs", "999999999999999999 vs")))
    assert claim.finding.summary.startswith("rank 0 was sent more than it had room for: ")
