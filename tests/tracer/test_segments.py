"""Rings with a packer: their bound holds at every moment, and what is new is never the price of it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.logs import DECIDE, NOTE, SMALL_KINDS, place
from tracer import segments
from tracer.log import find_logs
from tracer.pack import PackAtOnce, Packer, Sealed
from tracer.record import header
from tracer.segments import BLOCK_BYTES, SEGMENT_BYTES_MIN, SegmentSink
from tracer.tracer import Tracer

ROOT = Path(__file__).resolve().parents[2]
HEADER = header(place(), SMALL_KINDS, lane="scheduler", run_id="run-a", tool_version="test")


def open_lane(folder: Path, **options: Any) -> Tracer:
    return Tracer(SegmentSink(folder, 0, "scheduler", **options), HEADER, lambda: 7)


def bytes_in(folder: Path) -> int:
    found = 0
    for path in folder.iterdir():
        try:
            found += path.stat().st_size
        except FileNotFoundError:
            # A packer works beside us.
            continue
    return found


def nodes(folder: Path) -> list[int]:
    (lane,) = find_logs(folder).lanes
    found = [record["node"] for record in lane.records() if record["kind"] == DECIDE.name]
    assert lane.torn is None or lane.is_unsealed, lane.torn
    return found


class Idle:
    """A packer that never comes to it."""

    def submit(self, sealed: Sealed) -> None:
        pass


@pytest.mark.parametrize("limit_bytes", [40_000, 8 * SEGMENT_BYTES_MIN])
@pytest.mark.parametrize("packer", [None, PackAtOnce(), Idle(), Packer()])
def test_a_ring_is_within_its_limit_at_every_moment(packer: Any, limit_bytes: int, tmp_path: Path) -> None:
    tracing = open_lane(tmp_path, limit_bytes=limit_bytes, packer=packer)
    emit = tracing.emitter(DECIDE)
    for node in range(12_000):
        emit(node, 1, 64, 5)
        if node % 20 == 0:
            assert bytes_in(tmp_path) <= limit_bytes
    tracing.close("completed")
    if isinstance(packer, Packer):
        assert packer.drain(60)
    assert bytes_in(tmp_path) <= limit_bytes
    read = nodes(tmp_path)
    assert read == list(range(read[0], 12_000))
    # A packed ring keeps several times what a plain one would.
    if isinstance(packer, PackAtOnce):
        assert len(read) > 3 * 40_000 // 120


def test_a_ring_is_within_its_limit_while_a_file_is_there_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_bytes = 40_000
    largest = 0
    real_unlink, real_replace = os.unlink, os.replace

    def look() -> None:
        nonlocal largest
        largest = max(largest, bytes_in(tmp_path))

    def unlink(path: Any) -> None:
        look()
        real_unlink(path)

    def replace(source: Any, target: Any) -> None:
        look()
        real_replace(source, target)

    monkeypatch.setattr(os, "unlink", unlink)
    monkeypatch.setattr(os, "replace", replace)
    drawn = random.Random(3)
    tracing = open_lane(tmp_path, limit_bytes=limit_bytes, packer=PackAtOnce())
    note = tracing.emitter(NOTE)
    for _ in range(1500):
        note(f"{drawn.getrandbits(800):x}")
    tracing.close("completed")
    assert 0 < largest <= limit_bytes


def test_files_that_are_too_old_go_when_the_next_one_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(segments.time, "monotonic", lambda: now[0])
    tracing = open_lane(tmp_path, age_s=100.0, packer=PackAtOnce())
    emit = tracing.emitter(DECIDE)
    for node in range(60_000):
        now[0] = node / 200
        emit(node, 1, 64, 5)
    tracing.close("completed")
    read = nodes(tmp_path)
    assert read == list(range(read[0], 60_000))
    # What was sealed in the last 100 seconds is there, which are 20,000 records, and not all of the rest.
    assert 0 < read[0] <= 40_000
    (lane,) = find_logs(tmp_path).lanes
    assert lane.counts_before is not None
    assert lane.counts_before[DECIDE.name] == read[0]


def test_nothing_is_too_old_without_a_limit_of_age(tmp_path: Path) -> None:
    tracing = open_lane(tmp_path, packer=PackAtOnce())
    emit = tracing.emitter(DECIDE)
    for node in range(5000):
        emit(node, 1, 64, 5)
    tracing.close("completed")
    assert nodes(tmp_path) == list(range(5000))


KILLED = """
import os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.tracer.test_segments import DECIDE, Packer, open_lane
tracing = open_lane(Path({folder!r}), limit_bytes={limit}, packer=Packer())
emit = tracing.emitter(DECIDE)
node = 0
while True:
    emit(node, 1, 64, 5)
    os.write(1, b"%d\\n" % node)
    node += 1
"""


@pytest.mark.parametrize(
    ("limit", "acknowledged"),
    [(None, 20_000), (8_000_000, 20_000), (200_000, 20_000), (40_000, 3001), (40_000, 4177)],
)
def test_a_process_killed_beside_its_packer_loses_nothing_that_is_new(
    limit: int | None, acknowledged: int, tmp_path: Path
) -> None:
    script = KILLED.format(root=str(ROOT), folder=str(tmp_path), limit=limit)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        for _ in range(acknowledged):
            last = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split(b"\n")[:-1]
    last = int(rest[-1]) if rest else last
    assert last >= acknowledged - 1
    read = nodes(tmp_path)
    assert read == list(range(read[0], len(read) + read[0]))
    assert last <= read[-1] <= last + 1
    if limit is None or limit > 1_000_000:
        # There is room for all of them.
        assert read[0] == 0
    if limit is not None:
        assert bytes_in(tmp_path) <= limit


def test_every_line_of_a_sealed_file_is_under_a_checksum(tmp_path: Path) -> None:
    tracing = open_lane(tmp_path)
    emit = tracing.emitter(DECIDE)
    for node in range(3000):
        emit(node, 1, 64, 5)
    tracing.close("completed")
    for path in tmp_path.glob("*.jsonl"):
        start = at = 0
        data = path.read_bytes()
        for line in data.splitlines(keepends=True):
            if line.startswith(b'{"kind":"block"'):
                seal = json.loads(line)
                assert seal["bytes"] == at - start <= BLOCK_BYTES
                assert seal["crc32"] == f"{zlib.crc32(data[start:at]):08x}"
                start = at + len(line)
            at += len(line)
        assert start == len(data)


@pytest.mark.parametrize("length", [*range(64_900, 65_700, 50), 131_000, 4_194_304])
def test_a_line_of_any_length_fits(length: int, tmp_path: Path) -> None:
    tracing = open_lane(tmp_path)
    note = tracing.emitter(NOTE)
    for text in ("a", "b" * length, "c", "d" * length):
        note(text)
    tracing.close("completed")
    (lane,) = find_logs(tmp_path).lanes
    assert [len(record["text"]) for record in lane.records()] == [1, length, 1, length]
    assert lane.is_complete


def test_lines_taken_back_are_gone_from_the_file(tmp_path: Path) -> None:
    sink = SegmentSink(tmp_path, 0, "scheduler")
    sink.open(lambda: b'{"a":1}')
    start = sink.position()
    sink.write(b'{"b":2}')
    sink.write(b'{"c":3}')
    assert sink.since(start) == b'{"b":2}\n{"c":3}\n'
    sink.rewind(start)
    assert sink.since(start) == b""
    (path,) = tmp_path.iterdir()
    assert path.read_bytes().rstrip(b"\0") == b'{"a":1}\n'
    sink.write(b'{"d":4}')
    assert sink.rewrite(start, b'{"e":5}')
    sink.close()
    assert path.read_bytes().splitlines()[:2] == [b'{"a":1}', b'{"e":5}']
    assert sink.since(start) is None
    assert not sink.rewrite(start, b'{"f":6}')


def test_lines_of_a_block_that_was_closed_are_final(tmp_path: Path) -> None:
    sink = SegmentSink(tmp_path, 0, "scheduler")
    sink.open(lambda: b'{"a":1}')
    start = sink.position()
    for number in range(3000):
        sink.write(b'{"number":%06d,"text":"xxxxxxxxxxxxxxxxx"}' % number)
    assert sink.since(start) is None
    assert not sink.rewrite(start, b"{}")


def test_a_sink_that_was_closed_swallows_what_comes(tmp_path: Path) -> None:
    tracing = open_lane(tmp_path, limit_bytes=40_000, packer=PackAtOnce())
    emit = tracing.emitter(DECIDE)
    emit(1, 1, 64, 5)
    tracing.close("completed")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for node in range(2000):
        emit(node, 1, 64, 5)
    tracing.close("completed")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
