"""Headers that contradict each other, kinds that were dropped, and what that forbids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from consensus_checker.check import check
from consensus_checker.history import MemoryLane
from consensus_checker.verdict import Verdict
from tests.support.history import history, lanes
from tests.support.logs import write_run
from tracer.log import find_logs

EQUAL = "0 match:r1=64\n1 match:r1=64\n2 match:r1=64\n3 match:r1=64"


def changed(rank: int, **parts: Any) -> list[MemoryLane]:
    return [
        replace(lane, header={**lane.header, **parts}) if lane.rank == rank else lane for lane in lanes(EQUAL)
    ]


def doubts(verdict: Verdict) -> str:
    assert verdict.kind != "consistent"
    return "; ".join(verdict.coverage.doubts)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"world_size": 8}, "rank 2: its header has world_size 8, most have 4: not compared"),
        ({"sizes": {"dp": 1, "pp": 2, "cp": 1, "tp": 2}}, "rank 2: its header has sizes"),
        (
            {"coordinates": {"dp": 0, "pp": 0, "cp": 0, "tp": 1}},
            "has the coordinates of rank 1: not compared",
        ),
        (
            {"coordinates": {"dp": 0, "pp": 0, "cp": 0, "tp": 7}},
            "on tp is outside of the sizes: not compared",
        ),
        ({"world_size": 10**12}, "rank 2: its header is damaged (world_size)"),
        ({"attempt": None}, "rank 2: its header is damaged (attempt)"),
        ({"groups": [1]}, "rank 2: its header is damaged (groups)"),
    ],
)
def test_a_header_that_the_others_contradict_is_named_and_not_compared(
    parts: dict[str, Any], text: str
) -> None:
    verdict = check(changed(2, **parts))
    assert (verdict.kind, verdict.code, verdict.coverage.missing) == ("incomplete", 4, ())
    assert text in doubts(verdict)


def test_sizes_that_are_not_the_world_forbid_consistent() -> None:
    odd = [replace(lane, header={**lane.header, "world_size": 5}) for lane in lanes(EQUAL)]
    assert "multiply to 4, not to 5 ranks" in doubts(check(odd))


def test_another_config_is_something_wrong_although_the_logs_agree() -> None:
    logs = [
        replace(lane, header={**lane.header, "config_digest": "b" if lane.rank == 2 else "a"})
        for lane in lanes(EQUAL)
    ]
    verdict = check(logs)
    assert (verdict.kind, verdict.code, verdict.finding.rule) == ("undetermined", 20, "config_differs")
    assert verdict.finding.summary.startswith("config_digest of rank 2 differs from that of ranks 0-1, 3")


def test_another_config_is_another_reading_of_a_divergence() -> None:
    drawn = lanes(
        "0 backup:1=64{host_pages_free=5}\n1 backup:1=64{host_pages_free=5}\n2 backup:1=0{host_pages_free=0}"
    )
    logs = [replace(lane, header={**lane.header, "config_digest": str(lane.rank == 2)}) for lane in drawn]
    verdict = check(logs)
    assert (verdict.code, verdict.finding.level, [one.code for one in verdict.findings]) == (
        10,
        "medium",
        [20],
    )
    assert verdict.finding.alternatives[-1].rule == "config_differs"


def test_a_kind_that_one_rank_declares_otherwise_is_compared_nowhere() -> None:
    drawn = lanes("0 match:r1=64 evict:1=1\n1 match:r1=64 evict:1=1\n2 match:r1=64 evict:1=2")
    kinds = {**drawn[2].kinds, "evict": replace(drawn[2].kinds["evict"], compared=("node",))}
    verdict = check([*drawn[:2], replace(drawn[2], kinds=kinds)])
    assert (verdict.kind, verdict.code) == ("incomplete", 4)
    assert "rank 2: its header declares evict otherwise than most do: not compared" in doubts(verdict)


def test_a_file_named_after_another_rank_is_told(tmp_path: Path) -> None:
    record = {"kind": "write_backup", "node": 1, "pages": 1, "tokens": 64, "host_pages_free": 5}
    write_run(tmp_path, {0: [record], 1: [record]})
    (tmp_path / "rank0001.scheduler.000.jsonl").rename(tmp_path / "rank0007.scheduler.000.jsonl")
    told = doubts(check(find_logs(tmp_path)))
    assert told == "rank0007.scheduler.000.jsonl: its header says rank 1, lane scheduler"


def test_an_unreadable_log_is_told(tmp_path: Path) -> None:
    record = {"kind": "write_backup", "node": 1, "pages": 1, "tokens": 64, "host_pages_free": 5}
    write_run(tmp_path, {0: [record], 1: [record]})
    (tmp_path / "rank0001.io.000.jsonl").write_bytes(b"{}\n")
    assert doubts(check(find_logs(tmp_path))).startswith("rank0001.io.000.jsonl: ")


def test_two_runs_of_one_size_are_never_consistent() -> None:
    verdict = check(history(EQUAL, runs={2: "run-b", 3: "run-b"}, world_size=4))
    assert "another run with as many ranks lies in the same place; run run-a is judged" in doubts(verdict)
    two = [*lanes("0 match:r1=1\n1 match:r1=1"), *lanes("0 match:r1=2\n1 match:r1=2", runs={0: "b", 1: "b"})]
    assert check(two).code == 4


def test_a_dropped_kind_is_compared_on_no_rank_of_its_scope() -> None:
    text = """
        0  match:r1=64  evict:1=1  match:r2=64
        1  match:r1=64  evict:1=1  match:r2=64
        2  match:r1=64  match:r2=64  #drops:evict
    """
    verdict = check(history(text))
    assert (verdict.kind, verdict.code) == ("incomplete", 4)
    assert verdict.coverage.dropped_kinds == {"evict": (2,)}
    assert verdict.to_json()["coverage"]["dropped_kinds"] == {"evict": [2]}
    assert "rank 2 dropped evict" in verdict.finding.summary


def test_a_dropped_kind_hides_no_other_difference() -> None:
    text = """
        0  match:r1=64  evict:1=1  match:r2=64
        1  match:r1=64  evict:1=1  match:r2=64
        2  match:r1=64  match:r2=0  #drops:evict
    """
    finding = check(history(text)).finding
    assert finding.first_divergence is not None
    assert (finding.culprit, finding.first_divergence.call, finding.first_divergence.index) == (
        (2,),
        "match",
        1,
    )


def test_another_scope_still_compares_what_was_dropped_in_one() -> None:
    text = "0 match:r1=1\n1 match:r1=1 #drops:match\n2 match:r1=1\n3 match:r1=2"
    finding = check(history(text, dp=2)).finding
    assert finding.first_divergence is not None
    assert (finding.first_divergence.scope, finding.unknown) == ("dp1", (2, 3))


def test_a_rank_that_dropped_its_meetings_is_not_said_to_stay_away() -> None:
    text = "0 match:r1=1 events! #hung\n1 match:r1=1 events! #hung\n2 match:r1=1 #hung #drops:meeting"
    finding = check(history(text)).finding
    assert (finding.code, finding.culprit, finding.unknown) == (20, (), (2,))


def test_every_rank_needs_a_partner_for_consistent() -> None:
    io = [replace(lane, lane="io") for lane in lanes("2 finish:r1=1", world_size=3)]
    logs = [*lanes("0 match:r1=1\n1 match:r1=1", world_size=3), *io]
    assert check(logs).kind == "incomplete"


def test_most_decisions_must_have_been_compared() -> None:
    head = lanes("0 match:r1=1 evict:1=1\n1 match:r1=1 evict:1=1")
    kinds = {**head[0].kinds, "evict": replace(head[0].kinds["evict"], agree=(), compared=())}
    verdict = check([replace(lane, kinds=kinds) for lane in head])
    assert (verdict.kind, verdict.coverage.decisions_compared_fraction) == ("incomplete", 0.5)
    assert "only 50% of the decisions were compared" in verdict.finding.summary


def test_one_rank_is_told_that_it_has_nobody_to_be_compared_with() -> None:
    verdict = check(history("0 match:r1=64"))
    assert (verdict.kind, verdict.finding.summary) == (
        "nothing_compared",
        "one rank alone has nobody to be compared with",
    )
