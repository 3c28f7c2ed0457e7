"""Bytes out of an archive, of which nobody reads more than was meant to be read."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import IO, BinaryIO

READ_BYTES = 1 << 18
PIECE_BYTES = 1 << 13
# So long as a block of a tar.
TAIL_BYTES = 512


class PastLimitError(Exception):
    """A limit was passed; the text says which."""


class Metered:
    """A stream of which so much may be read, so that nobody reads a name of gigabytes into memory.

    Attributes:
        last: the end of the last piece, so long as a block of a tar.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._allowed: int | None = None
        self.last = b""

    def allow(self, size: int | None) -> None:
        self._allowed = size

    def read(self, size: int) -> bytes:
        try:
            data = self._stream.read(size)
        except OSError as error:
            if error.errno is not None:
                raise
            # The bzip2 reader's way to say that it is damaged.
            raise EOFError(str(error)) from None
        if self._allowed is not None:
            self._allowed -= len(data)
            if self._allowed < 0:
                raise PastLimitError("a header in it is longer than anything honest")
        if data:
            self.last = data[-TAIL_BYTES:]
        return data


@dataclass(slots=True)
class InPieces:
    """A member that raises where it is damaged: only a short piece in front of that is lost."""

    source: IO[bytes]

    def read(self, size: int, /) -> bytes:
        return self.source.read(min(size, PIECE_BYTES))


@dataclass(slots=True)
class Stored:
    """The bytes of a member that is not compressed."""

    raw: BinaryIO
    left_bytes: int

    def read(self, size: int, /) -> bytes:
        data = self.raw.read(min(size, self.left_bytes))
        self.left_bytes -= len(data)
        return data


class Inflated:
    """The bytes of a deflated member, which says itself where it ends.

    Attributes:
        used_bytes: of the archive, once it has been read to its end.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._opener = zlib.decompressobj(-zlib.MAX_WBITS)
        self._rest = b""
        self._is_over = False
        self.used_bytes = 0

    def read(self, size: int, /) -> bytes:
        data = b""
        while not data and not self._is_over:
            if not self._rest:
                self._rest = self._raw.read(READ_BYTES)
                self.used_bytes += len(self._rest)
                if not self._rest:
                    raise EOFError("it was cut")
            data = self._opener.decompress(self._rest, size)
            self._rest = self._opener.unconsumed_tail
            if self._opener.eof:
                self._is_over = True
                self.used_bytes -= len(self._opener.unused_data)
        return data
