"""A snapshot of many processes: two looks at each, all at once, over by a time that was set before.

    OUT/  snapshot.json                     what was looked at, what is there, and why the rest is not
          1/ 2/   stacks_rank_3.txt  stacks_rank_3.threads.json  py_spy_rank_3.txt
                  comm_lib_trace_rank_3  process_rank_3.json
          own/    rank0003.scheduler.000.jsonl ...      own-2/  of another job's recorder
          logs/   rank_3.stdout.log  rank_3.stderr.log

Owns the order of things and the clock; what is done about one process is in `look`.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tracer.snapshot import procfs, recorder
from tracer.snapshot.look import LOGS, OWN, Look, Taken

SCHEMA = "hicache.snapshot.v1"
SUMMARY = "snapshot.json"
SECONDS, APART_S = 20.0, 2.0
LOOKS = 2
# How long everybody may take to find out which rank is which, and which part of the time at most.
NAMING_S, NAMING_PARTS = 3.0, 4
# Kept for writing the summary.
SUMMARY_S = 0.5
PROCESSES_MAX = 256


class Snapshot:
    """One snapshot.

    Args:
        out: an empty folder that is there.
        seconds: after so long it is over, whatever hangs.
        apart_s: between the two looks.
        told: called with each process once it is done, from any thread.
    """

    def __init__(
        self,
        out: Path,
        *,
        seconds: float = SECONDS,
        apart_s: float = APART_S,
        proc: Path = procfs.PROC,
        told: Callable[[Taken], None] | None = None,
    ) -> None:
        self._out = out
        self._end_s = time.monotonic() + seconds
        self._seconds = seconds
        self._apart_s = apart_s
        self._proc = proc
        self._told = told
        self._lock = threading.Lock()
        # Folder of a recorder and look -> number of the question that was asked there.
        self._asked: dict[tuple[Path, int], str | OSError] = {}
        self._named = threading.Event()
        self._is_over = False

    def take(self, pids: Sequence[int]) -> list[Taken]:
        """Look at these processes; never raises for what one of them, or the system, does."""
        begin_s = time.monotonic()
        for name in (LOGS, *(str(look + 1) for look in range(LOOKS))):
            (self._out / name).mkdir(mode=0o700)
        looks = [Look(self, Taken(pid), self._out, self._proc) for pid in pids]
        for look in looks:
            look.start()
        until_s = begin_s + min(NAMING_S, self._seconds / NAMING_PARTS)
        for look in looks:
            look.found.wait(max(0.0, until_s - time.monotonic()))
        self._name(looks)
        self._named.set()
        try:
            for look in looks:
                look.join(max(0.0, self._end_s - SUMMARY_S - time.monotonic()))
        finally:
            self._end()
        taken = [look.settled(self._seconds) for look in looks]
        self._summarise(taken, time.monotonic() - begin_s)
        return taken

    def question(self, folder: Path, look: int) -> str:
        with self._lock:
            if (folder, look) not in self._asked:
                try:
                    self._asked[folder, look] = recorder.request(folder)
                except OSError as error:
                    self._asked[folder, look] = error
            number = self._asked[folder, look]
        if isinstance(number, OSError):
            raise number
        return number

    def wait_named(self) -> None:
        self._named.wait()

    def second_look(self, first_s: float) -> bool:
        at_s = first_s + self._apart_s
        if at_s > self._end_s - 2 * SUMMARY_S:
            return False
        time.sleep(max(0.0, at_s - time.monotonic()))
        return True

    @property
    def until_s(self) -> float:
        return self._end_s - SUMMARY_S

    def done(self, taken: Taken) -> None:
        with self._lock:
            is_over = self._is_over
        if self._told is not None and not is_over:
            self._told(taken)

    def _end(self) -> None:
        """Nobody is asked any more, and no question stays behind."""
        with self._lock:
            self._is_over = True
            asked = dict(self._asked)
        for (folder, _look), number in asked.items():
            if isinstance(number, str):
                recorder.forget(folder, number)

    def _name(self, looks: Sequence[Look]) -> None:
        """Ranks name files; of two processes with one rank the one with a recorder has it."""
        used: set[str] = set()
        places: dict[Path, str] = {}
        for look in sorted(looks, key=lambda one: (one.recorder is None, one.taken.pid)):
            own = look.taken
            tag = f"rank_{own.rank}" if own.rank is not None else ""
            own.tag = tag if tag and tag not in used else f"pid_{own.pid}"
            used.add(own.tag)
            if look.recorder is not None:
                number = len(places) + 1
                name = places.setdefault(look.recorder.folder, OWN if number == 1 else f"{OWN}-{number}")
                look.logs = self._out / name
        for name in places.values():
            (self._out / name).mkdir(mode=0o700)

    def _summarise(self, taken: Sequence[Taken], seconds: float) -> None:
        document = {
            "schema": SCHEMA,
            "host": socket.gethostname(),
            "seconds": round(seconds, 1),
            "processes": [one.to_json() for one in taken],
        }
        text = json.dumps(document, indent=1) + "\n"
        recorder.write(self._out / SUMMARY, text.encode())


def matching(pattern: re.Pattern[str], own_pids: Sequence[int], proc: Path = procfs.PROC) -> list[int]:
    """Processes whose command line matches, without those that asked.

    Raises:
        OSError: processes can't be listed.
    """
    found = []
    for entry in sorted(int(path.name) for path in proc.iterdir() if path.name.isdecimal()):
        if entry in own_pids:
            continue
        with suppress(OSError):
            words = (proc / str(entry) / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
            # A thread of the system has no command line.
            if words and pattern.search(words.decode(errors="replace")):
                found.append(entry)
    return found


def ancestors(pid: int, proc: Path = procfs.PROC) -> list[int]:
    """A process and all that it was started by: their command lines have the pattern in them."""
    found: list[int] = []
    while pid > 0 and pid not in found:
        found.append(pid)
        try:
            pid = procfs.status(proc / str(pid)).get("PPid", 0)
        except (OSError, ValueError, IndexError):
            break
    return found
