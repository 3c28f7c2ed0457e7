"""Prefixes by literal records: where sharing branches, what each was served, and what can't be told."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.logs import line, lines, write_lane, write_run
from tracer.errors import HitsError
from tracer.hits import Hits, hits
from tracer.log import find_logs

CONFIG = {"page_size_tokens": 10}
# A system prompt of two pages, two conversations behind it, and pages of nobody else.
S1, S2, A3, A4, A5, B3, B4 = (letter * 16 for letter in "12345ab")


def turn(
    rid: str, tokens: int, cached: int, miss: str, new: str = "", *, node: int = 0, ends: int = 0, **hit: str
) -> list[dict[str, Any]]:
    """A request that is served at once: its match ends at `node`, its insert at node `ends`."""
    return [
        {"kind": "request", "rid": rid, "input_tokens": tokens},
        {"kind": "match", "rid": rid, "node": node, "device_tokens": cached, "host_tokens": 0}
        | {"miss_digest": miss, **hit},
        {"kind": "admit", "rid": rid, "verdict": "admitted", "device_tokens": cached, "host_tokens": 0}
        | {"storage_tokens": 0, "extend_tokens": tokens - cached},
        {"kind": "forward", "mode": "extend", "rids": [rid], "computed_tokens": [tokens - cached]},
        {"kind": "insert", "phase": "call", "rid": rid, "tokens": tokens // 10 * 10},
        {"kind": "insert", "phase": "return", "rid": rid, "node": ends, "new_tokens": len(new) // 16 * 10}
        | {"new_digests": new, "duplicate_pages": 0},
        {"kind": "finish", "rid": rid, "reason": "stop", "output_tokens": 1},
    ]


def by_prefix(folder: Path, records: Sequence[Mapping[str, Any]], **options: Any) -> Hits:
    return hits(find_logs(write_lane(folder, records, config=CONFIG, **options)), by="prefix")


def test_a_prefix_is_listed_where_sharing_branches(tmp_path: Path) -> None:
    records = [
        *turn("a1", 45, 0, S1, S1 + S2 + A3 + A4, ends=1),
        # A match that ends inside of node 1 cuts it: the front is node 2.
        *turn("b1", 45, 20, B3, B3 + B4, node=2, ends=3),
        *turn("a2", 55, 40, A5, A5, node=1, ends=4),
    ]
    found = by_prefix(tmp_path, records)
    assert found.notes == ()
    assert [(row["prefix"], row["tokens"], row["requests"]) for row in found.rows] == [
        (A4, 40, 2),
        (S2, 20, 3),
    ]
    assert found.rows[1] == {
        "prefix": S2,
        "tokens": 20,
        "requests": 3,
        "input_tokens": 60,
        "device": 40,
        "host": 0,
        "storage": 0,
        "computed": 20,
        "computed_again": 0,
        "unplaced": 0,
        "hit_rate": 0.666667,
    }


def test_what_two_compute_side_by_side_is_computed_again(tmp_path: Path) -> None:
    records = [*turn("a1", 25, 0, S1, S1 + S2, ends=1), *turn("a2", 25, 0, S1, ends=1)]
    (row,) = by_prefix(tmp_path, records).rows
    assert (row["prefix"], row["computed"], row["computed_again"]) == (S2, 40, 20)


def test_an_answer_is_no_part_of_its_own_prompt(tmp_path: Path) -> None:
    """The insert at its end brings pages of the answer, which the next turn's prompt has."""
    answer = [
        {"kind": "insert", "phase": "call", "rid": "a1", "tokens": 40},
        {"kind": "insert", "phase": "return", "rid": "a1", "node": 2, "new_digests": A3 + A4},
    ]
    first = turn("a1", 20, 0, S1, S1 + S2, ends=1)
    records = [*first[:-1], *answer, first[-1], *turn("a2", 55, 40, A5, A5, node=2, ends=3)]
    rows = by_prefix(tmp_path, records).rows
    assert [(row["prefix"], row["requests"]) for row in rows] == [(S2, 2)]


def test_pages_that_storage_brought_are_of_the_prompt_that_asked(tmp_path: Path) -> None:
    fetched = [
        {"kind": "request", "rid": "a1", "input_tokens": 45},
        {"kind": "match", "rid": "a1", "node": 0, "device_tokens": 0, "host_tokens": 0, "miss_digest": S1},
        {"kind": "prefetch_submit", "rid": "a1", "op": 7, "outcome": "issued", "pages": 4, "tokens": 40},
        {"kind": "prefetch_insert", "op": 7, "rid": "a1", "node": 1, "outcome": "loaded"}
        | {"completed_tokens": 20, "matched_tokens": 0, "loaded_tokens": 20, "new_digests": S1 + S2},
    ]
    records = [*fetched, *turn("b1", 45, 20, B3, B3 + B4, node=1, ends=2)]
    assert [(row["prefix"], row["requests"]) for row in by_prefix(tmp_path, records).rows] == [(S2, 2)]


# Two conversations of their own, so that a cut at page 2 may have been in either.
APART = [
    *turn("a1", 45, 0, S1, S1 + S2 + A3 + A4, ends=1),
    *turn("b1", 45, 0, "c" * 16, "c" * 16 + "d" * 16 + B3 + B4, ends=2),
]


def test_a_request_whose_pages_can_not_be_told_is_left_out_and_counted(tmp_path: Path) -> None:
    found = by_prefix(tmp_path, [*APART, *turn("x", 35, 20, A5, A5, node=3, ends=4)])
    assert found.rows == ()
    assert found.notes == (
        "1 request was left out of the prefixes: this log does not tell which pages it found (no hit_digest "
        "in its matches)",
    )


def test_a_log_that_names_the_last_page_found_leaves_nobody_out(tmp_path: Path) -> None:
    found = by_prefix(tmp_path, [*APART, *turn("x", 35, 20, A5, A5, node=3, ends=4, hit_digest=S2)])
    assert ([(row["prefix"], row["requests"]) for row in found.rows], found.notes) == ([(S2, 2)], ())


def test_a_log_that_begins_late_takes_no_page_for_the_only_one(tmp_path: Path) -> None:
    records = [*turn("a1", 45, 0, S1, S1 + S2 + A3 + A4, ends=1), *turn("x", 35, 20, A5, A5, node=9, ends=4)]
    assert by_prefix(tmp_path / "whole", records).notes == ()
    path = tmp_path / "late" / "rank0000.scheduler.003.jsonl"
    path.parent.mkdir()
    every = [*records, {"kind": "trailer", "outcome": "completed", "records": 50 + len(records)}]
    head = line(50, json.loads(lines([], config=CONFIG)[0]))
    path.write_bytes(head + b"".join(line(50 + at, each) for at, each in enumerate(every)))
    late = hits(find_logs(path.parent), by="prefix")
    assert late.rows == ()
    assert any("1 request was left out of the prefixes" in note for note in late.notes)


def test_replicas_share_prefixes_and_each_computes_them(tmp_path: Path) -> None:
    own = {0: turn("a1", 25, 0, S1, S1 + S2, ends=1), 1: turn("a2", 25, 0, S1, S1 + S2, ends=1)}
    (row,) = hits(find_logs(write_run(tmp_path, own, sizes={"dp": 2}, config=CONFIG)), by="prefix").rows
    assert (row["prefix"], row["requests"], row["computed_again"]) == (S2, 2, 20)


def test_turns_of_one_conversation_do_not_fill_the_table(tmp_path: Path) -> None:
    pages = [f"{page:016x}" for page in range(1, 31)]
    records = []
    for at in range(30):
        cached = at * 10
        records += turn(f"t{at}", cached + 15, cached, pages[at], pages[at], node=at, ends=at + 1)
    rows = by_prefix(tmp_path, records).rows
    # There are 30 where sharing branches; in no two of these is more than half the same.
    told = [(150, 16), (210, 10), (90, 22), (260, 5), (40, 27), (20, 29), (290, 2), (10, 30)]
    assert [(row["tokens"], row["requests"]) for row in rows] == told


def test_a_request_that_was_not_computed_is_known_up_to_what_it_missed(tmp_path: Path) -> None:
    gone = turn("x", 45, 0, S1)[:2]
    found = by_prefix(tmp_path, [*turn("a1", 25, 0, S1, S1 + S2, ends=1), *gone])
    assert [(row["prefix"], row["requests"], row["unplaced"]) for row in found.rows] == [(S1, 2, 10)]
    assert found.notes[0].startswith("1 request was not computed to the end")


def test_a_log_without_a_page_size_has_no_prefixes(tmp_path: Path) -> None:
    path = write_lane(tmp_path, turn("a1", 25, 0, S1, S1 + S2))
    with pytest.raises(HitsError, match="header has no page size"):
        hits(find_logs(path), by="prefix")


def test_digests_that_go_in_a_circle_are_followed_nowhere(tmp_path: Path) -> None:
    first = turn("a1", 35, 0, S1, S1 + S2 + A3, ends=1)
    circle = [
        {"kind": "insert", "phase": "call", "rid": "a1", "tokens": 20},
        {"kind": "insert", "phase": "return", "rid": "a1", "node": 2, "new_digests": A5 + A4}
        | {"parent_digest": A4},
        {"kind": "insert", "phase": "call", "rid": "a1", "tokens": 30},
        {"kind": "insert", "phase": "return", "rid": "a1", "node": 3, "new_digests": A4 + A5 + A4}
        | {"parent_digest": A5},
    ]
    records = [*first, *circle, *turn("a2", 35, 20, A4, A4, node=3, ends=4, hit_digest=A5)]
    assert by_prefix(tmp_path, records).requests[0].rid == "a1"
    assert len(by_prefix(tmp_path, records).rows) <= 1


def test_a_record_that_lacks_a_field_is_named(tmp_path: Path) -> None:
    records = [
        {**each, "tokens": None} if each["kind"] == "insert" else each for each in turn("a", 25, 0, S1)
    ]
    path = write_lane(tmp_path, records, config=CONFIG)
    with pytest.raises(HitsError, match="record 5 lacks a count or field"):
        hits(find_logs(path), by="prefix")


def test_a_digest_that_is_none_is_named(tmp_path: Path) -> None:
    records = [
        {**each, "miss_digest": 7} if each["kind"] == "match" else each for each in turn("a", 25, 0, S1)
    ]
    with pytest.raises(HitsError, match="record 2 lacks a count or field"):
        by_prefix(tmp_path, records).rows  # noqa: B018
