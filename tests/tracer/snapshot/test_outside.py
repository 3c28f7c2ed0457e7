"""Evidence of processes with nothing of ours in them: each kind is there, or a reason is."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from tracer.snapshot.outside import TAIL_BYTES, flight_recorder, log_tails, py_spy


def soon() -> float:
    return time.monotonic() + 10


def py_spy_that(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program called py-spy, and no other one."""
    program = folder / "py-spy"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_py_spy_is_asked_not_to_stop_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    py_spy_that(tmp_path, 'echo "$@"', monkeypatch)
    assert py_spy(42, tmp_path / "out", soon()) == ""
    assert (tmp_path / "out").read_text() == "dump --nonblocking --pid 42\n"


def test_py_spy_that_may_not_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    py_spy_that(tmp_path, "echo Error: Permission denied >&2; exit 1", monkeypatch)
    assert py_spy(42, tmp_path / "out", soon()) == "py-spy: Error: Permission denied"


def test_py_spy_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    py_spy_that(tmp_path, "exec sleep 60", monkeypatch)
    begin_s = time.monotonic()
    assert py_spy(42, tmp_path / "out", begin_s + 0.3) == "py-spy took more than 0 s"
    assert time.monotonic() < begin_s + 10


def test_without_py_spy_that_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert py_spy(42, tmp_path / "out", soon()) == "py-spy is not installed"


def variables(tmp_path: Path) -> dict[str, str]:
    return {
        "RANK": "3",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tmp_path / "pipe_"),
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "dump_"),
    }


def test_a_byte_in_the_pipe_brings_a_dump(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe_3")
    reader = os.open(tmp_path / "pipe_3", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)

    def torch() -> None:
        if os.read(reader, 1) == b"1":
            (tmp_path / "dump_3").write_bytes(b"a dump")

    # The other end must be there before a read that waits.
    writer = os.open(tmp_path / "pipe_3", os.O_WRONLY)
    thread = threading.Thread(target=torch)
    thread.start()
    assert flight_recorder(os.getpid(), variables(tmp_path), tmp_path / "out", soon(), tmp_path) == ""
    thread.join()
    os.close(reader)
    os.close(writer)
    assert (tmp_path / "out").read_bytes() == b"a dump"


def test_a_dump_of_before_is_not_taken_for_an_answer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe_3")
    reader = os.open(tmp_path / "pipe_3", os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "dump_3").write_bytes(b"of yesterday")
    told = flight_recorder(7, variables(tmp_path), tmp_path / "out", time.monotonic() + 0.2, tmp_path)
    os.close(reader)
    assert told.startswith("asked through its pipe, and no dump came")
    assert not (tmp_path / "out").exists()


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe_3")
    told = flight_recorder(7, variables(tmp_path), tmp_path / "out", soon(), tmp_path)
    assert told == "its pipe pipe_3 can't be opened: No such device or address"


def test_a_file_in_the_place_of_the_pipe_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "pipe_3").write_bytes(b"mine")
    told = flight_recorder(7, variables(tmp_path), tmp_path / "out", soon(), tmp_path)
    assert (told, (tmp_path / "pipe_3").read_bytes()) == ("pipe_3 is no pipe", b"mine")


def test_the_ends_of_logs_begin_with_a_whole_line(tmp_path: Path) -> None:
    fds = tmp_path / "7" / "fd"
    fds.mkdir(parents=True)
    log = tmp_path / "server.log"
    log.write_bytes(b"a line of the start\n" * (TAIL_BYTES // 20 + 2) + b"the end\n")
    for number in ("1", "2"):
        (fds / number).symlink_to(log)
    # Both are one file, which is taken once.
    assert log_tails(7, tmp_path, "rank_3", tmp_path) == (["rank_3.stdout.log"], "")
    tail = (tmp_path / "rank_3.stdout.log").read_bytes()
    assert tail.startswith(b"a line of the start\n") and tail.endswith(b"the end\n")
    assert TAIL_BYTES - 20 <= len(tail) <= TAIL_BYTES


def test_output_that_goes_into_a_pipe_is_its_readers(tmp_path: Path) -> None:
    fds = tmp_path / "7" / "fd"
    fds.mkdir(parents=True)
    os.mkfifo(fds / "1")
    assert log_tails(7, tmp_path, "rank_3", tmp_path) == (
        [],
        "stdout is a pipe, whose reader has the log, stderr can't be read: No such file or directory",
    )
