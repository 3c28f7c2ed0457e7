from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tracer.importers.canaries import DETAILS, REPORT, benchmark, write
from tracer.errors import HitsError
from tracer.importers import bench_serving
from tracer.importers.foreign import foreign_hits
from tracer.importers.sniff import Imported, files_at


def read(folder: Path, *rows: Any) -> Imported:
    return bench_serving.read(files_at(write(folder / "sglang_1120_2.jsonl", *rows)))


def test_a_run_with_details_has_a_row_for_each_request(tmp_path: Path) -> None:
    found = read(tmp_path, benchmark(cache_report=REPORT, **DETAILS))
    rows = [(row.rid, row.input_tokens, row.device, row.host, row.storage) for row in found.requests]
    assert rows == [("1.0", 100, 0, 0, 0), ("1.1", 200, 100, 20, 0)]
    assert (found.source.notes, found.source.unparsed) == ((), (0,))


def test_a_run_without_details_has_totals(tmp_path: Path) -> None:
    document = foreign_hits(read(tmp_path, benchmark(cache_report=REPORT))).to_json()
    assert (document["by"], document["requests"], document["input_tokens"]) == ("tier", None, 300)
    assert [(row["tier"], row["tokens"]) for row in document["rows"]] == [
        *(("device", 100), ("host", 20), ("storage", 0), ("uncached", 180))
    ]


def test_a_run_without_a_cache_report_is_told_and_not_counted(tmp_path: Path) -> None:
    found = read(tmp_path, benchmark(), benchmark(cache_report=REPORT))
    assert found.source.notes[0] == ("1 run has no cache report (bench_serving --cache-report): not counted")
    with pytest.raises(HitsError, match="no run with a cache report"):
        read(tmp_path, benchmark())


def test_a_report_that_is_not_the_sum_of_its_requests_is_told(tmp_path: Path) -> None:
    found = read(tmp_path, benchmark(cache_report={**REPORT, "total_cached_tokens": 121}, **DETAILS))
    assert found.source.notes == ("1 runs whose report differs from the sum of their requests",)


def test_failed_requests_are_told(tmp_path: Path) -> None:
    found = read(tmp_path, benchmark(**{**DETAILS, "errors": ["", "timed out"]}))
    assert found.source.notes == ("1 requests failed; whatever they had is counted",)


@pytest.mark.parametrize(
    "change",
    [{"input_lens": [100, -1]}, {"input_lens": [100, 1 << 60]}, {"cached_tokens": ["many", 1]}],
)
def test_a_run_with_counts_that_are_none_is_not_parsed(change: dict[str, Any], tmp_path: Path) -> None:
    found = read(tmp_path, benchmark(**{**DETAILS, **change}), benchmark(**DETAILS))
    assert (len(found.requests), found.source.unparsed) == (2, (1,))


def test_numbers_that_json_does_not_have_are_read(tmp_path: Path) -> None:
    text = benchmark(cache_report=REPORT, mean_itl_ms=float("nan"), p99_itl_ms=float("-inf"))
    assert "Infinity" in text
    assert "NaN" in text
    with pytest.raises(ValueError, match="Infinity"):
        json.loads(text, parse_constant=_refuse)
    assert len(read(tmp_path, text).requests) == 1


def _refuse(name: str) -> None:
    raise ValueError(name)


def test_a_number_of_ten_thousand_digits_stops_nothing(tmp_path: Path) -> None:
    found = read(tmp_path, benchmark(cache_report=REPORT).replace("10.5", "9" * 10_000))
    assert len(found.requests) == 1
