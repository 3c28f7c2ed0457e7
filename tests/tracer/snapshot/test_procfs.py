"""What the system says of a process, read from its own words."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tracer.snapshot import procfs


def process(proc: Path, pid: int, **files: bytes) -> Path:
    """A process as `/proc` shows it."""
    place = proc / str(pid)
    place.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (place / name).write_bytes(data)
    return place


def test_the_state_is_found_behind_a_name_with_brackets_in_it(tmp_path: Path) -> None:
    process(tmp_path, 7, stat=b"7 (a) S (b) T 1 7 7 0 -1")
    assert procfs.state(7, tmp_path) == "T"
    assert procfs.state(8, tmp_path) == ""


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["python", "-m", "server", "--tp", "4"], ["python", "-m", "server", "--tp", "4"]),
        (["server", "--api-key", "sk-1", "--port", "1"], ["server", "--api-key", "***", "--port", "1"]),
        (["server", "--hf-token=abc", "x"], ["server", "--hf-token=***", "x"]),
        (["server", "--password", "-p"], ["server", "--password", "-p"]),
    ],
)
def test_a_command_line_is_told_without_its_secrets(
    given: list[str], told: list[str], tmp_path: Path
) -> None:
    place = process(tmp_path, 7, cmdline="\0".join([*given, ""]).encode())
    assert procfs.command(place) == told


def test_of_the_environment_only_what_steers_libraries_is_told_with_its_value(tmp_path: Path) -> None:
    words = ("RANK=3", "NCCL_DEBUG=INFO", "AWS_SECRET_ACCESS_KEY=x", "HICACHE_DIGEST_KEY=y", "HOME=/root")
    place = process(tmp_path, 7, environ="\0".join(words).encode())
    assert procfs.environment(place) == {
        "names": ["AWS_SECRET_ACCESS_KEY", "HICACHE_DIGEST_KEY", "HOME", "NCCL_DEBUG", "RANK"],
        "values": {"NCCL_DEBUG": "INFO", "RANK": "3"},
    }


def test_a_line_of_a_table_of_sockets_is_read_in_words() -> None:
    line = "0: 0100007F:1F90 0200007F:C350 01 00000010:00000400 00:00000000 00000000 0 0 99 1"
    assert procfs.socket_of(line.split()) == {
        "local": "127.0.0.1:8080",
        "remote": "127.0.0.2:50000",
        "state": "established",
        "send_queue": 16,
        "receive_queue": 1024,
    }
    assert procfs.address("00000000000000000000000001000000:0016") == "[::1]:22"


def test_a_process_is_told_with_its_threads_and_its_sockets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        facts, reasons = procfs.facts(os.getpid())
    assert reasons == {}
    assert facts["status"]["state"] == "R"
    assert os.getpid() in [thread["tid"] for thread in facts["threads"]]
    assert [one["state"] for one in facts["sockets"] if one["local"] == f"127.0.0.1:{port}"] == ["listen"]
    assert facts["limits"]["Max open files"][0].isdecimal()


def test_what_can_not_be_read_of_a_process_is_told_part_by_part(tmp_path: Path) -> None:
    process(tmp_path, 7, cmdline=b"server\0", status=b"Name:\tserver\nState:\tS (sleeping)\n")
    facts, reasons = procfs.facts(7, tmp_path)
    assert facts == {"pid": 7, "status": {"name": "server", "state": "S"}, "command": ["server"]}
    assert sorted(reasons) == ["environment", "limits", "sockets", "threads"]
