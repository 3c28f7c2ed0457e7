"""A database that is kept: what it takes to be opened again, and what is refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import duckdb
import pytest

from tests.support.logs import DECIDE, write_lane, write_run
from tracer.errors import StoreError
from tracer.kept import document, read_document
from tracer.queries import QUERIES
from tracer.trace_store import open_store

BACKED_UP = {"kind": "write_backup", "node": 3, "pages": 1, "tokens": 64, "host_pages_free": 5}
REQUEST = {"kind": "request", "rid": "r0", "input_tokens": 8}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", {0: [REQUEST, BACKED_UP], 1: [BACKED_UP]}, kinds=(DECIDE,))
    open_store(tmp_path / "run", keep=tmp_path / "run.duckdb").close()
    return tmp_path / "run.duckdb"


def test_a_kept_database_gives_the_same_answers_without_its_logs(kept: Path) -> None:
    run = kept.with_suffix("")
    with open_store(run) as opened:
        expected = {name: opened.canned(name) for name in QUERIES}
        fields = opened.query("SELECT own_fields(records) FROM records").rows
    for path in run.iterdir():
        path.unlink()
    with open_store(kept) as opened:
        assert {name: opened.canned(name) for name in QUERIES} == expected
        assert opened.query("SELECT own_fields(records) FROM records").rows == fields
        assert (opened.facts.run_id, opened.facts.records, opened.facts.world_size) == ("run-a", 3, 2)


def test_a_kept_database_is_its_owners_alone_and_one_file(kept: Path) -> None:
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert sorted(path.name for path in kept.parent.iterdir()) == ["run", "run.duckdb"]


def test_a_kept_database_is_recognised_whatever_its_name_is(kept: Path) -> None:
    other = kept.rename(kept.with_name("it's [a] * name=1"))
    with open_store(other) as opened:
        assert opened.query("SELECT count(*) FROM records").rows == ((3,),)


@pytest.mark.parametrize("there", ["file", "folder", "link"])
def test_what_is_there_already_stays_as_it_is(kept: Path, there: str) -> None:
    place = kept.with_name("there.duckdb")
    if there == "file":
        place.write_text("mine")
    elif there == "folder":
        place.mkdir()
    else:
        place.symlink_to("nowhere")
    with pytest.raises(StoreError, match="is there already"):
        open_store(kept.with_suffix(""), keep=place)
    assert not place.is_file() or place.read_text() == "mine"
    assert sorted(path.name for path in kept.parent.iterdir()) == ["run", "run.duckdb", "there.duckdb"]


def test_a_load_that_fails_in_the_middle_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lane(tmp_path / "run", [BACKED_UP], kinds=(DECIDE,))

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tracer.trace_store.fill_hits", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_store(tmp_path / "run", keep=tmp_path / "run.duckdb")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_foreign_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "foreign.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE t AS SELECT 1")
    with pytest.raises(StoreError, match="not kept by this tool"):
        open_store(path)


@pytest.mark.parametrize("content", [b"", b"x" * 5000, b"x" * 8 + b"DUCK" + b"x" * 5000])
def test_a_file_that_is_no_database_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.duckdb"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"is no database|can't be opened"):
        open_store(path)


def test_a_half_database_is_refused(kept: Path) -> None:
    kept.write_bytes(kept.read_bytes()[: kept.stat().st_size // 2])
    with pytest.raises(StoreError):
        open_store(kept)


@pytest.mark.parametrize(
    ("version", "said"), [("[2, 0]", "version 2.0 of hicache.store, this tool knows 1.x"), ("[1, 9]", "")]
)
def test_a_newer_major_version_is_refused_and_a_newer_minor_one_is_not(
    kept: Path, version: str, said: str
) -> None:
    with duckdb.connect(str(kept)) as connection:
        connection.execute(f"UPDATE hicache_store SET facts = replace(facts, '[1, 0]', '{version}')")
    if said:
        with pytest.raises(StoreError, match=said):
            open_store(kept)
    else:
        open_store(kept).close()


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE OR REPLACE VIEW requests AS FROM read_text('{secret}')",
        "DROP TABLE hicache_store; "
        "CREATE VIEW hicache_store AS SELECT content AS facts FROM read_text('{secret}')",
    ],
)
def test_a_kept_database_that_somebody_has_prepared_reads_no_files(kept: Path, sql: str) -> None:
    secret = kept.with_name("secret.txt")
    secret.write_text("s3cr3t")
    with duckdb.connect(str(kept)) as connection:
        connection.execute(sql.format(secret=secret))
    with pytest.raises(StoreError) as caught, open_store(kept) as opened:
        opened.query("FROM requests")
    assert "s3cr3t" not in str(caught.value)


def test_a_kept_database_is_not_changed_by_queries(kept: Path) -> None:
    before = kept.read_bytes()
    with open_store(kept) as opened:
        with pytest.raises(StoreError):
            opened.query("WITH gone AS (DELETE FROM records RETURNING *) FROM gone")
        opened.query("FROM requests")
    assert kept.read_bytes() == before
    assert sorted(os.listdir(kept.parent)) == ["run", "run.duckdb"]


def test_another_run_than_the_one_that_was_kept_is_not_there(kept: Path) -> None:
    open_store(kept, run_id="run-a").close()
    with pytest.raises(StoreError, match="no run b"):
        open_store(kept, run_id="b")


def test_what_is_kept_is_not_kept_again(kept: Path) -> None:
    with pytest.raises(StoreError, match="is kept already"):
        open_store(kept, keep=kept.with_name("other.duckdb"))


def test_the_notes_of_a_log_are_kept(tmp_path: Path) -> None:
    write_lane(tmp_path / "run", [{"kind": "match", "rid": "r0", "node": "seventeen"}])
    open_store(tmp_path / "run", keep=tmp_path / "k").close()
    with open_store(tmp_path / "k") as opened:
        assert opened.notes == ("1 value of node read as null: not BIGINT",)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"format": "x", "version": [1, 0], "runs": []}',
        '{"format": "hicache.store", "version": [1], "runs": []}',
        '{"format": "hicache.store", "version": [1, 0], "runs": []}',
        '{"format": "hicache.store", "version": [1, 0], "runs": [{"run_id": 7}]}',
        '{"format": "hicache.store", "version": [1, 0], "runs": '
        '[{"run_id": "a", "world_size": -1, "records": 0}]}',
        "[" * 100_000,
    ],
)
def test_facts_that_can_not_be_true_are_refused(text: str) -> None:
    with pytest.raises(StoreError):
        read_document(text, "hicache.store", "here")


def test_facts_are_read_as_they_were_written(kept: Path) -> None:
    with open_store(kept) as opened:
        facts = opened.facts
    assert read_document(document("hicache.store", [facts]), "hicache.store", "").runs == (facts,)
