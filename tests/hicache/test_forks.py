"""Processes that are forked and not started are processes all the same: own pids, sessions, pipes and ends.

Where the server's import of torch is not the point, a torch that can't be imported is found first: the server
goes on without it, and is there at once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache import forks
from hicache.fork_server import ForkServer
from hicache.forks import LOST, Forked, Forks, LostServerError
from tests.support.processes import ROOT, links, wait_until_ended

# What a process is told to do: to say what it is, and then whatever stands in its words.
JOB = """
import json, os, sys, tempfile
facts = {
    "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "words": sys.argv[1:],
    "name": __name__, "rank": os.environ.get("RANK"), "gone": "GONE" in os.environ, "folder": os.getcwd(),
    "file": os.path.basename(sys.argv[0]), "temporary": tempfile.gettempdir(),
}
print(json.dumps(facts), flush=True)
print("on stderr", file=sys.stderr, flush=True)
exec(sys.argv[1])
"""
WAIT = "sys.stdin.read()"


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The module `job`, and no torch to wait for."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "torch.py").write_text("raise ImportError('none here')\n")
    (folder / "job.py").write_text(JOB)
    return folder


@pytest.fixture(scope="module")
def light(modules: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{modules}{os.pathsep}{ROOT}", "PYTHONWARNINGS": "error"}


@pytest.fixture(scope="module")
def server(light: dict[str, str]) -> Iterator[Forks]:
    """One for all who leave it as it is."""
    with Forks(light, "job") as made:
        yield made


@pytest.fixture
def own_server(light: dict[str, str]) -> Iterator[Forks]:
    with Forks(light, "job") as made:
        yield made


def facts(process: Forked) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(process.stdout.readline())
    return document


def said(process: Forked) -> tuple[int | None, str]:
    """How one ended whose input is closed, and what it said on stderr."""
    process.stdin.close()
    with process.stdout, process.stderr:
        process.stdout.read()
        told = process.stderr.read().decode()
    return process.wait(20), told


def test_each_has_a_pid_a_session_words_and_an_environment_of_its_own(
    server: Forks, light: dict[str, str], tmp_path: Path
) -> None:
    own = {"RANK": "1", "TMPDIR": str(tmp_path), "PATH": light["PATH"]}
    first = server.start("job", [WAIT, "a b"], {**light, "RANK": "0", "GONE": "1"})
    second = server.start("job", [WAIT], own, folder=tmp_path)
    one, other = facts(first), facts(second)
    assert (one["pid"], other["pid"]) == (first.pid, second.pid)
    assert (one["session"], other["session"]) == (first.pid, second.pid)
    assert one["parent"] == other["parent"] != os.getpid()
    assert (one["words"], other["words"]) == ([WAIT, "a b"], [WAIT])
    assert (one["rank"], one["gone"], other["rank"], other["gone"]) == ("0", True, "1", False)
    assert (one["name"], one["file"]) == ("__main__", "job.py")
    assert (one["folder"], other["folder"]) == (os.getcwd(), str(tmp_path))
    assert other["temporary"] == str(tmp_path)
    assert [said(each) for each in (first, second)] == [(0, "on stderr\n")] * 2


def test_a_second_process_runs_the_module_anew(server: Forks, light: dict[str, str]) -> None:
    """Nothing of it was imported ahead, where the warnings of `runpy` would be errors."""
    for _ in range(2):
        process = server.start("job", ["pass"], light)
        assert facts(process)["name"] == "__main__"
        assert said(process) == (0, "on stderr\n")


@pytest.mark.parametrize(
    ("words", "code", "last"),
    [
        ("sys.exit(3)", 3, "on stderr"),
        ("os._exit(255)", 255, "on stderr"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("os.kill(os.getpid(), 9)", -9, "on stderr"),
    ],
)
def test_its_code_is_that_of_a_process(
    words: str, code: int, last: str, server: Forks, light: dict[str, str]
) -> None:
    found, told = said(server.start("job", [words], light))
    assert (found, told.splitlines()[-1]) == (code, last)


def test_a_module_that_is_not_there_is_an_end_as_of_a_process(server: Forks, light: dict[str, str]) -> None:
    code, told = said(server.start("no.such.module", [], light))
    assert code == 1 and "No module named 'no'" in told.splitlines()[-1]


def test_nobody_else_holds_its_pipes_so_that_its_death_is_seen(server: Forks, light: dict[str, str]) -> None:
    first = server.start("job", [WAIT], light)
    second = server.start("job", [WAIT], light)
    parent = facts(first)["parent"]
    facts(second)
    assert links(parent) == set()
    assert len(links(first.pid)) == len(links(second.pid)) == 3
    assert links(first.pid) & links(second.pid) == set()
    assert links(second.pid, "socket:") == set()
    # While its sibling and the server go on.
    first.send_signal(signal.SIGKILL)
    assert first.stdout.read() == b""
    assert (first.wait(20), second.poll()) == (-9, None)
    assert (said(first)[0], said(second)[0]) == (-9, 0)


def test_a_signal_reaches_it_and_does_nothing_once_it_has_ended(server: Forks, light: dict[str, str]) -> None:
    process = server.start("job", [WAIT], light)
    facts(process)
    assert process.wait(0.0) is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == -15
    process.send_signal(signal.SIGKILL)
    assert said(process)[0] == -15


def test_when_the_server_is_killed_its_processes_go_with_it_and_nothing_waits(
    own_server: Forks, light: dict[str, str]
) -> None:
    process = own_server.start("job", [WAIT], light)
    os.kill(facts(process)["parent"], signal.SIGKILL)
    assert process.stdout.read() == b""
    assert process.wait(20) == LOST
    process.send_signal(signal.SIGTERM)
    assert said(process)[0] == LOST
    with pytest.raises(LostServerError, match="the process that forks them is gone"):
        own_server.start("job", [WAIT], light)


def test_a_server_that_does_not_answer_is_given_up(
    own_server: Forks, light: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "ANSWER_S", 0.2)
    process = own_server.start("job", [WAIT], light)
    os.kill(facts(process)["parent"], signal.SIGSTOP)
    with pytest.raises(LostServerError, match=r"has not answered for 0\.2 seconds"):
        own_server.ask(look=process.pid)
    assert said(process)[0] == LOST


def test_what_is_still_there_at_the_end_is_ended(light: dict[str, str]) -> None:
    with Forks(light, "job") as server:
        process = server.start("job", ["__import__('time').sleep(60)"], light)
        parent = facts(process)["parent"]
    wait_until_ended(parent)
    wait_until_ended(process.pid)
    assert said(process)[0] == LOST


def test_a_server_that_can_not_import_ends_with_its_last_words(light: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("print('libgomp is missing', flush=True)\nimport os\nos._exit(7)\n")
    expected = "the process that forks them died, exit code 7: libgomp is missing"
    broken = {**light, "PYTHONPATH": f"{tmp_path}{os.pathsep}{light['PYTHONPATH']}"}
    with Forks(broken, "job") as server, pytest.raises(LostServerError, match=expected):
        server.start("job", [WAIT], light)


HASTY = """
import os, runpy
from hicache import fork_server
fork_server.CLOSING_S = 0.3
if (chosen := fork_server.main()) is None:
    os._exit(0)
runpy.run_module(chosen, run_name="__main__", alter_sys=True)
"""
STARTER = """
import os, sys
from hicache import forks
forks.SERVER = "hasty"
server = forks.Forks(os.environ, "job")
process = server.start("job", ["os.kill(os.getpid(), 19)"], os.environ)
print(process.stdout.readline().decode(), flush=True)
os.kill(os.getpid(), 9)
"""


def test_when_whoever_started_them_is_killed_neither_the_server_nor_a_frozen_process_stays(
    server: Forks, light: dict[str, str], modules: Path
) -> None:
    (modules / "hasty.py").write_text(HASTY)
    (modules / "starter.py").write_text(STARTER)
    starter = server.start("starter", [], light)
    found = facts(starter)
    assert said(starter)[0] == -9
    wait_until_ended(found["pid"])
    wait_until_ended(found["parent"])


def answers(*questions: dict[str, Any]) -> list[dict[str, Any]]:
    """What a server in this process says to them."""
    asker, own = socket.socketpair()
    with asker, own:
        for number, question in enumerate(questions):
            asker.sendall(json.dumps({"question": number, **question}).encode() + b"\n")
        asker.shutdown(socket.SHUT_WR)
        assert ForkServer(own).serve() is None
        return [json.loads(line) for line in asker.recv(1 << 16).splitlines()]


def test_without_its_pipes_no_process_is_started() -> None:
    start = {"start": "job", "words": [], "environment": {}, "folder": None}
    assert answers(start) == [{"number": 0, "error": "0 of its 3 pipes have come"}]


def test_a_system_that_lets_no_process_start_is_told(
    server: Forks, light: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        server, "ask", lambda *_pipes, **_question: {"error": "Resource temporarily unavailable"}
    )
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        server.start("job", [WAIT], light)


def test_an_answer_that_nobody_waits_for_any_more_is_not_taken_for_the_next(
    server: Forks, light: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = server.start("job", [WAIT], light)

    def interrupted(_self: Forks) -> dict[str, Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Forks, "_answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            server.ask(look=process.pid)
    process.send_signal(signal.SIGKILL)
    assert process.wait(20) == -9
    said(process)
