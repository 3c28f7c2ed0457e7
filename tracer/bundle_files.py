"""Where a bundle is written: a folder, or a gzipped tar in one stream. Equal input gives equal bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

CHUNK_BYTES = 1 << 18
# More than any file of a log; what is larger is not kept in memory while it is packed.
MEMORY_BYTES_MAX = 64 << 20
# Most of a ring is compressed already.
LEVEL = 3
FILE_MODE, FOLDER_MODE = 0o600, 0o700


class FolderTarget:
    """Files below a folder, which is made; readable by their owner alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=FOLDER_MODE)

    def add(self, name: str, source: Path) -> tuple[int, str]:
        with source.open("rb") as stream:
            return self._write(name, stream)

    def add_bytes(self, name: str, data: bytes) -> tuple[int, str]:
        return self._write(name, io.BytesIO(data))

    def _write(self, name: str, stream: BinaryIO) -> tuple[int, str]:
        target = self._folder / name
        target.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        digest = hashlib.sha256()
        size = 0
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        with open(fd, "wb") as file:
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
                if chunk.strip(b"\0"):
                    file.write(chunk)
                else:
                    # The unwritten end of a log takes no room.
                    file.seek(size)
            file.truncate(size)
        return size, digest.hexdigest()


class TarTarget:
    """Members of a tar; their owner, group and times are nobody's."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar

    def add(self, name: str, source: Path) -> tuple[int, str]:
        with source.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size <= MEMORY_BYTES_MAX:
                # As many bytes as are there now: a log that is still written is cut when it is closed.
                return self.add_bytes(name, stream.read())
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            stream.seek(0)
            self._tar.addfile(self._info(name, size), stream)
            return size, digest

    def add_bytes(self, name: str, data: bytes) -> tuple[int, str]:
        self._tar.addfile(self._info(name, len(data)), io.BytesIO(data))
        return len(data), hashlib.sha256(data).hexdigest()

    @staticmethod
    def _info(name: str, size: int) -> tarfile.TarInfo:
        info = tarfile.TarInfo(name)
        info.size, info.mode = size, FILE_MODE
        return info


@contextmanager
def packed(stream: BinaryIO) -> Iterator[TarTarget]:
    """A gzipped tar in `stream`, whole once the block has ended."""
    with (
        gzip.GzipFile(filename="", fileobj=stream, mode="wb", compresslevel=LEVEL, mtime=0) as unpacked,
        tarfile.open(fileobj=unpacked, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        yield TarTarget(tar)
