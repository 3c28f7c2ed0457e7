"""Logs into tables: `records`, `lanes` and `kinds`, which the views of views.sql read.

Owns the types of the known fields. It loads only what the reader found to be whole, and all of that: the
rows are counted against the reader's records. The database never sees a path that somebody else has
chosen, for it reads wildcards and `key=value` in paths as more than names: every file has a link, or a copy
of what is readable of it, under a name of ours.

A field has a column where it is known or a header declares it. What a record of an undeclared kind has beside
these is kept whole, as JSON in `other_fields`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracer.errors import StoreError
from tracer.log import Extent, LaneLog, Run
from tracer.plausible import INTEGER_MAX
from tracer.record import BLOCK, HEADER, TRAILER
from tracer.served import RequestHits
from tracer.sinks import meta_name

if TYPE_CHECKING:
    import duckdb

COPY_BYTES = 1024 * 1024
PACKED_SUFFIX = ".gz"
LINE_BYTES_MAX = 33_554_432
AXES = ("dp", "pp", "cp", "tp")
COMMON_TYPES = {"seq": "BIGINT", "step": "BIGINT", "time_ns": "BIGINT", "kind": "VARCHAR", "phase": "VARCHAR"}

# Fields that a header declares and that are not here become JSON. `op` is both an id (transfers, prefetches)
# and a word (meetings), so it is loaded as text and offered as a number where it is one. A `digest` is hex or
# a number, and is loaded as text, and so is a `value`, which is one.
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
    "count": "BIGINT",
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
    "first_step": "BIGINT",
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
    "hit_digest": "VARCHAR",
    "kv_digest": "VARCHAR",
    "parent_digest": "VARCHAR",
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
    "records": "BIGINT",
    "rid": "VARCHAR",
    "rids": "VARCHAR[]",
    "round": "BIGINT",
    "running_count": "BIGINT",
    "share": "BIGINT",
    "share_max": "BIGINT",
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
    "value": "VARCHAR",
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
# Columns of `records` that are not the line's own, and its name, which stands for a whole row; a field of the
# same name gets a `field_` in front.
OWN_COLUMNS = {"rank", *AXES, "lane", *COMMON_TYPES, "op_text", "other_fields", "fields", "records"}
PLACE = ("rank", *AXES, "lane")
# The name of the folder of a lane's files says its number.
LANE_NUMBER = "hicache_lane"
HIVE = f"hive_partitioning = true, hive_types = {{'{LANE_NUMBER}': BIGINT}}"
# The columns that `decisions` has anyway are not repeated in its `fields`.
DECISION_COLUMNS = ("rid", "node", "pages", "tokens")
# Lines that are no records.
NO_RECORDS = f"('{HEADER}', '{TRAILER}', '{BLOCK}')"
# The columns of `hits`: what a request has, by the types that its annotations name, and what follows from it.
SQL_TYPES = {"int": "BIGINT", "bool": "BOOLEAN", "float": "DOUBLE", "str": "VARCHAR", "str | None": "VARCHAR"}
REQUEST_TYPES = {field: SQL_TYPES.get(kind, "JSON") for field, kind in RequestHits.__annotations__.items()}
DERIVED_TYPES = {"unplaced": "BIGINT", "unplaced_reason": "VARCHAR"}
# More columns than that are nobody's log. What is beyond them is in `other_fields`.
DECLARED_FIELDS_MAX = 400
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
                path = folder / f"{LANE_NUMBER}={lane_number}" / f"{number}.jsonl"
                path.parent.mkdir(exist_ok=True)
                paths.append(_placed(lane, number, extent, path))
            found.append((lane, paths))
    except OSError as error:
        raise StoreError(f"the logs can't be reached: {error.strerror}", where=str(run.path)) from None
    return found


def _placed(lane: LaneLog, number: int, extent: Extent, path: Path) -> Path:
    """A file with the readable lines of one of a lane's: a link where these are all of it."""
    is_whole = not lane.damage and lane.torn is None
    if is_whole and extent.path.suffix == PACKED_SUFFIX:
        # The database unpacks it by its name.
        path = path.with_name(path.name + PACKED_SUFFIX)
        path.symlink_to(os.path.abspath(extent.path))
    elif not extent.is_plain:
        with path.open("wb") as target:
            # By another reader of the same files, for a pass over some of them leaves its own counts.
            copy(lane).copy_readable(number, target)
    elif extent.valid_bytes == extent.file_bytes:
        path.symlink_to(os.path.abspath(extent.path))
    else:
        _copy_start(extent.path, path, extent.valid_bytes)
    return path


def _copy_start(source: Path, target: Path, size: int) -> None:
    with source.open("rb") as read, target.open("wb") as write:
        while size > 0 and (chunk := read.read(min(size, COPY_BYTES))):
            write.write(chunk)
            size -= len(chunk)


def fill_lanes(connection: duckdb.DuckDBPyConnection, run: Run, sources: Sources) -> None:
    """Make the tables of an empty database, all but `records`."""
    connection.execute(
        "CREATE TABLE kinds (name VARCHAR PRIMARY KEY, role VARCHAR, agree VARCHAR[], compared VARCHAR[], "
        '"local" VARCHAR[], info VARCHAR[], leader VARCHAR, result VARCHAR)'
    )
    declared = {name: kind for lane in run.lanes for name, kind in lane.kinds.items()}
    seen = {name for lane in run.lanes for name in lane.kinds_seen}
    rows: list[Sequence[Any]] = [
        (name, str(kind.role), kind.agree, kind.compared, kind.local, kind.info, kind.leader, kind.result)
        for name, kind in declared.items()
    ]
    rows += [(name, *(None,) * 7) for name in seen - declared.keys()]
    _insert(connection, "kinds", sorted(rows, key=lambda row: str(row[0])))
    connection.execute(
        "CREATE TABLE lanes (rank BIGINT, dp BIGINT, pp BIGINT, cp BIGINT, tp BIGINT, lane VARCHAR, "
        "run_id VARCHAR, host VARCHAR, pid BIGINT, records BIGINT, outcome VARCHAR, "
        "torn VARCHAR, dropped BIGINT, dropped_kinds VARCHAR, last_dropped_seq BIGINT, damage VARCHAR[])"
    )
    _insert(connection, "lanes", [_lane_row(run, lane) for lane, _paths in sources])


def _insert(connection: duckdb.DuckDBPyConnection, table: str, rows: Sequence[Sequence[Any]]) -> None:
    """Add rows at once: one at a time, those of a thousand ranks take seconds."""
    if rows:
        lists = ", ".join("unnest(?)" for _ in rows[0])
        connection.execute(
            f"INSERT INTO {table} SELECT {lists}", [list(each) for each in zip(*rows, strict=True)]
        )


def _place_of(lane: LaneLog) -> tuple[Any, ...]:
    return (lane.rank, *(lane.coordinates.get(axis, 0) for axis in AXES), lane.lane)


def _places(lanes: Sequence[LaneLog]) -> Sequence[Sequence[str]]:
    """For each column of `PLACE` its value for each lane, as SQL has it."""
    rows = [_place_of(lane) for lane in lanes] or [(0,) * 5 + ("",)]
    numbers = [[f"{value}::BIGINT" for value in each] for each in list(zip(*rows, strict=True))[:-1]]
    return [*numbers, [quoted(row[-1]) for row in rows]]


def _lane_row(run: Run, lane: LaneLog) -> tuple[Any, ...]:
    meta, dropped = _meta(run, lane.rank), lane.dropped
    return (
        *_place_of(lane),
        lane.run_id,
        meta.get("host"),
        meta.get("pid"),
        lane.count,
        lane.outcome,
        lane.torn,
        # Without a trailer nobody knows.
        None if lane.trailer is None else min(sum(dropped.values()), INTEGER_MAX),
        ", ".join(dropped) or None,
        # Of a ring: the newest record that is gone.
        lane.last_dropped_seq or None,
        list(lane.damage),
    )


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


def _columns_there(lanes: Sequence[LaneLog], types: Mapping[str, str]) -> set[str]:
    """The fields with a column that some record can have; all of them where a kind is not declared.

    What a database reads of a line costs by the column, whether or not anything is in it.
    """
    found: set[str] = {*COMMON_TYPES, "op"}
    for lane in lanes:
        for name in lane.kinds_seen:
            kind = lane.kinds.get(name)
            if kind is None:
                return set(types)
            found.update(field.casefold() for field in kind.fields)
    return {field for field in types if field.casefold() in found}


def fill_records(
    connection: duckdb.DuckDBPyConnection, run: Run, sources: Sources, *, is_lenient: bool = False
) -> tuple[list[str], list[str]]:
    """Make `records`, in order of rank, lane and seq, and what depends on it.

    Args:
        is_lenient: a field that does not have the type of its name becomes null, and is told. Without it,
            the database refuses the log.

    Returns:
        The fields that some record can have, and what of the logs is not as it should be, in sentences.

    Raises:
        StoreError: rows were lost on the way.
    """
    paths = [path for _lane, lane_paths in sources for path in lane_paths]
    types = _types(run.lanes)
    has_others = _fill_others(connection, paths, types, _without_columns(run.lanes, types))
    fields = [field for field in types if field not in COMMON_TYPES and field != "op"]
    there = _columns_there(run.lanes, types)
    read = {field: kind for field, kind in types.items() if field in there}
    selected = ", ".join(
        f"{f'log.{name(field)}' if field in there else f'NULL::{types[field]}'} AS {name(column(field))}"
        for field in fields
    )
    # What a lane is comes out of lists, for a join would lose the order of the lines. Where one is needed all
    # the same they have to be sorted.
    place = ", ".join(
        f"[{', '.join(values)}][log.{LANE_NUMBER} + 1] AS {column_name}"
        for column_name, values in zip(PLACE, _places(run.lanes), strict=True)
    )
    connection.execute(
        f"CREATE OR REPLACE TABLE records AS SELECT {place}, "
        "log.seq, log.step, log.time_ns, log.kind, log.phase, "
        f"try_cast(log.op AS BIGINT) AS op, log.op AS op_text, {selected}, "
        f"{'others.fields' if has_others else 'NULL::JSON'} AS other_fields "
        f"FROM {_reader(paths, read, LENIENT if is_lenient else '')} AS log "
        + (f"LEFT JOIN others USING ({LANE_NUMBER}, seq) " if has_others else "")
        + f"WHERE log.kind NOT IN {NO_RECORDS}"
        + (f" ORDER BY log.{LANE_NUMBER}, log.seq" if has_others else "")
    )
    _demand_every_record(connection, run)
    notes = [note for lane in run.lanes for note in (lane.begin, lane.loss, *lane.damage) if note]
    if is_lenient:
        notes += _mistyped(connection, paths, types, [field for field in fields if field in there]) or [
            "some lines are not as the database reads JSON"
        ]
    connection.execute("DROP TABLE others")
    _count_in_lanes(connection)
    own = [field for field in fields if field in there]
    connection.execute(own_fields(own))
    return own, notes


def fill_hits(connection: duckdb.DuckDBPyConnection, path: Path) -> None:
    """Make `hits` from a file with one request a line; `number` is their order."""
    types = {**REQUEST_TYPES, **DERIVED_TYPES}
    columns = ", ".join(f"{quoted(field)}: {quoted(kind)}" for field, kind in types.items())
    connection.execute(
        "CREATE TABLE hits AS SELECT row_number() OVER () - 1 AS number, * FROM read_json("
        f"{quoted(str(path))}, format = 'newline_delimited', columns = {{{columns}}})"
    )


def _count_in_lanes(connection: duckdb.DuckDBPyConnection) -> None:
    """Add to `lanes` what only the records tell: steps, and what the recorder says of itself."""
    connection.execute(
        "CREATE OR REPLACE TABLE lanes AS SELECT lanes.*, steps, coalesce(idle_steps, 0) AS idle_steps, "
        "coalesce(checkpoints, 0) AS checkpoints, coalesce(throttles, 0) AS throttles, "
        "coalesce(freezes, 0) AS freezes FROM lanes LEFT JOIN ("
        "SELECT rank, lane, max(step) + 1 AS steps, "
        "sum(\"count\") FILTER (kind = 'idle')::BIGINT AS idle_steps, "
        "count(*) FILTER (kind = 'checkpoint') AS checkpoints, "
        "count(*) FILTER (kind = 'throttle') AS throttles, count(*) FILTER (kind = 'freeze') AS freezes "
        "FROM records GROUP BY rank, lane) USING (rank, lane) ORDER BY rank, lane <> 'scheduler', lane"
    )


def own_fields(fields: Sequence[str]) -> str:
    """The statement that makes the macro `own_fields`: a record as JSON of the fields that it has.

    Args:
        fields: those that some record has.
    """
    # A merge into nothing leaves out what is null.
    rest = [field for field in fields if field not in DECISION_COLUMNS]
    packed = "".join(f", {name(field)} := r.{name(column(field))}" for field in rest)
    return (
        "CREATE MACRO own_fields(r) AS json_merge_patch(coalesce(r.other_fields, '{}'), "
        f"to_json(struct_pack(op := r.op_text{packed})))"
    )


def _declared_fields(lanes: Sequence[LaneLog]) -> list[str]:
    """Every field that a header declares, once; of names that differ in case only, one has a column."""
    found: dict[str, str] = {}
    for lane in lanes:
        for kind in lane.kinds.values():
            for field in kind.fields:
                found.setdefault(field.casefold(), field)
    return sorted(found.values())


def _types(lanes: Sequence[LaneLog]) -> dict[str, str]:
    """The database's type of every field that has a column."""
    types = {**COMMON_TYPES, **FIELD_TYPES}
    unknown = [field for field in _declared_fields(lanes) if field.casefold() not in types]
    return types | dict.fromkeys(unknown[:DECLARED_FIELDS_MAX], "JSON")


def _without_columns(lanes: Sequence[LaneLog], types: Mapping[str, str]) -> list[str]:
    """The kinds of records that may have fields without a column."""
    return sorted(
        {
            name
            for lane in lanes
            for name in lane.kinds_seen
            if name not in lane.kinds or not set(lane.kinds[name].fields) <= types.keys()
        }
    )


def _fill_others(
    connection: duckdb.DuckDBPyConnection,
    paths: Sequence[Path],
    types: Mapping[str, str],
    kinds: Sequence[str],
) -> bool:
    """Make `others`: what the records of these kinds have beside the fields with a column; false for none."""
    connection.execute(f"CREATE OR REPLACE TABLE others ({LANE_NUMBER} BIGINT, seq BIGINT, fields JSON)")
    has_others = bool(kinds and paths)
    if has_others:
        without = quoted(json.dumps(dict.fromkeys(types)))
        connection.execute(
            f"INSERT INTO others SELECT {LANE_NUMBER}, try_cast(json->>'seq' AS BIGINT), "
            f"json_merge_patch(json, {without}) FROM read_ndjson_objects({_listed(paths)}, "
            f"{HIVE}, maximum_object_size = {LINE_BYTES_MAX}) "
            f"WHERE json->>'kind' IN ({', '.join(map(quoted, kinds))})"
        )
    return has_others


def _listed(paths: Sequence[Path]) -> str:
    return f"[{', '.join(quoted(str(path)) for path in paths)}]"


def _reader(paths: Sequence[Path], types: dict[str, str], more: str = "") -> str:
    """The lines of `paths` as a table of `types`, with the number of the lane that each is from."""
    if not paths:
        empty = ", ".join(f"NULL::{kind} AS {name(field)}" for field, kind in types.items())
        return f"(SELECT {empty}, NULL::BIGINT AS {LANE_NUMBER} WHERE false)"
    columns = ", ".join(f"{quoted(field)}: {quoted(kind)}" for field, kind in types.items())
    return (
        f"read_json({_listed(paths)}, format = 'newline_delimited', "
        f"columns = {{{columns}}}, {HIVE}, maximum_object_size = {LINE_BYTES_MAX}{more})"
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
    there = connection.execute(f"SELECT {counts} FROM {reader} WHERE kind NOT IN {NO_RECORDS}").fetchone()
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
