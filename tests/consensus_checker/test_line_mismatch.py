from __future__ import annotations

from pathlib import Path

from consensus_checker.finding import Finding
from consensus_checker.rules.line_mismatch import find
from tests.support.foreign_lines import dossier, timed_out


def findings(folder: Path, text: str) -> list[Finding]:
    return [claim.finding for claim in find(dossier(folder, server=text))]


def test_a_rank_that_brought_more_is_odd_by_majority(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, timed_out(0, 41) + timed_out(1, 41, numel=4352) + timed_out(2, 41))
    assert (found.code, found.culprit, found.victims, found.level) == (16, (1,), (0, 2), "medium")
    assert found.summary == (
        "calls differ at #41 of group 7 (tp): ranks 0, 2 ALLREDUCE of 4,096 elements; "
        "rank 1 ALLREDUCE of 4,352 elements"
    )


def test_another_op_is_a_mismatch_whatever_its_size(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, timed_out(0, 41) + timed_out(1, 41, "BROADCAST") + timed_out(2, 41))
    assert (found.code, found.culprit) == (16, (1,))


def test_ops_that_take_what_each_brings_may_differ_in_size(tmp_path: Path) -> None:
    text = timed_out(0, 41, "ALLTOALL_BASE", 10) + timed_out(1, 41, "ALLTOALL_BASE", 20)
    assert findings(tmp_path, text) == []


def test_two_of_two_are_a_tie(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, timed_out(0, 41) + timed_out(1, 41, numel=1))
    assert (found.culprit, found.unknown, found.level) == ((), (0, 1), "undetermined")


def test_other_places_and_other_groups_are_not_compared(tmp_path: Path) -> None:
    another = timed_out(2, 41, numel=1, group="PG ID 2 PG GUID 9(tp)")
    assert findings(tmp_path, timed_out(0, 41) + timed_out(1, 42, numel=1) + another) == []


def test_without_a_groups_name_nobody_is_named(tmp_path: Path) -> None:
    text = "".join(
        timed_out(rank, 41, numel=numel).replace("PG ID 2 PG GUID 7(tp) ", "")
        for rank, numel in enumerate((1, 1, 2))
    )
    (found,) = findings(tmp_path, text)
    assert (found.culprit, found.unknown) == ((), (0, 1, 2))


def test_the_first_place_counts(tmp_path: Path) -> None:
    text = "".join(
        timed_out(rank, seq, numel=1 + (rank == odd)) for seq, odd in ((41, 2), (40, 1)) for rank in range(3)
    )
    assert [found.culprit for found in findings(tmp_path, text)] == [(1,)]


def test_debug_mode_tells_the_odd_one_of_three(tmp_path: Path) -> None:
    def running(rank: int, numel: int) -> str:
        call = f"SequenceNumber=41, OpType=ALLREDUCE, TensorShape=[{numel}], TensorDtypes=Float"
        return f"Rank {rank} is running collective: CollectiveFingerPrint({call})"

    def line(one: str, other: str) -> str:
        return f"Detected mismatch between collectives on ranks. {one}, but {other}.Collectives differ\n"

    zero, one, two = running(0, 512), running(1, 1024), running(2, 512)
    (found,) = findings(tmp_path, line(zero, one) + line(one, zero) + line(two, one))
    assert (found.code, found.culprit, found.victims) == (16, (1,), (0, 2))
