"""`hicache query`: SQL over a run's records, read-only, as a table, JSON, CSV or Parquet."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from shutil import copyfileobj
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.errors import CliError, asked_by, tell
from cli.options import Json, RunId, a_path, one_of

if TYPE_CHECKING:
    from tracer.trace_store import Table, TraceStore

COLUMNS_SQL = (
    "SELECT table_name, column_name, data_type FROM duckdb_columns() "
    "WHERE NOT internal AND schema_name = 'main' ORDER BY table_name, column_index"
)
FORMATS = ("table", "json", "csv", "parquet")
# A table is for reading; more rows than this are for a program.
TABLE_ROWS_MAX = 1000
# A file has no edge at which a column would have to be cut.
FILE_WIDTH = 1 << 16


def query(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            help="A run's folder, a kept database, or a Parquet export.",
            show_default=False,
            parser=a_path,
        ),
    ] = None,
    sql: Annotated[
        str | None, typer.Argument(metavar="SQL", help="One SELECT over the views.", show_default=False)
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A query that comes with the tool.", show_default=False),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="The queries that come with the tool.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="PATH's views and their columns.")] = False,
    db: Annotated[
        Path | None,
        typer.Option(
            "--db",
            metavar="FILE.duckdb",
            help="Keep the loaded database there, for later queries.",
            show_default=False,
            parser=a_path,
        ),
    ] = None,
    run_id: RunId = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="|".join(FORMATS), help="A table; parquet goes to --out.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write there, not to stdout.", show_default=False, parser=a_path),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help=f"Tables with more than {TABLE_ROWS_MAX:,} rows as well.")
    ] = False,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no notes.")] = False,
) -> int:
    """Ask the logs in SQL. Views: requests, matches, transfers, queues, collectives, decisions, ...

    Nothing but the loaded records can be reached from the SQL.
    """
    shape = one_of("--format", format_ or ("json" if json else "table"), FORMATS)
    if json and shape != "json":
        raise CliError(f"--json and --format {shape} exclude each other", expected="one format")
    if list_ and db is not None:
        raise CliError("--list asks no logs", expected="no --db")
    if (list_ or schema) and (out is not None or shape in ("csv", "parquet")):
        what = "--list" if list_ else "--schema"
        raise CliError(f"{what} is shown, as a table or as JSON", expected="no --out, --format table or json")
    if list_:
        return show_list(is_json=shape == "json")
    if path is None:
        raise CliError("query needs the folder of a run", expected='hicache query PATH "SELECT ..."')
    questions = sum((sql is not None, name is not None, schema))
    is_only_kept = questions == 0 and db is not None and out is None and format_ is None and not json
    if questions != 1 and not is_only_kept:
        raise CliError(
            "query takes one question",
            expected='"SELECT ...", --name NAME or --schema; none with --db alone',
            hint="hicache query --list",
        )
    if shape == "parquet" and out is None:
        raise CliError("--format parquet writes a file", hint="--out rows.parquet")
    asked = "" if schema or is_only_kept else statement(sql, name)
    asks_hits = "hits" in asked.casefold()
    from cli.output import refuse_unwritable
    from cli.places import logs_at
    from cli.screens.table import printable
    from cli.sigterm import ending_on_sigterm
    from cli.theme import spinner
    from tracer.trace_store import open_store

    if out is not None:
        refuse_unwritable(out)
    if db is not None:
        refuse_to_keep(path, db, out)
    with ending_on_sigterm(), ExitStack() as stack:
        place = stack.enter_context(logs_at(path, run=run_id, quiet=quiet))
        if place != path:
            # The run that was asked for, by its id or by its folder.
            path, run_id = place, None
        with spinner("loading", path, quiet=quiet), asked_by("hicache query {} --schema"):
            store = stack.enter_context(
                open_store(path, run_id=run_id, keep=db, with_hits=schema or asks_hits)
            )
        notes = list(store.notes)
        if asks_hits and store.facts.hits_problem:
            notes.append(f"hits has no rows: {store.facts.hits_problem}")
        for note in () if quiet else notes:
            tell(f"note: {printable(note)}")
        if is_only_kept:
            return 0
        if schema:
            return show_schema(store, is_json=shape == "json")
        with spinner("asking", path, quiet=quiet) as pause, refusals():
            answer(store, asked, shape, out, is_full=full, pause=pause)
    return 0


def statement(sql: str | None, name: str | None) -> str:
    """The SQL that was given, or the one behind a name.

    Raises:
        CliError: no query has that name.
    """
    from tracer.queries import QUERIES

    if sql is not None:
        return sql
    assert name is not None
    if name not in QUERIES:
        raise CliError(f"no query {name!r}", expected=", ".join(QUERIES), hint="hicache query --list")
    return QUERIES[name].sql


def refuse_to_keep(path: Path, db: Path, out: Path | None) -> None:
    """Say no before any work is done: a kept database takes the place of nothing.

    Raises:
        CliError: something is there, or nothing can be.
    """
    from cli.folder import OWN_FILE
    from cli.theme import command_line
    from tracer.kept import is_database, is_kept

    if is_kept(path):
        raise CliError(f"{path} is kept already", expected="--db with the folder of a run's logs")
    if os.path.lexists(db):
        is_ours = is_database(db)
        raise CliError(
            f"--db {db} is there already, and stays as it is",
            expected="a new file",
            hint=command_line("query", db, "SELECT ...") if is_ours else "",
        )
    if out is not None and os.path.realpath(out) == os.path.realpath(db):
        raise CliError(f"--db and --out are both {db}", expected="two files")
    if OWN_FILE.fullmatch(db.name):
        raise CliError(f"--db {db} has the name of a run's own file", expected="another name")
    if not db.parent.is_dir():
        raise CliError(f"--db {db}: no folder {db.parent}", expected="a file in a folder that is there")


@contextmanager
def refusals() -> Iterator[None]:
    """A query that was refused or is wrong is the user's to mend, unlike logs that can't be loaded."""
    from tracer.errors import StoreError

    try:
        yield
    except StoreError as error:
        raise CliError(str(error)) from None


def answer(
    store: TraceStore, sql: str, shape: str, out: Path | None, *, is_full: bool, pause: Callable[[], None]
) -> None:
    """Show the answer, or write it to `out`.

    Args:
        pause: called before the first line of the answer.
    """
    from cli.output import writing
    from cli.theme import show, show_parts, width

    if shape == "table":
        table, total = first_rows(store, sql, is_full=is_full)
        pause()
        from cli.screens.query import rows_table

        lines = rows_table(table, width() if out is None else FILE_WIDTH, total=total)
        if out is None:
            show(lines)
        else:
            with writing(out) as stream:
                stream.writelines(f"{line}\n".encode() for line in lines)
        return
    if shape == "parquet":
        assert out is not None
        with store.write_parquet(sql).open("rb") as rows, writing(out) as stream:
            copyfileobj(rows, stream)
        return
    from cli.rows import write_csv, write_json

    write_rows = write_json if shape == "json" else write_csv
    with store.answer(sql) as found:
        if out is None:
            pause()
            show_parts(partial(write_rows, found))
        else:
            with writing(out) as stream:
                text = TextIOWrapper(stream, encoding="utf-8", newline="")
                write_rows(found, text.write)
                text.flush()
                text.detach()


def first_rows(store: TraceStore, sql: str, *, is_full: bool) -> tuple[Table, int]:
    """The rows that a table shows, and how many there are."""
    from tracer.trace_store import Table

    with store.answer(sql) as found:
        rows = tuple(found.rows if is_full else islice(found.rows, TABLE_ROWS_MAX + 1))
        columns = found.columns
    if is_full or len(rows) <= TABLE_ROWS_MAX:
        return Table(columns, rows), len(rows)
    return Table(columns, rows[:TABLE_ROWS_MAX]), store.count(sql)


def show_list(*, is_json: bool) -> int:
    from rich.text import Text

    from cli.theme import LABEL, paragraph, show, show_json
    from tracer.queries import QUERIES

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
    """Every view with its columns: name, type and meaning."""
    from cli.theme import show, show_json
    from tracer.columns import VIEWS, meaning

    columns: dict[str, list[tuple[str, str]]] = {}
    for view, column, kind in store.query(COLUMNS_SQL).rows:
        columns.setdefault(view, []).append((column, kind))
    views = {view: columns[view] for view in VIEWS if view in columns}
    if is_json:
        show_json(
            [
                {
                    "name": view,
                    "row": VIEWS[view],
                    "columns": [column for column, _kind in each],
                    "types": dict(each),
                    "meanings": {column: said for column, _kind in each if (said := meaning(view, column))},
                }
                for view, each in views.items()
            ]
        )
        return 0
    from cli.screens.query import schema_lines

    show(schema_lines(views))
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
