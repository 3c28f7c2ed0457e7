"""One process under a snapshot: a thread that does everything about it, and what came of that.

Each kind of evidence fails by itself, with a reason. Nothing is raised, and whatever hangs is left behind,
with what there is so far.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tracer.snapshot import outside, procfs, recorder
from tracer.snapshot.pulse import Pulse
from tracer.snapshot.recorder import Recorder, Told

PROCESS_SCHEMA = "hicache.process.v1"
# A heart looks once a second whether somebody asks.
ANSWER_S = 3.0
NO_TURN = "no answer: no thread of it gets a turn, or its heart has stopped"
NOT_SENT = "no answer in time, and a signal is safe only where surely no thread of it gets a turn"
OWN, LOGS = "own", "logs"
# Kinds of evidence, in the order in which they are told.
KINDS = ("stacks", "flight_recorder", "process", "own_log", "log_tail", "py_spy")
STOPPED_REASON = "the process is stopped: nothing in it runs"
GONE_REASON = "the process has ended"


@dataclass(slots=True)
class Taken:
    """One process and what came of it; shared between its thread and whoever waits for that.

    Attributes:
        state: the letter that the system has for it; "" where there is no such process.
        tag: what its files are called by: `rank_3`, or `pid_4242`.
        files: kind of evidence -> files, relative to the snapshot.
        reasons: kind of evidence -> why there is none, or not all.
    """

    pid: int
    rank: int | None = None
    state: str = ""
    command: tuple[str, ...] = ()
    tag: str = ""
    files: dict[str, list[str]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def is_stopped(self) -> bool:
        return self.state in procfs.STOPPED

    def to_json(self) -> dict[str, Any]:
        return {
            "pid": self.pid,
            "rank": self.rank,
            "state": self.state,
            "command": list(self.command),
            "files": {kind: sorted(self.files[kind]) for kind in KINDS if kind in self.files},
            "reasons": {kind: self.reasons[kind] for kind in KINDS if kind in self.reasons},
        }


class Frame(Protocol):
    """What all processes of a snapshot share."""

    @property
    def until_s(self) -> float:
        """When evidence is not waited for any more, by the monotonic clock."""

    def question(self, folder: Path, look: int) -> str:
        """Number of the question that all processes of a folder are asked in one look.

        Raises:
            OSError: nothing can be asked there.
        """

    def wait_named(self) -> None:
        """Wait until every process has its tag."""

    def second_look(self, first_s: float) -> bool:
        """Wait for the time of the second look; false where there is none left for it."""

    def done(self, taken: Taken) -> None: ...


class Look(threading.Thread):
    """What is done about one process. A daemon: one that hangs keeps nobody."""

    def __init__(self, frame: Frame, taken: Taken, out: Path, proc: Path) -> None:
        super().__init__(name=f"snapshot {taken.pid}", daemon=True)
        self.taken = taken
        self.found = threading.Event()
        self.recorder: Recorder | None = None
        self.logs = out / OWN
        self._frame = frame
        self._out = out
        self._proc = proc
        self._variables: dict[str, str] = {}
        self._pulse: Pulse | None = None
        # What came of asking it for its stacks in the last look.
        self._told: Told = "come"
        self._is_done = False

    def run(self) -> None:
        try:
            self._find()
        finally:
            self.found.set()
        self._frame.wait_named()
        try:
            self._look()
        except OSError as error:
            self.taken.reasons.setdefault("process", f"not all was written: {error.strerror}")
        except Exception as error:
            # A kind of evidence that fails in a way nobody has thought of costs the ones behind it.
            self.taken.reasons.setdefault("process", f"internal: {type(error).__name__}: {error}")
        self._is_done = True
        self._frame.done(self.taken)

    def settled(self, seconds: float) -> Taken:
        """What there is by now, with the reason where that is not all; a copy, if the thread goes on."""
        own = self.taken
        if self._is_done:
            return own
        files = {kind: list(names) for kind, names in list(own.files.items())}
        late = f"not done within {seconds:g} s"
        reasons = {kind: late for kind in KINDS if kind not in files} | dict(own.reasons)
        # It was looked at, and not as often as it should have been.
        reasons.setdefault("process", late)
        tag = own.tag or f"pid_{own.pid}"
        return Taken(own.pid, own.rank, own.state, own.command, tag, files, reasons)

    def _find(self) -> None:
        """Which rank it is."""
        own = self.taken
        own.state = procfs.state(own.pid, self._proc)
        place = self._proc / str(own.pid)
        with suppress(OSError):
            own.command = tuple(procfs.command(place))
        found = recorder.find_recorder(own.pid, self._proc)
        if isinstance(found, Recorder):
            self.recorder, own.rank = found, found.rank
            self._pulse = Pulse(found.folder, found.rank)
        else:
            own.reasons["own_log"] = found
        with suppress(OSError):
            self._variables = procfs.variables(place)
        if own.rank is None and self._variables.get("RANK", "").isdecimal():
            own.rank = int(self._variables["RANK"])

    def _look(self) -> None:
        own = self.taken
        if not own.state or own.state in procfs.GONE:
            reason = GONE_REASON if own.state else "there is no such process"
            own.reasons |= dict.fromkeys((kind for kind in KINDS if kind not in own.reasons), reason)
            return
        first_s = time.monotonic()
        self._one(1)
        self._copies()
        if self._frame.second_look(first_s):
            self._one(2)
        else:
            own.reasons.setdefault("process", "no time left for a second look")

    def _one(self, look: int) -> None:
        """One look at the process: the cheap things first."""
        own, folder = self.taken, self._out / str(look)
        facts, failed = procfs.facts(own.pid, self._proc)
        own.state = facts.get("status", {}).get("state", own.state)
        document = {"schema": PROCESS_SCHEMA, "look": look, "rank": own.rank, "host": socket.gethostname()}
        text = json.dumps({**document, **facts, "reasons": failed}, indent=1) + "\n"
        recorder.write(folder / f"process_{own.tag}.json", text.encode())
        self._has("process", folder / f"process_{own.tag}.json")
        if failed:
            own.reasons["process"] = "; ".join(f"{part}: {reason}" for part, reason in failed.items())
        if own.is_stopped:
            for kind in ("stacks", "flight_recorder"):
                own.reasons[kind] = STOPPED_REASON
        else:
            self._inside(folder, look)
        target = folder / f"py_spy_{own.tag}.txt"
        self._note("py_spy", outside.py_spy(own.pid, target, self._frame.until_s), target)

    def _inside(self, folder: Path, look: int) -> None:
        """What the process itself has to say."""
        own, found = self.taken, self.recorder
        number, asked = "", ""
        if found is not None:
            try:
                number = self._frame.question(found.folder, look)
            except OSError as error:
                asked = f"its folder can't be written to: {error.strerror}"
            self._stacks(found, number, asked or NOT_SENT, folder)
        else:
            own.reasons["stacks"] = own.reasons["own_log"]
        dump = folder / f"comm_lib_trace_rank_{own.rank if own.rank is not None else own.pid}"
        reason = outside.flight_recorder(own.pid, self._variables, dump, self._frame.until_s, self._proc)
        if reason and found is not None and number:
            reason = self._answer(found, number, dump)
        self._note("flight_recorder", asked or reason, dump)

    def _stacks(self, found: Recorder, number: str, otherwise: str, folder: Path) -> None:
        """By a thread of the process; by a signal only where none of them gets a turn."""
        target = folder / f"stacks_{self.taken.tag}.txt"
        pulse = self._pulse
        assert pulse is not None
        until_s = min(self._frame.until_s, time.monotonic() + ANSWER_S)
        try:
            self._told = recorder.await_stacks(found, number, pulse, target, until_s)
        except OSError as error:
            self.taken.reasons["stacks"] = f"its stacks can't be copied: {error.strerror}"
            return
        reason = otherwise if self._told == "late" else ""
        if self._told == "held" and found.card is None:
            reason = found.reason
        elif self._told == "held" and found.card is not None:
            reason = recorder.take_stacks(self.taken.pid, found.card, target, self._frame.until_s, self._proc)
            if not reason:
                # Those of when it began: nobody in it can say the ones of now.
                names = json.dumps(dict(found.card.names)).encode()
                recorder.write(recorder.names_of(target), names)
        self._note("stacks", reason, target)

    def _answer(self, found: Recorder, number: str, dump: Path) -> str:
        """Take over what the process has written; why there is no dump among it, or ""."""
        if self._told == "held":
            return NO_TURN
        # Stacks come first: where they did not, nothing else will.
        seconds = ANSWER_S if self._told == "come" else 0.0
        until_s = min(self._frame.until_s, time.monotonic() + seconds)
        answers, told = recorder.take_answer(found.folder, number, found.rank, until_s)
        if answers is None:
            return f"no answer within {ANSWER_S:g} s"
        if reason := str(told.get("flight_recorder") or ""):
            return reason
        try:
            recorder.write(dump, (answers / f"comm_lib_trace_rank_{found.rank}").read_bytes())
        except OSError as error:
            return f"its dump can't be read: {error.strerror}"
        return ""

    def _copies(self) -> None:
        """Its logs: ours, and the ends of what it says."""
        own = self.taken
        if self.recorder is not None:
            try:
                names, missing = recorder.copy_logs(self.recorder, self.logs)
                for name in names:
                    self._has("own_log", self.logs / name)
                if missing or not names:
                    own.reasons["own_log"] = missing or "its folder has no file of it any more"
            except OSError as error:
                own.reasons["own_log"] = f"its logs can't be copied: {error.strerror}"
        written, reason = outside.log_tails(own.pid, self._out / LOGS, own.tag, self._proc)
        for name in written:
            self._has("log_tail", self._out / LOGS / name)
        if reason:
            own.reasons["log_tail"] = reason

    def _note(self, kind: str, reason: str, file: Path) -> None:
        if reason:
            self.taken.reasons[kind] = reason
        else:
            self._has(kind, file)

    def _has(self, kind: str, file: Path) -> None:
        self.taken.files.setdefault(kind, []).append(str(file.relative_to(self._out)))
