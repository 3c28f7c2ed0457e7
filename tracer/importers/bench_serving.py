"""SGLang's bench_serving output: one object a run, with `Infinity` in it, which is no JSON.

With `--output-details` there are arrays with an element for each request; with `--cache-report` alone there
are totals of a run. Answers (`generated_texts`) and `server_info`, which may hold keys, are thrown away as
soon as they are decoded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tracer.errors import HitsError
from tracer.importers.sniff import COUNT_MAX, File, Imported, Tally, is_too_deep
from tracer.served import TIERS, RequestHits, foreign_row

FORMAT = "sglang_bench_serving"
DETAILS = ("input_lens", "cached_tokens")
REPORT = "cache_report"
SECRET = ("generated_texts", "server_info")
TIMES = ("e2e_latency", "ttft", "tpot", "itl")
KNOWN = {
    *("tag", "backend", "dataset_name", "request_rate", "max_concurrency", "sharegpt_output_len"),
    *("random_input_len", "random_output_len", "random_range_ratio", "server_info", "duration", "completed"),
    *("total_input_tokens", "total_input_text_tokens", "total_input_vision_tokens", "total_output_tokens"),
    *("total_output_tokens_retokenized", "request_throughput", "input_throughput", "output_throughput"),
    *("total_throughput", "concurrency", "accept_length", "max_output_tokens_per_s"),
    *("max_concurrent_requests", "cache_report", "input_lens", "output_lens", "ttfts", "itls"),
    *("generated_texts", "errors", "cached_tokens", "cached_tokens_details"),
    *(f"{part}_{what}_ms" for what in TIMES for part in ("mean", "median", "std", "p90", "p95", "p99")),
}
MINE = re.compile(rb'"(backend|dataset_name|total_input_tokens|request_throughput)"\s*:')


@dataclass(slots=True)
class _Runs:
    """Runs read so far, those with a row for each request apart from those with totals."""

    requests: list[RequestHits] = field(default_factory=list)
    totals: list[RequestHits] = field(default_factory=list)
    silent: int = 0
    failed: int = 0
    contradicted: int = 0

    def run(self, run: Mapping[str, Any], file: int, line: int) -> None:
        rows = list(_rows(run, file, line))
        total = _total(run.get(REPORT), file, line)
        self.requests += rows
        if not rows and total is not None:
            self.totals.append(total)
        self.silent += not rows and total is None
        if rows and total is not None:
            sums = (sum(row.input_tokens for row in rows), sum(row.cached for row in rows))
            self.contradicted += sums != (total.input_tokens, total.cached)
        errors = run.get("errors")
        if rows and isinstance(errors, list):
            self.failed += sum(bool(error) for error in errors)

    def notes(self) -> list[str]:
        notes = []
        if self.silent:
            runs = "1 run has" if self.silent == 1 else f"{self.silent:,} runs have"
            notes.append(f"{runs} no cache report (bench_serving --cache-report): not counted")
        if self.failed:
            notes.append(f"{self.failed:,} requests failed; whatever they had is counted")
        if self.requests and self.totals:
            notes.append(
                f"{len(self.totals):,} runs with totals alone are left out: --output-details is missing"
            )
        if self.contradicted:
            notes.append(f"{self.contradicted:,} runs whose report differs from the sum of their requests")
        return notes


def is_mine(line: bytes) -> bool:
    # The keys that tell it come first; a run with details has megabytes behind them.
    return line.lstrip()[:1] == b"{" and len(set(MINE.findall(line[:HEAD_BYTES]))) >= NAMES_MIN


HEAD_BYTES = 1 << 16
NAMES_MIN = 2


def read(files: Sequence[File]) -> Imported:
    tally = Tally()
    runs = _Runs()
    for file in files:
        index = tally.begin(file)
        for number, line in file.lines():
            tally.lines[index] = number
            run = _object(line)
            if run is None:
                tally.unparsed[index] += 1
                continue
            try:
                runs.run(run, index, number)
            except ValueError:
                tally.unparsed[index] += 1
                continue
            tally.unknown(sorted(set(run) - KNOWN))
    if not (runs.requests or runs.totals):
        raise HitsError(
            "no run with a cache report in the benchmark's output",
            where=", ".join(tally.files),
            hint="bench_serving --cache-report, best with --output-details",
        )
    if runs.requests:
        return Imported(tally.source(FORMAT, notes=runs.notes()), tuple(runs.requests))
    source = tally.source(FORMAT, notes=[*runs.notes(), TOTALS_ONLY], unit="run")
    return Imported(source, tuple(runs.totals), ("tier",))


TOTALS_ONLY = "totals of runs: bench_serving --output-details has each request"


def _object(line: bytes) -> dict[str, Any] | None:
    """One run, without what nobody may see; None where it is none."""
    if is_too_deep(line):
        return None
    try:
        found = json.loads(line, parse_int=_integer)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not MINE.search(line[:HEAD_BYTES]):
        return None
    return {key: value for key, value in found.items() if key not in SECRET}


def _integer(text: str) -> int:
    # Python refuses to read thousands of digits at once; nothing honest counts that far.
    return int(text) if len(text) <= 20 else -1


def _rows(run: Mapping[str, Any], file: int, line: int) -> Iterator[RequestHits]:
    """The requests of a run with details and a cache report."""
    lens, cached = (run.get(name) for name in DETAILS)
    if not (isinstance(lens, list) and isinstance(cached, list) and len(lens) == len(cached)):
        return
    details = run.get("cached_tokens_details")
    if not isinstance(details, list) or len(details) != len(lens):
        details = [None] * len(lens)
    for at, (tokens, from_cache, told) in enumerate(zip(lens, cached, details, strict=True)):
        yield foreign_row(
            f"{line}.{at}",
            _count(tokens),
            tiers=_tiers(told if isinstance(told, dict) else {}, ""),
            cached=_count(from_cache),
            file=file,
            line=line,
        )


def _total(report: Any, file: int, line: int) -> RequestHits | None:
    """A run's cache report as one row; a tier that gave nothing is null there."""
    if not isinstance(report, dict) or "total_prompt_tokens" not in report:
        return None
    return foreign_row(
        f"run {line}",
        _count(report["total_prompt_tokens"]),
        tiers=_tiers(report, "_cached_tokens"),
        cached=_count(report.get("total_cached_tokens")),
        file=file,
        line=line,
    )


def _tiers(told: Mapping[str, Any], suffix: str) -> tuple[int, int, int]:
    device, host, storage = (_count(told.get(tier + suffix)) for tier in TIERS)
    return device, host, storage


def _count(value: Any) -> int:
    """A count; none where it is null, as what did not occur is.

    Raises:
        ValueError: it is something else.
    """
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value <= COUNT_MAX:
        raise ValueError("not a count")
    return value
