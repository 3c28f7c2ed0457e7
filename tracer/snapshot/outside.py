"""Evidence that needs nothing of ours in the process: py-spy, the recorder's pipe of torch, ends of logs.

Each function returns why there is nothing, or "" where there is.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tracer.snapshot import procfs
from tracer.snapshot.recorder import LOOK_S, SETTLED_S, write

PY_SPY_S = 8.0
TAIL_BYTES = 256 << 10
DUMP_S = 5.0
DUMP_BYTES_MAX = 512 << 20
REASON_CHARS_MAX = 200
# The pipe that torch listens at, by rank, and what its dumps are called, the newer name first.
PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
DUMP_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
DUMP_NAMES = ("comm_lib_trace_rank_", "nccl_trace_rank_")


def py_spy(pid: int, out: Path, until_s: float) -> str:
    """Stacks by py-spy, which reads another process's memory and does not stop it."""
    program = shutil.which("py-spy")
    if program is None:
        return "py-spy is not installed"
    seconds = min(PY_SPY_S, until_s - time.monotonic())
    if seconds <= 0:
        return "no time left for py-spy"
    words = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        ended = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return f"py-spy took more than {seconds:.0f} s"
    except OSError as error:
        return f"py-spy can't be run: {error.strerror}"
    if ended.returncode or not ended.stdout.strip():
        lines = ended.stderr.decode(errors="replace").strip().splitlines() or [f"exit {ended.returncode}"]
        return f"py-spy: {lines[-1][:REASON_CHARS_MAX]}"
    write(out, ended.stdout)
    return ""


def flight_recorder(
    pid: int, variables: Mapping[str, str], out: Path, until_s: float, proc: Path = procfs.PROC
) -> str:
    """A dump of torch's recorder through its pipe, written by a thread of torch itself."""
    pipe, rank = variables.get(PIPE_VARIABLE, ""), variables.get("RANK", "")
    if not pipe:
        return f"{PIPE_VARIABLE} is not set there"
    if not rank.isdecimal():
        return "no pipe without a RANK"
    root = proc / str(pid) / "root"
    dumps = [_inside(root, prefix + rank) for prefix in _prefixes(variables)]
    before = {path: _written_ns(path) for path in dumps}
    if reason := _poke(_inside(root, pipe + rank)):
        return reason
    until_s = min(until_s, time.monotonic() + DUMP_S)
    while time.monotonic() < until_s:
        for path in dumps:
            if _written_ns(path) > before[path] and _is_settled(path):
                return _copy(path, out)
        time.sleep(LOOK_S)
    return f"asked through its pipe, and no dump came within {DUMP_S:g} s"


def _prefixes(variables: Mapping[str, str]) -> list[str]:
    """Where torch puts its dumps: where it is told to, or in its cache, or in /tmp."""
    if told := [variables[name] for name in DUMP_VARIABLES if variables.get(name)]:
        return told
    cache = variables.get("XDG_CACHE_HOME") or os.path.join(variables.get("HOME", "/"), ".cache")
    folders = (os.path.join(cache, "torch"), "/tmp")
    return [os.path.join(folder, name) for folder in folders for name in DUMP_NAMES]


def _inside(root: Path, path: str) -> Path:
    """A path as the process sees it: it may have another root."""
    inside = root / path.lstrip("/")
    with suppress(OSError):
        if inside.parent.exists():
            return inside
    return Path(path)


def _poke(pipe: Path) -> str:
    """Write a byte into a pipe, if it is one and somebody reads it: opening it must not wait."""
    try:
        handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        return f"its pipe {pipe.name} can't be opened: {error.strerror}"
    try:
        if not stat.S_ISFIFO(os.fstat(handle).st_mode):
            return f"{pipe.name} is no pipe"
        os.write(handle, b"1")
    except OSError as error:
        return f"its pipe {pipe.name} takes nothing: {error.strerror}"
    finally:
        os.close(handle)
    return ""


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _is_settled(path: Path) -> bool:
    """Whether a file has something in it and has not grown for a moment."""
    with suppress(OSError):
        before = path.stat()
        time.sleep(SETTLED_S)
        after = path.stat()
        return after.st_size > 0 and (before.st_size, before.st_mtime_ns) == (
            after.st_size,
            after.st_mtime_ns,
        )
    return False


def _copy(path: Path, out: Path) -> str:
    try:
        told = path.stat()
        if not stat.S_ISREG(told.st_mode) or told.st_size > DUMP_BYTES_MAX:
            return f"its dump {path.name} is no file of up to {DUMP_BYTES_MAX >> 20} MiB"
        shutil.copyfile(path, out)
        out.chmod(0o600)
    except OSError as error:
        return f"its dump {path.name} can't be copied: {error.strerror}"
    return ""


def log_tails(pid: int, out: Path, tag: str, proc: Path = procfs.PROC) -> tuple[list[str], str]:
    """The last of what a process writes to stdout and stderr, where those are files; which, or why not."""
    written: list[str] = []
    seen: set[tuple[int, int]] = set()
    kinds: list[str] = []
    for number, name in ((1, "stdout"), (2, "stderr")):
        path = proc / str(pid) / "fd" / str(number)
        try:
            told = path.stat()
            if not stat.S_ISREG(told.st_mode):
                kinds.append(f"{name} is {_kind(told.st_mode)}")
                continue
            if (told.st_dev, told.st_ino) in seen:
                continue
            seen.add((told.st_dev, told.st_ino))
            target = out / f"{tag}.{name}.log"
            write(target, _tail(path))
            written.append(target.name)
        except OSError as error:
            kinds.append(f"{name} can't be read: {error.strerror}")
    return written, "" if written else ", ".join(kinds)


def _tail(path: Path) -> bytes:
    """From the first whole line of the last part on."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        data = file.read(TAIL_BYTES)
    return data if size <= TAIL_BYTES else data[data.find(b"\n") + 1 :]


def _kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "a pipe, whose reader has the log"
    if stat.S_ISCHR(mode):
        return "a terminal, or nothing"
    return "a socket, whose reader has the log" if stat.S_ISSOCK(mode) else "no file"
