"""`hicache query`: SQL over a run's records, read-only, as a table, JSON, CSV or Parquet."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.errors import CliError
from cli.options import Json

if TYPE_CHECKING:
    from tracer.trace_store import Table, TraceStore

VIEWS_SQL = (
    "SELECT table_name AS name, string_agg(column_name, ', ' ORDER BY column_index) AS columns "
    "FROM duckdb_columns() WHERE NOT internal AND schema_name = 'main' "
    "AND table_name NOT IN ('records_with_fields', 'kinds', 'sources') "
    "GROUP BY table_name ORDER BY table_name"
)


class Format(StrEnum):
    table = "table"
    json = "json"
    csv = "csv"
    parquet = "parquet"


def query(
    path: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="A run's folder.", show_default=False)
    ] = None,
    sql: Annotated[
        str | None, typer.Argument(metavar="SQL", help="One SELECT over the views.", show_default=False)
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A query that comes with the tool.", show_default=False),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="The queries that come with the tool.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="The views and their columns.")] = False,
    format_: Annotated[Format, typer.Option("--format", help="Parquet goes to --out.")] = Format.table,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write there, not to stdout.", show_default=False)
    ] = None,
    json: Json = False,
) -> int:
    """Ask the logs in SQL. Views: requests, matches, transfers, queues, collectives, decisions, ...

    Nothing but the loaded records can be reached from the SQL.
    """
    shape = Format.json if json else format_
    if list_:
        return show_list(is_json=shape is Format.json)
    if path is None:
        raise CliError("query needs the folder of a run", expected='hicache query PATH "SELECT ..."')
    if sum((sql is not None, name is not None, schema)) != 1:
        raise CliError(
            "query takes one question",
            expected='"SELECT ...", --name NAME or --schema',
            hint="hicache query --list",
        )
    if shape is Format.parquet and out is None:
        raise CliError("--format parquet writes a file", hint="--out rows.parquet")
    from cli.rows import render, typed_columns, write_out, write_parquet
    from cli.theme import show, show_text, width
    from tracer.trace_store import open_store

    with open_store(path) as store:
        if schema:
            return show_schema(store, is_json=shape is Format.json)
        table = ask(store, sql, name)
        types = typed_columns(store, statement(sql, name)) if shape in (Format.json, Format.parquet) else ()
    if shape is Format.parquet:
        assert out is not None
        write_parquet(table, types, out)
    elif shape is Format.table and out is None:
        from cli.screens.query import rows_table

        show(rows_table(table, width()))
    else:
        text = render(table, types, shape.value)
        if out is None:
            show_text(text)
        else:
            write_out(out, text)
    return 0


def statement(sql: str | None, name: str | None) -> str:
    """The SQL that was given, or the one behind a name.

    Raises:
        CliError: no query has that name.
    """
    from tracer.trace_store import QUERIES

    if sql is not None:
        return sql
    assert name is not None
    if name not in QUERIES:
        raise CliError(f"no query {name!r}", expected=", ".join(QUERIES), hint="hicache query --list")
    return QUERIES[name].sql


def ask(store: TraceStore, sql: str | None, name: str | None) -> Table:
    """Run one query.

    Raises:
        CliError: it was refused or is wrong, which is the user's to mend, unlike logs that can't be loaded.
    """
    from tracer.errors import StoreError

    try:
        return store.query(statement(sql, name))
    except StoreError as error:
        raise CliError(str(error)) from None


def show_list(*, is_json: bool) -> int:
    from rich.text import Text

    from cli.theme import LABEL, paragraph, show, show_json
    from tracer.trace_store import QUERIES

    if is_json:
        show_json(
            [
                {"name": name, "description": each.description, "sql": each.sql}
                for name, each in QUERIES.items()
            ]
        )
        return 0
    name_width = max(map(len, QUERIES)) + 2
    lines = [
        Text.assemble((name.ljust(name_width), LABEL), each.description) for name, each in QUERIES.items()
    ]
    show([*_narrow(lines, name_width), Text(""), *paragraph("try", "hicache query PATH --name NAME")])
    return 0


def show_schema(store: TraceStore, *, is_json: bool) -> int:
    from rich.text import Text

    from cli.theme import LABEL, show, show_json

    views: list[tuple[str, list[str]]] = [(row[0], row[1].split(", ")) for row in store.query(VIEWS_SQL).rows]
    if is_json:
        show_json([{"name": name, "columns": columns} for name, columns in views])
        return 0
    name_width = max(len(name) for name, _columns in views) + 2
    lines = [Text.assemble((name.ljust(name_width), LABEL), ", ".join(columns)) for name, columns in views]
    show(_narrow(lines, name_width))
    return 0


def _narrow(lines: list[Any], indent: int) -> list[Any]:
    """Long lines continued under their second column."""
    from rich.console import Console
    from rich.text import Text

    from cli.theme import WIDTH

    console = Console(width=WIDTH - indent)
    narrow: list[Text] = []
    for line in lines:
        head, rest = line[:indent], line[indent:]
        for number, part in enumerate(rest.wrap(console, WIDTH - indent)):
            part.rstrip()
            narrow.append(head + part if number == 0 else Text(" " * indent) + part)
    return narrow
