"""Whatever lies at the places that were given: our own runs, and a dossier of everybody else's evidence.

    path -> file -> ours?     its folder is a run          who reads it decides what it means
                    archive?  what is in it, as files
                    else      asked by content, never by name, whose it is; one that nobody knows is listed

Owns the walk, who a file is given to, and what a row lacks: its rank, by what the file says, by its name or
by the process that it is of; and the number of the look that it was taken in. Files come in the order in
which they were given, and inside a folder by name, numbers as numbers. No clock is read.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tracer.archives import ArchiveError, is_archive, opened
from tracer.errors import HitsError, LogError
from tracer.importers.dossier import Dossier, FileRead, Who
from tracer.importers.foreign import FORMATS as HITS_FORMATS
from tracer.importers.seating import Seats
from tracer.importers.sniff import File, printable, sniff
from tracer.places import META, SEGMENT
from tracer.sinks import SUMMARY_NAME

HEAD_BYTES = 1 << 16
# A server's log says at its end what went wrong, and at its start nothing that tells it.
TAIL_BYTES = 1 << 18
DEPTH_MAX = 8
FILES_MAX = 10_000
META_BYTES_MAX = 1 << 12
COPY_BYTES_MAX = 64 << 20
DIVERGENCE = b"Found rank divergence for "
OURS = b'"format":"hicache.'
SIDE_FILE = re.compile(
    r"rank\d{4,}\.[A-Za-z0-9_-]+\.checkpoints|rank\d{4,}\.signals\.json|freeze|bundle\.json|.*\.threads\.json|"
    r"snapshot(?:-\d+)?(?:\.json)?"
)
EMPTY = "it is empty"
PLAIN_LOG = "process_log"
FROZEN = re.compile(r"frozen-.+")
STORED = ((b"DUCK", 8, "a database of DuckDB"), (b"PAR1", 0, "a table of Parquet"))
NUMBERS = re.compile(r"([0-9]+)")


class Importer(Protocol):
    """A module of this package that reads evidence; see `dossier` for what it makes of it."""

    FORMAT: str
    VERSION: int

    def votes(self, head: bytes) -> int:
        """How sure it is that a file which begins so is its own; 0 where it is not."""

    def read(self, file: File, index: int, into: Dossier) -> None:
        """Add rows, and tell in `into.files[index]` what became of the file."""


@dataclass(slots=True)
class Gathered:
    """What was found.

    Attributes:
        runs: folders with our logs, or files with one; in the order in which they were found.
        names: folder of an archive's content -> what to call it in a command: the archive.
        divergences: logs with lines of SGLang's own rank consensus checker.
        stored: what was loaded from logs and kept, each in words.
        processes: (host, pid) -> rank, as our side files say.
        notes: what was left out, and why.
    """

    dossier: Dossier = field(default_factory=Dossier)
    runs: list[Path] = field(default_factory=list)
    names: dict[Path, Path] = field(default_factory=dict)
    divergences: list[File] = field(default_factory=list)
    stored: list[str] = field(default_factory=list)
    processes: dict[tuple[str, int], int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    side_files: int = 0

    @property
    def is_nothing(self) -> bool:
        """Whether nothing that was found is evidence, or could be read."""
        return not (self.runs or self.divergences or self.has_foreign)

    @property
    def has_foreign(self) -> bool:
        """Whether any file of another program told something."""
        own = self.dossier
        has_rows = bool(own.dumps or own.stacks or own.lines or own.statuses or own.polls)
        return has_rows or any(file.format is not None and not file.refused for file in own.files)


@contextmanager
def gathered(
    paths: Sequence[Path], *, whole: Sequence[Importer], lines: Sequence[Importer]
) -> Iterator[Gathered]:
    """All evidence at these paths; files of archives are there for the block's time.

    Args:
        whole: importers of whose format a file is from end to end.
        lines: importers that each take their lines of a file, whoever takes the others.

    Raises:
        LogError: a path is not there, or can't be looked at.
    """
    found = Gathered()
    with ExitStack() as stack:
        walk = _Walk(found, stack)
        for path in dict.fromkeys(paths):
            walk.given(path)
        reading = _Reading(found, whole, lines)
        for file in walk.files:
            reading.file(file)
        reading.settle()
        yield found


class _Walk:
    """From paths to files, each once; our runs and archives on the way."""

    def __init__(self, found: Gathered, stack: ExitStack) -> None:
        self.files: list[File] = []
        self._found = found
        self._stack = stack
        self._seen: set[tuple[int, int]] = set()
        # A copy of a file under the same name below another place is the same look at the same process.
        self._copies: dict[tuple[str, int], list[Path]] = {}
        self._is_full = False

    def given(self, path: Path) -> None:
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            raise LogError(f"no such file or folder: {path}") from None
        except (OSError, ValueError) as error:
            said = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise LogError(f"{str(path)[:200]} can't be read: {said}") from None
        if stat.S_ISDIR(mode):
            self._folder(path, lambda file: _called(path, file), root=path)
        elif stat.S_ISREG(mode):
            self._file(path, printable(path.name), root=path.parent, is_given=True)
        else:
            raise LogError(f"{path} is neither a file nor a folder")

    def _folder(self, place: Path, called: Callable[[Path], str], *, root: Path, depth: int = 0) -> None:
        for folder, folders, names in os.walk(place):
            own = Path(folder)
            is_run = any(SEGMENT.fullmatch(name) for name in names)
            if is_run:
                self._run(own, root)
            is_deep = len(own.relative_to(place).parts) >= DEPTH_MAX
            folders[:] = sorted((name for name in folders if not name.startswith(".")), key=natural)
            if is_run and (frozen := [name for name in folders if FROZEN.fullmatch(name)]):
                self._found.notes.append(
                    f"{called(own / frozen[0])}: copies that were kept of the run's files, not read"
                )
                folders[:] = [name for name in folders if name not in frozen]
            if is_deep and folders:
                self._found.notes.append(f"{called(own)}: folders below it are not looked into")
                folders.clear()
            for name in sorted(names, key=natural):
                if not name.startswith("."):
                    self._file(own / name, called(own / name), root=root, depth=depth)

    def _run(self, folder: Path, root: Path) -> None:
        real = folder.resolve()
        if all(run.resolve() != real for run in self._found.runs):
            self._found.runs.append(folder)
            if root in self._found.names:
                self._found.names[folder] = self._found.names[root]

    def _file(self, path: Path, name: str, *, root: Path, is_given: bool = False, depth: int = 0) -> None:
        try:
            told = path.stat()
        except OSError:
            self._found.notes.append(f"{name}: can't be looked at")
            return
        if not stat.S_ISREG(told.st_mode) or (told.st_dev, told.st_ino) in self._seen:
            return
        self._seen.add((told.st_dev, told.st_ino))
        if self._is_side_file(path, name, is_given=is_given):
            return
        if depth < 1 and is_archive(path):
            self._archive(path, name)
            return
        if self._is_copy(path, told.st_size, root):
            self._found.notes.append(f"{name}: the same bytes under the same name were given, counted once")
            return
        if len(self.files) >= FILES_MAX:
            if not self._is_full:
                self._found.notes.append(
                    f"more than {FILES_MAX:,} files: {name} and those behind it are not read"
                )
            self._is_full = True
            return
        self.files.append(File(path, name))

    def _is_side_file(self, path: Path, name: str, *, is_given: bool) -> bool:
        """Whether it is part of our own runs."""
        if SEGMENT.fullmatch(path.name):
            if is_given:
                self._run(path.parent, path.parent)
            return True
        if path.name == SUMMARY_NAME or META.fullmatch(path.name) or SIDE_FILE.fullmatch(path.name):
            self._found.side_files += 1
            if META.fullmatch(path.name):
                self._process(path)
            if is_given and path.name == SUMMARY_NAME:
                self._found.notes.append(f"{name}: a run's summary; its folder has the logs")
            return True
        return False

    def _process(self, meta: Path) -> None:
        """Which process was which rank."""
        try:
            with meta.open("rb") as file:
                told = json.loads(file.read(META_BYTES_MAX))
            host, pid = told["host"], told["pid"]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return
        if type(host) is str and type(pid) is int:
            rank = int(NUMBERS.findall(meta.name)[0])
            self._found.processes[host, pid] = rank

    def _archive(self, path: Path, name: str) -> None:
        try:
            inside = self._stack.enter_context(opened(path))
        except ArchiveError as error:
            index = self._found.dossier.begin(name)
            self._found.dossier.files[index].refused = error.what
            return
        self._found.notes += inside.notes
        self._found.names[inside.folder] = path
        names = inside.names
        self._folder(
            inside.folder,
            lambda file: names.get(file) or f"{name}!{file.relative_to(inside.folder)}",
            root=inside.folder,
            depth=1,
        )

    def _is_copy(self, path: Path, size: int, root: Path) -> bool:
        own = (str(path.relative_to(root)), size)
        others = self._copies.setdefault(own, [])
        is_small = size <= COPY_BYTES_MAX
        is_copy = is_small and any(_digest(other) == _digest(path) for other in others)
        others.append(path)
        return is_copy


class _Reading:
    """From files to rows."""

    def __init__(self, found: Gathered, whole: Sequence[Importer], lines: Sequence[Importer]) -> None:
        self._found = found
        self._dossier = found.dossier
        # One dump may be there twice, as a pickle and as JSON, alone and with those of all ranks: one look.
        self._forms: dict[int, tuple[bool, bool]] = {}
        self._whole = whole
        self._lines = lines
        self._seats = Seats(found.processes, found.notes)

    def file(self, file: File) -> None:
        index = self._dossier.begin(file.name)
        read = self._dossier.files[index]
        try:
            head = _head(file)
        except HitsError as error:
            read.refused = _one_line(error)
            return
        if not head:
            read.notes.append(EMPTY)
            return
        if OURS in head[:4096].replace(b" ", b""):
            self._dossier.files.pop()
            self._found.runs.append(file.path)
            return
        if stored := next((told for magic, at, told in STORED if head[at:].startswith(magic)), None):
            self._dossier.files.pop()
            self._found.stored.append(f"{file.name} is {stored}")
            return
        self._look(file, index, read, head)

    def _look(self, file: File, index: int, read: FileRead, head: bytes) -> None:
        begin = self._counts()
        votes = [(one.votes(head), -number, one) for number, one in enumerate(self._whole)]
        best = max(votes, default=(0, 0, None), key=lambda vote: vote[:2])
        try:
            if best[0] > 0 and best[2] is not None:
                best[2].read(file, index, self._dossier)
            elif _is_text(head):
                self._read_lines(file, index, read, head)
        except (HitsError, OSError) as error:
            read.refused = _one_line(error)
        except RecursionError:
            read.refused = "it is nested too deep"
        read = self._dossier.files[index]
        read.refused = _without_name(file, read.refused)
        if read.format is None and not read.refused:
            self._name_stranger(file, read)
        self._seats.fill(self._dossier, index, begin)
        self._forms[index] = (head.startswith(b"\x80"), len(self._dossier.dumps) > begin[0] + 1)

    def _read_lines(self, file: File, index: int, read: FileRead, head: bytes) -> None:
        """All importers of lines, where one of them knows some; what nobody took is told."""
        tail = _tail(file, len(head))
        if _holds(file, DIVERGENCE):
            self._found.divergences.append(file)
            read.format, read.version = "sglang_rank_divergence", 1
        if not any(one.votes(head) > 0 or (tail and one.votes(tail) > 0) for one in self._lines):
            return
        reads = [FileRead(file.name) for _ in self._lines]
        formats = [read.format] if read.format else []
        for one, own in zip(self._lines, reads, strict=True):
            self._dossier.files[index] = own
            begin = self._counts()
            one.read(file, index, self._dossier)
            if self._counts() != begin or (own.format and own.records > own.unparsed):
                formats.append(own.format or one.FORMAT)
        self._dossier.files[index] = read
        # That a text is somebody's log is news only where nothing else is known of it.
        told = [name for name in dict.fromkeys(formats) if name != PLAIN_LOG] or formats
        read.format = "+".join(told) or None
        read.version = 1
        read.records = max(own.records for own in reads)
        # Each took lines that the others did not: what is left was nobody's.
        read.unparsed = max(0, read.records - sum(own.records - own.unparsed for own in reads))
        read.notes = list(dict.fromkeys(note for own in reads for note in own.notes))
        refused = next((own.refused for own in reads if own.refused), None)
        if formats and refused:
            read.notes.append(f"read in part: {refused}")
        else:
            read.refused = refused

    def _name_stranger(self, file: File, read: FileRead) -> None:
        """A file that says nothing of a stall may be good for something else."""
        try:
            known = sniff(file, HITS_FORMATS)
        except (HitsError, OSError):
            return
        if known is not None:
            read.notes.append(f"{known.FORMAT}: it tells of cache hits (hicache hits), not of a stall")

    def _counts(self) -> tuple[int, ...]:
        own = self._dossier
        return (len(own.dumps), len(own.stacks), len(own.lines), len(own.statuses), len(own.polls))

    def settle(self) -> None:
        self._seats.settle(self._dossier)
        number_looks(self._dossier, self._forms)


Row = TypeVar("Row", bound=Any)


def number_looks(dossier: Dossier, forms: Mapping[int, object]) -> None:
    """Count the looks at each process as they were found; two tools that look at once see no two looks."""

    def numbered(rows: list[Row], process: Callable[[Row], object]) -> list[Row]:
        counts: dict[object, int] = {}
        looks: dict[object, int] = {}
        renumbered = []
        for row in rows:
            own = (process(row), dossier.files[row.at.file].format, forms.get(row.at.file))
            look = (own, row.at.file, row.sample)
            if look not in looks:
                looks[look] = counts.get(own, 0)
                counts[own] = looks[look] + 1
            renumbered.append(row if row.sample == looks[look] else replace(row, sample=looks[look]))
        return renumbered

    def by_who(row: Row) -> object:
        who: Who = row.who
        return who.rank if who.rank is not None else (who.host, who.pid, "" if who.pid else row.at.file)

    dossier.dumps = numbered(dossier.dumps, by_who)
    dossier.stacks = numbered(dossier.stacks, by_who)
    dossier.statuses = numbered(dossier.statuses, by_who)
    dossier.polls = numbered(dossier.polls, lambda row: row.communicator)


def natural(name: str) -> list[tuple[int, int, str]]:
    """By name, numbers as numbers: `look2` comes before `look10`."""
    parts = NUMBERS.split(name)
    return [(0, int(part), "") if at % 2 else (1, 0, part) for at, part in enumerate(parts)]


def _called(root: Path, file: Path) -> str:
    return printable(str(file.relative_to(root)))


def _head(file: File) -> bytes:
    """The first bytes, unwrapped.

    Raises:
        HitsError: it can't be read or unwrapped.
    """
    with file.opened() as stream:
        return stream.read(HEAD_BYTES)


def _tail(file: File, head_bytes: int) -> bytes:
    """The last bytes of a file that is longer than its head, as it lies on disk; nothing of a packed one."""
    try:
        with file.path.open("rb") as raw:
            size = raw.seek(0, os.SEEK_END)
            raw.seek(0)
            if size <= head_bytes or raw.read(2) == b"\x1f\x8b":
                return b""
            raw.seek(max(head_bytes, size - TAIL_BYTES))
            return raw.read(TAIL_BYTES)
    except OSError:
        return b""


def _holds(file: File, words: bytes) -> bool:
    """Whether a text is anywhere in a file.

    Raises:
        HitsError: it is larger, or better compressed, than what is read.
    """
    rest = b""
    for chunk in file.chunks():
        if words in rest + chunk:
            return True
        rest = chunk[-len(words) :]
    return False


def _is_text(head: bytes) -> bool:
    return bool(head) and b"\0" not in head[:4096] and not head.startswith(b"\x80")


def _digest(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return blake2b(file.read(COPY_BYTES_MAX), digest_size=16).digest()
    except OSError:
        return b""


def _without_name(file: File, refused: str | None) -> str | None:
    """Why a file was refused, where its name and that it was are told beside it."""
    for told in (f"{file.name}: ", f"{file.path.name}: ", f"{file.name} ", f"{file.path.name} ", "refused: "):
        refused = refused.removeprefix(told) if refused else refused
    return refused


def _one_line(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else getattr(error, "what", None)
    return " ".join(str(text or error).split())
