"""What only the simulator's transport has: virtual time, and several lanes of a rank on one loop."""

from __future__ import annotations

from hicache.loop import Loop
from hicache.probes import Probes
from hicache.schedule import Schedule
from hicache.topology import Topology
from hicache.transport.sim import SimNetwork, SimTransport, VirtualClock
from tracer.sinks import NullSink
from tracer.tracer import Tracer


def test_two_lanes_of_a_rank_share_the_order_of_a_group() -> None:
    """The second lane's call is the rank's second call, not its own first."""
    loop = Loop(Schedule())
    network = SimNetwork(Topology(tp=2), loop)
    got: dict[str, list[int]] = {}

    async def call(name: str, rank: int, value: int) -> None:
        clock = VirtualClock()
        transport = SimTransport(network, rank, Probes(Tracer(NullSink(), {}, clock.now_ns)), clock)
        got[name] = await transport.all_reduce("tp", [value], op="sum", purpose="p", channel="main")

    for name, rank, value in (("a", 0, 1), ("b", 0, 10), ("c", 1, 100), ("d", 1, 1000)):
        loop.spawn(name, call(name, rank, value))
    loop.run()
    assert got == {"a": [101], "b": [1010], "c": [101], "d": [1010]}


def test_nobody_leaves_a_meeting_before_the_last_has_come() -> None:
    loop = Loop(Schedule())
    network = SimNetwork(Topology(tp=2), loop)
    left: list[int] = []

    async def call(rank: int, time_ns: int) -> None:
        clock = VirtualClock()
        clock.time_ns = time_ns
        transport = SimTransport(network, rank, Probes(Tracer(NullSink(), {}, clock.now_ns)), clock)
        await transport.all_reduce("tp", [1], op="min", purpose="p", channel="main")
        left.append(clock.time_ns)

    loop.spawn("early", call(0, 1_000))
    loop.spawn("late", call(1, 9_000))
    loop.run()
    assert left == [9_000, 9_000]


def test_an_idle_step_takes_a_millisecond_and_lets_others_run() -> None:
    loop = Loop(Schedule())
    clock = VirtualClock()
    order: list[str] = []

    async def idle() -> None:
        order.append("idle")
        await clock.idle()
        order.append("on")

    async def other() -> None:
        order.append("other")

    loop.spawn("idle", idle())
    loop.spawn("other", other())
    loop.run()
    assert (order, clock.time_ns) == (["idle", "other", "on"], 1_000_000)
