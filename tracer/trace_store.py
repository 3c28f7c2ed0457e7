"""Logs in DuckDB: one table of records, the views of views.sql, and queries that can't do harm.

Owns the lock around the database. It never writes to the logs. What a query may touch is the loaded data
alone: no file, no network, no setting, no second statement. The database of a large log is a file in a
private folder, filled, closed and opened again for reading, so that it may be larger than memory. It may be
kept, and opened once more; so may a folder of Parquet, of which a query reads only what it needs.

Whatever the database does, it does in a thread of its own: Ctrl-C can't be heard inside it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import duckdb
import msgspec

from tracer.errors import HitsError, StoreError
from tracer.hits import hits, page_size_tokens
from tracer.kept import (
    DATABASE_SUFFIX,
    FACTS_TABLE,
    HITS,
    RECORDS,
    STORE_FORMAT,
    Export,
    Facts,
    beside,
    chosen,
    document,
    find_export,
    is_export,
    is_kept,
    linked,
    put,
    read_document,
)
from tracer.load import DERIVED_TYPES, fill_hits, fill_lanes, fill_records, link, own_fields, quoted
from tracer.locked import StuckError, bounded, interruptibly, lock, settle
from tracer.log import Run, find_logs
from tracer.places import quoted as quoted_path
from tracer.queries import QUERIES

MEMORY_LIMIT = "4GB"
# While it is loaded; what it has beside that is some 0.5 GB.
LOAD_MEMORY_LIMIT = "1536MB"
# Logs up to here are held in memory, where they take some seven times as much; it is a third faster.
IN_MEMORY_BYTES = 320 * 1024 * 1024
# A file with another name is compressed; to how much, nobody knows before it is read.
PLAIN_SUFFIX, PACKED_RATIO = ".jsonl", 8
BATCH_ROWS = 4096
# What may stand in the path of the private folder, which the database sees.
PLAIN_PATH = re.compile(r"[\w./ +,@:-]+")
# A field of a log that does not have the type of its name; everything else is no value's fault.
VALUE_ERRORS = (duckdb.InvalidInputException, duckdb.ConversionException, duckdb.OutOfRangeException)

# Three headers, and the blocks behind them.
DATABASE_BYTES_SQL = "SELECT 3 * 4096 + total_blocks * block_size FROM pragma_database_size()"
# Inside the private folder.
LOGS, SPILL, EXPORTS, DATABASE, KEEP = "logs", "spill", "exports", "trace.duckdb", "keep"
HITS_FILE = "hits.jsonl"

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
        path: where it was loaded from.
        facts: of the run.
        notes: what of the logs is not as it should be: fields read as null, records that were dropped.
    """

    def __init__(
        self,
        path: Path,
        facts: Facts,
        connection: duckdb.DuckDBPyConnection,
        folder: tempfile.TemporaryDirectory[str],
        memory_limit: str = MEMORY_LIMIT,
    ) -> None:
        self.path = path
        self.facts = facts
        self.notes = facts.notes
        self._connection = connection
        self._folder = folder
        self._memory_limit = memory_limit
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
            sql.encode()
            statements = self._connection.extract_statements(sql)
        except UnicodeError:
            raise StoreError("the query is no text in UTF-8", where=_short(sql)) from None
        except duckdb.Error as error:
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
            with bounded(self._memory_limit):
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
        schema = f"hicache query {quoted_path(self.path)} --schema"
        if isinstance(error, MemoryError | duckdb.OutOfMemoryException):
            return StoreError(
                f"the query needs more memory than it may use, {self._memory_limit}",
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


def open_store(
    source: str | Path | Run,
    *,
    run_id: str | None = None,
    keep: Path | None = None,
    with_hits: bool = False,
    is_hits_only: bool = False,
    memory_limit: str = MEMORY_LIMIT,
) -> TraceStore:
    """Load logs into a database of their own and lock it, or open one that was kept.

    Args:
        source: logs, a kept database, or a Parquet export.
        run_id: which run, where `source` may hold several.
        keep: a file that isn't there yet, which will hold the database of these logs.
        with_hits: make the table `hits` as well, which takes another pass over the logs. It is always in what
            was kept.
        is_hits_only: of an export attach nothing else; the files of a thousand ranks take a while.

    Raises:
        LogError: there is no log at `source`.
        StoreError: it holds several runs, or there is no room for the database; or what was kept is not what
            it should be.
    """
    path = source.path if isinstance(source, Run) else Path(source)
    was_kept = not isinstance(source, Run) and is_kept(path)
    if was_kept and keep is not None:
        raise StoreError(f"{path} is kept already", where=f"{keep}", expected="the folder of a run's logs")
    if not was_kept and path.suffix == DATABASE_SUFFIX and path.is_file():
        raise StoreError(f"{path} is no database", expected="a file kept by hicache query --db")
    with _private_folder() as folder, _told(path, memory_limit):
        place = Path(folder.name)
        if not was_kept:
            run = one_run(source if isinstance(source, Run) else find_logs(path), run_id)
            connection, facts = _loaded(run, place, keep, memory_limit, with_hits=with_hits)
        elif is_export(path):
            connection, facts = _attached(
                find_export(path, run_id), place, memory_limit, is_hits_only=is_hits_only
            )
        else:
            connection, facts = _reopened(path, place, memory_limit, run_id)
        return TraceStore(path, facts, connection, folder.keep(), memory_limit)


def one_run(run: Run, run_id: str | None = None) -> Run:
    """The one that is meant.

    Raises:
        StoreError: there are several and none was chosen, or the chosen one isn't there.
    """
    wanted = chosen(run.path, run.run_ids, run_id)
    return next(each for each in run.by_run_id() if each.run_id == wanted)


class _PrivateFolder:
    """A folder of ours with a path that the database can take for nothing but a path; gone unless kept."""

    def __init__(self) -> None:
        default = tempfile.gettempdir()
        self._folder = tempfile.TemporaryDirectory(
            prefix="hicache-", dir=default if PLAIN_PATH.fullmatch(default) else "/tmp"
        )
        self.name = self._folder.name
        self._is_kept = False

    def keep(self) -> tempfile.TemporaryDirectory[str]:
        """The folder, for somebody else to remove."""
        self._is_kept = True
        return self._folder

    def close(self) -> None:
        if not self._is_kept:
            self._folder.cleanup()


@contextmanager
def _private_folder() -> Iterator[_PrivateFolder]:
    try:
        folder = _PrivateFolder()
    except OSError as error:
        raise StoreError(f"no folder for a database: {error.strerror}", hint="TMPDIR=... with room") from None
    try:
        for name in (LOGS, EXPORTS, SPILL):
            (Path(folder.name) / name).mkdir()
        yield folder
    finally:
        folder.close()


@contextmanager
def _told(path: Path, memory_limit: str) -> Iterator[None]:
    """What the database and the system say while a store is opened, as one of our errors."""
    try:
        yield
    except StuckError:
        raise KeyboardInterrupt from None
    except (duckdb.Error, MemoryError, OSError, RuntimeError) as error:
        is_memory = isinstance(error, MemoryError | duckdb.OutOfMemoryException)
        why = f"more memory is needed than {memory_limit}" if is_memory else _first_line(error)
        raise StoreError(
            f"{path} can't be loaded: {why}",
            hint=f"room in {tempfile.gettempdir()}, or TMPDIR=... with more",
        ) from None


def _loaded(
    run: Run, place: Path, keep: Path | None, memory_limit: str, *, with_hits: bool
) -> tuple[duckdb.DuckDBPyConnection, Facts]:
    """The loaded and locked database of logs, kept or not."""
    if keep is not None:
        with beside(keep, place / KEEP) as hidden:
            connection, facts = load(run, place, hidden / DATABASE, memory_limit, with_hits=True)
            connection.close()
            put(hidden / DATABASE, keep)
        return _reopened(keep, place, memory_limit, run.run_id)
    database = place / DATABASE if _log_bytes(run) > IN_MEMORY_BYTES else None
    connection, facts = load(run, place, database, memory_limit, with_hits=with_hits)
    try:
        if database is not None:
            connection.close()
            connection = duckdb.connect(str(database), read_only=True)
            settle(connection, memory_limit, spill="")
        lock(connection, place / EXPORTS)
    except BaseException:
        connection.close()
        raise
    return connection, facts


def load(
    run: Run, place: Path, database: Path | None, memory_limit: str, *, with_hits: bool
) -> tuple[duckdb.DuckDBPyConnection, Facts]:
    """Logs in a database that is not locked yet, for whoever asks it nothing that somebody else has written.

    Args:
        place: a private folder with the folders that `open_store` makes in it.
        database: a file that isn't there yet; memory where it is None.
        with_hits: whether to make the table `hits`.
    """
    sources = link(run, place / LOGS)
    limits, problem = _account(run, place / HITS_FILE) if with_hits else ((), "not counted")
    connection = duckdb.connect(":memory:" if database is None else str(database))

    def fill() -> Facts:
        # What does not fit in memory while it is sorted waits in a folder that no query will see.
        settle(
            connection,
            LOAD_MEMORY_LIMIT if database is not None and memory_limit == MEMORY_LIMIT else memory_limit,
            spill="" if database is None else str(place / SPILL),
        )
        fill_lanes(connection, run, sources)
        try:
            fields, notes = fill_records(connection, run, sources)
        except VALUE_ERRORS:
            fields, notes = fill_records(connection, run, sources, is_lenient=True)
        if with_hits:
            fill_hits(connection, place / HITS_FILE)
        facts = _facts(run, fields, notes, limits, problem)
        connection.execute(views_sql())
        connection.execute(f"CREATE TABLE {FACTS_TABLE} (facts VARCHAR)")
        connection.execute(
            f"INSERT INTO {FACTS_TABLE} VALUES (?)", [document(STORE_FORMAT, [facts]).decode()]
        )
        return facts

    try:
        return connection, interruptibly(connection, fill)
    except StuckError:
        raise
    except BaseException:
        connection.close()
        raise


@contextmanager
def loaded(
    run: Run, *, memory_limit: str = MEMORY_LIMIT
) -> Iterator[tuple[duckdb.DuckDBPyConnection, Facts, Path]]:
    """A loaded database with its hits, the facts, and its private folder; no lock, so no SQL from outside.

    Raises:
        StoreError: as `open_store`.
    """
    with _private_folder() as folder, _told(run.path, memory_limit):
        place = Path(folder.name)
        database = place / DATABASE if _log_bytes(run) > IN_MEMORY_BYTES else None
        connection, facts = load(one_run(run), place, database, memory_limit, with_hits=True)
        is_stuck = False
        try:
            yield connection, facts, place
        except StuckError:
            is_stuck = True
            raise
        finally:
            if not is_stuck:
                connection.close()


def views_sql() -> str:
    """The statements that make every view over `records`, `lanes` and `kinds`."""
    return files("tracer").joinpath("views.sql").read_text(encoding="utf-8")


def _account(run: Run, path: Path) -> tuple[tuple[str, ...], str]:
    """Count the hits, one request a line in `path`; what limits them, and why there are none."""
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        try:
            found = hits(run)
        except HitsError as error:
            return (), " ".join(str(error).split())
        for request in found.requests:
            derived = {name: getattr(request, name) for name in DERIVED_TYPES}
            file.write(encode(msgspec.structs.asdict(request) | derived) + b"\n")
    return found.limits, ""


def _facts(
    run: Run, fields: Sequence[str], notes: Sequence[str], limits: Sequence[str], problem: str
) -> Facts:
    return Facts(
        run_id=run.run_id,
        world_size=run.world_size,
        records=sum(lane.count for lane in run.lanes),
        fields=tuple(fields),
        notes=tuple(notes),
        tool_version=str(run.lanes[0].header.get("tool_version", "")),
        page_size_tokens=page_size_tokens(run.lanes),
        hits_notes=tuple(limits),
        hits_problem=problem,
    )


def _log_bytes(run: Run) -> int:
    """What the logs take; a compressed one takes several times as much as its file."""
    return sum(
        path.stat().st_size * (1 if path.suffix == PLAIN_SUFFIX else PACKED_RATIO)
        for lane in run.lanes
        for path in lane.files
        if path.exists()
    )


def _reopened(
    path: Path, place: Path, memory_limit: str, run_id: str | None
) -> tuple[duckdb.DuckDBPyConnection, Facts]:
    """A kept database, locked before anything in it is looked at."""
    link_path = place / DATABASE
    link_path.symlink_to(path.absolute())
    try:
        connection = duckdb.connect(str(link_path), read_only=True)
    except duckdb.Error as error:
        why = _first_line(error).replace(str(link_path), str(path))
        raise StoreError(f"the database can't be opened: {why}", where=str(path)) from None
    try:
        settle(connection, memory_limit, spill="")
        lock(connection, place / EXPORTS)

        def read() -> tuple[Any, ...]:
            # Where the end is missing, a query would be the first to see it.
            (expected,) = connection.execute(DATABASE_BYTES_SQL).fetchone() or (0,)
            try:
                (told,) = connection.execute(f"SELECT facts FROM {FACTS_TABLE} LIMIT 1").fetchone() or ("",)
            except duckdb.Error:
                # A foreign database has no such table, or something else in it.
                told = ""
            return expected, told

        expected, told = interruptibly(connection, read)
        facts = read_document(str(told), STORE_FORMAT, str(path)).runs[0]
        chosen(path, [facts.run_id], run_id)
        if (missing := expected - path.stat().st_size) > 0:
            raise StoreError(
                f"its last {missing:,} bytes are missing", where=str(path), hint="the logs themselves"
            )
    except StuckError:
        raise
    except BaseException:
        connection.close()
        raise
    return connection, facts


def _attached(
    export: Export, place: Path, memory_limit: str, *, is_hits_only: bool
) -> tuple[duckdb.DuckDBPyConnection, Facts]:
    """An export under the same views, of which a query reads what it needs; nothing beside it can be read."""
    facts = export.facts
    connection = duckdb.connect(":memory:")
    links = {
        name: [linked(path, place / LOGS, f"{name}/{number}") for number, path in enumerate(paths)]
        for name, paths in export.files.items()
        if name == HITS or not is_hits_only
    }

    def attach() -> int:
        settle(connection, memory_limit, spill="")
        connection.execute(f"CREATE VIEW hits AS FROM {_parquet(links[HITS])}")
        if not is_hits_only:
            for name in ("lanes", "kinds"):
                connection.execute(f"CREATE TABLE {name} AS FROM {_parquet(links[name])}")
            connection.execute(
                "CREATE VIEW records AS SELECT rank, * EXCLUDE (rank) "
                f"FROM {_parquet(links[RECORDS], 'rank')}"
            )
            connection.execute(own_fields(facts.fields))
            connection.execute(views_sql())
        every = ", ".join(quoted(path) for paths in links.values() for path in paths)
        connection.execute(f"SET allowed_paths = [{every}]")
        lock(connection, place / EXPORTS)
        if is_hits_only:
            return facts.records
        found = connection.execute("SELECT count(*) FROM records").fetchone()
        return int(found[0]) if found else 0

    try:
        try:
            records = interruptibly(connection, attach)
        except duckdb.OutOfMemoryException:
            raise
        except duckdb.Error as error:
            raise _unlike_an_export(error, export, links) from None
        if records != facts.records:
            raise StoreError(
                f"the export holds {records:,} records, its facts say {facts.records:,}",
                where=str(export.files[RECORDS][0].parent.parent),
                hint="export again",
            )
    except StuckError:
        raise
    except BaseException:
        connection.close()
        raise
    return connection, facts


def _unlike_an_export(error: duckdb.Error, export: Export, links: Mapping[str, Sequence[str]]) -> StoreError:
    """A file that is damaged, or lacks a column; it is known by its own name."""
    why = _first_line(error)
    for name, each in links.items():
        for link_path, path in zip(each, export.files[name], strict=True):
            why = why.replace(link_path, str(path))
    return StoreError(
        f"the export can't be read: {why}",
        where=str(export.files[HITS][0].parent.parent.parent),
        hint="export again",
    )


def _parquet(paths: Sequence[str], partition: str = "") -> str:
    """Files as a table; a partition is a whole number that their path names."""
    listed = ", ".join(map(quoted, paths))
    types = f", hive_types = {{{quoted(partition)}: BIGINT}}" if partition else ""
    return f"read_parquet([{listed}], hive_partitioning = {bool(partition)}{types})"


def _first_line(error: BaseException) -> str:
    return _printable(next(iter(str(error).splitlines()), type(error).__name__))


def _short(sql: str) -> str:
    line = _printable(" ".join(sql.split()))
    return line if len(line) <= 120 else line[:117] + "..."


def _printable(text: str) -> str:
    """What the logs or a query say in an error can't move the cursor."""
    return "".join(char if char.isprintable() else " " for char in text)
