"""A job whose ranks are processes of this machine: started, watched, and ended when one of them dies.

    hicache run --mode gloo -- fork server --+-- worker rank 0 --+
                                             +-- worker rank 1 --+-- gloo over loopback
                                             +-- ...           --+
        stdout of a worker: progress, warnings, its ending        stdin: `hung`, or closed

The fork server has imported torch, once for all of them, and does nothing but fork (`hicache/forks.py`).

A rank that dies leaves its peers in calls that fail soon, or never. They get a moment to close their logs by
themselves, are then told to end, and are killed in the end, each by its own process id.
"""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import hicache
from hicache.errors import ConfigError, HiCacheError, WorkloadError
from hicache.forks import LOST, Forked, Forks
from hicache.job import (
    Ending,
    Plan,
    PlanSpec,
    Progress,
    Result,
    Trace,
    TraceLimits,
    Warnings,
    result_of,
    write_summary,
)
from hicache.real_time import TIMEOUT_S
from hicache.transport.gloo import INSTALL
from hicache.worker import HUNG, UNREADABLE, collect_faults, read_ending

WORKER = "hicache.worker"
LOOPBACK = "127.0.0.1"
# Another process may take the port between our choosing it and rank 0's listening on it.
PORT_TRIES = 3
LOOK_S = 0.05
# Since the first rank has ended badly: what is done to those that have not ended, one after the other.
HUNG_AFTER_S = 1.0
TERMINATE_AFTER_S = 3.0
KILL_AFTER_S = 6.0
LAST_LINES, WORDS_CHARS_MAX = 20, 500
# The system has ended it by then, or never will.
BURIED_S = 5.0
# More than that do nothing but wait for each other.
PROCESSES_A_CORE = 8


def run_gloo(
    spec: PlanSpec,
    plan: Plan,
    *,
    out: Path,
    trace: Trace = "full",
    trace_limits: TraceLimits | None = None,
    timeout_s: float = TIMEOUT_S,
    progress: Progress | None = None,
    module: str = WORKER,
    ahead: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> Result:
    """Run a plan, each rank in a process of its own on this machine.

    Args:
        plan: what `spec` says, for the summary.
        out, trace, trace_limits, progress: as of `sim.world.simulate`; `memory` is not for processes.
        timeout_s: a wait for another rank or for storage that is older ends the run as hung.
        module: what a process runs: the worker, or one that looks at it; what that says goes to `say`.
        ahead: modules that it imports while it runs: all ranks have them from one import.

    Raises:
        ConfigError: the processes can't be started: no torch, or what one of them says.
        WorkloadError: the workload turned out to be unreadable; logs up to there are closed properly.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f"--mode gloo needs torch, which is not installed; {INSTALL}")
    count, cores = plan.config.topology.world_size, os.cpu_count() or 1
    if count > PROCESSES_A_CORE * cores:
        raise ConfigError(
            f"--mode gloo: {count} processes for {cores} cores, at most {PROCESSES_A_CORE} a core; "
            "--plan-out writes the plan for torchrun on several machines, --mode sim needs one thread"
        )
    warnings = Warnings()
    environment = _environment()
    with TemporaryDirectory(prefix="hicache-") as folder, Forks(environment, module, ahead=ahead) as forks:
        path = Path(folder) / "plan.json"
        path.write_text(spec.to_json(), encoding="utf-8")
        words = ["--plan", str(path), "--out", str(out), "--trace", trace, "--report"]
        limits = json.dumps(asdict(trace_limits or TraceLimits()))
        words += ["--trace-limits", limits, "--timeout", str(timeout_s)]
        for tries_left in reversed(range(PORT_TRIES)):
            crew = _Crew(count, warnings, progress, module, say)
            try:
                crew.start(forks, words, environment)
                crew.run()
            except _PortTakenError:
                if not tries_left:
                    raise
                continue
            except WorkloadError:
                _summarise(plan, crew.endings, out, warnings, trace=trace)
                raise
            except KeyboardInterrupt as error:
                outcome = "stopped" if isinstance(error, TerminatedError) else "interrupted"
                with _uninterrupted():
                    crew.close()
                    _summarise(plan, crew.endings, out, warnings, trace=trace, outcome=outcome)
                raise
            finally:
                crew.close()
            break
    return _summarise(plan, crew.endings, out, warnings, trace=trace)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ranks are closing their logs, which takes seconds at most: a second Ctrl-C is not heard."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


def _summarise(
    plan: Plan,
    endings: dict[int, Ending],
    out: Path,
    warnings: Warnings,
    *,
    trace: Trace,
    outcome: str = "",
) -> Result:
    for rank in range(plan.config.topology.world_size):
        endings.setdefault(rank, Ending(rank, "stopped"))
    collect_faults(plan, endings)
    result = result_of(plan, endings)
    if trouble := write_summary(out, plan, result, trace=trace, outcome=outcome, mode="gloo"):
        warnings(trouble)
    return result


class TerminatedError(KeyboardInterrupt):
    """This process was told to end by SIGTERM; raised by whoever installs a handler for it."""


class _PortTakenError(HiCacheError):
    """Somebody else listens where rank 0 wanted to."""


@dataclass(slots=True, eq=False)
class _Process:
    """One worker and what it has said so far.

    Attributes:
        ending: as it told, or as its death tells; None while it runs.
        refusal: text and exit code of what it could not start with.
        sent: signals that were sent to it from here.
    """

    rank: int
    handle: Forked
    last_words: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    ending: Ending | None = None
    refusal: tuple[str, int] | None = None
    progress: tuple[int, float] = (0, 0.0)
    open_streams: int = 2
    sent: set[int] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        """It is gone, and all that it said has been read."""
        return self.open_streams == 0 and self.handle.poll() is not None


class _Crew:
    """All workers of one run, from start to end."""

    def __init__(
        self,
        count: int,
        warnings: Warnings,
        progress: Progress | None,
        module: str = WORKER,
        say: Callable[[str], None] = print,
    ) -> None:
        self._count = count
        self._warnings = warnings
        self._progress = progress
        self._module = module
        self._say = say
        self._selector = selectors.DefaultSelector()
        self._buffers: dict[int, bytes] = {}
        # When the first rank ended badly, and what has been done about the others.
        self._bad_since: float | None = None
        self._is_told = False
        self._signals: list[tuple[float, signal.Signals]] = [
            (TERMINATE_AFTER_S, signal.SIGTERM),
            (KILL_AFTER_S, signal.SIGKILL),
        ]
        self._processes: list[_Process] = []

    @property
    def endings(self) -> dict[int, Ending]:
        return {each.rank: each.ending for each in self._processes if each.ending is not None}

    def start(self, forks: Forks, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start all of them; whoever calls closes the crew, also when only some could be started.

        Raises:
            ConfigError: the system does not let one of them start.
        """
        port = _free_port()
        for rank in range(self._count):
            own = {
                **environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self._count),
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": str(port),
            }
            try:
                handle = forks.start(self._module, words, own)
            except OSError as error:
                raise ConfigError(
                    f"process {rank} of {self._count} can't be started: {error.strerror or error}"
                ) from None
            process = _Process(rank, handle)
            self._processes.append(process)
            for stream in (handle.stdout, handle.stderr):
                self._selector.register(stream, selectors.EVENT_READ, (process, stream))

    def run(self) -> None:
        """Watch until all processes are gone.

        Raises:
            ConfigError, WorkloadError: one of them could not start, or could not read its workload.
        """
        while not all(each.is_over for each in self._processes):
            for key, _ in self._selector.select(LOOK_S):
                self._read(*key.data)
            for each in self._processes:
                if each.is_over and each.ending is None:
                    self._bury(each)
            self._press()
            if self._progress is not None:
                self._progress(*self._far())
        for each in self._processes:
            if each.refusal is not None:
                text, code = each.refusal
                if "EADDRINUSE" in text or "address already in use" in text.lower():
                    raise _PortTakenError(text)
                raise WorkloadError(text) if code == UNREADABLE else ConfigError(text)

    def close(self) -> None:
        """End whoever is still there, each by its own id, and read what it says while it closes its logs."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            until = time.monotonic() + TERMINATE_AFTER_S
            self._send(number)
            while not all(each.is_over for each in self._processes) and time.monotonic() < until:
                for key, _ in self._selector.select(LOOK_S):
                    self._read(*key.data)
        for each in self._processes:
            each.handle.wait(BURIED_S)
            for stream in (each.handle.stdin, each.handle.stdout, each.handle.stderr):
                _close(stream)
        self._selector.close()

    def _read(self, process: _Process, stream: IO[bytes]) -> None:
        fd = stream.fileno()
        data = os.read(fd, 1 << 16)
        if not data:
            self._selector.unregister(stream)
            process.open_streams -= 1
            # What it said last may have no end.
            data = b"\n"
        *lines, rest = (self._buffers.get(fd, b"") + data).split(b"\n")
        self._buffers[fd] = rest
        for line in lines:
            text = line.decode(errors="replace").strip()
            if stream is process.handle.stdout:
                self._hear(process, text)
            elif text:
                process.last_words.append(text[:WORDS_CHARS_MAX])

    def _hear(self, process: _Process, text: str) -> None:
        """One line of a worker's stdout; libraries say things there too."""
        try:
            said = json.loads(text)
            what, value = said["hicache"], said["value"]
        except (ValueError, TypeError, KeyError):
            return
        if what == "progress" and isinstance(value, list) and len(value) == 2:
            process.progress = (value[0], value[1])
        elif what == "warning":
            self._warnings(value)
        elif what == "observed":
            self._say(value)
        elif what == "refused":
            process.refusal = (value[0], value[1])
            self._ended(process, Ending(process.rank, "stopped", value[0]))
        elif what == "ending":
            self._ended(process, read_ending(value))

    def _ended(self, process: _Process, ending: Ending) -> None:
        if process.ending is None:
            process.ending = ending
        if ending.outcome != "completed" and self._bad_since is None:
            self._bad_since = time.monotonic()

    def _bury(self, process: _Process) -> None:
        """A process that is gone without a word: it died, unless it was told to."""
        code = process.handle.returncode
        assert code is not None, "a process that is over has a code"
        # Not by when it died: a peer that lost it may have been heard first.
        if -code in process.sent:
            self._ended(process, Ending(process.rank, "stopped", "it did not end by itself"))
            return
        if code == LOST:
            how = "and the one that forked it"
        else:
            how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        last = f": {process.last_words[-1]}" if process.last_words else ""
        self._ended(process, Ending(process.rank, "crashed", f"its process died, {how}{last}"))

    def _press(self) -> None:
        """Once a rank has ended badly, end the others step by step."""
        if self._bad_since is None:
            return
        seconds = time.monotonic() - self._bad_since
        is_hung = any(ending.outcome == HUNG for ending in self.endings.values())
        if is_hung and not self._is_told and seconds > HUNG_AFTER_S:
            self._is_told = True
            for each in self._processes:
                _write(each.handle.stdin, f"{HUNG}\n".encode())
        if self._signals and seconds > self._signals[0][0]:
            self._send(self._signals.pop(0)[1])

    def _send(self, number: signal.Signals) -> None:
        for each in self._processes:
            if each.handle.poll() is None:
                each.sent.add(number)
                each.handle.send_signal(number)

    def _far(self) -> tuple[int, float]:
        """Requests served by all replicas, and how far they are."""
        told = [each.progress for each in self._processes if each.progress[1]]
        served = sum(own for own, _ in told)
        return served, sum(fraction for _, fraction in told) / max(1, len(told))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _environment() -> dict[str, str]:
    """Of the server and of all ranks: this process's, and what ranks need."""
    root = str(Path(hicache.__file__).parent.parent)
    return {
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", "")))),
    }


def _write(stream: IO[bytes], data: bytes) -> None:
    try:
        stream.write(data)
        stream.flush()
    except OSError:
        # It is gone already.
        return


def _close(stream: IO[Any]) -> None:
    try:
        stream.close()
    except OSError:
        return
