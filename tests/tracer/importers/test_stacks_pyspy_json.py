from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tracer.importers import stacks_pyspy_json
from tracer.importers.dossier import Dossier, FileRead
from tracer.importers.sniff import File

FRAME = {
    "name": "Cache.drain",
    "filename": "/srv/app/cache.py",
    "module": None,
    "short_filename": "cache.py",
    "line": 88,
    "locals": [{"name": "prompt", "addr": 1, "arg": True, "repr": "never keep"}],
    "is_entry": True,
    "is_shim_entry": False,
}
THREAD = {
    "pid": 42,
    "thread_id": 139977043195584,
    "thread_name": None,
    "os_thread_id": 42,
    "active": False,
    "owns_gil": False,
    "frames": [{**FRAME, "name": "all_reduce", "filename": "torch/distributed/distributed_c10d.py"}, FRAME],
    "process_info": {"pid": 42, "command_line": "sglang::scheduler_PP1_TP3 secret", "ppid": 1},
}
HELPER = {**THREAD, "os_thread_id": 50, "thread_name": "prefetch", "owns_gil": True, "frames": [FRAME]}


def read(tmp_path: Path, data: str) -> Dossier:
    path = tmp_path / "dump.json"
    path.write_text(data)
    into = Dossier()
    stacks_pyspy_json.read(File(path, "dump.json"), into.begin("dump.json"), into)
    return into


def test_threads_are_read_with_the_place_of_their_process_and_without_locals(tmp_path: Path) -> None:
    found = read(tmp_path, json.dumps([HELPER, THREAD]))
    assert [
        (s.who.pid, dict(s.who.places), s.thread, s.state, s.wait, s.at.record) for s in found.stacks
    ] == [
        (42, {"pp": 1, "tp": 3}, "prefetch", "idle+gil", "unknown", 0),
        (42, {"pp": 1, "tp": 3}, "MainThread", "idle", "collective", 1),
    ]
    assert found.stacks[0].signature == ("srv/app/cache.py:88 drain",)
    assert "never keep" not in repr(found)
    assert "secret" not in repr(found)


def test_a_thread_that_is_none_is_counted_and_the_others_are_read(tmp_path: Path) -> None:
    odd: list[Any] = [7, {}, {**THREAD, "frames": 7}, {**THREAD, "pid": -1}, {**THREAD, "pid": 1 << 70}]
    found = read(tmp_path, json.dumps([*odd, THREAD]))
    assert [FileRead("dump.json", "py_spy_json", 1, 6, 5)] == found.files
    assert len(found.stacks) == 1


def test_two_dumps_in_one_file_are_two_looks(tmp_path: Path) -> None:
    one = json.dumps([THREAD], indent=2)
    assert [s.sample for s in read(tmp_path, f"{one}\n{one}\n").stacks] == [0, 1]


@pytest.mark.parametrize("data", ["", "[", "[]", "{}", "[1,", "nonsense"])
def test_what_is_no_dump_is_refused_in_one_sentence(tmp_path: Path, data: str) -> None:
    found = read(tmp_path, data)
    assert found.files[0].refused == "its JSON is damaged, or was cut: no thread of it can be read"


def test_json_that_is_nested_deeper_than_any_dump_is_refused(tmp_path: Path) -> None:
    found = read(tmp_path, "[" * 100_000 + "]" * 100_000)
    assert found.files[0].refused == "a dump of py-spy is not nested as deep as this: refused"


def test_it_is_known_by_its_keys_and_not_by_its_name() -> None:
    head = json.dumps([THREAD]).encode()
    assert (
        stacks_pyspy_json.votes(head) > 0,
        stacks_pyspy_json.votes(b'[{"frames": []}]'),
        stacks_pyspy_json.votes(b"Thread 1 (idle)"),
    ) == (True, 0, 0)
