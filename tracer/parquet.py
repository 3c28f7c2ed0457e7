"""A run as a folder of Parquet.

Owns how an export is made. It appears whole or not at all; kept.py has its layout, trace_store.py opens it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tracer.errors import StoreError
from tracer.kept import (
    EXPORT_FORMAT,
    META_NAME,
    RECORDS,
    TABLES,
    Facts,
    beside,
    document,
    folder_name,
    is_there,
)
from tracer.load import quoted
from tracer.locked import interruptibly
from tracer.log import Run
from tracer.spans import ExportCount
from tracer.trace_store import KEEP, loaded

if TYPE_CHECKING:
    import duckdb

Progress = Callable[[int], None]
# Half the bytes of the default, in the same time.
COPY_OPTIONS = "(FORMAT parquet, COMPRESSION zstd)"
PART = "part"


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
