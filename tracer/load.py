"""Logs into tables: `records`, `lanes` and `kinds`, which the views of views.sql read.

Owns the types of the known fields. It loads only what the reader found to be whole, and all of that: the
rows are counted against the reader's records. The database never sees a path that somebody else has
chosen, for it reads wildcards and `key=value` in paths as more than names: every file has a link, or a copy
of its readable start, under a name of ours.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracer.errors import StoreError
from tracer.log import LaneLog, Run
from tracer.sinks import meta_name

if TYPE_CHECKING:
    import duckdb

COPY_BYTES = 1024 * 1024
LINE_BYTES_MAX = 33_554_432
AXES = ("dp", "pp", "cp", "tp")
COMMON_TYPES = {"seq": "BIGINT", "step": "BIGINT", "time_ns": "BIGINT", "kind": "VARCHAR", "phase": "VARCHAR"}

# Fields that a header declares and that are not here become JSON. `op` is both an id (transfers, prefetches)
# and a word (meetings), so it is loaded as text and offered as a number where it is one. A `digest` is hex or
# a number, and is loaded as text.
FIELD_TYPES = {
    "ack": "VARCHAR",
    "agreed_pages": "BIGINT",
    "agreed_tokens": "BIGINT",
    "arrival_ms": "DOUBLE",
    "attempt": "BIGINT",
    "available": "BIGINT",
    "axis": "VARCHAR",
    "backed_pages": "BIGINT",
    "backups_agreed": "BIGINT",
    "backups_reserved": "BIGINT",
    "batch": "BIGINT",
    "cause": "VARCHAR",
    "completed_tokens": "BIGINT",
    "computed_tokens": "BIGINT[]",
    "consume_seq": "BIGINT",
    "conversation": "VARCHAR",
    "declined": "VARCHAR",
    "demoted_digests": "VARCHAR",
    "device_pages_evictable": "BIGINT",
    "device_pages_free": "BIGINT",
    "device_tokens": "BIGINT",
    "digest": "VARCHAR",
    "drop_reason": "VARCHAR",
    "dropped_digests": "VARCHAR",
    "due_step": "BIGINT",
    "duplicate_pages": "BIGINT",
    "elapsed_ns": "BIGINT",
    "error": "VARCHAR",
    "evictable": "BIGINT",
    "evictable_pages": "BIGINT",
    "expected": "VARCHAR",
    "extend_tokens": "BIGINT",
    "found": "VARCHAR",
    "group": "VARCHAR",
    "group_seq": "BIGINT",
    "hit_tokens": "BIGINT",
    "hits_agreed": "BIGINT",
    "hits_consumed": "BIGINT",
    "hits_ready": "BIGINT",
    "content": "VARCHAR",
    "states_freed": "BIGINT",
    "host_locks": "BIGINT",
    "device_pages_available": "BIGINT",
    "host_pages_available": "BIGINT",
    "host_pages_free": "BIGINT",
    "host_pages_used": "BIGINT",
    "backups_in_flight": "BIGINT",
    "host_slots_free": "BIGINT",
    "host_tokens": "BIGINT",
    "input_tokens": "BIGINT",
    "is_current": "BOOLEAN",
    "is_late": "BOOLEAN",
    "is_ready": "BOOLEAN",
    "is_reserved": "BOOLEAN",
    "kv_tokens": "BIGINT",
    "loaded_tokens": "BIGINT",
    "loads_agreed": "BIGINT",
    "loads_done": "BIGINT",
    "loads_in_flight": "BIGINT",
    "local_boundaries": "BIGINT[]",
    "local_pages": "BIGINT",
    "local_tokens": "BIGINT",
    "locks": "BIGINT[]",
    "matched_tokens": "BIGINT",
    "miss_digest": "VARCHAR",
    "mode": "VARCHAR",
    "namespace": "VARCHAR",
    "new_digests": "VARCHAR",
    "new_tokens": "BIGINT",
    "node": "BIGINT",
    "nodes": "BIGINT[]",
    "nodes_counted": "BIGINT",
    "nodes_created": "BIGINT",
    "numel": "BIGINT",
    "occupied_tokens": "BIGINT",
    "op": "VARCHAR",
    "order": "BIGINT",
    "outcome": "VARCHAR",
    "output_tokens": "BIGINT",
    "own_pages": "BIGINT",
    "owned_pages": "BIGINT",
    "page_index": "BIGINT",
    "pages": "BIGINT",
    "pages_freed": "BIGINT",
    "pages_wanted": "BIGINT",
    "peer": "BIGINT",
    "place": "VARCHAR",
    "policy": "VARCHAR",
    "pool": "VARCHAR",
    "prefetch_acks_agreed": "BIGINT",
    "prefetch_acks_consumed": "BIGINT",
    "prefetch_acks_ready": "BIGINT",
    "prefetches_submitted": "BIGINT",
    "priority": "BIGINT",
    "protected": "BIGINT",
    "protected_pages": "BIGINT",
    "publish_seq": "BIGINT",
    "purpose": "VARCHAR",
    "queue": "VARCHAR",
    "reason": "VARCHAR",
    "reduce": "VARCHAR",
    "releases_agreed": "BIGINT",
    "releases_ready": "BIGINT",
    "reserved": "BOOLEAN",
    "rid": "VARCHAR",
    "rids": "VARCHAR[]",
    "round": "BIGINT",
    "running_count": "BIGINT",
    "side_releases_agreed": "BIGINT[]",
    "side_releases_ready": "BIGINT[]",
    "side_written": "BIGINT",
    "slot": "BIGINT",
    "slots": "BIGINT",
    "state": "VARCHAR",
    "storage_acks_agreed": "BIGINT",
    "storage_acks_ready": "BIGINT",
    "storage_backups_submitted": "BIGINT",
    "storage_tokens": "BIGINT",
    "tokens": "BIGINT",
    "total": "BIGINT",
    "tries": "BIGINT",
    "usable_tokens": "BIGINT",
    "verb": "VARCHAR",
    "verdict": "VARCHAR",
    "waiting_count": "BIGINT",
    "write_queue_len": "BIGINT",
    "writer": "BIGINT",
    "writes_agreed": "BIGINT",
    "writes_done": "BIGINT",
    "writes_in_flight": "BIGINT",
    "written_pages": "BIGINT",
}
# Columns of `records` that are not the line's own; a field of the same name gets a `field_` in front.
OWN_COLUMNS = {"rank", *AXES, "lane", *COMMON_TYPES, "op_text", "fields"}
# The columns that `decisions` has anyway are not repeated in its `fields`.
DECISION_COLUMNS = ("rid", "node", "pages", "tokens")
# The second attempt at a log in which some field does not have the type of its name.
LENIENT = ", ignore_errors = true"
NOTES_MAX = 8


Sources = Sequence[tuple[LaneLog, Sequence[Path]]]


def link(run: Run, folder: Path) -> Sources:
    """Check every line, and make files that hold nothing but good ones, for each lane in order.

    Args:
        folder: private and empty; its path holds nothing that the database could read as a pattern.

    Raises:
        StoreError: a log can't be reached, or there is no room for copies.
    """
    found: list[tuple[LaneLog, list[Path]]] = []
    try:
        for lane_number, lane in enumerate(run.lanes):
            paths = []
            for number, extent in enumerate(lane.extents()):
                if not extent.valid_bytes:
                    continue
                path = folder / f"{lane_number}-{number}.jsonl"
                if extent.valid_bytes == extent.file_bytes:
                    path.symlink_to(os.path.abspath(extent.path))
                else:
                    _copy_start(extent.path, path, extent.valid_bytes)
                paths.append(path)
            found.append((lane, paths))
    except OSError as error:
        raise StoreError(f"the logs can't be reached: {error.strerror}", where=str(run.path)) from None
    return found


def _copy_start(source: Path, target: Path, size: int) -> None:
    with source.open("rb") as read, target.open("wb") as write:
        while size > 0 and (chunk := read.read(min(size, COPY_BYTES))):
            write.write(chunk)
            size -= len(chunk)


def fill_lanes(connection: duckdb.DuckDBPyConnection, run: Run, sources: Sources) -> None:
    """Make the tables of an empty database, all but `records`."""
    connection.execute("BEGIN TRANSACTION")
    connection.execute("CREATE TABLE kinds (name VARCHAR PRIMARY KEY, role VARCHAR)")
    roles = {name: kind.role for lane in run.lanes for name, kind in lane.kinds.items()}
    for name in sorted(roles):
        connection.execute("INSERT INTO kinds VALUES (?, ?)", [name, str(roles[name])])
    connection.execute(
        "CREATE TABLE sources (filename VARCHAR, rank BIGINT, dp BIGINT, pp BIGINT, cp BIGINT, "
        "tp BIGINT, lane VARCHAR)"
    )
    connection.execute(
        "CREATE TABLE lanes (rank BIGINT, dp BIGINT, pp BIGINT, cp BIGINT, tp BIGINT, lane VARCHAR, "
        "run_id VARCHAR, host VARCHAR, pid BIGINT, records BIGINT, steps BIGINT, outcome VARCHAR, "
        "torn VARCHAR, dropped BIGINT, dropped_kinds VARCHAR, last_dropped_seq BIGINT)"
    )
    for lane, paths in sources:
        place = [lane.rank, *(lane.coordinates.get(axis, 0) for axis in AXES), lane.lane]
        for path in paths:
            connection.execute("INSERT INTO sources VALUES (?, ?, ?, ?, ?, ?, ?)", [str(path), *place])
        meta = _meta(run, lane.rank)
        dropped = lane.dropped
        connection.execute(
            "INSERT INTO lanes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, ?, ?, ?, ?, ?)",
            [
                *place,
                lane.run_id,
                meta.get("host"),
                meta.get("pid"),
                lane.count,
                lane.outcome,
                lane.torn,
                # Without a trailer nobody knows.
                None if lane.trailer is None else sum(dropped.values()),
                ", ".join(dropped) or None,
                # Of a ring: the newest record that is gone.
                lane.last_dropped_seq or None,
            ],
        )
    connection.execute("COMMIT")


def _meta(run: Run, rank: int) -> dict[str, Any]:
    """Host and pid from the side file of a rank; empty when there is none that can be read."""
    folder = run.path if run.path.is_dir() else run.path.parent
    try:
        meta = json.loads((folder / meta_name(rank)).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(meta, dict):
        return {}
    host, pid = meta.get("host"), meta.get("pid")
    return {
        "host": host if isinstance(host, str) else None,
        "pid": pid if type(pid) is int and 0 <= pid < 2**63 else None,
    }


def _declared_fields(lanes: Sequence[LaneLog]) -> list[str]:
    """Every field that a header declares, once; names that differ in case only are one column."""
    found: dict[str, str] = {}
    for lane in lanes:
        for kind in lane.kinds.values():
            for field in kind.fields:
                found.setdefault(field.casefold(), field)
    return sorted(found.values())


def _fields_there(lanes: Sequence[LaneLog], types: Mapping[str, str]) -> set[str]:
    """The fields of the kinds that have records; every one that is known where a kind is not declared.

    What a database reads of a line costs by the column, whether or not anything is in it.
    """
    found: set[str] = set()
    for lane in lanes:
        for name in lane.kinds_seen:
            kind = lane.kinds.get(name)
            if kind is None:
                return set(types)
            found.update(field.casefold() for field in kind.fields)
    return {field for field in types if field.casefold() in found}


def fill_records(
    connection: duckdb.DuckDBPyConnection, run: Run, sources: Sources, *, is_lenient: bool = False
) -> list[str]:
    """Make `records`, and what depends on it.

    Args:
        is_lenient: a field that does not have the type of its name becomes null, and is told. Without it,
            the database refuses the log.

    Returns:
        What of the logs is not as it should be, each as a sentence.

    Raises:
        StoreError: rows were lost on the way.
    """
    paths = [path for _lane, lane_paths in sources for path in lane_paths]
    types = _types(run.lanes)
    fields = [field for field in types if field not in COMMON_TYPES and field != "op"]
    there = _fields_there(run.lanes, types) | {*COMMON_TYPES, "op"}
    read = {field: kind for field, kind in types.items() if field in there}
    selected = ", ".join(
        f"{f'log.{name(field)}' if field in there else f'NULL::{types[field]}'} AS {name(column(field))}"
        for field in fields
    )
    connection.execute(
        "CREATE OR REPLACE TABLE records AS SELECT sources.rank, dp, pp, cp, tp, sources.lane, "
        "log.seq, log.step, log.time_ns, log.kind, log.phase, "
        f"try_cast(log.op AS BIGINT) AS op, log.op AS op_text, {selected} "
        f"FROM {_reader(paths, read, LENIENT if is_lenient else '')} AS log "
        "JOIN sources ON sources.filename = hicache_source "
        "WHERE log.kind NOT IN ('header', 'trailer') ORDER BY sources.rank, sources.lane, log.seq"
    )
    _demand_every_record(connection, run)
    notes = [note for lane in run.lanes for note in (lane.begin, lane.loss) if note]
    if is_lenient:
        notes += _mistyped(connection, paths, types, [field for field in fields if field in there]) or [
            "some lines are not as the database reads JSON"
        ]
    connection.execute("DROP TABLE sources")
    connection.execute(
        "UPDATE lanes SET steps = seen.steps FROM "
        "(SELECT rank, lane, max(step) + 1 AS steps FROM records GROUP BY rank, lane) AS seen "
        "WHERE seen.rank = lanes.rank AND seen.lane = lanes.lane"
    )
    # A merge into nothing leaves out what is null, so that a record shows its own fields only.
    rest = [field for field in fields if field in there and field not in DECISION_COLUMNS]
    packed = ", ".join(f"{name(field)} := r.{name(column(field))}" for field in rest)
    connection.execute(
        "CREATE MACRO own_fields(r) AS "
        f"json_merge_patch('{{}}', to_json(struct_pack(op := r.op_text, {packed})))"
    )
    return notes


def _types(lanes: Sequence[LaneLog]) -> dict[str, str]:
    """The database's type of every field that is known or that a header declares."""
    types = {**COMMON_TYPES, **FIELD_TYPES}
    return types | {field: "JSON" for field in _declared_fields(lanes) if field.casefold() not in types}


def _reader(paths: Sequence[Path], types: dict[str, str], more: str = "") -> str:
    """The lines of `paths` as a table of `types`, with the file that each is from."""
    if not paths:
        empty = ", ".join(f"NULL::{kind} AS {name(field)}" for field, kind in types.items())
        return f"(SELECT {empty}, NULL::VARCHAR AS hicache_source WHERE false)"
    columns = ", ".join(f"{quoted(field)}: {quoted(kind)}" for field, kind in types.items())
    return (
        f"read_json([{', '.join(quoted(str(path)) for path in paths)}], format = 'newline_delimited', "
        f"columns = {{{columns}}}, filename = 'hicache_source', hive_partitioning = false, "
        f"maximum_object_size = {LINE_BYTES_MAX}{more})"
    )


def _mistyped(
    connection: duckdb.DuckDBPyConnection,
    paths: Sequence[Path],
    types: dict[str, str],
    fields: Sequence[str],
) -> list[str]:
    """Fields with values that are there and became null, and how many."""
    given = {field: "JSON" for field in fields if types[field] != "JSON"}
    counts = ", ".join(f"count({name(field)})" for field in given)
    loaded = ", ".join(f"count({name(column(field))})" for field in given)
    reader = _reader(paths, {"kind": "VARCHAR", **given}, LENIENT)
    there = connection.execute(
        f"SELECT {counts} FROM {reader} WHERE kind NOT IN ('header', 'trailer')"
    ).fetchone()
    kept = connection.execute(f"SELECT {loaded} FROM records").fetchone()
    notes = []
    for field, before, after in zip(given, there or (), kept or (), strict=True):
        if lost := before - after:
            values = "1 value" if lost == 1 else f"{lost:,} values"
            notes.append(f"{values} of {field} read as null: not {types[field]}")
    if len(notes) > NOTES_MAX:
        notes[NOTES_MAX:] = [f"and values of {len(notes) - NOTES_MAX} more fields"]
    return notes


def _demand_every_record(connection: duckdb.DuckDBPyConnection, run: Run) -> None:
    """Compare the rows with the reader's count, lane by lane: wrong numbers are worse than none.

    Raises:
        StoreError: some lane has other rows than records.
    """
    rows = dict(connection.execute("SELECT (rank, lane), count(*) FROM records GROUP BY ALL").fetchall())
    for lane in run.lanes:
        loaded = rows.pop((lane.rank, lane.lane), 0)
        if loaded != lane.count:
            raise StoreError(
                f"the database holds {loaded:,} records of rank {lane.rank}, lane {lane.lane}; "
                f"its log has {lane.count:,}",
                where=lane.files[0].name,
                hint=f"hicache check {run.path}",
            )


def column(field: str) -> str:
    """The column of `records` that holds a field."""
    return f"field_{field}" if field.casefold() in OWN_COLUMNS else field


def quoted(text: str) -> str:
    """A text as SQL has it."""
    return "'" + text.replace("'", "''") + "'"


def name(text: str) -> str:
    """A name as SQL has it."""
    return '"' + text.replace('"', '""') + '"'
