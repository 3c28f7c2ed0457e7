"""What SGLang's schedulers log: batches, the host cache's lines, their watchdogs.

    prefill_batches     all of one writer's, as columns              records new_seqs new_tokens cached_tokens
    decode_batch        one writer's newest of `lines`               what it says
    scheduler_watchdog  a scheduler with a batch made no step        timeout_s is_soft
    pool                what a pool holds, by name                   pool and its counts
    leak_check          a pool's counts do not add up                available evictable protected total
    hicache_*           the host cache's own lines, by their words   request and their values
    storage_write_failed, storage_page_missing, load_back_failed, decode_transfer_failed, prefetch_revoked
    process_died        the server's report of a process             exit_code signal

Only the rank that logs statistics writes batches: that others do not means nothing. A watchdog speaks only
on a rank that has a batch. Values are counts, short words and ids of requests; text of any other kind is not
kept. It reads, and judges nothing.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tracer.errors import HitsError
from tracer.importers.dossier import At, Dossier, Line, Who
from tracer.importers.launcher_lines import Reading, Text, count, holds, refused
from tracer.importers.sniff import File, printable

FORMAT = "sglang_log"
VERSION = 1
BATCHES_MAX = 1_000_000
WRITERS_MAX = 4_096
VALUES_MAX = 40
VALUE_CHARS_MAX = 64
EVENTS_MAX = 200

BATCH = re.compile(r"(?P<kind>Prefill|Decode) batch\.?(?: \[\d{1,15}\])?[,.] ?(?P<pairs>.*)$", re.DOTALL)
PREFILL = re.compile(r"#new-seq: (\d{1,15}), #new-token: (\d{1,15}), #cached-token: (\d{1,15}), ")
WATCHDOG = re.compile(
    r"(?:(?P<name>\w{1,40}) w|W)atchdog timeout \((?:self\.)?watchdog_timeout=(?P<timeout>[\d.]{1,12})"
    r"(?:, self\.soft=(?P<soft>True|False))?"
)
POOL = re.compile(r"^\[(?P<pool>[\w-]{1,40})\] (?P<pairs>(?:\w+=-?\d{1,18}(?:, |$))+)")
LEAK = re.compile(r"memory leak detected!(?P<pairs>.{0,400})")
HICACHE = re.compile(r"HiCache (?P<words>[A-Za-z][A-Za-z_\- ]{1,60}?)(?= req=| for |:|\.|,|$| \(| \w+=| \d)")
FOR_REQUEST = re.compile(r"for request:? ([\w.:-]{1,64})")
VALUE = re.compile(r"\b(\w{1,40})=(-?\d+(?:\.\d+)?|[\w.:-]{1,64})(?=[\s,;:)\]}.]|$)")
PAGES_FAILED = re.compile(r"Write page to storage: (\d{1,12}) pages failed")
PAGE_MISSING = re.compile(r"Prefetch operation ([\w.-]{1,64}) failed to retrieve page")
REVOKED = re.compile(r"Revoking prefetch for request ([\w.:-]{1,64}).{0,80}?insufficient hits \((\d{1,12})\)")
CRASHED = re.compile(
    r"Subprocess (?P<name>[\w.-]{1,80}) \(pid=(?P<pid>\d{1,9})\) crashed with exit code (?P<code>-?\d{1,5})"
    r"|DataParallelController (?P<pid2>\d{1,9}) terminated with (?P<code2>-?\d{1,5})"
    r"|Rank (?P<rank>\d{1,7}) scheduler died during initialization \(exit code: (?P<code3>-?\d{1,5})\)"
)
REQUEST_KEYS = ("req", "rid", "request", "req_id")

Found = Iterator[tuple[str, dict[str, Any], Who | None]]


@dataclass(slots=True)
class Batches:
    """One writer's prefill batches, as columns, and its newest decode batch."""

    who: Who
    records: array[int] = field(default_factory=lambda: array("q"))
    new_seqs: array[int] = field(default_factory=lambda: array("q"))
    new_tokens: array[int] = field(default_factory=lambda: array("q"))
    cached_tokens: array[int] = field(default_factory=lambda: array("q"))
    decode_count: int = 0
    # Taken apart when it is known to be the newest.
    decode: tuple[Text, str] | None = None

    def add(self, text: Text, kind: str, pairs: str) -> None:
        if kind == "Decode":
            self.decode_count += 1
            self.decode = text, pairs
            return
        values = _prefill_counts(pairs, is_cut=text.is_cut)
        if values is not None and len(self.records) < BATCHES_MAX:
            columns = (self.new_seqs, self.new_tokens, self.cached_tokens)
            for column, value in zip(columns, values, strict=True):
                column.append(value)
            self.records.append(text.number)

    def lines(self, file: int) -> Iterator[Line]:
        if self.records:
            columns = {
                "lines": len(self.records),
                "records": self.records,
                "new_seqs": self.new_seqs,
                "new_tokens": self.new_tokens,
                "cached_tokens": self.cached_tokens,
            }
            yield Line(self.who, "prefill_batches", columns, At(file, self.records[0]))
        if self.decode is not None:
            text, pairs = self.decode
            fields = {"lines": self.decode_count, **pairs_of(pairs, is_cut=text.is_cut)}
            at = At(file, text.number)
            yield Line(self.who, "decode_batch", fields, at, text.time_ns, text.time_error_ns)


def _prefill_counts(pairs: str, *, is_cut: bool) -> tuple[int, int, int] | None:
    """New sequences, new tokens, cached tokens; None where one of them is not told."""
    if found := PREFILL.match(pairs):
        # In this order in every version so far, and ten times as fast.
        return int(found[1]), int(found[2]), int(found[3])
    told = pairs_of(pairs, is_cut=is_cut)
    values = tuple(told.get(name) for name in ("#new-seq", "#new-token", "#cached-token"))
    new_seqs, new_tokens, cached = (value if type(value) is int else None for value in values)
    if new_seqs is None or new_tokens is None or cached is None:
        return None
    return new_seqs, new_tokens, cached


def _words() -> dict[bytes, Callable[[Text], Found]]:
    return {
        b"atchdog timeout (": _watchdog,
        b" total=": _pool,
        b"memory leak detected!": _leak,
        b"HiCache ": _hicache,
        b"Write page to storage: ": _pages_failed,
        b"failed to retrieve page": _page_missing,
        b"Revoking prefetch": _revoked,
        b"Decode transfer failed for request": _transfer_failed,
        b"crashed with exit code": _crashed,
        b" terminated with ": _crashed,
        b"scheduler died during initialization": _crashed,
    }


BATCH_WORDS = (b"Prefill batch", b"Decode batch")


def votes(head: bytes) -> int:
    return holds(head, (*_words(), *BATCH_WORDS))


def read(file: File, index: int, into: Dossier) -> None:
    reading = Reading(file, index, into)
    batches: dict[tuple[object, ...], Batches] = {}
    error: HitsError | OSError | None = None
    try:
        _read(reading, batches)
    except (HitsError, OSError) as failed:
        error = failed
    for own in batches.values():
        into.lines += own.lines(index)
        reading.counted += len(own.records) + own.decode_count
    reading.settle(FORMAT, VERSION)
    if error is not None:
        refused(into, index, error)


def _read(reading: Reading, batches: dict[tuple[object, ...], Batches]) -> None:
    words = _words()
    events: set[str] = set()
    for text in reading.texts((*words, *BATCH_WORDS)):
        if (found := BATCH.search(text.text)) is not None:
            who = text.who
            key = (who.rank, who.pid, who.host, *sorted(who.places.items()))
            if key in batches or len(batches) < WRITERS_MAX:
                own = batches.setdefault(key, Batches(who))
                own.add(text, found["kind"], found["pairs"])
            continue
        readers = dict.fromkeys(one for word, one in words.items() if word.decode() in text.text)
        for reader in readers:
            for event, fields, writer in reader(text):
                if event in events or len(events) < EVENTS_MAX:
                    events.add(event)
                    reading.add(text, event, fields, writer)


def pairs_of(text: str, *, is_cut: bool = False) -> dict[str, Any]:
    """`#new-seq: 1, cuda graph: True, ..` by key, in whatever order; numbers as numbers.

    Where another log begins in the middle, the last value may lack its end: it is left out.
    """
    parts = text.split(", ")
    if is_cut:
        parts.pop()
    pairs: dict[str, Any] = {}
    for part in parts[:VALUES_MAX]:
        key, colon, value = part.partition(": ")
        if colon and len(key) <= VALUE_CHARS_MAX:
            pairs[printable(key.strip())] = _value(value.strip())
    return pairs


def _value(text: str) -> int | float | str:
    number = count(text)
    if number is not None:
        return number
    try:
        return float(text) if len(text) < 24 and text.isascii() else printable(text[:VALUE_CHARS_MAX])
    except ValueError:
        return printable(text[:VALUE_CHARS_MAX])


def _values(text: str) -> dict[str, Any]:
    """`key=value` with counts and short words; the request under one name."""
    values: dict[str, Any] = {}
    for key, value in VALUE.findall(text):
        if len(values) >= VALUES_MAX:
            break
        name = "request" if key in REQUEST_KEYS else key
        values.setdefault(name, printable(value.rstrip(".:")) if name == "request" else _value(value))
    return values


def _counts(text: str) -> dict[str, int]:
    return {key: value for key, value in _values(text).items() if type(value) is int}


def _watchdog(text: Text) -> Found:
    if found := text.match(WATCHDOG):
        fields = {
            "name": found["name"] or "Scheduler",
            "timeout_s": _value(found["timeout"].rstrip(".")),
            "is_soft": found["soft"] == "True",
        }
        yield "scheduler_watchdog", fields, None


def _pool(text: Text) -> Found:
    if found := POOL.match(text.text):
        yield "pool", {"pool": found["pool"], **_counts(found["pairs"])}, None


def _leak(text: Text) -> Found:
    if found := text.match(LEAK):
        yield "leak_check", dict(_counts(found["pairs"])), None


def _hicache(text: Text) -> Found:
    found = HICACHE.search(text.text)
    if found is None:
        return
    words = found["words"].strip().removesuffix(" for")
    event = "hicache_" + re.sub(r"\W+", "_", words.lower())
    rest = text.text[found.end() :]
    fields = _values(rest)
    if request := FOR_REQUEST.search(rest):
        fields.setdefault("request", printable(request[1].rstrip(".:")))
    # The promise that a restore did not keep is a finding of its own.
    is_load = event == "hicache_load_back_failed"
    yield "load_back_failed" if is_load else event, fields, None


def _pages_failed(text: Text) -> Found:
    if found := text.match(PAGES_FAILED):
        yield "storage_write_failed", {"pages": count(found[1])}, None


def _page_missing(text: Text) -> Found:
    if found := text.match(PAGE_MISSING):
        yield "storage_page_missing", {"operation": found[1]}, None


def _revoked(text: Text) -> Found:
    if found := text.match(REVOKED):
        yield "prefetch_revoked", {"request": found[1], "hits": count(found[2])}, None


def _transfer_failed(text: Text) -> Found:
    told = {key: value for key, value in _counts(text.text).items() if key == "rank"}
    yield "decode_transfer_failed", {"peer_rank": told.get("rank")}, None


def _crashed(text: Text) -> Found:
    found = text.match(CRASHED)
    if found is None:
        return
    code = count(found["code"] or found["code2"] or found["code3"])
    if not code:
        return
    fields = {"exit_code": code, "signal": -code if code < 0 else None, "name": found["name"] or ""}
    yield "process_died", fields, Who(count(found["rank"]), count(found["pid"] or found["pid2"]))
