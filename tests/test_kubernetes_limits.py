"""The recorder, the watcher and `check` where a locked-down pod has them: see `tests/support/pod.py`."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from tests.support import pod

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def possible() -> None:
    if why := pod.missing():
        pytest.skip(why)


# What a process finds out about its own limits.
LIMITS = """
import ctypes, json, os, pathlib, socket, subprocess, sys

def refusal(call):
    try:
        call()
    except OSError as error:
        return os.strerror(error.errno)
    return "allowed"

libc = ctypes.CDLL(None, use_errno=True)
def done(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")

def connect(address):
    with socket.socket() as out:
        out.settimeout(5)
        out.connect(address)

status = dict(line.split(":", 1) for line in open("/proc/self/status"))
peer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
places = ["/", "/tmp", "/var/tmp", "/etc", "/srv", "/srv/app", "/srv/env", "/sys/fs/cgroup"]
print(json.dumps({
    "uid": os.getresuid(),
    "groups": os.getgroups(),
    "capabilities": [int(value, 16) for name, value in status.items() if name.startswith("Cap")],
    "no_new_privs": int(status["NoNewPrivs"]),
    "seccomp": int(status["Seccomp"]),
    "writable": [place for place in places if os.access(place, os.W_OK)],
    "write": refusal(lambda: pathlib.Path("/srv/app/x").write_text("")),
    "interfaces": [name for _, name in socket.if_nameindex()],
    "egress": refusal(lambda: connect(("192.0.2.1", 53))),
    "processes": sum(name.isdigit() for name in os.listdir("/proc")),
    "ptrace": refusal(lambda: done(libc.ptrace(16, peer.pid, 0, 0))),
    "read_memory": refusal(lambda: done(libc.process_vm_readv(peer.pid, None, 0, None, 0, 0))),
    "mount": refusal(lambda: done(libc.mount(b"none", b"/srv/logs", b"tmpfs", 0, None))),
    "new_spaces": refusal(lambda: done(libc.unshare(0x10000000))),
}))
peer.kill()
"""

# Three ranks in three processes; rank 1 decides otherwise at its 201st call. They are still there when a hook
# asks what they are at, with the words of stop.sh.
RANKS = """
import json, os, subprocess, sys, time
from pathlib import Path
os.environ["SGLANG_ENABLE_RANK_CONSENSUS_CHECKER"] = "1"
os.environ["HICACHE_CHECKER_POLICY"] = "snapshot"
if len(sys.argv) == 1:
    words = [sys.executable, *sys.orig_argv[1:]]
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    words.append("sglang::scheduler")
    ranks = [subprocess.Popen([*words, str(rank)], text=True, **pipes) for rank in range(3)]
    for rank in ranks:
        # One that has ended has said why.
        assert rank.stdout.readline() == "done\\n", rank.communicate(timeout=60)
    cli = [sys.executable, "-m", "cli.app"]
    hook = ["timeout", "-k", "1", "19", *cli, "snapshot", "--match", "sglang::scheduler", "--seconds", "15"]
    taken = subprocess.run([*hook, "-o", "/srv/logs/evidence"], capture_output=True, text=True)
    # Input that can't be written is that of a rank that has ended: its exit status tells.
    said = [rank.communicate("end\\n", timeout=60)[1] for rank in ranks]
    codes = [rank.returncode for rank in ranks]
    assert codes == [0, 0, 0], (codes, said, taken)
    checked = subprocess.run([*cli, "check", "/srv/logs", "--json"], capture_output=True, text=True)
    screen = "DIVERGED  scope replica0: rank 1 left the majority (2 of 3)"
    print(json.dumps({
        "told": sum(screen in text for text in said),
        "check": [checked.returncode, checked.stderr],
        "verdict": json.loads(checked.stdout),
        "hook": [taken.returncode, taken.stderr],
        "snapshot": json.loads(Path("/srv/logs/evidence/snapshot.json").read_text()),
        "modes": {str(path): f"{path.stat().st_mode & 0o777:o}" for path in Path("/srv/logs").rglob("*")},
    }))
    raise SystemExit
from consensus_checker import configure, rank_consensus, shutdown
from consensus_checker.live import Watcher
from tests.support.live_rank import FolderStore

@rank_consensus(same_params=["rid"], same_results=["result"])
def admit(rid, rank):
    return 5 if (rid, rank) == ("r200", 1) else 4

rank = int(sys.argv[2])
configure([[0, 1, 2]], rank=rank, world_size=3, store=FolderStore(Path("/srv/logs/.store")), watcher=Watcher)
for number in range(300):
    admit(f"r{number}", rank)
    time.sleep(0.001)
print("done", flush=True)
input()
shutdown()
"""

# The plugin on a folder that is full after a while, in a server of a few lines.
FULL = """
import json, os, subprocess, sys
os.environ["HICACHE_TRACE"] = "full"
from consensus_checker import sglang_plugin as plugin
from tests.support.fake_server import FakeServer
with FakeServer(has_checker=False) as server:
    plugin.entry()
    served = server.run(0, size=1, requests=400).nodes
    warnings = [text for text in server.warnings if "off from here on" in text]
checked = subprocess.run([sys.executable, "-m", "cli.app", "check", "/srv/logs", "--json"],
                         capture_output=True, text=True, timeout=60)
print(json.dumps({"served": served, "warnings": warnings, "code": checked.returncode, "err": checked.stderr,
                  "kind": json.loads(checked.stdout)["verdict"]["kind"]}))
"""

GLOO = """
import subprocess, sys
words = "--mode gloo --tp 2 --agentic conversations=4,rounds=3,max-context=2048,output=8 --out /srv/logs/run"
run = subprocess.run([sys.executable, "-m", "cli.app", "run", *words.split()], capture_output=True, text=True,
                     timeout=100)
assert (run.returncode, run.stdout.split()[0]) == (0, "COMPLETED"), run
checked = subprocess.run([sys.executable, "-m", "cli.app", "check", "/srv/logs/run", "--json"],
                         capture_output=True, text=True, timeout=60)
assert (checked.returncode, checked.stderr) == (0, ""), checked
print(checked.stdout)
"""


def said(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def test_the_pod_of_these_tests_has_the_limits_that_it_should() -> None:
    found = json.loads(said(pod.in_pod("-c", LIMITS)))
    expected: dict[str, Any] = {
        "uid": [pod.UID] * 3,
        "groups": [],
        "capabilities": [0, 0, 0, 0, 0],
        "no_new_privs": 1,
        "seccomp": 2,
        "writable": [],
        "write": "Read-only file system",
        "interfaces": ["lo"],
        "egress": "Network is unreachable",
        "processes": 2,
        "ptrace": "Operation not permitted",
        "read_memory": "Operation not permitted",
        "mount": "Operation not permitted",
        "new_spaces": "Operation not permitted",
    }
    if os.geteuid():
        # A user namespace of one's own keeps the groups that one had.
        del expected["groups"], found["groups"]
    assert expected == found


@pytest.fixture(scope="module")
def ranks() -> dict[str, Any]:
    if why := pod.missing():
        pytest.skip(why)
    found: dict[str, Any] = json.loads(said(pod.in_pod("-c", RANKS)))
    return found


@pytest.mark.xdist_group("pod")
def test_three_ranks_are_recorded_watched_and_checked_there(ranks: dict[str, Any]) -> None:
    assert ranks["told"] == 3
    assert ranks["check"] == [10, ""]
    verdict = ranks["verdict"]
    assert (verdict["verdict"]["kind"], verdict["ranks"]["culprit"]) == ("divergence", [1])
    assert verdict["first_divergence"]["index"] == 401


@pytest.mark.xdist_group("pod")
def test_whoever_shares_the_volume_under_another_user_can_read_nothing(ranks: dict[str, Any]) -> None:
    own = {path.removeprefix("/srv/logs/"): mode for path, mode in ranks["modes"].items()}
    assert {
        "verdict.json",
        "rank0001.stacks.txt",
        "rank0001.meta.json",
        "evidence/snapshot.json",
    } < own.keys()
    modes = {mode for path, mode in own.items() if not path.startswith(".store")}
    assert modes == {"600", "700"}


@pytest.mark.xdist_group("pod")
def test_the_hook_before_the_end_has_evidence_of_every_rank(ranks: dict[str, Any]) -> None:
    """Without ptrace: the processes say themselves where they are."""
    assert ranks["hook"][0] == 0
    taken = ranks["snapshot"]["processes"]
    assert [process["rank"] for process in taken] == [0, 1, 2]
    for process in taken:
        assert {"stacks", "process", "own_log"} <= process["files"].keys(), process["reasons"]


def test_a_full_volume_costs_the_records_and_not_the_server() -> None:
    found = json.loads(said(pod.in_pod("-c", FULL, logs_bytes=1 << 19)))
    assert found["served"] == 400
    (warning,) = [text for text in found["warnings"] if "lane scheduler" in text]
    assert "No space left on device" in warning
    # One rank alone can't be compared with anybody.
    assert (found["code"], found["err"], found["kind"]) == (4, "", "nothing_compared")


@pytest.mark.xdist_group("processes")
def test_two_processes_meet_over_its_loopback_and_agree() -> None:
    verdict = json.loads(said(pod.in_pod("-c", GLOO)))
    assert verdict["verdict"]["kind"] == "consistent"
