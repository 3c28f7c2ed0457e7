from __future__ import annotations

from pathlib import Path

import pytest

from consensus_checker.folders import server_logs, together
from tests.support.logs import write_run
from tracer.log import find_logs

BACKUP = {"kind": "write_backup", "node": 17, "pages": 1, "tokens": 64, "host_pages_free": 5}
PAIR = {"sizes": {"tp": 2}}


def groups(*places: Path) -> list[tuple[list[str], list[int]]]:
    """Names of the folders of each group, and its ranks."""
    found = together([(place, find_logs(place)) for place in places])
    return [([place.name for place in one.places], [lane.rank for lane in one.lanes]) for one in found]


def test_one_run_id_and_attempt_is_one_run(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", {1: [BACKUP]}, **PAIR)
    b = write_run(tmp_path / "b", {0: [BACKUP]}, **PAIR)
    assert groups(a, b) == [(["a", "b"], [0, 1])]


@pytest.mark.parametrize("change", [{"run_id": "run-b"}, {"attempt": 1}], ids=str)
def test_another_run_or_attempt_stays_apart(change: dict[str, str], tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", {1: [BACKUP]}, **PAIR)
    b = write_run(tmp_path / "b", {0: [BACKUP]}, **PAIR, **change)
    assert groups(a, b) == [(["a"], [1]), (["b"], [0])]


def test_a_folder_with_two_runs_belongs_to_no_other(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", {0: [BACKUP]}, **PAIR)
    write_run(a, {1: [BACKUP]}, **PAIR, run_id="run-b")
    b = write_run(tmp_path / "b", {1: [BACKUP]}, **PAIR)
    assert [names for names, _ in groups(a, b)] == [["a"], ["b"]]


def test_a_rank_with_other_bytes_keeps_the_folders_apart_and_both_say_so(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", {0: [BACKUP], 1: [BACKUP]}, **PAIR)
    b = write_run(tmp_path / "b", {1: [BACKUP, BACKUP]}, **PAIR)
    found = together([(place, find_logs(place)) for place in (a, b)])
    told = f"rank 1 of this run: other bytes in {a} and {b}, so these are judged apart"
    assert [one.unreadable for one in found] == [[told], [told]]


def test_a_folder_a_rank_of_other_logs_is_looked_into(tmp_path: Path) -> None:
    for name in ("1/stderr.log", "0/stderr.log", ".hidden/x.log", "a/b/c/d/e/deep.log"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x\n")
    assert server_logs(tmp_path) == [tmp_path / "0/stderr.log", tmp_path / "1/stderr.log"]


def test_logs_of_ours_and_what_is_no_file_are_left_to_their_own_reader(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "one", {0: [BACKUP]})
    (tmp_path / "runs" / "notes.txt").write_text("x\n")
    (tmp_path / "empty").mkdir()
    ours = next(run.iterdir())
    copy = tmp_path / "copy.txt"
    copy.write_bytes(ours.read_bytes())
    places = (run, ours, copy, tmp_path / "runs", tmp_path / "empty", tmp_path / "nowhere", Path("/dev/null"))
    assert [server_logs(place) for place in places] == [None] * len(places)
