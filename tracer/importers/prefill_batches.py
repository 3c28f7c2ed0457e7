"""Prefill lines of SGLang's scheduler log: what each batch computed, and what the cache gave it. Totals only.

A batch says nothing of requests: a prompt in chunks is in several of them. Every rank of a replica that
logs says the same, so one rank's lines count for each dp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from tracer.errors import HitsError
from tracer.importers.sniff import COLOURS, COUNT_MAX, File, Imported, Tally
from tracer.served import foreign_row

FORMAT = "sglang_prefill_batches"
# Two logs may be on one physical line; a batch's text ends where the next prefix begins.
BATCH = re.compile(
    rb"(?:\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?)(?P<rank>(?: [A-Z_]+\d+)*)\] )?"
    rb"Prefill batch(?: \[\d+\])?, ?(?P<text>.*?)(?=\[\d{4}-\d\d-\d\d |$)"
)
NEW, CACHED = "#new-token", "#cached-token"
KNOWN = re.compile(
    r"#(new-seq|new-token|cached-token|running-req|queue-req|pending-token|replay-token|bootstrap-req"
    r"|inflight-req|optimistic-req)|waiting-image-req|(full |swa )?token usage|mamba usage"
    r"|(cpu|npu|musa|cuda) graph|input throughput \(token/s\)|est\. prefill TFLOPS/s \(per GPU\)"
)
DIMENSION = re.compile(r"([A-Z_]+?)(\d+)$")


class Batch(NamedTuple):
    """One prefill line.

    Attributes:
        dp, rank: its replica, and the other dimensions of the rank that wrote it.
        time_ns: to the second, unless the server logs milliseconds; the server's zone is not in the log.
    """

    file: int
    line: int
    dp: int
    rank: tuple[tuple[str, int], ...]
    time_ns: int
    new_tokens: int
    cached_tokens: int


def is_mine(line: bytes) -> bool:
    return b"Prefill batch" in line and CACHED.encode() in line


def read(files: Sequence[File]) -> Imported:
    tally = Tally()
    batches: list[Batch] = []
    for file in files:
        index = tally.begin(file)
        for number, line in file.lines():
            tally.lines[index] = number
            found = list(_batches(line, index, number, tally)) if is_mine(line) else []
            batches += found
            tally.unparsed[index] += not found
    if not batches:
        raise HitsError("no prefill batch with its tokens in the log", where=", ".join(tally.files))
    chosen, notes = _one_rank_each(batches)
    rows = tuple(
        foreign_row(
            f"batch {at}",
            batch.new_tokens + batch.cached_tokens,
            cached=batch.cached_tokens,
            computed=batch.new_tokens,
            time_ns=batch.time_ns,
            dp=batch.dp,
            file=batch.file,
            line=batch.line,
        )
        for at, batch in enumerate(chosen, 1)
    )
    source = tally.source(FORMAT, notes=notes, unit="batch", tiers_are_told=False, computed_is_told=True)
    has_times = all(row.time_ns for row in rows)
    return Imported(source, rows, ("tier", *(["time"] if has_times else [])))


def _one_rank_each(batches: Sequence[Batch]) -> tuple[list[Batch], list[str]]:
    """The lines of one rank for each replica, and what was left out."""
    first: dict[int, tuple[tuple[str, int], ...]] = {}
    for batch in batches:
        first[batch.dp] = min(first.get(batch.dp, batch.rank), batch.rank)
    chosen = [batch for batch in batches if batch.rank == first[batch.dp]]
    notes = ["totals of prefill batches: requests, tiers and reasons are not in this log"]
    if any(batch.time_ns for batch in chosen):
        notes.append("times are the server's wall clock, whose zone is not in the log")
    if left := len(batches) - len(chosen):
        notes.append(
            f"{left:,} batches of further ranks of the same replicas are left out: they say the same"
        )
    if any(not batch.time_ns for batch in chosen):
        notes.append("some batches have no time")
    return chosen, notes


def _batches(line: bytes, file: int, number: int, tally: Tally) -> Iterator[Batch]:
    for found in BATCH.finditer(COLOURS.sub(b"", line)):
        fields = {}
        for part in found["text"].decode("utf-8", "replace").split(", "):
            key, colon, value = part.partition(": ")
            if colon:
                fields[key.strip()] = value.strip()
        counts = [_count(fields.get(name, "")) for name in (NEW, CACHED)]
        if None in counts:
            continue
        tally.unknown(sorted(key for key in fields if not KNOWN.fullmatch(key)))
        dp, rank = _rank((found["rank"] or b"").decode())
        new, cached = (count or 0 for count in counts)
        yield Batch(file, number, dp, rank, _nanoseconds(found["time"]), new, cached)


def _count(text: str) -> int | None:
    # Ten digits and more of other scripts are digits too, for `int`.
    if not (text.isascii() and text.isdecimal() and len(text) <= 16):
        return None
    number = int(text)
    return number if number <= COUNT_MAX else None


def _rank(text: str) -> tuple[int, tuple[tuple[str, int], ...]]:
    """` DP1 TP0` as its dp and the rest, in the order of their names."""
    found = [DIMENSION.fullmatch(part) for part in text.split()]
    places = {match[1]: int(match[2][:9]) for match in found if match}
    dp = places.pop("DP", 0)
    return dp, tuple(sorted(places.items()))


def _nanoseconds(text: bytes | None) -> int:
    if not text:
        return 0
    try:
        moment = datetime.fromisoformat(text.decode()).replace(tzinfo=UTC)
        return round(moment.timestamp() * 1000) * 1_000_000
    except ValueError:
        return 0
