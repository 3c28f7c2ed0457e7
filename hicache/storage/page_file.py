"""One page in one file: how it is written, read and told from what is not a page of ours.

```
0                          page_bytes                 + 40
|- the page, as it is -----|- footer -----------------|
                           magic 8, version 4, crc 4, page_bytes 8, identity 16 (little-endian)
```

The footer comes last, so that a file that was cut short has none, the page starts at offset 0, aligned, and a
reader that knows nothing of footers finds the page where it expects it. The crc covers the file's name, the
rest of the footer and the page: also a good page under a wrong name is damage. A CRC-32, because it finds
every flipped byte and reads memory at 3 to 5 GB/s; a cryptographic digest would be the slowest part of a read
(1 GB/s) and stop nobody who may write to the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import zlib
from dataclasses import dataclass
from typing import Literal

MAGIC = b"HICACHE\n"
VERSION = 1
# magic, version, crc, page_bytes, identity
FOOTER = struct.Struct("<8sIIQ16s")
READ_BYTES_MAX = 1 << 30

# there    a page of this configuration, as far as was looked
# damaged  it was one, but its length or its bytes don't fit
# absent   no file, or none that can be opened
# unknown  something else is in its place: a file cut short, another configuration's page, a folder, a link
State = Literal["there", "absent", "unknown", "damaged"]


@dataclass(frozen=True, slots=True)
class Seen:
    """A file in a page's place, as it was when somebody looked."""

    state: State
    size_bytes: int = 0
    inode: int = 0
    mtime_ns: int = 0


ABSENT = Seen("absent")


def look(path: str, identity: bytes) -> Seen:
    """What a look at size and footer shows; the page itself is not read."""
    try:
        fd = _open(path)
    except OSError as error:
        return _not_opened(error)
    try:
        return _look(fd, identity)[0]
    except OSError:
        return Seen("unknown")
    finally:
        os.close(fd)


def load(path: str, name: str, identity: bytes) -> tuple[Seen, bytes]:
    """The page, checked; b"" unless it is there."""
    try:
        fd = _open(path)
    except OSError as error:
        return _not_opened(error), b""
    try:
        seen, crc = _look(fd, identity)
        if seen.state != "there":
            return seen, b""
        page = _read(fd, seen.size_bytes - FOOTER.size)
        if _crc(name, page, identity) != crc:
            return Seen("damaged", seen.size_bytes, seen.inode, seen.mtime_ns), b""
        return seen, page
    except OSError:
        return Seen("unknown"), b""
    finally:
        os.close(fd)


def store(
    path: str, temp_path: str, name: str, page: bytes, identity: bytes, *, mtime_ns: int | None, fsync: bool
) -> None:
    """Put the page at `path`, whole or not at all: readers see the old file or the new one.

    What was there is replaced, unless it is a folder; a link is replaced, not followed. The temp file is
    locked while its writer lives, see `is_left_over`.

    Args:
        temp_path: a name in the same folder that nobody else will ever use.
        mtime_ns: what the file shall be dated, None for now.
        fsync: return only when the bytes are on disk; the folder's entry is the caller's to sync.
    Raises:
        OSError: nothing was written.
    """
    fd = os.open(temp_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        _lock(fd)
        crc = _crc(name, page, identity)
        for part in (page, FOOTER.pack(MAGIC, VERSION, crc, len(page), identity)):
            _write(fd, part)
        if mtime_ns is not None:
            # Where files can't be dated, they are evicted in the order in which they were written.
            with contextlib.suppress(OSError):
                os.utime(fd, ns=(mtime_ns, mtime_ns))
        if fsync:
            os.fsync(fd)
        os.replace(temp_path, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp_path)
        raise
    finally:
        os.close(fd)


def is_left_over(temp_path: str) -> bool:
    """Whether a temp file's writer is gone: its lock went with it, also when it was killed."""
    try:
        fd = os.open(temp_path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)


def _open(path: str) -> int:
    # Non-blocking, because a pipe in a page's place would wait for its writer for ever.
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)


def _not_opened(error: OSError) -> Seen:
    return Seen("unknown") if error.errno in (errno.ELOOP, errno.ENXIO) else ABSENT


def _look(fd: int, identity: bytes) -> tuple[Seen, int]:
    """(what the file is by size and footer, the crc it claims)."""
    facts = os.fstat(fd)
    size = facts.st_size
    where = (size, facts.st_ino, facts.st_mtime_ns)
    if not stat.S_ISREG(facts.st_mode) or size < FOOTER.size:
        return Seen("unknown", *where), 0
    footer = os.pread(fd, FOOTER.size, size - FOOTER.size)
    if len(footer) < FOOTER.size:
        return Seen("unknown", *where), 0
    magic, version, crc, page_bytes, written_by = FOOTER.unpack(footer)
    if (magic, version, written_by) != (MAGIC, VERSION, identity):
        return Seen("unknown", *where), 0
    return Seen("there" if page_bytes + FOOTER.size == size else "damaged", *where), crc


def _crc(name: str, page: bytes, identity: bytes) -> int:
    head = name.encode() + FOOTER.pack(MAGIC, VERSION, 0, len(page), identity)
    return zlib.crc32(page, zlib.crc32(head))


def _read(fd: int, size_bytes: int) -> bytes:
    """Up to `size_bytes` from the start; fewer when the file has become shorter meanwhile."""
    parts = []
    while size_bytes and (part := os.read(fd, min(size_bytes, READ_BYTES_MAX))):
        parts.append(part)
        size_bytes -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _write(fd: int, data: bytes) -> None:
    """All of it: a write to a nearly full disk may take a part and say so."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _lock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        # A file system without locks. `is_left_over` can't lock there either and leaves all temp files alone.
        return
