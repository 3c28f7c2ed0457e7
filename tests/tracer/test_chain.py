"""Equal digests mean equal records up to there, whatever happened in between."""

from __future__ import annotations

import json
import sys
from threading import Event, Thread

import pytest

from tests.support.logs import DECIDE, NOTE, SMALL_KINDS, place
from tracer import chain
from tracer.chain import ALGORITHM, LINKS, Chain, digest_of
from tracer.record import CHECKPOINT, header
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
