"""Our recorder in another process is found by its open files, and asked only where that is safe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.support.sleepers import asleep
from tracer.snapshot.recorder import (
    NOT_LOADED,
    Card,
    Recorder,
    copy_logs,
    find_recorder,
    forget,
    request,
    take_answer,
    take_stacks,
)

CARD = {
    "schema": "hicache.signals.v1",
    "pid": 7,
    "rank": 3,
    "signal": 50,
    "stacks": "rank0003.signals.txt",
    "threads": {"0x1": "MainThread"},
}


def holding(proc: Path, pid: int, *open_files: Path) -> None:
    """A process that has these files open."""
    (proc / str(pid) / "fd").mkdir(parents=True)
    for number, path in enumerate(open_files):
        (proc / str(pid) / "fd" / str(number)).symlink_to(path)


def found(tmp_path: Path, card: dict[str, object] | None, *, meta_pid: int = 7) -> Recorder | str:
    """The recorder of process 7, which holds the files of rank 3 open."""
    logs = tmp_path / "logs"
    logs.mkdir()
    holding(tmp_path, 7, logs / "rank0003.scheduler.000.jsonl", logs / "rank0003.signals.txt")
    (logs / "rank0003.meta.json").write_text(json.dumps({"pid": meta_pid}))
    if card is not None:
        (logs / "rank0003.signals.json").write_text(json.dumps(card))
    return find_recorder(7, tmp_path)


def test_a_recorder_is_found_with_its_folder_and_its_rank(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    card = Card(50, logs / "rank0003.signals.txt", {"0x1": "MainThread"})
    assert found(tmp_path, CARD) == Recorder(logs, 3, card)


def test_the_folder_of_a_process_in_a_container_is_below_its_root(tmp_path: Path) -> None:
    inside = tmp_path / "7" / "root" / "var" / "hicache-of-this-test"
    inside.mkdir(parents=True)
    holding(tmp_path, 7, Path("/var/hicache-of-this-test/rank0003.signals.txt"))
    (tmp_path / "7" / "status").write_text("Name:\tserver\nNSpid:\t7\t1\n")
    (inside / "rank0003.signals.json").write_text(json.dumps(CARD | {"pid": 1}))
    got = find_recorder(7, tmp_path)
    assert isinstance(got, Recorder)
    assert got.folder == inside
    assert got.card is not None and got.card.stacks == inside / "rank0003.signals.txt"


def test_a_process_with_no_file_of_ours_open_has_no_recorder(tmp_path: Path) -> None:
    holding(tmp_path, 7, tmp_path / "server.log")
    assert find_recorder(7, tmp_path) == NOT_LOADED
    assert find_recorder(8, tmp_path) == "its open files can't be looked at: No such file or directory"


def test_a_forked_process_has_not_the_recorder_of_its_parent(tmp_path: Path) -> None:
    assert found(tmp_path, CARD, meta_pid=6) == (
        "its recorder is that of process 6, which it was forked from"
    )


def reason(tmp_path: Path, **changes: object) -> str:
    got = found(tmp_path, CARD | changes)
    assert isinstance(got, Recorder) and got.card is None
    return got.reason


def test_a_card_of_another_process_sends_no_signal(tmp_path: Path) -> None:
    assert reason(tmp_path, pid=8) == "rank0003.signals.json is of another process"


def test_a_card_of_another_version_sends_no_signal(tmp_path: Path) -> None:
    assert reason(tmp_path, schema="hicache.signals.v9") == "rank0003.signals.json is of another version"


def test_a_card_that_names_sigkill_sends_no_signal(tmp_path: Path) -> None:
    assert reason(tmp_path, signal=9) == "rank0003.signals.json names no signal that may be sent"


def test_a_recorder_without_a_card_still_has_its_logs(tmp_path: Path) -> None:
    got = found(tmp_path, None)
    assert isinstance(got, Recorder)
    assert (got.folder, got.card) == (tmp_path / "logs", None)
    assert got.reason == "it takes no signal for its stacks any more"


def test_stacks_are_had_from_a_process_that_handles_the_signal(tmp_path: Path) -> None:
    out = tmp_path / "stacks.txt"
    logs = tmp_path / "logs"
    with asleep(3, logs) as process:
        got = find_recorder(process.pid)
        assert isinstance(got, Recorder) and got.card is not None
        assert got.rank == 3
        assert take_stacks(process.pid, got.card, out, time.monotonic() + 10) == ""
        assert "in main" in out.read_text()
        # The second look has nothing of the first in it.
        assert take_stacks(process.pid, got.card, out, time.monotonic() + 10) == ""
        assert out.read_text().count("in <module>") == 1


def test_stacks_are_had_from_a_process_whose_interpreter_is_held(tmp_path: Path) -> None:
    out = tmp_path / "stacks.txt"
    logs = tmp_path / "logs"
    with asleep(3, logs, "hold") as process:
        got = find_recorder(process.pid)
        assert isinstance(got, Recorder) and got.card is not None
        assert take_stacks(process.pid, got.card, out, time.monotonic() + 10) == ""
    assert "in hold_interpreter" in out.read_text()


@contextmanager
def plain_process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_signal_that_nobody_handles_is_not_sent(tmp_path: Path) -> None:
    """Its default action ends a process."""
    card = Card(50, tmp_path / "stacks.txt", {})
    card.stacks.touch()
    with plain_process() as process:
        told = take_stacks(process.pid, card, tmp_path / "out", time.monotonic() + 5)
        assert told == "it does not handle signal 50 any more, which was not sent"
        assert process.poll() is None


def test_a_question_is_answered_by_the_heart_of_each_rank(tmp_path: Path) -> None:
    with asleep(3, tmp_path):
        number = request(tmp_path)
        answers, told = take_answer(tmp_path, number, 3, time.monotonic() + 10)
        assert answers == tmp_path / f"snapshot-{number}"
        assert told["flight_recorder"] == "torch.distributed is not loaded"
        forget(tmp_path, number)
        assert not list(tmp_path.glob("snapshot*"))


def test_a_question_that_nobody_answers_is_given_up(tmp_path: Path) -> None:
    number = request(tmp_path)
    assert take_answer(tmp_path, number, 3, time.monotonic()) == (None, {})


def test_the_newest_logs_are_copied_as_far_as_there_is_room(tmp_path: Path) -> None:
    logs, out = tmp_path / "logs", tmp_path / "out"
    logs.mkdir()
    out.mkdir()
    names = (
        "rank0003.scheduler.000.jsonl.gz",
        "rank0003.scheduler.001.jsonl",
        "rank0004.scheduler.000.jsonl",
    )
    for at, name in enumerate(names):
        (logs / name).write_bytes(b"x" * 60)
        os.utime(logs / name, (at, at))
    (logs / "rank0003.signals.json").write_bytes(b"")
    (logs / "rank0003.secret").symlink_to("/etc/passwd")
    recorder = Recorder(logs, 3, None)
    assert copy_logs(recorder, out, bytes_max=100) == ([names[1]], "1 older files have no room")
    assert copy_logs(recorder, out) == ([names[0], names[1]], "")
    assert copy_logs(replace(recorder, rank=5), out) == ([], "")
