"""A run as a folder of Parquet: its layout, its answers, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import duckdb
import pytest

from tests.support.logs import DECIDE, write_lane, write_run
from tracer.errors import HitsError, StoreError
from tracer.hits import hits
from tracer.kept import META_NAME, is_export, is_kept
from tracer.log import find_logs
from tracer.parquet import export_parquet
from tracer.queries import QUERIES
from tracer.spans import ExportCount
from tracer.stored_hits import StoredHits, stored_hits
from tracer.trace_store import open_store

BACKED_UP = {"kind": "write_backup", "node": 3, "pages": 1, "tokens": 64, "host_pages_free": 5}
SERVED = [
    {"kind": "request", "rid": "r0", "input_tokens": 96, "conversation": "c", "step": 1},
    {"kind": "match", "rid": "r0", "device_tokens": 64, "host_tokens": 0, "miss_digest": "ab", "step": 1},
    {
        **{"kind": "admit", "rid": "r0", "verdict": "admitted", "step": 1},
        **{"device_tokens": 64, "host_tokens": 0, "storage_tokens": 0},
    },
    {"kind": "forward", "mode": "extend", "rids": ["r0"], "computed_tokens": [32], "step": 1},
    {"kind": "finish", "rid": "r0", "reason": "stop", "output_tokens": 1, "step": 2},
    {"kind": "request", "rid": "r1", "input_tokens": 10, "step": 3},
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and its export; not to be changed."""
    folder = tmp_path_factory.mktemp("made")
    run = write_run(folder / "run", {0: [*SERVED, BACKED_UP], 1: [BACKED_UP]}, kinds=(DECIDE,))
    assert export_parquet(find_logs(run), folder / "export") == ExportCount(8, 8)
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "run", tmp_path / "run"))


@pytest.fixture
def export(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "export", tmp_path / "export"))


def test_an_export_is_partitioned_by_run_and_rank(export: Path) -> None:
    files = sorted(str(path.relative_to(export)) for path in export.rglob("*") if path.is_file())
    assert files == [
        "hicache.parquet.json",
        "hits/run_id=run-a/hits.parquet",
        "kinds/run_id=run-a/kinds.parquet",
        "lanes/run_id=run-a/lanes.parquet",
        "records/run_id=run-a/rank=0/records.parquet",
        "records/run_id=run-a/rank=1/records.parquet",
    ]
    assert (is_export(export), is_kept(export), is_export(export.parent)) == (True, True, False)
    assert json.loads((export / META_NAME).read_text())["version"] == [1, 0]


def test_one_run_gives_the_same_bytes_again(run: Path, export: Path) -> None:
    again = export.with_name("again")
    export_parquet(find_logs(run), again)
    for path in (path for path in export.rglob("*") if path.is_file()):
        assert path.read_bytes() == (again / path.relative_to(export)).read_bytes(), path


def test_other_programs_read_an_export(export: Path) -> None:
    with duckdb.connect(":memory:") as connection:
        rows = connection.execute(
            f"SELECT run_id, rank, lane, seq, kind FROM read_parquet('{export}/records/*/*/*.parquet') "
            "ORDER BY rank, lane, seq"
        ).fetchall()
    assert rows[-2:] == [
        ("run-a", 0, "scheduler", 7, "write_backup"),
        ("run-a", 1, "scheduler", 1, "write_backup"),
    ]


def test_an_export_gives_the_same_answers_without_its_logs(run: Path, export: Path) -> None:
    with open_store(run) as opened:
        expected = {name: opened.canned(name) for name in QUERIES}
        rows = opened.query("FROM records").rows
        fields = opened.query("SELECT own_fields(records) FROM records").rows
    shutil.rmtree(run)
    with open_store(export) as opened:
        assert {name: opened.canned(name) for name in QUERIES} == expected
        assert opened.query("FROM records").rows == rows
        assert opened.query("SELECT own_fields(records) FROM records").rows == fields


def test_every_form_has_the_same_columns(run: Path, export: Path) -> None:
    sql = (
        "SELECT table_name, column_name, data_type FROM duckdb_columns() "
        "WHERE NOT internal AND table_name <> 'hicache_store' ORDER BY table_name, column_index"
    )
    with open_store(run, with_hits=True) as logs, open_store(export) as parquet:
        assert logs.query(sql) == parquet.query(sql)


def test_hits_are_those_of_the_logs(run: Path, export: Path) -> None:
    open_store(run, keep=export.with_name("k.duckdb")).close()
    expected = hits(find_logs(run))
    for kept in (export, export.with_name("k.duckdb")):
        found, store = stored_hits(kept)
        with store:
            assert isinstance(found, StoredHits)
            assert json.loads(f"[{','.join(found.rows_text())}]") == list(expected.rows)
            assert list(found.rows) == list(expected.rows)
            assert (found.request_count, found.input_tokens) == (2, 106)
            assert found.cached_tokens == expected.cached_tokens
            assert (found.cached_tokens["device"], found.limits) == (64, expected.limits)
        by_tier, store = stored_hits(kept, by="conversation")
        with store:
            assert by_tier.requests == expected.requests
            assert [(row["conversation"], row["requests"]) for row in by_tier.rows] == [("c", 1), (None, 1)]


def test_hits_of_some_steps_only(export: Path) -> None:
    found, store = stored_hits(export, since=2, until=3)
    with store:
        assert isinstance(found, StoredHits)
        assert [row["rid"] for row in found.rows] == ["r1"]
        assert (found.request_count, len(json.loads(f"[{','.join(found.rows_text())}]"))) == (1, 1)


def test_logs_whose_hits_can_not_be_counted_are_exported_without(tmp_path: Path) -> None:
    write_lane(tmp_path / "run", [BACKED_UP], rank=1, sizes={"tp": 2}, kinds=(DECIDE,))
    export_parquet(find_logs(tmp_path / "run"), tmp_path / "export")
    with open_store(tmp_path / "export") as opened:
        assert opened.query("SELECT (SELECT count(*) FROM records), (SELECT count(*) FROM hits)").rows == (
            (1, 0),
        )
    with pytest.raises(HitsError, match="no replica's first rank left a log"):
        stored_hits(tmp_path / "export")


def test_a_log_without_a_single_record_is_exported(tmp_path: Path) -> None:
    write_lane(tmp_path / "run", [])
    assert export_parquet(find_logs(tmp_path / "run"), tmp_path / "export") == ExportCount(0, 0)
    with open_store(tmp_path / "export") as opened:
        assert opened.query("SELECT rank, records FROM ranks").rows == ((0, 0),)
        assert opened.query("FROM requests").rows == ()


@pytest.mark.parametrize("run_id", ["../../up", "a/b", "a b=*[1]%", "ü\u2028", "'; DROP TABLE lanes; --"])
def test_a_run_id_is_no_path_and_no_pattern(run_id: str, tmp_path: Path) -> None:
    write_lane(tmp_path / "run", [BACKED_UP], run_id=run_id, kinds=(DECIDE,))
    export_parquet(find_logs(tmp_path / "run"), tmp_path / "it's [a] * =")
    assert sorted(os.listdir(tmp_path)) == ["it's [a] * =", "run"]
    with open_store(tmp_path / "it's [a] * =") as opened:
        assert opened.facts.run_id == run_id
        assert opened.query("SELECT count(*) FROM records").rows == ((1,),)


def test_a_run_id_that_is_too_long_for_a_folder_is_refused(tmp_path: Path) -> None:
    write_lane(tmp_path / "run", [], run_id="x" * 1000)
    with pytest.raises(StoreError, match="a run id of 1,000 characters"):
        export_parquet(find_logs(tmp_path / "run"), tmp_path / "export")
    assert os.listdir(tmp_path) == ["run"]


def test_what_is_there_already_stays_as_it_is(run: Path, export: Path) -> None:
    before = sorted(export.rglob("*"))
    with pytest.raises(StoreError, match="is there already"):
        export_parquet(find_logs(run), export)
    assert sorted(export.rglob("*")) == before


def test_an_export_that_fails_in_the_middle_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(written: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_parquet(find_logs(run), tmp_path / "export", progress=interrupted)
    assert os.listdir(tmp_path) == ["run"]


def test_progress_is_told_after_each_rank(run: Path, tmp_path: Path) -> None:
    told: list[int] = []
    export_parquet(find_logs(run), tmp_path / "export", progress=told.append)
    assert told == [7, 8]


def together(export: Path, tmp_path: Path) -> None:
    """Put a second run into the folder, as somebody would who collects them."""
    write_lane(tmp_path / "other", [BACKED_UP], run_id="run-b", kinds=(DECIDE,))
    export_parquet(find_logs(tmp_path / "other"), tmp_path / "second")
    shutil.copytree(
        tmp_path / "second", export, dirs_exist_ok=True, ignore=lambda _folder, _names: [META_NAME]
    )
    both = json.loads((export / META_NAME).read_text())
    both["runs"] += json.loads((tmp_path / "second" / META_NAME).read_text())["runs"]
    (export / META_NAME).write_text(json.dumps(both))


def test_of_several_runs_one_must_be_chosen(export: Path, tmp_path: Path) -> None:
    together(export, tmp_path)
    with pytest.raises(StoreError, match="holds 2 runs\n  where     run-a, run-b"):
        open_store(export)
    with pytest.raises(StoreError, match="no run run-c"):
        open_store(export, run_id="run-c")
    with open_store(export, run_id="run-b") as opened:
        assert opened.query("SELECT count(*), min(run_id) FROM records, lanes").rows == ((1, "run-b"),)


@pytest.mark.parametrize("table", ["lanes", "kinds", "hits", "records"])
def test_an_export_with_a_part_missing_is_refused(export: Path, table: str) -> None:
    shutil.rmtree(export / table)
    with pytest.raises(StoreError, match="the export can't be read"):
        open_store(export)


def test_an_export_with_a_rank_missing_is_refused(export: Path) -> None:
    shutil.rmtree(export / "records" / "run_id=run-a" / "rank=1")
    with pytest.raises(StoreError, match="the export holds 7 records, its facts say 8"):
        open_store(export)


def test_a_link_among_the_files_is_not_followed(export: Path, tmp_path: Path) -> None:
    path = export / "records" / "run_id=run-a" / "rank=1" / "records.parquet"
    path.rename(tmp_path / "elsewhere.parquet")
    path.symlink_to(tmp_path / "elsewhere.parquet")
    with pytest.raises(StoreError, match="the export holds 7 records"):
        open_store(export)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"x" * 1000])
def test_a_damaged_file_is_one_clear_error(export: Path, content: bytes) -> None:
    path = export / "records" / "run_id=run-a" / "rank=1" / "records.parquet"
    path.write_bytes(content)
    with pytest.raises(StoreError, match="the export can't be read") as refused:
        open_store(export)
    assert f"'{path}'" in refused.value.what
    assert (refused.value.where, refused.value.hint) == (str(export), "export again")


def test_files_with_other_columns_are_one_clear_error(export: Path) -> None:
    path = export / "records" / "run_id=run-a" / "rank=0" / "records.parquet"
    for each in export.glob("records/*/*/*.parquet"):
        with duckdb.connect(":memory:") as connection:
            connection.execute(f"COPY (SELECT 1 AS a) TO '{each}' (FORMAT parquet)")
    assert path.exists()
    with pytest.raises(StoreError, match="the export can't be read: Binder Error"):
        open_store(export)


@pytest.mark.parametrize("version", ["[2, 0]", "[1]", '"x"'])
def test_another_version_is_refused(export: Path, version: str) -> None:
    meta = export / META_NAME
    meta.write_text(meta.read_text().replace("[1, 0]", version))
    with pytest.raises(StoreError):
        open_store(export)


def test_other_files_in_an_export_are_no_part_of_it(export: Path) -> None:
    (export / "records" / "run_id=run-a" / "rank=1" / "stray.txt").write_text("no part of it")
    (export / "records" / "run_id=run-a" / "rank=x").mkdir()
    with open_store(export) as opened:
        assert opened.query("SELECT count(*) FROM records").rows == ((8,),)
