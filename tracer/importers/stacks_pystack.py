"""Stacks as `pystack remote` and `pystack core` print them: outermost frame first, source lines between.

    Traceback for thread 9158 (python) [Has the GIL] (most recent call last):
        (Python) File "/srv/cache.py", line 88, in drain
            return queue.get()                               source, dropped
          Arguments:                                         with what is below it, dropped: prompts
        (C) File "Modules/_threadmodule.c", line 1124, in thread_run (/usr/lib/libpython3.11.so.1.0)

The name in brackets is the system's, `python` for most. No process is told: the main thread has its number,
and is the one that `threading` did not begin.
"""

from __future__ import annotations

import re

from tracer.importers.dossier import Dossier
from tracer.importers.sniff import File
from tracer.importers.stack_lines import (
    FOREIGN_MAX,
    ID_MAX,
    PID_MAX,
    STACK_FRAMES_MAX,
    Source,
    Thread,
    frame_of,
    scan,
    short,
    whole,
)
from tracer.importers.stacks import MAIN_THREAD, is_started_thread

FORMAT = "pystack"
VERSION = 1
MARKS = (b"Traceback for thread ",)

THREAD = re.compile(
    r"Traceback for thread (\d{1,20})(?: \((.*?)\))? \[(.*?)\]\s+\(most recent call last\):\s*"
)
FRAME = re.compile(r"\s*\((Python|C|Unknown|Other)\) File \"(.*)\", line (\d{1,10}), in (.*)")
LIBRARY = re.compile(r"(?: \(inlined\))?(?: \([^()]*\))?$")
NOTHING = re.compile(r"\s*(?:The frame stack for thread|Could not|This thread does not|Unable to).*")
# The system's name of a thread that nobody has named.
UNNAMED = re.compile(r"(?:python|pt_main_thread)[\d.]*", re.IGNORECASE)


def votes(head: bytes) -> int:
    return 2 * head.count(b"Traceback for thread ")


def read(file: File, index: int, into: Dossier) -> None:
    scan(file, index, into, marks=MARKS, reader=_Reader, name=(FORMAT, VERSION))


class _Reader:
    """One stream: looks at processes, one after the other."""

    def __init__(self, source: Source) -> None:
        self.is_open = False
        self._source = source
        self._threads: list[Thread] = []
        self._is_inside = False
        self._indent = 0
        self._foreign = 0

    def take(self, number: int, text: str) -> bool:
        if (thread := THREAD.fullmatch(text)) is not None:
            self._begin(number, thread)
            return True
        if not self.is_open:
            return False
        is_taken = self._inside(text)
        self._foreign = 0 if is_taken else self._foreign + 1
        if self._foreign > FOREIGN_MAX:
            self.close()
        return is_taken

    def close(self) -> None:
        """Add what was read of a process, the frames of each thread innermost first."""
        if self._threads:
            for thread in self._threads:
                thread.frames.reverse()
            sheet = self._source.sheet
            pid = self._pid()
            sheet.add_look(self._threads, self._source.who(pid=pid or None), sheet.look(self._source.key))
        self._threads = []
        self.is_open = self._is_inside = False

    def _begin(self, number: int, found: re.Match[str]) -> None:
        own = whole(found[1], ID_MAX)
        if any(thread.thread_id == own for thread in self._threads) or self._main() is not None:
            # A thread comes again, or the main one has come, which is the last.
            self.close()
        name = found[2] or ""
        state = "active+gil" if "Has the GIL" in found[3] else short(found[3]).lower()
        self._threads.append(Thread(number, own, "" if UNNAMED.fullmatch(name) else short(name), state))
        self.is_open = self._is_inside = True
        self._indent = self._foreign = 0

    def _inside(self, text: str) -> bool:
        if not text.strip():
            return True
        thread = self._threads[-1]
        if (frame := FRAME.fullmatch(text)) is not None:
            self._indent = self._indent or len(text) - len(text.lstrip())
            if len(thread.frames) < STACK_FRAMES_MAX:
                is_native = frame[1] != "Python"
                func = LIBRARY.sub("", frame[4]) if is_native else frame[4]
                thread.frames.append(frame_of(func, frame[2], frame[3], is_native=is_native))
            return True
        # Source lines, arguments and locals stand further in than the frame that they are of.
        indent = len(text) - len(text.lstrip())
        return (0 < self._indent < indent) or NOTHING.fullmatch(text) is not None

    def _main(self) -> Thread | None:
        """The thread that `threading` did not begin, if it is read to its end."""
        last = self._threads[-1] if self._threads else None
        if last is None or not last.frames or is_started_thread(last.frames[::-1]):
            return None
        own = [frame for frame in last.frames if not frame.is_native]
        return last if own and own[0].func == "<module>" else None

    def _pid(self) -> int:
        main = [thread for thread in self._threads if thread.name == MAIN_THREAD or _is_module(thread)]
        return whole(str(main[-1].thread_id), PID_MAX) if main else 0


def _is_module(thread: Thread) -> bool:
    own = [frame for frame in thread.frames if not frame.is_native]
    return bool(own) and own[-1].func == "<module>"
