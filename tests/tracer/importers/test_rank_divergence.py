from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.divergence_lines import divergence_line
from tracer.errors import LogError
from tracer.importers import rank_divergence
from tracer.importers.rank_divergence import Lines, Printed, read_lines, texts_of
from tracer.importers.sniff import File

EVENTS = [
    "check_prefetch_progress called params={'req_id': 'r7'}",
    "check_prefetch_progress returns result=True",
    "write_backup called params=<no check>",
]
FOREIGN = "[2026-03-01 12:00:01 TP1] Decode batch, #running-req: 3\n"


def read(tmp_path: Path, text: str | bytes) -> Lines:
    path = tmp_path / "server.log"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape"))
    return read_lines([File(path, path.name)])


def texts(printed: Printed) -> list[str]:
    return texts_of(printed)[: len(printed.events)]


def test_a_line_has_its_rank_its_count_and_its_events(tmp_path: Path) -> None:
    lines = read(tmp_path, "noise\n" + divergence_line(EVENTS, " DP1 PP0 TP3"))
    (one,) = lines.printed
    assert (one.line, one.tags, one.count) == (2, (("dp", 1), ("pp", 0), ("tp", 3)), 3)
    assert (one.is_whole, one.is_proven) == (True, True)
    assert [(event.name, event.phase, dict(event.fields)) for event in one.events] == [
        ("check_prefetch_progress", "call", {"req_id": "r7"}),
        ("check_prefetch_progress", "return", {"result": True}),
        ("write_backup", "call", {}),
    ]
    assert texts(one) == EVENTS
    assert lines.lines == {"server.log": 2}


@pytest.mark.parametrize(
    "event",
    [
        'it\'s "both"',
        "a\\'b",
        "back\\",
        "tab\tand\nline",
        "caf\u00e9 \U0001f600",
        "\x07\x85\u2028",
        "[]', '",
        "",
        "]",
    ],
)
def test_any_text_comes_back_as_it_was_before_it_was_printed(event: str, tmp_path: Path) -> None:
    (one,) = read(tmp_path, divergence_line([event, "after", event], " TP0")).printed
    assert (texts(one), one.is_proven) == ([event, "after", event], True)


def test_an_event_that_is_neither_call_nor_return_is_a_text_of_its_own(tmp_path: Path) -> None:
    (one,) = read(tmp_path, divergence_line(["my decision=foo | 100"], " TP0")).printed
    assert (one.events[0].name, one.events[0].phase, list(one.events[0].fields)) == ("", "", ["text"])


@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        ("[default3]:", 3),
        ("[rank2]: ", 2),
        ("[1,5]<stderr>:", 5),
        ("(rank 4) ", 4),
        ("\x1b[36m(RayWorker pid=812, ip=10.0.0.3)\x1b[0m ", None),
        ("2026-03-01T12:00:00.123456789Z stderr F ", None),
        ("sglang-worker-0-1  | ", None),
    ],
)
def test_what_a_launcher_puts_in_front_is_no_matter(
    launcher: str, number: int | None, tmp_path: Path
) -> None:
    (one,) = read(tmp_path, divergence_line(EVENTS, " TP1", launcher=launcher)).printed
    assert (one.tags, one.number, one.is_proven) == ((("tp", 1),), number, True)


@pytest.mark.parametrize("cut", [260, 300, -30, -1])
@pytest.mark.parametrize("block_bytes", [64, 1 << 20])
def test_a_line_of_another_process_in_the_middle_is_taken_out(
    cut: int, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_divergence, "BLOCK_BYTES", block_bytes)
    text = divergence_line(EVENTS, " TP0")[:-1]
    (one,) = read(tmp_path, text[:cut] + FOREIGN * 2 + text[cut:] + "\n" + FOREIGN).printed
    assert (texts(one), one.is_proven) == (EVENTS, True)


def test_two_lists_that_were_written_into_each_other_are_both_read(tmp_path: Path) -> None:
    other = [*EVENTS[:2], "insert called params=len(params.key)=5"]
    mine, theirs = divergence_line(EVENTS, " TP0"), divergence_line(other, " TP1")
    lines = read(tmp_path, mine[:200] + theirs[:240] + FOREIGN + theirs[240:] + mine[200:])
    found = {one.tags: (texts(one), one.is_proven) for one in lines.printed}
    assert found == {(("tp", 0),): (EVENTS, True), (("tp", 1),): (other, True)}


@pytest.mark.parametrize("launcher", ["2026-03-01T12:00:00.1Z stderr P ", "app-0  | ", "[default0]:", ""])
def test_a_line_that_a_collector_has_broken_is_put_together(launcher: str, tmp_path: Path) -> None:
    text = divergence_line(EVENTS, " TP0")
    parts = [text[:180], text[180:240], text[240:]]
    later = launcher.replace("00.1Z", "07.2Z")
    lines = read(
        tmp_path, f"{launcher}{parts[0]}\n{later}{parts[1]}\n{later.replace(' P ', ' F ')}{parts[2]}"
    )
    (one,) = lines.printed
    assert (texts(one), one.is_proven, lines.lines["server.log"]) == (EVENTS, True, 3)


def test_dockers_own_files_are_unwrapped(tmp_path: Path) -> None:
    text = FOREIGN + divergence_line([*EVENTS, 'with "quotes"'], " TP0")
    parts = [text[:100], text[100:250], text[250:]]
    wrapped = "".join(
        json.dumps({"log": part, "stream": "stderr", "time": "2026-03-01T12:00:00Z"}, separators=(",", ":"))
        + "\n"
        for part in parts
    )
    (one,) = read(tmp_path, wrapped).printed
    assert (texts(one), one.is_proven) == ([*EVENTS, 'with "quotes"'], True)


@pytest.mark.parametrize(
    ("cut", "whole"), [(-1, 3), (-2, 2), (-3, 2), (-30, 2), (-60, 1), (-125, 0)], ids=str
)
@pytest.mark.parametrize("end", ["", "\n" + FOREIGN])
def test_of_a_list_without_its_end_what_is_whole_counts(
    cut: int, whole: int, end: str, tmp_path: Path
) -> None:
    text = divergence_line(EVENTS, " TP0").rstrip("\n")
    (one,) = read(tmp_path, text[:cut] + end).printed
    assert (len(one.events), one.is_whole, one.is_proven, one.count) == (whole, False, False, 3)


@pytest.mark.parametrize(
    "text",
    [
        "[2026-03-01 12:00:00 TP0] Found rank divergence for 3 events(s)!\n",
        "[2026-03-01 12:00:00 TP0] Found rank divergence for \n",
        "[2026-03-01 12:00:00 TP0] Found rank divergence for 3 events(s)! local hash: ab12",
    ],
)
def test_a_line_that_ends_before_its_list_is_one_without_events(text: str, tmp_path: Path) -> None:
    (one,) = read(tmp_path, text).printed
    assert (one.events, one.damage) == ((), "it ends before its list")


def test_a_list_that_does_not_give_its_hash_is_not_proven(tmp_path: Path) -> None:
    (one,) = read(tmp_path, divergence_line(EVENTS, " TP0", digest="0" * 40)).printed
    assert (one.is_whole, one.is_proven, len(one.events)) == (True, False, 3)


def test_what_came_into_a_list_without_a_mark_is_not_believed(tmp_path: Path) -> None:
    text = divergence_line(EVENTS, " TP0")
    (one,) = read(tmp_path, text[:200] + "\n  at somewhere in a trace\n" + text[200:]).printed
    # It came into the second event, so only the one before it is sure.
    assert (one.is_proven, len(one.events)) == (False, 1)


def test_a_compressed_log_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "server.log.gz"
    path.write_bytes(gzip.compress(divergence_line(EVENTS, " TP0").encode()))
    (one,) = read_lines([File(path, path.name)]).printed
    assert texts(one) == EVENTS


def test_every_rank_that_wrote_anything_is_known(tmp_path: Path) -> None:
    lines = read(tmp_path, FOREIGN + FOREIGN.replace("TP1", "PP1 TP7") + divergence_line(EVENTS, " TP0"))
    assert {(("tp", 1),), (("pp", 1), ("tp", 7))} <= lines.tags


def test_a_file_that_ends_in_damage_is_a_note_beside_the_others(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.log", tmp_path / "bad.log.gz"
    good.write_text(divergence_line(EVENTS, " TP0"))
    bad.write_bytes(gzip.compress(divergence_line(EVENTS, " TP1").encode() * 50)[:-9])
    lines = read_lines([File(good, good.name), File(bad, bad.name)])
    assert lines.printed[0].file.name == "good.log"
    assert lines.notes[0].startswith("bad.log.gz: what it is compressed in is damaged")
    with pytest.raises(LogError, match=r"bad\.log\.gz"):
        read_lines([File(bad, bad.name)])


def peak_bytes(paths: Sequence[Path]) -> int:
    import tracemalloc

    tracemalloc.start()
    try:
        read_lines([File(path, path.name) for path in paths])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_line(tmp_path: Path) -> None:
    peaks = []
    for name, count in (("short", 20), ("long", 400)):
        # Each event is a text of 60 kB; the longer line has 24 MB.
        events = [f"match called params=ids={[number] * 20_000}" for number in range(count)]
        (tmp_path / name).write_text(divergence_line(events, " TP0"))
        peaks.append(peak_bytes([tmp_path / name]))
    assert peaks[1] < peaks[0] + (2 << 20)
