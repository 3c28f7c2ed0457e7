"""Meetings between ranks that are threads of one process: the simulator's network under a lock.

The order of things is the operating system's. What a rank waits for is fired by another rank's thread and
arrives through its own loop's inbox.
"""

from __future__ import annotations

import threading

from hicache.topology import Topology
from hicache.transport.drive import DriveLoop
from hicache.transport.sim import LocalWire, Network


def thread_network(topology: Topology) -> Network:
    """The network of a job whose ranks are threads."""
    return Network(topology, threading.Lock())


def thread_wire(network: Network, rank: int, loop: DriveLoop) -> LocalWire:
    """One rank's way to the others."""
    return LocalWire(network, rank, loop.outside)
