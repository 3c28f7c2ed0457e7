"""Query rows for other programs: JSON, CSV, Parquet.

Owns what a value of the database becomes there. Types come from the database, not from the values, so
that a column of nulls keeps its own.
"""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.errors import CliError

if TYPE_CHECKING:
    from tracer.trace_store import Table, TraceStore


def typed_columns(store: TraceStore, sql: str) -> tuple[str, ...]:
    """The database's type of each column of a query that has run.

    A semicolon ends a statement and can't stand in brackets. The one that ends this statement is the
    only place at which what comes before it is a whole query, so it is found by trying.
    """
    from tracer.errors import StoreError

    ends = [len(sql), *(index for index, char in enumerate(sql) if char == ";")]
    for end in ends:
        try:
            described = store.query(f"SELECT column_type FROM (DESCRIBE {sql[:end]}\n)")
        except StoreError:
            continue
        return tuple(str(row[0]) for row in described.rows)
    raise CliError("the types of this query's columns can't be found", expected="--format table or csv")


def render(table: Table, types: Sequence[str], shape: str) -> str:
    """The rows as text: `json` is a list of objects, `csv` has a header line."""
    if shape == "json":
        rows = [json.dumps(row, ensure_ascii=False, default=str) for row in json_rows(table, types)]
        return "[" + ",\n ".join(rows) + "]\n"
    text = io.StringIO()
    if shape == "csv":
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(table.columns)
        writer.writerows([_plain(value) for value in row] for row in table.rows)
    else:
        from cli.screens.query import rows_table

        text.writelines(f"{line}\n" for line in rows_table(table, 1 << 16))
    return text.getvalue()


def json_rows(table: Table, types: Sequence[str]) -> list[dict[str, Any]]:
    """One dictionary a row; columns of type JSON are decoded, columns of one name told apart."""
    names = unique(table.columns)
    is_json = [kind == "JSON" for kind in types]
    return [
        {
            name: json.loads(value) if decode and isinstance(value, str) else value
            for name, value, decode in zip(names, row, is_json, strict=True)
        }
        for row in table.rows
    ]


def unique(columns: Sequence[str]) -> list[str]:
    """Names that can be keys: the second `a` becomes `a_1`."""
    names: list[str] = []
    for column in columns:
        name, number = column, 0
        while name in names:
            number += 1
            name = f"{column}_{number}"
        names.append(name)
    return names


def write_parquet(table: Table, types: Sequence[str], out: Path) -> None:
    """The rows as one Parquet file; written beside its place and moved there whole.

    Raises:
        CliError: the file can't be written.
    """
    import duckdb

    columns = ", ".join(
        f"{_quoted(name)}: {_quoted(kind)}" for name, kind in zip(unique(table.columns), types, strict=True)
    )
    part = out.with_name(f".{out.name}.part")
    try:
        with (
            tempfile.TemporaryDirectory(prefix="hicache-") as folder,
            duckdb.connect(":memory:") as connection,
        ):
            rows = Path(folder) / "rows.jsonl"
            with rows.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, default=str) + "\n" for row in json_rows(table, types))
            connection.execute(
                f"COPY (SELECT * FROM read_json({_quoted(str(rows))}, columns = {{{columns}}}, "
                "format = 'newline_delimited', maximum_object_size = 33554432)) "
                f"TO {_quoted(str(part))} (FORMAT parquet)"
            )
        part.replace(out)
    except (OSError, duckdb.Error) as error:
        part.unlink(missing_ok=True)
        raise CliError(f"{out} was not written: {str(error).splitlines()[0]}") from None


def write_out(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CliError(f"{out} was not written: {error.strerror}") from None


def _plain(value: Any) -> Any:
    """A cell of CSV: lists and structures as JSON, nothing for null."""
    return (
        json.dumps(value, ensure_ascii=False, default=str)
        if isinstance(value, list | dict | tuple)
        else value
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
