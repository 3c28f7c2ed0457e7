"""Lanes that only meet, over gloo: `python -m tests.support.gloo_lanes`, once for each of four ranks.

Each rank prints what it got as one JSON document; `tests/hicache/transport/test_gloo.py` reads it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from hicache.errors import MeetingError
from hicache.loop import PAUSE
from hicache.probes import Probes
from hicache.topology import Topology
from hicache.transport.drive import DriveLoop, Watch
from hicache.transport.gloo import GlooWorld
from hicache.transport.meetings import LaneTransport, Seat
from tracer.sinks import MemorySink
from tracer.tracer import Tracer

TOPOLOGY = Topology(pp=2, tp=2)
LONG = bytes(range(256)) * 4000


class Rank:
    """One rank's loop, and what it found out."""

    def __init__(self) -> None:
        watch = Watch()
        self.loop = DriveLoop(watch, timeout_s=60)
        self.world = GlooWorld(TOPOLOGY, channels=("main", "events", "hits"), timeout_s=60)
        self.rank = self.world.rank
        self.at = TOPOLOGY.coordinates(self.rank)
        self.got: dict[str, Any] = {"rank": self.rank}
        self.sink = MemorySink()
        probes = Probes(Tracer(self.sink, {}, lambda: 0))
        seat, wire = Seat(TOPOLOGY, self.rank), self.world.wire(self.loop, watch)
        self.open = LaneTransport(seat, wire, probes)
        self.guarded = LaneTransport(seat, wire, probes, guard=True)

    async def lane(self) -> None:
        await self.reductions()
        await self.broadcasts()
        await self.messages()
        await self.guard()

    async def reductions(self) -> None:
        got, transport = self.got, self.open
        values = [self.rank, -self.rank]
        got["min"] = await transport.all_reduce("tp", values, op="min", purpose="vote", channel="main")
        got["sum"] = await transport.all_reduce("tp", values, op="sum", purpose="vote", channel="main")
        got["pp max"] = await transport.all_reduce("pp", values, op="max", purpose="hit", channel="hits")
        got["cp"] = await transport.all_reduce("cp", [7], op="min", purpose="vote", channel="main")
        # One rank means something else, and nobody notices.
        purpose = "event_round" if self.at.tp == 0 else "timeout_verdict"
        got["blind"] = await transport.all_reduce(
            "tp", [self.rank], op="max", purpose=purpose, channel="main"
        )
        await transport.rendezvous("tp", numel=5000, purpose="forward", channel="main")

    async def broadcasts(self) -> None:
        is_first = self.at.tp == 0
        for name, message in (("bytes", LONG), ("empty", b""), ("none", None), ("numbers", [1, -2, 1 << 62])):
            said = await self.open.broadcast(
                "tp", message if is_first else None, purpose="receive_requests", channel="main"
            )
            self.got[f"broadcast {name}"] = [type(said).__name__, said == message]

    async def messages(self) -> None:
        transport = self.open
        if self.at.pp == 0:
            # The receiver is not there yet; whoever sends goes on.
            for message, numel in (([3, -4], 2), (None, 6), (LONG, 1), (b"", 1)):
                await transport.send_next(message, numel=numel, purpose="p", channel="events")
            await transport.all_reduce("tp", [1], op="min", purpose="go", channel="main")
            await transport.drain_sends("events")
            self.got["drained"] = True
        else:
            for _ in range(50):
                await PAUSE
            got = [
                await transport.receive_previous(numel=numel, purpose="p", channel="events")
                for numel in (2, 6, 1, 1)
            ]
            self.got["messages"] = [got[0], got[1], got[2] == LONG, got[3] == b""]

    async def guard(self) -> None:
        transport, at = self.guarded, self.at
        agreed = await transport.all_reduce("tp", [self.rank], op="min", purpose="same", channel="main")
        self.got["guarded"] = agreed
        try:
            if at.pp == 0:
                await transport.send_next([1], numel=1, purpose="verdict", channel="events")
            else:
                await transport.receive_previous(numel=1, purpose="event_round", channel="events")
        except MeetingError:
            self.got["refused message"] = self.others()
        try:
            numel = 1 + at.tp
            await transport.all_reduce("tp", [0] * numel, op="min", purpose="odd", channel="main")
        except MeetingError:
            self.got["refused call"] = self.others()

    def others(self) -> list[str]:
        last = json.loads(self.sink.lines[-1])
        assert last["kind"] == "mispaired", last
        return list(last["others"])


def main() -> None:
    rank = Rank()
    task = rank.loop.spawn("lane", rank.lane())
    rank.loop.run()
    if task.error is not None:
        raise task.error
    print(json.dumps(rank.got), flush=True)
    rank.world.part()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
