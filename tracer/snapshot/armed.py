"""What a process does when somebody asks how it stands: the half of a snapshot that runs in it.

Owns two files of a rank beside its log, and the answers in `snapshot-<number>/`.

    rank0003.signals.json   which signal makes process 4242 write its stacks, and that it is safe to send
    rank0003.signals.txt    where they go: C code writes them, which needs no turn of the interpreter
    snapshot-17/            its stacks and what else Python can say, by a thread, once a file `snapshot` has
                            asked for 17

The C code follows the frames of all threads without holding the interpreter. While another thread runs they
go away under it, and that ends the process: the signal is only for one in which no thread gets a turn. A
signal that nobody handles ends it as well, so one is taken that nobody else has, and nothing here is done
where that can't be known. torch is looked at where it was imported already, and is never imported.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from tracer.sinks import FILE_MODE, FOLDER_MODE

SCHEMA = "hicache.signals.v1"
SIGNALS_NAME, STACKS_NAME = "rank{:04d}.signals.json", "rank{:04d}.signals.txt"
# In a folder of answers.
ANSWER_NAME = "rank{:04d}.answer.json"
ANSWER_STACKS_NAME, ANSWER_THREADS_NAME = "rank{:04d}.stacks.txt", "rank{:04d}.threads.json"
# Of one stack, as many as the C code writes.
FRAMES_MAX = 100
# Touched by whoever asks; the number in it names the folder of the answers.
REQUEST_NAME, ANSWERS_BEGIN = "snapshot", "snapshot-"
NUMBER = re.compile(r"[0-9]{1,20}")
NUMBER_CHARS_MAX = 32
# The first ones of the real-time signals are taken by tools more often.
SIGNALS_PASSED_OVER = 6
OWN_STATUS = Path("/proc/self/status")
# Who handles, ignores or blocks a signal, as the system says it.
MASKS = ("SigBlk", "SigIgn", "SigCgt")
# Newest name first.
DUMPERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
FR_MODULE = "torch._C._distributed_c10d"

# Signals of this process that were given back: nobody handles them, and they are ignored.
_given_back: set[int] = set()


class Armed:
    """One rank of this process that writes its stacks when a signal comes, until `disarm`."""

    def __init__(self, folder: Path, rank: int, number: int, file: TextIO) -> None:
        self._card = folder / SIGNALS_NAME.format(rank)
        self._number = number
        self._file = file
        self._pid = os.getpid()

    def disarm(self) -> None:
        """Give the signal back. Nobody is told to send it any more first; one on its way is ignored."""
        if self._pid != os.getpid():
            # In a forked child the files are its parent's.
            return
        with suppress(OSError):
            self._card.unlink()
        faulthandler.unregister(self._number)
        _given_back.add(self._number)
        with suppress(OSError):
            if not os.path.getsize(self._file.name):
                os.unlink(self._file.name)
        self._file.close()


def arm(folder: Path, rank: int) -> Armed | None:
    """Let a signal make this process write the stacks of all its threads; None where that can't be.

    Only in the main thread, which is the one that signals belong to, and only with a signal that has its
    default action and that no thread blocks. Never raises.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    number = free_signal()
    if number is None:
        return None
    path = folder / STACKS_NAME.format(rank)
    try:
        file = open(path, "w", encoding="utf-8", opener=_for_owner)  # noqa: SIM115
    except OSError:
        return None
    try:
        # What comes back once it is handled no more: whoever has just looked may still send it, and its
        # default action would end the process.
        signal.signal(number, signal.SIG_IGN)
        _given_back.discard(number)
        faulthandler.register(number, file=file, all_threads=True, chain=False)
        armed = Armed(folder, rank, number, file)
        _write(folder / SIGNALS_NAME.format(rank), json.dumps(_card(rank, number, path)).encode())
    except (OSError, ValueError, RuntimeError):
        faulthandler.unregister(number)
        _given_back.add(number)
        file.close()
        return None
    return armed


def free_signal() -> int | None:
    """A real-time signal that nobody in this process has taken; None where the system does not tell."""
    try:
        taken = signal_masks(OWN_STATUS.read_text())
        first, last = signal.SIGRTMIN + SIGNALS_PASSED_OVER, signal.SIGRTMAX
    except (OSError, ValueError, AttributeError):
        return None
    used = set().union(*taken.values()) - (_given_back & taken["SigIgn"])
    return next((number for number in range(first, last) if number not in used), None)


def signal_masks(status: str) -> dict[str, set[int]]:
    """Mask -> the signals in it, of a process's `status`.

    Raises:
        ValueError: a mask is not there, or is no number.
    """
    lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if not set(MASKS) <= set(lines):
        raise ValueError("no signal masks")
    bits = {name: int(lines[name], 16) for name in MASKS}
    return {name: {n for n in range(1, 65) if mask >> (n - 1) & 1} for name, mask in bits.items()}


class Answers:
    """Hears whoever asks for what only Python can say; a heart looks here at every beat."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._asked_ns = self._last_ns()
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Begin to answer if somebody has asked since the last look."""
        asked_ns = self._last_ns()
        if asked_ns == self._asked_ns:
            return
        self._asked_ns = asked_ns
        try:
            number = (self._folder / REQUEST_NAME).read_text()[:NUMBER_CHARS_MAX]
        except (OSError, ValueError):
            return
        if not NUMBER.fullmatch(number):
            return
        # A recorder that is locked must stop neither the heart nor the stacks of the next look.
        is_locked = self._thread is not None and self._thread.is_alive()
        words = (number, stacks if is_locked else answer)
        thread = threading.Thread(
            target=self._answer, args=words, name=f"hicache snapshot {self._rank}", daemon=True
        )
        self._thread = self._thread if is_locked else thread
        thread.start()

    def _last_ns(self) -> int:
        try:
            return os.stat(self._folder / REQUEST_NAME).st_mtime_ns
        except OSError:
            return 0

    def _answer(self, number: str, say: Callable[[Path, int, Mapping[str, Any]], None]) -> None:
        folder = self._folder / f"{ANSWERS_BEGIN}{number}"
        try:
            folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
            say(folder, self._rank, sys.modules)
        except Exception:
            # Whoever asked finds nothing, and says so.
            return


def answer(folder: Path, rank: int, modules: Mapping[str, Any]) -> None:
    """Write what this process can say of itself; `answer.json` of the rank comes last.

    Stacks are there before the recorder of torch is asked, which may be locked.
    """
    stacks(folder, rank, modules)
    dump, reason = flight_recorder(modules)
    if dump is not None:
        _write(folder / f"comm_lib_trace_rank_{rank}", dump)
    told = {"pid": os.getpid(), "rank": rank, "flight_recorder": reason}
    _write(folder / ANSWER_NAME.format(rank), json.dumps(told).encode())


def stacks(folder: Path, rank: int, _modules: Mapping[str, Any]) -> None:
    """The part of an answer that can be had without a look at torch."""
    write_stacks(folder, rank)


def write_stacks(folder: Path, rank: int) -> None:
    """Write names of threads and then their stacks, by a thread that has its turn: no other one runs.

    Both are there whole or not at all.
    """
    names = {f"0x{ident:016x}": name for ident, name in thread_names().items()}
    _write(folder / ANSWER_THREADS_NAME.format(rank), json.dumps(names).encode())
    path = folder / ANSWER_STACKS_NAME.format(rank)
    with open(_part(path), "w+", encoding="utf-8", opener=_for_owner) as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
        file.writelines(_further_stacks(text))
    os.replace(_part(path), path)


def _further_stacks(text: str) -> Iterator[str]:
    """Of threads that are not in it: the C code leaves off behind a hundred, and the oldest come last."""
    for ident, frame in sys._current_frames().items():
        if (name := f"0x{ident:016x}") in text:
            continue
        which = "Current thread" if ident == threading.get_ident() else "Thread"
        yield f"\n{which} {name} (most recent call first):\n"
        own: FrameType | None = frame
        for _ in range(FRAMES_MAX):
            if own is None:
                break
            yield f'  File "{own.f_code.co_filename}", line {own.f_lineno} in {own.f_code.co_name}\n'
            own = own.f_back


def flight_recorder(modules: Mapping[str, Any]) -> tuple[bytes | None, str]:
    """The dump of torch's recorder, or why there is none."""
    distributed, recorder = modules.get("torch.distributed"), modules.get(FR_MODULE)
    if distributed is None or recorder is None:
        return None, "torch.distributed is not loaded"
    dumper = next((found for name in DUMPERS if (found := getattr(recorder, name, None))), None)
    if dumper is None:
        return None, "this torch has no flight recorder that writes JSON"
    try:
        if not distributed.is_initialized():
            return None, "no process group was made"
        # With collectives, and not only those that are open.
        dump = dumper(True, False)
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error)[:200]}"
    return (dump, "") if isinstance(dump, bytes) else (None, "the recorder wrote no bytes")


def thread_names() -> dict[int, str]:
    return {thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None}


def _card(rank: int, number: int, path: Path) -> dict[str, Any]:
    names = {f"0x{ident:016x}": name for ident, name in thread_names().items()}
    return {
        "schema": SCHEMA,
        "pid": os.getpid(),
        "rank": rank,
        "signal": int(number),
        "stacks": path.name,
        "threads": names,
    }


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all: somebody waits for the file to be there."""
    part = _part(path)
    with open(part, "wb", opener=_for_owner) as file:
        file.write(data)
    os.replace(part, path)


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
