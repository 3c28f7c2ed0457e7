"""A folder of page files, shared with other ranks, other processes and other people's files.

Only files whose name this rank writes and whose footer carries this configuration's identity are ever
removed. Nothing is followed out of the folder: names have no separators and links are not opened.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from hicache.errors import StorageError
from hicache.storage import page_file
from hicache.storage.names import Names
from hicache.storage.page_file import Seen

EXTENSION = ".bin"
TEMP_PREFIX, TEMP_EXTENSION = ".hicache-", ".tmp"
# SHA-256 as hexadecimal, what pages are called in earnest.
LONGEST_HASH = "0" * 64


@dataclass(frozen=True, slots=True)
class OwnFile:
    """One of this rank's pages on disk."""

    stem: str
    seen: Seen


class Folder:
    """Pages by stem in one folder."""

    def __init__(self, path: str, names: Names, identity: bytes) -> None:
        # Absolute, so that a process that changes its working directory keeps its pages.
        self.path = os.path.abspath(path)
        self.names = names
        self._identity = identity

    def make(self) -> None:
        """Make the folder if it is missing. Any number of ranks may do so at once.

        Raises:
            StorageError: it can't be made or read, or its file system has no room for a page's name.
        """
        try:
            os.makedirs(self.path, exist_ok=True)
            name_bytes_max = os.pathconf(self.path, "PC_NAME_MAX")
        except (OSError, ValueError) as error:
            raise StorageError(
                f"storage folder {self.path}: {_reason(error)}; name another folder"
            ) from error
        if not os.access(self.path, os.R_OK | os.X_OK):
            raise StorageError(f"storage folder {self.path}: no permission to read it; name another folder")
        name_bytes = len(os.fsencode(self._name(self.names.stem("kv", LONGEST_HASH))))
        if name_bytes > name_bytes_max:
            raise StorageError(
                f"storage folder {self.path}: a page's file name takes {name_bytes} bytes, its file system "
                f"allows {name_bytes_max}; serve the model under a shorter name"
            )

    def look(self, stem: str) -> Seen:
        return page_file.look(self._path(stem), self._identity)

    def load(self, stem: str) -> tuple[Seen, bytes]:
        return page_file.load(self._path(stem), stem, self._identity)

    def store(self, stem: str, page: bytes, *, mtime_ns: int | None, fsync: bool) -> None:
        """Write a page over whatever is in its place.

        Raises:
            OSError: it is not there now.
        """
        try:
            self._store(stem, page, mtime_ns, fsync)
        except (FileNotFoundError, BlockingIOError):
            # Somebody has removed the folder since it was made, or a rank that is just starting took the temp
            # file for one left over, in the moment before it was locked.
            os.makedirs(self.path, exist_ok=True)
            self._store(stem, page, mtime_ns, fsync)

    def sync(self) -> bool:
        """Put the folder's entries on disk, after files were synced themselves."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return False
        try:
            os.fsync(fd)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def date(self, stem: str, mtime_ns: int) -> None:
        """Say that a page was used; a page that has gone, or can't be dated, stays as it is."""
        with contextlib.suppress(OSError):
            os.utime(self._path(stem), ns=(mtime_ns, mtime_ns), follow_symlinks=False)

    def own_files(self) -> list[OwnFile]:
        """Every page of this rank, damaged ones included, in no order."""
        found = []
        for name in self._listing():
            stem = name.removesuffix(EXTENSION)
            if stem != name and self.names.owns(stem):
                seen = self.look(stem)
                if seen.state in ("there", "damaged"):
                    found.append(OwnFile(stem, seen))
        return found

    def remove(self, file: OwnFile) -> bool:
        """Remove a file unless another has been put in its place since it was seen."""
        try:
            facts = os.stat(self._path(file.stem), follow_symlinks=False)
            if facts.st_ino != file.seen.inode:
                return False
            os.unlink(self._path(file.stem))
        except OSError:
            return False
        return True

    def remove_left_overs(self) -> int:
        """Remove temp files whose writers are gone, of any rank; how many there were."""
        removed = 0
        for name in self._listing():
            if not name.startswith(TEMP_PREFIX) or not name.endswith(TEMP_EXTENSION):
                continue
            path = os.path.join(self.path, name)
            if page_file.is_left_over(path):
                with contextlib.suppress(OSError):
                    os.unlink(path)
                    removed += 1
        return removed

    def bytes_free(self) -> int:
        """Bytes that this user may still write on the file system; without an answer, no bound is known."""
        try:
            facts = os.statvfs(self.path)
        except OSError:
            return 1 << 62
        return facts.f_bavail * facts.f_frsize

    def _store(self, stem: str, page: bytes, mtime_ns: int | None, fsync: bool) -> None:
        # Chance in a name that no record has: two containers may have the same process ids.
        temp_path = os.path.join(self.path, f"{TEMP_PREFIX}{uuid.uuid4().hex}{TEMP_EXTENSION}")
        page_file.store(
            self._path(stem), temp_path, stem, page, self._identity, mtime_ns=mtime_ns, fsync=fsync
        )

    def _listing(self) -> Iterator[str]:
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    yield entry.name
        except OSError:
            # A folder that has gone, or can't be read any more, has no files.
            return

    def _path(self, stem: str) -> str:
        return os.path.join(self.path, self._name(stem))

    def _name(self, stem: str) -> str:
        return stem + EXTENSION


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
