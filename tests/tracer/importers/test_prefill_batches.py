from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tracer.importers.canaries import prefill, write
from tracer.errors import HitsError
from tracer.importers import prefill_batches
from tracer.importers.foreign import foreign_hits
from tracer.importers.sniff import Imported, files_at


def read(folder: Path, *rows: Any) -> Imported:
    return prefill_batches.read(files_at(write(folder / "server.log", *rows)))


def test_a_batch_is_what_it_computed_and_what_the_cache_gave(tmp_path: Path) -> None:
    (row,) = read(tmp_path, prefill(300, 100)).requests
    assert (row.input_tokens, row.computed, row.cached, row.unplaced) == (400, 300, 100, 0)
    assert row.time_ns == 1_795_168_800_000_000_000


def test_totals_are_all_that_is_told(tmp_path: Path) -> None:
    document = foreign_hits(read(tmp_path, prefill(300, 100))).to_json()
    assert (document["by"], document["requests"], document["hit_rate"]) == ("tier", None, 0.25)
    assert document["cached_tokens"] == {
        **{"device": None, "host": None, "storage": None},
        **{"total": 100, "untiered": 100},
    }
    assert document["rows"] == [
        {"tier": "untiered", "tokens": 100, "share": 0.25, "requests": None},
        {"tier": "computed", "tokens": 300, "share": 0.75, "requests": None},
    ]
    assert document["source"]["not_told"] == ["device", "host", "storage", "reason"]


def test_ranks_of_one_replica_say_the_same_and_count_once(tmp_path: Path) -> None:
    day = "2026-11-20 10:00:00"
    found = read(
        tmp_path,
        *(prefill(10, 1, prefix=f"{day} {rank}") for rank in ("DP0 TP0", "DP0 TP1", "DP1 TP1", "DP1 TP0")),
    )
    assert [(row.dp, row.line) for row in found.requests] == [(0, 1), (1, 4)]
    assert "2 batches of further ranks of the same replicas are left out: they say the same" in (
        found.source.notes
    )


@pytest.mark.parametrize(
    "prefix",
    ["2026-11-20 10:00:00", "2026-11-20 10:00:00.125 PP0 TP0", "2026-11-20 10:00:00 TP0 ATTN_CP0 EP0 PP0"],
)
def test_the_prefix_may_have_any_ranks_in_any_order(prefix: str, tmp_path: Path) -> None:
    assert [row.computed for row in read(tmp_path, prefill(300, 100, prefix=prefix)).requests] == [300]


def test_fields_are_read_by_name_and_unknown_ones_counted(tmp_path: Path) -> None:
    fields = "#cached-token: 7, swa token usage: 0.1, #moon: 3, #new-token: 5"
    line = f"[2026-11-20 10:00:00] Prefill batch [12], {fields}"
    found = read(tmp_path, line)
    assert [(row.computed, row.cached) for row in found.requests] == [(5, 7)]
    assert found.source.unknown_keys == {"#moon": 1}


def test_two_logs_on_one_line_are_two_batches(tmp_path: Path) -> None:
    found = read(tmp_path, prefill(1, 2) + prefill(3, 4))
    assert [(row.computed, row.cached) for row in found.requests] == [(1, 2), (3, 4)]


@pytest.mark.parametrize("count", ["-3", "", "9" * 40, "٣", "1.5"])
def test_a_batch_with_no_count_is_not_parsed(count: str, tmp_path: Path) -> None:
    wrong = prefill(300, 100).replace("#new-token: 300", f"#new-token: {count}")
    found = read(tmp_path, wrong, prefill(1, 1), "Decode batch, #running-req: 2")
    assert (len(found.requests), found.source.unparsed) == (1, (2,))


def test_a_log_without_a_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HitsError, match="no prefill batch"):
        read(tmp_path, "Prefill batch, #cached-token: many")
