"""A reader takes every good record and nothing behind the first bad one."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from consensus_checker.history import History
from tests.support.logs import NOTE as ANY_NOTE
from tests.support.logs import line, lines, place, write_lane, write_run
from tracer.errors import LogError
from tracer.log import LaneLog, find_logs
from tracer.record import Kind, header
from tracer.segments import SegmentSink
from tracer.tracer import Tracer

BACKUP = {"kind": "write_backup", "step": 1, "node": 17, "pages": 1, "tokens": 64, "host_pages_free": 5}
NOTE = {"kind": "note", "step": 2, "text": "x"}
NAME = "rank0000.scheduler.000.jsonl"


def read(path: Path) -> tuple[LaneLog, list[dict[str, Any]]]:
    (lane,) = find_logs(path).lanes
    return lane, list(lane.records())


def test_a_closed_lane_gives_its_records_and_its_trailer(tmp_path: Path) -> None:
    lane, records = read(write_lane(tmp_path, [BACKUP, NOTE]))
    assert records == [{"seq": 1, "time_ns": 0, **BACKUP}, {"seq": 2, "time_ns": 0, **NOTE}]
    assert lane.trailer is not None
    assert (lane.trailer["outcome"], lane.torn, lane.count) == ("completed", None, 2)
    assert lane.is_complete


def test_a_lane_knows_its_place_and_its_kinds(tmp_path: Path) -> None:
    lane, _ = read(write_lane(tmp_path, [], rank=3, sizes={"tp": 2, "pp": 2}))
    assert (lane.rank, lane.lane, lane.coordinates) == (3, "scheduler", {"dp": 0, "pp": 1, "cp": 0, "tp": 1})
    assert lane.kinds["write_backup"].needs == {"host_pages_free": "pages"}


def test_a_lane_without_a_trailer_is_cut_but_not_torn(tmp_path: Path) -> None:
    lane, records = read(write_lane(tmp_path, [BACKUP], outcome=None))
    assert (len(records), lane.torn, lane.trailer, lane.is_complete) == (1, None, None, False)


def test_a_lane_can_be_read_twice(tmp_path: Path) -> None:
    lane, records = read(write_lane(tmp_path, [BACKUP, NOTE]))
    assert records == list(lane.records())


def test_a_file_cut_at_any_byte_of_its_last_two_records_loses_only_what_was_cut(tmp_path: Path) -> None:
    path = write_lane(tmp_path, [BACKUP, NOTE, BACKUP], outcome=None)
    data = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(data) if byte == 0x0A]
    for cut in range(ends[-3], len(data)):
        path.write_bytes(data[:cut])
        lane, records = read(path)
        assert len(records) == sum(end <= cut for end in ends) - 1
        assert (lane.torn is None) == (cut in ends)


def test_a_file_cut_at_any_byte_and_filled_with_zeros_loses_only_what_was_cut(tmp_path: Path) -> None:
    path = write_lane(tmp_path, [BACKUP, NOTE, BACKUP], outcome=None)
    data = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(data) if byte == 0x0A]
    for cut in range(ends[-3], len(data) + 1):
        path.write_bytes(data[:cut] + bytes(5000))
        lane, records = read(path)
        assert len(records) == sum(end <= cut for end in ends) - 1
        assert lane.torn is not None


def test_zero_bytes_behind_the_last_record_are_named(tmp_path: Path) -> None:
    path = write_lane(tmp_path, [BACKUP], outcome=None)
    path.write_bytes(path.read_bytes() + bytes(200_000))
    lane, _ = read(path)
    assert lane.torn == (
        f"{NAME}: reading stopped before record 2: zero bytes, so the writer stopped without closing it"
    )


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"not json\n", "the line is not a JSON object (JSON is malformed: invalid character (byte 4))"),
        (b"[1,2]\n", "the line is not a JSON object (Expected `object`, got `array`)"),
        (b'{"seq":2}\n', "the line has no seq and kind"),
        (b'{"seq":"2","kind":"note"}\n', "the line has no seq and kind"),
        (b'{"seq":9,"kind":"note"}\n', "it carries seq 9: the log has a gap"),
        (b'{"seq":1,"kind":"note"}\n', "it carries seq 1: the log has a gap"),
        (b'{"seq":2,"kind":"header"}\n', "a header in the middle of a file"),
        (b"\0\0\0\n", "zero bytes, so the writer stopped without closing it"),
        (b'{"seq":2,"kind":"trailer","records":7}\n', "the trailer counts 7 lines before it, there are 2"),
    ],
)
def test_reading_stops_at_a_bad_line_in_the_middle(tmp_path: Path, bad: bytes, reason: str) -> None:
    head, first, _, *rest = lines([BACKUP, NOTE, NOTE])
    path = tmp_path / NAME
    path.write_bytes(b"".join([head, first, bad, *rest]))
    lane, records = read(path)
    assert ([1], f"{NAME}: reading stopped before record 2: {reason}") == (
        [record["seq"] for record in records],
        lane.torn,
    )


def test_a_line_with_two_objects_is_no_record(tmp_path: Path) -> None:
    head, first, second = lines([BACKUP, NOTE], outcome=None)
    path = tmp_path / NAME
    path.write_bytes(head + first[:-1] + b" " + second)
    lane, records = read(path)
    assert records == []
    assert lane.torn is not None


def test_bytes_that_are_not_utf8_end_the_readable_part(tmp_path: Path) -> None:
    head, first = lines([NOTE], outcome=None)
    path = tmp_path / NAME
    path.write_bytes(head + first.replace(b'"x"', b'"\xff"'))
    lane, records = read(path)
    assert records == []
    assert lane.torn is not None


def test_nothing_is_read_behind_a_trailer(tmp_path: Path) -> None:
    path = write_lane(tmp_path, [BACKUP])
    path.write_bytes(path.read_bytes() + line(3, NOTE))
    lane, records = read(path)
    assert len(records) == 1
    assert lane.torn == f"{NAME}: reading stopped before record 3: something stands behind the trailer"


def segments(folder: Path, *parts: list[bytes], first: int = 0) -> Path:
    """Write a lane in several segments; each repeats the header with the next record's seq."""
    head = json.loads(parts[0][0])
    for index, part in enumerate(parts):
        seq = json.loads(part[0])["seq"]
        own = part if index == 0 else [line(seq, head), *part]
        (folder / f"rank0000.scheduler.{index + first:03d}.jsonl").write_bytes(b"".join(own))
    return folder


def test_segments_are_read_as_one_lane(tmp_path: Path) -> None:
    every = lines([BACKUP, NOTE, BACKUP])
    lane, records = read(segments(tmp_path, every[:2], every[2:]))
    assert [record["seq"] for record in records] == [1, 2, 3]
    assert lane.is_complete
    assert lane.file_of(1).name == NAME
    assert lane.file_of(2).name == "rank0000.scheduler.001.jsonl"


def test_a_sealed_segment_with_zeros_left_in_it_is_read_on_behind_them(tmp_path: Path) -> None:
    every = lines([BACKUP, NOTE])
    segments(tmp_path, every[:2], every[2:])
    first = tmp_path / NAME
    first.write_bytes(first.read_bytes() + bytes(70_000))
    lane, records = read(tmp_path)
    assert (len(records), lane.torn) == (2, None)


def test_a_record_lost_between_two_segments_is_seen(tmp_path: Path) -> None:
    every = lines([BACKUP, NOTE, BACKUP])
    lane, records = read(segments(tmp_path, every[:2], every[3:]))
    assert len(records) == 1
    assert lane.torn == (
        "rank0000.scheduler.001.jsonl: reading stopped before record 2: "
        "it goes on with record 3 where 2 is due: records are lost"
    )


def test_a_missing_segment_is_seen(tmp_path: Path) -> None:
    every = lines([BACKUP, NOTE, BACKUP])
    segments(tmp_path, every[:2], every[2:3], every[3:])
    (tmp_path / "rank0000.scheduler.001.jsonl").unlink()
    lane, records = read(tmp_path)
    assert len(records) == 1
    assert lane.torn == (
        "rank0000.scheduler.002.jsonl: reading stopped before record 2: "
        "segment 001, which comes before it, is missing"
    )


def ring(folder: Path, *, counts: dict[str, int] | None, kept: int = 1) -> Path:
    """Segments 001 and 002 of a lane of five records, of which the first two are gone."""
    head, *every = lines([BACKUP, NOTE, BACKUP, NOTE, BACKUP])
    more = {} if counts is None else {"counts_before": counts}
    begun = [line(0, json.loads(head) | more), *every[2:]]
    starts = [line(3, json.loads(begun[0])), line(5, json.loads(head))]
    for index, part in enumerate((begun[1:3], begun[3:]), start=1):
        if index >= kept:
            path = folder / f"rank0000.scheduler.{index:03d}.jsonl"
            path.write_bytes(starts[index - 1] + b"".join(part))
    return folder


def test_a_lane_whose_first_segments_are_gone_begins_where_the_rest_does(tmp_path: Path) -> None:
    lane, records = read(ring(tmp_path, counts={"write_backup": 1, "note": 1}))
    assert [record["seq"] for record in records] == [3, 4, 5]
    assert (lane.is_complete, lane.cut, lane.count) == (True, "", 3)
    assert (lane.last_dropped_seq, lane.counts_before) == (2, {"write_backup": 1, "note": 1})
    assert lane.begin == "rank0000.scheduler.001.jsonl: the oldest records are gone, up to record 2"


def test_a_lane_that_nobody_counted_does_not_know_what_is_missing(tmp_path: Path) -> None:
    lane, records = read(ring(tmp_path, counts=None, kept=2))
    assert ([record["seq"] for record in records], lane.counts_before) == ([5], None)
    whole, _ = read(write_lane(tmp_path / "whole", [NOTE]))
    assert (whole.last_dropped_seq, whole.counts_before, whole.begin) == (0, {}, "")


def test_counts_that_are_no_counts_are_damage(tmp_path: Path) -> None:
    ring(tmp_path, counts={"note": -1}, kept=1)
    assert "its header is damaged" in find_logs(tmp_path).unreadable[0]


def test_only_a_file_that_was_never_cut_is_unsealed(tmp_path: Path) -> None:
    path = write_lane(tmp_path, [BACKUP], outcome=None)
    lane, _ = read(path)
    assert (lane.is_unsealed, lane.cut) == (False, f"{NAME}: cut behind record 1, without a trailer")
    path.write_bytes(path.read_bytes() + bytes(5000))
    assert read(path)[0].is_unsealed


def test_a_later_segment_without_a_header_tears_its_lane(tmp_path: Path) -> None:
    every = lines([BACKUP, NOTE])
    segments(tmp_path, every[:2], every[2:])
    (tmp_path / "rank0000.scheduler.001.jsonl").write_bytes(bytes(65536))
    lane, records = read(tmp_path)
    assert len(records) == 1
    assert lane.torn is not None
    assert lane.torn.startswith("rank0000.scheduler.001.jsonl")


def test_extents_say_how_far_each_file_is_readable(tmp_path: Path) -> None:
    path = write_lane(tmp_path, [BACKUP, NOTE], outcome=None)
    good = path.stat().st_size
    path.write_bytes(path.read_bytes() + b'{"seq":3')
    (lane,) = find_logs(path).lanes
    (extent,) = lane.extents()
    assert (extent.valid_bytes, extent.file_bytes, lane.count) == (good, good + 8, 2)


def test_another_major_version_is_refused(tmp_path: Path) -> None:
    write_lane(tmp_path, [], version=[2, 0])
    with pytest.raises(LogError, match=r"log version 2\.0, this reader knows 1\.x"):
        find_logs(tmp_path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    write_lane(tmp_path, [], format="other.log")
    with pytest.raises(LogError, match=r"format 'other\.log' is not hicache\.log"):
        find_logs(tmp_path)


def test_unknown_fields_of_a_newer_minor_version_are_ignored(tmp_path: Path) -> None:
    kinds = {"note": {"role": "note", "info": ["text"], "colour": "red"}}
    lane, records = read(write_lane(tmp_path, [{**NOTE, "new": 1}], version=[1, 9], kinds=(), surprise=[1]))
    assert (lane.header["surprise"], records[0]["new"]) == ([1], 1)
    lane, _ = read(write_lane(tmp_path, [], **{"version": [1, 9]}))
    assert kinds["note"]["role"] == lane.kinds["note"].role


def test_a_folder_without_logs_names_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(LogError) as caught:
        find_logs(tmp_path)
    assert str(caught.value) == (
        f"no logs in {tmp_path}\n"
        "  expected  rank0000.scheduler.000.jsonl, ...\n"
        f"  try       hicache zoo run local_host_room_decides_backup --out {tmp_path}"
    )


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="no such file or folder"):
        find_logs(tmp_path / "nowhere")


def test_a_file_of_any_name_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "other.txt"
    path.write_bytes(b"".join(lines([NOTE])))
    _, records = read(path)
    assert len(records) == 1


def test_a_rank_that_died_before_its_header_does_not_hide_the_others(tmp_path: Path) -> None:
    write_run(tmp_path, {0: [NOTE], 1: [NOTE]})
    (tmp_path / "rank0001.scheduler.000.jsonl").write_bytes(bytes(65536))
    run = find_logs(tmp_path)
    assert (run.ranks, run.world_size, run.missing_ranks) == ((0,), 2, (1,))
    assert run.unreadable == (
        "rank0001.scheduler.000.jsonl: it is empty: its writer stopped before the header was written",
    )


def test_a_damaged_header_is_refused_when_it_is_all_there_is(tmp_path: Path) -> None:
    write_lane(tmp_path, [], rank=0, kinds=(), world_size="four")
    with pytest.raises(LogError, match="its header is damaged"):
        find_logs(tmp_path)


def test_two_runs_in_one_folder_are_kept_apart(tmp_path: Path) -> None:
    write_lane(tmp_path, [NOTE], rank=0, run_id="run-a", sizes={"tp": 2})
    write_lane(tmp_path, [NOTE], rank=1, run_id="run-b", sizes={"tp": 2})
    run = find_logs(tmp_path)
    assert run.run_ids == ("run-a", "run-b")
    assert [(part.run_id, part.ranks, part.missing_ranks) for part in run.by_run_id()] == [
        ("run-a", (0,), (1,)),
        ("run-b", (1,), (0,)),
    ]


def test_a_segment_left_over_from_another_run_is_not_read_as_the_same_lane(tmp_path: Path) -> None:
    old, new = lines([NOTE, NOTE], run_id="old"), lines([NOTE, NOTE], run_id="new")
    segments(tmp_path, old[:2], old[2:])
    (tmp_path / NAME).write_bytes(b"".join(new[:2]))
    run = find_logs(tmp_path)
    assert run.run_ids == ("new", "old")
    for lane in run.lanes:
        list(lane.records())
    assert [(lane.count, lane.last_dropped_seq) for lane in run.lanes] == [(1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"world_size": 0}, "Expected `int` >= 1"),
        ({"world_size": 10**12}, "Expected `int` <= 1000000"),
        ({"world_size": 4}, "sizes {'dp': 1, 'pp': 1, 'cp': 1, 'tp': 2} make 2 ranks, not 4"),
        ({"rank": 2}, "rank 2 in a world of 2"),
        ({"rank": -1}, "Expected `int` >= 0"),
        ({"rank": 1}, "are those of rank 0, not 1"),
        ({"rank": True}, "Expected `int`, got `bool`"),
        ({"coordinates": {"dp": 0, "pp": 0, "cp": 0, "tp": 2}}, "tp 2 of 2"),
        ({"coordinates": {"dp": 0, "pp": 0, "cp": 0, "tp": -1}}, "Expected `int` >= 0"),
        ({"coordinates": {"tp": 0}}, "coordinates on ['tp'], sizes of ['cp', 'dp', 'pp', 'tp']"),
        ({"coordinates": {"dp": "0", "pp": 0, "cp": 0, "tp": 0}}, "Expected `int`, got `str`"),
        ({"sizes": {"tp": 10**9}}, "Expected `int` <= 1000000"),
        ({"sizes": ["tp"]}, "Expected `object`, got `array`"),
        ({"attempt": "first"}, "Expected `int`, got `str`"),
        ({"groups": {"tp0": [0, "1"]}}, "Expected `int`, got `str`"),
        ({"groups": {"tp0": [0, 7]}}, "rank 7 in a group, in a world of 2"),
        ({"lane": 3}, "Expected `str`, got `int`"),
        ({"tool_version": None}, "Expected `str`, got `null`"),
        ({"config": []}, "Expected `object`, got `array`"),
        ({"step": "one"}, "Expected `int`, got `str`"),
    ],
)
def test_a_header_that_cannot_be_true_is_damaged(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    head, *rest = lines([NOTE], rank=0, sizes={"tp": 2})
    broken = json.dumps({**json.loads(head), **changes}).encode() + b"\n"
    (tmp_path / NAME).write_bytes(b"".join([broken, *rest]))
    write_lane(tmp_path, [NOTE], rank=1, sizes={"tp": 2})
    run = find_logs(tmp_path)
    assert run.ranks == (1,)
    (unreadable,) = run.unreadable
    assert unreadable.startswith(f"{NAME}: its header is damaged: ")
    assert reason in unreadable


def test_a_header_without_sizes_is_taken_at_its_word(tmp_path: Path) -> None:
    head, *rest = lines([NOTE], rank=3, sizes={"tp": 4})
    bare = json.dumps({**json.loads(head), "sizes": {}, "coordinates": {}}).encode() + b"\n"
    (tmp_path / NAME).write_bytes(b"".join([bare, *rest]))
    lane, records = read(tmp_path)
    assert (lane.rank, len(records)) == (3, 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step": "2"}, "its step is '2', not a number of 64 bits"),
        ({"step": 2.0}, "its step is 2.0, not a number of 64 bits"),
        ({"step": True}, "its step is True, not a number of 64 bits"),
        ({"step": None}, "its step is None, not a number of 64 bits"),
        ({"time_ns": 2**63}, "its time_ns is 9223372036854775808, not a number of 64 bits"),
        ({"time_ns": [1]}, "its time_ns is [1], not a number of 64 bits"),
        ({"phase": 1}, "its phase is 1, not a word"),
        ({"phase": None}, "its phase is None, not a word"),
        ({"seq": 2.0}, "the line has no seq and kind"),
        ({"kind": ["note"]}, "the line has no seq and kind"),
    ],
)
def test_a_common_field_of_the_wrong_type_ends_the_readable_part_on_every_way_of_reading(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    head, first, second, *rest = lines([NOTE, NOTE, NOTE])
    bad = json.dumps({**json.loads(second), **changes}).encode() + b"\n"
    path = tmp_path / NAME
    path.write_bytes(b"".join([head, first, bad, *rest]))
    lane, records = read(path)
    expected = f"{NAME}: reading stopped before record 2: {reason}"
    assert ([1], expected) == ([record["seq"] for record in records], lane.torn)
    lane.extents()
    assert (expected, 1) == (lane.torn, lane.count)


def test_one_segment_stands_for_its_whole_lane(tmp_path: Path) -> None:
    every = lines([BACKUP, NOTE, BACKUP], sizes={"tp": 2})
    segments(tmp_path, every[:2], every[2:])
    write_lane(tmp_path, [NOTE], rank=1, sizes={"tp": 2})
    for name in (NAME, "rank0000.scheduler.001.jsonl"):
        lane, records = read(tmp_path / name)
        assert ([record["seq"] for record in records], lane.is_complete) == ([1, 2, 3], True)


@pytest.mark.parametrize(
    ("name", "what"), [("run.json", "a run's summary"), ("rank0000.meta.json", "a side file of a log")]
)
def test_a_file_beside_the_logs_says_what_it_is(name: str, what: str, tmp_path: Path) -> None:
    write_lane(tmp_path, [NOTE])
    (tmp_path / name).write_text("{}")
    with pytest.raises(LogError) as caught:
        find_logs(tmp_path / name)
    assert (caught.value.what, caught.value.hint) == (
        f"{tmp_path / name} is {what}; give its folder",
        f"hicache check {tmp_path}",
    )


def test_a_folder_of_runs_names_some_of_them(tmp_path: Path) -> None:
    for name in ("d", "a run", "c", "b"):
        write_lane(tmp_path / name, [NOTE])
    (tmp_path / "a").mkdir()
    with pytest.raises(LogError) as caught:
        find_logs(tmp_path)
    assert str(caught.value) == (
        f"no logs in {tmp_path}, but in folders below it\n"
        f"  expected  the folder of one run: {tmp_path}/a run, {tmp_path}/b, {tmp_path}/c\n"
        f"  try       hicache check '{tmp_path}/a run'"
    )


@pytest.mark.parametrize(
    ("summary", "told"),
    [
        (
            '{"outcome": "completed"}',
            "run.json: that run (completed) was made with --trace off, or its logs were removed",
        ),
        (
            '{"outcome": "hung", "trace": "off"}',
            "run.json: that run (hung) was made with --trace off",
        ),
        ("", "run.json: can't be read; the disk may have been full"),
    ],
)
def test_a_folder_with_only_a_summary_says_why_and_suggests_nothing_over_it(
    summary: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text(summary)
    with pytest.raises(LogError) as caught:
        find_logs(tmp_path)
    assert caught.value.where == told
    assert caught.value.hint == "the same run again with --trace full, and another --out or --overwrite"


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "loop", "pipe", "file/below"])
def test_a_path_at_which_nothing_can_be_read_is_one_message(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LogError) as caught:
        find_logs(tmp_path / name)
    assert len(caught.value.what) < 400


def test_a_folder_that_was_removed_under_us_has_no_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(LogError, match="no logs in"):
        find_logs(".")


def test_a_shortage_of_open_files_is_not_taken_for_a_torn_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(path: Path) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    (lane,) = find_logs(write_lane(tmp_path, [NOTE])).lanes
    monkeypatch.setattr("tracer.blocks.opened", opened)
    with pytest.raises(LogError, match="too many open files"):
        list(lane.records())


def test_what_a_writer_dropped_is_read_from_its_trailer(tmp_path: Path) -> None:
    head, first = lines([NOTE], outcome=None)
    dropped = {"note": 2, "match": "many", "admit": 0}
    end = line(2, {"kind": "trailer", "outcome": ["odd"], "records": 2, "dropped": dropped})
    path = tmp_path / NAME
    path.write_bytes(head + first + end)
    lane, _ = read(path)
    assert (lane.dropped, lane.outcome, lane.is_complete) == ({"note": 2}, None, True)
    assert lane.loss == f"{NAME}: records that could not be written are missing: 2 of note"


def test_a_last_file_that_its_writer_had_no_time_to_fill_is_unsealed(tmp_path: Path) -> None:
    write_lane(tmp_path, [NOTE], outcome=None)
    (tmp_path / "rank0000.scheduler.001.jsonl").touch()
    (lane,) = find_logs(tmp_path).lanes
    assert len(list(lane.records())) == 1
    assert lane.is_unsealed
    assert lane.torn == "rank0000.scheduler.001.jsonl: reading stopped before record 2: it is empty"


def test_a_kind_that_became_known_later_is_in_a_later_header(tmp_path: Path) -> None:
    late = Kind("late", "decision", agree=("tp",), compared=("number",))
    head = header(place(), [ANY_NOTE], lane="scheduler", run_id="run-a", tool_version="test")
    tracer = Tracer(SegmentSink(tmp_path, 0, "scheduler"), head, lambda: 7)
    tracer.emitter(ANY_NOTE)("first")
    tracer.declare([late])
    tracer.emitter(late)(5)
    tracer.close("completed")
    (lane,) = find_logs(tmp_path).lanes
    assert [record["kind"] for record in lane.records()] == ["note", "late"]
    assert lane.is_complete
    assert [set(segment.header["kinds"]) & {"note", "late"} for segment in lane.segments] == [
        {"note"},
        {"note", "late"},
    ]
    assert lane.kinds["late"] == late
    (known,) = History.of(find_logs(tmp_path)).lanes
    assert known.source.kinds["late"] == late


def test_headers_that_are_written_with_blanks_are_read_one_by_one(tmp_path: Path) -> None:
    for rank in range(3):
        path = write_lane(tmp_path, [], rank=rank, sizes={"tp": 3})
        spaced = [json.dumps(json.loads(line)) for line in path.read_bytes().splitlines()]
        path.write_text("".join(line + "\n" for line in spaced))
    run = find_logs(tmp_path)
    assert (run.ranks, run.unreadable) == ((0, 1, 2), ())
