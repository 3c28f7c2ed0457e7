"""Which program wrote a file, by what is in it; and its bytes, unwrapped and within limits.

Nothing here trusts a name. A file is opened once, a compressed one is unwrapped once, and what is larger,
deeper or better compressed than anything honest is refused before it is read.
"""

from __future__ import annotations

import gzip
import importlib
import os
import re
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import msgspec

from tracer.errors import HitsError
from tracer.served import RequestHits, Source

BLOCK_BYTES = 1 << 20
LINE_BYTES_MAX = 256 << 20
FILE_BYTES_MAX = 2 << 30
RATIO_MAX = 200
# Below this a well compressed file is no bomb.
RATIO_FREE_BYTES = 16 << 20
NESTING_MAX = 64
LINES_VOTING = 200
# Where none of those is known, a server's start may be longer than that.
SEARCH_BYTES_MAX = 64 << 20
FILES_MAX = 10_000
COUNT_MAX = (1 << 53) - 1
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)
_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])
# What launchers and colours put in front of a line, or into it.
COLOURS = re.compile(rb"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class File:
    """A file that is read; `name` is what rows and notes call it."""

    path: Path
    name: str

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Its bytes, unwrapped.

        Raises:
            HitsError: it can't be read, or is wrapped in something that can't be unwrapped.
        """
        try:
            with self.path.open("rb") as raw:
                magic = raw.read(4)
                raw.seek(0)
                if magic.startswith(GZIP):
                    yield cast(BinaryIO, gzip.GzipFile(fileobj=raw))
                elif magic == ZSTD:
                    yield self._zstd(raw)
                else:
                    yield raw
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise HitsError(f"{self.name}: what it is compressed in is damaged: {error}") from None
        except OSError as error:
            raise HitsError(f"{self.name} can't be read: {error.strerror or error}") from None

    def _zstd(self, raw: BinaryIO) -> BinaryIO:
        try:
            # In the standard library from Python 3.14 on.
            zstd: Any = importlib.import_module("compression.zstd")
        except ImportError:
            raise HitsError(
                f"{self.name} is compressed with zstd, which this Python can't read",
                hint=f"zstd -d {self.name}, and the result instead",
            ) from None
        return cast(BinaryIO, zstd.ZstdFile(raw))

    def blocks(self) -> Iterator[bytes]:
        """Its bytes in blocks of whole lines; the last line may lack its newline.

        Raises:
            HitsError: as `opened`; or it is larger, or better compressed, than what is read.
        """
        rest = b""
        for chunk in self.chunks():
            block = rest + chunk
            end = block.rfind(b"\n") + 1
            rest = block[end:]
            if end:
                yield block[:end]
            if len(rest) > LINE_BYTES_MAX:
                raise HitsError(
                    f"{self.name}: a line of more than {LINE_BYTES_MAX >> 20} MiB", expected="shorter lines"
                )
        if rest:
            yield rest

    def chunks(self) -> Iterator[bytes]:
        """Its bytes as they come, within the limits."""
        size = 0
        on_disk = max(1, self.path.stat().st_size)
        with self.opened() as stream:
            while chunk := stream.read(BLOCK_BYTES):
                if not size and chunk.startswith((GZIP, ZSTD)):
                    raise HitsError(f"{self.name} is compressed twice", hint="unwrap it once")
                size += len(chunk)
                if size > FILE_BYTES_MAX:
                    raise HitsError(
                        f"{self.name} holds more than {FILE_BYTES_MAX >> 30} GiB", hint="a part of it"
                    )
                if size > RATIO_FREE_BYTES and size > RATIO_MAX * on_disk:
                    raise HitsError(f"{self.name} unwraps to more than {RATIO_MAX} times its size: refused")
                yield chunk

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Its lines by number, from 1, without their newlines; empty ones are left out."""
        number = 0
        for block in self.blocks():
            for line in block.splitlines():
                number += 1
                if line.strip():
                    yield number, line


@dataclass(slots=True)
class Tally:
    """What was read of each file, while it is read."""

    files: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    unparsed: list[int] = field(default_factory=list)
    unknown_keys: dict[str, int] = field(default_factory=dict)

    def begin(self, file: File) -> int:
        """Start on a file; its number."""
        self.files.append(file.name)
        self.lines.append(0)
        self.unparsed.append(0)
        return len(self.files) - 1

    def unknown(self, keys: Sequence[str], rows: int = 1) -> None:
        for key in keys:
            # Long enough to be told by.
            short = printable(key[:KEY_CHARS_MAX])
            self.unknown_keys[short] = self.unknown_keys.get(short, 0) + rows

    def source(self, format_name: str, *, notes: Sequence[str] = (), **more: Any) -> Source:
        return Source(
            format=format_name,
            files=tuple(self.files),
            lines=tuple(self.lines),
            unparsed=tuple(self.unparsed),
            unknown_keys=dict(sorted(self.unknown_keys.items())[:UNKNOWN_KEPT_MAX]),
            notes=tuple(notes),
            **more,
        )


def printable(text: str) -> str:
    """Somebody else's text, whatever it is made of: keys of a file, and names of files."""
    return text if text.isprintable() else "".join(char if char.isprintable() else STRANGE for char in text)


STRANGE = "\N{REPLACEMENT CHARACTER}"
KEY_CHARS_MAX = 40
UNKNOWN_KEPT_MAX = 100


@dataclass(frozen=True, slots=True)
class Imported:
    """What a source tells of cache hits.

    Attributes:
        groupings: what its rows can be grouped by; the first is what is shown unless asked otherwise.
        paths: for each row its chained block keys, where the source has them.
        tables: groupings that are not made from the rows, each ready.
    """

    source: Source
    requests: tuple[RequestHits, ...]
    groupings: tuple[str, ...] = ("request", "tier")
    paths: tuple[tuple[int, ...], ...] = ()
    tables: dict[str, tuple[dict[str, Any], ...]] = field(default_factory=dict)


class Format(Protocol):
    """A module of this package."""

    FORMAT: str

    def is_mine(self, line: bytes) -> bool:
        """Whether a line is surely of this format."""

    def read(self, files: Sequence[File]) -> Imported:
        """All rows of these files, in their order.

        Raises:
            HitsError: none of them says anything about hits.
        """


def files_at(place: Path) -> list[File]:
    """The file, or the regular files in the folder, by name.

    Raises:
        HitsError: the folder can't be listed.
    """
    if not place.is_dir():
        return [File(place, printable(place.name))]
    try:
        with os.scandir(place) as found:
            entries = sorted(entry.name for entry in islice(found, FILES_MAX))
    except OSError as error:
        raise HitsError(f"{place} can't be listed: {error.strerror}") from None
    visible = [place / name for name in entries if not name.startswith(".")]
    return [File(path, printable(path.name)) for path in visible if _is_regular(path)]


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def sniff(file: File, formats: Sequence[Format]) -> Format | None:
    """Whose file it is, by the votes of its first lines; None where nobody knows it.

    Of several that a server writes into one file, the first with a tenth of the votes: formats come in the
    order of how much they tell.
    """
    if is_msgpack(file):
        return next((each for each in formats if getattr(each, "IS_MSGPACK", False)), None)
    votes = [0] * len(formats)
    size = 0
    for number, line in file.lines():
        size += len(line)
        for index, each in enumerate(formats):
            if each.is_mine(line):
                votes[index] += 1
                break
        if (number >= LINES_VOTING and any(votes)) or size > SEARCH_BYTES_MAX:
            break
    enough = max(1, sum(votes) // 10)
    return next((each for each, own in zip(formats, votes, strict=True) if own >= enough), None)


def is_msgpack(file: File) -> bool:
    """Whether it begins with an array or map of msgpack, which no text begins with."""
    with file.opened() as stream:
        first = stream.read(1)
    return bool(first) and 0x81 <= first[0] <= 0x9F


def keys_of(line: bytes) -> set[str]:
    """The keys of a JSON object, nothing of its values decoded; none where one of them is no text."""
    try:
        return set(_KEYS.decode(line))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return set()


def is_too_deep(line: bytes) -> bool:
    """Whether brackets outside of strings are nested deeper than anything honest."""
    if line.count(b"[") + line.count(b"{") <= NESTING_MAX:
        return False
    depth = 0
    for found in BRACKETS.finditer(line):
        mark = found[0]
        depth += (mark in b"[{") - (mark in b"]}") if len(mark) == 1 else 0
        if depth > NESTING_MAX:
            return True
    return False
