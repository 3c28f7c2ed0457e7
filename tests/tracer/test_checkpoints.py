"""Checkpoints are found without reading the lane, and reading goes on behind each as if all had been read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.logs import DECIDE, NOTE, SMALL_KINDS, place
from tracer import segments, tracer
from tracer.checkpoints import Checkpoints, Place
from tracer.log import LaneLog, find_logs
from tracer.pack import pack
from tracer.record import CHECKPOINT, header
from tracer.segments import SegmentSink
from tracer.tracer import Tracer

LINKS = 16
AXES = frozenset({"tp", "cp", "pp"})
CHAINS = frozenset({AXES})


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "LINKS", LINKS)
    monkeypatch.setattr(segments, "SEGMENT_BYTES_MIN", 1 << 13)
    monkeypatch.setattr(segments, "SEGMENT_BYTES_MAX", 1 << 13)


def written(folder: Path, count: int = 400, *, is_listed: bool = True) -> LaneLog:
    """A lane of so many compared records, now and then with a note that is long."""
    sink = SegmentSink(folder, 0, "io")
    tracing = Tracer(
        sink, header(place(), SMALL_KINDS, lane="io", run_id="run-a", tool_version="test"), lambda: 7
    )
    decide, note = tracing.emitter(DECIDE), tracing.emitter(NOTE)
    for node in range(count):
        decide(node, 1, 64, 5)
        if node % 50 == 0:
            note("x" * 3000)
    tracing.close("completed")
    if not is_listed:
        (folder / "rank0000.io.checkpoints").unlink()
    return find_logs(folder).lanes[0]


def every(lane: LaneLog) -> list[dict[str, Any]]:
    return [record for record in lane.records() if record["kind"] == CHECKPOINT.name]


def forward(checkpoints: Checkpoints) -> list[Place]:
    found: list[Place] = []
    while (one := checkpoints.behind(found[-1].at + 1 if found else 0, checkpoints.bytes)) is not None:
        found.append(one)
    return found


def backward(checkpoints: Checkpoints) -> list[Place]:
    found: list[Place] = []
    while (one := checkpoints.before(found[-1].at if found else checkpoints.bytes)) is not None:
        found.append(one)
    return found[::-1]


@pytest.mark.parametrize("is_listed", [True, False])
def test_all_are_found_from_either_end(tmp_path: Path, is_listed: bool) -> None:
    lane = written(tmp_path, is_listed=is_listed)
    checkpoints = Checkpoints(lane)
    assert checkpoints.is_listed == is_listed
    expected = [(one["seq"], one["count"]) for one in every(lane)]
    assert len(expected) == 25 and len(lane.files) > 3
    for found in (forward(checkpoints), backward(checkpoints)):
        assert [(one.seq, one.chains[AXES][0]) for one in found] == expected
        assert [one.records_of for one in found] == [{AXES: count} for _, count in expected]


@pytest.mark.parametrize("is_listed", [True, False])
def test_reading_goes_on_behind_each_with_the_same_records_and_end(tmp_path: Path, is_listed: bool) -> None:
    lane = written(tmp_path, is_listed=is_listed)
    records = list(lane.records())
    end = lane.trailer, lane.torn, lane.is_unsealed
    for one in forward(Checkpoints(lane)):
        assert list(lane.records_behind(one.behind)) == [r for r in records if r["seq"] > one.seq]
        assert (lane.trailer, lane.torn, lane.is_unsealed) == end


@pytest.mark.parametrize("is_listed", [True, False])
def test_one_with_so_many_records_is_found_whatever_the_guess(tmp_path: Path, is_listed: bool) -> None:
    checkpoints = Checkpoints(written(tmp_path, is_listed=is_listed))
    for guess in (0.0, 0.3, 1.0):
        series = checkpoints.of(CHAINS)
        for count in range(0, 401, LINKS):
            found = series.with_records(count, guess)
            assert (None if found is None else found.records(CHAINS)) == (count or None)
        assert series.with_records(LINKS + 1, guess) is None


@pytest.mark.parametrize("is_listed", [True, False])
def test_the_last_one_within_a_limit_is_found_by_halves(tmp_path: Path, is_listed: bool) -> None:
    checkpoints = Checkpoints(written(tmp_path, is_listed=is_listed))
    for limit in range(0, 420, 7):
        found = checkpoints.last_of(lambda one, limit=limit: one.records(CHAINS) <= limit)  # type: ignore[misc]
        assert (0 if found is None else found.records(CHAINS)) == min(limit // LINKS * LINKS, 400)


def test_those_behind_an_end_are_not_found(tmp_path: Path) -> None:
    checkpoints = Checkpoints(written(tmp_path))
    checkpoints.end = forward(checkpoints)[10].at
    assert len(forward(checkpoints)) == len(backward(checkpoints)) == 10
    assert checkpoints.of(CHAINS).with_records(11 * LINKS, 0.5) is None


def test_text_that_looks_like_one_is_none(tmp_path: Path) -> None:
    sink = SegmentSink(tmp_path, 0, "io")
    tracing = Tracer(
        sink, header(place(), SMALL_KINDS, lane="io", run_id="run-a", tool_version="test"), lambda: 7
    )
    note = tracing.emitter(NOTE)
    for _ in range(9):
        note('"kind":"checkpoint"')
        note({"kind": "checkpoint", "chains": {}, "records_of": {"tp": 1}, "notes": {}, "seq": 1})
    tracing.close("completed")
    checkpoints = Checkpoints(find_logs(tmp_path).lanes[0])
    assert forward(checkpoints) == backward(checkpoints) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"no list at all\n",
        lambda data: data.replace(b'"end":', b'"end":1'),
        lambda data: data.replace(b'"file":2', b'"file":1'),
        lambda data: data.replace(b'"digest":"', b'"digest":"f'),
        lambda data: data.replace(b'"count":64', b'"count":65'),
        lambda data: data[: len(data) // 2],
        lambda data: b"",
    ],
)
def test_a_list_that_does_not_fit_the_log_is_not_believed(tmp_path: Path, spoil: Any) -> None:
    lane = written(tmp_path)
    path = tmp_path / "rank0000.io.checkpoints"
    path.write_bytes(spoil(path.read_bytes()))
    expected = [one["seq"] for one in every(lane)]
    found = [one.seq for one in forward(Checkpoints(lane))]
    # One that was cut has fewer, and each of them is in the log.
    assert found == expected[: len(found)] and found
    assert [one.seq for one in backward(Checkpoints(lane))] == found


def test_a_damaged_block_ends_what_is_read_behind_a_place(tmp_path: Path) -> None:
    lane = written(tmp_path)
    third = forward(Checkpoints(lane))[2]
    path = lane.files[third.behind.file]
    data = bytearray(path.read_bytes())
    data[third.behind.end + 20] ^= 1
    path.write_bytes(data)
    assert list(lane.records_behind(third.behind)) == []
    assert lane.torn is not None and "checksum differs" in lane.torn


def test_behind_a_place_in_a_file_that_was_never_closed(tmp_path: Path) -> None:
    sink = SegmentSink(tmp_path, 0, "io")
    tracing = Tracer(
        sink, header(place(), SMALL_KINDS, lane="io", run_id="run-a", tool_version="test"), lambda: 7
    )
    decide = tracing.emitter(DECIDE)
    for node in range(3 * LINKS + 5):
        decide(node, 1, 64, 5)
    (lane,) = find_logs(tmp_path).lanes
    last = Checkpoints(lane).before(1 << 40)
    assert last is not None
    assert [record["node"] for record in lane.records_behind(last.behind)] == [48, 49, 50, 51, 52]
    assert (lane.is_unsealed, lane.trailer) == (True, None)
    sink._unmap()


@pytest.mark.parametrize("is_last_packed", [True, False])
def test_packed_files_are_searched_by_what_was_written(tmp_path: Path, is_last_packed: bool) -> None:
    lane = written(tmp_path, is_listed=False)
    expected = [(one.seq, one.records(CHAINS)) for one in forward(Checkpoints(lane))]
    for path in lane.files if is_last_packed else lane.files[:-1]:
        pack(path)
        path.unlink()
    packed = find_logs(tmp_path).lanes[0]
    checkpoints = Checkpoints(packed)
    assert not checkpoints.is_listed
    for found in (forward(checkpoints), backward(checkpoints)):
        assert [(one.seq, one.records(CHAINS)) for one in found] == expected
    records = list(packed.records())
    for one in (found[0], found[12], found[-1]):
        behind = [record for record in records if record["seq"] > one.seq]
        assert list(packed.records_behind(one.behind)) == behind


def test_a_file_that_another_tool_has_packed_is_not_searched(tmp_path: Path) -> None:
    lane = written(tmp_path)
    first = lane.files[0]
    (tmp_path / f"{first.name}.gz").write_bytes(gzip.compress(first.read_bytes()))
    first.unlink()
    checkpoints = Checkpoints(find_logs(tmp_path).lanes[0])
    assert forward(checkpoints) == []
    assert not checkpoints.is_searchable


def test_one_that_does_not_count_records_is_passed_over(tmp_path: Path) -> None:
    lane = written(tmp_path, is_listed=False)
    for path in lane.files:
        data = path.read_bytes().replace(b'"records_of":{"tp,cp,pp":32}', b'"records_of":{}           ')
        path.write_bytes(data)
    counts = [one.records(CHAINS) for one in forward(Checkpoints(find_logs(tmp_path).lanes[0]))]
    assert counts[:3] == [16, 48, 64]


def test_every_entry_is_a_line_of_its_own(tmp_path: Path) -> None:
    written(tmp_path)
    lines = (tmp_path / "rank0000.io.checkpoints").read_bytes().splitlines()
    assert [json.loads(line)["record"]["count"] for line in lines] == list(range(16, 401, 16))
