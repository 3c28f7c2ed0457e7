"""SQL from somebody else, in each form of the store: it reads the loaded records and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from tests.support.logs import DECIDE, NOTE, write_run
from tracer.errors import StoreError
from tracer.log import find_logs
from tracer.parquet import export_parquet
from tracer.trace_store import TraceStore, open_store

RECORDS = [
    {"kind": "write_backup", "node": 3, "pages": 1, "tokens": 64, "host_pages_free": 5, "step": 1},
    {"kind": "note", "text": 7, "step": 2},
]
FORMS = ("memory", "file", "kept", "parquet")
SECRET = "s3cr3t"


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that are none of a query's business, of every kind that a database can read."""
    folder = tmp_path_factory.mktemp("outside")
    for name in ("a.csv", "a.txt", "a.json", "a.sql"):
        (folder / name).write_text(f'"{SECRET}"\n')
    with duckdb.connect(str(folder / "a.duckdb")) as connection:
        connection.execute(f"CREATE TABLE t AS SELECT '{SECRET}' AS word")
        connection.execute(f"COPY t TO '{folder}/a.parquet'")
    return folder


@pytest.fixture(scope="module", params=FORMS)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceStore]:
    folder = tmp_path_factory.mktemp("hostile")
    write_run(folder / "run", {0: RECORDS, 1: RECORDS}, kinds=(DECIDE, NOTE))
    if request.param == "parquet":
        export_parquet(find_logs(folder / "run"), folder / "export")
        # What lies beside the files of an export is not a part of it.
        (folder / "export" / "stray.csv").write_text(SECRET)
        with open_store(folder / "export") as opened:
            yield opened
    elif request.param == "kept":
        open_store(folder / "run", keep=folder / "run.duckdb").close()
        with open_store(folder / "run.duckdb") as opened:
            yield opened
    else:
        with pytest.MonkeyPatch.context() as patch:
            if request.param == "file":
                patch.setattr("tracer.trace_store.IN_MEMORY_BYTES", 0)
            with open_store(folder / "run", with_hits=True) as opened:
                yield opened


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('{outside}/a.csv')",
        "SELECT * FROM read_csv_auto('{outside}/a.csv')",
        "SELECT * FROM read_text('{outside}/a.txt')",
        "SELECT * FROM read_blob('{outside}/a.txt')",
        "SELECT * FROM read_json('{outside}/a.json')",
        "SELECT * FROM read_ndjson_objects('{outside}/a.json')",
        "SELECT * FROM read_parquet('{outside}/a.parquet')",
        "SELECT * FROM parquet_scan('{outside}/a.parquet')",
        "SELECT * FROM parquet_metadata('{outside}/a.parquet')",
        "SELECT * FROM parquet_schema('{outside}/a.parquet')",
        "SELECT * FROM parquet_kv_metadata('{outside}/a.parquet')",
        "SELECT * FROM sniff_csv('{outside}/a.csv')",
        "SELECT * FROM glob('{outside}/*')",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM '{outside}/a.csv'",
        "SELECT * FROM '{outside}/a.parquet'",
        "SELECT * FROM '{outside}/*.parquet'",
        "FROM '{outside}/a.duckdb'",
        "SELECT * FROM read_duckdb('{outside}/a.duckdb')",
        "SELECT * FROM read_text('{path}/stray.csv')",
        "SELECT * FROM read_text('{path}/../run/run.json')",
        "SELECT * FROM read_text('{private}/logs/../../../etc/passwd')",
        "SELECT * FROM glob('{private}/*')",
        "SELECT * FROM read_text('/proc/self/environ')",
        "SELECT * FROM read_text('/dev/stdin')",
        "SELECT * FROM read_csv('https://example.invalid/a.csv')",
        "SELECT * FROM read_parquet('s3://bucket/a.parquet')",
        "SELECT * FROM 'http://example.invalid/a.parquet'",
        "SELECT * FROM query('SELECT * FROM read_text(''{outside}/a.txt'')')",
        "SELECT * FROM query_table('{outside}/a.csv')",
        "SELECT * FROM sqlite_scan('{outside}/a.db', 't')",
        "SELECT * FROM postgres_scan('host=localhost', 'a', 'b')",
        "SELECT * FROM read_single_csv_file('{outside}/a.csv')",
        "FROM json_execute_serialized_sql(json_serialize_sql('FROM read_text(''{outside}/a.txt'')'))",
        "SELECT * FROM enable_logging('QueryLog', storage = 'file', storage_path = '{outside}/stolen')",
        "SELECT * FROM enable_profiling()",
        "SELECT * FROM duckdb_extensions()",
        "SELECT * FROM import_database('{outside}')",
        "SELECT * FROM copy_database('memory', 'other')",
        "SELECT * FROM add_grammar_extension('x')",
        "SELECT * FROM python_map_function((SELECT 1))",
        "SELECT * FROM pandas_scan(1)",
        "SELECT * FROM arrow_scan(1, 1, 1)",
        "SELECT getenv('HOME')",
        "SELECT getvariable('x') FROM read_csv('{outside}/a.csv')",
        "COPY records TO '{outside}/stolen.csv'",
        "COPY (SELECT 1) TO '{private}/exports/stolen.csv'",
        "COPY records FROM '{outside}/a.csv'",
        "COPY (SELECT 1) TO '/dev/stdout'",
        "EXPORT DATABASE '{outside}/stolen'",
        "IMPORT DATABASE '{outside}'",
        "ATTACH '{outside}/a.duckdb' AS other",
        "DETACH memory",
        "USE main",
        "INSTALL httpfs",
        "LOAD httpfs",
        "LOAD '{outside}/a.duckdb_extension'",
        "SET enable_external_access = true",
        "SET memory_limit = '100GB'",
        "SET allowed_directories = ['/']",
        "SET allowed_paths = ['/etc/passwd']",
        "SET temp_directory = '{outside}'",
        "SET VARIABLE x = 1",
        "RESET lock_configuration",
        "PRAGMA enable_profiling",
        "PRAGMA database_list",
        "CALL pragma_version()",
        "CREATE SECRET s (TYPE s3)",
        "CREATE TABLE x (y INT)",
        "CREATE TEMP TABLE x AS SELECT 1",
        "CREATE OR REPLACE VIEW requests AS SELECT 1",
        "CREATE MACRO f(x) AS x",
        "INSERT INTO lanes (rank) VALUES (1)",
        "UPDATE lanes SET rank = 0",
        "DELETE FROM lanes",
        "TRUNCATE lanes",
        "DROP VIEW requests",
        "ALTER TABLE lanes RENAME TO x",
        "WITH gone AS (DELETE FROM lanes RETURNING *) SELECT * FROM gone",
        "EXPLAIN ANALYZE DELETE FROM lanes",
        "VACUUM",
        "CHECKPOINT",
        "FORCE CHECKPOINT",
        "BEGIN; SELECT 1",
        "SELECT 1; COPY lanes TO '{outside}/stolen.csv'",
        "PREPARE p AS SELECT 1",
        "EXECUTE p",
    ],
)
def test_nothing_but_the_loaded_records_can_be_reached(store: TraceStore, sql: str, outside: Path) -> None:
    private = store._folder.name
    before = sorted(os.listdir(outside))
    with pytest.raises(StoreError) as caught:
        store.query(sql.format(outside=outside, path=store.path, private=private))
    assert SECRET not in str(caught.value).split("\n")[0]
    assert sorted(os.listdir(outside)) == before
    assert store.query("SELECT count(*), sum(records) FROM records, lanes").rows == ((8, 16),)


@pytest.mark.parametrize(
    "sql",
    ["FROM duckdb_secrets()", "FROM which_secret('s3://bucket/a', 's3')", "FROM glob('{private}/exports/*')"],
)
def test_what_may_be_asked_for_is_empty(store: TraceStore, sql: str) -> None:
    assert store.query(sql.format(private=store._folder.name)).rows == ()


def test_settings_say_nothing_of_the_machine_that_matters(store: TraceStore) -> None:
    rows = store.query("SELECT name, value FROM duckdb_settings()").rows
    values = dict(rows)
    assert (values["enable_external_access"], values["lock_configuration"]) == ("false", "true")
    assert not [name for name, value in rows if str(Path.home()) in str(value) and str(Path.home()) != "/"]


@pytest.fixture(scope="module", params=FORMS)
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceStore]:
    """The same with little memory, which is not to be exceeded."""
    folder = tmp_path_factory.mktemp("small")
    write_run(folder / "run", {0: RECORDS}, kinds=(DECIDE, NOTE))
    path = folder / "run"
    if request.param == "parquet":
        export_parquet(find_logs(path), folder / "export")
        path = folder / "export"
    elif request.param == "kept":
        open_store(path, keep=folder / "run.duckdb").close()
        path = folder / "run.duckdb"
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "file":
            patch.setattr("tracer.trace_store.IN_MEMORY_BYTES", 0)
        with open_store(path, memory_limit="100MB") as opened:
            yield opened


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT length(repeat('x', 4000000000))",
        "SELECT len(range(1000000000))",
        "SELECT len(generate_series(1, 1000000000))",
        "SELECT string_agg(repeat('x', 100000), '') FROM range(100000)",
        "SELECT list(repeat('x', 1000)) FROM range(10000000)",
        "SELECT len(string_split(repeat('a,', 1000000000), ','))",
        "SELECT a.range, b.range FROM range(100000) a, range(100000) b ORDER BY hash(a.range + b.range)",
    ],
)
def test_a_query_that_needs_too_much_memory_fails_alone(small: TraceStore, sql: str) -> None:
    with pytest.raises(StoreError, match="needs more memory than it may use, 100MB"):
        small.query(sql)
    assert small.query("SELECT count(*) FROM records").rows == ((2,),)
