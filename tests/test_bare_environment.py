"""A server's environment has msgspec and not much else: what records there must not want more."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cli", "consensus_checker", "hicache", "tracer")

# Records calls and decisions, in a ring that turns and is packed, with a heart, and closes.
RECORD = """
import sys, time
from pathlib import Path
from tracer.calls import traced
from tracer.heart import Heart
from tracer.pack import Packer
from tracer.record import HEART_LANE, Kind, Place, header
from tracer.segments import SegmentSink
from tracer.throttle import Throttle
from tracer.tracer import Tracer

folder = Path(sys.argv[1])
kind = Kind("match", "decision", agree=("tp",), compared=("rid", "tokens", "hit"))
place = Place(0, {"tp": 0}, {"tp": 1}, {"tp0": [0]})

def tracer(lane, sink, **more):
    head = header(place, [kind], lane=lane, run_id="bare", tool_version="test")
    return Tracer(sink, head, time.monotonic_ns, **more)

packer = Packer()
sink = SegmentSink(folder, 0, "scheduler", limit_bytes=1 << 20, packer=packer)
scheduler = tracer("scheduler", sink, has_steps=True, throttle=Throttle(0.5))
own = SegmentSink(folder, 0, HEART_LANE)
heart = Heart(tracer(HEART_LANE, own), own, {"scheduler": scheduler}, folder, 0, clock=time.monotonic_ns,
              main="scheduler")
heart.start()

@traced(scheduler, kind, params={"rid": "rid", "tokens": "len(tokens)"}, result={"hit": "result"})
def match(rid, tokens):
    return len(tokens) // 2

for step in range(2000):
    scheduler.begin_step(step)
    match(f"r{step}", [1] * 10)
    scheduler.end_step(is_idle=False)
scheduler.close("completed")
heart.stop("completed")
assert packer.drain(20)
"""

# Two ranks in two processes that meet in a folder, one of which decides something else: both tell it.
WATCHED = """
import os, sys, threading, time
from pathlib import Path
os.environ["SGLANG_ENABLE_RANK_CONSENSUS_CHECKER"] = "1"
from consensus_checker import configure, rank_consensus, shutdown
from consensus_checker.live import Watcher

class FolderStore:
    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True)
    def path(self, key):
        return self.folder / key.replace("/", "_")
    def set(self, key, value):
        own = self.folder / f".{os.getpid()}.{threading.get_ident()}"
        own.write_bytes(value.encode() if isinstance(value, str) else value)
        own.replace(self.path(key))
    def get(self, key):
        return self.path(key).read_bytes()
    def check(self, keys):
        return all(self.path(key).exists() for key in keys)

@rank_consensus(same_params=["rid"], same_results=["result"])
def admit(rid, rank):
    return 5 if (rid, rank) == ("r400", 1) else 4

rank, told = int(sys.argv[2]), []
watcher = lambda **given: Watcher(**{**given, "tell": told.append})
configure([[0, 1]], rank=rank, store=FolderStore(sys.argv[1]), watcher=watcher)
for number in range(800):
    admit(f"r{number}", rank)
    time.sleep(0.001)
shutdown()
(screen,) = [text for text in told if "DIVERGED" in text]
assert "rank 0 against rank 1 at call 801" in screen, screen
"""

# Whatever is not the standard library, msgspec, xxhash or this project's recorder does not exist.
ALONE = """
import sys
ALLOWED = {"msgspec", "xxhash", "tracer", "consensus_checker", "_xxhash"}
class Only:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ALLOWED:
            raise ImportError(f"the recorder wants {name}")
sys.meta_path.insert(0, Only())
"""


def demand_all_calls(folder: Path) -> None:
    from tracer.log import find_logs

    (lane,) = [lane for lane in find_logs(folder).lanes if lane.lane == "scheduler"]
    calls = [record["rid"] for record in lane.records() if record.get("phase") == "call"]
    assert calls == [f"r{step}" for step in range(2000)][-len(calls) :]
    assert lane.is_complete
    assert any(path.suffix == ".gz" for path in lane.files)


@pytest.mark.parametrize("has_xxhash", [True, False])
def test_the_recorder_wants_the_standard_library_and_msgspec(tmp_path: Path, has_xxhash: bool) -> None:
    script = ALONE if has_xxhash else ALONE.replace('"xxhash", ', "")
    done = subprocess.run(
        [sys.executable, "-c", script + RECORD, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert (done.returncode, done.stderr) == (0, "")
    demand_all_calls(tmp_path / "run")
    header = subprocess.run(
        ["zcat", str(sorted((tmp_path / "run").glob("rank0000.scheduler.*.gz"))[0])],
        capture_output=True,
        check=True,
    ).stdout.split(b"\n")[0]
    assert json.loads(header)["chain"] == ("xxh3-64" if has_xxhash else "blake2b-64")


def watch_two_ranks(words: list[str], folder: Path, cwd: Path, env: dict[str, str] | None = None) -> None:
    ranks = [
        subprocess.Popen(
            [*words, str(folder), str(rank)], cwd=cwd, env=env, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said


def test_the_online_half_wants_the_standard_library_and_msgspec(tmp_path: Path) -> None:
    watch_two_ranks([sys.executable, "-c", ALONE + WATCHED], tmp_path / "store", ROOT)


@pytest.mark.slow
def test_an_installation_without_dependencies_records_and_watches(tmp_path: Path) -> None:
    """A real environment of its own: msgspec from the index, this project with --no-deps, nothing else."""
    source = tmp_path / "source"
    source.mkdir()
    for name in (*PACKAGES, "pyproject.toml", "README.md"):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    environment = tmp_path / "bare"
    python = environment / "bin" / "python"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*words: str) -> str:
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    # Our own pip installs into it: one less to install there, and to compile.
    run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    pip = (sys.executable, "-m", "pip", "--python", str(python))
    run(*pip, "install", "--quiet", "--no-compile", "msgspec")
    run(*pip, "install", "--quiet", "--no-compile", "--no-deps", str(source))
    installed = {line.split("==")[0] for line in run(*pip, "freeze").splitlines()}
    assert {name.split(" @")[0] for name in installed} == {"msgspec", "hicache-toolkit"}
    run(str(python), "-c", RECORD, str(tmp_path / "run"))
    demand_all_calls(tmp_path / "run")
    watch_two_ranks([str(python), "-c", WATCHED], tmp_path / "store", tmp_path, env)
