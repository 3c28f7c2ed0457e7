"""What a process says of its lanes while they say nothing, and what it keeps when it is asked to."""

from __future__ import annotations

import stat
import time
from pathlib import Path

from tests.support.logs import DECIDE, SMALL_KINDS, place
from tracer.freeze import FREEZES_MAX, REQUEST_NAME, freeze
from tracer.heart import KEPT_EVERY, Heart
from tracer.log import LaneLog, find_logs
from tracer.record import HEART_LANE, header
from tracer.segments import SegmentSink
from tracer.sinks import MemorySink
from tracer.tracer import Tracer


def head(lane: str) -> dict[str, object]:
    return header(place(), SMALL_KINDS, lane=lane, run_id="run-a", tool_version="test")


class Body:
    """A process with one lane and a heart, and a clock that is set by hand."""

    def __init__(self, folder: Path, *, limit_bytes: int | None = None, period_s: float = 1.0) -> None:
        self.now_ns = 0
        sink = SegmentSink(folder, 0, "scheduler", limit_bytes=limit_bytes)
        self.tracer = Tracer(sink, head("scheduler"), lambda: self.now_ns, has_steps=True)
        self.emit = self.tracer.emitter(DECIDE)
        own = SegmentSink(folder, 0, HEART_LANE)
        self.heart = Heart(
            Tracer(own, head(HEART_LANE), lambda: self.now_ns),
            own,
            {"scheduler": self.tracer},
            folder,
            0,
            clock=lambda: self.now_ns,
            main="scheduler",
            period_s=period_s,
        )

    def beat(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self.heart.beat()


def beats(folder: Path) -> list[dict[str, object]]:
    lane = next(lane for lane in find_logs(folder).lanes if lane.lane == HEART_LANE)
    return [record for record in lane.records() if record["kind"] == "heartbeat"]


def test_while_nobody_moves_one_beat_is_written_over(tmp_path: Path) -> None:
    body = Body(tmp_path)
    body.emit(1, 1, 64, 5)
    for second in range(1, 1001):
        body.beat(second)
    (beat,) = beats(tmp_path)
    assert (beat["count"], beat["seqs"], beat["still_ns"]) == (1000, [2], [999])


def test_while_somebody_moves_a_beat_is_kept_now_and_then(tmp_path: Path) -> None:
    body = Body(tmp_path)
    for second in range(1, 1 + 3 * KEPT_EVERY):
        body.tracer.step = second
        body.emit(second, 1, 64, 5)
        body.beat(second)
    found = beats(tmp_path)
    # Each was written over until the next one was due.
    assert [beat["count"] for beat in found] == [KEPT_EVERY, 2 * KEPT_EVERY, 3 * KEPT_EVERY]
    assert found[-1]["steps"] == [3 * KEPT_EVERY]
    assert [beat["seq"] for beat in found] == list(range(1, len(found) + 1))


def test_a_lane_that_stands_still_beside_one_that_moves_is_seen_to(tmp_path: Path) -> None:
    body = Body(tmp_path)
    sink = MemorySink()
    other = Tracer(sink, head("io"), lambda: body.now_ns)
    body.heart._lanes["io"] = other
    body.heart._seen.append(-1)
    body.heart._moved_ns.append(0)
    for second in range(1, 8):
        body.emit(second, 1, 64, 5)
        body.beat(second)
    assert beats(tmp_path)[-1]["still_ns"] == [0, 6]


def test_a_heart_in_a_thread_beats_until_it_is_stopped_and_closes_its_log(tmp_path: Path) -> None:
    body = Body(tmp_path, period_s=0.001)
    body.heart.start()
    deadline = time.monotonic() + 60
    while not (found := beats(tmp_path)) or found[-1]["count"] < 3:  # type: ignore[operator]
        assert time.monotonic() < deadline, "no beat"
        time.sleep(0.002)
    body.heart.stop("completed")
    lane = next(lane for lane in find_logs(tmp_path).lanes if lane.lane == HEART_LANE)
    list(lane.records())
    assert (lane.outcome, body.heart._thread.is_alive()) == ("completed", False)


def test_what_a_ring_has_is_kept_when_somebody_asks_and_the_ring_goes_on(tmp_path: Path) -> None:
    body = Body(tmp_path, limit_bytes=40_000)
    for node in range(1000):
        body.emit(node, 1, 64, 5)
    (tmp_path / REQUEST_NAME).touch()
    body.heart.look_for_request()
    body.heart.look_for_request()
    for node in range(1000, 3000):
        body.emit(node, 1, 64, 5)
    body.tracer.close("completed")
    body.heart.stop("completed")
    (folder,) = tmp_path.glob("frozen-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    kept = [record["node"] for record in lane_of(folder).records() if record["kind"] == DECIDE.name]
    assert 999 in kept
    assert kept == list(range(kept[0], kept[-1] + 1))
    newest = [record["node"] for record in lane_of(tmp_path).records() if record["kind"] == DECIDE.name]
    assert newest[0] > 999 and newest[-1] == 2999
    heart = next(lane for lane in find_logs(tmp_path).lanes if lane.lane == HEART_LANE)
    (told,) = [record for record in heart.records() if record["kind"] == "freeze"]
    assert (told["folder"], told["reason"]) == (folder.name, "asked")


def lane_of(folder: Path) -> LaneLog:
    return next(lane for lane in find_logs(folder).lanes if lane.lane == "scheduler")


def test_a_disk_does_not_fill_with_what_was_kept(tmp_path: Path) -> None:
    (tmp_path / "rank0000.scheduler.000.jsonl").write_text("{}\n")
    found = [freeze(tmp_path, 0, number * 1_000_000) for number in range(1, FREEZES_MAX + 2)]
    assert [kept.files for kept in found] == [1] * FREEZES_MAX + [0]
    assert found[-1].reason == "too_many"
    # Another rank's files still go where the first rank's went.
    (tmp_path / "rank0001.scheduler.000.jsonl").write_text("{}\n")
    assert freeze(tmp_path, 1, 1_000_000).files == 1


def test_a_folder_that_is_gone_costs_nothing_but_the_copy(tmp_path: Path) -> None:
    kept = freeze(tmp_path / "gone", 0, 1_000_000)
    assert (kept.files, kept.reason) == (0, "no_such_file_or_directory")
