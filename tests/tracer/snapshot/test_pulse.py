"""Whether threads of another process get a turn, by what its heart has written."""

from __future__ import annotations

import time
from pathlib import Path

from tests.support.logs import SMALL_KINDS, place
from tests.support.sleepers import SIZES
from tracer.heart import Heart
from tracer.record import HEART_LANE, header
from tracer.segments import SegmentSink
from tracer.snapshot.pulse import BEHIND_BYTES, Pulse
from tracer.tracer import Tracer


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def heart(folder: Path) -> Heart:
    """One that beats when it is told to."""
    head = header(place(3, SIZES), SMALL_KINDS, lane=HEART_LANE, run_id="pulse", tool_version="test")
    sink = SegmentSink(folder, 3, HEART_LANE)
    return Heart(
        Tracer(sink, head, time.monotonic_ns), sink, {}, folder, 3, clock=time.monotonic_ns, main="scheduler"
    )


def test_a_heart_that_writes_over_its_last_beat_is_not_still(tmp_path: Path) -> None:
    clock, beats = Clock(), heart(tmp_path)
    beats.beat()
    pulse = Pulse(tmp_path, 3, clock)
    clock.now_s += 2
    assert (pulse.is_there, pulse.still_s()) == (True, 2)
    beats.beat()
    assert pulse.still_s() == 0
    clock.now_s += 3
    assert pulse.still_s() == 3


def test_a_beat_in_the_next_file_is_one(tmp_path: Path) -> None:
    clock = Clock()
    (tmp_path / "rank0003.heart.000.jsonl").write_bytes(b"x" * BEHIND_BYTES * 2 + b"\0" * 4096)
    pulse = Pulse(tmp_path, 3, clock)
    clock.now_s += 2
    (tmp_path / "rank0003.heart.001.jsonl").write_bytes(b"x")
    assert pulse.still_s() == 0
    clock.now_s += 2
    (tmp_path / "rank0003.heart.1000.jsonl").write_bytes(b"x")
    assert pulse.still_s() == 0


def test_another_rank_has_another_heart(tmp_path: Path) -> None:
    heart(tmp_path).beat()
    assert not Pulse(tmp_path, 4).is_there
    assert not Pulse(tmp_path / "missing", 3).is_there
