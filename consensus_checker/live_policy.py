"""What a process does when the ranks are found to differ, or one of them to be silent.

log        nothing more than to tell it
snapshot   keep verdict.json, the stacks of all threads, and the files of a ring
command    the finder's process runs a command, with the verdict on its standard input
abort      end the process: only for a divergence, or a rank that is silent or dead
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread, get_ident

from consensus_checker.live_posts import Published
from tracer.freeze import freeze
from tracer.sinks import FILE_MODE, FOLDER_MODE
from tracer.sinks import tell as safely
from tracer.snapshot.armed import write_stacks

LOG, SNAPSHOT, COMMAND, ABORT = "log", "snapshot", "command", "abort"
POLICIES = (LOG, SNAPSHOT, COMMAND, ABORT)
COMMAND_VARIABLE = "HICACHE_CHECKER_COMMAND"
VERDICT_VARIABLE = "HICACHE_VERDICT"
# A command that takes longer is ended.
COMMAND_S_MAX = 60.0
VERDICT_NAME = "verdict.json"
# A process runs one command at a time, however many verdicts there are.
_turn = Lock()


@dataclass(frozen=True, slots=True)
class Case:
    """What is acted on.

    Attributes:
        text: the verdict as JSON, for people and programs.
        is_own: this process has found it.
    """

    published: Published
    text: str
    rank: int
    folder: Path | None
    is_own: bool


def known_policy(policy: str, tell: Callable[[str], None]) -> str:
    """The policy, or `log` with a warning where nobody knows it."""
    if policy in POLICIES:
        return policy
    safely(tell, f"unknown policy {policy!r}: {LOG} it is; allowed are {', '.join(POLICIES)}")
    return LOG


def act(policy: str, case: Case, command: str | None, tell: Callable[[str], None]) -> None:
    """Do what the policy says, and never raise."""
    if policy == SNAPSHOT:
        _snapshot(case, tell)
    elif policy == COMMAND and case.is_own:
        Thread(target=_run, args=(case, command, tell), name="hicache command", daemon=True).start()


def _snapshot(case: Case, tell: Callable[[str], None]) -> None:
    if case.folder is None:
        safely(tell, "policy snapshot: there is no folder to keep it in; set HICACHE_TRACE_DIR")
        return
    try:
        case.folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        _write(case.folder / VERDICT_NAME, case.text)
        write_stacks(case.folder, case.rank)
    except OSError as error:
        safely(tell, f"policy snapshot: {case.folder}: {error.strerror}")
    freeze(case.folder, case.rank, case.published.when_ns)


def _write(path: Path, text: str) -> None:
    """All ranks write the same, at about the same time."""
    own = path.with_name(f".{path.name}.{os.getpid()}.{get_ident()}")
    with open(own, "w", encoding="utf-8", opener=_for_owner) as file:
        file.write(text)
    os.replace(own, path)


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)


def _run(case: Case, command: str | None, tell: Callable[[str], None]) -> None:
    command = command or os.environ.get(COMMAND_VARIABLE, "")
    try:
        words = shlex.split(command)
    except ValueError as error:
        safely(tell, f"policy command: {command!r} is no command: {error}")
        return
    if not words:
        safely(tell, f"policy command: there is none; set {COMMAND_VARIABLE}")
        return
    try:
        path = (case.folder or Path(tempfile.mkdtemp(prefix="hicache-"))) / VERDICT_NAME
        path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        _write(path, case.text)
    except OSError as error:
        safely(tell, f"policy command: {words[0]}: {error.strerror}")
        return
    with _turn:
        trouble = run_command(words, case.text, path)
    if trouble:
        safely(tell, f"policy command: {trouble}")


def run_command(words: Sequence[str], verdict: str, path: Path, *, limit_s: float = COMMAND_S_MAX) -> str:
    """Run a program, without a shell, with a verdict on its input, which is at `path` too.

    It has a session of its own, so that what it has started ends with it when its time is over.

    Returns:
        What went wrong with it, or nothing.
    """
    try:
        process = subprocess.Popen(
            words,
            env={**os.environ, VERDICT_VARIABLE: str(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        return f"{words[0]}: {error.strerror}"
    with process:
        try:
            process.communicate(verdict.encode(), timeout=limit_s)
        except subprocess.TimeoutExpired:
            return f"{words[0]} was ended after {limit_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return f"{words[0]} ended with {process.returncode}" if process.returncode else ""


def end_process() -> None:
    """Flush what has been said, and end at once: other threads may hang for ever."""
    for flush in (sys.stdout.flush, sys.stderr.flush, logging.shutdown):
        with suppress(Exception):
            flush()
    os._exit(1)
