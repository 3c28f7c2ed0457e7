from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from consensus_checker.line_ranks import Seating, incidents, seated
from tests.support.divergence_lines import divergence_line
from tracer.importers.rank_divergence import read_lines
from tracer.importers.sniff import File

EVENTS = ["evict called params=<no check>", "evict returns result=1"]


def seating(tmp_path: Path, logs: Mapping[str, str]) -> Seating:
    files = []
    for name, text in logs.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        files.append(File(path, name))
    return seated(read_lines(files))


def tagged(*tags: str) -> str:
    return "".join(divergence_line(EVENTS, f" {tag}") for tag in tags)


def ranks(found: Seating) -> list[int]:
    return [seat.rank for seat in found.seats]


def test_ranks_are_numbered_by_their_tags_with_tp_fastest(tmp_path: Path) -> None:
    found = seating(tmp_path, {"a.log": tagged("PP1 TP0", "PP0 TP1", "TP1 PP1", "PP0 TP0")})
    assert (ranks(found), found.expected, found.notes) == ([2, 1, 3, 0], {0: (0, 1, 2, 3)}, ())
    assert found.seats[0].name == "PP1 TP0"


def test_a_rank_that_only_wrote_other_lines_is_expected(tmp_path: Path) -> None:
    found = seating(tmp_path, {"a.log": "[2026-03-01 12:00:00 TP3] Decode batch\n" + tagged("TP0", "TP1")})
    assert found.expected == {0: (0, 1, 2, 3)}


def test_replicas_of_their_own_begin_at_tp_0_each(tmp_path: Path) -> None:
    found = seating(tmp_path, {"a.log": tagged("DP0 TP0", "DP0 TP1", "DP1 TP0", "DP1 TP1")})
    assert (ranks(found), found.expected) == ([0, 1, 2, 3], {0: (0, 1), 1: (2, 3)})


def test_under_data_parallel_attention_tp_goes_on_over_the_replicas(tmp_path: Path) -> None:
    found = seating(tmp_path, {"a.log": tagged("DP0 TP0", "DP0 TP1", "DP1 TP2", "DP1 TP3")})
    assert (ranks(found), found.expected) == ([0, 1, 2, 3], {0: (0, 1), 1: (2, 3)})
    assert [seat.place["tp"] for seat in found.seats] == [0, 1, 0, 1]
    only = seating(tmp_path, {"b.log": tagged("DP1 TP2", "DP1 TP3")})
    assert (ranks(only), only.expected) == ([2, 3], {1: (2, 3)})


@pytest.mark.parametrize(
    "names",
    [("rank0.log", "rank1.log"), ("server_0.log.txt", "server_1.log.txt"), ("0/stderr.log", "1/stderr.log")],
)
def test_without_a_tag_the_name_of_a_file_tells_its_rank(names: tuple[str, str], tmp_path: Path) -> None:
    found = seating(tmp_path, {names[1]: tagged(""), names[0]: tagged("").replace("=1", "=2")})
    assert ranks(found) == [1, 0]
    assert found.notes == ("ranks are told by the files' names, the lines have no tag",)


def test_without_a_tag_the_launchers_prefix_tells_it(tmp_path: Path) -> None:
    text = "".join(divergence_line([*EVENTS, str(n)], launcher=f"[default{n}]:") for n in (2, 0))
    found = seating(tmp_path, {"a.log": text})
    assert (ranks(found), found.expected) == ([2, 0], {0: (0, 1, 2)})


def test_a_day_in_the_names_of_files_is_no_rank(tmp_path: Path) -> None:
    found = seating(tmp_path, {"server-2026-03-01.log": tagged(""), "server-2026-03-02.log": tagged("")})
    assert [seat.name for seat in found.seats] == ["process A", "process B"]


def test_lines_that_say_nothing_are_numbered_in_order_of_appearance_and_that_is_said(tmp_path: Path) -> None:
    found = seating(tmp_path, {"a.log": tagged("", "").replace(" ]", "]")})
    assert (ranks(found), found.expected) == ([0, 1], {0: (0, 1)})
    assert found.notes == ("no line says which rank wrote it: numbered in order of appearance",)


def test_a_line_that_has_lost_its_tag_is_numbered_behind_the_others(tmp_path: Path) -> None:
    found = seating(tmp_path, {"a.log": tagged("TP0", "TP1") + divergence_line(["x"])})
    assert (ranks(found), found.seats[2].name) == ([0, 1, 2], "process A")
    assert found.notes == ("1 of the lines have no rank in them: numbered from 2 on",)


def test_a_line_that_two_handlers_have_printed_counts_once(tmp_path: Path) -> None:
    found = incidents(seating(tmp_path, {"a.log": tagged("TP0", "TP0", "TP1", "TP1")}).seats)
    assert [sorted(one.seats) for one in found] == [[0, 1]]


def test_of_a_line_printed_twice_the_whole_one_counts(tmp_path: Path) -> None:
    cut = divergence_line(EVENTS, " TP0")[:-20] + "\n"
    (one,) = incidents(seating(tmp_path, {"a.log": cut + tagged("TP0", "TP1")}).seats)
    assert one.seats[0].printed.is_proven


def test_a_server_that_was_started_again_has_two_incidents(tmp_path: Path) -> None:
    first = [divergence_line(EVENTS, f" TP{n}", moment=f"2026-03-01 12:00:0{n}") for n in (0, 1)]
    # The second time rank 0's line is missing.
    again = divergence_line([*EVENTS, "x"], " TP1", moment="2026-03-01 12:40:00")
    logs = {"0.log": first[0], "1.log": first[1] + again}
    found = incidents(seating(tmp_path, logs).seats)
    assert [sorted(one.seats) for one in found] == [[0, 1], [1]]


def test_incidents_without_times_are_told_apart_by_the_number_of_events(tmp_path: Path) -> None:
    def bare(count: int, rank: int) -> str:
        return f"TP{rank} " + divergence_line(["x"] * count).partition("] ")[2]

    logs = {"a.log": bare(1, 0) + bare(2, 0), "b.log": bare(2, 1)}
    found = incidents(seating(tmp_path, logs).seats)
    assert [{rank: seat.printed.count for rank, seat in one.seats.items()} for one in found] == [
        {0: 1},
        {0: 2, 1: 2},
    ]


def test_clocks_of_hosts_that_are_minutes_apart_are_one_incident(tmp_path: Path) -> None:
    logs = {
        f"{n}.log": divergence_line(EVENTS, f" TP{n}", moment=f"2026-03-01 12:0{4 * n}:00") for n in (0, 1)
    }
    assert len(incidents(seating(tmp_path, logs).seats)) == 1
