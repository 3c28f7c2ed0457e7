"""Stacks as Python's own `faulthandler` writes them: what always works, and tells least.

    Timeout (0:00:30)!                                      of dump_traceback_later; begins a look
    Thread 0x00007f4ef1efb6c0 (most recent call first):     from Python 3.14 on with `[name]`
      File "/srv/cache.py", line 88 in drain
      ...                                                   there were more than 100 frames
    Current thread 0x00007f4ef9c50b80 (most recent call first):
      <no Python frame>

No process, no names. The names may stand beside it: `dump.threads.json` beside `dump.txt`, as
`{"0x00007f4ef1efb6c0": "prefetch"}`. A look ends where a thread comes again.
"""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from tracer.importers.dossier import Dossier, Frame
from tracer.importers.sniff import File
from tracer.importers.stack_lines import (
    FOREIGN_MAX,
    ID_MAX,
    STACK_FRAMES_MAX,
    Source,
    Thread,
    frame_of,
    scan,
    short,
    whole,
)

FORMAT = "faulthandler"
VERSION = 1
MARKS = (b"(most recent call first)", b"Fatal Python error: ", b"Timeout (")
NAMES_BYTES_MAX = 1 << 20

THREAD = re.compile(
    r"(Current thread|Thread) (0x[0-9a-fA-F]{1,16})(?: \[(.*)\])? \(most recent call first\):\s*"
)
ALONE = re.compile(r"Stack \(most recent call first\):\s*")
NATIVE = re.compile(r"Current thread's C stack trace \(most recent call first\):\s*")
FRAME = re.compile(r"\s*File \"(.*)\", line (\d{1,10}|\?\?\?) in (.*)")
CUT = re.compile(r"\s+\.\.\.\s*")
NOTHING = re.compile(r"\s+(?:<no Python frame>|<freed [^>]*>|Garbage-collecting|<truncated.*>)\s*")
BINARY = re.compile(r"\s+(?:Binary file \".*\"|<truncated rest of calls>).*")
TIMEOUT = re.compile(r"Timeout \([\d:.]+\)!\s*")
FATAL = re.compile(r"Fatal Python error: ([A-Za-z][A-Za-z_ ]{0,60})")
MODULES = re.compile(r"Extension modules: ")

_NAMES = msgspec.json.Decoder(dict[str, str])


def votes(head: bytes) -> int:
    return 2 * head.count(b"(most recent call first)") + head.count(b"Fatal Python error: ")


def read(file: File, index: int, into: Dossier) -> None:
    names, notes = _names_beside(file)

    def reader(source: Source) -> _Reader:
        return _Reader(source, names)

    scan(file, index, into, marks=MARKS, reader=reader, name=(FORMAT, VERSION))
    if into.files[index].format is not None:
        into.files[index].notes += notes


def _names_beside(file: File) -> tuple[dict[int, str], list[str]]:
    """Thread -> its name, where a file beside the dump says so; and what was wrong with that."""
    path = file.path
    for place in dict.fromkeys(
        (path.with_name(f"{path.name}.threads.json"), path.with_suffix(".threads.json"))
    ):
        try:
            if not place.is_file():
                continue
            with place.open("rb") as stream:
                found = _NAMES.decode(stream.read(NAMES_BYTES_MAX))
            return {whole(key, ID_MAX): short(name) for key, name in found.items()}, []
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
            return {}, [f"the names of its threads in {short(place.name)} can't be read"]
    return {}, []


class _Reader:
    """One stream: looks at one process, one after the other."""

    def __init__(self, source: Source, names: dict[int, str]) -> None:
        self.is_open = False
        self._source = source
        self._names = names
        self._threads: list[Thread] = []
        self._is_inside = False
        self._is_native = False
        self._foreign = 0

    def take(self, number: int, text: str) -> bool:
        if text.endswith((":", ": ")) and (begun := self._begins(number, text)) is not None:
            return begun
        if (fatal := FATAL.match(text)) is not None:
            self.close()
            self._source.sheet.say(self._source.who(), "fatal_python_error", number, error=fatal[1].strip())
            return True
        if TIMEOUT.fullmatch(text):
            self.close()
            return True
        if not self.is_open:
            return False
        is_taken = self._inside(text)
        self._foreign = 0 if is_taken else self._foreign + 1
        if self._foreign > FOREIGN_MAX:
            self.close()
        return is_taken

    def close(self) -> None:
        """Add what was read of the look."""
        if self._threads:
            sheet = self._source.sheet
            sheet.add_look(self._threads, self._source.who(), sheet.look(self._source.key))
        self._threads = []
        self.is_open = self._is_inside = self._is_native = False

    def _begins(self, number: int, text: str) -> bool | None:
        """Begin a thread, if the line does."""
        thread = THREAD.fullmatch(text)
        is_alone = thread is None and ALONE.fullmatch(text) is not None
        if thread is None and not is_alone:
            if self.is_open and NATIVE.fullmatch(text):
                self._is_native, self._is_inside = True, False
                return True
            return None
        own = whole(thread[2], ID_MAX) if thread else 0
        if is_alone or any(one.thread_id == own for one in self._threads):
            self.close()
        is_current = is_alone or (thread is not None and thread[1] == "Current thread")
        name = self._names.get(own) or short((thread[3] if thread else "") or "")
        self._threads.append(Thread(number, own, name, "current" if is_current else ""))
        self.is_open = self._is_inside = True
        self._is_native = False
        self._foreign = 0
        return True

    def _inside(self, text: str) -> bool:
        if not text.strip():
            self._is_inside = self._is_native = False
            return True
        if self._is_native:
            return BINARY.fullmatch(text) is not None
        if MODULES.match(text):
            return True
        if not self._is_inside:
            return False
        thread = self._threads[-1]
        if (frame := _frame_in(text)) is not None:
            if len(thread.frames) < STACK_FRAMES_MAX:
                thread.frames.append(frame)
            return True
        if CUT.fullmatch(text):
            thread.is_cut = True
            return True
        return NOTHING.fullmatch(text) is not None


@lru_cache(1 << 14)
def _frame_in(text: str) -> Frame | None:
    """The frame that a line tells; most lines come again on other ranks and threads."""
    found = FRAME.fullmatch(text)
    return None if found is None else frame_of(found[3], found[1], found[2] if found[2][0] != "?" else None)
