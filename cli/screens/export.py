"""What an export says of itself: a line while it runs, a line when it has ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cli.commands.export import Exported
    from tracer.otel_live import LiveCount

# What one of an export's events is called in its format.
EVENTS = {"perfetto": "event", "otlp": "span", "parquet": "row", "fr-json": "entry", "prometheus": "sample"}
UNITS = ("bytes", "kB", "MB", "GB")


def result(found: Exported) -> str:
    """What was written, in one line."""
    event = EVENTS[found.format]
    events = event.replace("entry", "entrie") + "s" if found.events != 1 else event
    records = "1 record" if found.records == 1 else f"{found.records:,} records"
    place = "stdout" if found.out == "-" else found.out
    return f"exported {found.events:,} {events} of {records} to {place} ({size(found.size_bytes)})"


def sent(endpoint: str, found: LiveCount) -> str:
    """What a collector took, in one line; an error where it did not take all."""
    if not found.dropped:
        return f"sent {found.sent:,} spans to {endpoint}"
    total = found.sent + found.dropped
    return "\n".join(
        [
            f"error: {found.dropped:,} of {total:,} spans did not reach {endpoint}",
            "  try       another --endpoint, a longer --timeout, or --out FILE",
        ]
    )


def size(count: int) -> str:
    """Bytes as people say them."""
    number, unit = float(count), 0
    while number >= 1000 and unit < len(UNITS) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.1f} {UNITS[unit]}" if unit else f"{count} bytes"


@contextmanager
def reading(what: str, *, quiet: bool = False) -> Iterator[Callable[[int], None] | None]:
    """A count of records on stderr while they are read; None where nobody would see it move."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from cli.theme import console

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f} records"))
    with Progress(*columns, TimeElapsedColumn(), console=console(sys.stderr), transient=True) as bar:
        # How many there are is known when the last one has been read.
        task = bar.add_task(what, total=None)
        yield lambda records: bar.update(task, completed=records)
