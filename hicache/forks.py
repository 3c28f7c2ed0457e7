"""Processes forked from a server that has imported torch once, held as `subprocess` would hold them.

    with Forks(environment, "hicache.worker") as forks:
        rank = forks.start("hicache.worker", ["--plan", ...], environment | {"RANK": "3"})
        rank.stdout.read(); rank.wait(10)

Each has a pid, a session, an environment, pipes and an exit code of its own. What is read of the environment
when an interpreter begins or torch is imported (PYTHONPATH, PYTHONWARNINGS, PYTHONHASHSEED, OMP_NUM_THREADS)
is the server's for all of them. See `docs/decisions/0009-ranks-are-forked.md`.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

SERVER = "hicache.fork_server"
# The server does nothing but answer. One that is silent for so long will not speak any more.
ANSWER_S = 30.0
LOOK_S = 0.01
# The code of a process that went with its server. None has it by itself: those are below 256.
LOST = 256


class LostServerError(OSError):
    """The process that forks is gone, and all that it has forked with it."""


class Forked:
    """One forked process; whoever started it closes its streams.

    Attributes:
        returncode: None while it is not known to have ended; minus a signal; or `LOST`.
    """

    def __init__(self, forks: Forks, pid: int, pipes: Sequence[int]) -> None:
        self._forks = forks
        self.pid = pid
        self.stdin: IO[bytes] = os.fdopen(pipes[0], "wb")
        self.stdout: IO[bytes] = os.fdopen(pipes[1], "rb")
        self.stderr: IO[bytes] = os.fdopen(pipes[2], "rb")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                self.returncode = self._forks.ask(look=self.pid)["code"]
            except LostServerError:
                self.returncode = LOST
        return self.returncode

    def wait(self, timeout_s: float) -> int | None:
        """Its code as soon as there is one, None when there is none in time."""
        until = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < until:
            time.sleep(LOOK_S)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing happens to one that has ended."""
        try:
            self._forks.ask(signal=self.pid, number=number)
        except LostServerError:
            self.returncode = LOST


class Forks:
    """The server and the socket to it; it is started with the first process.

    Args:
        environment: of the server.
        module: that processes will run; what it imports is imported once.
        ahead: modules that it imports only while it runs.
    """

    def __init__(self, environment: Mapping[str, str], module: str, *, ahead: Sequence[str] = ()) -> None:
        self._environment = environment
        self._ahead = [module, *ahead]
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._last_words: IO[bytes] | None = None
        self._answers = b""
        self._numbers = itertools.count()

    def __enter__(self) -> Forks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(
        self, module: str, words: Sequence[str], environment: Mapping[str, str], *, folder: Path | None = None
    ) -> Forked:
        """Run a module as `python -m` does.

        Args:
            folder: to work in; None for that in which the server was started.

        Raises:
            OSError: it can't be started; `LostServerError` if that is since the server is gone.
        """
        if self._server is None:
            try:
                self._start_server()
            except BaseException:
                self.close()
                raise
        (stdin, own_in), (own_out, stdout), (own_err, stderr) = pipes = [os.pipe() for _ in range(3)]
        try:
            answer = self.ask(
                (stdin, stdout, stderr),
                start=module,
                words=list(words),
                environment=dict(environment),
                folder=None if folder is None else str(folder),
            )
            if "error" in answer:
                raise OSError(None, answer["error"])
        except BaseException:
            for fd in itertools.chain(*pipes):
                os.close(fd)
            raise
        # Its own ends, or nobody would see it close them.
        for fd in (stdin, stdout, stderr):
            os.close(fd)
        return Forked(self, answer["pid"], (own_in, own_out, own_err))

    def ask(self, pipes: Sequence[int] = (), **question: Any) -> dict[str, Any]:
        """One question and its answer; see `hicache.fork_server`.

        Raises:
            LostServerError: there is none, and there never will be.
        """
        if self._socket is None:
            raise LostServerError(None, "the process that forks them is gone")
        number = next(self._numbers)
        # It answers at once, but for its first question: importing torch may take a while on a cold disk.
        self._socket.settimeout(ANSWER_S if number else None)
        try:
            line = json.dumps({"question": number, **question}).encode() + b"\n"
            # The pipes come with the first byte.
            socket.send_fds(self._socket, [line[:1]], pipes)
            self._socket.sendall(line[1:])
            while (answer := self._answer()).get("number") != number:
                continue
        except OSError:
            raise LostServerError(None, self._lose()) from None
        return answer

    def close(self) -> None:
        """End the server, and whatever it has forked that is still there."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        if self._last_words is not None:
            self._last_words.close()
            self._last_words = None

    def _start_server(self) -> None:
        self._last_words = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        own, theirs = socket.socketpair()
        with theirs:
            self._socket = own
            self._server = subprocess.Popen(
                [sys.executable, "-m", SERVER, str(theirs.fileno()), *self._ahead],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=self._last_words,
                stderr=self._last_words,
                pass_fds=(theirs.fileno(),),
                # Ctrl-C is for whoever started it to hear.
                start_new_session=True,
            )

    def _answer(self) -> dict[str, Any]:
        assert self._socket is not None
        while b"\n" not in self._answers:
            # What has come stays here when the wait for the rest is interrupted.
            data = self._socket.recv(1 << 12)
            if not data:
                raise ConnectionError
            self._answers += data
        line, self._answers = self._answers.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _lose(self) -> str:
        """Give it up, with all that it has forked; why, as far as it can be told."""
        assert self._server is not None and self._last_words is not None and self._socket is not None
        self._socket.close()
        self._socket = None
        try:
            code = self._server.wait(1.0)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
            return f"the process that forks them has not answered for {ANSWER_S:g} seconds"
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        self._last_words.seek(0)
        lines = self._last_words.read().decode(errors="replace").split("\n")
        last = next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")
        return f"the process that forks them died, {how}{last}"
