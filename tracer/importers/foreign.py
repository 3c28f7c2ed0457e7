"""Any file or folder of somebody else's as hits: who wrote it, what it tells, and how it is grouped."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from tracer.errors import HitsError
from tracer.hits import By, Hits, Rows, grouped_by
from tracer.importers import (
    bench_serving,
    block_traces,
    kv_events,
    prefill_batches,
    request_log,
    request_metrics,
    tair_events,
)
from tracer.importers.sniff import File, Format, Imported, files_at, sniff
from tracer.places import SEGMENT
from tracer.prefixes import Pages, chained, prefix_rows
from tracer.served import RequestHits

# In the order of how much they tell of a request: where a file has two, the first is taken.
FORMATS: tuple[Format, ...] = tuple(
    cast(Format, module)
    for module in (
        request_log,
        request_metrics,
        bench_serving,
        tair_events,
        kv_events,
        block_traces,
        prefill_batches,
    )
)
NAMED_MAX = 3
HEAD_BYTES = 4096
READABLE = (
    "a run's logs, an export of them, SGLang request metrics, request log, scheduler log or bench_serving "
    "output, recorded KV events, Tair KVCache manager events"
)


def holds_own_logs(place: Path) -> bool:
    """Whether these are logs of ours, whose reader says best what is wrong with them."""
    try:
        if place.is_dir():
            with os.scandir(place) as entries:
                return any(SEGMENT.fullmatch(entry.name) for entry in entries)
        if SEGMENT.fullmatch(place.name):
            return True
        with place.open("rb") as file:
            return b'"format":"hicache.' in file.read(HEAD_BYTES).replace(b" ", b"")
    except OSError:
        return True


def unknown(place: Path) -> HitsError:
    """What to say of a file that nobody knows, or of a folder with such files alone."""
    told = f"{place} has no file" if place.is_dir() else f"{place} is nothing"
    return HitsError(f"{told} that hits can read", expected=READABLE)


def find_foreign(place: Path) -> tuple[Format, tuple[File, ...], tuple[str, ...]] | None:
    """Format and files at a place, and a note where some were not recognised; None where none was.

    Raises:
        HitsError: a file can't be read, or files of several formats lie together.
    """
    by_format: dict[str, list[File]] = {}
    found: dict[str, Format] = {}
    strangers = []
    for file in files_at(place):
        known = sniff(file, FORMATS)
        if known is None:
            strangers.append(file.name)
            continue
        found[known.FORMAT] = known
        by_format.setdefault(known.FORMAT, []).append(file)
    if not found:
        return None
    if len(found) > 1:
        raise HitsError(
            f"{place} holds files of {len(found)} formats",
            where="; ".join(f"{files[0].name}: {name}" for name, files in sorted(by_format.items())),
            hint="one of the files, or a folder for each format",
        )
    ((name, chosen),) = found.items()
    notes = []
    if strangers:
        names = ", ".join(strangers[:NAMED_MAX])
        more = f" and {len(strangers) - NAMED_MAX:,} more" if len(strangers) > NAMED_MAX else ""
        notes.append(f"not recognised, and left out: {names}{more}")
    return chosen, tuple(by_format[name]), tuple(notes)


def foreign_hits(imported: Imported, *, by: str | None = None, notes: Sequence[str] = ()) -> Hits:
    """The same numbers as `tracer.hits.hits`, as far as the source tells them.

    Args:
        by: None for what the source is best grouped by.
        notes: what limits the numbers, beside what the source says.
    Raises:
        HitsError: the source can't be grouped by it.
    """
    chosen = by or imported.groupings[0]
    if chosen not in imported.groupings:
        raise HitsError(
            f"{imported.source.format} can't be grouped by {chosen}: it does not tell that",
            expected=", ".join(imported.groupings),
        )
    return Hits(cast(By, chosen), imported.requests, _rows(imported, chosen), tuple(notes), imported.source)


def _rows(imported: Imported, by: str) -> Callable[[Sequence[RequestHits]], Rows]:
    if by in imported.tables:
        table = imported.tables[by]
        return lambda _requests: table
    if by != "prefix":
        return grouped_by(by, imported.source)
    pages = Pages()
    tips = {
        (request.file, request.line): chained(pages, keys)
        for request, keys in zip(imported.requests, imported.paths, strict=True)
    }

    def rows(requests: Sequence[RequestHits]) -> Rows:
        with_tips = [(request, tips[request.file, request.line]) for request in requests]
        return tuple(prefix_rows(pages, 1, with_tips, source=imported.source))

    return rows
