"""Our own recorder in another process: where its files are, and what it says when it is asked by a file.

Where no thread of it gets a turn, stacks are had by a signal. It is sent only where the process has said so
itself, is still the same process, and still handles that signal by what the system says: the default action
of a signal would end it. So could the handler, if a thread had its turn after all: see `armed`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tracer.places import SEGMENT
from tracer.sinks import FILE_MODE, meta_name
from tracer.snapshot import procfs
from tracer.snapshot.armed import (
    ANSWER_NAME,
    ANSWER_STACKS_NAME,
    ANSWER_THREADS_NAME,
    ANSWERS_BEGIN,
    REQUEST_NAME,
    SCHEMA,
    SIGNALS_NAME,
    STACKS_NAME,
    signal_masks,
)
from tracer.snapshot.pulse import Pulse

STACKS = re.compile(r"rank(\d{4,})\.signals\.txt")
CARD_BYTES_MAX = 1 << 20
STACKS_BYTES_MAX = 4 << 20
LOGS_BYTES_MAX = 256 << 20
LOOK_S = 0.02
# Stacks are there when nothing more has come for so long.
SETTLED_S = 0.1
STACKS_S = 3.0
# A heart beats once a second while threads of its process get a turn.
HELD_S = 2.5
NOT_LOADED = "no recorder of hicache in this process"
# Stacks have come; or there are none and no thread had a turn for `HELD_S`; or none, and that can't be said.
Told = Literal["come", "held", "late"]


@dataclass(frozen=True, slots=True)
class Card:
    """What a process says of the signal that makes it write its stacks.

    Attributes:
        names: thread id as faulthandler writes it -> name, when the card was written.
    """

    signal: int
    stacks: Path
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Recorder:
    """The recorder of a process.

    Attributes:
        folder: of its files, as this process can reach it.
        card: None where no signal may be sent, and then `reason` says why.
    """

    folder: Path
    rank: int
    card: Card | None
    reason: str = ""


def find_recorder(pid: int, proc: Path = procfs.PROC) -> Recorder | str:
    """The recorder of a process by the files that it holds open, or why there is none."""
    place = proc / str(pid)
    found: dict[tuple[Path, int], bool] = {}
    try:
        for name in os.listdir(place / "fd"):
            with suppress(OSError):
                path = Path(os.readlink(place / "fd" / name))
                stacks, segment = STACKS.fullmatch(path.name), SEGMENT.fullmatch(path.name)
                if stacks is not None:
                    found[path.parent, int(stacks[1])] = True
                elif segment is not None:
                    found.setdefault((path.parent, int(segment["rank"])), False)
    except OSError as error:
        return f"its open files can't be looked at: {error.strerror}"
    if not found:
        return NOT_LOADED
    # Of several, whoever can be asked.
    (folder, rank), is_armed = max(sorted(found.items(), reverse=True), key=lambda item: item[1])
    reached = _reached(folder, rank, place)
    own = procfs.inner_pid(pid, proc)
    owner = _owner(reached, rank)
    if owner not in (None, own):
        return f"its recorder is that of process {owner}, which it was forked from"
    if not is_armed:
        return Recorder(reached, rank, None, "it has no signal for its stacks")
    card = _card(reached, rank, own)
    return Recorder(reached, rank, *((card, "") if isinstance(card, Card) else (None, card)))


def _owner(folder: Path, rank: int) -> int | None:
    """The process that writes a rank's files, as a side file says."""
    try:
        told = json.loads((folder / meta_name(rank)).read_bytes()[:CARD_BYTES_MAX])
        pid = told["pid"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return pid if type(pid) is int else None


def _reached(folder: Path, rank: int, place: Path) -> Path:
    """A process in a container has another root."""
    inside = place / "root" / str(folder).lstrip("/")
    names = (SIGNALS_NAME.format(rank), meta_name(rank))
    return folder if any((folder / name).exists() for name in names) or not inside.exists() else inside


def _card(folder: Path, rank: int, pid: int) -> Card | str:
    path = folder / SIGNALS_NAME.format(rank)
    try:
        with path.open("rb") as file:
            told = json.loads(file.read(CARD_BYTES_MAX))
    except FileNotFoundError:
        return "it takes no signal for its stacks any more"
    except (OSError, ValueError, RecursionError):
        return f"{path.name} can't be read"
    if not isinstance(told, dict) or told.get("schema") != SCHEMA:
        return f"{path.name} is of another version"
    if told.get("pid") != pid or told.get("rank") != rank:
        return f"{path.name} is of another process"
    number, names = told.get("signal"), told.get("threads")
    if type(number) is not int or not signal.SIGRTMIN <= number <= signal.SIGRTMAX:
        return f"{path.name} names no signal that may be sent"
    own = names if isinstance(names, dict) else {}
    return Card(number, folder / STACKS_NAME.format(rank), {str(at): str(name) for at, name in own.items()})


def await_stacks(found: Recorder, number: str, pulse: Pulse, out: Path, until_s: float) -> Told:
    """Wait for the stacks that a thread of the process writes, and copy them.

    Raises:
        OSError: they can't be read, or not be copied.
    """
    answers = found.folder / f"{ANSWERS_BEGIN}{number}"
    path = answers / ANSWER_STACKS_NAME.format(found.rank)
    while not path.exists():
        if pulse.is_there and pulse.still_s() >= HELD_S:
            return "held"
        if time.monotonic() > until_s:
            return "late"
        time.sleep(LOOK_S)
    # Names were there before the stacks.
    names = answers / ANSWER_THREADS_NAME.format(found.rank)
    for source, target in ((names, names_of(out)), (path, out)):
        with source.open("rb") as file:
            write(target, file.read(STACKS_BYTES_MAX))
    return "come"


def names_of(stacks: Path) -> Path:
    """Where names of threads stand, beside stacks, which have none."""
    return stacks.with_suffix(".threads.json")


def take_stacks(pid: int, card: Card, out: Path, until_s: float, proc: Path = procfs.PROC) -> str:
    """Have a process write its stacks by a signal, and copy them; why there are none, or "".

    Only for one in which no thread gets a turn: another's stack could go away while it is followed.

    Args:
        until_s: of the monotonic clock.
    """
    try:
        handle = os.pidfd_open(pid)
    except OSError as error:
        return f"it was not asked: {error.strerror}"
    try:
        handled = signal_masks((proc / str(pid) / "status").read_text(errors="replace"))["SigCgt"]
        if card.signal not in handled:
            return f"it does not handle signal {card.signal} any more, which was not sent"
        begin = card.stacks.stat().st_size
        if not os.statvfs(card.stacks).f_bavail:
            # They would not be written; and its heart may be still because no beat can be.
            return "its volume is full: no signal was sent"
        signal.pidfd_send_signal(handle, card.signal)
    except (OSError, ValueError) as error:
        return f"not asked for its stacks: {getattr(error, 'strerror', None) or error}"
    finally:
        os.close(handle)
    try:
        end = _settled(card.stacks, begin, min(until_s, time.monotonic() + STACKS_S))
        if end == begin:
            return f"no stacks within {STACKS_S:g} s of signal {card.signal}"
        with card.stacks.open("rb") as file:
            file.seek(begin)
            write(out, file.read(min(end - begin, STACKS_BYTES_MAX)))
    except OSError as error:
        return f"its stacks can't be read: {error.strerror}"
    return ""


def _settled(path: Path, begin: int, until_s: float) -> int:
    """The size of a file that has grown, once it grows no more."""
    size, since_s = begin, time.monotonic()
    while time.monotonic() < until_s:
        now = path.stat().st_size
        if now != size:
            size, since_s = now, time.monotonic()
        elif size > begin and time.monotonic() > since_s + SETTLED_S:
            break
        time.sleep(LOOK_S)
    return size


def request(folder: Path) -> str:
    """Ask every process that writes into a folder for what only Python can say; the number of the answers.

    Raises:
        OSError: nothing can be written there.
    """
    number = str(time.time_ns())
    part = folder / f".{REQUEST_NAME}.{os.getpid()}"
    write(part, number.encode())
    # Whoever answers may be somebody else, if this is the administrator.
    part.chmod(0o644)
    part.replace(folder / REQUEST_NAME)
    return number


def take_answer(folder: Path, number: str, rank: int, until_s: float) -> tuple[Path | None, dict[str, Any]]:
    """The folder of the answers once this rank's is there, and what it says; None if it never was."""
    answers = folder / f"{ANSWERS_BEGIN}{number}"
    path = answers / ANSWER_NAME.format(rank)
    while not path.exists():
        if time.monotonic() > until_s:
            return None, {}
        time.sleep(LOOK_S)
    try:
        told = json.loads(path.read_bytes()[:CARD_BYTES_MAX])
    except (OSError, ValueError, RecursionError):
        return None, {}
    return answers, told if isinstance(told, dict) else {}


def forget(folder: Path, number: str) -> None:
    """Take the question and its answers away."""
    shutil.rmtree(folder / f"{ANSWERS_BEGIN}{number}", ignore_errors=True)
    with suppress(OSError):
        asked = folder / REQUEST_NAME
        if asked.read_text() == number:
            asked.unlink()


def copy_logs(recorder: Recorder, out: Path, *, bytes_max: int = LOGS_BYTES_MAX) -> tuple[list[str], str]:
    """A rank's files, the newest first where not all have room; their names, and what is missing and why."""
    begin = f"rank{recorder.rank:04d}."
    entries: list[tuple[int, int, str]] = []
    with os.scandir(recorder.folder) as found:
        for entry in found:
            if not entry.name.startswith(begin) or ".signals." in entry.name:
                continue
            # A ring may have dropped it by now.
            with suppress(OSError):
                told = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(told.st_mode):
                    entries.append((told.st_mtime_ns, told.st_size, entry.name))
    copied: list[str] = []
    left_out = 0
    for _when_ns, size, name in sorted(entries, reverse=True):
        if size > bytes_max:
            left_out += 1
            continue
        with suppress(FileNotFoundError):
            shutil.copyfile(recorder.folder / name, out / name)
            (out / name).chmod(FILE_MODE)
            copied.append(name)
            bytes_max -= size
    return sorted(copied), f"{left_out} older files have no room" if left_out else ""


def write(path: Path, data: bytes) -> None:
    """A file that only its owner may read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, FILE_MODE), "wb") as file:
        file.write(data)
