"""`hicache replay --scale` as it is typed: what bounds a run and its requests, and what a speed changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.screens.critical_path import path_lines
from tests.cli.conftest import Hicache
from tests.support.logs import write_lane
from tests.tracer.test_critical_path import KINDS, READ_AHEAD, READ_BESIDE, at
from tracer.critical_path import critical_path
from tracer.log import find_logs
from tracer.what_if_speed import what_if_speed


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """One rank that reads from storage for request a, beside a forward of request b."""
    folder = tmp_path / "run"
    write_lane(folder, READ_BESIDE, kinds=KINDS)
    for lane, records in READ_AHEAD.items():
        write_lane(folder, records, lane=lane, kinds=KINDS)
    return folder


SCREEN = """\
BOUND     by forward: 80% of the 65.0 ms in which rank 0 served 2 requests
  what if storage_read x0.5: 65.0 ms -> 65.0 ms in place (+0.0%), 81.0 ms in
          order (+24.6%)

on the path     ms  share  under way  in place  what
forward       52.0    80%        80%      52.0
scheduler     13.0    20%          -      13.0  its own work, and polls
storage_read   0.0     0%        40%       0.0

request    ms  in place  in order  waited for
a        65.0      91.0      81.0  storage_read 40%, forward 31%, scheduler 15%
b        64.0      64.0      80.0  forward 81%, scheduler 19%
  slowest a, in ms: scheduler 2.0, storage_read 6.0, peers 1.0, queue 1.0,
          scheduler 3.0, storage_read 20.0, peers 2.0, queue 5.0, scheduler 4.0,
          forward 20.0 (and 1 more)
  unsure  2 of 2 acks would have come in another step: decisions may differ from
          there on, and a run at these speeds may lie outside
  note    from one trace. In place: each wait is longer or shorter where it
          stands. In order: every step waits for all that it took over, so that
          no decision changes. A run decides anew
"""


def test_what_bounds_the_run_and_its_requests_is_one_screen(hicache: Hicache, run: Path) -> None:
    said = hicache("replay", run, "--scale", "storage_read=0.5")
    assert (said.code, said.out, said.err) == (0, SCREEN, "")
    assert max(map(len, said.out.splitlines())) <= 80


def test_json_has_the_same_facts(hicache: Hicache, run: Path) -> None:
    document = json.loads(hicache("replay", run, "--scale", "storage_read=0.5", "--json").out)
    assert document["schema"] == "hicache.replay.v1"
    (rank,) = document["scale"]["ranks"]
    requests = rank.pop("requests")
    assert document["scale"]["speeds"] == {"storage_read": 0.5}
    assert rank == {
        "rank": 0,
        "waited_least_for_others": True,
        "bound_by": "forward",
        "took_ns": 65_000_000,
        "would_take_in_place_ns": 65_000_000,
        "would_take_in_order_ns": 81_000_000,
        "by_tier_ns": {"forward": 52_000_000, "scheduler": 13_000_000},
        "under_way_ns": {"storage_read": 26_000_000, "forward": 52_000_000},
        "takings": 2,
        "takings_moved": 2,
        "undetermined": [],
    }
    assert [request["rid"] for request in requests] == ["b", "a"]
    assert requests[1]["bound_by"] == "storage_read"
    assert requests[1]["would_take_in_place_ns"] == 91_000_000
    assert requests[1]["chain"][:2] == [["scheduler", 2_000_000], ["storage_read", 6_000_000]]


def test_one_word_stands_for_both_directions_of_storage(hicache: Hicache, run: Path) -> None:
    said = hicache("replay", run, "--scale", "l3=2, forward=0.5", "--scale", "d2h=3", "--json")
    told = json.loads(said.out)["scale"]["speeds"]
    assert told == {"storage_read": 2.0, "storage_write": 2.0, "forward": 0.5, "d2h": 3.0}


def test_quiet_is_one_line(hicache: Hicache, run: Path) -> None:
    said = hicache("replay", run, "--scale", "forward=2", "--quiet")
    assert said.out == (
        "BOUND     by forward: 80% of the 65.0 ms in which rank 0 served 2 requests; forward x2: "
        "65.0 ms -> 39.0 ms in place (-40.0%), 45.5 ms in order (-30.0%)\n"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--scale", "l4=2"], "error: --scale l4=2: no tier 'l4'"),
        (["--scale", "d2h"], "error: --scale d2h: no speed ''"),
        (["--scale", "d2h=0"], "error: --scale d2h=0: no speed '0'"),
        (["--scale", "d2h=nan"], "error: --scale d2h=nan: no speed 'nan'"),
        (["--scale", "d2h=1e9"], "error: --scale d2h=1e9: no speed '1e9'"),
        (["--scale", "d2h=-1"], "error: --scale d2h=-1: no speed '-1'"),
        (["--scale", ""], "error: --scale : no tier ''"),
        (["--scale", "l3=2,storage_read=3"], "error: --scale names storage_read twice"),
        (["--scale", "d2h=2", "--at", "3"], "error: --scale looks at the whole run"),
        (["--scale", "d2h=2", "--policy", "min"], "error: --scale looks at the whole run"),
        (["--scale", "d2h=2", "--queue", "write"], "error: --scale looks at the whole run"),
        (["--scale", "d2h=2", "--rank", "7"], "error: --rank: rank 7 left no log"),
    ],
)
def test_what_makes_no_sense_is_said(hicache: Hicache, run: Path, words: list[str], told: str) -> None:
    said = hicache("replay", run, *words)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(told)


def test_a_log_in_which_no_request_is_whole_is_incomplete_and_says_why(
    hicache: Hicache, tmp_path: Path
) -> None:
    write_lane(tmp_path, [at(4, 7, "finish", rid="a")], kinds=KINDS, outcome=None)
    said = hicache("replay", tmp_path, "--scale", "d2h=0.5")
    assert said.code == 4
    assert said.out == (
        "UNKNOWN   no request both began and ended in the log of rank 0\n"
        "  unsure  rank 0: rank0000.scheduler.000.jsonl: cut behind record 1, without a\n"
        "          trailer\n"
        "  unsure  rank 0: 1 request ended that came before the log begins\n"
    )
    assert hicache("replay", tmp_path, "--scale", "d2h=0.5", "--exit-zero").code == 0


def test_of_two_ranks_the_one_is_shown_that_the_other_waited_for(hicache: Hicache, tmp_path: Path) -> None:
    for rank, came in ((0, 4), (1, 18)):
        main = [
            at(0, 0, "request", rid="a"),
            at(1, 0, "batch", rids=["a"]),
            at(came, 0, "meeting", phase="enter", group="tp0/main", group_seq=0),
            at(20, 0, "meeting", phase="leave", group="tp0/main", group_seq=0),
            at(21, 0, "forward", rids=["a"]),
            at(21, 0, "finish", rid="a"),
        ]
        write_lane(tmp_path, main, rank=rank, sizes={"tp": 3}, kinds=KINDS)
    said = hicache("replay", tmp_path, "--scale", "forward=2")
    assert "BOUND     by forward: 86% of the 21.0 ms in which rank 1 served 1 request\n" in said.out
    assert "  ranks   shown is who waited least for others; rank 0: 76% of the time on peers\n" in said.out
    assert "  unsure  rank 2 left no log: waits for them are peers\n" in said.out
    alone = hicache("replay", tmp_path, "--scale", "forward=2", "--rank", "0")
    assert alone.out.startswith("BOUND     by peers: 76% of the 21.0 ms in which rank 0 served 1 request\n")
    assert "of what has a speed, forward is most: 19%" in alone.out


def test_a_request_of_any_name_moves_no_cursor(tmp_path: Path) -> None:
    main = [at(0, 0, "request", rid="\x1b[2J"), at(1, 0, "finish", rid="\x1b[2J")]
    write_lane(tmp_path, main, kinds=KINDS)
    path = critical_path(find_logs(tmp_path), 0)
    lines = path_lines([(path, what_if_speed(path, {"d2h": 2.0}))], [], [], 80)
    assert "\x1b" not in "".join(line.plain for line in lines)
