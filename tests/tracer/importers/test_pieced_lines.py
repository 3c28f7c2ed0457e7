from __future__ import annotations

from pathlib import Path

from tests.support.divergence_lines import divergence_line
from tracer.importers.pieced_lines import put_together
from tracer.importers.rank_divergence import Printed, read_lines, texts_of
from tracer.importers.sniff import File

EVENTS = [f"step called params=tokens={[index * 1000 + one for one in range(90)]}" for index in range(20)]
ODD = [*EVENTS[:12], "step called params=tokens=[1]", *EVENTS[13:]]
LISTS = (EVENTS, EVENTS, ODD)
LINES = [divergence_line(events, f" TP{rank}") for rank, events in enumerate(LISTS)]


def together(tmp_path: Path, text: str) -> list[Printed]:
    path = tmp_path / "server.log"
    path.write_text(text)
    return put_together(read_lines([File(path, path.name)]).printed)


def test_lists_in_pieces_are_put_together_along_one_that_is_whole(tmp_path: Path) -> None:
    _, one, two = LINES
    found = together(tmp_path, LINES[0] + one[:6000] + two[:5000] + one[6000:9000] + two[5000:] + one[9000:])
    assert [one.is_proven for one in found] == [True, True, True]
    assert [texts_of(one) for one in found] == list(LISTS)
    assert texts_of(found[2], 12) == ["step called params=tokens=[1]"]


def test_lists_that_have_changed_their_rests_are_told_by_their_hashes(tmp_path: Path) -> None:
    _, one, two = LINES
    found = together(tmp_path, one[:5000] + two[:5000] + one[5000:] + two[5000:])
    assert [texts_of(one) for one in found] == [EVENTS, ODD]
    assert [(one.is_proven, one.is_pieced) for one in found] == [(True, True)] * 2


def test_where_no_hash_proves_it_nothing_is_put_together(tmp_path: Path) -> None:
    one, two = (divergence_line(events, digest="0" * 40) for events in (EVENTS, ODD))
    found = together(tmp_path, LINES[0] + one[:6000] + two[:5000] + one[6000:9000] + two[5000:] + one[9000:])
    assert [one.is_proven for one in found] == [True, False, False]


def test_whole_lists_are_left_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("".join(LINES))
    printed = read_lines([File(path, path.name)]).printed
    assert put_together(printed) == printed
