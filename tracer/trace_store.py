"""Logs in DuckDB: one table of records, the views of views.sql, and queries that can't do harm.

Owns the lock around the database. It never writes to the logs. What a query may touch is the loaded data
alone: no file, no network, no setting, no second statement. The database of a large log is a file in a
private folder, filled, closed and opened again for reading, so that it may be larger than memory.

Whatever the database does, it does in a thread of its own: Ctrl-C can't be heard inside it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import duckdb

from tracer.errors import StoreError
from tracer.load import fill_lanes, fill_records, link, quoted
from tracer.log import Run, find_logs
from tracer.places import quoted as quoted_path
from tracer.queries import QUERIES

MEMORY_LIMIT = "4GB"
# Logs up to here are held in memory, where they take some seven times as much; it is a third faster.
IN_MEMORY_BYTES = 320 * 1024 * 1024
BATCH_ROWS = 4096
# How long an interrupted query gets to end; it looks every few thousand rows.
INTERRUPT_SECONDS = 5.0
INTERRUPT_PAUSE_SECONDS = 0.05
# What may stand in the path of the private folder, which the database sees.
PLAIN_PATH = re.compile(r"[\w./ +,@:-]+")
# A field of a log that does not have the type of its name; everything else is no value's fault.
VALUE_ERRORS = (duckdb.InvalidInputException, duckdb.ConversionException, duckdb.OutOfRangeException)

# Inside the private folder.
LOGS, SPILL, EXPORTS, DATABASE = "logs", "spill", "exports", "trace.duckdb"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Table:
    """The whole answer to a query."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


class Answer(NamedTuple):
    """An answer that is read once, while its query runs.

    Attributes:
        types: the database's type of each column.
        rows: one tuple a row; at most one batch is in memory.
    """

    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: Iterator[tuple[Any, ...]]


class TraceStore:
    """Loaded logs behind a lock: a SELECT is all that can be done with them.

    Attributes:
        run: what was loaded; its lanes have been read, so `torn` and `trailer` are set.
        notes: what of the logs is not as it should be: fields read as null, records that were dropped.
    """

    def __init__(
        self,
        run: Run,
        connection: duckdb.DuckDBPyConnection,
        folder: tempfile.TemporaryDirectory[str],
        notes: Sequence[str] = (),
    ) -> None:
        self.run = run
        self.notes = tuple(notes)
        self._connection = connection
        self._folder = folder
        self._is_stuck = False

    def query(self, sql: str) -> Table:
        """Run one SELECT over the views and keep its whole answer; for answers known to be small.

        Raises:
            StoreError: more or other than one SELECT, a table or file that isn't there, or a mistake.
        """
        with self.answer(sql) as answer:
            return Table(answer.columns, tuple(answer.rows))

    @contextmanager
    def answer(self, sql: str) -> Iterator[Answer]:
        """Run one SELECT over the views and read its rows as they come.

        Raises:
            StoreError: as `query`, also while the rows are read.
        """
        statement = self._select(sql)
        with self._reading(sql):
            cursor = self._work(lambda: self._connection.execute(statement))
            described = cursor.description or ()
            yield Answer(
                tuple(str(each[0]) for each in described),
                tuple(str(each[1]) for each in described),
                self._rows(cursor),
            )

    def count(self, sql: str) -> int:
        """How many rows a SELECT has, without reading them."""
        body = self._body(sql)
        with self._reading(sql):
            found = self._work(
                lambda: self._connection.execute(f"SELECT count(*) FROM (\n{body}\n)").fetchone()
            )
        return int(found[0]) if found else 0

    def write_parquet(self, sql: str) -> Path:
        """The answer to a SELECT as a Parquet file in the private folder, gone when the store is closed."""
        body = self._body(sql)
        path = Path(self._folder.name) / EXPORTS / "rows.parquet"
        with self._reading(sql):
            self._work(
                lambda: self._connection.execute(f"COPY (\n{body}\n) TO {quoted(str(path))} (FORMAT parquet)")
            )
        return path

    def canned(self, name: str) -> Table:
        """Run a query of `QUERIES`."""
        if name not in QUERIES:
            raise StoreError(
                f"no canned query {name!r}", expected=", ".join(QUERIES), hint="hicache query --list"
            )
        return self.query(QUERIES[name].sql)

    def close(self) -> None:
        # A query that does not hear that it was interrupted holds the connection for good.
        if not self._is_stuck:
            self._connection.close()
        self._folder.cleanup()

    def _select(self, sql: str) -> duckdb.Statement:
        """The one statement in `sql`, which reads."""
        try:
            statements = self._connection.extract_statements(sql)
        except (duckdb.Error, UnicodeError) as error:
            raise self._refusal(error, sql) from None
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            found = ", ".join(statement.type.name for statement in statements) or "nothing"
            raise StoreError(
                f"one SELECT can be run, this is {found}", where=_short(sql), hint="hicache query --list"
            )
        return statements[0]

    def _body(self, sql: str) -> str:
        """The SELECT without its semicolon and what follows it, so that it can stand in brackets."""
        self._select(sql)
        text = sql.encode()
        for offset, kind in duckdb.tokenize(sql):
            if kind == duckdb.token_type.operator and text[offset : offset + 1] == b";":
                return text[:offset].decode()
        return sql

    def _rows(self, cursor: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
        while batch := self._work(lambda: cursor.fetchmany(BATCH_ROWS)):
            yield from batch

    @contextmanager
    def _reading(self, sql: str) -> Iterator[None]:
        """A transaction that can't write: a SELECT may still hold a DELETE (WITH gone AS ...)."""
        self._connection.execute("BEGIN TRANSACTION READ ONLY")
        try:
            yield
        except (duckdb.Error, MemoryError, RuntimeError, ValueError, OverflowError) as error:
            raise self._refusal(error, sql) from None
        finally:
            if not self._is_stuck:
                self._connection.execute("ROLLBACK")

    def _work(self, work: Callable[[], T]) -> T:
        try:
            return interruptibly(self._connection, work)
        except StuckError:
            self._is_stuck = True
            raise KeyboardInterrupt from None

    def _refusal(self, error: Exception, sql: str) -> StoreError:
        schema = f"hicache query {quoted_path(self.run.path)} --schema"
        if isinstance(error, MemoryError | duckdb.OutOfMemoryException):
            return StoreError(
                f"the query needs more memory than it may use, {MEMORY_LIMIT}",
                where=_short(sql),
                hint="fewer rows or columns, or a LIMIT",
            )
        if isinstance(error, duckdb.PermissionException):
            return StoreError(
                "a query reads the loaded records and nothing else: no file, network or setting",
                where=_short(sql),
                hint="hicache query --list",
            )
        is_unknown = isinstance(error, duckdb.CatalogException | duckdb.BinderException)
        return StoreError(
            f"the query failed: {_first_line(error)}",
            where=_short(sql),
            hint=schema if is_unknown else "hicache query --list",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_store(source: str | Path | Run, *, memory_limit: str = MEMORY_LIMIT) -> TraceStore:
    """Load logs into a database of their own and lock it.

    Raises:
        LogError: there is no log at `source`.
        StoreError: it holds several runs, or there is no room for the database.
    """
    run = source if isinstance(source, Run) else find_logs(source)
    if len(run.run_ids) > 1:
        raise StoreError(
            f"{run.path} holds {len(run.run_ids)} runs", where=", ".join(run.run_ids), hint="one folder a run"
        )
    folder = _private_folder()
    try:
        place = Path(folder.name)
        connection, notes = _fill(run, place, memory_limit)
        return TraceStore(run, connection, folder, notes)
    except BaseException as error:
        folder.cleanup()
        if not isinstance(error, duckdb.Error | MemoryError | OSError):
            raise
        is_memory = isinstance(error, MemoryError | duckdb.OutOfMemoryException)
        why = f"they need more memory than {memory_limit}" if is_memory else _first_line(error)
        raise StoreError(
            f"the logs can't be loaded: {why}",
            where=str(run.path),
            hint=f"room in {tempfile.gettempdir()}, or TMPDIR=... with more",
        ) from None


def _private_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder of ours with a path that the database can take for nothing but a path."""
    try:
        default = tempfile.gettempdir()
        return tempfile.TemporaryDirectory(
            prefix="hicache-", dir=default if PLAIN_PATH.fullmatch(default) else "/tmp"
        )
    except OSError as error:
        raise StoreError(f"no folder for a database: {error.strerror}", hint="TMPDIR=... with room") from None


def _fill(run: Run, place: Path, memory_limit: str) -> tuple[duckdb.DuckDBPyConnection, list[str]]:
    """The loaded and locked database, and what of the logs is not as it should be."""
    for name in (LOGS, EXPORTS, SPILL):
        (place / name).mkdir()
    sources = link(run, place / LOGS)
    is_small = sum(path.stat().st_size for _lane, paths in sources for path in paths) <= IN_MEMORY_BYTES
    database = ":memory:" if is_small else str(place / DATABASE)
    connection = duckdb.connect(database)

    def fill() -> list[str]:
        # What does not fit in memory while it is sorted waits in a folder that no query will see.
        _settle(connection, memory_limit, spill="" if is_small else str(place / SPILL))
        fill_lanes(connection, run, sources)
        try:
            notes = fill_records(connection, run, sources)
        except VALUE_ERRORS:
            notes = fill_records(connection, run, sources, is_lenient=True)
        connection.execute(files("tracer").joinpath("views.sql").read_text(encoding="utf-8"))
        return notes

    try:
        notes = interruptibly(connection, fill)
        if not is_small:
            connection.close()
            connection = duckdb.connect(database, read_only=True)
            _settle(connection, memory_limit, spill="")
        _lock(connection, place / EXPORTS)
    except StuckError:
        raise KeyboardInterrupt from None
    except BaseException:
        connection.close()
        raise
    return connection, notes


def _lock(connection: duckdb.DuckDBPyConnection, exports: Path) -> None:
    """Leave no way out of the database but the folder of exports, which no SELECT can write to."""
    connection.execute(f"SET allowed_directories = [{quoted(str(exports) + '/')}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def _settle(connection: duckdb.DuckDBPyConnection, memory_limit: str, *, spill: str) -> None:
    connection.execute(f"SET memory_limit = {quoted(memory_limit)}")
    connection.execute(f"SET temp_directory = {quoted(spill)}")
    # No local variable may pose as a table, and nobody's home is named.
    connection.execute("SET python_enable_replacements = false")
    connection.execute("SET autoinstall_known_extensions = false")
    connection.execute("SET autoload_known_extensions = false")
    connection.execute("SET allow_persistent_secrets = false")
    connection.execute("SET secret_directory = ''")
    connection.execute("SET enable_progress_bar = false")


class StuckError(Exception):
    """The database was interrupted and did not stop."""


def interruptibly(connection: duckdb.DuckDBPyConnection, work: Callable[[], T]) -> T:
    """Do `work` on a connection in another thread, while this one can hear Ctrl-C.

    Raises:
        KeyboardInterrupt: it came, and the database has stopped.
        StuckError: it came, and the database went on; the connection must not be touched again.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    done = Event()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    worker = Thread(target=run, name="hicache query", daemon=True)
    try:
        worker.start()
        done.wait()
    except KeyboardInterrupt:
        if worker.ident is not None and not _stopped(connection, done):
            raise StuckError from None
        raise
    if errors:
        raise errors[0]
    return results[0]


def _stopped(connection: duckdb.DuckDBPyConnection, done: Event) -> bool:
    """Interrupt until the work has ended: what comes between two statements, or before the first, is lost."""
    for _try in range(int(INTERRUPT_SECONDS / INTERRUPT_PAUSE_SECONDS)):
        connection.interrupt()
        if done.wait(INTERRUPT_PAUSE_SECONDS):
            return True
    return False


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _short(sql: str) -> str:
    line = " ".join(sql.split())
    return line if len(line) <= 120 else line[:117] + "..."
