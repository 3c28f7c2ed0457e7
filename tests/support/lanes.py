"""Lanes of a few ranks that only meet, on the simulator's loop or on a thread each."""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from hicache.loop import Loop
from hicache.probes import Probes
from hicache.schedule import Schedule
from hicache.topology import Topology
from hicache.transport.drive import DriveLoop, Watch
from hicache.transport.meetings import LaneTransport
from hicache.transport.sim import SimNetwork, SimTransport, VirtualClock
from hicache.transport.threads import thread_network, thread_wire
from tracer.sinks import MemorySink
from tracer.tracer import Tracer

Lane = Callable[[LaneTransport], Awaitable[Any]]


@dataclass(slots=True)
class Met:
    """How the lanes of all ranks ended.

    Attributes:
        results: rank -> what its lane returned, None where it never came back.
        errors: rank -> what its lane raised.
        stuck: ranks that wait for ever.
        records: rank -> what its lane wrote.
    """

    results: list[Any]
    errors: dict[int, BaseException] = field(default_factory=dict)
    stuck: list[int] = field(default_factory=list)
    records: dict[int, list[dict[str, Any]]] = field(default_factory=dict)


def meet(mode: str, topology: Topology, *lanes: Lane, guard: bool = False) -> Met:
    """One lane a rank, run until nobody can go on."""
    met = Met([None] * len(lanes))
    sinks = [MemorySink() for _ in lanes]
    probes = [Probes(Tracer(sink, {}, lambda: 0)) for sink in sinks]

    async def run(rank: int, transport: LaneTransport) -> None:
        met.results[rank] = await lanes[rank](transport)

    if mode == "sim":
        loop = Loop(Schedule())
        network = SimNetwork(topology, loop)
        for rank, own in enumerate(probes):
            transport = SimTransport(network, rank, own, VirtualClock(), guard=guard)
            loop.spawn(str(rank), run(rank, transport))
        while any(task.waits_for is None for task in loop.parked):
            # One that has raised ends the loop; here the others go on.
            loop.run()
        loops: list[Loop] = [loop]
    else:
        watch, network_of_threads = Watch(), thread_network(topology)
        drives = [DriveLoop(watch, timeout_s=20) for _ in lanes]
        for rank, (drive, own) in enumerate(zip(drives, probes, strict=True)):
            wire = thread_wire(network_of_threads, rank, drive)
            transport_of_thread = LaneTransport(network_of_threads.seat(rank), wire, own, guard=guard)
            drive.spawn(str(rank), run(rank, transport_of_thread))
        run_in_threads(drives)
        loops = list(drives)
    for task in (task for loop in loops for task in loop.tasks):
        if task.error is not None:
            met.errors[int(task.name)] = task.error
        elif not task.is_finished:
            met.stuck.append(int(task.name))
        task.coroutine.close()
    met.records = {rank: [json.loads(line) for line in sink.lines[1:]] for rank, sink in enumerate(sinks)}
    return met


def run_in_threads(loops: list[DriveLoop]) -> None:
    """Run each loop on a thread of its own until all have ended."""
    threads = [threading.Thread(target=loop.run) for loop in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
