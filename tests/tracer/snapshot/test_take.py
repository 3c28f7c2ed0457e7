"""A snapshot of several processes: all that can be had of each, reasons for the rest, and an end to it."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import pytest

from tests.support.sleepers import asleep, end, stand, start
from tracer.snapshot import recorder
from tracer.snapshot.take import Snapshot, ancestors, matching


@contextmanager
def eight_processes(logs: Path) -> Iterator[list[Popen[str]]]:
    processes = [start(rank, logs, log=logs / f"{rank}.log") for rank in range(8)]
    try:
        for process in processes:
            stand(process)
        yield processes
    finally:
        for process in processes:
            end(process)


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_of_eight_processes_six_have_everything_and_the_two_that_are_stopped_their_reasons(
    tmp_path: Path,
) -> None:
    logs, out = tmp_path / "logs", tmp_path / "out"
    logs.mkdir()
    out.mkdir()
    with eight_processes(logs) as processes:
        for rank in (2, 5):
            processes[rank].send_signal(signal.SIGSTOP)
        begin_s = time.monotonic()
        taken = Snapshot(out).take([process.pid for process in processes])
        seconds = time.monotonic() - begin_s
        assert [process.poll() for process in processes] == [None] * 8
    assert seconds < 20
    assert [one.rank for one in taken] == list(range(8))
    for one in taken:
        own = ["process", "own_log", "log_tail"]
        if one.rank in (2, 5):
            assert (one.state, sorted(one.files)) == ("T", sorted(own))
            assert one.reasons["stacks"] == one.reasons["flight_recorder"]
            assert one.reasons["stacks"] == "the process is stopped: nothing in it runs"
            continue
        assert sorted(one.files) == sorted([*own, "stacks"])
        assert sorted(one.files["stacks"]) == [f"{look}/stacks_rank_{one.rank}.txt" for look in (1, 2)]
        assert "in wait_for_pages" in (out / f"2/stacks_rank_{one.rank}.txt").read_text()
        # Nothing of torch is in these processes.
        assert one.reasons["flight_recorder"] == "torch.distributed is not loaded"
        names = json.loads((out / f"2/stacks_rank_{one.rank}.threads.json").read_text())
        assert "MainThread" in names.values()
        # A thread of it has written them: the handler of a signal is only for where none gets a turn.
        assert (logs / f"rank{one.rank:04d}.signals.txt").read_text() == ""
    summary = json.loads((out / "snapshot.json").read_text())
    assert [one["pid"] for one in summary["processes"]] == [process.pid for process in processes]
    # Nothing is left in the folder that belongs to the processes.
    assert not list(logs.glob("snapshot*"))


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_where_no_thread_gets_a_turn_stacks_are_had_by_a_signal_and_only_there(tmp_path: Path) -> None:
    logs, out = tmp_path / "logs", tmp_path / "out"
    out.mkdir()
    with asleep(0, logs) as free, asleep(1, logs, "hold") as held:
        taken = Snapshot(out, seconds=60).take([free.pid, held.pid])
        assert (free.poll(), held.poll()) == (None, None)
    for one in taken:
        assert one.files["stacks"] == [f"{look}/stacks_rank_{one.rank}.txt" for look in (1, 2)]
        names = json.loads((out / f"1/stacks_rank_{one.rank}.threads.json").read_text())
        assert "MainThread" in names.values()
    assert "in hold_interpreter" in (out / "2/stacks_rank_1.txt").read_text()
    assert [len((logs / f"rank{rank:04d}.signals.txt").read_bytes()) > 0 for rank in (0, 1)] == [False, True]
    assert taken[1].reasons["flight_recorder"].startswith("no answer: no thread of it gets a turn")


@pytest.mark.slow
def test_a_process_that_does_not_answer_though_its_heart_beats_is_sent_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder can't be written to by whoever asks."""
    logs, out = tmp_path / "logs", tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(recorder, "request", refuse)
    with asleep(0, logs) as process:
        (one,) = Snapshot(out, seconds=4, apart_s=10).take([process.pid])
        assert (logs / "rank0000.signals.txt").read_text() == ""
    assert one.reasons["stacks"] == "its folder can't be written to: Permission denied"
    assert "stacks" not in one.files


def refuse(folder: Path) -> str:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_a_read_that_never_ends_is_left_behind(tmp_path: Path) -> None:
    """As `environ` of a process whose memory is locked."""
    proc, out = tmp_path / "proc", tmp_path / "out"
    out.mkdir()
    for pid in (7, 8):
        (proc / str(pid) / "fd").mkdir(parents=True)
        (proc / str(pid) / "stat").write_text(f"{pid} (server) S 1 {pid}")
        (proc / str(pid) / "cmdline").write_bytes(b"server\0")
    os.mkfifo(proc / "7" / "environ")
    (proc / "8" / "environ").write_bytes(b"RANK=1\0")
    begin_s = time.monotonic()
    stuck, well = Snapshot(out, seconds=1.5, apart_s=0.1, proc=proc).take([7, 8])
    assert time.monotonic() < begin_s + 10
    assert (stuck.tag, stuck.files, stuck.reasons["process"]) == ("pid_7", {}, "not done within 1.5 s")
    assert well.files["process"] == ["1/process_rank_1.json", "2/process_rank_1.json"]
    # Let go of the thread.
    os.close(os.open(proc / "7" / "environ", os.O_WRONLY))


def test_a_process_that_is_not_there_has_one_reason_for_everything(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (gone,) = Snapshot(out, proc=tmp_path).take([7])
    assert (gone.state, gone.files, gone.reasons["stacks"]) == ("", {}, "there is no such process")


def test_of_two_processes_with_one_rank_each_has_files_of_its_own(tmp_path: Path) -> None:
    """As the helpers of a rank, which inherit its variables."""
    proc, out = tmp_path / "proc", tmp_path / "out"
    out.mkdir()
    for pid in (7, 8):
        (proc / str(pid)).mkdir(parents=True)
        (proc / str(pid) / "stat").write_text(f"{pid} (server) S 1 {pid}")
        (proc / str(pid) / "environ").write_bytes(b"RANK=1\0")
    taken = Snapshot(out, apart_s=0.0, proc=proc).take([8, 7])
    assert [(one.pid, one.rank, one.tag) for one in taken] == [(8, 1, "pid_8"), (7, 1, "rank_1")]


def test_a_full_disk_is_told_and_not_a_traceback_of_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    proc, out = tmp_path / "proc", tmp_path / "out"
    out.mkdir()
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "stat").write_text("7 (server) S 1 7")
    snapshot = Snapshot(out, apart_s=0.0, proc=proc)
    monkeypatch.setattr(recorder, "write", full)
    with pytest.raises(OSError, match="No space left"):
        snapshot.take([7])


def test_a_pattern_finds_processes_and_not_whoever_asks() -> None:
    pattern = re.compile(re.escape(Path(sys.executable).name))
    own = ancestors(os.getpid())
    assert os.getpid() == own[0] and os.getppid() in own
    assert os.getpid() in matching(pattern, ())
    assert not set(own) & set(matching(pattern, own))
