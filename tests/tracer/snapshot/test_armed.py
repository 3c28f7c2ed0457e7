"""What a process says of itself when it is asked, and that asking it never ends it."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.sleepers import asleep
from tracer.snapshot.armed import FR_MODULE, Answers, answer, arm, flight_recorder, free_signal, signal_masks


def card(folder: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"rank{rank:04d}.signals.json").read_text())
    return found


def test_a_signal_makes_a_process_write_its_stacks_and_it_goes_on(tmp_path: Path) -> None:
    with asleep(0, tmp_path) as process:
        own = card(tmp_path)
        assert (own["pid"], own["rank"], own["stacks"]) == (process.pid, 0, "rank0000.signals.txt")
        stacks = tmp_path / own["stacks"]
        for number in (1, 2):
            os.kill(process.pid, own["signal"])
            until_s = time.monotonic() + 10
            while stacks.read_text().count("in <module>") < number and time.monotonic() < until_s:
                time.sleep(0.01)
        assert stacks.read_text().count("in <module>") == 2
        assert process.poll() is None


def test_nothing_is_armed_in_another_thread(tmp_path: Path) -> None:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(arm(tmp_path, 0)))
    thread.start()
    thread.join()
    assert (found, list(tmp_path.iterdir())) == ([None], [])


def test_a_signal_that_somebody_has_taken_is_passed_over() -> None:
    first = free_signal()
    assert first is not None
    before = signal.signal(first, lambda *_: None)
    try:
        assert free_signal() == first + 1
        # A handler that Python knows nothing of.
        faulthandler.register(first + 1, file=1)
        assert free_signal() == first + 2
    finally:
        faulthandler.unregister(first + 1)
        signal.signal(first, before)


def test_a_rank_that_is_armed_no_more_leaves_nothing_and_gives_its_signal_back(tmp_path: Path) -> None:
    first = free_signal()
    armed = arm(tmp_path, 3)
    assert armed is not None
    assert free_signal() != first
    armed.disarm()
    assert (free_signal(), list(tmp_path.iterdir())) == (first, [])


def test_a_signal_that_is_on_its_way_when_it_is_given_back_ends_nothing(tmp_path: Path) -> None:
    armed = arm(tmp_path, 3)
    assert armed is not None
    number = card(tmp_path, 3)["signal"]
    armed.disarm()
    os.kill(os.getpid(), number)
    again = arm(tmp_path, 3)
    assert again is not None
    assert card(tmp_path, 3)["signal"] == number
    again.disarm()


def test_a_folder_that_can_not_be_written_costs_no_signal(tmp_path: Path) -> None:
    first = free_signal()
    assert arm(tmp_path / "missing", 0) is None
    assert free_signal() == first


def test_masks_without_a_line_are_no_masks() -> None:
    assert signal_masks("SigBlk:\t0\nSigIgn:\t0000000000001000\nSigCgt:\t0000000000000003\n") == {
        "SigBlk": set(),
        "SigIgn": {13},
        "SigCgt": {1, 2},
    }
    with pytest.raises(ValueError, match="no signal masks"):
        signal_masks("SigBlk:\t0\n")


def torch_with(dumper: Any, *, is_initialized: bool = True) -> dict[str, Any]:
    return {
        "torch.distributed": SimpleNamespace(is_initialized=lambda: is_initialized),
        FR_MODULE: SimpleNamespace(_dump_fr_trace_json=dumper),
    }


def fail(*_: object) -> bytes:
    raise RuntimeError("the recorder is locked")


def test_a_dump_of_the_recorder_is_had_where_torch_is_there_or_the_reason_is() -> None:
    assert flight_recorder(torch_with(lambda *given: repr(given).encode())) == (b"(True, False)", "")
    assert flight_recorder({}) == (None, "torch.distributed is not loaded")
    assert flight_recorder(torch_with(fail, is_initialized=False)) == (None, "no process group was made")
    assert flight_recorder(torch_with(fail)) == (None, "RuntimeError: the recorder is locked")
    assert flight_recorder(torch_with(None)) == (
        None,
        "this torch has no flight recorder that writes JSON",
    )


def test_of_more_than_a_hundred_threads_the_main_one_is_not_left_out(tmp_path: Path) -> None:
    is_over = threading.Event()
    threads = [threading.Thread(target=is_over.wait) for _ in range(120)]
    for thread in threads:
        thread.start()
    try:
        answer(tmp_path, 2, torch_with(lambda *_: b"{}"))
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    text = (tmp_path / "rank0002.stacks.txt").read_text()
    own = f"Current thread 0x{threading.main_thread().ident:016x} (most recent call first):\n"
    stack = text.partition(own)[2].partition("\nThread")[0].splitlines()
    assert any(line.endswith(f"in {answer.__name__}") for line in stack), text[:2000]
    assert all(line.startswith('  File "') for line in stack if line)
    assert len(set(re.findall("hread (0x[0-9a-f]{16})", text))) >= 121


def test_an_answer_has_the_stacks_the_names_of_threads_and_the_dump(tmp_path: Path) -> None:
    answer(tmp_path, 2, torch_with(lambda *_: b"{}"))
    text = (tmp_path / "rank0002.stacks.txt").read_text()
    assert f"thread 0x{threading.main_thread().ident:016x} (most recent call first):" in text
    assert "in test_an_answer_has_the_stacks_the_names_of_threads_and_the_dump" in text
    names = json.loads((tmp_path / "rank0002.threads.json").read_text())
    assert names[f"0x{threading.main_thread().ident:016x}"] == "MainThread"
    assert (tmp_path / "comm_lib_trace_rank_2").read_bytes() == b"{}"
    assert json.loads((tmp_path / "rank0002.answer.json").read_text()) == {
        "pid": os.getpid(),
        "rank": 2,
        "flight_recorder": "",
    }


def looked(folder: Path, number: str) -> list[str]:
    """What is in a folder once a question was heard that came after the process had begun."""
    answers = Answers(folder, 0)
    (folder / "snapshot").write_text(number)
    answers.look()
    for thread in answering():
        thread.join()
    return sorted(path.name for path in folder.iterdir())


def answering() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hicache snapshot 0"]


def test_a_question_is_answered_in_a_folder_of_its_number(tmp_path: Path) -> None:
    assert looked(tmp_path, "17") == ["snapshot", "snapshot-17"]


def test_a_question_that_is_a_path_is_no_question(tmp_path: Path) -> None:
    assert looked(tmp_path, "/../../elsewhere") == ["snapshot"]


def test_a_question_of_before_is_not_answered_again(tmp_path: Path) -> None:
    (tmp_path / "snapshot").write_text("16")
    answers = Answers(tmp_path, 0)
    answers.look()
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot"]


def test_a_recorder_that_is_locked_costs_the_next_question_no_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_inside, is_free = threading.Event(), threading.Event()

    def locked(*_: object) -> bytes:
        is_inside.set()
        is_free.wait(60)
        return b"{}"

    for name, module in torch_with(locked).items():
        monkeypatch.setitem(sys.modules, name, module)
    answers = Answers(tmp_path, 0)
    for number in ("17", "18"):
        (tmp_path / "snapshot").write_text(number)
        os.utime(tmp_path / "snapshot", (int(number), int(number)))
        answers.look()
        assert is_inside.wait(60)
    stacks = tmp_path / "snapshot-18" / "rank0000.stacks.txt"
    first, *others = answering()
    for thread in others:
        thread.join()
    assert "in locked" in stacks.read_text()
    assert not list(tmp_path.glob("snapshot-1?/rank0000.answer.json"))
    is_free.set()
    first.join()
    assert list(tmp_path.glob("snapshot-1?/rank0000.answer.json")) == [
        tmp_path / "snapshot-17" / "rank0000.answer.json"
    ]
