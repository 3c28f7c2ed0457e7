"""From windows to a verdict: records of logs, or what links alone can say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from consensus_checker.live_compare import Found, Known
from consensus_checker.live_posts import Told
from consensus_checker.live_verdict import Rank, Screen, divergence
from consensus_checker.verdict import Coverage
from tracer.record import Kind, Place, header

WIDE = Kind("step", "decision", agree=("tp", "pp"), compared=("number",))
NARROW = Kind("shard", "decision", agree=("tp",), compared=("number", "bytes"))
CALL = Kind("prefetch", "decision", agree=("tp",), compared=("rid", "tokens", "hit", "error"))
COVERAGE = Coverage(3, 3, (), (), 0, None, ())


def judged(
    windows: Mapping[int, list[list[Any]]], place: int, axes: tuple[str, ...] = ("tp",)
) -> Screen | None:
    """The verdict on links from number 10 on."""
    size = len(windows)
    head = header(
        Place(0, {"pp": 0, "tp": 0}, {"pp": 1, "tp": size}, {}),
        (WIDE, NARROW, CALL),
        lane="scheduler",
        run_id="verdict",
        tool_version="test",
    )
    told = {rank: Told([], 10, msgspec.json.encode(links), step=4) for rank, links in windows.items()}
    known = Known("scheduler", axes, heads={rank: 10 + len(links) for rank, links in windows.items()})
    ranks = {rank: Rank({"pp": 0, "tp": rank}) for rank in windows}
    return divergence(head, known, Found(place, (place, place + 1), told), ranks, COVERAGE, None)


def test_values_are_named_without_the_counts_behind_them() -> None:
    # The last value of each link counts the wider chain.
    same, odd = ["shard", "", 1, 64, 7], ["shard", "", 1, 32, 7]
    screen = judged({0: [same, same], 1: [same, odd], 2: [same, same]}, 11)
    assert screen is not None
    first = screen.verdict.finding.first_divergence
    assert first is not None and (first.index, first.call, first.step) == (11, "shard", 4)
    assert first.by_rank == {0: {"bytes": 64}, 1: {"bytes": 32}, 2: {"bytes": 64}}


def test_a_call_and_its_outcome_may_be_one_link_or_two() -> None:
    def one(hit: int) -> list[list[Any]]:
        # Behind the values the wider chain's count, and how many came since the call on each chain.
        return [["prefetch", "return", "r1", 64, hit, 7, 0, 0]]

    def two(hit: int) -> list[list[Any]]:
        return [["prefetch", "call", "r1", 64, 7], ["prefetch", "return", hit, 7]]

    for windows, place in (({0: one(5), 1: one(5), 2: one(9)}, 10), ({0: two(5), 1: two(5), 2: two(9)}, 11)):
        screen = judged(windows, place)
        assert screen is not None
        (diff,) = screen.verdict.finding.first_divergence.field_diff  # type: ignore[union-attr]
        assert (diff.field, diff.majority, diff.values) == ("hit", 5, {2: 9})


def test_links_that_differ_only_in_what_came_before_them_name_the_few() -> None:
    same, odd = ["shard", "", 1, 64, 7], ["shard", "", 1, 64, 6]
    screen = judged({0: [same], 1: [odd], 2: [same]}, 10)
    assert screen is not None
    found = screen.verdict.finding
    assert (found.kind, found.culprit, found.level) == ("divergence", (1,), "medium")
    assert "rank 1 against ranks 0, 2: call 10" in found.summary
    assert judged({0: [same], 1: [odd]}, 10).verdict.finding.culprit == ()  # type: ignore[union-attr]


def test_a_rank_that_has_no_such_link_yet_is_no_difference() -> None:
    same = ["shard", "", 1, 64, 7]
    assert judged({0: [same], 1: [], 2: [same]}, 10) is None


def test_where_the_links_are_gone_the_range_is_told_and_nobody_accused() -> None:
    known = Known("scheduler", ("tp",), heads={0: 900, 1: 900})
    screen = divergence({}, known, Found(None, (128, 192), {}), {}, COVERAGE, None)
    assert screen is not None
    assert (screen.verdict.kind, screen.verdict.code) == ("undetermined", 20)
    assert "part between call 128 and call 192" in screen.verdict.finding.summary
