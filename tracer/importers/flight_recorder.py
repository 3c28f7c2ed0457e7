"""PyTorch's flight recorder: dumps of 2.0 to 2.10, as pickle, JSON, or lines `{"rank": N, "dump": {...}}`.

One dump is held at a time; of it stay columns (`recorded_calls`) and a row a group (`recorded_dump`).
Whatever a file holds, the answer is rows, a count of what could not be understood, or a sentence that says
why it was refused. The rank is in the file's name only, unless a line, one of our own exports or the groups
of the dump tell it.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import msgspec

from tracer.errors import HitsError
from tracer.importers import safe_pickle
from tracer.importers.dossier import At, Dossier, FileRead
from tracer.importers.recorded_dump import RANK_MAX, compiled, count_of, short
from tracer.importers.sniff import COUNT_MAX, NESTING_MAX, File, is_too_deep
from tracer.uncollected import uncollected

FORMAT = "flight_recorder"
VERSION = 1
MAJOR, MINOR_KNOWN = 2, 10
# 2,000 entries take 0.2 MB, with stacks some 5; a dump of this size would take 3 GB of memory.
DUMP_BYTES_MAX = 128 << 20
STRANGERS_MAX = 100_000
PICKLE = b"\x80"
KEYS = (
    *(b"pg_config", b"pg_status", b"nccl_version", b"comm_lib_version", b"nccl_comm_state", b"process_group"),
    *(b"profiling_name", b"collective_seq_id", b"record_id", b"p2p_seq_id"),
)


def votes(head: bytes) -> int:
    """How many keys of a dump are there; any pickle has a vote, since only here it is read or refused."""
    start = head[:256].split()
    found = sum(key in head for key in KEYS)
    if head[:1] == PICKLE and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return 1 + found
    is_json = bool(start) and b"".join(start)[:2] in (b'{"', b"[{")
    return found if is_json and found >= 2 else 0


def read(file: File, index: int, into: Dossier) -> None:
    """Add the dumps in `file` to the dossier, or say why not."""
    about = into.files[index]
    about.format, about.version = FORMAT, VERSION
    count = len(into.dumps)
    try:
        # Thousands of small lists that all live until the dump is done with: looking for cycles finds none.
        with uncollected():
            _read(file, _Reader(index, into, about))
    except HitsError as error:
        about.refused = str(error)
    except safe_pickle.PickleRefusedError as error:
        about.refused = f"{file.name}: {error}"
    except MemoryError:
        about.refused = f"{file.name}: reading it takes more memory than this process may have"
    except OSError as error:
        about.refused = f"{file.name} can't be read: {error.strerror or error}"
    if len(into.dumps) == count and about.refused is None:
        about.refused = f"{file.name}: no dump of a flight recorder in it"


@dataclass(slots=True)
class _Reader:
    """One file while it is read."""

    index: int
    into: Dossier
    about: FileRead
    # Why the first document that was none was refused; shown where none was a dump.
    reason: str = ""

    def take(self, document: Any, form: str, record: int = 0) -> bool:
        """Add one dump, or the dumps in a list; whether there is any.

        Args:
            record: the line it is in; 0 of a file that is one dump.
        """
        if isinstance(document, list) and document and isinstance(document[0], dict):
            if "dump" in document[0]:
                return sum(self._one(each, "list", at) for at, each in enumerate(document)) > 0
            if "profiling_name" in document[0]:
                return self.no("a flight recorder of version 1, without the groups' states: not read")
        return self._one(document, form, record)

    def _one(self, document: Any, form: str, record: int) -> bool:
        """Add one dump, bare or with its rank; whether it is one."""
        rank = None
        if isinstance(document, dict) and isinstance(document.get("dump"), dict):
            rank, document = count_of(document.get("rank"), RANK_MAX), document["dump"]
        if not isinstance(document, dict) or not ({"entries", "pg_status", "pg_config"} & document.keys()):
            return self.no("no dump of a flight recorder")
        refusal = _version(document.get("version"), self.about)
        if refusal:
            return self.no(refusal)
        self.into.dumps.append(compiled(document, rank, form, self.about, At(self.index, record)))
        return True

    def no(self, reason: str) -> bool:
        self.reason = self.reason or reason
        return False


def _read(file: File, reader: _Reader) -> None:
    about = reader.about
    first = next(file.chunks(), b"")
    if first[:1] == PICKLE:
        data = _whole(file)
        document, length = safe_pickle.loads(data)
        if length < len(data):
            about.notes.append(f"{len(data) - length:,} bytes behind the end of the pickle are not read")
        del data
        is_dump = reader.take(document, "pickle")
    else:
        is_dump = _read_json(file, reader)
    if not is_dump:
        about.refused = f"{file.name}: {reader.reason or 'empty'}"


def _read_json(file: File, reader: _Reader) -> bool:
    """A dump a line, or one that has several lines; whether there is any."""
    about = reader.about
    lines = _lines(file)
    number, line = next(lines, (0, b""))
    if not number:
        return False
    document = _decoded(line, reader)
    if document is None:
        if next(lines, None) is None:
            return False
        lines.close()
        document = _decoded(_whole(file), reader)
        return document is not None and reader.take(document, "json")
    second = next(lines, None)
    if second is None:
        return reader.take(document, "json")
    found = False
    while True:
        if document is not None and reader.take(document, "lines", number):
            found = True
        else:
            about.records += 1
            about.unparsed += 1
        if second is None:
            return found
        if about.unparsed >= STRANGERS_MAX:
            about.notes.append(f"{about.unparsed:,} lines that are no dump: those behind them are not read")
            return found
        number, document = second[0], _decoded(second[1], reader)
        second = next(lines, None)


def _lines(file: File) -> Generator[tuple[int, bytes]]:
    """Lines by number, from 1; empty ones are left out. Linear also where there is only one."""
    number = 1
    parts: list[bytes] = []
    size = 0
    for chunk in file.chunks():
        *whole, rest = chunk.split(b"\n")
        for piece in whole:
            line = b"".join([*parts, piece]) if parts else piece
            parts, size = [], 0
            if line.strip():
                yield number, line
            number += 1
        parts.append(rest)
        size += len(rest)
        if size > DUMP_BYTES_MAX:
            raise HitsError(f"{file.name}: a dump of more than {DUMP_BYTES_MAX >> 20} MiB is not read")
    line = b"".join(parts)
    if line.strip():
        yield number, line


def _whole(file: File) -> bytes:
    data = bytearray()
    for chunk in file.chunks():
        data += chunk
        if len(data) > DUMP_BYTES_MAX:
            raise HitsError(f"{file.name}: a dump of more than {DUMP_BYTES_MAX >> 20} MiB is not read")
    return bytes(data)


def _decoded(data: bytes, reader: _Reader) -> Any:
    """A JSON document; None where it is none, with the reason kept."""
    if is_too_deep(data):
        reader.no(f"JSON nested deeper than {NESTING_MAX}")
        return None
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    try:
        # Not a number, infinity, integers of any length: other writers have them.
        return json.loads(data, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        reader.no(f"no whole JSON document: {short(str(error))}")
        return None


def _integer(text: str) -> int:
    return int(text) if len(text) <= len(str(COUNT_MAX)) + 4 else -1


def _version(version: Any, about: FileRead) -> str:
    """Why a dump of this version is not read; empty where it is."""
    if not isinstance(version, str):
        return "a dump without its version: not read"
    major, _, minor = version.partition(".")
    if not (major.isdecimal() and minor.isdecimal() and len(version) < 16):
        return f"version {short(version)!r} of the flight recorder is none that we know: not read"
    if int(major) != MAJOR:
        return f"version {version} of the flight recorder: read are {MAJOR}.0 to {MAJOR}.{MINOR_KNOWN}"
    if int(minor) > MINOR_KNOWN:
        note = f"version {version} is newer than {MAJOR}.{MINOR_KNOWN}: read as if it were that"
        if note not in about.notes:
            about.notes.append(note)
    return ""
