"""SGLang's scheduler status lines: which requests a rank runs, and which it queues.

    [2026-03-01 12:00:00] {"event": "scheduler.status", "rank": 1, "running_rids": ["r3"], "queued_rids": []}

Written now and then by each rank (`SGLANG_LOG_SCHEDULER_STATUS_TARGET`), at moments of its own. It reads, and
judges nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec

from tracer.errors import HitsError
from tracer.importers.dossier import At, Dossier, Status
from tracer.importers.launcher_lines import LINE_BYTES_MAX, Reading, Text, holds, refused
from tracer.importers.sniff import File, is_too_deep, printable

FORMAT = "sglang_scheduler_status"
VERSION = 1
WORD = b"scheduler.status"
# Statuses kept of one file: the newest are those that matter, and a server writes them for days.
STATUSES_MAX = 20_000
REQUESTS_MAX = 100_000
RID_CHARS_MAX = 64


class Event(msgspec.Struct, gc=False):
    event: str
    rank: int | None = None
    running_rids: list[str] = []
    queued_rids: list[str] = []


_EVENT = msgspec.json.Decoder(Event)


def votes(head: bytes) -> int:
    return 2 * holds(head, (WORD,))


def read(file: File, index: int, into: Dossier) -> None:
    reading = Reading(file, index, into)
    found: list[Status] = []
    samples: Counter[int | None] = Counter()
    dropped = 0
    error: HitsError | OSError | None = None
    try:
        for text in reading.texts((WORD,), LINE_BYTES_MAX):
            if (event := _event(text)) is None:
                continue
            rank = event.rank if event.rank is not None and 0 <= event.rank < 1 << 20 else text.who.rank
            found.append(_status(text, index, event, rank, samples[rank]))
            samples[rank] += 1
            reading.taken.add(text.number)
            if len(found) >= 2 * STATUSES_MAX:
                del found[:STATUSES_MAX]
                dropped += STATUSES_MAX
    except (HitsError, OSError) as failed:
        error = failed
    into.statuses += found
    reading.settle(FORMAT, VERSION)
    if dropped:
        into.files[index].notes.append(f"the oldest {dropped:,} statuses are not kept")
    if error is not None:
        refused(into, index, error)


def _status(text: Text, index: int, event: Event, rank: int | None, sample: int) -> Status:
    # Who says another rank in front of the line than in it has mixed up two.
    is_mixed = text.who.rank is not None and text.who.rank != rank
    who = replace(text.who, rank=None if is_mixed else rank)
    return Status(who, sample, _rids(event.running_rids), _rids(event.queued_rids), At(index, text.number))


def _rids(found: list[str]) -> tuple[str, ...]:
    return tuple(printable(rid[:RID_CHARS_MAX]) for rid in found[:REQUESTS_MAX])


def _event(text: Text) -> Event | None:
    at = text.text.find("{")
    end = text.text.rfind("}")
    raw = text.text[at : end + 1].encode("utf-8", "surrogatepass")
    if at < 0 or is_too_deep(raw):
        return None
    try:
        event = _EVENT.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return event if event.event == WORD.decode() else None
