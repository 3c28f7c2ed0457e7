"""What docs/trust.md says to a security review, claim by claim."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from array import array
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from packaging.requirements import Requirement

from consensus_checker import sglang_plugin as plugin
from consensus_checker.live_policy import Case, _run, run_command
from consensus_checker.live_posts import Published
from tests.cli.test_no_secrets import PAGE_TOKENS, TEXT, TOKEN, demand_silence
from tests.recorded_fields import PAGE, brought_up_to_date
from tests.support.fake_server import FakeServer, Request
from tests.support.live import until

ROOT = Path(__file__).resolve().parents[1]

SHELLS = re.compile(r"shell\s*=\s*True|os\.system\(|os\.popen\(|getoutput\(")
# A package of requirements.lock: its name, version and hashes.
LOCKED = re.compile(r"^([a-z0-9-]+)==(\S+) \\\n((?:    --hash=\S+(?: \\)?\n)+)", re.MULTILINE)

# One of two ranks that are recorded and watched and part, under an umask that allows everything. It tells
# what it has done to the world: what it has opened to write, started, and said over a network.
AUDITED = """
import json, os, sys, time
folder, rank, seen = sys.argv[1], int(sys.argv[2]), {"network": [], "started": [], "written": []}
STARTS = ("subprocess.", "os.exec", "os.fork", "os.spawn", "os.posix_spawn", "os.system", "pty.")
CHANGES = ("os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "os.truncate", "os.chmod")

def look(event, args):
    if event.startswith("socket.") and event != "socket.gethostname":
        seen["network"].append(event)
    elif event.startswith(STARTS):
        seen["started"].append(event)
    elif event in CHANGES or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
        # A number is a descriptor, of what was opened before.
        paths = args[:1] if event == "open" else args
        seen["written"] += [os.fspath(path) for path in paths if isinstance(path, str | os.PathLike)]

sys.addaudithook(look)
os.umask(0)
os.environ.update(SGLANG_ENABLE_RANK_CONSENSUS_CHECKER="1", HICACHE_TRACE_DIR=folder + "/logs",
                  HICACHE_CHECKER_POLICY="snapshot")
from pathlib import Path
from consensus_checker import configure, rank_consensus, shutdown
from consensus_checker.live import Watcher
from tests.support.live_rank import FolderStore

@rank_consensus(same_params=["rid"], same_results=["result"])
def admit(rid, rank):
    return 5 if (rid, rank) == ("r40", 1) else 4

told = []
watcher = lambda **given: Watcher(**{**given, "tell": told.append})
configure([[0, 1]], rank=rank, world_size=2, store=FolderStore(Path(folder, "store")), watcher=watcher)
for number in range(60):
    admit(f"r{number}", rank)
# Ranks that end at once may be gone before a watcher on a busy machine has had its turn.
until = time.monotonic() + 30
while not any("DIVERGED" in text for text in told) and time.monotonic() < until:
    time.sleep(0.02)
descriptors = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
names = [os.readlink(path) for path in descriptors if path.is_symlink()]
seen["sockets"] = [name for name in names if name.startswith("socket:")]
shutdown()
seen["told"] = sum("DIVERGED" in text for text in told)
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("audited")
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, "-c", AUDITED, str(folder)]
    ranks = [
        subprocess.Popen(
            [*words, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=env
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    found = [json.loads(out) for out, _ in said]
    assert [one["told"] for one in found] == [1, 1]
    return folder, found


def test_a_recorder_and_its_watcher_open_no_socket(audited: tuple[Path, list[dict[str, Any]]]) -> None:
    """Not to listen and not to call: the store that ranks meet in is the job's own."""
    assert [(one["network"], one["sockets"]) for one in audited[1]] == [([], []), ([], [])]


def test_they_start_no_program(audited: tuple[Path, list[dict[str, Any]]]) -> None:
    assert [one["started"] for one in audited[1]] == [[], []]


def test_they_write_nowhere_but_in_their_folder(audited: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, found = audited
    written = {path for one in found for path in one["written"]}
    assert len(written) > 10
    assert not [path for path in written if not path.startswith(str(folder))]


def test_what_they_write_is_its_owner_s_alone_whatever_the_umask(
    audited: tuple[Path, list[dict[str, Any]]],
) -> None:
    logs = audited[0] / "logs"
    modes = {path.relative_to(logs).name: path.stat().st_mode & 0o777 for path in logs.rglob("*")}
    assert {"verdict.json", "rank0000.stacks.txt", "rank0000.meta.json"} < modes.keys()
    assert set(modes.values()) == {0o600, 0o700}
    assert logs.stat().st_mode & 0o777 == 0o700


def test_no_file_of_a_recorded_server_has_a_canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server, as `tests/cli/test_no_secrets.py` does it of the runtime: tokens, texts, keys, hashes."""
    for name, value in (("HICACHE_TRACE", "full"), ("HICACHE_TRACE_DIR", str(tmp_path))):
        monkeypatch.setenv(name, value)
    tokens = array("q", [TOKEN] * PAGE_TOKENS * 3)
    requests = [
        Request("r0", tokens, [TOKEN] * 4, extra_key=TEXT, cache_salt=TEXT),
        # Nobody forbids a client to call its request by a sentence.
        Request(f"please keep {TEXT} secret", tokens, [TOKEN] * 4, extra_key=TEXT),
    ]
    with FakeServer() as server:
        plugin.entry()
        plugin.configure([[0]], rank=0, world_size=1)
        scheduler = server.scheduler.Scheduler(server.cache(server.pools(), None))
        for request in requests:
            scheduler._process_hicache_events()
            scheduler.serve(request)
            plugin.assert_same("%s", f"{TEXT} {list(tokens)}")
        plugin.shutdown()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    log = (tmp_path / "rank0000.scheduler.000.jsonl").read_bytes()
    assert log.count(b'"kind":"request"') == 2 and log.count(b'"kind":"assert_same"') == 2
    for path in files:
        demand_silence(path.read_bytes(), path.name)


def test_the_page_has_every_field_that_the_plugin_writes_and_the_costs_as_they_were_measured() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert brought_up_to_date(text) == text, "python -m tests.recorded_fields brings it up to date"


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 5
    for path, name in named:
        assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{name}"
        assert (ROOT / path).is_file(), path


def test_an_alarm_s_program_is_ended_with_what_it_has_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 100 & echo $$ $! > {pids}; wait"
    limit_s = 0.5
    while not pids.is_file():
        # A loaded machine may not come to it in time.
        limit_s *= 2
        assert (
            run_command(["sh", "-c", script], "{}", pids, limit_s=limit_s)
            == f"sh was ended after {limit_s:.0f} s"
        )
    assert until(lambda: not any(is_alive(pid) for pid in pids.read_text().split()))


def is_alive(pid: str) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # Who is dead and was not waited for is a zombie.
    return text.rpartition(")")[2].split()[0] != "Z"


def test_a_process_runs_one_alarm_s_program_at_a_time(tmp_path: Path) -> None:
    busy, log = tmp_path / "busy", tmp_path / "log"
    script = f"mkdir {busy} && cat > /dev/null && sleep 0.1 && echo alone >> {log}; rmdir {busy}"
    case = Case(Published(1, 0, "DIVERGED", b"{}", True, True, 0), "{}", 0, tmp_path, True)
    told: list[str] = []
    runs = [Thread(target=_run, args=(case, f"sh -c '{script}'", told.append)) for _ in range(3)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(30)
    assert (told, log.read_text()) == ([], "alone\n" * 3)


def test_the_lock_file_and_the_bill_of_materials_are_of_this_project_and_of_each_other() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    text = (ROOT / "docs" / "sbom.cdx.json").read_text(encoding="utf-8")
    document = json.loads(text)
    locked = {
        name: (version, set(re.findall(r"--hash=sha256:([0-9a-f]{64})\b", hashes)))
        for name, version, hashes in LOCKED.findall(lock)
    }
    listed = {
        one["name"]: (one["version"], {each["content"] for each in one["hashes"]})
        for one in document["components"]
    }
    assert locked == listed
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [Requirement(line) for line in project["dependencies"]]
    assert {need.name for need in wanted} <= locked.keys()
    assert not [need for need in wanted if locked[need.name][0] not in need.specifier]
    assert document["metadata"]["component"]["version"] == project["version"]
    # Where a package comes from is whoever installs it to say.
    assert "http" not in lock + text


def test_no_shell_is_started_anywhere_in_the_packages() -> None:
    """Neither by a flag nor by a function that has one inside."""
    found = {
        path.name: calls
        for package in ("cli", "consensus_checker", "hicache", "tracer")
        for path in (ROOT / package).rglob("*.py")
        if (calls := SHELLS.findall(path.read_text(encoding="utf-8")))
    }
    assert found == {}
