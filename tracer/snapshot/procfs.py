"""What the system says of one process, from outside it: state, threads, waits, sockets, limits.

Owns nothing and asks nobody: these are reads of `/proc`, each of which may fail by itself. Values of
environment variables are somebody's secrets unless they are known not to be, and so are words of a command
line behind an option that is called like one.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PROC = Path("/proc")
# Of a process that another one has stopped, or that is gone and was not waited for.
STOPPED, GONE = ("T", "t"), ("Z", "X", "x")
STATUS_NUMBERS = ("PPid", "Threads", "VmRSS", "VmSwap", "voluntary_ctxt_switches")
THREADS_MAX = 512
SOCKETS_MAX = 512
TEXT_CHARS_MAX = 4096
SECRET = re.compile(r"key|token|secret|passw|credential|auth|cookie|dsn|url|uri", re.IGNORECASE)
TOLD = re.compile(
    r"(?:LOCAL_|NODE_|GROUP_)?RANK|(?:LOCAL_)?WORLD_SIZE|MASTER_(?:ADDR|PORT)|CUDA_(?:VISIBLE_DEVICES|LAUNCH_BLOCKING)"
    r"|(?:HICACHE|SGLANG|SGL|TORCH|TORCHCOMM|NCCL|GLOO|UCX|OMP|HIP|ROCR)_[A-Z0-9_]+"
)
# Numbers that the kernel has for states of a TCP socket.
TCP_STATES = (
    *("", "established", "syn_sent", "syn_recv", "fin_wait1", "fin_wait2", "time_wait", "close"),
    *("close_wait", "last_ack", "listen", "closing"),
)
SOCKET = re.compile(r"socket:\[(\d+)\]")

Reasons = dict[str, str]


def facts(pid: int, proc: Path = PROC) -> tuple[dict[str, Any], Reasons]:
    """Everything about a process, and what could not be read, each with its reason."""
    place = proc / str(pid)
    found: dict[str, Any] = {"pid": pid}
    reasons: Reasons = {}
    parts: Mapping[str, Callable[[Path], Any]] = {
        "status": status,
        "command": command,
        "threads": threads,
        "sockets": sockets,
        "limits": limits,
        "environment": environment,
    }
    for name, read in parts.items():
        try:
            found[name] = read(place)
        except (OSError, ValueError, IndexError) as error:
            reasons[name] = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return found, reasons


def state(pid: int, proc: Path = PROC) -> str:
    """The letter of a process's state, "" where there is no such process."""
    try:
        return _stat(proc / str(pid))[0]
    except (OSError, ValueError, IndexError):
        return ""


def started_ticks(pid: int, proc: Path = PROC) -> int:
    """When a process began: a number that is used again for another process does not have the same.

    Raises:
        OSError, ValueError, IndexError: there is no such process.
    """
    return int(_stat(proc / str(pid))[19])


def status(place: Path) -> dict[str, Any]:
    lines = _fields(place / "status")
    own: dict[str, Any] = {"name": lines.get("Name", ""), "state": lines.get("State", "")[:1]}
    own |= {name: int(lines[name].split()[0]) for name in STATUS_NUMBERS if name in lines}
    return own | {name: lines[name] for name in ("SigPnd", "SigBlk", "SigIgn", "SigCgt") if name in lines}


def inner_pid(pid: int, proc: Path = PROC) -> int:
    """What a process is called where it runs: another number inside of a container."""
    try:
        return int(_fields(proc / str(pid) / "status")["NSpid"].split()[-1])
    except (OSError, KeyError, ValueError, IndexError):
        return pid


def command(place: Path) -> list[str]:
    """Its command line, without what may be a secret."""
    words = (place / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    told: list[str] = []
    is_secret = False
    for word in words:
        option, sign, _value = word.partition("=")
        is_option = word.startswith("-")
        if is_secret and not is_option:
            told.append("***")
        else:
            told.append(f"{option}=***" if sign and SECRET.search(option) else word[:TEXT_CHARS_MAX])
        is_secret = is_option and not sign and SECRET.search(word) is not None
    return told


def variables(place: Path) -> dict[str, str]:
    """The environment that it began with, as it is: for looking things up, not for a file."""
    text = (place / "environ").read_bytes().decode(errors="replace")
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def environment(place: Path) -> dict[str, Any]:
    """Names of its variables; values of those that steer the libraries which may hang."""
    own = variables(place)
    told = {name for name in own if TOLD.fullmatch(name) and not SECRET.search(name)}
    return {"names": sorted(own), "values": {name: own[name][:TEXT_CHARS_MAX] for name in sorted(told)}}


def threads(place: Path) -> list[dict[str, Any]]:
    """Each thread: its state, what it waits in, and how much it has computed so far."""
    found = []
    for tid in sorted(map(int, os.listdir(place / "task")))[:THREADS_MAX]:
        own = place / "task" / str(tid)
        try:
            fields = _stat(own)
            name = (own / "comm").read_text(errors="replace").rstrip("\n")
        except (OSError, IndexError):
            # It has ended since.
            continue
        found.append(
            {
                "tid": tid,
                "name": name,
                "state": fields[0],
                "user_ticks": int(fields[11]),
                "system_ticks": int(fields[12]),
                "wchan": _text(own / "wchan"),
                "syscall": _text(own / "syscall"),
            }
        )
    return found


def sockets(place: Path) -> list[dict[str, Any]]:
    """Its TCP sockets: both ends, and the bytes that wait in each direction."""
    own: set[int] = set()
    for name in os.listdir(place / "fd"):
        try:
            link = os.readlink(place / "fd" / name)
        except OSError:
            continue
        if match := SOCKET.fullmatch(link):
            own.add(int(match[1]))
    found: list[dict[str, Any]] = []
    for table in ("tcp", "tcp6"):
        try:
            lines = (place / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        found += [socket_of(words) for line in lines if int((words := line.split())[9]) in own]
    return sorted(found, key=lambda one: (one["local"], one["remote"]))[:SOCKETS_MAX]


def socket_of(words: list[str]) -> dict[str, Any]:
    """One line of a table of sockets, in words."""
    sent, received = (int(part, 16) for part in words[4].split(":"))
    number = int(words[3], 16)
    return {
        "local": address(words[1]),
        "remote": address(words[2]),
        "state": TCP_STATES[number] if number < len(TCP_STATES) else str(number),
        "send_queue": sent,
        "receive_queue": received,
    }


def address(text: str) -> str:
    """`0100007F:1F90` is 127.0.0.1:8080: each four bytes in the machine's own order."""
    host, port = text.split(":")
    raw = b"".join(bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    shown = socket.inet_ntop(family, raw)
    return f"{shown}:{int(port, 16)}" if len(raw) == 4 else f"[{shown}]:{int(port, 16)}"


def limits(place: Path) -> dict[str, list[str]]:
    """Limit -> soft and hard, as the system writes them."""
    lines = (place / "limits").read_text().splitlines()[1:]
    cells = [[cell for cell in re.split(r"\s{2,}", line.strip()) if cell] for line in lines]
    return {row[0]: row[1:3] for row in cells if len(row) > 2}


def _stat(place: Path) -> list[str]:
    """The fields behind the name, which may hold anything: the first is the state."""
    text = (place / "stat").read_text(errors="replace")
    return text[text.rindex(")") + 2 :].split()


def _fields(path: Path) -> dict[str, str]:
    lines = path.read_text(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _text(path: Path) -> str:
    """A small file, or "": these two are the administrator's only, on many systems."""
    try:
        return path.read_text(errors="replace").strip()[:TEXT_CHARS_MAX]
    except OSError:
        return ""
