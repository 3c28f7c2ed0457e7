"""What a snapshot's file of a process becomes, whatever became of the file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.mutate import mutations, truncations
from tracer.importers import process_state
from tracer.importers.dossier import At, Dossier, Line, Who
from tracer.importers.sniff import File

# Of damaged copies; 5,000 in a soak.
COUNT = int(os.environ.get("HICACHE_MUTATIONS", "200"))
TOLD: dict[str, Any] = {
    "schema": "hicache.process.v1",
    "look": 2,
    "rank": 3,
    "host": "node-1",
    "pid": 42,
    "status": {"name": "server", "state": "T"},
    "threads": [
        {"tid": 42, "state": "T", "wchan": "do_signal_stop", "user_ticks": 300, "system_ticks": 10},
        {"tid": 43, "state": "T", "wchan": "futex_wait", "user_ticks": 5, "system_ticks": 0},
    ],
    "command": ["server", "--model", "m"],
}


def read(folder: Path, data: bytes) -> Dossier:
    path = folder / "process_rank_3.json"
    path.write_bytes(data)
    into = Dossier()
    process_state.read(File(path, path.name), into.begin(path.name), into)
    return into


def encoded(**changes: Any) -> bytes:
    return json.dumps(TOLD | changes).encode()


def test_a_process_is_one_row_without_its_command_line(tmp_path: Path) -> None:
    assert process_state.votes(encoded()) > 0
    found = read(tmp_path, encoded())
    fields = {"state": "T", "look": 2, "threads": 2, "ticks": 315, "wchan": "do_signal_stop"}
    assert found.lines == [Line(Who(3, 42, "node-1"), "process", fields, At(0, 0))]
    assert (found.files[0].format, found.files[0].records) == ("process_state", 1)


def test_what_a_process_does_not_say_is_left_open(tmp_path: Path) -> None:
    (line,) = read(tmp_path, encoded(rank=None, pid="42", host=7, threads={}, look="x")).lines
    assert line.who == Who()
    assert line.fields == {"state": "T", "look": 0, "threads": 0, "ticks": 0, "wchan": ""}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"schema": "hicache.process.v1"', "no whole JSON: "),
        (b'{"schema": "hicache.process.v1"}', "nothing in it says what state the process was in"),
        (b"[" * 100_000, "it is nested too deep"),
    ],
)
def test_what_is_no_process_is_refused_with_a_reason(data: bytes, reason: str, tmp_path: Path) -> None:
    found = read(tmp_path, data)
    assert found.lines == []
    assert (found.files[0].refused or "").startswith(reason)


def test_another_file_is_not_claimed() -> None:
    assert process_state.votes(b'{"version": "2.10", "entries": []}') == 0


def test_a_damaged_file_is_a_row_or_a_refusal(tmp_path: Path) -> None:
    sample = encoded()
    for data in (*truncations(sample), *mutations(sample, COUNT, seed=1)):
        found = read(tmp_path, data)
        assert bool(found.files[0].refused) == (not found.lines), data
