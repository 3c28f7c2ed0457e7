from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from consensus_checker.finding import Finding
from consensus_checker.rules.status_lists import find
from tests.support.foreign_lines import dossier, status

# What a rank runs and queues, one look after the other.
Looks = Sequence[tuple[Sequence[str], Sequence[str]]]
SAME: Looks = [(["r1", "r2"], ["r5"]), (["r1", "r2"], ["r5"]), (["r2", "r5"], [])]


def findings(folder: Path, *ranks: Looks) -> list[Finding]:
    logs = {
        f"host_{rank}": "".join(status(rank, running, queued) for running, queued in looks)
        for rank, looks in enumerate(ranks)
    }
    return [claim.finding for claim in find(dossier(folder, **logs))]


def test_a_request_that_one_rank_has_not_twice_in_a_row(tmp_path: Path) -> None:
    odd = [(["r1", "r2"], []), (["r1", "r2"], []), (["r2"], [])]
    (found,) = findings(tmp_path, SAME, odd, SAME)
    assert (found.code, found.culprit, found.victims, found.level) == (10, (1,), (0, 2), "medium")
    assert found.summary == (
        "request r5 is in different places, and stays there: queued on ranks 0, 2; nowhere on rank 1"
    )


def test_two_of_two_are_a_tie(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, SAME, [(["r1", "r2"], []), (["r1", "r2"], []), (["r2"], [])])
    assert (found.culprit, found.unknown, found.level) == ((), (0, 1), "undetermined")


def test_who_runs_what_others_queue_is_odd(tmp_path: Path) -> None:
    odd = [(["r1", "r2", "r5"], []), (["r1", "r2", "r5"], []), (["r2", "r5"], [])]
    assert [found.culprit for found in findings(tmp_path, SAME, SAME, odd)] == [(2,)]


def test_a_step_later_is_no_difference(tmp_path: Path) -> None:
    later = [(["r1", "r2"], ["r5"]), (["r2", "r5"], []), (["r2", "r5"], [])]
    assert findings(tmp_path, SAME, later, SAME) == []


def test_one_look_at_a_difference_accuses_nobody(tmp_path: Path) -> None:
    assert findings(tmp_path, SAME[:1], [(["r1", "r2"], [])], SAME[:1]) == []


def test_a_rank_whose_first_statuses_are_missing_is_shifted(tmp_path: Path) -> None:
    looks = [([f"r{n}", f"r{n + 1}", f"r{n + 2}", f"r{n + 3}"], []) for n in range(12)]
    assert findings(tmp_path, looks, looks[3:], looks) == []


def test_replicas_that_share_no_request_are_not_compared(tmp_path: Path) -> None:
    other = [(["q1"], ["q2"]), (["q1"], ["q2"])]
    assert findings(tmp_path, SAME, SAME, other, other) == []


def test_another_microbatch_is_not_compared(tmp_path: Path) -> None:
    one = [(["r1"], ["r9"]), (["r1"], ["r9"])]
    two = [(["r2"], ["r9"]), (["r2"], ["r9"])]
    assert findings(tmp_path, one, two, one) == []


def test_stages_are_compared_with_themselves(tmp_path: Path) -> None:
    logs = {
        f"host_{rank}": "".join(
            status(rank, ["r1", "r2"][: 1 + rank], []).replace("05:06]", f"05:06 PP{rank}]") for _ in range(3)
        )
        for rank in range(2)
    }
    assert find(dossier(tmp_path, **logs)) == []
