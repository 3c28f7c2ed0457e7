"""Sealed files made small: gzip in independent blocks, each with a checksum of its own.

Owns the bytes of `rank0003.scheduler.004.jsonl.gz`. Every block is a whole gzip member that says how long it
is (the BGZF convention), so that any gzip tool reads the file, and one spoilt block costs that block only.

    member | member | ... | empty member          64,000 bytes of lines in each

A packer does this beside the lane that writes: it must not wait for a compressor.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Callable, Generator, Iterator
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Protocol

PACKED = ".gz"
UNFINISHED = ".gz.tmp"
# A member's length must fit into 16 bits, compressed or not.
MEMBER_BYTES = 64_000
MEMBER_BYTES_MAX = 1 << 16
LEVEL = 3
# magic, deflate, extra field; no time, no system; the extra field is 6 bytes: "BC", 2 bytes, length - 1.
_HEAD = struct.Struct("<4sIBBH2sHH")
_MAGIC = b"\x1f\x8b\x08\x04"
_TAIL = struct.Struct("<II")
READ_BYTES = 1 << 17


class DamagedError(Exception):
    """Compressed bytes that can't be read; the text says what is wrong with them."""


def member(data: bytes, level: int = LEVEL) -> bytes:
    """One gzip member that holds `data`, at most `MEMBER_BYTES`."""
    assert len(data) <= MEMBER_BYTES, f"{len(data)} bytes do not fit in a member of {MEMBER_BYTES}"
    packer = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = packer.compress(data) + packer.flush()
    length = _HEAD.size + len(body) + _TAIL.size
    head = _HEAD.pack(_MAGIC, 0, 0, 255, 6, b"BC", 2, length - 1)
    return head + body + _TAIL.pack(zlib.crc32(data), len(data))


def pack(path: Path) -> Path:
    """Write `path` again, compressed, beside it; it is there under its own name only once it is whole.

    Raises:
        OSError: as writing does; nothing half is left behind.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        # Buffered, for a raw file on a disk that is almost full takes a part and says nothing.
        with open(fd, "wb") as target, FileIO(path) as source:
            while data := source.read(MEMBER_BYTES):
                target.write(member(data))
            target.write(member(b""))
        packed = path.with_name(path.name + PACKED)
        os.replace(unfinished, packed)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    return packed


def unpacked(file: FileIO) -> Iterator[bytes | DamagedError]:
    """What a gzip file holds, piece by piece; a member that is spoilt is an error among the pieces.

    Files that another tool has compressed are read too, up to the first thing that is wrong.
    """
    rest = b""
    is_blocked: bool | None = None
    while True:
        chunk = file.read(READ_BYTES)
        rest += chunk
        if is_blocked is None:
            # The first member may be the one that is spoilt.
            is_blocked = _next(rest, 0) is not None
            if not is_blocked:
                yield from _stream(file, rest)
                return
        rest = yield from _members(rest, is_last=not chunk)
        if not chunk:
            return


def _members(data: bytes, *, is_last: bool) -> Generator[bytes | DamagedError, None, bytes]:
    """The whole members at the start of `data`; gives back what is left."""
    at = 0
    while at < len(data):
        if len(data) - at < _HEAD.size and not is_last:
            break
        length = member_length(data, at)
        if length is None or (is_last and at + length > len(data)):
            following = _next(data, at + 1)
            if following is None and not is_last and len(data) - at < 2 * MEMBER_BYTES_MAX:
                break
            # What is spoilt may go on: so much is kept that a head cut in two is still found.
            at = following or len(data) - (0 if is_last else _HEAD.size - 1)
            yield DamagedError(
                "compressed bytes are damaged" if length is None else "the compressed file was cut"
            )
            continue
        if at + length > len(data):
            break
        piece = inflated(data[at : at + length])
        yield piece
        end = at + length
        # Where it is the length that is spoilt, the next member begins elsewhere.
        at = end if isinstance(piece, bytes) else min(end, _next(data, at + 1) or end)
    return data[at:]


def member_length(data: bytes, at: int) -> int | None:
    """Bytes of the member that begins at `at`; None where none does."""
    if len(data) - at < _HEAD.size:
        return None
    magic, _time, _flags, _system, extra, name, two, length = _HEAD.unpack_from(data, at)
    is_own = magic == _MAGIC and extra == 6 and name == b"BC" and two == 2
    return length + 1 if is_own and length + 1 > _HEAD.size + _TAIL.size else None


def _next(data: bytes, at: int) -> int | None:
    while (at := data.find(_MAGIC, at)) >= 0:
        if member_length(data, at) is not None:
            return at
        at += 1
    return None


def inflated(whole: bytes) -> bytes | DamagedError:
    """What one member holds."""
    try:
        opener = zlib.decompressobj(-zlib.MAX_WBITS)
        data = opener.decompress(whole[_HEAD.size : -_TAIL.size], MEMBER_BYTES + 1)
    except zlib.error:
        return DamagedError("compressed bytes are damaged")
    checksum, size = _TAIL.unpack_from(whole, len(whole) - _TAIL.size)
    if len(data) != size or zlib.crc32(data) != checksum:
        return DamagedError("compressed bytes are damaged: their checksum differs")
    return data


def _stream(file: FileIO, data: bytes) -> Iterator[bytes | DamagedError]:
    """A gzip file of any make, a bounded piece at a time."""
    opener = zlib.decompressobj(zlib.MAX_WBITS | 16)
    while True:
        try:
            piece = opener.decompress(data, READ_BYTES)
        except zlib.error:
            yield DamagedError("compressed bytes are damaged")
            return
        if piece:
            yield piece
        if opener.eof:
            data = opener.unused_data.lstrip(b"\0") or file.read(READ_BYTES)
            if not data:
                return
            opener = zlib.decompressobj(zlib.MAX_WBITS | 16)
        else:
            data = opener.unconsumed_tail or file.read(READ_BYTES)
            if not data:
                yield DamagedError("the compressed file was cut")
                return


class Sealed:
    """A file that nobody writes any more, before and after it is packed."""

    __slots__ = ("_is_gone", "_lock", "identity", "path", "sealed_s", "used_bytes")

    def __init__(self, path: Path, identity: tuple[int, int], used_bytes: int, sealed_s: float) -> None:
        self.path = path
        self.identity = identity
        self.used_bytes = used_bytes
        self.sealed_s = sealed_s
        self._is_gone = False
        self._lock = Lock()

    def remove(self) -> None:
        """Take it away, unless it is gone or another file has its name by now."""
        with self._lock:
            self._is_gone = True
            self._unlink()

    def pack(self) -> None:
        """Replace it by its compressed form; where that fails it stays as it is."""
        try:
            packed = pack(self.path)
        except OSError:
            return
        with self._lock:
            if self._is_gone or not self._is_own():
                with contextlib.suppress(OSError):
                    packed.unlink()
                return
            status = os.lstat(packed)
            self._unlink()
            self.path, self.used_bytes = packed, status.st_size
            self.identity = status.st_dev, status.st_ino

    def _unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._is_own():
                os.unlink(self.path)

    def _is_own(self) -> bool:
        try:
            status = os.lstat(self.path)
        except FileNotFoundError:
            return False
        # A number of a file that is gone is given to the next one, so the size must be the same too.
        return (status.st_dev, status.st_ino) == self.identity and status.st_size == self.used_bytes


class Packing(Protocol):
    """Who compresses what a sink has sealed."""

    def submit(self, sealed: Sealed) -> None: ...


class PackAtOnce:
    """In the writer's own thread: for the simulator, whose runs must leave equal files."""

    def submit(self, sealed: Sealed) -> None:
        sealed.pack()


class Packer:
    """In a thread of its own, one for all lanes of a process; it ends with the process.

    The compressor lets go of the interpreter while it works, so that a lane hardly notices.
    """

    def __init__(self, start: Callable[[Thread], None] = Thread.start) -> None:
        self._queue: SimpleQueue[Sealed | Event] = SimpleQueue()
        self._thread: Thread | None = None
        self._start = start
        self._pid = os.getpid()

    def submit(self, sealed: Sealed) -> None:
        if self._pid != os.getpid():
            return
        if self._thread is None:
            self._thread = Thread(target=self._work, name="hicache packer", daemon=True)
            try:
                self._start(self._thread)
            except RuntimeError:
                # No thread can be had: files stay as they are.
                return
        self._queue.put(sealed)

    def drain(self, timeout_s: float) -> bool:
        """Wait until all that was submitted is packed; False when it took longer."""
        if self._thread is None or not self._thread.is_alive():
            return True
        done = Event()
        self._queue.put(done)
        return done.wait(timeout_s)

    def _work(self) -> None:
        while True:
            task = self._queue.get()
            if isinstance(task, Event):
                task.set()
                continue
            # Nothing that a file suffers may end this thread, or the next ones would never be packed.
            with contextlib.suppress(Exception):
                task.pack()
