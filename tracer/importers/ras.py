"""What NCCL's own monitor says (`ncclras -f json`): polls of all communicators, and events.

    ncclras -f json; sleep 15; ncclras -f json      several documents in one file, in the order of the polls

A poll has, for each communicator, how often each rank has called each collective, and ranks that do not
answer. An event becomes a line `ras_event` with group, event, host and pid. The monitor's own clock puts its
polls in order, and orders nothing else. It reads, and judges nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from tracer.errors import HitsError
from tracer.importers.dossier import At, Dossier, Line, Poll, Who
from tracer.importers.launcher_lines import nanoseconds
from tracer.importers.sniff import COUNT_MAX, NESTING_MAX, File, printable

FORMAT = "nccl_ras"
VERSION = 1
DOCUMENT_BYTES_MAX = 64 << 20
POLLS_MAX = 100_000
RANK_MAX = 1 << 20
NAME_CHARS_MAX = 200
OUTSIDE, INSIDE = re.compile(rb'[{}\[\]"]'), re.compile(rb'["\\]')
WORDS = (b'"communicators"', b'"communicators_count"', b'"collective_counts"', b'"missing_ranks"')
EVENT = b'"event"'
EVENT_WORDS = (b'"peer"', b'"cuda_devs"', b'"nvml_devs"')


class Status(msgspec.Struct, gc=False):
    """Of a rank that answers, or of one that does not; each has its own keys."""

    init_state: int | str | None = None
    async_error: int | str | bool | None = None
    finalize_called: bool | int | None = None
    destroy_flag: bool | int | None = None
    abort_flag: bool | int | None = None
    unresponsive: bool | int | None = None
    considered_dead: bool | int | None = None


class Rank(msgspec.Struct, gc=False):
    rank: int
    host: str = ""
    pid: int | None = None
    status: Status | None = None
    collective_counts: dict[str, int] = {}


class Communicator(msgspec.Struct, gc=False):
    hash: str | int = ""
    secondary_hash: str | int = ""
    size: int = 0
    ranks: list[Rank] = []
    missing_ranks: list[Rank] = []


class Document(msgspec.Struct, gc=False):
    """A poll, or an event: whichever keys are there."""

    communicators: list[Communicator] | None = None
    timestamp: str | float | None = None
    event: str | None = None
    group: str | int | None = None
    peer: str | int | None = None
    host: str | None = None
    addr: str | None = None
    pid: int | None = None


_DOCUMENT = msgspec.json.Decoder(Document)


def votes(head: bytes) -> int:
    if not head.lstrip().startswith((b"{", b"[")):
        return 0
    told = sum(word in head for word in WORDS)
    if told >= 2:
        return 2 * told
    return 2 if EVENT in head and all(word in head for word in EVENT_WORDS) else 0


def read(file: File, index: int, into: Dossier) -> None:
    own = into.files[index]
    samples: dict[str, int] = {}
    try:
        for number, raw in enumerate(documents(file)):
            own.records += 1
            document = _decoded(raw)
            if document is None or not _take(document, At(index, number), into, samples):
                own.unparsed += 1
            else:
                own.format, own.version = FORMAT, VERSION
            if number >= POLLS_MAX:
                own.notes.append(f"more than {POLLS_MAX:,} documents: the rest is not read")
                break
    except (HitsError, OSError) as error:
        said = error.what if isinstance(error, HitsError) else f"{own.name} can't be read: {error.strerror}"
        if own.format is None:
            own.refused = said
        else:
            own.notes.append(f"read to document {own.records:,} only: {said}")
        return
    if own.format is None:
        own.refused = (
            f"{own.name}: none of its {own.records:,} documents is a poll or an event of NCCL's monitor"
        )


def documents(file: File) -> Iterator[bytes]:
    """JSON objects one behind the other, on one line or on many; what is between them is left out.

    Raises:
        HitsError: one is deeper or larger than anything honest, or the last one has no end.
    """
    buffer = b""
    start = at = depth = 0
    is_string = False
    for chunk in file.chunks():
        # What is done with goes once a chunk, not once a document: there may be thousands in one.
        buffer = buffer[start:] + chunk
        start, at = 0, at - start
        while found := (INSIDE if is_string else OUTSIDE).search(buffer, at):
            at = found.end()
            mark = found[0]
            if mark == b"\\":
                # What it escapes may come with the next chunk.
                if at == len(buffer):
                    at -= 1
                    break
                at += 1
            elif mark == b'"':
                # Outside of an object a quote is somebody's prose.
                is_string = not is_string and depth > 0
            elif depth or mark == b"{":
                start = start if depth else at - 1
                depth += 1 if mark in b"{[" else -1
                if not depth:
                    yield buffer[start:at]
                    start = at
            if depth > NESTING_MAX:
                raise HitsError(f"{file.name}: nested deeper than {NESTING_MAX}")
        else:
            at = len(buffer)
        if not depth:
            start = at
        if len(buffer) - start > DOCUMENT_BYTES_MAX:
            raise HitsError(f"{file.name}: a document of more than {DOCUMENT_BYTES_MAX >> 20} MiB")
    if depth:
        raise HitsError(f"{file.name}: its last document has no end")


def _decoded(raw: bytes) -> Document | None:
    try:
        return _DOCUMENT.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _take(document: Document, at: At, into: Dossier, samples: dict[str, int]) -> bool:
    """Rows of one document; whether it is one of ours."""
    moment = document.timestamp
    time_ns = nanoseconds(moment)[0] if isinstance(moment, str) else _from_seconds(moment)
    if document.event is not None:
        into.lines.append(_event(document, document.event, at, time_ns))
        return True
    if document.communicators is None:
        return False
    for communicator in document.communicators:
        name = _name(communicator)
        into.polls.append(_poll(communicator, name, samples.get(name, 0), time_ns, at))
        samples[name] = samples.get(name, 0) + 1
    return True


def _name(communicator: Communicator) -> str:
    parts = (str(communicator.hash), str(communicator.secondary_hash))
    return printable("/".join(part for part in parts if part)[:NAME_CHARS_MAX])


def _poll(communicator: Communicator, name: str, sample: int, time_ns: int, at: At) -> Poll:
    """Ranks are those of the communicator: who of its members is which global rank, no poll says."""
    known = [one for one in communicator.ranks if 0 <= one.rank < RANK_MAX]
    missing = [one for one in communicator.missing_ranks if 0 <= one.rank < RANK_MAX]
    counts = {one.rank: _counts(one.collective_counts) for one in known}
    states = {one.rank: _states(one.status) for one in known}
    states |= {one.rank: _states(one.status) or ("missing",) for one in missing}
    return Poll(
        sample,
        name,
        communicator.size if 0 <= communicator.size < RANK_MAX else len(known) + len(missing),
        {one.rank: Who(None, one.pid, printable(one.host[:NAME_CHARS_MAX])) for one in (*known, *missing)},
        counts,
        {rank: own for rank, own in states.items() if own},
        time_ns,
        at,
    )


def _counts(found: dict[str, int]) -> dict[str, int]:
    return {
        printable(op[:NAME_CHARS_MAX]): number for op, number in found.items() if 0 <= number <= COUNT_MAX
    }


def _states(status: Status | None) -> tuple[str, ...]:
    """Words for what is wrong with a rank; nothing where all is well."""
    if status is None:
        return ()
    told: dict[str, Any] = {
        "dead": status.considered_dead,
        "unresponsive": status.unresponsive,
        "async_error": status.async_error not in (None, 0, False, "", "0", "ncclSuccess", "success"),
        "aborted": status.abort_flag,
        "destroyed": status.destroy_flag,
    }
    return tuple(word for word, is_so in told.items() if is_so)


def _event(document: Document, event: str, at: At, time_ns: int) -> Line:
    fields = {
        "event": printable(event[:NAME_CHARS_MAX]),
        "group": printable(str(document.group or "")[:NAME_CHARS_MAX]),
        "peer": printable(str(document.peer if document.peer is not None else "")[:NAME_CHARS_MAX]),
    }
    host = printable((document.host or document.addr or "")[:NAME_CHARS_MAX])
    return Line(Who(None, document.pid, host), "ras_event", fields, at, time_ns)


def _from_seconds(moment: float | None) -> int:
    return round(moment * 1e6) * 1000 if moment is not None and 0 < moment < 9e9 else 0
