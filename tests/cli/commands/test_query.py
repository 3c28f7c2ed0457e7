from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from cli.app import main
from tests.cli.conftest import Hicache
from tests.support.logs import write_lane
from tracer.log import find_logs
from tracer.parquet import export_parquet
from tracer.queries import QUERIES

VIEWS = ("requests", "matches", "transfers", "queues", "collectives", "decisions", "evictions", "pools")
KEPT = "hung.duckdb"


@pytest.fixture(scope="session")
def kept(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the hung run as logs, as a kept database and as Parquet; not to be changed."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "hung").symlink_to(runs / "hung")
    assert main(["query", str(runs / "hung"), "--db", str(folder / "hung.duckdb")]) == 0
    export_parquet(find_logs(runs / "hung"), folder / "hung.parquet")
    return folder


@pytest.fixture
def inside(kept: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That folder as the working directory. Where the form does not matter `KEPT` is there soonest."""
    monkeypatch.chdir(kept)
    return kept


@pytest.mark.parametrize("name", sorted(QUERIES))
def test_every_query_of_the_tool_fits_the_screen_and_says_the_same_of_what_was_kept(
    name: str, kept: Path, hicache: Hicache
) -> None:
    said = hicache("query", kept / "hung", "--name", name)
    assert (said.code, said.err) == (0, "")
    assert [line for line in said.out.splitlines() if len(line) > 80] == []
    assert hicache("query", kept / "hung.duckdb", "--name", name) == said
    assert hicache("query", kept / "hung.parquet", "--name", name) == said


def test_hits_can_be_asked_for_in_every_form(kept: Path, hicache: Hicache) -> None:
    sql = "SELECT rid, device, computed, reason FROM HITS ORDER BY number"
    said = hicache("query", kept / "hung", sql, "--json")
    assert json.loads(said.out)
    assert hicache("query", kept / "hung.duckdb", sql, "--json") == said
    assert hicache("query", kept / "hung.parquet", sql, "--json") == said


def test_the_schema_is_that_of_every_form(kept: Path, hicache: Hicache) -> None:
    said = hicache("query", kept / "hung", "--schema")
    assert [line for line in said.out.splitlines() if len(line) > 80] == []
    assert hicache("query", kept / "hung.duckdb", "--schema") == said
    assert hicache("query", kept / "hung.parquet", "--schema") == said


def test_a_query_keeps_its_database_and_answers(inside: Path, tmp_path: Path, hicache: Hicache) -> None:
    db = tmp_path / "hung.duckdb"
    said = hicache("query", "hung", "SELECT 1 AS one", "--json", "--db", db)
    assert (said.code, said.out, said.err) == (0, '[{"one": 1}]\n', "")
    assert db.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hung", "--db", "there"], "--db there is there already, and stays as it is"),
        (["hung", "--db", "hung"], "--db hung is there already, and stays as it is"),
        (["hung", "--db", "none/x"], "--db none/x: no folder none"),
        (["hung", "--db", "run.json"], "--db run.json has the name of a run's own file"),
        (["hung", "SELECT 1", "--db", "x", "--out", "./x"], "--db and --out are both x"),
        (["--list", "--db", "x"], "--list asks no logs"),
        (["hung", "--db", "x", "--json"], "query takes one question"),
        (["hung", "--db", ""], "it is empty; expected a path"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_place_where_nothing_can_be_kept_is_code_2(
    words: list[str], said: str, runs: Path, tmp_path: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").write_text("mine")
    (tmp_path / "hung").symlink_to(runs / "hung")
    monkeypatch.chdir(tmp_path)
    ended = hicache("query", *words)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hung", "there"]


def test_what_was_kept_is_not_kept_again(kept: Path, tmp_path: Path, hicache: Hicache) -> None:
    ended = hicache("query", kept / "hung.parquet", "SELECT 1", "--db", tmp_path / "x")
    assert (ended.code, ended.out) == (2, "")
    assert "is kept already" in ended.err


def test_a_database_that_is_not_ours_is_code_3(tmp_path: Path, hicache: Hicache) -> None:
    path = tmp_path / "x.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE t AS SELECT 1")
    ended = hicache("query", path, "SELECT 1")
    assert (ended.code, ended.out) == (3, "")
    assert ended.err.startswith("error: not kept by this tool, or damaged\n")


def test_a_newer_database_is_code_3(kept: Path, tmp_path: Path, hicache: Hicache) -> None:
    path = tmp_path / "x.duckdb"
    path.write_bytes((kept / "hung.duckdb").read_bytes())
    with duckdb.connect(str(path)) as connection:
        connection.execute("UPDATE hicache_store SET facts = replace(facts, '[1, 0]', '[2, 0]')")
    ended = hicache("query", path, "SELECT 1")
    assert (ended.code, ended.out) == (3, "")
    assert "version 2.0 of hicache.store, this tool knows 1.x" in ended.err


def test_of_several_runs_one_is_chosen(tmp_path: Path, hicache: Hicache) -> None:
    write_lane(tmp_path, [], rank=0, run_id="a", sizes={"tp": 2})
    write_lane(tmp_path, [], rank=1, run_id="b", sizes={"tp": 2})
    ended = hicache("query", tmp_path, "FROM ranks")
    assert ended.code == 3
    assert ended.err.endswith("where     a, b\n  try       one of them, by --run\n")
    said = hicache("query", tmp_path, "SELECT rank, run_id FROM ranks", "--run", "b", "--json")
    assert json.loads(said.out) == [{"rank": 1, "run_id": "b"}]
    assert hicache("query", tmp_path, "FROM ranks", "--run", "c").code == 3


def test_json_is_a_list_of_row_objects(inside: Path, hicache: Hicache) -> None:
    said = hicache("query", KEPT, "SELECT rank, outcome FROM lanes ORDER BY rank", "--json")
    assert (said.code, said.err) == (0, "")
    assert [{"rank": rank, "outcome": "hung"} for rank in range(4)] == json.loads(said.out)


def test_json_columns_are_not_encoded_twice(inside: Path, hicache: Hicache) -> None:
    said = hicache("query", KEPT, "SELECT fields FROM decisions LIMIT 1; -- done", "--format", "json")
    assert isinstance(json.loads(said.out)[0]["fields"], dict)


def test_columns_of_one_name_are_told_apart(inside: Path, hicache: Hicache) -> None:
    assert json.loads(hicache("query", KEPT, "SELECT 1 AS a, 2 AS a", "--json").out) == [{"a": 1, "a_1": 2}]


def test_no_rows_is_an_empty_list(inside: Path, hicache: Hicache) -> None:
    assert json.loads(hicache("query", KEPT, "FROM lanes WHERE false", "--json").out) == []


def test_csv_has_a_header_and_can_be_read_back(inside: Path, hicache: Hicache) -> None:
    said = hicache("query", KEPT, "SELECT rank, [1, 2] AS two, NULL AS none FROM lanes", "--format", "csv")
    assert list(csv.reader(io.StringIO(said.out)))[:2] == [["rank", "two", "none"], ["0", "[1, 2]", ""]]


def test_parquet_goes_to_a_file_with_the_types_of_the_database(
    inside: Path, tmp_path: Path, hicache: Hicache
) -> None:
    out = tmp_path / "rows.parquet"
    sql = "SELECT rank, rids, 'a;b' AS text, NULL::BIGINT AS none FROM records WHERE kind = 'batch';"
    said = hicache("query", KEPT, sql, "--format", "parquet", "--out", out)
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
    wanted = json.loads(hicache("query", KEPT, f"SELECT count(*) AS n FROM ({sql[:-1]})", "--json").out)
    assert wanted == [{"n": count}]
    assert [out] == list(tmp_path.iterdir())


def test_parquet_without_a_file_is_refused(inside: Path, hicache: Hicache) -> None:
    said = hicache("query", KEPT, "FROM lanes", "--format", "parquet")
    assert (said.code, said.err) == (
        2,
        "error: --format parquet writes a file\n  try       --out rows.parquet\n",
    )


@pytest.mark.parametrize("shape", ["table", "csv", "json"])
def test_out_takes_the_place_of_stdout(shape: str, inside: Path, tmp_path: Path, hicache: Hicache) -> None:
    words = ("query", "hung", "SELECT rank FROM lanes", "--format", shape)
    assert hicache(*words, "--out", tmp_path / "rows").out == ""
    assert hicache(*words).out == (tmp_path / "rows").read_text()


def test_list_names_every_query_of_the_tool(hicache: Hicache) -> None:
    said = hicache("query", "--list")
    assert all(name in said.out for name in QUERIES)
    assert [line for line in said.out.splitlines() if len(line) > 80] == []
    assert list(QUERIES) == [entry["name"] for entry in json.loads(hicache("query", "--list", "--json").out)]


def test_schema_names_every_view_with_its_columns(inside: Path, hicache: Hicache) -> None:
    document = json.loads(hicache("query", KEPT, "--schema", "--json").out)
    columns = {entry["name"]: entry["columns"] for entry in document}
    assert set(VIEWS) <= set(columns)
    assert "fields" in columns["decisions"]
    (decisions,) = (entry for entry in document if entry["name"] == "decisions")
    assert decisions["types"]["fields"] == "JSON"
    assert decisions["meanings"]["group_seq"] == "number of that call"
    assert [line for line in hicache("query", KEPT, "--schema").out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELEC 1", "the query failed: Parser Error"),
        ("FROM nope", "the query failed: Catalog Error"),
        ("SELECT 1; SELECT 2", "one SELECT can be run"),
        ("DROP TABLE records", "one SELECT can be run"),
        ("FROM read_csv('/etc/passwd')", "nothing else: no file, network or setting"),
        ("SELECT '\udcff'", "the query is no text in UTF-8"),
        (
            "SELECT error('a' || chr(27) || '[31m' || chr(13))",
            "the query failed: Invalid Input Error: a [31m",
        ),
    ],
)
def test_a_query_that_is_wrong_or_forbidden_is_code_2(
    sql: str, said: str, inside: Path, hicache: Hicache
) -> None:
    ended = hicache("query", KEPT, sql)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert said in ended.err.splitlines()[0]
    assert [line for line in ended.err.split("\n") if not line.isprintable()] == []


@pytest.mark.parametrize("words", [[], ["hung"], ["hung", "SELECT 1", "--name", "lanes_cut"]], ids=str)
def test_a_query_is_one_question_to_one_run(words: list[str], inside: Path, hicache: Hicache) -> None:
    assert hicache("query", *words).code == 2


def test_an_unknown_name_lists_those_there_are(inside: Path, hicache: Hicache) -> None:
    said = hicache("query", KEPT, "--name", "nope")
    assert said.code == 2
    assert ", ".join(QUERIES) in said.err


ENDLESS = "select sum(hash(a.range)) from range(1000000000000) a"
# The child says that its query has begun, so that no timing decides what is interrupted.
INTERRUPTED = """
import sys
from tracer import trace_store
real = trace_store.interruptibly
def told(connection, work):
    def announced():
        if trace_store.is_asking:
            print("asking", file=sys.stderr, flush=True)
        return work()
    return real(connection, announced)
trace_store.is_asking = False
trace_store.interruptibly = told
real_lock = trace_store.lock
def locked(*arguments):
    real_lock(*arguments)
    trace_store.is_asking = True
trace_store.lock = locked
from cli.app import main
sys.exit(main())
"""


RECURSIVE = "WITH RECURSIVE t AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t"


@pytest.mark.parametrize(
    ("sql", "shape", "form"),
    [
        (ENDLESS, "table", "hung"),
        (ENDLESS, "csv", "hung.duckdb"),
        # The table needs but the first rows of an endless answer, and then counts the others.
        ("FROM range(1000000000000)", "table", "hung.parquet"),
        ("FROM range(1000000000000)", "csv", "hung"),
        (RECURSIVE, "table", "hung"),
        (RECURSIVE, "table", "hung.duckdb"),
        (RECURSIVE, "table", "hung.parquet"),
    ],
)
def test_ctrl_c_ends_a_query_that_would_not_end(
    sql: str, shape: str, form: str, kept: Path, tmp_path: Path
) -> None:
    words = ["query", str(kept / form), sql, "--format", shape, "--out", str(tmp_path / "rows")]
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "asking\n"
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_sigterm_ends_a_query_and_leaves_nothing_behind(kept: Path, tmp_path: Path) -> None:
    """A database of large logs is gigabytes, and nobody would look for it."""
    database, folder = tmp_path / "run.duckdb", tmp_path / "tmp"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, "query", str(kept / "hung"), ENDLESS, "--db", str(database)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "asking\n"
        process.terminate()
        said = process.stderr.read()
    assert (process.returncode, said.splitlines()[-1:]) == (143, ["stopped by SIGTERM"])
    assert (list(folder.iterdir()), sorted(tmp_path.iterdir())) == ([], [database, folder])


def test_a_table_shows_the_first_rows_and_says_how_many_there_are(inside: Path, hicache: Hicache) -> None:
    said = hicache("query", KEPT, "SELECT range AS n FROM range(123456) ORDER BY n; -- all")
    lines = said.out.splitlines()
    assert (lines[0].split(), lines[1].split(), lines[1000].split()) == (["n"], ["0"], ["999"])
    assert lines[1001:] == ["(the first 1,000 of 123,456 rows; --full shows all)"]
    assert hicache("query", KEPT, "FROM range(1000)").out.splitlines()[-1] == "(1,000 rows)"
    said = hicache("query", KEPT, "FROM range(1500)", "--full")
    assert (len(said.out.splitlines()), said.out.splitlines()[-1]) == (1502, "(1,500 rows)")


# A query of one row and one of many: how much higher the peak of the process is after the second, in MB.
GROWTH = """
import sys
from cli.app import main
def peak():
    # What getrusage says begins with the peak of the process that has started this one.
    status = open("/proc/self/status").read()
    return int(status[status.index("VmHWM:"):].split()[1]) // 1024
def ask(rows):
    sql = f"SELECT repeat('x', 1000) AS text FROM range({rows})"
    return main([sql if word == "SQL" else word for word in sys.argv[1:]])
code, before = ask(1), peak()
code = code or ask(100_000)
print(peak() - before)
sys.exit(code)
"""


@pytest.mark.parametrize("shape", ["json", "csv", "parquet", "table"])
def test_an_answer_that_does_not_fit_in_memory_is_written_all_the_same(
    shape: str, kept: Path, tmp_path: Path
) -> None:
    """100,000 rows of a kilobyte, by a process that one row has warmed up; 50 MB more are enough."""
    words = ["query", str(kept / "hung.duckdb"), "SQL", "--format", shape, "--out", str(tmp_path / "rows")]
    done = subprocess.run([sys.executable, "-c", GROWTH, *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) < 50


def test_a_query_that_runs_out_of_memory_is_one_clear_error(
    inside: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def fetchmany(self, rows: int) -> None:
            raise MemoryError

    monkeypatch.setattr("tracer.trace_store.TraceStore._rows", lambda store, cursor: Full().fetchmany(1))
    said = hicache("query", KEPT, "FROM lanes", "--json")
    assert said.code == 2
    assert said.err.startswith("error: the query needs more memory than it may use, 4GB\n")


def test_json_has_no_word_for_some_values(inside: Path, hicache: Hicache) -> None:
    sql = (
        "SELECT 'nan'::DOUBLE AS nan, 'inf'::FLOAT AS inf, [1.5, '-inf'::DOUBLE] AS list, "
        "{'a': 'nan'::FLOAT} AS s, "
        "'\\xAA\\x00b'::BLOB AS blob, DATE '2026-01-02' AS day, 1.50::DECIMAL(5,2) AS dec, "
        "MAP {1: 'x'} AS map, "
        "'[1e999]'::JSON AS json, 170141183460469231731687303715884105727::HUGEINT AS huge"
    )
    said = hicache("query", KEPT, sql, "--json")
    assert (said.code, said.err) == (0, "")

    def no_constant(word: str) -> None:
        raise AssertionError(word)

    (row,) = json.loads(said.out, parse_constant=no_constant)
    row_map = row.pop("map")
    assert row == {
        "nan": None,
        "inf": None,
        "list": [1.5, None],
        "s": {"a": None},
        "blob": "aa0062",
        "day": "2026-01-02",
        "dec": "1.50",
        "json": [None],
        "huge": 2**127 - 1,
    }
    assert row_map in ({"1": "x"}, {"key": [1], "value": ["x"]})


def test_parquet_keeps_what_json_cannot_say(inside: Path, tmp_path: Path, hicache: Hicache) -> None:
    out = tmp_path / "rows.parquet"
    sql = "SELECT 'nan'::DOUBLE AS nan, "
    sql += "'\\xAA'::BLOB AS blob, DATE '2026-01-02' AS day, 1.50::DECIMAL(5,2) AS dec"
    assert hicache("query", KEPT, sql, "--format", "parquet", "--out", out).code == 0
    with duckdb.connect(":memory:") as connection:
        described = connection.execute(f"DESCRIBE FROM '{out}'").fetchall()
    assert [row[1] for row in described] == ["DOUBLE", "BLOB", "DATE", "DECIMAL(5,2)"]


def test_a_field_that_was_read_as_null_is_told_on_stderr(tmp_path: Path, hicache: Hicache) -> None:
    write_lane(tmp_path, [{"kind": "match", "rid": "r0", "node": "seventeen"}])
    said = hicache("query", tmp_path, "SELECT rid, node FROM matches", "--json")
    assert (said.code, json.loads(said.out)) == (0, [{"rid": "r0", "node": None}])
    assert said.err == "note: 1 value of node read as null: not BIGINT\n"


def test_an_unknown_table_suggests_the_schema(inside: Path, hicache: Hicache) -> None:
    said = hicache("query", "hung", "FROM nope")
    assert said.err.endswith("  try       hicache query hung --schema\n")


def test_an_unknown_format_is_one_message(inside: Path, hicache: Hicache) -> None:
    said = hicache("query", KEPT, "FROM lanes", "--format", "xml")
    assert (said.code, said.err) == (
        2,
        "error: --format xml is not known\n  expected  table, json, csv or parquet\n",
    )


def test_the_help_says_that_schema_needs_a_path(hicache: Hicache) -> None:
    assert re.search(r"--schema\s+PATH's views", hicache("query", "--help").out)


@pytest.mark.parametrize(
    "words",
    [
        ["SELECT 1", "--json", "--format", "csv"],
        ["--schema", "--out", "x"],
        ["--schema", "--format", "csv"],
    ],
    ids=" ".join,
)
def test_options_that_do_not_go_together_are_refused(
    words: list[str], inside: Path, hicache: Hicache
) -> None:
    said = hicache("query", "twin", *words)
    assert (said.code, said.out) == (2, "")
    assert not (inside / "x").exists()


def test_hits_that_could_not_be_counted_are_no_silent_nothing(tmp_path: Path, hicache: Hicache) -> None:
    path = write_lane(tmp_path / "run", [{"kind": "request", "rid": "r0", "input_tokens": -1}]).parent
    assert hicache("query", path, "--db", tmp_path / "run.duckdb").code == 0
    for each in (path, tmp_path / "run.duckdb"):
        said = hicache("query", each, "FROM hits", "--json")
        assert (said.code, said.out) == (0, "[]\n")
        assert "note: hits has no rows: record 1 lacks a count or field" in said.err
    assert hicache("query", path, "SELECT 1").err == ""
