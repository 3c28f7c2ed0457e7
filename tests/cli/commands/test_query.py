from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import duckdb
import pytest

from tests.cli.conftest import Hicache
from tracer.trace_store import QUERIES

VIEWS = ("requests", "matches", "transfers", "queues", "collectives", "decisions", "evictions", "pools")


def test_json_is_a_list_of_row_objects(inside: Path, hicache: Hicache) -> None:
    said = hicache("query", "hung", "SELECT rank, outcome FROM lanes ORDER BY rank", "--json")
    assert (said.code, said.err) == (0, "")
    assert [{"rank": rank, "outcome": "hung"} for rank in range(4)] == json.loads(said.out)


def test_json_columns_are_not_encoded_twice(inside: Path, hicache: Hicache) -> None:
    said = hicache("query", "hung", "SELECT fields FROM decisions LIMIT 1; -- done", "--format", "json")
    assert isinstance(json.loads(said.out)[0]["fields"], dict)


def test_columns_of_one_name_are_told_apart(inside: Path, hicache: Hicache) -> None:
    assert json.loads(hicache("query", "hung", "SELECT 1 AS a, 2 AS a", "--json").out) == [{"a": 1, "a_1": 2}]


def test_no_rows_is_an_empty_list(inside: Path, hicache: Hicache) -> None:
    assert json.loads(hicache("query", "hung", "FROM lanes WHERE false", "--json").out) == []


def test_csv_has_a_header_and_can_be_read_back(inside: Path, hicache: Hicache) -> None:
    said = hicache("query", "hung", "SELECT rank, [1, 2] AS two, NULL AS none FROM lanes", "--format", "csv")
    assert list(csv.reader(io.StringIO(said.out)))[:2] == [["rank", "two", "none"], ["0", "[1, 2]", ""]]


def test_parquet_goes_to_a_file_with_the_types_of_the_database(
    inside: Path, tmp_path: Path, hicache: Hicache
) -> None:
    out = tmp_path / "rows.parquet"
    sql = "SELECT rank, rids, 'a;b' AS text, NULL::BIGINT AS none FROM records WHERE kind = 'batch';"
    said = hicache("query", "hung", sql, "--format", "parquet", "--out", out)
    assert (said.code, said.out, said.err) == (0, "", "")
    with duckdb.connect(":memory:") as connection:
        described = connection.execute(f"DESCRIBE FROM '{out}'").fetchall()
        assert [row[:2] for row in described] == [
            ("rank", "BIGINT"),
            ("rids", "VARCHAR[]"),
            ("text", "VARCHAR"),
            ("none", "BIGINT"),
        ]
        (count,) = connection.execute(f"SELECT count(*) FROM '{out}'").fetchone() or (0,)
    wanted = json.loads(hicache("query", "hung", f"SELECT count(*) AS n FROM ({sql[:-1]})", "--json").out)
    assert wanted == [{"n": count}]
    assert [out] == list(tmp_path.iterdir())


def test_parquet_without_a_file_is_refused(inside: Path, hicache: Hicache) -> None:
    said = hicache("query", "hung", "FROM lanes", "--format", "parquet")
    assert (said.code, said.err) == (
        2,
        "error: --format parquet writes a file\n  try       --out rows.parquet\n",
    )


@pytest.mark.parametrize("shape", ["table", "csv", "json"])
def test_out_takes_the_place_of_stdout(shape: str, inside: Path, tmp_path: Path, hicache: Hicache) -> None:
    words = ("query", "hung", "SELECT rank FROM lanes", "--format", shape)
    assert hicache(*words, "--out", tmp_path / "rows").out == ""
    assert hicache(*words).out == (tmp_path / "rows").read_text()


@pytest.mark.parametrize("name", sorted(QUERIES))
def test_every_query_of_the_tool_runs_and_fits_the_screen(name: str, inside: Path, hicache: Hicache) -> None:
    said = hicache("query", "hung", "--name", name)
    assert (said.code, said.err) == (0, "")
    assert [line for line in said.out.splitlines() if len(line) > 80] == []


def test_list_names_every_query_of_the_tool(hicache: Hicache) -> None:
    said = hicache("query", "--list")
    assert all(name in said.out for name in QUERIES)
    assert [line for line in said.out.splitlines() if len(line) > 80] == []
    assert list(QUERIES) == [entry["name"] for entry in json.loads(hicache("query", "--list", "--json").out)]


def test_schema_names_every_view_with_its_columns(inside: Path, hicache: Hicache) -> None:
    document = json.loads(hicache("query", "hung", "--schema", "--json").out)
    columns = {entry["name"]: entry["columns"] for entry in document}
    assert set(VIEWS) <= set(columns)
    assert "fields" in columns["decisions"]
    assert [line for line in hicache("query", "hung", "--schema").out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELEC 1", "the query failed: Parser Error"),
        ("FROM nope", "the query failed: Catalog Error"),
        ("SELECT 1; SELECT 2", "one SELECT can be run"),
        ("DROP TABLE records", "one SELECT can be run"),
        ("FROM read_csv('/etc/passwd')", "nothing else: no file, network or setting"),
    ],
)
def test_a_query_that_is_wrong_or_forbidden_is_code_2(
    sql: str, said: str, inside: Path, hicache: Hicache
) -> None:
    ended = hicache("query", "hung", sql)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert said in ended.err.splitlines()[0]


@pytest.mark.parametrize("words", [[], ["hung"], ["hung", "SELECT 1", "--name", "lanes_cut"]], ids=str)
def test_a_query_is_one_question_to_one_run(words: list[str], inside: Path, hicache: Hicache) -> None:
    assert hicache("query", *words).code == 2


def test_an_unknown_name_lists_those_there_are(inside: Path, hicache: Hicache) -> None:
    said = hicache("query", "hung", "--name", "nope")
    assert said.code == 2
    assert ", ".join(QUERIES) in said.err
