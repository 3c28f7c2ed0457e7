from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tracer.importers.canaries import metrics, write
from tracer.errors import HitsError
from tracer.importers import request_metrics
from tracer.importers.sniff import Imported, files_at


def read(folder: Path, *rows: Any) -> Imported:
    return request_metrics.read(files_at(write(folder / "sglang-request-metrics-20261120_10.log", *rows)))


def test_tiers_are_those_of_the_details(tmp_path: Path) -> None:
    details = {"device": 64, "host": 32, "storage": 16, "storage_backend": "mooncake"}
    (row,) = read(tmp_path, metrics("r1", 200, 112, cached_tokens_details=details)).requests
    assert (row.rid, row.input_tokens, row.device, row.host, row.storage, row.untiered, row.uncached) == (
        "r1",
        200,
        64,
        32,
        16,
        0,
        88,
    )


def test_cached_tokens_without_details_have_no_tier(tmp_path: Path) -> None:
    (row,) = read(tmp_path, metrics("r1", 200, 112)).requests
    assert (row.device, row.untiered, row.cached) == (0, 112, 112)


def test_what_a_line_does_not_say_is_told(tmp_path: Path) -> None:
    more = {"device": 90, "host": 30}
    found = read(tmp_path, metrics("r1", 200, None), metrics("r2", 200, 50, cached_tokens_details=more))
    assert found.source.notes == (
        "1 without cached_tokens: taken as not cached",
        "1 whose tiers have more than their cached_tokens: the tiers were taken",
    )


def test_a_line_that_is_none_is_counted_and_the_others_keep_their_numbers(tmp_path: Path) -> None:
    wrong = ['{"prompt_tokens": -1, "cached_tokens": 0}', '{"prompt_tokens": 1e99}', "{", "", "[" * 100_000]
    found = read(tmp_path, metrics("r1", 10), *wrong, metrics("r2", 10))
    assert (found.source.lines, found.source.unparsed) == ((7,), (4,))
    assert [(row.rid, row.line) for row in found.requests] == [("r1", 1), ("r2", 7)]


def test_keys_of_a_newer_server_are_counted_and_cost_no_line(tmp_path: Path) -> None:
    rows = [
        metrics("r1", 10),
        metrics("r2", 10, moon_phase=3),
        metrics("r3", 10, moon_phase=4, tide={"a": 1}),
    ]
    found = read(tmp_path, *rows)
    assert [row.rid for row in found.requests] == ["r1", "r2", "r3"]
    assert (found.source.unknown_keys, found.source.unparsed) == ({"moon_phase": 2, "tide": 1}, (0,))


def test_hundreds_of_keys_nobody_knows_are_read_past(tmp_path: Path) -> None:
    strange = {f"key{at}": at for at in range(500)}
    found = read(tmp_path, metrics("r1", 10, **strange), metrics("r2", 10))
    assert [row.rid for row in found.requests] == ["r1", "r2"]
    assert len(found.source.unknown_keys) == 100


def test_a_request_whose_client_went_away_is_aborted(tmp_path: Path) -> None:
    aborted = metrics("r1", 10, finish_reason={"type": "abort", "message": "client"})
    (row,) = read(tmp_path, aborted).requests
    assert row.is_aborted


def test_requests_can_be_grouped_by_time_when_all_have_one(tmp_path: Path) -> None:
    timed = metrics("r1", 10, request_received_ts=1_790_000_000.25)
    assert read(tmp_path / "a", timed).groupings == ("request", "tier", "time")
    assert read(tmp_path / "a", timed).requests[0].time_ns == 1_790_000_000_250_000_000
    assert read(tmp_path / "b", timed, metrics("r2", 10)).groupings == ("request", "tier")


def test_a_file_without_a_request_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HitsError, match="no line with prompt_tokens"):
        read(tmp_path, '{"prompt_tokens": "many", "cached_tokens": 0}')
