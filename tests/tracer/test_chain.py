"""Equal digests mean equal records up to there, whatever happened in between."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from tests.support.logs import DECIDE, NOTE, SMALL_KINDS, place
from tracer import chain
from tracer.calls import traced
from tracer.chain import ALGORITHM, LINKS, Chain, digest_of
from tracer.log import find_logs
from tracer.record import CHECKPOINT, Kind, header
from tracer.segments import SegmentSink
from tracer.sinks import MemorySink
from tracer.tracer import Tracer

HEADER = header(place(), SMALL_KINDS, lane="io", run_id="run-a", tool_version="test")


def closed(*parts: list[tuple[object, ...]]) -> list[tuple[int, str]]:
    one = Chain(("tp",))
    found = []
    for part in parts:
        one.links += part
        found.append(one.close())
    return found


def test_a_digest_runs_over_the_one_before_it() -> None:
    whole = closed([("a", 1)], [("b", 2)])
    assert [count for count, _ in whole] == [1, 2]
    assert whole[0] == closed([("a", 1)])[0]
    assert whole[1] != closed([("a", 2)], [("b", 2)])[1]
    assert whole[1] == closed([("a", 1)], [("b", 2)])[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([("a", 1)], [("a", "1")]),
        ([("a", None)], [("a", "")]),
        ([("a", True)], [("a", 1)]),
        ([("a", 1), ("b",)], [("b",), ("a", 1)]),
        ([("a", "b")], [("ab",)]),
        ([("a",), ("b",)], [("a", "b")]),
        ([("a", [1, 2])], [("a", [2, 1])]),
        ([], [("a",)]),
    ],
)
def test_what_differs_has_another_digest(
    one: list[tuple[object, ...]], other: list[tuple[object, ...]]
) -> None:
    assert closed(one)[0][1] != closed(other)[0][1]


def test_a_digest_is_16_hex_characters_and_its_name_is_in_the_header() -> None:
    sink = MemorySink()
    Tracer(sink, HEADER, lambda: 7)
    assert json.loads(sink.lines[0])["chain"] == ALGORITHM
    assert len(digest_of(b"")) == 16
    assert set(digest_of(b"x")) <= set("0123456789abcdef")


def test_without_xxhash_there_is_still_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    name, digest = chain._chosen()
    assert name == "blake2b-64"
    assert len(digest(b"x")) == 16


def checkpoints(sink: MemorySink) -> list[tuple[int, int, str]]:
    records = [json.loads(line) for line in sink.lines]
    return [
        (record["seq"], record["count"], record["digest"])
        for record in records
        if record["kind"] == CHECKPOINT.name
    ]


def written(count: int, *, notes: int = 0, odd: int = -1, has_steps: bool = False) -> MemorySink:
    sink = MemorySink()
    tracing = Tracer(sink, HEADER, lambda: 7, has_steps=has_steps)
    decide, note = tracing.emitter(DECIDE), tracing.emitter(NOTE)
    for node in range(count):
        if has_steps:
            tracing.begin_step(node)
        for _ in range(notes):
            note("x")
        # What is local to a rank is under no checkpoint.
        decide(node, 1, 63 if node == odd else 64, notes)
        if has_steps:
            tracing.end_step(is_idle=False)
    tracing.close("completed")
    return sink


@pytest.mark.parametrize("has_steps", [False, True])
def test_a_checkpoint_comes_every_so_many_compared_records_whatever_else_is_written(has_steps: bool) -> None:
    one = checkpoints(written(2 * LINKS + 5, has_steps=has_steps))
    other = checkpoints(written(2 * LINKS + 5, notes=2, has_steps=has_steps))
    assert [count for _, count, _ in one] == [LINKS, 2 * LINKS]
    assert [digest for *_, digest in one] == [digest for *_, digest in other]
    assert [seq for seq, *_ in one] == [LINKS + 1, 2 * LINKS + 2]


@pytest.mark.parametrize(("odd", "equal"), [(LINKS - 1, 0), (LINKS, 1), (2 * LINKS + 1, 2)])
def test_digests_are_equal_up_to_the_first_difference_and_never_again(odd: int, equal: int) -> None:
    one, other = written(3 * LINKS), written(3 * LINKS, odd=odd)
    same = [a == b for a, b in zip(checkpoints(one), checkpoints(other), strict=True)]
    assert same == [True] * equal + [False] * (3 - equal)
    assert json.loads(one.lines[-1])["chains"] != json.loads(other.lines[-1])["chains"]


def test_the_trailer_has_the_last_checkpoint_of_each_chain() -> None:
    (count, digest), *_ = json.loads(written(7).lines[-1])["chains"].values()
    assert count == 7
    assert digest == closed([("write_backup", "", node, 1, 64) for node in range(7)])[0][1]


def test_a_watcher_reads_links_that_are_closed_already() -> None:
    one = Chain(("tp",))
    one.keep(2)
    for window in range(3):
        one.links += [(window, at) for at in range(4)]
        one.close()
    one.links += [(3, 0)]
    assert one.head == 13
    assert one.since(0) == (4, [(window, at) for window in (1, 2) for at in range(4)] + [(3, 0)])
    assert one.since(6) == (6, [(1, 2), (1, 3), *[(2, at) for at in range(4)], (3, 0)])
    assert one.since(12) == (12, [(3, 0)])
    assert one.since(13) == (13, [])


def test_without_a_watcher_closed_links_are_gone() -> None:
    one = Chain(("tp",))
    one.links += [("a",), ("b",)]
    one.close()
    assert one.since(0) == (2, [])


def test_a_watcher_in_another_thread_misses_no_link() -> None:
    one = Chain(("tp",))
    one.keep(1000)
    found: list[int] = []
    done = Event()

    def watch() -> None:
        while not done.is_set() or one.head > len(found):
            first, links = one.since(len(found))
            assert first == len(found)
            found.extend(number for _, number in links)

    watcher = Thread(target=watch)
    watcher.start()
    for number in range(20_000):
        one.links.append(("a", number))
        if number % 37 == 0:
            one.close()
    done.set()
    watcher.join(20)
    assert found == list(range(20_000))


WIDE = Kind("decide", "decision", agree=("tp", "cp"), compared=("node",))
NARROW = Kind("meet", "meeting", agree=("tp",), compared=("purpose",))
TWO_KINDS = (WIDE, NARROW, Kind("wrong_page", "anomaly", info=("page_index",)))


def two_chains(
    order: str, *, has_steps: bool = True, per_step: int = 8, kinds: Sequence[Kind] = TWO_KINDS
) -> list[dict[str, Any]]:
    """A lane that writes `w` and `n` in that order: its checkpoints, and its trailer behind them."""
    sink = MemorySink()
    head = header(place(), kinds, lane="io", run_id="run-a", tool_version="test")
    tracing = Tracer(sink, head, lambda: 7, has_steps=has_steps)
    emits = {"w": tracing.emitter(WIDE), "n": tracing.emitter(NARROW)}
    for step in range(0, len(order), per_step):
        if has_steps:
            tracing.begin_step(step)
        for letter in order[step : step + per_step]:
            emits[letter]("x")
        if has_steps:
            tracing.end_step(is_idle=False)
    tracing.close("completed")
    records = [json.loads(line) for line in sink.lines]
    return [record for record in records if record["kind"] in (CHECKPOINT.name, "trailer")]


def digests(found: list[dict[str, Any]]) -> list[Any]:
    return [(record["chains"]["tp,cp"], record["chains"].get("tp")) for record in found]


def test_another_order_of_records_of_two_chains_has_other_digests() -> None:
    assert digests(two_chains("wnwn")) == digests(two_chains("wnwn"))
    for other in ("wnnw", "nwnw", "wwnn"):
        (one,), (two,) = digests(two_chains("wnwn")), digests(two_chains(other))
        assert one[0] == two[0]
        assert one[1] != two[1]


def test_a_whole_window_of_the_wider_chain_in_between_is_seen_too() -> None:
    one = two_chains("w" * LINKS + "n" + "w" * LINKS, per_step=1)
    other = two_chains("n" + "w" * 2 * LINKS, per_step=1)
    assert digests(one)[-1][0] == digests(other)[-1][0]
    assert digests(one)[-1][1] != digests(other)[-1][1]


def test_where_the_wider_chain_is_closed_the_narrower_is_too() -> None:
    first, trailer = two_chains("wwwwwwnn" * (LINKS // 6 + 1) + "wwwwnnnn")
    assert (first["axes"], first["count"], list(first["chains"])) == ("tp,cp", LINKS + 4, ["tp,cp", "tp"])
    assert first["chains"]["tp,cp"] == [LINKS + 4, first["digest"]]
    assert first["records_of"] == {"tp,cp": LINKS + 4, "tp": LINKS // 3 + 2}
    assert trailer["records_of"] == {"tp,cp": LINKS + 8, "tp": LINKS // 3 + 6}


def test_the_narrower_chain_is_closed_alone_where_it_is_full() -> None:
    first, _ = two_chains("wnnn" * (LINKS // 3) + "wnnn")
    assert (first["axes"], list(first["chains"])) == ("tp", ["tp"])
    assert first["records_of"] == {"tp,cp": LINKS // 3 + 1, "tp": LINKS + 1}


def test_the_order_in_which_axes_are_named_makes_no_other_chain() -> None:
    turned = Kind("turned", "decision", agree=("cp", "tp"), compared=("node",))
    sink = MemorySink()
    head = header(place(), (WIDE, turned), lane="io", run_id="run-a", tool_version="test")
    tracing = Tracer(sink, head, lambda: 7)
    tracing.emitter(WIDE)(1)
    tracing.emitter(turned)(2)
    tracing.close("completed")
    assert list(json.loads(sink.lines[-1])["records_of"].values()) == [2]


CALL = Kind("call", "decision", agree=("tp",), compared=("n", "result"))
LOUD = Kind("loud", "decision", agree=("tp",), compared=("n", "result", "error"))
SINGLE = Kind("single", "decision", agree=("tp",), compared=("n",))


class Calls:
    """A lane without steps, with recorded calls that may call each other."""

    def __init__(self) -> None:
        self.sink = MemorySink()
        head = header(place(), (CALL, LOUD, SINGLE), lane="io", run_id="run-a", tool_version="test")
        self.tracer = Tracer(self.sink, head, lambda: 7)
        self.single = self.tracer.emitter(SINGLE)

        @traced(self.tracer, CALL, params=["n"], result=["result"])
        def call(n: int, inner: Callable[[], object] = int) -> int:
            inner()
            return n

        @traced(self.tracer, LOUD, params=["n"], result=["result"])
        def loud(n: int, inner: Callable[[], object] = int) -> int:
            inner()
            return n

        self.call, self.loud = call, loud

    def closed(self) -> list[dict[str, Any]]:
        self.tracer.close("completed")
        records = [json.loads(line) for line in self.sink.lines]
        return [record for record in records if record["kind"] in (CHECKPOINT.name, "trailer")]

    @property
    def compared(self) -> int:
        """Records in the lane, counted by their lines."""
        return sum(b'"kind":"checkpoint"' not in line for line in self.sink.lines[1:])


def test_a_call_and_its_result_are_two_records_and_one_link() -> None:
    calls = Calls()
    for n in range(LINKS):
        calls.call(n)
    first, _ = calls.closed()
    assert (first["count"], first["records_of"]) == (LINKS, {"tp": 2 * LINKS})


def test_calls_among_single_records_are_counted_apart() -> None:
    calls = Calls()
    for n in range(LINKS // 2):
        calls.call(n)
        calls.single([n])
    first, _ = calls.closed()
    assert (first["count"], first["records_of"]) == (LINKS, {"tp": LINKS + LINKS // 2})


def test_a_call_that_raised_is_two_records_too_where_its_kind_says_so() -> None:
    calls = Calls()
    with pytest.raises(ZeroDivisionError):
        calls.loud(1, lambda: 1 // 0)
    compared = calls.compared
    (trailer,) = calls.closed()
    assert trailer["records_of"] == {"tp": compared} == {"tp": 2}


def test_behind_a_call_that_left_no_outcome_nobody_knows_how_many_records_there_are() -> None:
    calls = Calls()
    with pytest.raises(ZeroDivisionError):
        calls.call(1, lambda: 1 // 0)
    calls.call(2)
    (trailer,) = calls.closed()
    assert (trailer["chains"]["tp"][0], trailer["records_of"]) == (1, {})


def test_inside_of_a_call_nobody_knows_either_and_behind_it_they_do() -> None:
    calls = Calls()
    calls.call(0, lambda: [calls.single(n) for n in range(LINKS)])
    for n in range(LINKS):
        calls.single(n)
    first, second, _ = calls.closed()
    assert (first["count"], first["records_of"]) == (LINKS, {})
    assert (second["count"], second["records_of"]) == (2 * LINKS, {"tp": 2 * LINKS + 1})


def test_in_which_order_calls_began_is_under_the_digest() -> None:
    inside, behind = Calls(), Calls()
    inside.call(1, lambda: inside.call(2))
    behind.call(2)
    behind.call(1)
    (one,), (two,) = inside.closed(), behind.closed()
    assert one["records_of"] == two["records_of"]
    assert one["chains"] != two["chains"]


def test_of_calls_that_may_be_open_at_once_nobody_knows() -> None:
    calls = Calls()

    @traced(calls.tracer, CALL, params=["n"])
    async def later(n: int) -> int:
        return n

    with contextlib.suppress(StopIteration):
        later(1).send(None)
    (trailer,) = calls.closed()
    assert (trailer["chains"]["tp"][0], trailer["records_of"]) == (1, {})


def test_a_record_that_was_dropped_leaves_nobody_knowing() -> None:
    calls = Calls()
    calls.tracer.emitter(SINGLE)({1, 2})
    calls.call(1)
    assert calls.closed()[-1]["records_of"] == {}


@pytest.mark.parametrize("limit_bytes", [None, 1 << 20])
def test_what_a_checker_must_see_is_counted(tmp_path: Path, limit_bytes: int | None) -> None:
    sink = SegmentSink(tmp_path, 0, "io", limit_bytes=limit_bytes)
    head = header(place(), TWO_KINDS, lane="io", run_id="run-a", tool_version="test")
    tracing = Tracer(sink, head, lambda: 7)
    decide, wrong = tracing.emitter(WIDE), tracing.emitter(TWO_KINDS[2])
    wrong(1)
    for node in range(LINKS):
        decide(node)
    wrong(2)
    tracing.close("completed")
    (lane,) = find_logs(tmp_path).lanes
    (found,) = [record for record in lane.records() if record["kind"] == CHECKPOINT.name]
    assert found["notes"] == {"wrong_page": 1}
    assert lane.trailer is not None and lane.trailer["notes"] == {"wrong_page": 2}


def test_checkpoints_are_in_a_file_of_their_own_with_the_place_behind_each(tmp_path: Path) -> None:
    sink = SegmentSink(tmp_path, 3, "io")
    tracing = Tracer(sink, HEADER, lambda: 7)
    decide = tracing.emitter(DECIDE)
    for node in range(3 * LINKS):
        decide(node, 1, 64, 5)
    tracing.close("completed")
    path = tmp_path / "rank0003.io.checkpoints"
    entries = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [entry["record"]["count"] for entry in entries] == [LINKS, 2 * LINKS, 3 * LINKS]
    for entry in entries:
        data = (tmp_path / f"rank0003.io.{entry['file']:03d}.jsonl").read_bytes()[: entry["end"]]
        assert json.loads(data.splitlines()[-1]) == entry["record"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("limit_bytes", [None, 1 << 20])
def test_a_ring_and_a_lane_whose_file_is_there_already_write_none(
    tmp_path: Path, limit_bytes: int | None
) -> None:
    path = tmp_path / "rank0000.io.checkpoints"
    if limit_bytes is None:
        path.write_text("another's")
    tracing = Tracer(SegmentSink(tmp_path, 0, "io", limit_bytes=limit_bytes), HEADER, lambda: 7)
    decide = tracing.emitter(DECIDE)
    for node in range(LINKS):
        decide(node, 1, 64, 5)
    tracing.close("completed")
    assert (path.read_text() if path.exists() else None) == (None if limit_bytes else "another's")
