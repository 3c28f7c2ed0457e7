"""Where each process's log ends: a rank that says nothing while all others report errors is evidence too.

    log_end    one writer's last line in one file      first

Writers are told apart by what they or their launcher put in front of a line; a file in which nobody is told
is one writer's. New ones are looked for in a sixteenth of a large file: who writes at all writes often. It
reads, and judges nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tracer.errors import HitsError
from tracer.importers.dossier import At, Dossier, Line, Who
from tracer.importers.launcher_lines import GLOG_HEAD, PLACE, Reading, refused, taken_apart
from tracer.importers.rank_divergence import DATE
from tracer.importers.sniff import COLOURS, File

FORMAT = "process_log"
VERSION = 1
WRITERS_MAX = 4_096
# New writers are looked for in all of so many MiB, and in so much of each that follows.
PARTS_WHOLE = 16
SEARCHED_BYTES = 1 << 16

TAGGED = re.compile(rb"\[(?:" + DATE + rb")?((?: ?" + PLACE + rb")+)\] ")
NUMBERED = re.compile(
    rb"\[rank\d{1,6}\]:|\(rank ?\d{1,6}\):|\[\d+,\d{1,6}\]<std(?:err|out)>:|\[default\d{1,6}\]:"
)
LOG_LIKE = re.compile(
    rb"^(?:\[?" + DATE + rb"|" + GLOG_HEAD + rb"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|Traceback \()",
    re.MULTILINE,
)


@dataclass(slots=True)
class _Writer:
    who: Who
    first: int
    last: int


def votes(head: bytes) -> int:
    if TAGGED.search(head) or NUMBERED.search(head):
        return 2
    return int(LOG_LIKE.search(COLOURS.sub(b"", head)) is not None)


def read(file: File, index: int, into: Dossier) -> None:
    reading = Reading(file, index, into)
    writers: dict[bytes, _Writer] = {}
    error: HitsError | OSError | None = None
    try:
        for part, (first, block, limit) in enumerate(reading.blocks()):
            searched = limit if part < PARTS_WHOLE else min(limit, SEARCHED_BYTES)
            _look(first, block, limit, searched, writers)
    except (HitsError, OSError) as failed:
        error = failed
    own = [*writers.values()]
    if not own and reading.lines:
        own = [_Writer(Who(), 1, reading.lines)]
    for writer in own:
        fields = {"first": writer.first, "lines": 0}
        into.lines.append(Line(writer.who, "log_end", fields, At(index, writer.last)))
    reading.settle(FORMAT, VERSION)
    if own and error is None:
        into.files[index].format, into.files[index].version = FORMAT, VERSION
    if error is not None:
        refused(into, index, error)


def _look(first: int, block: bytes, limit: int, searched: int, writers: dict[bytes, _Writer]) -> None:
    """The writers of one part of a log, and the last line of each."""
    for pattern in (TAGGED, NUMBERED):
        for found in pattern.finditer(block, 0, searched):
            # What tells a writer is what stands behind the time.
            mark = found[1] + b"] " if found.re is TAGGED else found[0]
            if mark not in writers and len(writers) < WRITERS_MAX:
                (text,) = taken_apart(0, found[0])
                number = first + block.count(b"\n", 0, found.start())
                writers[mark] = _Writer(text.who, number, number)
    ends = {}
    for mark in writers:
        end = block.rfind(mark, 0, limit)
        # A shorter mark may be the end of a longer one.
        if end >= 0 and not any(other != mark and other.endswith(mark) for other in writers):
            ends[mark] = end
    number, at = first, 0
    for mark, end in sorted(ends.items(), key=lambda item: item[1]):
        number += block.count(b"\n", at, end)
        at = end
        writers[mark].last = number
