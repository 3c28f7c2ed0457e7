"""Ranks that are watched: tracers of one process, each with a watcher, over one store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

from consensus_checker.live import LocalStore, Watcher
from tracer.calls import traced
from tracer.record import LANE_STATE, Kind, Place, header
from tracer.segments import SegmentSink
from tracer.sinks import MemorySink
from tracer.tracer import Tracer

AXES = ("tp",)
MATCH = Kind("match", "decision", agree=AXES, compared=("rid", "tokens"), local=("host_pages_free",))
BACKUP = Kind(
    "write_backup",
    "decision",
    agree=AXES,
    compared=("node", "tokens"),
    local=("host_pages_free", "need"),
    result="tokens",
    needs={"host_pages_free": "need"},
)
CALL = Kind("load_back", "decision", agree=AXES, compared=("rid", "result"))
MEET = Kind("collective", "meeting", agree=AXES, compared=("group", "group_seq", "op", "numel", "purpose"))
STATE = Kind(LANE_STATE, "note", info=("state", "op"))
KINDS = (MATCH, BACKUP, CALL, MEET, STATE)

# Until something that must come has come.
DUE_S = 10.0


class Rank:
    """One rank: its lanes, and what its watcher has told."""

    def __init__(
        self,
        rank: int,
        size: int,
        store: Any,
        folder: Path | None,
        *,
        lanes: Sequence[str] = ("scheduler",),
        kinds: Sequence[Kind] = KINDS,
        silence_s: float = 2.0,
        policy: str = "log",
        command: str | None = None,
        has_steps: bool = False,
        period_s: float = 0.02,
    ) -> None:
        self.rank = rank
        self.told: list[str] = []
        self.lanes: dict[str, Tracer] = {}
        place = Place(rank, {"tp": rank}, {"tp": size}, {"tp0/main": list(range(size))})
        for name in lanes:
            head = header(place, kinds, lane=name, run_id="live", tool_version="test")
            sink = SegmentSink(folder, rank, name) if folder is not None else MemorySink()
            self.lanes[name] = Tracer(sink, head, time.monotonic_ns, has_steps=has_steps)
        self.tracer = self.lanes[lanes[0]]
        self.match = self.tracer.emitter(MATCH)
        self.backup = self.tracer.emitter(BACKUP)
        self.enter = self.tracer.emitter(MEET, phase="enter")
        self.leave = self.tracer.emitter(MEET, phase="leave")
        self.watcher = Watcher(
            store=store,
            rank=rank,
            members=range(size),
            lanes=self.lanes,
            header=header(place, kinds, lane=lanes[0], run_id="live", tool_version="test"),
            folder=folder,
            policy=policy,
            silence_s=silence_s,
            period_s=period_s,
            tell=self.told.append,
            command=command,
        )

    def calls(self, first: int, last: int, **other: Any) -> None:
        """Calls `first` up to `last`, alike on all ranks but for the fields of the last in `other`."""
        for number in range(first, last):
            self.match(f"r{number}", 64, 5)
        for name, value in other.items():
            getattr(self, name)(*value)

    def held(self, rid: str) -> tuple[Callable[[], None], Event]:
        """A traced call that returns when the event is set."""
        release = Event()

        def load_back(rid: str) -> int:
            release.wait(DUE_S)
            return 0

        def enter() -> None:
            call = traced(self.tracer, CALL, params=["rid"], result=["result"])(load_back)
            call(rid)

        return enter, release

    def close(self, outcome: Any = "completed") -> None:
        for tracer in self.lanes.values():
            tracer.close(outcome)


def started(size: int, folder: Path | None, store: Any = None, **options: Any) -> list[Rank]:
    store = LocalStore() if store is None else store
    ranks = [Rank(rank, size, store, folder, **options) for rank in range(size)]
    for rank in ranks:
        rank.watcher.start()
    return ranks


def stop(ranks: Sequence[Rank], outcome: Any = "completed") -> float:
    """Stop all of them at a time, as ranks do; how long that took."""
    begin_s = time.monotonic()
    with ThreadPoolExecutor(max(1, len(ranks))) as pool:
        list(pool.map(lambda rank: rank.watcher.stop(outcome), ranks))
    return time.monotonic() - begin_s


def until(is_so: Callable[[], bool], due_s: float = DUE_S) -> bool:
    """Wait for what must come; whether it has."""
    end_s = time.monotonic() + due_s
    while time.monotonic() < end_s:
        if is_so():
            return True
        time.sleep(0.005)
    return is_so()
