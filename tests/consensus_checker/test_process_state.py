"""A process that the system calls stopped is named, and a process that waits is no news."""

from __future__ import annotations

from pathlib import Path

from consensus_checker.rules.process_state import find
from tracer.importers.dossier import At, Dossier, Line, Who


def dossier(*looks: str) -> Dossier:
    """Each look a letter a rank, `.` where nothing is known."""
    found = Dossier()
    for look in looks:
        for rank, state in enumerate(look):
            index = found.begin(f"process_rank_{rank}.json")
            if state != ".":
                found.lines.append(Line(Who(rank), "process", {"state": state}, At(index, 0)))
    return found


def test_a_stopped_process_among_others_is_named() -> None:
    (claim,) = find(dossier("SRTS"))
    finding = claim.finding
    assert (finding.kind, finding.code, finding.level) == ("dead", 14, "high")
    assert (finding.culprit, finding.victims, finding.unknown) == ((2,), (), ())
    assert finding.summary == "rank 2: its process is stopped, and nothing in it runs"
    assert [(one.file, one.record) for one in finding.evidence] == [("process_rank_2.json", 0)]


def test_a_process_that_has_ended_is_told_apart_from_one_that_is_stopped() -> None:
    assert [claim.finding.summary for claim in find(dossier("ZtS"))] == [
        "rank 0: its process has ended",
        "rank 1: its process is stopped, and nothing in it runs",
    ]


def test_the_last_look_counts() -> None:
    assert find(dossier("ST", "SS")) == []


def test_where_all_are_stopped_whoever_looked_may_have_stopped_them() -> None:
    assert find(dossier("TTT")) == []


def test_processes_that_wait_or_compute_are_no_news() -> None:
    assert find(dossier("SRDI.")) == []


def test_its_page_is_there() -> None:
    page = Path(__file__).parents[2] / "consensus_checker" / "rule_pages" / "process_state.md"
    assert page.read_text(encoding="utf-8").startswith("# process_state\n")
