"""One rank: configuration and ports in, a scheduler lane out.

`Parts` are the places where a right part can be replaced by a wrong one (`sim/bugs.py`) or by a user's
own (`--plugin FILE.py`). Nothing in `control/` knows whether that has happened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hicache.config import Config
from hicache.control.admission import Admission
from hicache.control.agreement import Agreement, MinThenChain, Reservations, ReserveThenVote
from hicache.control.cache import Cache, Tiers
from hicache.control.event_round import EventRound
from hicache.control.keys import page_bytes
from hicache.control.pools import Room
from hicache.control.scheduler import Scheduler
from hicache.control.tree import Tree
from hicache.ledger import Ledger
from hicache.ports import Engine, Memory, Source, Transport
from hicache.probes import Probes


@dataclass(slots=True)
class Parts:
    """What a rank is wired from; assign to a field to substitute a part.

    Attributes:
        rank: global rank that is being wired.
        agreement: built over the rank's transport and its pp rank.
        reservations: what a failed reservation of host memory leads to.
    """

    rank: int
    agreement: Callable[[Transport, int], Agreement] = lambda transport, pp_rank: MinThenChain(
        transport, pp_rank=pp_rank
    )
    reservations: Callable[[], Reservations] = ReserveThenVote


@dataclass(frozen=True, slots=True)
class Ports:
    """The outside world of one rank. `host` is None without a host tier; `source` on most ranks."""

    transport: Transport
    engine: Engine
    device: Memory
    host: Memory | None
    source: Source | None


# Write-through backs a node up for the first request that inserts it.
BACKUP_THRESHOLD = {"write_through": 1}


def build_rank(
    config: Config, parts: Parts, ports: Ports, probes: Probes, ledger: Ledger, *, digest_key: bytes
) -> Scheduler:
    """Wire one rank; running it is `await scheduler.run()`."""
    pp_rank = config.topology.coordinates(parts.rank).pp
    threshold = BACKUP_THRESHOLD[config.write_policy] if ports.host is not None else 0
    tree = Tree(page_bytes(config.page_size_tokens), backup_threshold=threshold)
    tiers = Tiers(ports.device, Room(config.device_pages), ports.host, Room(config.host_pages))
    cache = Cache(tree, tiers, ports.engine, probes, parts.reservations())
    agreement = parts.agreement(ports.transport, pp_rank)
    return Scheduler(
        cache=cache,
        admission=Admission(
            cache,
            probes,
            cache_output=config.cache_output,
            load_back_min_tokens=config.load_back_min_tokens,
            digest_key=digest_key,
        ),
        event_round=EventRound(cache, ports.transport, agreement, probes, is_decider=pp_rank == 0),
        transport=ports.transport,
        ledger=ledger,
        probes=probes,
        source=ports.source,
        pp_rank=pp_rank,
        cache_output=config.cache_output,
        decode_steps=config.decode_steps,
        digest_key=digest_key,
    )
