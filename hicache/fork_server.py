"""Forks ranks from a process that has imported what each of them would import by itself.

    whoever starts ranks == socket == this process: one thread; torch is imported and never used here
                                          +-- fork, setsid: a rank with a pid and three pipes of its own
                                          +-- fork, setsid: ...

    python -m hicache.fork_server FD MODULE...     started by `hicache.forks`, which has the other end

One question at a time, each with one answer, each a line of JSON. An answer has the number of its question,
since whoever asked may have been interrupted before it was read.

    {"start": module, "words": [...], "environment": {...}, "folder": null}    with the ends of three pipes
    {"look": pid}                      how it ended: null while it runs, else its exit code, minus a signal
    {"signal": pid, "number": 15}      from here, since only here it is known whose pid it still is

A rank does not outlive this process, nor this process its ranks and whoever started it. It must never keep an
end of a rank's pipe open: whoever reads would not see the rank die.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

# What every rank is made of.
WORKER = "hicache.worker"
QUESTION_BYTES = 1 << 16
PIPES = 3
# Ranks close their logs by themselves when whoever started them is gone; none may stay for ever.
CLOSING_S = 30.0
LOOK_S = 0.05
PR_SET_PDEATHSIG = 1


class ForkServer:
    """Its children, and the socket over which it is asked for them."""

    def __init__(self, asker: socket.socket) -> None:
        self._asker = asker
        self._said = b""
        # How each has ended; None while it runs.
        self._children: dict[int, int | None] = {}

    def serve(self) -> str | None:
        """Answer until nobody can ask any more. In a child: at once, with the module that it is to run."""
        while (question := self._next()) is not None:
            asked, pipes = question
            if "start" in asked:
                answer = self._start(asked, pipes)
                if answer is None:
                    return str(asked["start"])
            elif "signal" in asked:
                answer = self._signal(asked["signal"], asked["number"])
            else:
                answer = {"code": self._look(asked["look"])}
            with suppress(OSError):
                self._asker.sendall(json.dumps({"number": asked["question"], **answer}).encode() + b"\n")
        self._wait_for_all()
        return None

    def _next(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next question, with the pipes that came along; None at the end of all questions."""
        pipes: list[int] = []
        while b"\n" not in self._said:
            try:
                data, fds, _, _ = socket.recv_fds(self._asker, QUESTION_BYTES, PIPES)
            except ConnectionError:
                return None
            pipes += fds
            if not data:
                return None
            self._said += data
        line, self._said = self._said.split(b"\n", 1)
        return json.loads(line), pipes

    def _start(self, asked: dict[str, Any], pipes: Sequence[int]) -> dict[str, Any] | None:
        """None in the child."""
        own = os.getpid()
        try:
            if len(pipes) != PIPES:
                raise OSError(None, f"{len(pipes)} of its {PIPES} pipes have come")
            pid = os.fork()
        except OSError as error:
            return {"error": error.strerror or str(error)}
        finally:
            if os.getpid() == own:
                for fd in pipes:
                    os.close(fd)
        if pid == 0:
            self._asker.close()
            become(asked["words"], asked["environment"], asked["folder"], pipes, parent=own)
            return None
        self._children[pid] = None
        return {"pid": pid}

    def _look(self, pid: int) -> int | None:
        if self._children[pid] is None:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._children[pid] = os.waitstatus_to_exitcode(status)
        return self._children[pid]

    def _signal(self, pid: int, number: int) -> dict[str, Any]:
        if self._look(pid) is None:
            os.kill(pid, number)
        return {}

    def _wait_for_all(self) -> None:
        """Whoever started them is gone, and so are the other ends of their pipes: they end by themselves."""
        until = time.monotonic() + CLOSING_S
        while any(self._look(pid) is None for pid in self._children):
            if time.monotonic() > until:
                for pid in self._children:
                    self._signal(pid, signal.SIGKILL)
            time.sleep(LOOK_S)


def become(
    words: Sequence[str],
    environment: dict[str, str],
    folder: str | None,
    pipes: Sequence[int],
    *,
    parent: int,
) -> None:
    """Make this fresh child what a process of its own would be when it runs a module with these words.

    Args:
        folder: to work in; None for that of the server.
        pipes: ends that become stdin, stdout and stderr.
    """
    os.setsid()
    end_with(parent)
    for number, fd in enumerate(pipes):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    # It was looked up in the environment of the server, if at all.
    tempfile.tempdir = None
    if folder is not None:
        os.chdir(folder)
        # Where `python -m` looks first.
        sys.path[0] = folder
    sys.argv[1:] = words
    gc.enable()


def end_with(parent: int) -> None:
    """Be killed when the parent dies, where the system can do that."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def import_ahead(module: str, more: Sequence[str]) -> None:
    """What ranks need; one that can't be imported is each rank's own to tell, when it tries.

    Args:
        module: that they will run as `__main__`: what it holds is made then, what it imports is here.
        more: modules that it imports while it runs.
    """
    # Nothing of this is ever given back, and children that look through it would copy it.
    gc.disable()
    for name in (WORKER, module, *more):
        with suppress(Exception):
            importlib.import_module(name)
    with suppress(Exception):
        from hicache.transport.gloo import import_torch

        import_torch()
    for name in (WORKER, module):
        sys.modules.pop(name, None)
    gc.freeze()


def main() -> str | None:
    """The module that this process is to run: none in the server itself, where all is over."""
    with socket.socket(fileno=int(sys.argv[1])) as asker:
        os.set_inheritable(asker.fileno(), False)
        import_ahead(sys.argv[2], sys.argv[3:])
        return ForkServer(asker).serve()


if __name__ == "__main__":
    # From out here, so that a rank's stack has nothing of the server in it.
    if (chosen := main()) is not None:
        runpy.run_module(chosen, run_name="__main__", alter_sys=True)
    else:
        os._exit(0)
