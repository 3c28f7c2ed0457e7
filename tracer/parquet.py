"""A run as a folder of Parquet, and the hits of what was kept.

Owns how an export is made. It appears whole or not at all; kept.py has its layout, and trace_store.py opens
it. `open_hits` reads the counted hits of an export or a kept database, without the logs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tracer.errors import HitsError, StoreError
from tracer.kept import (
    EXPORT_FORMAT,
    META_NAME,
    RECORDS,
    TABLES,
    Facts,
    beside,
    document,
    folder_name,
    is_database,
    is_export,
    is_there,
)
from tracer.load import REQUEST_TYPES, quoted
from tracer.locked import interruptibly
from tracer.log import Run
from tracer.served import RequestHits
from tracer.spans import ExportCount
from tracer.trace_store import KEEP, TraceStore, loaded, open_store

if TYPE_CHECKING:
    import duckdb

__all__ = ["export_parquet", "is_export", "is_kept", "open_hits", "read_hits"]

Progress = Callable[[int], None]
# Half the bytes of the default, in the same time.
COPY_OPTIONS = "(FORMAT parquet, COMPRESSION zstd)"
PART = "part"
# What `hits --by request` shows of a request, in its order.
ROW_COLUMNS = (
    *("rid", "input_tokens", "device", "host", "storage", "computed", "reason"),
    *("unplaced", "unplaced_reason"),
)
SUMMED = ("input_tokens", "device", "host", "storage", "computed")


def export_parquet(run: Run, folder: Path, *, progress: Progress | None = None) -> ExportCount:
    """Write a run's tables to a folder that isn't there yet.

    Args:
        progress: told after each rank how many records have been written.

    Raises:
        StoreError: something is at `folder`, there is no room, or the logs hold several runs.
    """
    if os.path.lexists(folder):
        raise is_there(folder)
    with loaded(run) as (connection, facts, place), beside(folder, place / KEEP) as hidden:
        part = hidden / PART
        part.mkdir()
        written = _write_tables(connection, facts, part, progress)
        (part / META_NAME).write_bytes(document(EXPORT_FORMAT, [facts]))
        _name(part, folder)
    return ExportCount(facts.records, written)


def _write_tables(
    connection: duckdb.DuckDBPyConnection, facts: Facts, part: Path, progress: Progress | None
) -> int:
    """Write every table; returns how many records."""
    own = f"run_id={folder_name(facts.run_id)}"

    def copy(sql: str, *names: str) -> int:
        path = part.joinpath(*names[:-1]) / f"{names[-1]}.parquet"
        path.parent.mkdir(parents=True)
        # The database is given a name that it can take for nothing but a name.
        alias = part / "next.parquet"
        found = interruptibly(
            connection,
            lambda: connection.execute(f"COPY ({sql}) TO {quoted(str(alias))} {COPY_OPTIONS}").fetchone(),
        )
        alias.rename(path)
        return int(found[0]) if found else 0

    for name in TABLES:
        copy(f"FROM {name}", name, own, name)
    ranks = connection.execute("SELECT DISTINCT rank FROM lanes ORDER BY rank").fetchall()
    written = 0
    for (rank,) in ranks:
        sql = f"SELECT * EXCLUDE (rank) FROM records WHERE rank = {int(rank)}"
        written += copy(sql, RECORDS, own, f"rank={int(rank)}", RECORDS)
        if progress is not None:
            progress(written)
    if written != facts.records:
        raise StoreError(f"{written:,} records were written, the logs have {facts.records:,}")
    return written


def _name(part: Path, folder: Path) -> None:
    """Give a finished folder its name; a rename takes the place of an empty folder at most."""
    try:
        part.rename(folder)
    except OSError as error:
        if os.path.lexists(folder):
            raise is_there(folder) from None
        raise StoreError(f"{folder} can't be written: {error.strerror}") from None


def is_kept(path: Path) -> bool:
    """Whether `open_hits` can read it: a Parquet export or a kept database."""
    return is_export(path) or is_database(path)


class KeptHits:
    """The hits of an export or a kept database, as they were counted when it was made.

    Attributes:
        facts: of the run; `hits_notes` says what limits these numbers.
    """

    def __init__(self, store: TraceStore, where: str) -> None:
        self.facts = store.facts
        self._store = store
        self._where = where

    def requests(self) -> Iterator[RequestHits]:
        """Every request, as `hits` has counted it, in its order: the one in which they were written."""
        with self._store.answer(f"SELECT {', '.join(REQUEST_TYPES)} FROM hits {self._where}") as answer:
            for row in answer.rows:
                yield RequestHits(*row)

    def rows_json(self) -> Iterator[str]:
        """The rows of `--by request`, in its order, each as one line of JSON; a million a second."""
        packed = ", ".join(f"{name} := {name}" for name in ROW_COLUMNS)
        with self._store.answer(
            f"SELECT to_json(struct_pack({packed}))::VARCHAR FROM hits {self._where}"
        ) as answer:
            for (row,) in answer.rows:
                yield row

    def totals(self) -> dict[str, int]:
        """`requests`, and over all of them `input_tokens` and the tokens of each tier."""
        summed = ", ".join(f"coalesce(sum({name}), 0)::BIGINT AS {name}" for name in SUMMED)
        table = self._store.query(f"SELECT count(*) AS requests, {summed} FROM hits {self._where}")
        return dict(zip(table.columns, table.rows[0], strict=True))

    def grouped(self, *columns: str) -> tuple[Mapping[str, Any], ...]:
        """The same sums for each value of some columns of `hits`, such as `conversation` or `reason`."""
        unknown = set(columns) - REQUEST_TYPES.keys()
        assert columns and not unknown, f"hits: {sorted(unknown)} are not among {list(REQUEST_TYPES)}"
        names = ", ".join(columns)
        summed = ", ".join(f"sum({name})::BIGINT AS {name}" for name in SUMMED)
        table = self._store.query(
            f"SELECT {names}, count(*) AS requests, {summed} FROM hits {self._where} "
            f"GROUP BY {names} ORDER BY min(number)"
        )
        return tuple(dict(zip(table.columns, row, strict=True)) for row in table.rows)

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_hits(
    path: Path, *, run_id: str | None = None, since: int | None = None, until: int | None = None
) -> KeptHits:
    """The hits of what was kept, without its logs.

    Args:
        since: first scheduler step whose arrivals count; `until` the last one.

    Raises:
        HitsError: they could not be counted when it was made.
        StoreError: it is not what it should be.
    """
    store = open_store(path, run_id=run_id, is_hits_only=True)
    if store.facts.hits_problem:
        store.close()
        raise HitsError(f"{path} has no hits: {store.facts.hits_problem}")
    limits = [f"step >= {since:d}"] if since is not None else []
    limits += [f"step <= {until:d}"] if until is not None else []
    return KeptHits(store, f"WHERE {' AND '.join(limits) or 'true'}")


def read_hits(path: Path) -> Iterator[RequestHits]:
    """Every request of what was kept, as `hits` has counted it.

    Raises:
        HitsError: they could not be counted when it was made.
        StoreError: it is not what it should be.
    """
    with open_hits(path) as found:
        yield from found.requests()
