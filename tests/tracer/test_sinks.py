"""What is on disk after a crash, a full disk, a removed folder or a fork."""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.logs import DECIDE, NOTE, SMALL_KINDS, place
from tracer.chain import LINKS
from tracer.log import find_logs
from tracer.record import header
from tracer.segments import RING_SEGMENTS, SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, SegmentSink
from tracer.sinks import write_meta
from tracer.tracer import Tracer

HEADER = header(place(), SMALL_KINDS, lane="scheduler", run_id="run-a", tool_version="test")
# One segment of 64 KiB holds several hundred small records.
MORE_THAN_A_SEGMENT = 2000
ROOT = Path(__file__).resolve().parents[2]


def open_tracer(folder: Path, warn: Callable[[str], None] | None = None) -> Tracer:
    return Tracer(SegmentSink(folder, 0, "scheduler", warn=warn), HEADER, lambda: 7, warn=warn)


def write(tracing: Tracer, count: int) -> None:
    emit = tracing.emitter(DECIDE)
    for node in range(count):
        emit(node, 1, 64, 5)


def nodes(folder: Path) -> list[int]:
    (lane,) = find_logs(folder).lanes
    return [record["node"] for record in lane.records() if record["kind"] == DECIDE.name]


def test_what_was_written_is_read_back_over_many_segments(tmp_path: Path) -> None:
    tracing = open_tracer(tmp_path)
    write(tracing, 20_000)
    tracing.close("completed")
    (lane,) = find_logs(tmp_path).lanes
    assert nodes(tmp_path) == list(range(20_000))
    assert list(lane.records()) and lane.is_complete
    assert len(lane.files) > 3


def test_segments_double_are_private_and_are_cut_to_what_was_used(tmp_path: Path) -> None:
    tracing = open_tracer(tmp_path)
    sizes = [os.stat(tmp_path / "rank0000.scheduler.000.jsonl").st_size]
    write(tracing, 1000)
    sizes.append(os.stat(tmp_path / "rank0000.scheduler.001.jsonl").st_size)
    tracing.close("completed")
    assert sizes == [SEGMENT_BYTES_MIN, 2 * SEGMENT_BYTES_MIN]
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.read_bytes().endswith(b"}\n")


def test_a_record_larger_than_a_segment_gets_one_that_fits(tmp_path: Path) -> None:
    tracing = open_tracer(tmp_path)
    emit = tracing.emitter(DECIDE)
    emit("x" * (SEGMENT_BYTES_MAX + 1), 1, 64, 5)
    emit(2, 1, 64, 5)
    tracing.close("completed")
    assert nodes(tmp_path) == ["x" * (SEGMENT_BYTES_MAX + 1), 2]


CRASH = """
import os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.tracer.test_sinks import open_tracer
from tests.support.logs import DECIDE
tracing = open_tracer(Path({folder!r}))
emit = tracing.emitter(DECIDE)
node = 0
while True:
    emit(node, 1, 64, 5)
    os.write(1, b"%d\\n" % node)
    node += 1
"""


@pytest.mark.parametrize("acknowledged", [1, 500, 3000])
def test_every_record_acknowledged_before_a_sigkill_is_readable(tmp_path: Path, acknowledged: int) -> None:
    script = CRASH.format(root=str(ROOT), folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        seen = [int(child.stdout.readline()) for _ in range(acknowledged)]
        child.send_signal(signal.SIGKILL)
        seen += [int(text) for text in child.stdout.read().split(b"\n")[:-1]]
    (lane,) = find_logs(tmp_path).lanes
    read = nodes(tmp_path)
    list(lane.records())
    assert seen == read[: len(seen)]
    # One record may have been written and not yet acknowledged.
    assert len(seen) <= len(read) <= len(seen) + 1
    # Killed between two segments it is cut at a line's end, else it ends in zero bytes.
    assert lane.trailer is None


def test_a_disk_without_room_ends_tracing_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(fd: int, offset: int, length: int) -> None:
        if length > SEGMENT_BYTES_MIN:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(fd, length)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    warnings: list[str] = []
    tracing = open_tracer(tmp_path, warnings.append)
    write(tracing, MORE_THAN_A_SEGMENT)
    tracing.close("completed")
    second = tmp_path / "rank0000.scheduler.001.jsonl"
    assert warnings == [
        f"tracing of rank 0, lane scheduler is off from here on: No space left on device ({second})"
    ]
    assert not second.exists()
    assert nodes(tmp_path) == list(range(len(nodes(tmp_path))))
    assert len(nodes(tmp_path)) > 100


def test_a_file_size_limit_of_the_kernel_ends_tracing_and_not_the_run(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    warnings: list[str] = []
    resource.setrlimit(resource.RLIMIT_FSIZE, (SEGMENT_BYTES_MIN, hard))
    try:
        tracing = open_tracer(tmp_path, warnings.append)
        write(tracing, MORE_THAN_A_SEGMENT)
        tracing.close("completed")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(warnings) == 1
    assert "File too large" in warnings[0]
    assert len(nodes(tmp_path)) > 100


FULL_DISK = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.tracer.test_sinks import open_tracer, write
warnings = []
tracing = open_tracer(Path({folder!r}), warnings.append)
write(tracing, 20000)
tracing.close("completed")
print(len(warnings), "No space left on device" in warnings[0])
"""


def test_a_really_full_disk_ends_tracing_and_not_the_run(tmp_path: Path) -> None:
    # Mounting needs a right that not every machine gives; the imitations above always run.
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here: a full disk was only imitated by the two tests above")
    disk, copy, script = tmp_path / "disk", tmp_path / "copy", tmp_path / "fill.py"
    disk.mkdir()
    script.write_text(FULL_DISK.format(root=str(ROOT), folder=str(disk)))
    mount = f"mount -t tmpfs -o size=256k none {disk}"
    fill = f"{mount} || exit 77; {sys.executable} {script} && cp -r {disk} {copy}"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", fill], capture_output=True, text=True)
    if done.returncode == 77 or done.stderr.startswith("unshare"):
        pytest.skip(f"no mount allowed here, a full disk was only imitated above: {done.stderr.strip()}")
    assert (done.returncode, done.stdout) == (0, "1 True\n"), done.stderr
    assert nodes(copy) == list(range(len(nodes(copy))))


def test_a_folder_that_cannot_be_made_means_one_warning_and_no_log(tmp_path: Path) -> None:
    # Root may write into a read-only folder, so the way is barred by a file.
    (tmp_path / "file").write_text("")
    warnings: list[str] = []
    tracing = open_tracer(tmp_path / "file" / "logs", warnings.append)
    write(tracing, MORE_THAN_A_SEGMENT)
    tracing.close("completed")
    assert len(warnings) == 1
    assert "Not a directory" in warnings[0]


def test_a_folder_removed_during_the_run_means_one_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    tracing = open_tracer(tmp_path / "logs", warnings.append)
    shutil.rmtree(tmp_path / "logs")
    write(tracing, 3 * MORE_THAN_A_SEGMENT)
    tracing.close("completed")
    assert len(warnings) == 1
    assert "No such file or directory" in warnings[0]
    assert not (tmp_path / "logs").exists()


def test_the_log_of_an_earlier_run_is_never_overwritten(tmp_path: Path) -> None:
    first = open_tracer(tmp_path)
    write(first, 3)
    first.close("completed")
    warnings: list[str] = []
    second = open_tracer(tmp_path, warnings.append)
    write(second, 9)
    second.close("completed")
    assert nodes(tmp_path) == [0, 1, 2]
    assert len(warnings) == 1
    assert "File exists" in warnings[0]


def test_a_warning_that_raises_does_not_reach_the_run(tmp_path: Path) -> None:
    def warn(text: str) -> None:
        raise RuntimeError(text)

    (tmp_path / "file").write_text("")
    write(open_tracer(tmp_path / "file", warn), 3)


def test_a_forked_child_writes_nothing_into_its_parents_log(tmp_path: Path) -> None:
    tracing = open_tracer(tmp_path)
    write(tracing, 3)
    child = os.fork()
    if child == 0:
        write(tracing, MORE_THAN_A_SEGMENT)
        tracing.close("crashed")
        os._exit(0)
    os.waitpid(child, 0)
    write(tracing, 3)
    tracing.close("completed")
    (lane,) = find_logs(tmp_path).lanes
    assert [record["node"] for record in lane.records()] == [0, 1, 2, 0, 1, 2]
    assert lane.is_complete
    assert len(lane.files) == 1


def test_a_sink_that_was_never_closed_leaves_no_open_file(tmp_path: Path) -> None:
    # What other tests have left behind is theirs.
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    tracing = open_tracer(tmp_path)
    write(tracing, 3)
    del tracing
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert nodes(tmp_path) == [0, 1, 2]


def test_the_side_file_holds_what_differs_between_equal_runs(tmp_path: Path) -> None:
    write_meta(tmp_path, 3)
    facts = json.loads((tmp_path / "rank0003.meta.json").read_text())
    assert sorted(facts) == ["host", "monotonic_ns", "pid", "wall_clock_ns"]
    assert facts["pid"] == os.getpid()


def test_a_side_file_that_cannot_be_written_only_warns(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    warnings: list[str] = []
    write_meta(tmp_path / "file", 3, warn=warnings.append)
    assert len(warnings) == 1


def test_a_sink_holds_one_open_file(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    sinks = [SegmentSink(tmp_path, rank, "scheduler") for rank in range(8)]
    for sink in sinks:
        sink.open(lambda: b"{}")
    assert len(os.listdir("/proc/self/fd")) == before + 8
    for sink in sinks:
        sink.close()
    assert len(os.listdir("/proc/self/fd")) == before


MANY_RANKS = """
import resource, sys
sys.path.insert(0, {root!r})
from tracer.segments import SegmentSink
resource.setrlimit(resource.RLIMIT_NOFILE, (32, {hard}))
warnings = []
sinks = [SegmentSink({folder!r}, rank, "scheduler", warn=warnings.append) for rank in range(64)]
for sink in sinks:
    sink.open(lambda: b"{{}}")
print(len(warnings), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(("hard", "has_all"), [(128, True), (32, False)])
def test_more_ranks_than_open_files_raise_the_limit_or_say_so(
    hard: int, has_all: bool, tmp_path: Path
) -> None:
    script = MANY_RANKS.format(root=str(ROOT), folder=str(tmp_path), hard=hard)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr == ""
    warnings, soft = map(int, done.stdout.split())
    assert (warnings == 0, soft) == (has_all, hard)


def test_closing_never_touches_another_file_that_took_the_path(tmp_path: Path) -> None:
    tracing = open_tracer(tmp_path)
    write(tracing, 3)
    path = tmp_path / "rank0000.scheduler.000.jsonl"
    path.rename(tmp_path / "moved.jsonl")
    path.write_bytes(b"mine" * 100_000)
    tracing.close("completed")
    assert path.read_bytes() == b"mine" * 100_000
    (lane,) = find_logs(tmp_path / "moved.jsonl").lanes
    assert [record["node"] for record in lane.records()] == [0, 1, 2]
    assert lane.is_complete


RING_BYTES = 8 * SEGMENT_BYTES_MIN


def open_ring(
    folder: Path, *, limit_bytes: int = RING_BYTES, warn: Callable[[str], None] | None = None
) -> Tracer:
    return Tracer(SegmentSink(folder, 0, "scheduler", warn=warn, limit_bytes=limit_bytes), HEADER, lambda: 7)


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_a_ring_keeps_the_newest_records_within_its_limit(tmp_path: Path) -> None:
    tracing = open_ring(tmp_path)
    emit, note = tracing.emitter(DECIDE), tracing.emitter(NOTE)
    for node in range(20_000):
        emit(node, 1, 64, 5)
        if node % 2:
            note("x")
        assert bytes_in(tmp_path) <= RING_BYTES
    tracing.close("completed")
    (lane,) = find_logs(tmp_path).lanes
    records = list(lane.records())
    assert lane.is_complete
    checkpoints = 20_000 // LINKS
    assert [record["seq"] for record in records] == list(
        range(lane.last_dropped_seq + 1, 30_001 + checkpoints)
    )
    assert bytes_in(tmp_path) > RING_BYTES * (RING_SEGMENTS - 2) // RING_SEGMENTS
    kinds = ("write_backup", "note", "checkpoint")
    kept = {kind: sum(record["kind"] == kind for record in records) for kind in kinds}
    assert lane.counts_before == {
        "write_backup": 20_000 - kept["write_backup"],
        "note": 10_000 - kept["note"],
        "checkpoint": checkpoints - kept["checkpoint"],
    }


def test_a_ring_that_never_filled_has_everything(tmp_path: Path) -> None:
    tracing = open_ring(tmp_path)
    write(tracing, 1000)
    tracing.close("completed")
    (lane,) = find_logs(tmp_path).lanes
    assert (len(list(lane.records())), lane.last_dropped_seq, lane.counts_before) == (1000, 0, {})


def test_a_lane_that_keeps_everything_counts_nothing(tmp_path: Path) -> None:
    tracing = open_tracer(tmp_path)
    write(tracing, MORE_THAN_A_SEGMENT)
    tracing.close("completed")
    assert b"counts_before" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


def test_a_small_ring_has_small_segments(tmp_path: Path) -> None:
    tracing = open_ring(tmp_path, limit_bytes=40_000)
    write(tracing, 3000)
    tracing.close("completed")
    assert bytes_in(tmp_path) <= 40_000
    assert nodes(tmp_path)[-1] == 2999


def test_a_ring_leaves_a_file_alone_that_took_a_name_of_its_own(tmp_path: Path) -> None:
    tracing = open_ring(tmp_path)
    write(tracing, MORE_THAN_A_SEGMENT)
    first = tmp_path / "rank0000.scheduler.000.jsonl"
    first.unlink()
    first.write_text("mine")
    write(tracing, 20_000)
    tracing.close("completed")
    assert first.read_text() == "mine"


def test_a_ring_whose_files_were_taken_away_goes_on(tmp_path: Path) -> None:
    warnings: list[str] = []
    tracing = open_ring(tmp_path, warn=warnings.append)
    write(tracing, MORE_THAN_A_SEGMENT)
    (tmp_path / "rank0000.scheduler.000.jsonl").unlink()
    write(tracing, 20_000)
    tracing.close("completed")
    assert (warnings, nodes(tmp_path)[-1]) == ([], 19_999)


RING_CRASH = """
import os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.tracer.test_sinks import open_ring
from tests.support.logs import DECIDE
tracing = open_ring(Path({folder!r}), limit_bytes=40_000)
emit = tracing.emitter(DECIDE)
node = 0
while True:
    emit(node, 1, 64, 5)
    os.write(1, b"%d\\n" % node)
    node += 1
"""


@pytest.mark.parametrize("acknowledged", [1, 150, *range(1000, 1015), 3000])
def test_a_ring_killed_while_it_turns_has_no_gap_and_misses_nothing_new(
    tmp_path: Path, acknowledged: int
) -> None:
    script = RING_CRASH.format(root=str(ROOT), folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        seen = [int(child.stdout.readline()) for _ in range(acknowledged)]
        child.send_signal(signal.SIGKILL)
        seen += [int(text) for text in child.stdout.read().split(b"\n")[:-1]]
    (lane,) = find_logs(tmp_path).lanes
    read = nodes(tmp_path)
    list(lane.records())
    assert read == list(range(read[0], read[0] + len(read)))
    # Node n is record n + 1, and later by one behind each checkpoint.
    assert lane.last_dropped_seq == read[0] + read[0] // LINKS
    assert seen[-1] <= read[-1] <= seen[-1] + 1
    assert lane.trailer is None
    assert bytes_in(tmp_path) <= 40_000


CALLS_OF_A_TURN = range(1, 40)
# One process a call, each of which is killed at it; they are forked so that each need not import all of this.
KILLED_BETWEEN = """
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.tracer.test_sinks import open_ring, write

def be_killed(folder, nth):
    count = 0
    def step(real):
        def killed(*args, **more):
            nonlocal count
            count += 1
            if count == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **more)
        return killed
    tracing = open_ring(folder, limit_bytes=40_000)
    for name in ("unlink", "open", "posix_fallocate", "fstat", "lstat"):
        setattr(os, name, step(getattr(os, name)))
    write(tracing, 5000)

for nth in {calls}:
    pid = os.fork()
    if pid == 0:
        try:
            be_killed(Path({folder!r}) / str(nth), nth)
        finally:
            os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each call at which a process was killed."""
    folder = tmp_path_factory.mktemp("killed")
    calls = list(CALLS_OF_A_TURN)
    script = KILLED_BETWEEN.format(root=str(ROOT), folder=str(folder), calls=calls)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stderr, done.stdout.split()) == ("", [str(-signal.SIGKILL)] * len(calls))
    return folder


@pytest.mark.parametrize("nth", CALLS_OF_A_TURN)
@pytest.mark.xdist_group("killed rings")
def test_a_ring_killed_at_any_call_of_a_turn_can_be_read(killed: Path, nth: int) -> None:
    (lane,) = find_logs(killed / str(nth)).lanes
    read = [record["node"] for record in lane.records()]
    assert read == list(range(lane.last_dropped_seq, lane.last_dropped_seq + len(read)))
