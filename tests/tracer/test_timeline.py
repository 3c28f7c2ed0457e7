from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.logs import Fields, write_lane, write_run
from tracer.log import find_logs
from tracer.record import Kind
from tracer.timeline import begin_ns, clock_shifts, clocks, end_ns, limits, timeline

MEETING = Kind("meeting", "meeting", info=("op", "group", "group_seq", "peer"))


def calls(group: str, *stays: tuple[int, int], **fields: Any) -> list[Fields]:
    """Calls on a group, each entered and left at these times."""
    call = {"kind": "meeting", "op": "all_reduce", "group": group, "peer": None, **fields}
    return [
        {**call, "group_seq": group_seq, "phase": phase, "time_ns": time_ns}
        for group_seq, stay in enumerate(stays)
        for phase, time_ns in zip(("enter", "leave"), stay, strict=True)
    ]


def shifts(folder: Path, *ranks: Sequence[Fields]) -> dict[int, int]:
    return clock_shifts(find_logs(write_run(folder, dict(enumerate(ranks)), kinds=[MEETING])))


def test_lanes_are_merged_by_time_and_at_one_time_in_their_order(tmp_path: Path) -> None:
    write_lane(tmp_path, [{"kind": "note", "time_ns": time_ns} for time_ns in (1, 5, 9)])
    write_lane(tmp_path, [{"kind": "note", "time_ns": time_ns} for time_ns in (5, 6)], lane="io")
    moments = timeline(find_logs(tmp_path), {})
    assert [(time_ns, index) for time_ns, index, _record in moments] == [
        (1, 0),
        (5, 0),
        (5, 1),
        (6, 1),
        (9, 0),
    ]


def test_a_shift_moves_a_rank_and_keeps_its_records(tmp_path: Path) -> None:
    write_run(tmp_path, {0: [{"kind": "note", "time_ns": 4}], 1: [{"kind": "note", "time_ns": 5}]})
    moments = [(time_ns, index) for time_ns, index, _record in timeline(find_logs(tmp_path), {1: -3})]
    assert moments == [(2, 1), (4, 0)]


def test_a_clock_that_runs_backwards_stands_still_and_the_record_says_so(tmp_path: Path) -> None:
    write_lane(tmp_path, [{"kind": "note", "time_ns": time_ns} for time_ns in (8, 3, 9)])
    moments = list(timeline(find_logs(tmp_path), {}))
    assert [time_ns for time_ns, _index, _record in moments] == [8, 8, 9]
    assert [record.get("log_time_ns") for *_, record in moments] == [None, 3, None]


def test_a_lane_ends_with_its_trailer_or_its_last_record(tmp_path: Path) -> None:
    write_lane(tmp_path, [{"kind": "note", "time_ns": 8}])
    (lane,) = find_logs(tmp_path).lanes
    (moment,) = timeline(find_logs(tmp_path), {})
    assert (begin_ns(lane, {0: 5}), end_ns(lane, {0: 5}, moment[0])) == (5, 8)
    lane.trailer = {"time_ns": 20}
    assert end_ns(lane, {0: 5}, moment[0]) == 25


def test_clocks_that_nothing_contradicts_are_one(tmp_path: Path) -> None:
    assert shifts(tmp_path, calls("g", (1, 30), (40, 60)), calls("g", (20, 32), (55, 63))) == {}


def test_who_left_before_another_one_had_come_has_another_clock(tmp_path: Path) -> None:
    """The median of 970, 1000 and 1020."""
    first = calls("g", (1000, 1100), (2000, 2100), (3000, 3100))
    second = calls("g", (10, 130), (1010, 1100), (2000, 2080))
    assert shifts(tmp_path, first, second) == {0: 0, 1: 1000}


def test_how_well_a_clock_is_known_is_the_spread_of_the_middle_half(tmp_path: Path) -> None:
    """Differences of 970, 1000, 1020 and, once, 9000."""
    first = calls("g", (1000, 1100), (2000, 2100), (3000, 3100), (12000, 12100))
    second = calls("g", (10, 130), (1010, 1100), (2000, 2080), (3000, 3100))
    ranks = {0: first, 1: second}
    found = clocks(find_logs(write_run(tmp_path, ranks, kinds=[MEETING])))
    assert (found.shifts, found.errors) == ({0: 0, 1: 1000}, {0: 0, 1: 30})


def test_shifts_are_handed_on_from_group_to_group(tmp_path: Path) -> None:
    ranks = (
        calls("a", (100, 110)),
        [*calls("a", (0, 10)), *calls("b", (50, 60))],
        calls("b", (950, 960)),
    )
    assert shifts(tmp_path, *ranks) == {0: 0, 1: 100, 2: -800}


def test_a_broadcast_may_be_left_before_others_have_come(tmp_path: Path) -> None:
    early, late = (calls("g", stay, op="broadcast") for stay in ((1, 2), (50, 51)))
    assert shifts(tmp_path, early, late) == {}


def test_a_send_may_be_left_before_it_is_received(tmp_path: Path) -> None:
    assert shifts(tmp_path, calls("g", (1, 2), peer=1), calls("g", (50, 51), peer=0)) == {}


def test_a_rank_that_met_nobody_keeps_its_clock(tmp_path: Path) -> None:
    assert shifts(tmp_path, calls("g", (100, 110)), calls("g", (0, 10)), []) == {0: 0, 1: 100, 2: 0}


def test_a_whole_run_lacks_nothing(tmp_path: Path) -> None:
    assert limits(find_logs(write_run(tmp_path, {0: [], 1: []}))) == []


def test_what_a_run_lacks_is_named_rank_by_rank(tmp_path: Path) -> None:
    write_lane(tmp_path, [{"kind": "note"}], rank=1, sizes={"tp": 12}, outcome=None)
    (tmp_path / "rank0003.scheduler.000.jsonl").write_bytes(b"\0" * 9)
    assert limits(find_logs(tmp_path)) == [
        "rank0003.scheduler.000.jsonl: it is empty: its writer stopped before the header was written",
        "no log of ranks 0, 2, 3, 4, 5, 6, 7, 8 and 3 more",
        "rank0001.scheduler.000.jsonl: cut behind record 1, without a trailer",
    ]
