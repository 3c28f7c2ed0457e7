"""A file of lines in blocks under a checksum: what can be trusted, what is spoilt, what nobody has checked.

Owns the rule of the `block` line, which a sink writes behind the lines that it speaks of:

    line | line | line | {"kind":"block","bytes":N,"crc32":"..."} | line | ... zero bytes
    |--- N bytes ------|                                            |-- not checked yet --

One that does not fit the bytes before it spoils them, and reading goes on behind it. It opens compressed
files too, and never looks into a line.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import msgspec

from tracer.pack import PACKED, DamagedError, unpacked
from tracer.positions import UnsearchableError, read_at, table
from tracer.sinks import allow_open_files

# Large enough that a block's fixed costs vanish, small enough that its records stay in the cache.
BLOCK_BYTES = 64 * 1024
# Threads that verify blocks; larger files than any that a recorder writes are read a piece at a time, and a
# full block ends so close to its limit.
VERIFIERS = 2
SEGMENT_BYTES_MAX = 1 << 25
FULL_BYTES = 4096
LINE_BYTES_MAX = 16 * 1024 * 1024
GZIP = b"\x1f\x8b"
_BEGIN = b'\n{"kind":"block",'


@dataclass(frozen=True, slots=True)
class Piece:
    """Lines that belong together.

    Attributes:
        data: whole lines; the last one may lack its newline, or hold zero bytes, where nobody checked.
        is_checked: its checksum was there and right.
        more_bytes: of the block line behind it.
        damage: what is wrong with it, or "".
    """

    data: bytes
    is_checked: bool = False
    more_bytes: int = 0
    damage: str = ""


class _Seal(msgspec.Struct):
    kind: str
    bytes: int
    crc32: str


_SEAL = msgspec.json.Decoder(_Seal)


def opened(path: Path) -> FileIO:
    try:
        return FileIO(path)
    except OSError as error:
        if error.errno != errno.EMFILE or not allow_open_files():
            raise
        return FileIO(path)


def is_packed(path: Path) -> bool:
    """Whether the file is compressed, by what it begins with."""
    with opened(path) as file:
        return file.read(len(GZIP)) == GZIP


def first_line(path: Path) -> bytes:
    """The first line, at most `LINE_BYTES_MAX` of it; what is spoilt ends it."""
    line = b""
    with opened(path) as file:
        for chunk in _chunks(file):
            if isinstance(chunk, DamagedError):
                break
            end = chunk.find(b"\n") + 1
            line += chunk[: end or LINE_BYTES_MAX]
            if end or len(line) >= LINE_BYTES_MAX or b"\0" in line:
                break
    return line


def last_line(path: Path, bytes_max: int) -> bytes:
    """The last line that is not a block line, if it begins within the last `bytes_max`; else its end."""
    with opened(path) as file:
        end = b""
        for chunk in _chunks(file):
            end = b"" if isinstance(chunk, DamagedError) else (end + chunk)[-bytes_max:]
    lines = [line for line in end.split(b"\n") if line and not line.startswith(_BEGIN[1:])]
    return lines[-1] if lines else b""


def pieces(path: Path, *, is_blocked: bool = True, start: int = 0) -> Iterator[Piece]:
    """The file from its start, in pieces of whole lines.

    Args:
        is_blocked: its writer wrote block lines; without them nothing has to be kept back to be checked.
        start: byte of what was written at which a block begins.
    """
    kept_max = LINE_BYTES_MAX + 2 * BLOCK_BYTES if is_blocked else BLOCK_BYTES
    rest = bytearray()
    damage = ""
    searched = 0
    with opened(path) as file:
        for chunk in _chunks(file, start):
            if isinstance(chunk, DamagedError):
                damage = damage or str(chunk)
                continue
            rest += chunk
            while (at := rest.find(_BEGIN, searched)) >= 0 and (end := rest.find(b"\n", at + 1)) >= 0:
                yield from _checked(bytes(rest[: at + 1]), bytes(rest[at + 1 : end + 1]), damage)
                del rest[: end + 1]
                damage, searched = "", 0
            searched = at if at >= 0 else max(0, len(rest) - len(_BEGIN))
            if len(rest) > kept_max:
                whole = rest.rfind(b"\n") + 1
                if not whole and len(rest) <= LINE_BYTES_MAX:
                    continue
                whole = whole or len(rest)
                yield from _unchecked(bytes(rest[:whole]), damage)
                del rest[:whole]
                damage, searched = "", 0
    if rest or damage:
        yield from _unchecked(bytes(rest), damage)


def block_start(path: Path, end: int) -> int:
    """Where the block begins that byte `end` of what was written is in; 0 where nobody can say."""
    while True:
        # Most blocks are no longer; the line that ends the one before stands in front of them.
        start = max(0, end - 2 * BLOCK_BYTES)
        try:
            data = read_at(path, end - start, start)
        except UnsearchableError:
            return 0
        at = data.rfind(_BEGIN)
        if at >= 0 and (line := data.find(b"\n", at + 1)) >= 0:
            return start + line + 1
        if not start:
            return 0
        end = start + len(_BEGIN)


def _chunks(file: FileIO, start: int = 0) -> Iterator[bytes | DamagedError]:
    """What was written, from byte `start` on."""
    data = file.read(BLOCK_BYTES)
    # Even where the very first bytes are spoilt a name tells; what is compressed never begins like a line.
    is_named = str(file.name).endswith(PACKED) and not data.startswith(b"{")
    if data[: len(GZIP)] == GZIP or is_named:
        yield from _unpacked(file, start)
        return
    if start:
        file.seek(start)
        data = file.read(BLOCK_BYTES)
    while data:
        yield data
        data = file.read(BLOCK_BYTES)


def _unpacked(file: FileIO, start: int) -> Iterator[bytes | DamagedError]:
    skipped = start
    offset = 0
    if start:
        # Who knows a place has found the file to be one that can be searched.
        with suppress(UnsearchableError):
            members = table(Path(str(file.name)))
            number = members.member_with(start)
            offset, skipped = members.offsets[number], start - members.starts[number]
    file.seek(offset)
    for chunk in unpacked(file):
        if isinstance(chunk, DamagedError) or not skipped:
            yield chunk
            continue
        if len(chunk) > skipped:
            yield chunk[skipped:]
        skipped = max(0, skipped - len(chunk))


def _checked(data: bytes, line: bytes, damage: str) -> Iterator[Piece]:
    """The lines before a block line, in the light of it."""
    try:
        seal = _SEAL.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        yield Piece(data, more_bytes=len(line), damage="its checksum can't be read")
        return
    own = data[len(data) - seal.bytes :] if 0 < seal.bytes <= len(data) else b""
    if not own or f"{zlib.crc32(own):08x}" != seal.crc32:
        yield Piece(data, more_bytes=len(line), damage=damage or "its checksum differs")
        return
    if len(own) < len(data):
        yield Piece(data[: -len(own)], damage=damage or "its checksum is gone")
    yield Piece(own, is_checked=True, more_bytes=len(line))


def _unchecked(data: bytes, damage: str) -> Iterator[Piece]:
    if damage:
        yield Piece(data, damage=damage)
        return
    start = 0
    while start < len(data):
        end = data.rfind(b"\n", start, start + BLOCK_BYTES) + 1 or data.find(b"\n", start) + 1 or len(data)
        # Nothing behind a zero byte is trusted, so the rest of the allocation is not looked at.
        zero = data.find(b"\0", start, end)
        if zero >= 0:
            whole = data.rfind(b"\n", start, zero) + 1 or start
            if whole > start:
                yield Piece(data[start:whole])
            yield Piece(data[whole : zero + 1])
            return
        yield Piece(data[start:end])
        start = end


def all_blocks_are_sound(paths: Iterable[Path]) -> bool:
    """Whether every block of these files is what its checksum says, up to the end of those that were closed.

    Lines that are under no checksum, at the end of a file that was not closed, are not looked at.
    """
    # The checksum lets go of the interpreter while it is made.
    with ThreadPoolExecutor(VERIFIERS) as pool:
        found = pool.map(_is_sound, paths)
        return all(found)


def _is_sound(path: Path) -> bool:
    try:
        if _is_plainly_sound(path):
            return True
        is_checked, last = True, b""
        for piece in pieces(path):
            if piece.damage:
                return False
            is_checked = piece.is_checked
            last = piece.data
        # A file that was closed ends with a block line; one that was not, with zero bytes.
        return is_checked or last.endswith(b"\0")
    except OSError:
        return False


def _is_plainly_sound(path: Path) -> bool:
    """Whether the file is blocks with their checksums and nothing else: most are, and this is soon seen."""
    with opened(path) as file:
        data = file.readall() if os.fstat(file.fileno()).st_size <= SEGMENT_BYTES_MAX else b""
    lines = memoryview(data)
    start = 0
    while start < len(data):
        # Most blocks are full, so that they end not far in front of this.
        at = data.find(_BEGIN, start + BLOCK_BYTES - FULL_BYTES, start + BLOCK_BYTES + FULL_BYTES)
        at = at if at >= 0 else data.find(_BEGIN, start)
        end = data.find(b"\n", at + 1) + 1
        if at < 0 or not end:
            return False
        try:
            seal = _SEAL.decode(data[at + 1 : end])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return False
        own = lines[start : at + 1]
        if seal.bytes != len(own) or f"{zlib.crc32(own):08x}" != seal.crc32:
            return False
        start = end
    return bool(data)
