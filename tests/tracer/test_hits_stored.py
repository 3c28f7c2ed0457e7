"""What was kept of a run says of its requests what its logs say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.support.logs import write_lane
from tests.tracer.test_hits import A, aborted, admit, finish, forward, match, refused, request
from tracer import stored_hits as module
from tracer.errors import HitsError, StoreError
from tracer.hits import Hits, document_parts, hits
from tracer.log import Run, find_logs
from tracer.parquet import export_parquet
from tracer.stored_hits import stored_hits
from tracer.trace_store import open_store

# Served, refused, aborted in both places, still waiting, and one whose parts are not its prompt.
RECORDS: list[dict[str, Any]] = [
    *(request("r0", 128), match("r0", A), admit("r0"), forward(r0=128), finish("r0")),
    *refused("r1", 1000),
    *(request("r2", 100), match("r2", A), *aborted("r2")),
    *(request("r3", 100), match("r3", A), admit("r3", device=40), forward(r3=20), *aborted("r3", "chunked")),
    *(request('r"4?', 100, step=3), match('r"4?', ""), admit('r"4?', host=64), forward(**{'r"4?': 36})),
    finish('r"4?'),
    *(request("r5", 50, step=4), match("r5", A), admit("r5"), forward(r5=40), finish("r5")),
    *(request("r6", 7, step=5), match("r6", A)),
]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    folder = tmp_path_factory.mktemp("kept")
    run = find_logs(write_lane(folder / "logs", RECORDS, config={"page_size_tokens": 64}).parent)
    export_parquet(run, folder / "export")
    return run, folder / "export"


@pytest.fixture
def stored(kept: tuple[Run, Path]) -> Iterator[Hits]:
    found, store = stored_hits(kept[1])
    with store:
        yield found


def test_the_document_is_that_of_the_logs(stored: Hits, kept: tuple[Run, Path]) -> None:
    assert hits(kept[0]).to_json() == stored.to_json()


@pytest.mark.parametrize("rows_a_text", [1, 2, 100])
def test_the_printed_document_is_the_same_however_the_rows_are_cut(
    rows_a_text: int, stored: Hits, kept: tuple[Run, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROWS_A_TEXT", rows_a_text)
    assert json.loads("".join(document_parts(stored))) == hits(kept[0]).to_json()


def test_counts_and_first_rows_are_those_of_the_logs(stored: Hits, kept: tuple[Run, Path]) -> None:
    whole = hits(kept[0])
    assert (stored.request_count, stored.served_count, stored.row_count) == (7, 4, 7)
    assert (whole.request_count, whole.served_count, whole.row_count) == (7, 4, 7)
    assert (stored.reasons, stored.served_hit_rate) == (whole.reasons, whole.served_hit_rate)
    assert stored.first_rows(3) == whole.first_rows(3) == whole.rows[:3]
    assert stored.first_rids(2) == whole.first_rids(2) == ["r0", "r1"]


def test_one_request_is_found(stored: Hits, kept: tuple[Run, Path]) -> None:
    assert stored.narrowed('r"4?').to_json() == hits(kept[0]).narrowed('r"4?').to_json()


@pytest.mark.parametrize("by", ["tier", "conversation", "reason", "time"])
def test_other_groupings_are_those_of_the_logs(by: str, kept: tuple[Run, Path]) -> None:
    found, store = stored_hits(kept[1], by=by)
    with store:
        assert found.to_json() == hits(kept[0], by=by).to_json()


@pytest.mark.parametrize("limits", [{"since": 3}, {"until": 4}, {"since": 3, "until": 4}, {"since": 99}])
def test_steps_choose_the_arrivals_that_count(limits: dict[str, int], kept: tuple[Run, Path]) -> None:
    found, store = stored_hits(kept[1], **limits)
    with store:
        text = "".join(document_parts(found))
    assert json.loads(text) == hits(kept[0], **limits).to_json()


def test_prefixes_are_not_kept(kept: tuple[Run, Path]) -> None:
    with pytest.raises(HitsError, match="can't group by prefix"):
        stored_hits(kept[1], by="prefix")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("ALTER TABLE hits ALTER input_tokens TYPE VARCHAR", "input_tokens is VARCHAR"),
        ("ALTER TABLE hits ALTER is_aborted TYPE VARCHAR", "is_aborted is VARCHAR"),
        ("ALTER TABLE hits DROP device", 'Binder Error: Referenced column "device" not found'),
        ("DROP TABLE hits", "Catalog Error: Table with name hits does not exist"),
        ("UPDATE hits SET device = NULL WHERE rid = 'r0'", "1 of 7 rows lack a count or a name"),
        ("UPDATE hits SET rid = NULL", "7 of 7 rows lack a count or a name"),
        ("UPDATE hits SET computed = -1", "7 of 7 rows lack a count or a name"),
    ],
)
@pytest.mark.parametrize("by", ["request", "tier", "time"])
def test_hits_that_nobody_can_have_kept_are_refused(
    change: str, told: str, by: str, kept: tuple[Run, Path], tmp_path: Path
) -> None:
    path = tmp_path / "run.duckdb"
    open_store(kept[0], keep=path).close()
    with duckdb.connect(str(path)) as connection:
        connection.execute(change)
    with pytest.raises(StoreError) as refused:
        stored_hits(path, by=by)
    assert refused.value.what.startswith(f"its hits are not as this tool keeps them: {told}")
    assert refused.value.where == str(path)


def test_a_log_with_a_count_that_is_none_is_kept_without_its_hits(tmp_path: Path) -> None:
    run = find_logs(write_lane(tmp_path / "logs", [request("r0", 2**63)]).parent)
    export_parquet(run, tmp_path / "export")
    with open_store(tmp_path / "export") as opened:
        assert opened.query("SELECT count(*) FROM records").rows == ((1,),)
    with pytest.raises(HitsError, match="has no hits: record 1 lacks a count"):
        stored_hits(tmp_path / "export")
