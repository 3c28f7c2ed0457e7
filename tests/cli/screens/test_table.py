from __future__ import annotations

from cli.screens.table import table


def lines(*args: object, **options: object) -> list[str]:
    return [str(line) for line in table(*args, **{"width": 40, **options})]  # type: ignore[arg-type]


def test_numbers_stand_right_and_words_left() -> None:
    assert lines(["name", "pages"], [["a", 1], ["bcdef", 1000]]) == [
        "name   pages",
        "a          1",
        "bcdef   1000",
    ]


def test_nothing_is_a_dash_and_no_character_moves_the_cursor() -> None:
    assert lines(["a", "b"], [[None, "x\x1b[2Jy\nz"]]) == ["a  b", "-  x [2Jy z"]


def test_a_table_without_rows_is_its_header() -> None:
    assert lines(["rank", "lane"], []) == ["rank  lane"]


def test_a_column_that_says_the_same_everywhere_gives_way_when_room_is_short() -> None:
    rows = [[rank, "scheduler", "x" * 20] for rank in range(2)]
    assert lines(["rank", "lane", "text"], rows, width=30) == [
        "rank",
        "   0",
        "   1",
        "(in every row: lane scheduler,",
        "text xxxxxxxxxxxxxxxxxxxx)",
    ]


def test_the_last_column_is_cut_and_those_behind_it_are_named() -> None:
    rows = [[1, "a" * 30, "b"], [2, "c" * 30, "d"]]
    assert lines(["rank", "text", "more"], rows, width=20, more="--json") == [
        "rank  text",
        "   1  aaaaaaaaaaaa..",
        "   2  cccccccccccc..",
        "(not shown: more;",
        "--json)",
    ]


def test_one_column_always_stays() -> None:
    assert lines(["text"], [["a" * 30]], width=10) == ["text", "aaaaaaaa.."]


def test_no_name_of_a_column_moves_the_cursor() -> None:
    assert lines(["a\nb\x1b[31m"], [[1]]) == ["a b [31m", "       1"]
