from __future__ import annotations

from pathlib import Path

from tests.support.foreign_lines import read
from tracer.importers import log_ends
from tracer.importers.dossier import Dossier


def ends(found: Dossier) -> list[tuple[int | None, dict[str, int], int]]:
    return [(line.who.rank, dict(line.who.places), line.at.record) for line in found.lines]


def test_each_writers_last_line_is_told(tmp_path: Path) -> None:
    text = (
        "[2031-02-03 04:05:06 TP0] a\n[2031-02-03 04:05:06 TP1] b\nand more\n[2031-02-03 04:05:07 TP0] c\n"
        "[rank3]:[E203 04:10:08.1 f.cpp:1] d\n"
    )
    expected = [(None, {"tp": 0}, 4), (None, {"tp": 1}, 2), (3, {}, 5)]
    assert expected == ends(read(log_ends, tmp_path, text))


def test_a_file_in_which_nobody_is_told_is_one_writers(tmp_path: Path) -> None:
    assert ends(read(log_ends, tmp_path, "INFO a\nINFO b\n")) == [(None, {}, 2)]


def test_prose_is_no_log() -> None:
    assert tuple(
        log_ends.votes(text)
        for text in (b"# Title\n\nwords\n", b"INFO starting\n", b"[2031-02-03 04:05:06 TP0] a\n")
    ) == (0, 1, 2)


def test_a_shorter_tag_is_not_the_end_of_a_longer_one(tmp_path: Path) -> None:
    text = "[2031-02-03 04:05:06 TP1] a\n[2031-02-03 04:05:06 PP0 TP1] b\n"
    assert ends(read(log_ends, tmp_path, text)) == [(None, {"tp": 1}, 1), (None, {"pp": 0, "tp": 1}, 2)]
