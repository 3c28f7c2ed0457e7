"""What other programs' files tell of a job that stands still: rows with their provenance, no conclusion.

    flight recorder dumps -> dumps        server and library logs -> lines, statuses
    stack dumps           -> stacks       polls of NCCL RAS       -> polls

Every row says from which file and which line or record of it. Rows keep the order in which they were found;
`sample` numbers the looks at one process in that order, and no clock orders two ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

State = Literal["scheduled", "started", "completed"]
# What a thread does in the innermost frame that tells; `running` where nothing tells.
Wait = Literal["collective", "queue", "device", "gil", "storage", "lock", "running", "unknown"]


class At(NamedTuple):
    """Where a row comes from: `file` counts in `Dossier.files`; `record` lines from 1, or records from 0."""

    file: int
    record: int


@dataclass(slots=True)
class FileRead:
    """One file and what became of it.

    Attributes:
        name: as the user can find it: relative to what was given, `bundle.zip!dir/file` inside an archive.
        format: of the importer; None where nobody knows the file.
        version: of the importer, counted up when it reads the same bytes otherwise.
        records: lines or records looked at.
        unparsed: those of them that said nothing this importer knows.
        refused: why nothing of it was read.
    """

    name: str
    format: str | None = None
    version: int = 0
    records: int = 0
    unparsed: int = 0
    refused: str | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Who:
    """A process, as far as a source tells; None and empty where it does not.

    Attributes:
        rank: global.
        places: dimension -> its rank, such as `{"tp": 1, "pp": 0}`, in lower case.
    """

    rank: int | None = None
    pid: int | None = None
    host: str = ""
    places: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """A process group: names are used again for other members, so all three tell it.

    `members` are global ranks in group order; None where the dump does not say.
    """

    name: str
    description: str
    members: tuple[int, ...] | None


class Call(NamedTuple):
    """One entry of a flight recorder.

    Attributes:
        seq: collectives of this group so far; of a point-to-point call, calls of that kind so far.
        shape: op, input and output sizes, data types: equal text, equal call.
        is_retired: the watchdog has let go of it; with gloo, that it has ended.
        stack: the caller's frames outside of torch, innermost first; empty where not recorded.
    """

    seq: int
    op: str
    shape: str
    state: State
    is_retired: bool
    is_p2p: bool
    at: At
    thread: str = ""
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """One rank's place in one group, -1 where it has none.

    Attributes:
        first, last: sequence numbers that the ring still holds; -1 where it holds none.
        enqueued, started, completed: the newest such collective, from the dump's own status or its entries.
        calls: entries worth comparing with other ranks', by sequence number.
    """

    group: Group
    first: int
    last: int
    enqueued: int
    started: int
    completed: int
    at: At
    calls: Mapping[int, Call] = field(default_factory=dict)
    p2p: Sequence[Call] = ()


@dataclass(frozen=True, slots=True)
class Dump:
    """One rank's flight recorder at one time.

    Attributes:
        has_entries: whether there is any entry: an idle rank of an only-active dump has none.
        entry_count: entries in the dump, whether kept in `groups` or not.
        form: how it was written down; equal dumps in two forms are most likely one, converted.
        are_calls_left_out: there is no list of entries at all, so that none means nothing.
    """

    who: Who
    sample: int
    version: str
    backend: str
    has_entries: bool
    entry_count: int
    groups: Sequence[Progress]
    at: At
    notes: tuple[str, ...] = ()
    form: str = ""
    are_calls_left_out: bool = False


class Frame(NamedTuple):
    func: str
    # As the source wrote it; shortened only where it is shown.
    file: str
    line: int
    is_native: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """One thread of one process. Frames are innermost first, whatever the source's order.

    Attributes:
        thread: its name, empty where not told.
        wait: what it is in, by its frames.
        signature: frames of user code, innermost first, as `package/file.py:line func`: equal, same place.
    """

    who: Who
    sample: int
    thread_id: int
    thread: str
    state: str
    frames: tuple[Frame, ...]
    wait: Wait
    signature: tuple[str, ...]
    at: At


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that a log says.

    Attributes:
        event: what, in our words, such as `watchdog_timeout`; each importer lists its own.
        time_ns, time_error_ns: the source's clock, for people; 0 where it has none.
        fields: the values in the line; no prompt text, no token.
    """

    who: Who
    event: str
    fields: Mapping[str, Any]
    at: At
    time_ns: int = 0
    time_error_ns: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """What one rank's scheduler said that it runs, and what it queues: request ids in its order."""

    who: Who
    sample: int
    running: tuple[str, ...]
    queued: tuple[str, ...]
    at: At


@dataclass(frozen=True, slots=True)
class Poll:
    """One look of NCCL's own monitor at one communicator.

    Attributes:
        time_ns: the poll's own clock: two polls of one monitor may be put in order by it.
        counts: rank -> op -> how many it has called.
        states: rank -> words for what is wrong with it: `unresponsive`, `dead`, `async_error`, ...
    """

    sample: int
    communicator: str
    size: int
    members: Mapping[int, Who]
    counts: Mapping[int, Mapping[str, int]]
    states: Mapping[int, tuple[str, ...]]
    time_ns: int
    at: At


@dataclass(slots=True)
class Dossier:
    """All that was found, in the order in which files came."""

    files: list[FileRead] = field(default_factory=list)
    dumps: list[Dump] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    statuses: list[Status] = field(default_factory=list)
    polls: list[Poll] = field(default_factory=list)

    def begin(self, name: str) -> int:
        """Start on a file; its number."""
        self.files.append(FileRead(name))
        return len(self.files) - 1

    def file_of(self, at: At) -> str:
        return self.files[at.file].name

    def ranks(self) -> list[int]:
        """Every rank that some row is of."""
        rows: Iterable[Dump | Stack | Line | Status] = [
            *self.dumps,
            *self.stacks,
            *self.lines,
            *self.statuses,
        ]
        return sorted({row.who.rank for row in rows if row.who.rank is not None})
