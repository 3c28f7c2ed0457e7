"""Whole runs in processes of their own, under what happens to processes: killed, disk full, files gone."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tracer.log import find_logs

HICACHE = [sys.executable, "-m", "cli.app"]
LONG = "conversations=8,rounds=60,max-context=60000,output=30"
BYTES_MIN = 1_000_000


def logged_bytes(folder: Path) -> int:
    """Bytes of complete lines on disk, counted without the reader."""
    return sum(len(whole_lines(path)) for path in folder.glob("rank*.jsonl"))


def whole_lines(path: Path) -> bytes:
    text = path.read_bytes().split(b"\0", 1)[0]
    return text[: text.rfind(b"\n") + 1]


def kill_in_the_middle(words: list[str], out: Path, more_bytes: int) -> None:
    process = subprocess.Popen(
        [*HICACHE, "run", *words, "--tp", "4", "--out", str(out), "--quiet"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while not out.is_dir() or logged_bytes(out) < BYTES_MIN + more_bytes:
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline, "the run writes nothing"
            time.sleep(0.005)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL


def check(folder: Path) -> tuple[int, dict[str, object]]:
    done = subprocess.run([*HICACHE, "check", str(folder), "--json"], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("more_bytes", [0, 777_777, 2_000_000])
def test_every_record_of_a_killed_run_is_read_and_nobody_is_accused(more_bytes: int, tmp_path: Path) -> None:
    kill_in_the_middle(["--agentic", LONG], tmp_path / "run", more_bytes)
    run = find_logs(tmp_path / "run")
    for lane in run.lanes:
        counts = [whole_lines(path).count(b'\n{"seq"') + 1 for path in lane.files if whole_lines(path)]
        records = sum(1 for _ in lane.records())
        # Each file begins with a header, unless the kill came between making it and that.
        assert records == sum(count - 1 for count in counts)
        assert lane.trailer is None
    code, verdict = check(tmp_path / "run")
    assert code == 4
    assert verdict["verdict"]["kind"] == "incomplete"  # type: ignore[index]
    assert verdict["coverage"]["truncated"] == [0, 1, 2, 3]  # type: ignore[index]


def test_a_killed_run_with_a_bug_is_incomplete_or_rightly_accused(tmp_path: Path) -> None:
    words = ["--agentic", LONG, "--device-pages", "4000", "--host-pages", "9000"]
    words += ["--bug", "local_host_room_decides_backup", "--fault", "alloc_fail:rank=2,pool=host,nth=9"]
    kill_in_the_middle(words, tmp_path / "run", 500_000)
    code, verdict = check(tmp_path / "run")
    assert code == 10
    assert verdict["ranks"]["culprit"] == [2]  # type: ignore[index]


def test_a_full_disk_costs_the_trace_and_not_the_run(tmp_path: Path) -> None:
    """A tmpfs of 1 MB for the logs of four ranks."""
    if shutil.which("unshare") is None:
        pytest.fail("this test mounts a small tmpfs and needs unshare, of Debian's util-linux")
    out = tmp_path / "small"
    out.mkdir()
    words = " ".join([*HICACHE, "run", "--agentic", LONG.replace("rounds=60", "rounds=20"), "--tp", "4"])
    script = f"mount -t tmpfs -o size=1m none {out} && cd {Path.cwd()} && {words} --out {out} && ls {out}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "160 requests served" in " ".join(done.stdout.split())
    assert done.stderr.count("warning") == 1, done.stderr
    assert "No space left on device" in done.stderr
    assert "  lost    logs of " in done.stdout
    assert "  next    " not in done.stdout


def test_a_missing_log_and_one_of_another_run_are_said_and_accuse_nobody(tmp_path: Path) -> None:
    words = ["zoo", "run", "skip_collective_when_empty", "--twin", "--quiet"]
    for name, seed in (("one", "1"), ("two", "2")):
        subprocess.run([*HICACHE, *words, "--seed", seed, "--out", str(tmp_path / name)], check=True)
    shutil.copytree(tmp_path / "one", tmp_path / "missing")
    log = "rank0002.scheduler.000.jsonl"
    for path in (tmp_path / "missing").glob("rank0002.*"):
        path.unlink()
    shutil.copytree(tmp_path / "missing", tmp_path / "mixed")
    shutil.copy(tmp_path / "two" / log, tmp_path / "mixed" / log)

    code, verdict = check(tmp_path / "missing")
    assert code == 4
    assert verdict["ranks"] == {"culprit": [], "victims": [], "silent": [2], "unknown": []}
    code, verdict = check(tmp_path / "mixed")
    assert code == 4
    assert verdict["coverage"]["missing"] == [2]  # type: ignore[index]
    assert verdict["coverage"]["other_runs"] == [log]  # type: ignore[index]
