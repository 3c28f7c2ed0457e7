"""How the views join, on a run with every tier, as docs/trace_store.md says it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.config import Config, StorageConfig
from hicache.job import PlanSpec
from hicache.sim.world import simulate
from hicache.topology import Topology
from tracer.columns import KEYS, MEANINGS, VIEWS, meaning
from tracer.trace_store import TraceStore, open_store

PAGE = (Path(__file__).parents[2] / "docs" / "trace_store.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceStore]:
    folder = tmp_path_factory.mktemp("joins")
    config = Config(
        topology=Topology(tp=2),
        page_size_tokens=64,
        device_pages=24,
        host_pages=40,
        storage=StorageConfig(backend="memory"),
    )
    spec = "conversations=4,rounds=5,max-context=1200,output=20,shared-prefix=200"
    result = simulate(PlanSpec(config, agentic=spec).plan(), out=folder)
    assert result.outcome == "completed"
    with open_store(folder, with_hits=True) as opened:
        yield opened


@pytest.mark.parametrize("sql", EXAMPLES, ids=lambda sql: " ".join(sql.split())[:40])
def test_an_example_of_the_page_has_an_answer(store: TraceStore, sql: str) -> None:
    assert store.query(sql).rows


def test_every_load_back_is_in_a_transfer_of_its_request(store: TraceStore) -> None:
    missing = store.query(
        "SELECT d.rank, d.seq FROM decisions d ANTI JOIN request_transfers t "
        "ON t.rank = d.rank AND t.lane = d.lane AND t.seq = d.seq AND t.rid = d.rid "
        "AND t.queue = 'load' AND t.step = t.operation_step "
        "WHERE d.kind = 'load_back' AND d.tokens > 0"
    )
    assert missing.rows == ()
    assert store.query("SELECT count(*) > 0 FROM request_transfers WHERE queue = 'load'").rows == ((True,),)


def test_a_transfer_knows_its_requests_and_no_others(store: TraceStore) -> None:
    assert store.query("SELECT count(*) FROM transfers WHERE rids IS NULL").rows == ((0,),)
    assert store.query(
        "SELECT count(*) FROM (SELECT dp, queue, op FROM transfers GROUP BY ALL "
        "HAVING count(DISTINCT rids) > 1 OR count(DISTINCT nodes) > 1)"
    ).rows == ((0,),)
    # As many rows as decisions: a path that is loaded is not taken for the requests that had it before.
    assert store.query(
        "SELECT (SELECT count(*) FROM request_transfers WHERE queue = 'load') - "
        "(SELECT count(*) FROM decisions WHERE kind = 'load_back' AND tokens > 0)"
    ).rows == ((0,),)


def test_tokens_from_the_host_have_a_load_on_every_rank(store: TraceStore) -> None:
    assert (
        store.query(
            "SELECT q.rid, count(DISTINCT t.rank) AS ranks FROM requests q LEFT JOIN request_transfers t "
            "ON t.dp = q.dp AND t.rid = q.rid AND t.queue = 'load' "
            "WHERE q.host_tokens > 0 GROUP BY ALL HAVING ranks <> 2"
        ).rows
        == ()
    )


def test_every_round_came_out_of_the_call_that_it_was_agreed_in(store: TraceStore) -> None:
    assert store.query(
        "SELECT DISTINCT d.kind, d.phase, c.purpose, c.leave_seq + 1 = d.seq FROM decisions d "
        "JOIN collectives c USING (rank, lane, \"group\", group_seq) WHERE d.kind = 'event_round'"
    ).rows == (("event_round", "return", "event_round", True),)
    assert store.query(
        "SELECT count(*) FROM decisions WHERE kind = 'event_round' "
        "AND (phase = 'return') <> (group_seq IS NOT NULL)"
    ).rows == ((0,),)


def test_the_ranks_of_a_call_are_in_it_in_one_step(store: TraceStore) -> None:
    assert (
        store.query(
            "SELECT \"group\", group_seq FROM collectives WHERE lane = 'scheduler' "
            "GROUP BY ALL HAVING count(DISTINCT step) > 1 OR count(*) <> 2"
        ).rows
        == ()
    )


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_described_as_it_is(store: TraceStore, view: str) -> None:
    part = PAGE.split(f"### `{view}`\n")[1].split("\n###")[0]
    assert f"One row: {VIEWS[view]}." in part
    columns = store.query(
        "SELECT column_name, data_type FROM duckdb_columns() "
        f"WHERE table_name = '{view}' ORDER BY column_index"
    ).rows
    if view == "records":
        assert all(f"`{column}`" in part for column in (*KEYS, "kind", "phase", "op_text", "other_fields"))
        return
    keys = [name for name, _type in columns if name in KEYS and f"{view}.{name}" not in MEANINGS]
    assert re.findall(r"^\| `(\w+)` \| (\S+) \| (.*) \|$", part, re.MULTILINE) == [
        (name, kind, meaning(view, name)) for name, kind in columns if name not in keys
    ]
    assert not keys or "Keys: " + ", ".join(f"`{key}`" for key in keys) + "." in part


def test_every_view_and_table_is_described(store: TraceStore) -> None:
    there = store.query("SELECT DISTINCT table_name FROM duckdb_columns() WHERE NOT internal").rows
    assert {row[0] for row in there} - {"hicache_store"} == set(VIEWS)


def test_what_a_column_means_is_said_of_columns_that_are_there(store: TraceStore) -> None:
    there = set(store.query("SELECT table_name, column_name FROM duckdb_columns() WHERE NOT internal").rows)
    for name in MEANINGS:
        view, _, column = name.rpartition(".")
        assert (view, column) in there if view else any(column == each for _view, each in there), name
