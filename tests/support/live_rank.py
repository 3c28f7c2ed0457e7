"""One watched rank as a process: it makes calls at a rate, and does what it is told at some of them.

    python -m tests.support.live_rank PLACE  FOLDER  '{"calls": 1000, "rate": 1000, ...}'
    PLACE: tcp:PORT, file:PATH or folder:PATH
    python -m tests.support.live_rank serve:PORT          the store alone, until its input is closed

It prints a JSON object a line: what it was told, when it acted, how it ended. Times are of the monotonic
clock, which the processes of one machine share.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from threading import get_ident
from typing import Any

from consensus_checker.live import Watcher
from tests.support.live import AXES, KINDS
from tracer.calls import traced
from tracer.record import Kind, Place, header
from tracer.segments import SegmentSink
from tracer.tracer import Tracer

STEP = Kind("step", "decision", agree=AXES, compared=("number", "tokens"), local=("host_pages_free",))
REDUCE = Kind("reduce", "decision", agree=AXES, compared=("number", "result"))
# Steps of so many calls.
STEP_CALLS = 20


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps({"at": time.monotonic(), **fields}) + "\n")
    sys.stdout.flush()


class FolderStore:
    """A file a key: a store of processes that need not wait for torch to be imported."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def set(self, key: str, value: str | bytes) -> None:
        fresh = self._folder / f".{os.getpid()}.{get_ident()}"
        fresh.write_bytes(value.encode() if isinstance(value, str) else value)
        fresh.replace(self._path(key))

    def get(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def add(self, key: str, amount: int) -> int:
        """One for each process that has added something."""
        if amount:
            self.set(f"{key}+{os.getpid()}", b"")
        return len(list(self._folder.glob(f"{self._path(key).name}+*")))

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "_")


def store_of(place: str, *, is_server: bool = False) -> Any:
    kind, _, where = place.partition(":")
    if kind == "folder":
        return FolderStore(Path(where))
    import torch.distributed as dist

    if kind == "file":
        return dist.FileStore(where, int(os.environ["WORLD_SIZE"]))
    return dist.TCPStore(
        "127.0.0.1", int(where), is_master=is_server, wait_for_workers=False, timeout=timedelta(seconds=60)
    )


def meet(store: Any, name: str, size: int) -> None:
    """Wait until all ranks are here."""
    store.add(f"test/{name}", 1)
    end_s = time.monotonic() + 60
    while store.add(f"test/{name}", 0) < size and time.monotonic() < end_s:
        time.sleep(0.005)


def hold_interpreter(seconds: float) -> None:
    """Sleep without letting any other thread of the process run."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def main(place: str, folder: str, plan: dict[str, Any]) -> None:
    """One run, or one a plan in `rounds`, each with logs and a name of its own."""
    store = store_of(place)
    rounds = plan.get("rounds", [plan])
    for number, one in enumerate(rounds):
        run_id = f"{plan.get('run_id', 'live')}{number or ''}"
        round_of(store, Path(folder, str(number)) if number else Path(folder), one, run_id)
    # Gloo waits for ranks that are gone.
    sys.stdout.flush()
    os._exit(0)


def round_of(store: Any, folder: Path, plan: dict[str, Any], run_id: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own = Place(rank, {"tp": rank}, {"tp": size}, {"tp0/main": list(range(size))})
    kinds = (*KINDS, STEP, REDUCE)
    head = header(own, kinds, lane="scheduler", run_id=run_id, tool_version="test")
    tracer = Tracer(SegmentSink(folder, rank, "scheduler"), head, time.monotonic_ns, has_steps=True)
    watcher = Watcher(
        store=store,
        rank=rank,
        members=range(size),
        lanes={"scheduler": tracer},
        header=head,
        folder=folder,
        policy=plan.get("policy", "log"),
        silence_s=plan.get("silence_s", 2.0),
        tell=lambda text: say(rank=rank, told=text),
    )
    reduce = group_reduce(store, rank, size, tracer) if plan.get("has_gloo") else None
    if not plan.get("is_unwatched"):
        watcher.start()
    meet(store, f"start {run_id}", size)
    say(rank=rank, pid=os.getpid(), started=True)
    spent_s = run(plan, rank, tracer, reduce)
    grown_bytes = rest(plan.get("rest_s", 0.0))
    if plan.get("linger_s"):
        linger(watcher, plan["linger_s"])
    outcome = plan.get("outcome", "completed")
    begin_s = time.monotonic()
    watcher.stop(outcome)
    tracer.close(outcome)
    verdict = watcher.verdict
    total_s = spent_s + plan.get("rest_s", 0.0)
    say(
        rank=rank,
        ended=True,
        verdict=verdict.to_json() if verdict is not None else None,
        stop_s=time.monotonic() - begin_s,
        lost=watcher.lost,
        compared=watcher.compared,
        watch_share=watcher.cpu_s / total_s if total_s else 0.0,
        calls_per_s=plan["calls"] / spent_s if spent_s else 0.0,
        grown_bytes=grown_bytes,
    )


def rest(seconds: float) -> int:
    """Do nothing for so long; by how many bytes the process has grown after the first seconds of it."""
    if not seconds:
        return 0
    begin_s = min(5.0, seconds / 4)
    time.sleep(begin_s)
    before = rss_bytes()
    time.sleep(seconds - begin_s)
    return rss_bytes() - before


def run(plan: dict[str, Any], rank: int, tracer: Tracer, reduce: Callable[[int], int] | None) -> float:
    emit = tracer.emitter(STEP)
    acts = {int(at): act for at, act in plan.get("acts", {}).get(str(rank), {}).items()}
    rate = plan.get("rate", 0)
    begin_s = time.monotonic()
    tracer.begin_step(0)
    for number in range(plan["calls"]):
        act = acts.get(number)
        if act is not None:
            say(rank=rank, acted=act, number=number)
        if number % STEP_CALLS == 0:
            tracer.end_step(is_idle=False)
            tracer.begin_step(number // STEP_CALLS)
            if rate and (ahead_s := begin_s + number / rate - time.monotonic()) > 0:
                time.sleep(ahead_s)
        if act == "skip":
            continue
        if act is not None and act != "value":
            do(act)
        if reduce is not None:
            try:
                reduce(number)
            except RuntimeError:
                # A peer is gone, and gloo says so.
                break
        else:
            emit(number, 0 if act == "value" else 64, 5)
    tracer.end_step(is_idle=False)
    return time.monotonic() - begin_s


def do(act: str) -> None:
    word, _, seconds = act.partition(":")
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif word == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif word == "hold":
        hold_interpreter(float(seconds))
    elif word == "sleep":
        time.sleep(float(seconds))
    elif word == "exit":
        os._exit(0)


def linger(watcher: Watcher, seconds: float) -> None:
    """Idle, until something is told or the time is over."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s and watcher.verdict is None:
        time.sleep(0.01)


def group_reduce(store: Any, rank: int, size: int, tracer: Tracer) -> Callable[[int], int]:
    """A call inside which all ranks meet, as a real one does."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("gloo", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=30),
    )

    def reduce(number: int) -> int:
        value = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(value)
        return int(value)

    return traced(tracer, REDUCE, params=["number"], result=["result"])(reduce)


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def serve(port: str) -> None:
    store = store_of(f"tcp:{port}", is_server=True)
    say(serving=True)
    sys.stdin.read()
    del store


if __name__ == "__main__":
    if sys.argv[1].startswith("serve:"):
        serve(sys.argv[1].partition(":")[2])
    else:
        main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
