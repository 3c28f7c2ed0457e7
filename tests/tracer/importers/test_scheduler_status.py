from __future__ import annotations

from pathlib import Path

from tests.support.foreign_lines import read, status
from tracer.importers import scheduler_status
from tracer.importers.dossier import At, Status, Who


def test_a_status_is_what_a_rank_holds_in_its_order(tmp_path: Path) -> None:
    found = read(scheduler_status, tmp_path, "start\n" + status(1, ["r2", "r1"], ["r9"]) + status(1, [], []))
    assert [
        Status(Who(1), 0, ("r2", "r1"), ("r9",), At(0, 2)),
        Status(Who(1), 1, (), (), At(0, 3)),
    ] == found.statuses
    assert (found.files[0].records, found.files[0].unparsed) == (3, 1)


def test_looks_are_counted_for_each_rank(tmp_path: Path) -> None:
    text = status(0, [], []) + status(1, [], []) + status(0, [], [])
    found = read(scheduler_status, tmp_path, text)
    assert [(row.who.rank, row.sample) for row in found.statuses] == [(0, 0), (1, 0), (0, 1)]


def test_two_statuses_on_one_line_are_two(tmp_path: Path) -> None:
    text = status(0, ["r1"], []).rstrip() + status(1, ["r1"], [])
    found = read(scheduler_status, tmp_path, text)
    assert [row.who.rank for row in found.statuses] == [0, 1]


def test_a_status_whose_launcher_says_another_rank_is_nobodys(tmp_path: Path) -> None:
    found = read(scheduler_status, tmp_path, "[rank3]:" + status(1, ["r1"], []))
    assert [row.who.rank for row in found.statuses] == [None]


def test_what_is_no_status_is_counted(tmp_path: Path) -> None:
    deep = f'{{"event": "scheduler.status", "running_rids": {"[" * 500}{"]" * 500}}}\n'
    others = 'say "scheduler.status"\n{"event": "scheduler.status", "rank": "x"}\n'
    found = read(scheduler_status, tmp_path, deep + others)
    assert (found.statuses, found.files[0].unparsed) == ([], 3)
