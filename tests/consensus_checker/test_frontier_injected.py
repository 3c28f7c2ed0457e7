"""Public dumps of 16 ranks with a fault that was injected: the ranks that are to be named, and no other.

Of `gpu_error_1st` ranks 12 and 14 were broken, and in the dumps 14 has got as far as its peers; of
`lock_gil_1st` 9 and 14, whose dumps are empty.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from consensus_checker.claim import Claim
from consensus_checker.rules import call_mismatch, frontier
from tracer.importers.evidence import LINES, WHOLE
from tracer.importers.gather import gathered

FOLDER = Path(os.environ.get("HICACHE_DATA", "")) / "flight_recorder"
INJECTED = {"gpu_error_1st": (12,), "lock_gil_1st": (9, 14)}
# Of the same groups as the faulty ranks; ranks 0-7 have nothing to do with it.
NEAR = {"gpu_error_1st": range(12, 16), "lock_gil_1st": range(8, 16)}
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="HICACHE_DATA names no folder of public data")
CASES = pytest.mark.parametrize("case", sorted(INJECTED))


def claims(*paths: Path) -> list[Claim]:
    with gathered(paths, whole=WHOLE, lines=LINES) as found:
        return [*call_mismatch.find(found.dossier), *frontier.find(found.dossier)]


def copied(case: str, folder: Path) -> dict[int, Path]:
    return {
        rank: Path(shutil.copy(FOLDER / case / f"_dump_{rank}", folder / f"_dump_{rank}"))
        for rank in range(16)
    }


@CASES
def test_exactly_the_injected_ranks_are_named_by_pickles(case: str, tmp_path: Path) -> None:
    copied(case, tmp_path)
    (claim,) = claims(tmp_path)
    assert (claim.finding.rule, claim.finding.culprit, claim.finding.unknown) == (
        "fr_not_joined",
        INJECTED[case],
        (),
    )


@CASES
def test_exactly_the_injected_ranks_are_named_by_lines_of_json(case: str) -> None:
    (claim,) = claims(FOLDER / case / "dumps.jsonl")
    assert (claim.finding.rule, claim.finding.culprit) == ("fr_not_joined", INJECTED[case])


@CASES
def test_a_dump_and_the_same_as_json_are_no_second_look(case: str) -> None:
    (claim,) = claims(FOLDER / case)
    assert (claim.finding.culprit, claim.finding.level) == (INJECTED[case], "medium")


@CASES
def test_names_that_tell_nothing_do_not_matter(case: str, tmp_path: Path) -> None:
    # The groups of a dump have one rank in common.
    for rank, path in copied(case, tmp_path).items():
        path.rename(tmp_path / f"trace_{'fedcba9876543210'[rank]}x")
    (claim,) = claims(tmp_path)
    assert claim.finding.culprit == INJECTED[case]


@CASES
def test_names_that_were_shuffled_do_not_matter(case: str, tmp_path: Path) -> None:
    paths = copied(case, tmp_path)
    for rank, path in paths.items():
        path.rename(tmp_path / f"moved_{rank}")
    for rank in paths:
        (tmp_path / f"moved_{rank}").rename(tmp_path / f"_dump_{(rank * 7 + 3) % 16}")
    (claim,) = claims(tmp_path)
    assert claim.finding.culprit == INJECTED[case]


@CASES
@pytest.mark.parametrize("lost", range(16))
def test_without_one_file_nobody_else_is_named(case: str, lost: int, tmp_path: Path) -> None:
    copied(case, tmp_path)[lost].unlink()
    (claim,) = claims(tmp_path)
    assert set(claim.finding.culprit) <= set(INJECTED[case])
    if lost not in NEAR[case]:
        assert claim.finding.culprit == INJECTED[case]


@CASES
@pytest.mark.parametrize("seed", range(20))
def test_with_several_files_cut_or_gone_nobody_else_is_named(case: str, seed: int, tmp_path: Path) -> None:
    paths = copied(case, tmp_path)
    for rank, path in paths.items():
        fate = (rank * 13 + seed * 7) % 5
        if fate == 0:
            path.unlink()
        elif fate == 1:
            path.write_bytes(path.read_bytes()[: 37 + 100 * seed])
    for claim in claims(tmp_path):
        assert set(claim.finding.culprit) <= set(INJECTED[case])
