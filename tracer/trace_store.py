"""Logs in DuckDB: one table of records, the views of views.sql, and queries that can't do harm.

Owns the types of the known fields and the lock around the database. It loads only what the reader
found to be whole, and never writes to the logs. What a query may touch is the loaded data alone: no
file, no network, no setting, no second statement.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import duckdb

from tracer.errors import StoreError
from tracer.log import LaneLog, Run, find_logs
from tracer.sinks import meta_name

MEMORY_LIMIT = "4GB"
COPY_BYTES = 1024 * 1024
AXES = ("dp", "pp", "cp", "tp")
COMMON_TYPES = {"seq": "BIGINT", "step": "BIGINT", "time_ns": "BIGINT", "kind": "VARCHAR", "phase": "VARCHAR"}

# Fields that a header declares and that are not here become JSON. `op` is both an id (transfers) and a
# word (meetings), so it is loaded as text and offered as a number where it is one.
FIELD_TYPES = {
    "arrival_ms": "DOUBLE",
    "available": "BIGINT",
    "axis": "VARCHAR",
    "backups_agreed": "BIGINT",
    "backups_reserved": "BIGINT",
    "computed_tokens": "BIGINT[]",
    "conversation": "VARCHAR",
    "declined": "VARCHAR",
    "demoted_digests": "VARCHAR",
    "device_pages_evictable": "BIGINT",
    "device_pages_free": "BIGINT",
    "device_tokens": "BIGINT",
    "dropped_digests": "VARCHAR",
    "duplicate_pages": "BIGINT",
    "evictable": "BIGINT",
    "extend_tokens": "BIGINT",
    "group": "VARCHAR",
    "group_seq": "BIGINT",
    "host_pages_free": "BIGINT",
    "host_tokens": "BIGINT",
    "input_tokens": "BIGINT",
    "loads_agreed": "BIGINT",
    "loads_done": "BIGINT",
    "loads_in_flight": "BIGINT",
    "miss_digest": "VARCHAR",
    "mode": "VARCHAR",
    "new_digests": "VARCHAR",
    "new_tokens": "BIGINT",
    "node": "BIGINT",
    "nodes": "BIGINT[]",
    "numel": "BIGINT",
    "op": "VARCHAR",
    "order": "BIGINT",
    "output_tokens": "BIGINT",
    "page_index": "BIGINT",
    "pages": "BIGINT",
    "pages_freed": "BIGINT",
    "pages_wanted": "BIGINT",
    "peer": "BIGINT",
    "pool": "VARCHAR",
    "protected": "BIGINT",
    "purpose": "VARCHAR",
    "queue": "VARCHAR",
    "reason": "VARCHAR",
    "rid": "VARCHAR",
    "rids": "VARCHAR[]",
    "round": "BIGINT",
    "running_count": "BIGINT",
    "slot": "BIGINT",
    "storage_tokens": "BIGINT",
    "tokens": "BIGINT",
    "total": "BIGINT",
    "usable_tokens": "BIGINT",
    "verdict": "VARCHAR",
    "waiting_count": "BIGINT",
    "write_queue_len": "BIGINT",
    "writes_agreed": "BIGINT",
    "writes_done": "BIGINT",
    "writes_in_flight": "BIGINT",
}
# Columns of `records` that are not the line's own; a field of the same name gets a `field_` in front.
OWN_COLUMNS = {"rank", *AXES, "lane", *COMMON_TYPES, "op_text", "fields"}
# The columns that `decisions` has anyway are not repeated in its `fields`.
DECISION_COLUMNS = ("rid", "node", "pages", "tokens")


class Canned(NamedTuple):
    """A query that comes with the tool."""

    description: str
    sql: str


QUERIES: Mapping[str, Canned] = {
    "slowest_requests": Canned(
        "the 20 requests that waited longest for admission",
        "SELECT rid, conversation, input_tokens, computed_tokens, wait_steps, wait_ns, receive_step, "
        "admit_step, finish_step FROM requests "
        "ORDER BY wait_ns DESC NULLS FIRST, receive_step, rid LIMIT 20",
    ),
    "tier_hits": Canned(
        "prompt tokens by the tier that served them, for each replica",
        "SELECT dp, count(*) AS requests, sum(input_tokens)::BIGINT AS input_tokens, "
        "sum(device_tokens)::BIGINT AS device, sum(host_tokens)::BIGINT AS host, "
        "sum(storage_tokens)::BIGINT AS storage, sum(computed_tokens)::BIGINT AS computed "
        "FROM requests GROUP BY dp ORDER BY dp",
    ),
    "collectives_open": Canned(
        "collectives that a rank entered and never left",
        'SELECT rank, lane, "group", group_seq, purpose, op, numel, enter_step, enter_seq '
        'FROM collectives WHERE NOT "left" ORDER BY "group", group_seq, rank',
    ),
    "evictions_by_step": Canned(
        "pages evicted at each step, by tier and rank",
        "SELECT step, rank, tier, count(*) AS evictions, sum(pages_wanted)::BIGINT AS pages_wanted, "
        "sum(pages_freed)::BIGINT AS pages_freed, sum(demoted_pages)::BIGINT AS demoted_pages, "
        "sum(dropped_pages)::BIGINT AS dropped_pages "
        "FROM evictions GROUP BY step, rank, tier ORDER BY step, rank, tier",
    ),
    "decisions_around": Canned(
        "every rank's decisions in the last steps before the first open collective, or of the run",
        'WITH centre AS (SELECT coalesce((SELECT min(enter_step) FROM collectives WHERE NOT "left"), '
        "(SELECT max(step) FROM decisions)) AS step) "
        "SELECT step, rank, seq, kind, phase, rid, node, pages, tokens, fields FROM decisions "
        "WHERE step BETWEEN (SELECT step - 2 FROM centre) AND (SELECT step FROM centre) "
        "ORDER BY step, lane, seq, rank",
    ),
    "transfers_not_applied": Canned(
        "transfers whose bytes have moved and which were never applied",
        "SELECT rank, queue, op, pages, enqueue_step, done_step FROM transfers "
        "WHERE done_step IS NOT NULL AND ack_step IS NULL ORDER BY rank, queue, op",
    ),
    "lanes_cut": Canned(
        "lanes that were not closed by their writer, and why reading stopped",
        "SELECT rank, lane, records, outcome, torn FROM lanes "
        "WHERE outcome IS NULL OR torn IS NOT NULL ORDER BY rank, lane",
    ),
}


@dataclass(frozen=True, slots=True)
class Table:
    """The answer to a query."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


class TraceStore:
    """Loaded logs behind a lock: `query` is all that can be done with them.

    Attributes:
        run: what was loaded; its lanes have been read, so `torn` and `trailer` are set.
    """

    def __init__(self, run: Run, connection: duckdb.DuckDBPyConnection) -> None:
        self.run = run
        self._connection = connection

    def query(self, sql: str) -> Table:
        """Run one SELECT over the views.

        Raises:
            StoreError: more or other than one SELECT, a table or file that isn't there, or a mistake.
        """
        try:
            statements = self._connection.extract_statements(sql)
        except duckdb.Error as error:
            raise _refusal(error, sql) from None
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            found = ", ".join(statement.type.name for statement in statements) or "nothing"
            raise StoreError(
                f"one SELECT can be run, this is {found}", where=_short(sql), hint="hicache query --list"
            )
        # A statement that reads may still hold one that writes (WITH gone AS (DELETE ...)).
        self._connection.execute("BEGIN TRANSACTION READ ONLY")
        try:
            cursor = self._connection.execute(statements[0])
            columns = tuple(str(column[0]) for column in cursor.description or ())
            return Table(columns, tuple(tuple(row) for row in cursor.fetchall()))
        except RuntimeError as error:
            # The database turns Ctrl-C into an error of its own.
            if "interrupted" in str(error).lower():
                raise KeyboardInterrupt from None
            raise _refusal(error, sql) from None
        except duckdb.Error as error:
            raise _refusal(error, sql) from None
        finally:
            self._connection.execute("ROLLBACK")

    def canned(self, name: str) -> Table:
        """Run a query of `QUERIES`."""
        if name not in QUERIES:
            raise StoreError(
                f"no canned query {name!r}", expected=", ".join(QUERIES), hint="hicache query --list"
            )
        return self.query(QUERIES[name].sql)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_store(source: str | Path | Run, *, memory_limit: str = MEMORY_LIMIT) -> TraceStore:
    """Load logs into a database in memory and lock it.

    Raises:
        LogError: there is no log at `source`.
        StoreError: it holds several runs, or a field that does not have the type of its name.
    """
    run = source if isinstance(source, Run) else find_logs(source)
    if len(run.run_ids) > 1:
        raise StoreError(
            f"{run.path} holds {len(run.run_ids)} runs", where=", ".join(run.run_ids), hint="one folder a run"
        )
    connection = duckdb.connect(":memory:")
    try:
        # Nothing may be spilled into the working directory, and no local variable may pose as a table.
        connection.execute(f"SET memory_limit = {_quoted(memory_limit)}")
        connection.execute("SET temp_directory = ''")
        connection.execute("SET python_enable_replacements = false")
        connection.execute("SET autoinstall_known_extensions = false")
        connection.execute("SET autoload_known_extensions = false")
        _load(connection, run)
        connection.execute(files("tracer").joinpath("views.sql").read_text(encoding="utf-8"))
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
    except duckdb.Error as error:
        connection.close()
        raise StoreError(
            f"the logs can't be loaded: {_first_line(error)}",
            where=str(run.path),
            hint=f"hicache check {run.path}",
        ) from None
    except BaseException:
        connection.close()
        raise
    return TraceStore(run, connection)


def _load(connection: duckdb.DuckDBPyConnection, run: Run) -> None:
    declared = _declared_fields(run.lanes)
    connection.execute("CREATE TABLE kinds (name VARCHAR PRIMARY KEY, role VARCHAR)")
    roles = {name: kind.role for lane in run.lanes for name, kind in lane.kinds.items()}
    for name in sorted(roles):
        connection.execute("INSERT INTO kinds VALUES (?, ?)", [name, roles[name]])
    connection.execute(
        "CREATE TEMP TABLE sources (filename VARCHAR, rank BIGINT, dp BIGINT, pp BIGINT, cp BIGINT, "
        "tp BIGINT, lane VARCHAR)"
    )
    connection.execute(
        "CREATE TABLE lanes (rank BIGINT, dp BIGINT, pp BIGINT, cp BIGINT, tp BIGINT, lane VARCHAR, "
        "run_id VARCHAR, host VARCHAR, pid BIGINT, records BIGINT, steps BIGINT, outcome VARCHAR, "
        "torn VARCHAR)"
    )
    with _readable_files(run) as paths:
        for lane, lane_paths in paths:
            place = [lane.rank, *(lane.coordinates.get(axis, 0) for axis in AXES), lane.lane]
            for path in lane_paths:
                connection.execute("INSERT INTO sources VALUES (?, ?, ?, ?, ?, ?, ?)", [str(path), *place])
            meta = _meta(run, lane.rank)
            outcome = (lane.trailer or {}).get("outcome")
            connection.execute(
                "INSERT INTO lanes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, ?, ?)",
                [*place, lane.run_id, meta.get("host"), meta.get("pid"), lane.count, outcome, lane.torn],
            )
        _load_records(connection, [path for _lane, lane_paths in paths for path in lane_paths], declared)
    connection.execute("DROP TABLE sources")
    connection.execute(
        "UPDATE lanes SET steps = seen.steps FROM "
        "(SELECT rank, lane, max(step) + 1 AS steps FROM records GROUP BY rank, lane) AS seen "
        "WHERE seen.rank = lanes.rank AND seen.lane = lanes.lane"
    )


def _load_records(
    connection: duckdb.DuckDBPyConnection, paths: Sequence[Path], declared: Sequence[str]
) -> None:
    types = {**COMMON_TYPES, **FIELD_TYPES}
    types |= {field: "JSON" for field in declared if field.casefold() not in types}
    columns = ", ".join(f"{_quoted(field)}: {_quoted(kind)}" for field, kind in types.items())
    if paths:
        source = (
            f"read_json([{', '.join(_quoted(str(path)) for path in paths)}], format = 'newline_delimited', "
            f"columns = {{{columns}}}, filename = 'hicache_source', maximum_object_size = 33554432)"
        )
    else:
        empty = ", ".join(f"NULL::{kind} AS {_name(field)}" for field, kind in types.items())
        source = f"(SELECT {empty}, NULL::VARCHAR AS hicache_source WHERE false)"
    fields = [field for field in types if field not in COMMON_TYPES and field != "op"]
    selected = ", ".join(f"log.{_name(field)} AS {_name(_column(field))}" for field in fields)
    connection.execute(
        "CREATE TABLE records AS SELECT sources.rank, dp, pp, cp, tp, sources.lane, "
        "log.seq, log.step, log.time_ns, log.kind, log.phase, "
        f"try_cast(log.op AS BIGINT) AS op, log.op AS op_text, {selected} "
        f"FROM {source} AS log JOIN sources ON sources.filename = hicache_source "
        "WHERE log.kind NOT IN ('header', 'trailer') ORDER BY sources.rank, sources.lane, log.seq"
    )
    # A merge into nothing leaves out what is null, so that a record shows its own fields only.
    rest = [field for field in fields if field not in DECISION_COLUMNS]
    packed = ", ".join(f"{_name(field)} := {_name(_column(field))}" for field in rest)
    connection.execute(
        "CREATE VIEW records_with_fields AS SELECT *, "
        f"json_merge_patch('{{}}', to_json(struct_pack(op := op_text, {packed}))) AS fields FROM records"
    )


@contextmanager
def _readable_files(run: Run) -> Iterator[list[tuple[LaneLog, list[Path]]]]:
    """Files that hold nothing but good lines: the logs themselves, or copies of their readable start."""
    with tempfile.TemporaryDirectory(prefix="hicache-") as folder:
        found: list[tuple[LaneLog, list[Path]]] = []
        for lane in run.lanes:
            paths = []
            for extent in lane.extents():
                if extent.valid_bytes == extent.file_bytes:
                    paths.append(extent.path.resolve())
                elif extent.valid_bytes:
                    copy = Path(folder) / f"{len(found)}-{len(paths)}.jsonl"
                    _copy_start(extent.path, copy, extent.valid_bytes)
                    paths.append(copy)
            found.append((lane, paths))
        yield found


def _copy_start(source: Path, target: Path, size: int) -> None:
    with source.open("rb") as read, target.open("wb") as write:
        while size > 0 and (chunk := read.read(min(size, COPY_BYTES))):
            write.write(chunk)
            size -= len(chunk)


def _declared_fields(lanes: Sequence[LaneLog]) -> list[str]:
    """Every field that a header declares, once; names that differ in case only are one column."""
    found: dict[str, str] = {}
    for lane in lanes:
        for kind in lane.kinds.values():
            for field in kind.fields:
                found.setdefault(field.casefold(), field)
    return sorted(found.values())


def _column(field: str) -> str:
    return f"field_{field}" if field.casefold() in OWN_COLUMNS else field


def _meta(run: Run, rank: int) -> dict[str, Any]:
    """The side file of a rank; empty when there is none that can be read."""
    folder = run.path if run.path.is_dir() else run.path.parent
    try:
        meta = json.loads((folder / meta_name(rank)).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(meta, dict) or not isinstance(meta.get("pid", 0), int):
        return {}
    return meta


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _name(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def _refusal(error: Exception, sql: str) -> StoreError:
    if isinstance(error, duckdb.PermissionException):
        return StoreError(
            "a query reads the loaded records and nothing else: no file, network or setting",
            where=_short(sql),
            hint="hicache query --list",
        )
    return StoreError(
        f"the query failed: {_first_line(error)}", where=_short(sql), hint="hicache query --list"
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _short(sql: str) -> str:
    line = " ".join(sql.split())
    return line if len(line) <= 120 else line[:117] + "..."
