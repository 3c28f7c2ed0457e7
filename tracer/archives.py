"""Archives that somebody sends: their regular files in a private folder, and what was left out of them.

Owns the rule of what is taken from an archive: regular files whose names stay inside, within limits. Links,
devices, and names that lead elsewhere are never made; what is damaged gives what can be read of it. Nothing
trusts a name or a size that an archive claims, and the folder is gone when the block ends.

    bundle.tar.gz  --opened-->  folder/host-a/rank0000...        bundle.tar.gz!host-a/rank0000...
       host-b.zip  ---------->  folder/host-b.zip/rank0004...    bundle.tar.gz!host-b.zip!rank0004...
"""

from __future__ import annotations

import bz2
import errno
import gzip
import lzma
import os
import shutil
import stat
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO, Protocol, cast

from tracer.archive_streams import Inflated, InPieces, Metered, PastLimitError, Stored
from tracer.errors import TracerError

CHUNK_BYTES = 1 << 18
TAR_BLOCK_BYTES = 512
# Names, extended headers and padding between two members of a tar; one that claims more is hostile.
TAR_BETWEEN_BYTES_MAX = 1 << 20
# The unwritten end of a segment whose process was killed: it packs to nothing and is no bomb.
ROOM_BYTES_MAX = 4 << 20
PART_BYTES_MAX = 255
GZIP, BZIP2, XZ = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00"
ZIP_MEMBER, ZIP_EMPTY = b"PK\x03\x04", b"PK\x05\x06"
# signature, version, flags, method, time, date, crc, packed, unpacked, length of name, of extra
ZIP_LOCAL = struct.Struct("<4sHHHHHIIIHH")
ZIP_ENCRYPTED, ZIP_SIZE_BEHIND = 1, 8
UNPACKING = ".hicache-unpacking"
AGAIN = "again"
BROKEN = (
    EOFError,
    gzip.BadGzipFile,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    NotImplementedError,
    ValueError,
    UnicodeError,
    struct.error,
)


class ArchiveError(TracerError):
    """Nothing of an archive can be read, or there is no room for it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """More than anything honest.

    Attributes:
        bytes_max: of all files, unpacked.
        ratio_max: unpacked bytes for each byte of the archive, once there are more than `ratio_free_bytes`.
        name_bytes_max: of a whole name, folders and all.
        depth_max: archives in archives that are unpacked; 0 is none.
    """

    bytes_max: int = 32 << 30
    ratio_max: int = 200
    ratio_free_bytes: int = 16 << 20
    members_max: int = 100_000
    name_bytes_max: int = 1024
    depth_max: int = 1


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Opened:
    """What was in an archive.

    Attributes:
        folder: holds its regular files under their own names; made safe where they were not.
        notes: what was left out and what is damaged, each a sentence.
        names: file in the folder -> what to call it: archive, `!`, name inside.
    """

    folder: Path
    notes: tuple[str, ...]
    names: Mapping[Path, str]


@contextmanager
def opened(path: Path, *, limits: Limits = LIMITS) -> Iterator[Opened]:
    """The files of a zip or tar (plain, gzip, bzip2, xz) in a folder of this process, for the block's time.

    Raises:
        ArchiveError: it is no archive, can't be read, nothing can be taken from it, or the disk is full.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="hicache-"))
    except OSError as error:
        raise _no_room(path, error, Path(tempfile.gettempdir())) from None
    try:
        taken = _Taken(folder, limits)
        try:
            size_bytes = path.stat().st_size
            kind = _kind(path)
            if kind is not None:
                taken.unpack(path, kind, printable(path.name), folder, _Budget(limits, size_bytes))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _no_room(path, error, folder) from None
            raise ArchiveError(f"{path} can't be read: {error.strerror or error}") from None
        if kind is None:
            raise ArchiveError(f"{path} is no archive", expected="a zip, or a tar (gzip, bzip2, xz or plain)")
        notes = taken.notes()
        if not taken.names:
            raise ArchiveError(f"nothing in {path} can be read", where=notes[0] if notes else "it is empty")
        yield Opened(folder, notes, taken.names)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_archive(path: Path) -> bool:
    """Whether a file is a zip or a tar, by its first bytes; false where it can't be read."""
    try:
        return stat.S_ISREG(path.stat().st_mode) and _kind(path) is not None
    except (OSError, ValueError):
        return False


def printable(text: str) -> str:
    """A name from an archive, as it may be shown."""
    return "".join(char if char.isprintable() else "_" for char in text)


def _no_room(path: Path, error: OSError, folder: Path) -> ArchiveError:
    return ArchiveError(
        f"{path} can't be unpacked: {error.strerror or error}",
        where=str(folder.parent),
        hint="TMPDIR=DIR with a folder that has room",
    )


def _kind(path: Path) -> str | None:
    """`zip`, `tar`, or neither."""
    with path.open("rb") as raw:
        head = raw.read(TAR_BLOCK_BYTES)
        if head.startswith((ZIP_MEMBER, ZIP_EMPTY)):
            return "zip"
        raw.seek(0)
        with suppress(*BROKEN, OSError):
            head = _unwrapped(raw, head).read(TAR_BLOCK_BYTES)
            tarfile.TarInfo.frombuf(head, tarfile.ENCODING, "surrogateescape")
            return "tar"
    return None


def _unwrapped(raw: BinaryIO, head: bytes) -> IO[bytes]:
    if head.startswith(GZIP):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if head.startswith(BZIP2):
        return cast(IO[bytes], bz2.BZ2File(raw))
    if head.startswith(XZ):
        return cast(IO[bytes], lzma.LZMAFile(raw))
    return raw


@dataclass(slots=True)
class _Budget:
    """What may still be taken from one archive that somebody gave, those inside it included."""

    limits: Limits
    archive_bytes: int
    members: int = 0
    # With and without the unwritten ends of logs.
    bytes: int = 0
    counted_bytes: int = 0

    def begin(self, claimed_bytes: int) -> None:
        """Raises: PastLimitError."""
        self.members += 1
        if self.members > self.limits.members_max:
            raise PastLimitError(f"it holds more than {self.limits.members_max:,} files")
        if self.bytes + claimed_bytes > self.limits.bytes_max:
            raise PastLimitError(self._too_large())

    def take(self, more_bytes: int, counted_bytes: int) -> None:
        """Raises: PastLimitError."""
        self.bytes += more_bytes
        self.counted_bytes += counted_bytes
        limits = self.limits
        if self.bytes > limits.bytes_max:
            raise PastLimitError(self._too_large())
        if self.counted_bytes > max(limits.ratio_free_bytes, limits.ratio_max * self.archive_bytes):
            raise PastLimitError(f"it unpacks to more than {limits.ratio_max} times its size")

    def _too_large(self) -> str:
        return f"it unpacks to more than {self.limits.bytes_max:,} bytes"


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(slots=True)
class _Taken:
    """What has come out so far.

    Attributes:
        left_out: reason -> how many, and the first of them.
    """

    folder: Path
    limits: Limits
    names: dict[Path, str] = field(default_factory=dict)
    left_out: dict[str, tuple[int, str]] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)

    def notes(self) -> tuple[str, ...]:
        found = []
        for reason, (count, first) in self.left_out.items():
            more = f" and {count - 1:,} more" if count > 1 else ""
            found.append(f"{first}{more}: {reason}: left out")
        return (*found, *self.told)

    def unpack(
        self, archive: Path, kind: str, shown: str, into: Path, budget: _Budget, depth: int = 0
    ) -> None:
        """Take all that can be had.

        Raises:
            OSError: the archive can't be opened, or a file can't be written.
        """
        before = set(self.names)
        unpacker = _Unpacker(self, shown, into, budget)
        try:
            with archive.open("rb") as raw:
                if kind == "tar":
                    unpacker.tar(raw)
                else:
                    unpacker.zip(raw)
        except PastLimitError as error:
            self.told.append(f"{shown}: {error}: what comes behind is not read")
        except BROKEN as error:
            self.told.append(f"{shown} is damaged, and read as far as it goes: {_reason(error)}")
        for path in [path for path in self.names if path not in before]:
            inner = _kind(path)
            if inner is not None:
                self._nested(path, inner, budget, depth + 1)

    def _nested(self, path: Path, kind: str, budget: _Budget, depth: int) -> None:
        shown = self.names[path]
        if depth > self.limits.depth_max:
            self.told.append(f"{shown}: an archive in an archive in an archive is not unpacked")
            return
        aside = self.folder / UNPACKING
        path.rename(aside)
        del self.names[path]
        self.unpack(aside, kind, shown, path, budget, depth)
        aside.unlink()

    def leave_out(self, shown: str, reason: str) -> None:
        count, first = self.left_out.get(reason, (0, shown))
        self.left_out[reason] = count + 1, first


@dataclass(slots=True)
class _Unpacker:
    """One archive, into one folder."""

    taken: _Taken
    shown: str
    into: Path
    budget: _Budget

    def tar(self, raw: BinaryIO) -> None:
        head = raw.read(TAR_BLOCK_BYTES)
        raw.seek(0)
        stream = Metered(_unwrapped(raw, head))
        # Read once and forwards, so that no position that it claims is ever gone to.
        with tarfile.open(
            fileobj=cast(IO[bytes], stream), mode="r|", bufsize=CHUNK_BYTES, errors="surrogateescape"
        ) as tar:
            stream.allow(TAR_BETWEEN_BYTES_MAX)
            while (member := tar.next()) is not None:
                # It would keep them all.
                tar.members = []  # type: ignore[attr-defined]
                stream.allow(None)
                self._tar_member(tar, member)
                stream.allow(TAR_BETWEEN_BYTES_MAX + 2 * CHUNK_BYTES + self._unread(tar, member))
        if stream.last.strip(b"\0"):
            raise tarfile.ReadError("it ends in the middle")

    @staticmethod
    def _unread(tar: tarfile.TarFile, member: tarfile.TarInfo) -> int:
        # What was left out is skipped by reading it; what was taken has been read.
        return 0 if member.isreg() else max(0, member.size)

    def _tar_member(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        if member.isdir():
            return
        reason = "" if member.isreg() else "a link" if member.issym() or member.islnk() else "no regular file"
        target = self._target(member.name, reason)
        if target is None:
            _skip(tar, member)
            return
        source = tar.extractfile(member)
        assert source is not None, f"{member.name} is a regular file"
        with source:
            self._copy(cast(_Readable, source), target, member.size, member.name)

    def zip(self, raw: BinaryIO) -> None:
        try:
            archive = zipfile.ZipFile(raw)
        except (zipfile.BadZipFile, ValueError, struct.error) as error:
            # Its table of contents stands at the end: one that was cut has none, and is read from the front.
            self._zip_members(raw)
            self.taken.told.append(f"{self.shown} is damaged, and read as far as it goes: {_reason(error)}")
            return
        with archive:
            for info in archive.infolist():
                if info.is_dir():
                    continue
                mode = info.external_attr >> 16
                reason = "encrypted" if info.flag_bits & ZIP_ENCRYPTED else ""
                if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
                    reason = "a link" if stat.S_ISLNK(mode) else "no regular file"
                target = self._target(info.filename, reason)
                if target is None:
                    continue
                try:
                    with archive.open(info) as source:
                        self._copy(InPieces(source), target, info.file_size, info.filename)
                except (*BROKEN, RuntimeError, OSError) as error:
                    # The next one stands elsewhere, and may be whole.
                    if isinstance(error, OSError) and error.errno is not None:
                        raise
                    self._damaged(info.filename, error)

    def _zip_members(self, raw: BinaryIO) -> None:
        """Member by member, as far as each says where the next one begins."""
        raw.seek(0)
        while len(head := raw.read(ZIP_LOCAL.size)) == ZIP_LOCAL.size and head.startswith(ZIP_MEMBER):
            (_, _, flags, method, _, _, _, packed, size, name_length, extra_length) = ZIP_LOCAL.unpack(head)
            name = raw.read(name_length).decode("utf-8", "surrogateescape")
            raw.seek(extra_length, os.SEEK_CUR)
            begin = raw.tell()
            is_known = method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            reason = "encrypted" if flags & ZIP_ENCRYPTED else "" if is_known else "a method of its own"
            target = None if name.endswith("/") else self._target(name, reason)
            if target is not None and method == zipfile.ZIP_DEFLATED:
                source = Inflated(raw)
                self._copy(source, target, 0, name)
                begin, packed = begin + source.used_bytes, 0
            elif target is not None:
                self._copy(Stored(raw, packed), target, size, name)
            if flags & ZIP_SIZE_BEHIND:
                # How long it was stands behind it, with or without a signature.
                raw.seek(begin + packed)
                packed += 16 if raw.read(4) == b"PK\x07\x08" else 12
            raw.seek(begin + packed)

    def _target(self, name: str, reason: str) -> Path | None:
        """Where a member goes; None where it is left out, which is noted."""
        shown = f"{self.shown}!{printable(name)[:200]}"
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if not reason:
            if name.startswith("/"):
                reason = "an absolute name"
            elif ".." in parts:
                reason = "a name that leads outside"
            elif not parts:
                reason = "no name"
            elif _bytes(name) > self.budget.limits.name_bytes_max or max(map(_bytes, parts)) > PART_BYTES_MAX:
                reason = "too long a name"
        if reason:
            self.taken.leave_out(shown, reason)
            return None
        inside = Path(*map(printable, parts))
        target, number = self.into / inside, 1
        while not self._is_free(target):
            number += 1
            target = self.into / f"{AGAIN}-{number}" / inside
        self.taken.names[target] = shown if number == 1 else f"{shown} (the {number}. of that name)"
        return target

    def _is_free(self, target: Path) -> bool:
        """Whether nothing has this name, nor is a file where a folder would be needed."""
        if target.exists() or target.name == UNPACKING:
            return False
        try:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            return False
        return True

    def _copy(self, source: _Readable, target: Path, claimed_bytes: int, name: str) -> None:
        """One member; what was read of a damaged one stays, what passes a limit does not.

        Raises:
            PastLimitError: a limit was passed.
            OSError: it can't be written.
        """
        budget = self.budget
        try:
            budget.begin(claimed_bytes)
            fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "wb", buffering=0) as file:
                end = zeros = 0
                try:
                    while chunk := source.read(CHUNK_BYTES):
                        end += len(chunk)
                        written = chunk.rstrip(b"\0")
                        # Zeros are a hole, and free while they may be a log's unwritten end.
                        counted = zeros + len(written) if written else 0
                        zeros = len(chunk) - len(written) + (0 if written else zeros)
                        if zeros > ROOM_BYTES_MAX:
                            counted, zeros = counted + zeros, 0
                        budget.take(len(chunk), counted)
                        if written:
                            file.seek(end - len(chunk))
                            _write(file, written)
                finally:
                    file.truncate(end)
        except PastLimitError:
            with suppress(OSError):
                target.unlink()
            del self.taken.names[target]
            raise

    def _damaged(self, name: str, error: BaseException) -> None:
        self.taken.told.append(
            f"{self.shown}!{printable(name)[:200]} is damaged, and read as far as it goes: {_reason(error)}"
        )


def _bytes(name: str) -> int:
    return len(name.encode("utf-8", "surrogateescape"))


def _write(file: IO[bytes], data: bytes) -> None:
    """All of it: a raw file on a disk that is almost full takes a part and says nothing."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _skip(tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    """Read over the bytes of a regular file that is left out, in pieces."""
    source = tar.extractfile(member) if member.isreg() and not member.sparse else None
    if source is not None:
        while source.read(CHUNK_BYTES):
            pass


def _reason(error: BaseException) -> str:
    return printable(" ".join(str(error).split()))[:200] or type(error).__name__
