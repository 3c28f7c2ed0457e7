"""What a packer leaves behind: the same bytes smaller, or the file as it was."""

from __future__ import annotations

import errno
import gzip
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from io import FileIO
from pathlib import Path
from threading import Event, Thread

import pytest

from tests.support.logs import DECIDE, SMALL_KINDS, place
from tracer import pack as packing
from tracer.log import find_logs
from tracer.pack import MEMBER_BYTES, DamagedError, PackAtOnce, Packer, Sealed, member, pack, unpacked
from tracer.record import header
from tracer.segments import SegmentSink
from tracer.tracer import Tracer

ROOT = Path(__file__).resolve().parents[2]
HEADER = header(place(), SMALL_KINDS, lane="scheduler", run_id="run-a", tool_version="test")
NAME = "rank0000.scheduler.000.jsonl"


def bytes_of(count: int, seed: int = 5) -> bytes:
    """Neither all alike nor incompressible."""
    drawn = random.Random(seed)
    words = [b"%d" % drawn.randrange(10**9) for _ in range(500)]
    text = b",".join(drawn.choice(words) for _ in range(count // 9 + 1))
    return text[:count].ljust(count, b"x")


def unpack(path: Path) -> list[bytes | DamagedError]:
    with FileIO(path) as file:
        return [piece for piece in unpacked(file) if piece != b""]


def read(path: Path) -> bytes:
    return b"".join(piece for piece in unpack(path) if isinstance(piece, bytes))


def damages(path: Path) -> list[str]:
    return [str(piece) for piece in unpack(path) if isinstance(piece, DamagedError)]


@pytest.mark.parametrize("count", [0, 1, MEMBER_BYTES - 1, MEMBER_BYTES, MEMBER_BYTES + 1, 2_000_000])
def test_what_is_packed_is_read_back_by_us_and_by_any_gzip(count: int, tmp_path: Path) -> None:
    path = tmp_path / NAME
    data = bytes_of(count)
    path.write_bytes(data)
    packed = pack(path)
    assert packed == tmp_path / f"{NAME}.gz"
    assert (read(packed), damages(packed)) == (data, [])
    assert gzip.decompress(packed.read_bytes()) == data
    assert sorted(os.listdir(tmp_path)) == [NAME, f"{NAME}.gz"]


def test_the_gzip_of_the_system_reads_it(tmp_path: Path) -> None:
    if shutil.which("gzip") is None:
        pytest.skip("no gzip here: only Python's was asked")
    path = tmp_path / NAME
    path.write_bytes(bytes_of(300_000))
    packed = pack(path)
    assert subprocess.run(["gzip", "-t", packed]).returncode == 0
    done = subprocess.run(["gzip", "-dc", packed], capture_output=True)
    assert (done.stdout, done.stderr) == (path.read_bytes(), b"")


def test_bytes_that_cannot_be_made_smaller_still_fit(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(os.urandom(3 * MEMBER_BYTES))
    assert read(pack(path)) == path.read_bytes()


def test_the_same_file_is_packed_to_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(bytes_of(100_000))
    first = pack(path).read_bytes()
    os.utime(path, (1, 1))
    assert pack(path).read_bytes() == first


DATA = [bytes_of(MEMBER_BYTES, seed) for seed in range(6)]
MEMBERS = [*map(member, DATA), member(b"")]


def places(whole: bytes) -> list[int]:
    """Bytes of a member of every class: each of its head and its tail, and some of its body."""
    return [
        *range(18),
        19,
        len(whole) // 3,
        len(whole) // 2,
        len(whole) - 9,
        *range(len(whole) - 8, len(whole)),
    ]


@pytest.mark.parametrize("index", range(6))
def test_a_flipped_bit_costs_its_own_member_and_no_other(index: int, tmp_path: Path) -> None:
    path = tmp_path / f"{NAME}.gz"
    others = [data for number, data in enumerate(DATA) if number != index]
    start = sum(map(len, MEMBERS[:index]))
    for at in places(MEMBERS[index]):
        for bit in (0, 7):
            spoilt = bytearray(b"".join(MEMBERS))
            spoilt[start + at] ^= 1 << bit
            path.write_bytes(spoilt)
            found = [piece for piece in unpack(path) if isinstance(piece, bytes)]
            # On the time, the system and the last bits of a body nothing depends.
            if found == DATA:
                assert 4 <= at < 10 or at == len(MEMBERS[index]) - 9
                assert not damages(path)
            else:
                assert (found, bool(damages(path))) == (others, True), f"byte {at}, bit {bit}"


def test_zeros_and_noise_in_the_middle_cost_what_they_hit(tmp_path: Path) -> None:
    path = tmp_path / f"{NAME}.gz"
    whole = b"".join(MEMBERS)
    start = sum(map(len, MEMBERS[:2])) + 100
    for filling in (bytes(4096), os.urandom(4096), b"\x1f\x8b\x08\x04" * 1024):
        path.write_bytes(whole[:start] + filling + whole[start + 4096 :])
        found = [piece for piece in unpack(path) if isinstance(piece, bytes)]
        assert found == [DATA[0], DATA[1], *DATA[3:]]
        assert damages(path)


def test_a_file_that_was_cut_gives_what_is_whole_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / f"{NAME}.gz"
    ends = [sum(map(len, MEMBERS[:count])) for count in range(7)]
    whole = b"".join(MEMBERS)
    for cut in (1, 10, 17, 18, 19, ends[1] - 1, ends[1] + 1, ends[3] + 40, ends[6] + 3, len(whole) - 1):
        path.write_bytes(whole[:cut])
        found = [piece for piece in unpack(path) if isinstance(piece, bytes)]
        assert found == DATA[: sum(end <= cut for end in ends) - 1]
        assert damages(path)


def test_what_another_tool_has_packed_is_read_up_to_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / f"{NAME}.gz"
    data = bytes_of(500_000)
    for packed in (gzip.compress(data), gzip.compress(data[:1000]) + gzip.compress(data[1000:])):
        path.write_bytes(packed)
        assert (read(path), damages(path)) == (data, [])
        path.write_bytes(packed + bytes(512))
        assert (read(path), damages(path)) == (data, [])
        path.write_bytes(packed[: len(packed) // 2])
        assert data.startswith(read(path))
        assert damages(path) == ["the compressed file was cut"]
        path.write_bytes(packed + b"more")
        assert (read(path), len(damages(path))) == (data, 1)


def test_a_small_file_that_would_be_enormous_comes_in_small_pieces(tmp_path: Path) -> None:
    path = tmp_path / f"{NAME}.gz"
    path.write_bytes(gzip.compress(bytes(50_000_000), 9))
    with FileIO(path) as file:
        assert max(len(piece) for piece in unpacked(file) if isinstance(piece, bytes)) <= 1 << 17


def test_a_member_that_claims_to_hold_more_than_one_may_is_damaged(tmp_path: Path) -> None:
    import zlib

    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    huge = bytes(60_000_000)
    body = packer.compress(huge) + packer.flush()
    head = packing._HEAD.pack(packing._MAGIC, 0, 0, 255, 6, b"BC", 2, 18 + len(body) + 8 - 1)
    path = tmp_path / f"{NAME}.gz"
    path.write_bytes(head + body + packing._TAIL.pack(zlib.crc32(huge), len(huge)) + MEMBERS[0])
    assert [piece for piece in unpack(path) if isinstance(piece, bytes)] == [DATA[0]]


# What becomes of a lane's files.


def sealed(path: Path, data: bytes = b"x" * 1000) -> Sealed:
    path.write_bytes(data)
    status = os.lstat(path)
    return Sealed(path, (status.st_dev, status.st_ino), len(data), 0.0)


def test_a_sealed_file_is_replaced_by_its_packed_form(tmp_path: Path) -> None:
    one = sealed(tmp_path / NAME)
    one.pack()
    assert os.listdir(tmp_path) == [f"{NAME}.gz"]
    assert (one.path.name, one.used_bytes) == (f"{NAME}.gz", os.path.getsize(one.path))
    one.remove()
    assert os.listdir(tmp_path) == []


def test_a_file_that_was_removed_is_not_packed(tmp_path: Path) -> None:
    one = sealed(tmp_path / NAME)
    one.remove()
    one.pack()
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_removed_while_it_is_packed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = sealed(tmp_path / NAME)
    real = packing.pack

    def pack_and_remove(path: Path) -> Path:
        packed = real(path)
        one.remove()
        return packed

    monkeypatch.setattr(packing, "pack", pack_and_remove)
    one.pack()
    assert os.listdir(tmp_path) == []


def test_another_file_that_took_the_name_is_left_alone(tmp_path: Path) -> None:
    one = sealed(tmp_path / NAME)
    (tmp_path / NAME).rename(tmp_path / "moved")
    (tmp_path / NAME).write_text("mine")
    one.pack()
    one.remove()
    assert sorted(os.listdir(tmp_path)) == ["moved", NAME]
    assert (tmp_path / NAME).read_text() == "mine"


def test_a_disk_that_takes_only_a_part_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    data = os.urandom(3 * MEMBER_BYTES)
    one = sealed(tmp_path / NAME, data)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 10, MEMBER_BYTES, 2 * MEMBER_BYTES + 77, len(data) + 3 * 26 + 10):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            one.pack()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert os.listdir(tmp_path) == [NAME]
        assert (tmp_path / NAME).read_bytes() == data


def test_a_disk_that_has_room_again_behind_a_part_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A full disk takes a part of what is written; then a ring removes a file, and there is room again.
    data = os.urandom(3 * MEMBER_BYTES)
    one = sealed(tmp_path / NAME, data)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    real = packing.member
    count = 0

    def member_and_room(data: bytes) -> bytes:
        nonlocal count
        count += 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (MEMBER_BYTES + 500 if count < 3 else soft, hard))
        return real(data)

    monkeypatch.setattr(packing, "member", member_and_room)
    try:
        one.pack()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (left,) = tmp_path.iterdir()
    assert (read(left) if left.suffix == ".gz" else left.read_bytes()) == data


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tracer import pack
count = 0
def step(real):
    def killed(*args, **more):
        global count
        count += 1
        if count == {nth}:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **more)
    return killed
from tests.tracer.test_pack import write_lane
tracing = write_lane(Path({folder!r}), packer=pack.PackAtOnce(), count=1500)
for name in ("open", "replace", "lstat", "unlink"):
    setattr(os, name, step(getattr(os, name)))
pack.member = step(pack.member)
tracing.close("completed")
"""


def write_lane(
    folder: Path, *, packer: packing.Packing | None, count: int, limit_bytes: int | None = None
) -> Tracer:
    sink = SegmentSink(folder, 0, "scheduler", packer=packer, limit_bytes=limit_bytes)
    tracing = Tracer(sink, HEADER, lambda: 7)
    emit = tracing.emitter(DECIDE)
    for node in range(count):
        emit(node, 1, 64, 5)
    return tracing


def nodes(folder: Path) -> list[int]:
    (lane,) = find_logs(folder).lanes
    return [record["node"] for record in lane.records() if record["kind"] == DECIDE.name]


@pytest.mark.parametrize("nth", range(1, 9))
def test_a_packer_that_is_killed_anywhere_leaves_a_lane_that_can_be_read(nth: int, tmp_path: Path) -> None:
    script = KILLED.format(root=str(ROOT), folder=str(tmp_path), nth=nth)
    done = subprocess.run([sys.executable, "-c", script])
    assert done.returncode == -signal.SIGKILL
    assert nodes(tmp_path) == list(range(1500))
    (lane,) = find_logs(tmp_path).lanes
    assert [*lane.records()] and lane.is_complete


def test_a_lane_that_is_packed_at_once_reads_as_if_it_were_not(tmp_path: Path) -> None:
    write_lane(tmp_path, packer=PackAtOnce(), count=20_000).close("completed")
    assert all(path.suffix == ".gz" for path in tmp_path.glob("*.jsonl*"))
    assert nodes(tmp_path) == list(range(20_000))
    (lane,) = find_logs(tmp_path).lanes
    assert [extent.is_plain for extent in lane.extents()] == [False] * len(lane.files)
    assert lane.is_complete


def test_where_a_file_is_there_twice_it_is_read_once(tmp_path: Path) -> None:
    write_lane(tmp_path, packer=None, count=3000).close("completed")
    for path in list(tmp_path.iterdir()):
        pack(path)
    assert nodes(tmp_path) == list(range(3000))


def test_a_packed_log_of_an_earlier_run_is_never_overwritten(tmp_path: Path) -> None:
    write_lane(tmp_path, packer=PackAtOnce(), count=100).close("completed")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    warnings: list[str] = []
    sink = SegmentSink(tmp_path, 0, "scheduler", packer=PackAtOnce(), warn=warnings.append)
    tracing = Tracer(sink, HEADER, lambda: 7)
    tracing.emitter(DECIDE)(7, 1, 64, 5)
    tracing.close("completed")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert len(warnings) == 1
    assert "File exists" in warnings[0]


def test_a_packer_in_a_thread_is_done_when_it_is_drained(tmp_path: Path) -> None:
    packer = Packer()
    assert packer.drain(0)
    write_lane(tmp_path, packer=packer, count=10_000).close("completed")
    assert packer.drain(60)
    assert {path.suffix for path in tmp_path.glob("*.jsonl*")} == {".gz"}
    assert nodes(tmp_path) == list(range(10_000))


def test_a_drain_does_not_wait_longer_than_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = Event()
    one = sealed(tmp_path / NAME)
    monkeypatch.setattr(packing, "pack", lambda path: go_on.wait(60) and path)
    packer = Packer()
    packer.submit(one)
    assert not packer.drain(0.01)
    go_on.set()


def test_whatever_one_file_suffers_the_next_one_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = sealed(tmp_path / "bad"), sealed(tmp_path / "good")
    real = packing.pack

    def some(path: Path) -> Path:
        if path.name == "bad":
            raise MemoryError
        return real(path)

    monkeypatch.setattr(packing, "pack", some)
    packer = Packer()
    packer.submit(bad)
    packer.submit(good)
    assert packer.drain(60)
    assert sorted(os.listdir(tmp_path)) == ["bad", "good.gz"]


def test_where_no_thread_can_be_had_files_stay_as_they_are(tmp_path: Path) -> None:
    def refuse(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    packer = Packer(refuse)
    write_lane(tmp_path, packer=packer, count=5000).close("completed")
    assert packer.drain(0)
    assert {path.suffix for path in tmp_path.glob("*.jsonl*")} == {".jsonl"}
    assert nodes(tmp_path) == list(range(5000))


def test_a_forked_child_packs_nothing_of_its_parents(tmp_path: Path) -> None:
    packer = Packer()
    one, other = sealed(tmp_path / "one"), sealed(tmp_path / "other")
    packer.submit(one)
    assert packer.drain(60)
    child = os.fork()
    if child == 0:
        packer.submit(other)
        os._exit(0 if packer.drain(1) and (tmp_path / "other").exists() else 1)
    assert os.waitpid(child, 0)[1] == 0
    packer.submit(other)
    assert packer.drain(60)
    assert sorted(os.listdir(tmp_path)) == ["one.gz", "other.gz"]


def test_a_full_disk_under_a_packer_ends_neither_the_run_nor_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packing, "pack", full)
    write_lane(tmp_path, packer=PackAtOnce(), count=5000).close("completed")
    assert nodes(tmp_path) == list(range(5000))
