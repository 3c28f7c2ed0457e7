"""Ranks that stop in twelve ways, over real gloo, and some that do not; the evidence that they leave.

    python -m tests.support.stalls FOLDER [--snapshot CASE] [CASE...]

A parent imports torch once and forks each case's ranks. They loop as a server's schedulers do until one of
them goes wrong; a thread beside each writes what other tools would have: flight recorder dumps and stacks.
In the end all are killed, so that nobody closes a log. What a case leaves:

    CASE/own/      rank0002.scheduler.000.jsonl, rank0002.heart.000.jsonl, ...
    CASE/foreign/  look1/ look2/ look3/  comm_lib_trace_rank_2, stacks_rank_2.txt, stacks_rank_2.threads.json
                   rank_2.log                       what it said on stdout and stderr

The first look is at ranks that go on, the others are behind the stall. A rank that is stopped or dead by
then has only the first one. After `--snapshot` a case has what `hicache snapshot` finds too, in `snapshot/`.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from consensus_checker import configure, rank_consensus, shutdown
from consensus_checker.consensus import SWITCH
from hicache.probes import MEETING
from tests.support.processes import ROOT, free_port
from tests.support.sleepers import PR_SET_PDEATHSIG, hold_interpreter
from tracer.heart import Heart
from tracer.record import HEART_LANE, MAIN_LANE, Kind, Outcome, Place, header
from tracer.segments import SegmentSink
from tracer.sinks import write_meta
from tracer.snapshot.armed import arm
from tracer.tracer import Tracer

# The first look is taken in a step in which all is well, the others when nothing has moved for so long.
WELL_STEP, LAST_STEP = 10, 40
STEP_S = 0.01
STILL_S = (0.4, 0.8)
# Where the heart is the recorder's own, which beats once a second.
DECORATED_STILL_S = (1.0, 2.2)
LAST_LOOK = 1 + len(STILL_S)
# Whatever happens, a case is over by then.
CASE_S = 12.0
GLOO_TIMEOUT = timedelta(seconds=60)
LONG_S = 3600.0
HEART_S = 0.2

REPLICA = ("tp", "pp")
RECEIVE = Kind("request", "event", agree=REPLICA, compared=("order",))
ROUND = Kind("event_round", "decision", agree=REPLICA, compared=("numel", "drained"), local=("writes_done",))
LOAD = Kind("load_back", "decision", agree=REPLICA, compared=("node", "tokens"), local=("device_pages_free",))


@dataclass(frozen=True, slots=True)
class Case:
    """One way to stop.

    Attributes:
        odd: the rank that goes wrong.
        code: the exit code of the right verdict with the ranks' own logs.
        classes: codes that are right where only others' evidence is there: what came of a decision.
        step: in which it goes wrong. There is something to compute in even ones only.
        is_pipeline: ranks are stages that hand on messages, and no tensor-parallel group.
        is_decorated: their own log is that of `rank_consensus`: calls, and no collectives.
        like: the case whose way to go wrong it takes, its own if none is named.
    """

    name: str
    size: int
    odd: int
    code: int
    classes: tuple[int, ...]
    step: int = 24
    is_pipeline: bool = False
    is_decorated: bool = False
    like: str = ""

    @property
    def way(self) -> str:
        return self.like or self.name

    @property
    def axis(self) -> str:
        return "pp" if self.is_pipeline else "tp"


CASES = {
    case.name: case
    for case in (
        Case("skipped_vote", 3, 2, 10, (11,), step=25),
        Case("extra_vote", 3, 1, 10, (11,), step=25),
        Case("different_size", 3, 1, 10, (16,)),
        Case("different_op", 3, 2, 10, (16,)),
        Case("late_rank", 3, 2, 11, (11,)),
        Case("killed", 3, 1, 14, (14,)),
        # From outside a process that is stopped and one that only does not come look alike.
        Case("stopped", 3, 2, 14, (11, 14)),
        Case("holds_the_gil", 3, 0, 14, (11, 15)),
        Case("idle_rank", 4, 3, 11, (11, 15)),
        Case("abort_by_gloo", 3, 1, 10, (14, 16)),
        Case("opposite_order", 3, 2, 10, (11,)),
        Case("pipeline", 3, 1, 11, (11, 15), is_pipeline=True),
    )
}
# Nobody goes wrong in it; it is looked at while it goes on, and comes to its end.
HEALTHY = Case("healthy", 3, -1, 0, (0, 4))
# A program that is not ours, with SGLang's decorator on what must be alike.
DECORATED = replace(CASES["late_rank"], name="decorated", is_decorated=True, like="late_rank")


class Log:
    """One rank's own log: the lane that decides, and the heart beside it."""

    def __init__(self, case: Case, folder: Path, rank: int) -> None:
        axis = case.axis
        everybody = list(range(case.size))
        groups = {f"{axis}0/{channel}": everybody for channel in ("main", "events")}
        place = Place(rank, {axis: rank}, {axis: case.size}, groups)
        write_meta(folder, rank)
        self.tracer = self._lane(place, case, folder, MAIN_LANE, has_steps=True)
        sink = SegmentSink(folder, rank, HEART_LANE)
        beats = Tracer(sink, self._header(place, case, HEART_LANE), time.monotonic_ns)
        lanes = {MAIN_LANE: self.tracer}
        self.heart = Heart(
            beats, sink, lanes, folder, rank, clock=time.monotonic_ns, main=MAIN_LANE, period_s=HEART_S
        )
        self.heart.start()
        self.enter = self.tracer.emitter(MEETING, phase="enter")
        self.leave = self.tracer.emitter(MEETING, phase="leave")
        self.request = self.tracer.emitter(RECEIVE)
        self.round_call = self.tracer.emitter(ROUND, phase="call")
        self.round_return = self.tracer.emitter(ROUND, phase="return")
        self.load = self.tracer.emitter(LOAD)

    def close(self, outcome: Outcome) -> None:
        self.tracer.close(outcome)
        self.heart.stop(outcome)

    def _lane(self, place: Place, case: Case, folder: Path, lane: str, *, has_steps: bool) -> Tracer:
        sink = SegmentSink(folder, place.rank, lane)
        return Tracer(sink, self._header(place, case, lane), time.monotonic_ns, has_steps=has_steps)

    def _header(self, place: Place, case: Case, lane: str) -> dict[str, Any]:
        kinds = (MEETING, RECEIVE, ROUND, LOAD)
        return header(place, kinds, lane=lane, run_id=f"stall {case.name}", tool_version="test")


class Meetings:
    """Collectives and messages of one rank, each with its records."""

    def __init__(self, log: Log, rank: int, axis: str, groups: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        self._log = log
        self._rank = rank
        self._axis = axis
        self._groups = groups
        self._made: dict[str, int] = {}

    def all_reduce(self, channel: str, purpose: str, numel: int) -> None:
        tensor, group = self._torch.ones(numel, dtype=self._torch.int64), self._groups[channel]
        self._meet(
            channel, purpose, "all_reduce", "sum", numel, lambda: self._dist.all_reduce(tensor, group=group)
        )

    def broadcast(self, channel: str, purpose: str, numel: int) -> None:
        tensor, group = self._torch.ones(numel, dtype=self._torch.int64), self._groups[channel]
        self._meet(
            channel, purpose, "broadcast", "", numel, lambda: self._dist.broadcast(tensor, 0, group=group)
        )

    def send(self, peer: int, purpose: str) -> None:
        tensor = self._torch.ones(4, dtype=self._torch.int64)
        self._message(peer, purpose, "send", lambda: self._dist.send(tensor, peer))

    def receive(self, peer: int, purpose: str) -> None:
        tensor = self._torch.ones(4, dtype=self._torch.int64)
        self._message(peer, purpose, "recv", lambda: self._dist.recv(tensor, peer))

    def _meet(
        self, channel: str, purpose: str, op: str, reduce: str, numel: int, call: Callable[[], Any]
    ) -> None:
        name = f"{self._axis}0/{channel}"
        seq = self._next(name)
        fields = (self._axis, purpose, op, reduce, numel, name, seq, None, None)
        self._log.enter(*fields)
        call()
        self._log.leave(*fields)

    def _message(self, peer: int, purpose: str, op: str, call: Callable[[], Any]) -> None:
        first, second = (self._rank, peer) if op == "send" else (peer, self._rank)
        name = f"{self._axis}0/main:{first}>{second}"
        fields = (self._axis, purpose, op, "", 4, name, self._next(name), peer, None)
        self._log.enter(*fields)
        call()
        self._log.leave(*fields)

    def _next(self, name: str) -> int:
        self._made[name] = self._made.get(name, -1) + 1
        return self._made[name]


class Rank:
    """One rank of a case: the loop of a scheduler, and what goes wrong with it."""

    def __init__(self, case: Case, rank: int, log: Log, meetings: Meetings, witness: Witness) -> None:
        self.case = case
        self.witness = witness
        self.rank = rank
        self.log = log
        self.meetings = meetings
        self.requests: queue.Queue[int] = queue.Queue()
        self.pages_held = threading.Lock()

    def event_loop(self) -> None:
        step = self.stage_step if self.case.is_pipeline else self.scheduler_step
        number = 0
        while self.case is not HEALTHY or number < LAST_STEP:
            self.log.tracer.begin_step(number)
            is_odd = number == self.case.step and self.rank == self.case.odd
            if is_odd:
                self.witness.mark()
            if self.case is HEALTHY and number % WELL_STEP == WELL_STEP // 2:
                self.witness.wait(number // WELL_STEP)
            step(number, is_odd=is_odd)
            self.log.tracer.end_step(is_idle=False)
            time.sleep(STEP_S)
            number += 1

    def scheduler_step(self, number: int, *, is_odd: bool) -> None:
        wrong = self.case.way if is_odd else ""
        if wrong == "idle_rank":
            self.wait_for_requests()
        if wrong == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        self.recv_requests(number)
        if wrong == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if wrong == "opposite_order":
            self.forward(number)
            self.check_hicache_events(number)
            return
        if wrong != "skipped_vote":
            self.check_hicache_events(number, numel={"different_size": 2, "abort_by_gloo": 8}.get(wrong, 4))
        if wrong == "extra_vote":
            self.check_hicache_events(number)
        if number % 2 == 0:
            self.load_back(number, wrong)
            self.forward(number, op="broadcast" if wrong == "different_op" else "all_reduce")

    def recv_requests(self, number: int) -> None:
        self.meetings.broadcast("main", "receive_requests", 16)
        self.log.request(number)

    def wait_for_requests(self) -> int:
        return self.requests.get()

    def check_hicache_events(self, number: int, *, numel: int = 4) -> None:
        self.log.round_call(numel, 0, number % 3)
        self.writing_check(numel)
        self.log.round_return(numel, 1, number % 3)

    def writing_check(self, numel: int) -> None:
        self.meetings.all_reduce("events", "event_round", numel)

    def load_back(self, number: int, wrong: str) -> None:
        self.log.load(number, 64, 100)
        if wrong == "late_rank":
            self.copy_pages()
        if wrong == "holds_the_gil":
            self.hash_pages()

    def copy_pages(self) -> None:
        time.sleep(LONG_S)

    def hash_pages(self) -> None:
        self.witness.arm()
        hold_interpreter()

    def forward(self, number: int, *, op: str = "all_reduce") -> None:
        if op == "broadcast":
            self.meetings.broadcast("main", "forward", 256)
        else:
            self.meetings.all_reduce("main", "forward", 256)

    def stage_step(self, number: int, *, is_odd: bool) -> None:
        """One microbatch, handed from stage to stage, and its answer back to the first."""
        self.log.request(number)
        if self.rank > 0:
            self.recv_hidden_states()
        if is_odd:
            self.take_pages()
        if self.rank < self.case.size - 1:
            self.send_hidden_states()
        if self.rank == self.case.size - 1:
            self.meetings.send(0, "output")
        if self.rank == 0:
            self.meetings.receive(self.case.size - 1, "output")

    def recv_hidden_states(self) -> None:
        self.meetings.receive(self.rank - 1, "hidden_states")

    def send_hidden_states(self) -> None:
        self.meetings.send(self.rank + 1, "hidden_states")

    def take_pages(self) -> None:
        """Wait for a lock that another thread, which is gone, has taken."""
        other = threading.Thread(target=self.pages_held.acquire, name="io")
        other.start()
        other.join()
        with self.pages_held:
            return


class Witness:
    """What other tools would write about this process, from a thread beside it."""

    def __init__(self, case: Case, folder: Path, rank: int) -> None:
        self._case = case
        self._folder = folder
        self._rank = rank
        self._taken = threading.Lock()
        self._count = 0

    def wait(self, count: int) -> None:
        """Until so many looks were taken: each is of another step."""
        while self._count < count:
            time.sleep(STEP_S / 4)

    def start(self, log: Log) -> None:
        self.thread = threading.Thread(target=self._work, args=(log,), name="witness", daemon=True)
        self.thread.start()

    def mark(self) -> None:
        """From here on this rank goes wrong."""
        (self._folder.parent / "wrong").touch()

    def arm(self) -> None:
        """Stacks by C alone, for whoever never lets another thread run."""
        file = self._file(2, f"stacks_rank_{self._rank}.txt").open("w")
        faulthandler.dump_traceback_later(STILL_S[0], file=file)

    def _work(self, log: Log) -> None:
        for number in range(1, LAST_LOOK + 1 if self._case is HEALTHY else 2):
            while log.tracer.step < WELL_STEP * number:
                time.sleep(STEP_S / 4)
            self.look(number)
            self._count = number
        if self._case is HEALTHY:
            return
        step, since_s, taken = log.tracer.step, time.monotonic(), 0
        still_s = DECORATED_STILL_S if self._case.is_decorated else STILL_S
        while taken < len(still_s):
            time.sleep(STEP_S)
            if log.tracer.step != step:
                step, since_s, taken = log.tracer.step, time.monotonic(), 0
            elif time.monotonic() > since_s + still_s[taken]:
                taken += 1
                self.look(1 + taken)

    def look(self, number: int) -> None:
        """One dump of each kind, beside the others of this look."""
        from torch._C import _distributed_c10d

        with self._taken:
            dump = _distributed_c10d._dump_fr_trace_json(True, False)
            self._file(number, f"comm_lib_trace_rank_{self._rank}").write_bytes(dump)
            with self._file(number, f"stacks_rank_{self._rank}.txt").open("w") as file:
                faulthandler.dump_traceback(file)
            names = {f"0x{thread.ident:016x}": thread.name for thread in threading.enumerate()}
            self._file(number, f"stacks_rank_{self._rank}.threads.json").write_text(json.dumps(names))

    def _file(self, number: int, name: str) -> Path:
        folder = self._folder / f"look{number}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name


def run_rank(case: Case, rank: int, port: int, folder: Path) -> None:
    """The whole life of one rank, in a process of its own. Does not return."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    foreign = folder / "foreign"
    output = os.open(foreign / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    outcome: Outcome = "crashed"
    own = folder / "own"
    log = Log(case, folder / "steps" if case.is_decorated else own, rank)
    armed = None if case.is_decorated else arm(own, rank)
    witness = Witness(case, foreign, rank)
    try:
        groups = joined(case, rank, port)
        witness.start(log)
        one = Rank(case, rank, log, Meetings(log, rank, case.axis, groups), witness)
        if case.is_decorated:
            decorate(one, own)
        one.event_loop()
        leave_together(case, rank, folder / "left", witness)
        outcome = "completed"
    except RuntimeError:
        # A peer is gone, and gloo says so: this rank has done nothing wrong.
        outcome = "stopped"
        traceback.print_exc()
    except BaseException:
        traceback.print_exc()
    if outcome != "completed":
        witness.look(LAST_LOOK)
    if armed is not None:
        armed.disarm()
    log.close(outcome)
    shutdown(outcome)
    sys.stderr.flush()
    os._exit(1)


def leave_together(case: Case, rank: int, folder: Path, witness: Witness) -> None:
    """Wait for the last look and for all ranks: who goes early takes with it what its peers have not read."""
    witness.thread.join()
    folder.mkdir(exist_ok=True)
    (folder / str(rank)).touch()
    while len(list(folder.iterdir())) < case.size:
        time.sleep(STEP_S)


def decorate(rank: Rank, folder: Path) -> None:
    """Put SGLang's decorator on the methods of one rank, and begin to record."""
    os.environ |= {SWITCH: "1", "HICACHE_TRACE_DIR": str(folder), "HICACHE_TRACE": "full"}
    for name in ("recv_requests", "check_hicache_events", "load_back", "forward"):
        function = rank_consensus(same_params=["number"])(getattr(Rank, name))
        setattr(rank, name, partial(function, rank))
    configure([list(range(rank.case.size))], rank=rank.rank, watcher=None)


def joined(case: Case, rank: int, port: int) -> dict[str, Any]:
    """The process groups of the ranks, which have met."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=case.size,
        timeout=GLOO_TIMEOUT,
    )
    everybody = list(range(case.size))
    groups = {
        name: dist.new_group(everybody, timeout=GLOO_TIMEOUT, backend="gloo", group_desc=name)
        for name in ("main", "events")
    }
    dist.barrier()
    return groups


def run_case(case: Case, folder: Path, *, has_snapshot: bool = False) -> None:
    """Start a case's ranks, wait until the last look of all that still look, and end them."""
    (folder / "own").mkdir(parents=True)
    (folder / "foreign").mkdir()
    port = free_port()
    pids = []
    for rank in range(case.size):
        pid = os.fork()
        if pid == 0:
            run_rank(case, rank, port, folder)
        pids.append(pid)
    left = dict(enumerate(pids))
    end_s = time.monotonic() + CASE_S
    while left and time.monotonic() < end_s and not has_last_looks(case, folder, left):
        for rank, pid in list(left.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del left[rank]
        time.sleep(STEP_S)
    if has_snapshot:
        words = ["-m", "cli.app", "snapshot", "-o", str(folder / "snapshot"), *map(str, left.values())]
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True, timeout=60, stdout=subprocess.DEVNULL)
    # All at once, or those that are killed last see the first ones go.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in left.values():
            os.kill(pid, number)
    for pid in left.values():
        os.waitpid(pid, 0)
    (folder / "wrong").unlink(missing_ok=True)
    for name in ("steps", "left"):
        shutil.rmtree(folder / name, ignore_errors=True)


def has_last_looks(case: Case, folder: Path, left: dict[int, int]) -> bool:
    """Whether every rank that can still look has taken its last one since the odd one went wrong."""
    try:
        wrong_ns = (folder / "wrong").stat().st_mtime_ns
        blind = {case.odd} if case.way in ("killed", "stopped", "holds_the_gil") else set()
        last = folder / "foreign" / f"look{LAST_LOOK}"
        looks = [last / f"stacks_rank_{rank}.threads.json" for rank in left if rank not in blind]
        return all(look.stat().st_mtime_ns > wrong_ns for look in looks)
    except FileNotFoundError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--snapshot", action="append", default=[], metavar="CASE")
    parser.add_argument("cases", nargs="*", metavar="CASE")
    options = parser.parse_intermixed_args()
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    import torch.distributed  # noqa: F401

    gc.freeze()
    every = {**CASES, **{case.name: case for case in (HEALTHY, DECORATED)}}
    for name in options.cases or every:
        begin_s = time.monotonic()
        run_case(every[name], options.folder / name, has_snapshot=name in options.snapshot)
        print(json.dumps({"case": name, "seconds": round(time.monotonic() - begin_s, 2)}), flush=True)


if __name__ == "__main__":
    main()
