"""Stacks as `py-spy dump --json` writes them: a list with an element for each thread, innermost frame first.

`locals` is never decoded: prompts stand there. A thread that is not what it should be is counted, and the
others are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from tracer.errors import HitsError
from tracer.importers.dossier import Dossier, Frame, Who
from tracer.importers.sniff import File, is_too_deep
from tracer.importers.stack_lines import (
    ID_MAX,
    LINE_MAX,
    PID_MAX,
    STACK_FRAMES_MAX,
    Sheet,
    Thread,
    places_of,
    short,
)
from tracer.importers.stacks import MAIN_THREAD
from tracer.importers.stacks_pyspy import NATIVE_SOURCE, TITLE

FORMAT = "py_spy_json"
VERSION = 1
# A thread is some 30 kB of it.
BYTES_MAX = 64 << 20
KEYS = (b'"thread_id"', b'"owns_gil"', b'"frames"')
# Two dumps that were written into one file.
BETWEEN = re.compile(rb"(?<=\n\])\s*(?=\[)")


class _Frame(msgspec.Struct):
    name: str = ""
    filename: str = ""
    line: int = 0


class _Process(msgspec.Struct):
    pid: int = 0
    command_line: str = ""


class _Thread(msgspec.Struct):
    pid: int
    thread_id: int
    frames: list[_Frame]
    thread_name: str | None = None
    os_thread_id: int | None = None
    active: bool = False
    owns_gil: bool = False
    process_info: _Process | None = None


_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_THREAD = msgspec.json.Decoder(_Thread)


def votes(head: bytes) -> int:
    return 100 if head.lstrip()[:1] == b"[" and all(key in head for key in KEYS) else 0


def read(file: File, index: int, into: Dossier) -> None:
    told = into.files[index]
    told.format, told.version = FORMAT, VERSION
    try:
        data = _bytes(file)
    except HitsError as error:
        told.refused = error.what
        return
    except OSError as error:
        told.refused = f"it can't be read: {error.strerror or error}"
        return
    if is_too_deep(data):
        told.refused = "a dump of py-spy is not nested as deep as this: refused"
        return
    sheet = Sheet(index, into)
    number = -1
    for part in BETWEEN.split(data):
        looks: dict[int, list[Thread]] = {}
        whose: dict[int, Who] = {}
        for thread in _threads(part):
            number += 1
            if thread is None:
                told.unparsed += 1
                continue
            looks.setdefault(thread.pid, []).append(_row(thread, number))
            whose[thread.pid] = _who(thread)
        for pid, rows in looks.items():
            sheet.add_look(rows, whose[pid], sheet.look(pid))
    told.records = number + 1
    if number < 0:
        told.refused = "its JSON is damaged, or was cut: no thread of it can be read"


def _bytes(file: File) -> bytes:
    data = bytearray()
    for chunk in file.chunks():
        data += chunk
        if len(data) > BYTES_MAX:
            raise HitsError(f"a dump of py-spy of more than {BYTES_MAX >> 20} MiB: refused")
    return bytes(data)


def _threads(data: bytes) -> Iterator[_Thread | None]:
    """Each element; None where it is no thread."""
    try:
        found = _LIST.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return
    for raw in found:
        try:
            thread = _THREAD.decode(raw)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            yield None
            continue
        yield thread if 0 < thread.pid <= PID_MAX else None


def _row(thread: _Thread, number: int) -> Thread:
    # One that sleeps in C with the interpreter in its hand is both; the text of py-spy calls it idle.
    state = ("active" if thread.active else "idle") + ("+gil" if thread.owns_gil else "")
    own = thread.os_thread_id if thread.os_thread_id is not None else thread.thread_id
    # Where nobody gave it a name, the system's number says which is the main one.
    name = short(thread.thread_name or "") or (MAIN_THREAD if own == thread.pid else "")
    frames = [_frame(frame) for frame in thread.frames[:STACK_FRAMES_MAX]]
    return Thread(number, own if 0 <= own <= ID_MAX else 0, name, state, frames)


def _frame(frame: _Frame) -> Frame:
    line = frame.line if 0 <= frame.line <= LINE_MAX else 0
    is_native = line == 0 or NATIVE_SOURCE.search(frame.filename) is not None
    return Frame(short(frame.name), short(frame.filename), line, is_native)


def _who(thread: _Thread) -> Who:
    """The process and, where a server has written it into its title, its place."""
    title = TITLE.search(thread.process_info.command_line) if thread.process_info else None
    return Who(None, thread.pid, "", places_of(title[0]) if title else {})
