"""`hicache snapshot`: which processes, into which folder, and what it says of what it has."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest

from cli.screens.snapshot import screen
from tests.cli.conftest import Hicache
from tests.support.sleepers import asleep
from tracer.snapshot import recorder
from tracer.snapshot.look import Taken


def test_a_process_with_our_recorder_is_looked_at_twice(tmp_path: Path, hicache: Hicache) -> None:
    out = tmp_path / "out"
    with asleep(3, tmp_path / "logs") as process:
        said = hicache("snapshot", process.pid, "-o", out)
    assert said.code == 0
    assert re.search(rf"^ *{process.pid} +3 +waiting +2 +- +2 +3 ", said.out, re.MULTILINE)
    assert said.out.endswith(f"next      hicache diagnose {out}\n")
    assert said.err == f"process {process.pid}: done\n"
    # What was gathered may be read by its owner only.
    assert {path.stat().st_mode & 0o077 for path in out.rglob("*")} == {0}


def test_processes_are_found_by_their_command_line_and_told_as_json(tmp_path: Path, hicache: Hicache) -> None:
    with asleep(0, tmp_path / "logs-of-this-test") as process:
        words = ("snapshot", "--match", f"{re.escape(str(tmp_path))}/logs-of", "--seconds", "1.5")
        said = hicache(*words, "-o", tmp_path / "out", "--json", "--quiet")
    document = json.loads(said.out)
    assert (said.code, said.err, document["schema"]) == (0, "", "hicache.snapshot.v1")
    (one,) = document["processes"]
    assert (one["pid"], one["rank"], one["files"]["process"]) == (process.pid, 0, ["1/process_rank_0.json"])
    # Whether the first look was over by then or not.
    assert one["reasons"]["process"] in ("no time left for a second look", "not done within 1.5 s")


def test_a_process_that_is_not_there_is_nothing_to_look_at(tmp_path: Path, hicache: Hicache) -> None:
    said = hicache("snapshot", 4_194_304, "-o", tmp_path / "out", "--quiet")
    assert (said.code, said.out) == (3, "SNAPSHOT  1 process\n")
    summary = json.loads((tmp_path / "out" / "snapshot.json").read_text())
    assert summary["processes"][0]["reasons"]["stacks"] == "there is no such process"


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        ([], 2, "snapshot needs -o"),
        (["-o", "{}/new"], 2, "snapshot of nothing"),
        (["-o", "{}/new", "--match", "("], 2, "--match '(' is no pattern"),
        (["-o", "{}/new", "--match", "no such command line"], 3, "no process has 'no such command line'"),
        (["-o", "{}/new", "0"], 2, "invalid value for '[PID...]'"),
        (["-o", "{}/full", "1"], 2, "is there already (mine in it)"),
        (["-o", "{}/full/mine", "1"], 2, "mine is a file"),
        (["-o", "{}/full/mine/deep", "1"], 2, "Not a directory"),
    ],
)
def test_what_can_not_be_done_is_said_before_anything_is_done(
    words: list[str], code: int, error: str, tmp_path: Path, hicache: Hicache
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    said = hicache("snapshot", *(word.format(tmp_path) for word in words))
    assert (said.code, said.out) == (code, "")
    assert error in said.err and "Traceback" not in said.err
    assert not (tmp_path / "new").exists()
    assert os.listdir(tmp_path / "full") == ["mine"]


def test_a_folder_that_can_not_be_filled_is_an_error_and_no_traceback(
    tmp_path: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(recorder, "write", full)
    said = hicache("snapshot", 4_194_304, "-o", tmp_path / "out")
    assert (said.code, said.out) == (2, "")
    assert said.err.endswith(f"error: -o {tmp_path / 'out'} was not written: No space left on device\n")


SCREEN = """\
SNAPSHOT  3 processes, 1 of them stopped

pid  rank  state    stacks  flight rec  system  own log  log tail  py-spy
 41     0  waiting       2           2       2        4         1  -
 42     1  stopped       -           -       2        4         1  -
 43     -  running       -           -       2        -         1  -

missing   py-spy of all: py-spy is not installed
          stacks, flight rec of rank 1: the process is stopped: nothing in it
            runs
          stacks, own log of process 43: no recorder of hicache in this process
          flight rec of process 43: TORCH_NCCL_DEBUG_INFO_PIPE_FILE is not set
            there

next      hicache diagnose out
"""


def test_the_screen_has_a_line_a_process_and_a_reason_once() -> None:
    both = {"process": ["1/a", "2/a"], "log_tail": ["logs/a"]}
    own = {**both, "own_log": ["own/a", "own/b", "own/c", "own/d"]}
    looks = ["1/a", "2/a"]
    spy, stopped = {"py_spy": "py-spy is not installed"}, "the process is stopped: nothing in it runs"
    none = "no recorder of hicache in this process"
    pipe = {"flight_recorder": "TORCH_NCCL_DEBUG_INFO_PIPE_FILE is not set there"}
    found = [
        Taken(41, 0, "S", files={**own, "stacks": looks, "flight_recorder": looks}, reasons=spy),
        Taken(42, 1, "T", files=own, reasons={**spy, "stacks": stopped, "flight_recorder": stopped}),
        Taken(43, None, "R", files=both, reasons={**spy, "stacks": none, "own_log": none, **pipe}),
    ]
    lines = screen(found, "hicache diagnose out", is_quiet=False)
    assert "".join(f"{line}\n" for line in lines) == SCREEN
