"""Logs as tables: each view on a log that can be read, and a lock that holds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache.probes import KINDS as KINDS_OF_RUNTIME
from tests.support.logs import line, lines, write_lane, write_run
from tracer.errors import LogError, StoreError
from tracer.load import FIELD_TYPES
from tracer.queries import QUERIES
from tracer.record import Kind
from tracer.sinks import write_meta
from tracer.trace_store import TraceStore, open_store

EVICT = Kind("evict", "decision", compared=("pages_wanted", "surprise"), agree=("tp",))
BACKUP = Kind("write_backup", "decision", agree=("tp",), compared=("node", "pages", "tokens"))
KINDS = (BACKUP, EVICT, Kind("note", "note", info=("rank",)))

RECORDS: Sequence[Mapping[str, Any]] = [
    {"kind": "request", "rid": "r0", "input_tokens": 128, "conversation": 4, "step": 1, "time_ns": 10},
    {"kind": "match", "rid": "r0", "node": 3, "device_tokens": 64, "host_tokens": 0, "step": 2},
    {
        "kind": "admit",
        "rid": "r0",
        "verdict": "no_room",
        "device_tokens": 1,
        "host_tokens": 1,
        "storage_tokens": 1,
        "step": 2,
    },
    {
        "kind": "admit",
        "rid": "r0",
        "verdict": "admitted",
        "device_tokens": 64,
        "host_tokens": 0,
        "storage_tokens": 0,
        "step": 4,
        "time_ns": 40,
    },
    {"kind": "forward", "mode": "extend", "rids": ["r0", "r1"], "computed_tokens": [40, 7], "step": 4},
    {"kind": "forward", "mode": "extend", "rids": ["r0"], "computed_tokens": [24], "step": 5},
    {"kind": "forward", "mode": "decode", "rids": ["r0"], "computed_tokens": [1], "step": 6},
    {"kind": "write_backup", "node": 3, "pages": 2, "tokens": 128, "host_pages_free": 5, "step": 6},
    {"kind": "transfer_enqueue", "op": 9, "queue": "write", "nodes": [3], "pages": 2, "step": 6},
    {"kind": "transfer_done", "op": 9, "queue": "write", "step": 7},
    {"kind": "transfer_ack", "op": 9, "queue": "write", "nodes": [3], "pages": 2, "step": 8},
    {"kind": "transfer_enqueue", "op": 10, "queue": "write", "nodes": [4, 5], "pages": 1, "step": 8},
    {
        "kind": "evict",
        "pages_wanted": 1,
        "pages_freed": 2,
        "demoted_digests": "a" * 32,
        "surprise": {"x": [1]},
    },
    {"kind": "evict_host", "pages_wanted": 1, "pages_freed": 1, "dropped_digests": "b" * 16},
    {"kind": "pool_audit", "pool": "host", "available": 3, "evictable": 2, "protected": 1, "total": 7},
    {
        "kind": "meeting",
        "phase": "enter",
        "group": "tp0/events",
        "group_seq": 1,
        "op": "all_reduce",
        "step": 8,
    },
    {
        "kind": "meeting",
        "phase": "leave",
        "group": "tp0/events",
        "group_seq": 1,
        "op": "all_reduce",
        "step": 9,
    },
    {
        "kind": "meeting",
        "phase": "enter",
        "group": "tp0/events",
        "group_seq": 2,
        "op": "all_reduce",
        "step": 9,
    },
    {"kind": "note", "rank": 77},
    {"kind": "finish", "rid": "r0", "reason": "length", "output_tokens": 5, "step": 9},
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceStore]:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, {0: RECORDS, 1: RECORDS}, kinds=KINDS)
    write_meta(folder, 0)
    with open_store(folder) as opened:
        yield opened


def test_a_request_is_one_row_from_the_first_rank_of_its_replica(store: TraceStore) -> None:
    answer = store.query(
        "SELECT rid, conversation, input_tokens, output_tokens, device_tokens, host_tokens, storage_tokens, "
        "computed_tokens, receive_step, admit_step, finish_step, wait_steps, wait_ns, finish_reason "
        "FROM requests"
    )
    assert answer.rows == (("r0", "4", 128, 5, 64, 0, 0, 64, 1, 4, 9, 3, 30, "length"),)


def test_a_transfer_is_one_row_with_its_three_moments(store: TraceStore) -> None:
    answer = store.query(
        "SELECT op, queue, pages, nodes, enqueue_step, done_step, ack_step, enqueue_seq, ack_seq "
        "FROM transfers WHERE rank = 1"
    )
    assert answer.rows == (
        (9, "write", 2, [3], 6, 7, 8, 9, 11),
        (10, "write", 1, [4, 5], 8, None, None, 12, None),
    )


def test_a_queue_counts_what_is_in_flight_after_each_change(store: TraceStore) -> None:
    answer = store.query("SELECT event, op, in_flight, done_not_acked FROM queues WHERE rank = 0")
    assert answer.rows == (("enqueue", 9, 1, 0), ("done", 9, 1, 1), ("ack", 9, 0, 0), ("enqueue", 10, 1, 0))


def test_a_collective_that_was_never_left_says_so(store: TraceStore) -> None:
    answer = store.query(
        'SELECT "group", group_seq, op, enter_step, leave_step, "left" FROM collectives WHERE rank = 0'
    )
    assert answer.rows == (
        ("tp0/events", 1, "all_reduce", 8, 9, True),
        ("tp0/events", 2, "all_reduce", 9, None, False),
    )


def test_decisions_are_the_kinds_that_the_header_says_and_keep_their_other_fields(store: TraceStore) -> None:
    answer = store.query("SELECT kind, step, node, pages, tokens, fields FROM decisions WHERE rank = 0")
    assert [(*row[:-1], json.loads(row[-1])) for row in answer.rows] == [
        ("write_backup", 6, 3, 2, 128, {"host_pages_free": 5}),
        (
            "evict",
            0,
            None,
            None,
            None,
            {"pages_wanted": 1, "pages_freed": 2, "demoted_digests": "a" * 32, "surprise": {"x": [1]}},
        ),
    ]


def test_evictions_count_the_pages_of_their_digests(store: TraceStore) -> None:
    answer = store.query(
        "SELECT tier, pages_freed, demoted_pages, dropped_pages FROM evictions WHERE rank = 0"
    )
    assert answer.rows == (("device", 2, 2, 0), ("host", 1, 0, 1))


def test_a_pool_shows_the_pages_that_are_in_no_set(store: TraceStore) -> None:
    answer = store.query("SELECT pool, total, unaccounted FROM pools WHERE rank = 0 AND kind = 'pool_audit'")
    assert answer.rows == (("host", 7, 1),)


def test_a_pool_has_a_row_where_the_number_of_its_free_pages_changes(tmp_path: Path) -> None:
    levels = [(5, 9), (5, 9), (4, 9), (5, None), (5, 8)]
    records = [
        {"kind": "write_backup", "host_pages_free": host, "device_pages_free": device, "step": step}
        for step, (host, device) in enumerate(levels)
    ]
    kinds = (Kind("write_backup", "decision", local=("host_pages_free", "device_pages_free")),)
    with open_store(write_lane(tmp_path, records, kinds=kinds)) as opened:
        answer = opened.query(
            "SELECT step, kind, pool, available, total, unaccounted FROM pools ORDER BY pool, step"
        )
    kind = "write_backup"
    assert answer.rows == (
        (0, kind, "device", 9, None, None),
        (4, kind, "device", 8, None, None),
        (0, kind, "host", 5, None, None),
        (2, kind, "host", 4, None, None),
        (3, kind, "host", 5, None, None),
    )


def test_ranks_have_a_place_an_outcome_and_a_process(store: TraceStore) -> None:
    answer = store.query("SELECT rank, tp, run_id, pid, records, outcome, torn_lanes FROM ranks")
    assert answer.rows == (
        (0, 0, "run-a", os.getpid(), 20, "completed", 0),
        (1, 1, "run-a", None, 20, "completed", 0),
    )


def test_a_field_named_like_a_column_of_ours_is_kept_beside_it(store: TraceStore) -> None:
    answer = store.query("SELECT rank, field_rank FROM records WHERE kind = 'note'")
    assert answer.rows == ((0, "77"), (1, "77"))


@pytest.mark.parametrize(
    ("view", "columns"),
    [
        ("prefetches", ("rid", "op", "pages", "tokens", "done_step", "outcome")),
        ("heartbeats", ("rank", "lane", "seq", "step", "time_ns", "count")),
    ],
)
def test_views_without_records_have_their_columns(
    store: TraceStore, view: str, columns: tuple[str, ...]
) -> None:
    answer = store.query(f"SELECT * FROM {view}")
    assert (set(columns) <= set(answer.columns), answer.rows) == (True, ())


HANDLE = {"rid": "r0", "attempt": 0}
SUBMIT = {"kind": "prefetch_submit", **HANDLE, "node": 1, "pages": 4}
STORAGE: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "scheduler": [
        {**SUBMIT, "op": 0, "outcome": "declined_rate_limited", "tokens": 0, "time_ns": 1},
        {**SUBMIT, "op": 1, "outcome": "issued", "tokens": 256, "step": 1, "time_ns": 2},
        {
            "kind": "prefetch_outcome",
            **HANDLE,
            "outcome": "unfulfilled",
            "reason": "host_capacity",
            "tokens": 128,
        },
        {
            **{"kind": "prefetch_hit", "op": 1, **HANDLE, "consume_seq": 3, "outcome": "partial", "step": 2},
            **{"hit_tokens": 256, "tokens": 128, "time_ns": 4},
        },
        {"kind": "prefetch_retry", **HANDLE, "cause": "rate_limited", "verdict": "armed", "tries": 0},
        {"kind": "prefetch_ack", "op": 1, "ack": "progress", "consume_seq": 5, "tokens": 64, "time_ns": 7},
        {"kind": "prefetch_ack", "op": 1, "ack": "completed", "consume_seq": 6, "tokens": 128, "time_ns": 8},
        {
            **{"kind": "prefetch_insert", "op": 1, "rid": "r0", "outcome": "loaded", "step": 5, "time_ns": 8},
            **{"completed_tokens": 64, "matched_tokens": 0, "loaded_tokens": 64},
        },
        {**SUBMIT, "op": 2, "outcome": "issued", "tokens": 256, "step": 6, "time_ns": 9},
        {
            "kind": "prefetch_outcome",
            **HANDLE,
            "outcome": "cancelled",
            "reason": "",
            "tokens": 256,
            "step": 7,
        },
        {"kind": "storage_backup", "op": 1, "node": 3, "pages": 4, "time_ns": 10},
        {"kind": "storage_ack", "op": 1, "nodes": [3], "pages": 4, "time_ns": 12},
    ],
    "prefetch": [
        {"kind": "lane_state", "state": "idle", "op": None, "time_ns": 1},
        {"kind": "lane_state", "state": "backend", "op": 1, "time_ns": 3},
        {
            **{"kind": "query", "op": 1, **HANDLE, "pages": 4, "publish_seq": 3, "time_ns": 3},
            **{"agreed_pages": 4, "local_pages": 5, "local_boundaries": [5], "error": ""},
        },
    ],
    "io": [
        {"kind": "read", "op": 1, "batch": 0, "pages": 2, "local_tokens": 64, "error": "cut", "time_ns": 5}
    ],
    "sync": [
        {"kind": "progress", "op": 1, "ack": "progress", "publish_seq": 5, "agreed_tokens": 64, "time_ns": 6},
        {
            "kind": "progress",
            "op": 1,
            "ack": "completed",
            "publish_seq": 6,
            "agreed_tokens": 128,
            "time_ns": 7,
        },
    ],
    "backup": [{"kind": "storage_write", "op": 1, "pages": 4, "written_pages": 4, "time_ns": 11}],
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceStore]:
    folder = tmp_path_factory.mktemp("stored")
    for rank in range(2):
        for lane, records in STORAGE.items():
            # One store of two has a page and a side pool less.
            own = [
                {**record, "local_pages": 4, "local_boundaries": [0]}
                if rank and record["kind"] == "query"
                else record
                for record in records
            ]
            write_lane(folder, own, rank=rank, lane=lane, sizes={"tp": 2})
    with open_store(folder) as opened:
        yield opened


def test_a_prefetch_is_one_row_from_its_submission_to_what_became_of_it(stored: TraceStore) -> None:
    answer = stored.query(
        "SELECT op, submit_outcome, local_pages, agreed_pages, publish_seq, consume_seq, hit_outcome, "
        "hit_tokens, allocated_tokens, reads, local_tokens, read_errors, acks_published, acks_consumed, "
        "agreed_tokens, loaded_tokens, done_step, outcome, lost_tokens, lost_reasons, tries_before, "
        "retry_records FROM prefetches WHERE rank = 0"
    )
    nothing = (None,) * 14
    assert answer.rows == (
        (None, "declined_rate_limited", *nothing, None, "declined_rate_limited", None, None, 0, 1),
        (
            *(1, "issued", 5, 4, 3, 3, "partial", 256, 128, 1, 64, 1, 2, 2, 64),
            *(64, 5, "loaded", 128, "host_capacity", 1, 1),
        ),
        (2, "issued", *nothing, 7, "cancelled", 256, None, 2, 1),
    )


def test_queues_hold_what_the_external_tier_was_asked_for_as_well(stored: TraceStore) -> None:
    answer = stored.query(
        "SELECT queue, list(event || ' ' || op || ' ' || in_flight ORDER BY time_ns) FROM queues "
        "WHERE rank = 0 GROUP BY queue ORDER BY queue"
    )
    assert answer.rows == (
        ("backup", ["enqueue 1 1", "done 1 1", "ack 1 0"]),
        ("prefetch", ["enqueue 1 1", "done 1 1", "ack 1 0", "enqueue 2 1"]),
        ("read", ["enqueue 1 1", "done 1 1", "ack 1 0"]),
    )
    assert stored.canned("queues_open").rows[:1] == ((0, "prefetch", 2, 4, 6, False),)


def test_heartbeats_say_what_a_lane_was_at_and_how_long(stored: TraceStore) -> None:
    answer = stored.query('SELECT lane, state, op, "count", lasted_ns FROM heartbeats WHERE rank = 1')
    assert answer.rows == (("prefetch", "idle", None, 1, 2), ("prefetch", "backend", 1, 2, None))
    assert stored.canned("lanes_at").rows[:4] == (
        (0, "scheduler", "completed", None, None, None, None),
        (0, "backup", "completed", None, None, None, None),
        (0, "io", "completed", None, None, None, None),
        (0, "prefetch", "completed", "backend", 1, 0, 3),
    )


def test_a_store_that_has_less_than_its_peers_is_told_and_is_no_fault(stored: TraceStore) -> None:
    columns = (
        "rank",
        "queries_short",
        "pages_short",
        "side_pools_short",
        "first_op",
        "query_errors",
        "read_errors",
    )
    skew = stored.canned("storage_skew")
    assert (skew.columns, skew.rows) == (columns, ((0, 0, 0, 0, None, 0, 1), (1, 1, 1, 1, 1, 0, 1)))


def test_what_became_of_prefetches_is_counted(stored: TraceStore) -> None:
    assert [row[1:4] for row in stored.canned("prefetch_outcomes").rows] == [
        ("cancelled", None, 1),
        ("declined_rate_limited", None, 1),
        ("loaded", "host_capacity", 1),
    ]


def test_a_request_knows_of_its_abort_and_its_retractions(tmp_path: Path) -> None:
    records: list[Mapping[str, Any]] = [
        {"kind": "request", "rid": "r0", "input_tokens": 100, "priority": 5, "namespace": "ab"},
        {"kind": "forward", "mode": "extend", "rids": ["r0"], "computed_tokens": [60]},
        {"kind": "forward", "mode": "extend", "rids": ["r0"], "computed_tokens": [40]},
        {"kind": "retract", "rid": "r0", "attempt": 0, "output_tokens": 3, "pages": 2},
        {"kind": "forward", "mode": "extend", "rids": ["r0"], "computed_tokens": [103]},
        {"kind": "abort", "rid": "r0", "place": "running", "step": 9},
        {"kind": "abort", "rid": "r0", "place": "", "step": 11},
    ]
    with open_store(write_lane(tmp_path, records)) as opened:
        answer = opened.query(
            "SELECT computed_tokens, prefills, retractions, abort_step, abort_place, priority, namespace "
            "FROM requests"
        )
    assert answer.rows == ((100, 2, 1, 9, "running", 5, "ab"),)


def test_every_field_of_the_runtime_has_a_type() -> None:
    untyped = {field for kind in KINDS_OF_RUNTIME for field in kind.fields} - set(FIELD_TYPES)
    # What the meeting guard met is a list of maps.
    assert untyped == {"others"}


def test_only_fields_of_kinds_that_are_there_are_read_and_all_have_a_column(tmp_path: Path) -> None:
    path = write_lane(tmp_path, [{**BACKED_UP, "written_pages": 7}], kinds=(BACKUP,))
    with open_store(path) as opened:
        answer = opened.query("SELECT tokens, written_pages, miss_digest FROM records")
    assert answer.rows == ((64, None, None),)


BACKED_UP = {"kind": "write_backup", "node": 3, "pages": 1, "tokens": 64}


def test_a_lane_whose_oldest_records_are_gone_is_told(tmp_path: Path) -> None:
    head = json.loads(lines([])[0])
    every = [BACKED_UP, {"kind": "trailer", "outcome": "completed", "records": 8}]
    path = tmp_path / "rank0000.scheduler.002.jsonl"
    path.write_bytes(line(7, head) + b"".join(line(7 + at, record) for at, record in enumerate(every)))
    with open_store(tmp_path) as opened:
        assert opened.query("SELECT records, last_dropped_seq FROM lanes").rows == ((1, 6),)
        assert opened.notes == ("rank0000.scheduler.002.jsonl: the oldest records are gone, up to record 6",)


def test_a_rank_fared_as_its_worst_lane(tmp_path: Path) -> None:
    for lane, outcome in (("scheduler", "hung"), ("io", "stopped"), ("sync", "completed")):
        write_lane(tmp_path, [], lane=lane, outcome=outcome)
    with open_store(tmp_path) as opened:
        assert opened.query("SELECT lanes, outcome FROM ranks").rows == ((3, "hung"),)


@pytest.mark.parametrize("name", QUERIES)
def test_every_canned_query_runs(store: TraceStore, name: str) -> None:
    assert store.canned(name).columns


def test_a_canned_query_that_is_not_there_names_those_that_are(store: TraceStore) -> None:
    with pytest.raises(StoreError, match="slowest_requests"):
        store.canned("fastest")


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM read_json('/etc/passwd')",
        "SELECT * FROM glob('/etc/*')",
        "FROM '/etc/passwd'",
        "FROM '/etc/passwd.csv'",
        "SELECT * FROM query('SELECT * FROM read_text(''/etc/passwd'')')",
        "SELECT * FROM sqlite_scan('/tmp/x', 'y')",
        "COPY requests TO '/tmp/stolen.csv'",
        "COPY (SELECT 1) TO '/dev/stdout'",
        "EXPORT DATABASE '/tmp/stolen'",
        "ATTACH '/tmp/other.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "PRAGMA version",
        "PRAGMA enable_profiling",
        "CALL pragma_version()",
        "SET memory_limit = '100GB'",
        "SET enable_external_access = true",
        "RESET lock_configuration",
        "CREATE TABLE x (y INT)",
        "CREATE MACRO f(x) AS x",
        "INSERT INTO records (seq) VALUES (1)",
        "UPDATE records SET seq = 0",
        "DELETE FROM records",
        "DROP TABLE records",
        "DROP VIEW requests",
        "EXPLAIN ANALYZE DELETE FROM records",
        "WITH gone AS (DELETE FROM records RETURNING *) SELECT * FROM gone",
        "SELECT 1; SELECT 2",
        "SELECT 1; DROP TABLE records",
        "PREPARE p AS DELETE FROM records",
        "BEGIN",
        "",
        "-- nothing",
        "SELECT",
        "SELECT * FROM RECORDS_OF_SOMEBODY",
        "SELECT ?",
        "\0",
    ],
)
def test_a_statement_that_could_do_harm_is_refused(store: TraceStore, sql: str) -> None:
    with pytest.raises(StoreError):
        store.query(sql)
    assert store.query("SELECT count(*) FROM records").rows == ((40,),)


def test_a_semicolon_at_the_end_is_no_second_statement(store: TraceStore) -> None:
    assert store.query("SELECT 1 AS one; -- done").rows == ((1,),)


def test_a_local_variable_is_not_a_table(store: TraceStore) -> None:
    secret = [1, 2]
    with pytest.raises(StoreError, match="secret"):
        store.query("SELECT * FROM secret")
    assert secret


def test_a_refused_file_is_explained_in_three_parts(store: TraceStore) -> None:
    with pytest.raises(StoreError) as caught:
        store.query("SELECT *\nFROM read_text('/etc/passwd')")
    assert str(caught.value) == (
        "a query reads the loaded records and nothing else: no file, network or setting\n"
        "  where     SELECT * FROM read_text('/etc/passwd')\n"
        "  try       hicache query --list"
    )


def test_a_query_that_needs_too_much_memory_fails_alone(tmp_path: Path) -> None:
    write_lane(tmp_path, RECORDS)
    with open_store(tmp_path, memory_limit="100MB") as small:
        with pytest.raises(StoreError, match="the query needs more memory than it may use"):
            small.query("SELECT count(DISTINCT range || 'x') FROM range(30000000)")
        assert small.query("SELECT count(*) FROM records").rows == ((20,),)


def test_only_the_readable_start_of_a_torn_log_is_loaded(tmp_path: Path) -> None:
    path = write_lane(tmp_path, RECORDS, outcome=None)
    path.write_bytes(path.read_bytes()[:-5] + bytes(70_000))
    with open_store(tmp_path) as opened:
        assert opened.query("SELECT count(*), max(seq) FROM records").rows == ((19, 19),)
        assert opened.query("SELECT outcome, torn_lanes FROM ranks").rows == ((None, 1),)
        assert (
            opened.canned("lanes_cut").rows[0][4].startswith("rank0000.scheduler.000.jsonl: reading stopped")
        )


def test_the_logs_themselves_are_not_touched(tmp_path: Path) -> None:
    path = write_lane(tmp_path, RECORDS, outcome=None)
    path.write_bytes(path.read_bytes() + bytes(10))
    before = path.read_bytes()
    open_store(tmp_path).close()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_log_without_a_single_record_has_every_view_empty(tmp_path: Path) -> None:
    with open_store(write_lane(tmp_path, [])) as opened:
        assert opened.query("SELECT * FROM requests").rows == ()
        assert opened.query("SELECT rank, records FROM ranks").rows == ((0, 0),)


def test_a_path_with_quotes_and_wildcards_in_it_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "it's [a] * run"
    write_lane(folder, RECORDS)
    with open_store(folder) as opened:
        assert opened.query("SELECT count(*) FROM records").rows == ((20,),)


def test_a_field_of_the_wrong_type_is_null_and_told_and_no_row_is_lost(tmp_path: Path) -> None:
    bad = [
        {"kind": "match", "rid": "r0", "node": "seventeen", "device_tokens": 64},
        {"kind": "match", "rid": "r1", "node": 2**70, "device_tokens": 65},
        {"kind": "match", "rid": "r2", "node": 3, "rids": 7, "device_tokens": None},
    ]
    write_lane(tmp_path, [*bad, *RECORDS])
    with open_store(tmp_path) as opened:
        rows = opened.query("SELECT rid, node, device_tokens, rids FROM records WHERE seq < 4").rows
        assert rows == (("r0", None, 64, None), ("r1", None, 65, None), ("r2", 3, None, None))
        assert opened.query("SELECT count(*) FROM records").rows == ((len(RECORDS) + 3,),)
        assert opened.notes == (
            "2 values of node read as null: not BIGINT",
            "1 value of rids read as null: not VARCHAR[]",
        )


@pytest.mark.parametrize(
    "name", ["run[1]", "step=7", "a*", "rank=9/lane=x", "{a,b}", "~", "it's \udcff", "$HOME ?"]
)
def test_a_folder_of_any_name_gives_its_own_numbers(name: str, tmp_path: Path) -> None:
    write_lane(tmp_path / "run1", [*RECORDS, *RECORDS])
    folder = tmp_path / name
    write_lane(folder, RECORDS)
    with open_store(folder) as opened:
        found = opened.query("SELECT count(*), min(rank), min(lane), max(step) FROM records").rows
        assert found == ((len(RECORDS), 0, "scheduler", 9),)


def test_rows_that_are_not_the_records_of_the_log_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lane(tmp_path, RECORDS)
    monkeypatch.setattr("tracer.load._reader", lambda paths, types, more="": NOTHING(paths, types, more))
    with pytest.raises(
        StoreError, match="the database holds 0 records of rank 0, lane scheduler; its log has 20"
    ):
        open_store(tmp_path)


def NOTHING(paths: Sequence[Path], types: dict[str, str], more: str) -> str:  # noqa: N802
    from tracer.load import name

    empty = ", ".join(f"NULL::{kind} AS {name(field)}" for field, kind in types.items())
    return f"(SELECT {empty}, NULL::BIGINT AS hicache_lane WHERE false)"


def test_a_large_log_is_a_database_on_disk_with_the_same_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, {0: RECORDS, 1: RECORDS}, kinds=KINDS)
    with open_store(tmp_path) as small:
        expected = {name: small.canned(name) for name in QUERIES}
    monkeypatch.setattr("tracer.trace_store.IN_MEMORY_BYTES", 0)
    with open_store(tmp_path) as large:
        assert {name: large.canned(name) for name in QUERIES} == expected
        (folder,) = (
            row[0] for row in large.query("SELECT path FROM duckdb_databases() WHERE NOT internal").rows
        )
        assert Path(folder).exists()
        for sql in ("DELETE FROM records", "FROM read_text('/etc/passwd')", f"FROM glob('{folder}/../*')"):
            with pytest.raises(StoreError):
                large.query(sql)
    assert not Path(folder).parent.exists()


def test_a_store_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    folder = tmp_path / "run"
    write_lane(folder, RECORDS)
    with open_store(folder) as opened:
        opened.write_parquet("FROM records")
    write_lane(folder, [], run_id="b", lane="io")
    with pytest.raises(StoreError):
        open_store(folder)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_temporary_folder_that_reads_as_a_pattern_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a=[1]*").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a=[1]*"))
    write_lane(tmp_path / "run", RECORDS)
    with open_store(tmp_path / "run") as opened:
        assert opened.query("SELECT count(*) FROM records").rows == ((20,),)
    assert list((tmp_path / "a=[1]*").iterdir()) == []


def test_an_answer_is_read_while_its_query_runs(store: TraceStore) -> None:
    with store.answer("SELECT range AS n, 'x' AS word FROM range(1000000000000)") as answer:
        assert (answer.columns, answer.types) == (("n", "word"), ("BIGINT", "VARCHAR"))
        assert [row for row, _ in zip(answer.rows, range(5000), strict=False)][-1] == (4999, "x")
    assert store.query("SELECT 1").rows == ((1,),)


@pytest.mark.parametrize(
    "sql",
    [
        "FROM lanes -- ;",
        "SELECT ';' AS a FROM lanes; -- done;",
        "SELECT $$a;$$ FROM lanes ;",
        "DESCRIBE lanes",
    ],
)
def test_rows_are_counted_without_the_end_of_the_statement(store: TraceStore, sql: str) -> None:
    assert store.count(sql) == len(store.query(sql).rows)


def test_the_end_of_a_statement_is_no_way_out(store: TraceStore) -> None:
    for ask in (store.count, store.write_parquet):
        with pytest.raises(StoreError):
            ask("SELECT 1) TO '/tmp/hicache-stolen' --")
    assert not Path("/tmp/hicache-stolen").exists()


def test_records_that_their_writer_dropped_are_told(tmp_path: Path) -> None:
    head, *rest = lines(RECORDS[:2], outcome=None)
    trailer = {"kind": "trailer", "outcome": "completed", "records": 3, "dropped": {"match": 4, "admit": 1}}
    (tmp_path / "rank0000.scheduler.000.jsonl").write_bytes(b"".join([head, *rest, line(3, trailer)]))
    with open_store(tmp_path) as opened:
        assert opened.query("SELECT dropped, dropped_kinds FROM lanes").rows == ((5, "admit, match"),)
        assert opened.query("SELECT dropped FROM ranks").rows == ((5,),)
        assert opened.notes == (
            "rank0000.scheduler.000.jsonl: records that could not be written are missing: "
            "1 of admit, 4 of match",
        )


def test_an_unknown_table_or_column_points_to_the_schema(store: TraceStore) -> None:
    for sql in ("FROM nope", "SELECT nope FROM lanes"):
        with pytest.raises(StoreError) as caught:
            store.query(sql)
        assert caught.value.hint == f"hicache query {store.path} --schema"


def test_nobodys_home_is_named(store: TraceStore) -> None:
    found = store.query(
        "SELECT name FROM duckdb_settings() WHERE contains(value, ?)".replace("?", f"'{Path.home()}'")
    )
    assert found.rows == ()


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    write_lane(tmp_path, RECORDS, rank=0, run_id="a", sizes={"tp": 2})
    write_lane(tmp_path, RECORDS, rank=1, run_id="b", sizes={"tp": 2})
    with pytest.raises(StoreError, match="holds 2 runs"):
        open_store(tmp_path)


def test_a_folder_without_logs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="no logs in"):
        open_store(tmp_path)


def test_an_id_that_is_used_again_is_another_request_with_its_own_numbers(tmp_path: Path) -> None:
    def life(tokens: int, device: int, step: int) -> list[dict[str, Any]]:
        found = {"device_tokens": device, "host_tokens": 0, "storage_tokens": 0}
        computed = {"rids": ["r0"], "computed_tokens": [tokens - device]}
        own: list[dict[str, Any]] = [
            {"kind": "request", "rid": "r0", "input_tokens": tokens},
            {"kind": "admit", "rid": "r0", "verdict": "admitted", **found},
            {"kind": "forward", "mode": "extend", **computed},
            {"kind": "retract", "rid": "r0", "output_tokens": 1, "pages": 1},
            {"kind": "forward", "mode": "extend", **computed},
            {"kind": "abort", "rid": "r0", "place": "running"},
            {"kind": "finish", "rid": "r0", "reason": "abort", "output_tokens": step},
        ]
        return [{"step": step + at, **record} for at, record in enumerate(own)]

    kinds = [kind for kind in KINDS_OF_RUNTIME if kind.name in ("request", "admit", "forward", "finish")]
    kinds += [kind for kind in KINDS_OF_RUNTIME if kind.name in ("retract", "abort")]
    write_lane(tmp_path, [*life(128, 0, 10), *life(192, 64, 20)], kinds=kinds)
    columns = "input_tokens, device_tokens, computed_tokens, receive_step, finish_step, output_tokens, "
    columns += "prefills, retractions, abort_step, abort_place"
    with open_store(tmp_path) as opened:
        assert opened.query(f"SELECT {columns} FROM requests").rows == (
            (128, 0, 128, 10, 16, 10, 1, 1, 15, "running"),
            (192, 64, 128, 20, 26, 20, 1, 1, 25, "running"),
        )
