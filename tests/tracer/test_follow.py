"""Following a log gives every record once, when nobody can take it back any more."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random
from shutil import rmtree
from threading import Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.logs import DECIDE, SMALL_KINDS, line, lines, place, write_lane
from tracer.errors import LogError
from tracer.follow import READ_BYTES, Follower, LaneTail
from tracer.log import find_logs
from tracer.record import header
from tracer.segments import SegmentSink
from tracer.sinks import segment_name
from tracer.tracer import Tracer

Fields = Mapping[str, Any]


def note(step: int, **more: Any) -> dict[str, Any]:
    return {"kind": "note", "step": step, **more}


IDLE = {"kind": "idle", "step": 9, "first_step": 5, "count": 5, "records": 1, "advance": []}


Follow = Callable[[Path], Follower]


@pytest.fixture
def follow() -> Iterator[Follow]:
    """A follower whose files are closed when the test has ended."""
    with ExitStack() as stack:

        def begin(place: Path) -> Follower:
            return stack.enter_context(closing(Follower(place)))

        yield begin


def steps(follower: Follower, *, is_last: bool = False) -> list[int]:
    """The steps of the records that one look finds."""
    return [record["step"] for _tail, records in follower.poll(is_last=is_last) for record in records]


class Growing:
    """A file of one lane, as a writer leaves it: lines, then zero bytes."""

    def __init__(self, folder: Path, index: int = 0, seq: int = 0, **options: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / segment_name(options.get("rank", 0), options.get("lane", "scheduler"), index)
        told = header(
            place(options.get("rank", 0), options.get("sizes", {})),
            SMALL_KINDS,
            lane=options.get("lane", "scheduler"),
            run_id="run-a",
            tool_version="test",
        )
        self.data = line(seq, {"kind": "header", **told})
        self.seq = seq or 1
        self.path.write_bytes(self.data + bytes(8 * READ_BYTES))

    def add(self, *records: Fields) -> None:
        for record in records:
            self.put(line(self.seq, record))
            self.seq += 1

    def put(self, data: bytes) -> None:
        with self.path.open("r+b") as file:
            file.seek(len(self.data))
            file.write(data)
        self.data += data

    def take_back(self, count: int) -> None:
        """Remove the newest lines, as an idle step is."""
        kept = b"".join(self.data.splitlines(keepends=True)[:-count])
        with self.path.open("r+b") as file:
            file.seek(len(kept))
            file.write(bytes(len(self.data) - len(kept)))
        self.data = kept
        self.seq -= count

    def seal(self) -> None:
        self.path.write_bytes(self.data)

    def end(self) -> None:
        self.put(line(self.seq, {"kind": "trailer", "outcome": "completed", "records": self.seq}))
        self.seal()


def test_the_newest_step_waits_for_a_later_one(tmp_path: Path, follow: Follow) -> None:
    growing, follower = Growing(tmp_path), follow(tmp_path)
    growing.add(note(1), note(2), note(2))
    assert steps(follower) == [1]
    growing.add(note(3))
    assert steps(follower) == [2, 2]
    assert steps(follower) == []


def test_a_step_that_is_taken_back_never_comes_out(tmp_path: Path, follow: Follow) -> None:
    growing, follower = Growing(tmp_path), follow(tmp_path)
    growing.add(note(1), note(2))
    assert steps(follower) == [1]
    growing.take_back(1)
    growing.add(note(3))
    assert steps(follower) == []
    growing.add(note(4))
    assert steps(follower) == [3]


def test_a_record_of_idle_steps_waits_as_long_as_it_may_be_rewritten(tmp_path: Path, follow: Follow) -> None:
    growing, follower = Growing(tmp_path), follow(tmp_path)
    growing.add(note(4), IDLE, note(10))
    assert steps(follower) == [4]
    growing.add(note(11))
    assert steps(follower) == [9, 10]


def test_a_run_of_idle_steps_goes_on_behind_a_checkpoint(tmp_path: Path, follow: Follow) -> None:
    growing, follower = Growing(tmp_path), follow(tmp_path)
    growing.add(note(4), IDLE, {"kind": "checkpoint", "step": 7}, note(10))
    assert steps(follower) == [4]
    growing.add(note(11))
    assert steps(follower) == [9, 7, 10]


def test_a_step_waits_with_the_idle_record_that_is_tried_out_behind_it(
    tmp_path: Path, follow: Follow
) -> None:
    growing, follower = Growing(tmp_path), follow(tmp_path)
    growing.add(note(4), note(5), note(5), {**IDLE, "step": 5, "first_step": 5, "count": 0})
    assert steps(follower) == [4]
    growing.take_back(3)
    growing.add({**IDLE, "step": 5, "first_step": 5, "count": 1}, note(6), note(7))
    assert steps(follower) == [5, 6]


def test_a_record_that_is_just_being_rewritten_is_no_damage(tmp_path: Path, follow: Follow) -> None:
    growing, follower = Growing(tmp_path), follow(tmp_path)
    growing.add(note(4), note(5), IDLE)
    whole = growing.data
    growing.take_back(1)
    growing.put(b'{"seq":3,"step":10"step":9\n')
    assert steps(follower) == [4]
    growing.data = whole[: whole.rindex(b'{"seq":3')]
    growing.seq = 3
    growing.add(IDLE, note(10), note(11))
    assert steps(follower) == [5, 9, 10]


def test_damage_is_told_when_nothing_can_change_it_any_more(tmp_path: Path, follow: Follow) -> None:
    growing, follower = Growing(tmp_path), follow(tmp_path)
    growing.add(note(4))
    growing.put(b"damage\n")
    assert steps(follower) == []
    growing.add(note(5), note(6))
    assert steps(follower) == [4]
    assert "not a JSON object" in follower.tails[0].torn


def test_a_checksum_makes_what_is_before_it_final(tmp_path: Path, follow: Follow) -> None:
    growing, follower = Growing(tmp_path), follow(tmp_path)
    growing.add(note(1), note(1))
    growing.put(b'{"kind":"block","bytes":1,"crc32":"00000000"}\n')
    assert steps(follower) == [1, 1]
    growing.add(note(1))
    assert steps(follower) == []


def test_a_trailer_ends_the_lane_and_all_is_final(tmp_path: Path, follow: Follow) -> None:
    growing, follower = Growing(tmp_path), follow(tmp_path)
    growing.add(note(1))
    growing.end()
    assert steps(follower) == [1]
    assert follower.is_over


def test_half_a_line_waits(tmp_path: Path, follow: Follow) -> None:
    growing, follower = Growing(tmp_path), follow(tmp_path)
    growing.add(note(1))
    whole = line(2, note(2))
    growing.put(whole[:20])
    assert steps(follower, is_last=True) == [1]
    growing.put(whole[20:])
    assert steps(follower, is_last=True) == [2]


def test_with_the_last_look_comes_what_is_not_final(tmp_path: Path, follow: Follow) -> None:
    growing, follower = Growing(tmp_path), follow(tmp_path)
    growing.add(note(1), note(2))
    assert steps(follower, is_last=True) == [1, 2]


def test_a_step_larger_than_one_reading_comes_whole(tmp_path: Path, follow: Follow) -> None:
    growing, follower = Growing(tmp_path), follow(tmp_path)
    growing.add(*[note(1, text="x" * 1000)] * (2 * READ_BYTES // 1000), note(2))
    assert len(steps(follower)) == 2 * READ_BYTES // 1000


def test_the_next_file_makes_the_one_before_final(tmp_path: Path, follow: Follow) -> None:
    first, follower = Growing(tmp_path), follow(tmp_path)
    first.add(note(1))
    assert steps(follower) == []
    first.seal()
    second = Growing(tmp_path, 1, first.seq)
    second.add(note(1), note(2))
    assert steps(follower) == [1, 1]


def test_a_file_that_is_packed_while_it_is_read_is_read_to_its_end(tmp_path: Path, follow: Follow) -> None:
    first, follower = Growing(tmp_path), follow(tmp_path)
    first.add(note(1), note(2))
    assert steps(follower) == [1]
    first.add(note(3))
    first.seal()
    pack(first.path)
    Growing(tmp_path, 1, first.seq).add(note(4), note(5))
    assert steps(follower) == [2, 3, 4]


def test_files_that_were_packed_before_are_read_once(tmp_path: Path, follow: Follow) -> None:
    first = Growing(tmp_path)
    first.add(note(1), note(2))
    first.seal()
    pack(first.path)
    follower = follow(tmp_path)
    assert steps(follower) == [1, 2]
    assert steps(follower) == []
    Growing(tmp_path, 1, first.seq).add(note(3), note(4))
    assert steps(follower) == [3]


def test_a_ring_that_was_faster_goes_on_where_it_is_and_says_what_is_lost(
    tmp_path: Path, follow: Follow
) -> None:
    first, follower = Growing(tmp_path), follow(tmp_path)
    first.add(note(1), note(2))
    assert steps(follower) == [1]
    first.path.unlink()
    Growing(tmp_path, 3, 50).add(note(7), note(8))
    # What is open is read to its end; the two files behind it are gone.
    assert steps(follower) == [2, 7]
    (tail,) = follower.tails
    assert tail.lost == ["rank0000.scheduler.003.jsonl: 47 records were gone before they were read"]


def test_a_line_that_makes_no_sense_ends_its_lane_and_says_why(tmp_path: Path, follow: Follow) -> None:
    growing, follower = Growing(tmp_path), follow(tmp_path)
    growing.add(note(1))
    growing.put(b'{"seq":7,"step":2,"time_ns":0,"kind":"note"}\n')
    assert steps(follower, is_last=True) == [1]
    (tail,) = follower.tails
    assert tail.is_over
    assert tail.torn == (
        "rank0000.scheduler.000.jsonl: reading stopped before record 2: it carries seq 7: the log has a gap"
    )


@pytest.mark.parametrize(
    "bad",
    [
        b"no json\n",
        b"[]\n",
        b"3\n",
        b'{"seq":1,"step":"x","time_ns":0,"kind":"note"}\n',
        b'{"seq":1,"step":1,"time_ns":9223372036854775808,"kind":"note"}\n',
        b'{"seq":1,"step":1,"time_ns":0,"kind":3}\n',
        b'{"seq":1,"step":1,"time_ns":0,"kind":"note","phase":3}\n',
        b'{"seq":1,"step":1,"time_ns":0,"kind":"header"}\n',
        b'{"seq":true,"step":1,"time_ns":0,"kind":"note"}\n',
        b"\n",
        b"[" * 2000 + b"\n",
    ],
)
def test_no_line_raises(tmp_path: Path, follow: Follow, bad: bytes) -> None:
    growing, follower = Growing(tmp_path), follow(tmp_path)
    growing.put(bad)
    assert steps(follower, is_last=True) == []
    assert follower.tails[0].torn


def test_lanes_that_come_later_are_followed_and_all_ranks_are_waited_for(
    tmp_path: Path, follow: Follow
) -> None:
    sizes = {"tp": 2}
    first, follower = Growing(tmp_path, sizes=sizes), follow(tmp_path)
    first.add(note(1))
    first.end()
    assert steps(follower) == [1] and not follower.is_over
    second = Growing(tmp_path, rank=1, sizes=sizes)
    second.add(note(2))
    assert steps(follower) == []
    second.end()
    assert steps(follower) == [2] and follower.is_over


def test_an_empty_folder_may_yet_be_filled(tmp_path: Path, follow: Follow) -> None:
    follower = follow(tmp_path)
    assert steps(follower) == [] and not follower.is_over
    growing = Growing(tmp_path)
    growing.add(note(1), note(2))
    assert steps(follower) == [1]


def test_a_file_without_its_header_yet_is_waited_for(tmp_path: Path, follow: Follow) -> None:
    (tmp_path / segment_name(0, "scheduler", 0)).write_bytes(bytes(100))
    follower = follow(tmp_path)
    assert steps(follower) == []
    Growing(tmp_path).add(note(1), note(2))
    assert steps(follower) == [1]


def test_another_major_version_is_refused_after_a_moment(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lane(tmp_path, [], version=[9, 0])
    follower = follow(tmp_path)
    assert steps(follower) == []
    monkeypatch.setattr("tracer.follow.HEADERLESS_S_MAX", -1.0)
    with pytest.raises(LogError, match=r"log version 9\.0"):
        steps(follower)


def test_a_folder_that_is_gone_ends_it(tmp_path: Path, follow: Follow) -> None:
    folder = tmp_path / "log"
    growing, follower = Growing(folder, sizes={"tp": 2}), follow(folder)
    growing.add(note(1), note(2))
    assert steps(follower) == [1]
    rmtree(folder)
    assert steps(follower) == [2] and follower.is_over


def test_no_such_folder_is_refused(tmp_path: Path, follow: Follow) -> None:
    with pytest.raises(LogError):
        follow(tmp_path / "nowhere")


def test_a_file_stands_for_its_lane(tmp_path: Path, follow: Follow) -> None:
    write_lane(tmp_path, [note(1)], rank=0, sizes={"tp": 2})
    path = write_lane(tmp_path, [note(2)], rank=1, sizes={"tp": 2})
    follower = follow(path)
    assert steps(follower) == [2] and follower.is_over


def pack(path: Path) -> None:
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20))
@settings(max_examples=60, deadline=None)
def test_what_is_followed_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, growth: list[tuple[int, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("log")
    growing, found, step = Growing(folder), [], 0
    with closing(Follower(folder)) as follower:
        for more, is_looked_at in growth:
            step += more
            growing.add(note(step))
            if more == 3:
                growing.seal()
                growing = Growing(folder, int(growing.path.name.split(".")[2]) + 1, growing.seq)
            if is_looked_at:
                found += steps(follower)
        growing.end()
        found += steps(follower)
    (lane,) = find_logs(folder).lanes
    assert found == [record["step"] for record in lane.records()] and lane.is_complete


def test_the_real_sinks_files_are_followed(tmp_path: Path, follow: Follow) -> None:
    told = lines([], outcome=None)[0][:-1]
    sink = SegmentSink(tmp_path, 0, "scheduler")
    sink.open(lambda: told)
    follower = follow(tmp_path)
    written = lines([note(step) for step in range(1, 4)], outcome=None)[1:]
    for each in written:
        sink.write(each[:-1])
    assert steps(follower) == [1, 2]
    sink.rewind((sink.position()[0], sink.position()[1] - len(written[-1])))
    assert steps(follower) == []
    sink.write(line(3, note(9))[:-1])
    sink.close()
    assert steps(follower, is_last=True) == [9]


def test_a_lane_that_folds_its_idle_steps_while_it_is_followed_comes_out_as_it_is_read(
    tmp_path: Path,
) -> None:
    def write() -> None:
        chance = Random(7)
        told = header(place(), SMALL_KINDS, lane="scheduler", run_id="run-a", tool_version="test")
        tracer = Tracer(SegmentSink(tmp_path, 0, "scheduler"), told, lambda: 0, has_steps=True)
        emit = tracer.emitter(DECIDE)
        for step in range(5000):
            is_idle = chance.random() < 0.8
            tracer.begin_step(step)
            for number in range(3):
                emit(number if is_idle else step, 1, 64, 9)
            tracer.end_step(is_idle=is_idle)
        tracer.close("completed")

    writer = Thread(target=write)
    writer.start()
    found = []
    with closing(Follower(tmp_path)) as follower:
        while not follower.is_over:
            is_last_look = not writer.is_alive()
            found += [record for _tail, records in follower.poll() for record in records]
            if is_last_look:
                break
    writer.join()
    (lane,) = find_logs(tmp_path).lanes
    assert found == list(lane.records()) and lane.is_complete
    assert {"idle", "checkpoint"} <= {record["kind"] for record in found}


def test_tails_of_lanes_are_in_the_order_of_ranks(tmp_path: Path, follow: Follow) -> None:
    for rank in (1, 0):
        write_lane(tmp_path, [note(rank)], rank=rank, sizes={"tp": 2})
    follower = follow(tmp_path)
    list(follower.poll())
    tails: Sequence[LaneTail] = follower.tails
    assert [tail.lane.rank for tail in tails] == [0, 1]
