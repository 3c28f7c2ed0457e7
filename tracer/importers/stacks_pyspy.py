"""Stacks as `py-spy dump` prints them, alone in a file or in the log of a server whose watchdog ran it.

    [2031-02-03 04:10:09 TP7] Pyspy dump for PID 310:       SGLang says whose they are
    Process 310: sglang::scheduler_TP7                      a title, or a command line of several lines
    Python v3.12.3 (/usr/bin/python3.12)
    Thread 310 (active+gil): "MainThread"
        all_reduce (torch/distributed/distributed_c10d.py:3000)
            Arguments:                                      with what is below it, dropped: prompts
        0x7f4ef94a3f16 (libc.so.6)                          native frames have no line

Several processes in one file, with `--subprocesses` a row of dashes between them. Of a command line nothing
is kept but the place that a server writes into its title.
"""

from __future__ import annotations

import re
from functools import lru_cache

from tracer.importers.dossier import Dossier, Frame
from tracer.importers.sniff import File
from tracer.importers.stack_lines import (
    FOREIGN_MAX,
    ID_MAX,
    PID_MAX,
    STACK_FRAMES_MAX,
    TAGGED,
    Source,
    Thread,
    frame_of,
    places_of,
    scan,
    short,
    whole,
)
from tracer.importers.stacks import MAIN_THREAD

FORMAT = "py_spy"
VERSION = 1
MARKS = (b"Process ", b"Python v", b"Pyspy ")
COMMAND_LINES_MAX = 400
ANNOUNCED_MAX = 1000

PROCESS = re.compile(r"Process (\d{1,10}): (.*)")
HEAD = re.compile(rb"\s*Process \d{1,10}: ")
PARENT = re.compile(r"Parent Process \d{1,10}: ")
PYTHON = re.compile(r"Python v\d[\w.+-]* ")
THREAD = re.compile(r"Thread (0x[0-9a-fA-F]{1,16}|\d{1,20}) \(([a-z]+(?:\+[a-z]+)*)\)(?:: \"(.*)\")?\s*")
FRAME = re.compile(r"(\s+)(\S.*) \(([^()]*?)(?::(\d{1,10}))?\)\s*")
NATIVE_SOURCE = re.compile(r"\.(?:c|cc|cpp|cxx|cu|h|hh|hpp|cuh|S|rs|so[.\d]*)$")
DASHES = re.compile(r"-{10,}\s*")
ANNOUNCED = re.compile(r"Pyspy dump for PID (\d{1,10})\b")
FAILED = re.compile(r"Pyspy failed\b")
TITLE = re.compile(r"(?:sglang|vllm)::\w*", re.IGNORECASE)
# What a reader of processes is not allowed to do is told in words of the system.
REASONS = re.compile(r"[Pp]ermission [Dd]enied|[Nn]o such file|not found|[Tt]imed? ?out|[Nn]o such process")


def votes(head: bytes) -> int:
    if b"Process " in head and b"Python v" in head:
        return head.count(b"\nThread ") + head.count(b"\n    ") + 1
    return int(b"Pyspy " in head or HEAD.match(head) is not None)


def read(file: File, index: int, into: Dossier) -> None:
    scan(file, index, into, marks=MARKS, reader=_Reader, name=(FORMAT, VERSION))


class _Reader:
    """One stream: nothing, then a command line, then threads."""

    def __init__(self, source: Source) -> None:
        self.is_open = False
        self._source = source
        self._pids: list[int] = []
        self._places: dict[str, int] = {}
        self._announced: dict[int, dict[str, int]] = {}
        self._threads: list[Thread] = []
        self._is_command = False
        self._lines = 0
        self._indent = 0
        self._foreign = 0

    def take(self, number: int, text: str) -> bool:
        if self._is_command:
            return self._command(number, text)
        if text.startswith("Process ") and (process := PROCESS.match(text)) is not None:
            self._begin(process)
            return True
        if "Pyspy " in text and self._said(number, text):
            return True
        if not self._pids:
            return False
        is_taken = self._inside(number, text)
        self._foreign = 0 if is_taken else self._foreign + 1
        if self._foreign > FOREIGN_MAX:
            self.close()
        return is_taken

    def _said(self, number: int, text: str) -> bool:
        """What a server says of a dump that it took, or could not take."""
        if (announced := ANNOUNCED.search(text)) is not None:
            self._announce(number, announced, text)
            return True
        if (failed := FAILED.search(text)) is not None:
            self._fail(number, text[failed.end() :], _tags(text))
            return True
        return False

    def close(self) -> None:
        """Add what was read of the process."""
        if self._threads:
            pid = self._pid()
            places = self._agreed(pid)
            who = self._source.who(pid=pid or None, places=places)
            sheet = self._source.sheet
            sheet.add_look(self._threads, who, sheet.look((self._source.key, pid)))
        self.is_open = self._is_command = False
        self._pids, self._threads, self._places = [], [], {}

    def _begin(self, process: re.Match[str]) -> None:
        self.close()
        self.is_open = self._is_command = True
        self._lines = self._foreign = 0
        self._pids = [whole(process[1], PID_MAX)]
        self._titled(process[2])

    def _command(self, number: int, text: str) -> bool:
        """A line of a command line: it goes on up to Python's version."""
        self._lines += 1
        if PYTHON.match(text):
            self._is_command = False
        elif THREAD.fullmatch(text):
            # The line between was lost.
            self._is_command = False
            return self._inside(number, text)
        elif self._lines > COMMAND_LINES_MAX:
            self.close()
            return False
        elif (process := PROCESS.match(text)) is not None:
            # The next process, if the last one ended in an error; or a line of a script that says so.
            self._pids.append(whole(process[1], PID_MAX))
            self._titled(process[2])
        return True

    def _titled(self, title: str) -> None:
        found = TITLE.search(title)
        self._places = places_of(found[0]) if found else {}

    def _inside(self, number: int, text: str) -> bool:
        """A line of a process whose head has been read."""
        if text.startswith("Thread ") and (thread := THREAD.fullmatch(text)) is not None:
            name = short(thread[3] or "")
            self._threads.append(Thread(number, whole(thread[1], ID_MAX), name, thread[2]))
            self._indent = 0
            return True
        if DASHES.fullmatch(text):
            self.close()
            return True
        if not text.strip() or PARENT.match(text):
            return True
        return bool(self._threads) and self._frame(text)

    def _frame(self, text: str) -> bool:
        indent = len(text) - len(text.lstrip())
        if indent and self._indent and indent > self._indent:
            # Arguments and locals stand further in than the frame that they are of.
            return True
        frame = _frame_in(text)
        if frame is None:
            return False
        self._indent = self._indent or indent
        frames = self._threads[-1].frames
        if len(frames) < STACK_FRAMES_MAX:
            frames.append(frame)
        return True

    def _announce(self, number: int, announced: re.Match[str], text: str) -> None:
        self.close()
        places = _tags(text)
        self._source.sheet.say(self._source.who(places=places), "py_spy_dump", number)
        if places and len(self._announced) < ANNOUNCED_MAX:
            self._announced[whole(announced[1], PID_MAX)] = places

    def _fail(self, number: int, said: str, places: dict[str, int]) -> None:
        """A server could not run it; of what it says only why, since a command line may say more."""
        self.close()
        reason = REASONS.search(said)
        fields = {"reason": reason[0].lower()} if reason else {}
        self._source.sheet.say(self._source.who(places=places), "py_spy_failed", number, **fields)

    def _pid(self) -> int:
        """The process's number: on Linux that of its main thread, where a script's text looks like a head."""
        main = {thread.thread_id for thread in self._threads if thread.name == MAIN_THREAD}
        return next((pid for pid in self._pids if pid in main), self._pids[-1])

    def _agreed(self, pid: int) -> dict[str, int]:
        """Its place by title and by the line that announced it; nothing where they differ."""
        said = self._announced.get(pid, {})
        if said and self._places and said != self._places:
            self._source.sheet.note(
                f"process {pid}: its title says {_text(self._places)}, the line before it {_text(said)}"
            )
            return {}
        return self._places or said


@lru_cache(1 << 14)
def _frame_in(text: str) -> Frame | None:
    """The frame that a line tells; most lines come again on other ranks and threads."""
    found = FRAME.fullmatch(text)
    if found is None:
        return None
    is_native = found[4] is None or NATIVE_SOURCE.search(found[3]) is not None
    return frame_of(found[2], found[3], found[4], is_native=is_native)


def _tags(text: str) -> dict[str, int]:
    found = TAGGED.search(text)
    return places_of(found[1]) if found else {}


def _text(places: dict[str, int]) -> str:
    return " ".join(f"{axis}{number}" for axis, number in sorted(places.items()))
