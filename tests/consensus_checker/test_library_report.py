from __future__ import annotations

from pathlib import Path

from consensus_checker.finding import Finding
from consensus_checker.rules.library_report import find
from tests.support.foreign_lines import dossier

HEAD = "[rank0]:[E203 04:10:08.1 ProcessGroupNCCL.cpp:1] - [0] Timeout at collective: ALLREDUCE, #12\n"
FINE = "INFO step 7\n"


def findings(folder: Path, text: str) -> list[Finding]:
    return [claim.finding for claim in find(dossier(folder, server=text, rank_3=FINE))]


def test_a_desync_report_names_who_did_not_join(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, HEAD + "[2] finished collective #11, but didn't join collective #12\n")
    assert (found.code, found.culprit, found.level) == (11, (2,), "medium")
    assert found.summary == "rank 2 did not join collective #12, says the library"


def test_who_never_joined_anything_is_named_too(tmp_path: Path) -> None:
    text = (
        "To our best knowledge, ranks [2] are the lagging ranks that caused this timeout. They never joined\n"
    )
    assert [found.culprit for found in findings(tmp_path, text)] == [(2,)]


def test_a_barrier_names_whom_it_waited_for(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, "RuntimeError: Rank 2 failed to pass monitoredBarrier in 3000 ms\n")
    assert (found.culprit, found.summary) == (
        (2,),
        "rank 2 did not join a monitored barrier, says the library",
    )


def test_half_of_the_job_is_nobody(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, "RuntimeError: Ranks 1, 2 failed to pass monitoredBarrier in 3000 ms\n")
    assert (found.code, found.culprit, found.unknown) == (20, (), (1, 2))


def test_reports_that_differ_name_nobody(tmp_path: Path) -> None:
    text = "".join(f"Rank {rank} failed to pass monitoredBarrier in 3000 ms\n" for rank in (1, 2))
    (found,) = findings(tmp_path, text)
    assert (found.code, found.culprit, found.unknown) == (20, (), (1, 2))
    assert found.summary == "the library's reports differ in who did not join: rank 1; rank 2"


def test_who_only_joined_and_waits_is_not_missing(tmp_path: Path) -> None:
    assert findings(tmp_path, HEAD + "[1] joined but didn't finish collective #12\n") == []
