"""One rank: configuration and ports in, its lanes out.

`Parts` are the places where a right part can be replaced by a wrong one (`sim/bugs.py`) or by a user's
own (`--plugin FILE.py`). Nothing in `control/` knows whether that has happened.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from hicache.config import BACKUP_THRESHOLDS, Config
from hicache.control.admission import Admission
from hicache.control.agreement import Agreement, MinThenChain, Reservations, ReserveThenVote
from hicache.control.cache import Cache
from hicache.control.digest import RunningDigest
from hicache.control.event_round import EventRound
from hicache.control.host_memory import HostMemory
from hicache.control.keys import page_bytes
from hicache.control.lanes import BackupLane, IoLane, PrefetchLane, SyncLane
from hicache.control.pools import Room, Tiers
from hicache.control.prefetch import Prefetches
from hicache.control.queues import Queues
from hicache.control.scheduler import Scheduler
from hicache.control.tree import Tree
from hicache.core import TOKEN_BYTES
from hicache.ledger import Ledger
from hicache.loop import Signal
from hicache.ports import Clock, Engine, Memory, Source, Storage, Transport
from hicache.probes import Probes

SCHEDULER = "scheduler"
# In this order they are started; the scheduler submits work, the others do it.
LANES = (SCHEDULER, "prefetch", "io", "sync", "backup")


def lane_names(config: Config) -> tuple[str, ...]:
    """Without an external tier a rank has nothing to do in the background."""
    return LANES if config.storage.backend != "none" else (SCHEDULER,)


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
    """The outside world of one rank.

    Attributes:
        transports: lane -> its own way to its peers.
        host: None without a host tier.
        side: host memories of the side pools that have slots of their own.
        storage: None without an external tier.
        source: the front door, on the first rank of a replica.
        signal: makes what a lane parks on.
    """

    transports: Mapping[str, Transport]
    engine: Engine
    device: Memory
    host: Memory | None
    source: Source | None
    clock: Clock
    signal: Callable[[str], Signal]
    storage: Storage | None = None
    side: Mapping[str, Memory] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rank:
    """A wired rank; running it is running all its lanes. They end when the scheduler does."""

    scheduler: Scheduler
    lanes: Mapping[str, Coroutine[Any, Any, None]]


def build_rank(
    config: Config,
    parts: Parts,
    ports: Ports,
    probes: Mapping[str, Probes],
    ledger: Ledger,
    *,
    digest_key: bytes,
) -> Rank:
    """Wire one rank. `probes` has one entry for each of `lane_names(config)`."""
    pp_rank = config.topology.coordinates(parts.rank).pp
    own_probes = probes[SCHEDULER]
    digest = RunningDigest() if config.in_band_digest else None
    if digest is not None:
        digest.watch(own_probes)
    transport = ports.transports[SCHEDULER]
    is_write_back = config.write_policy == "write_back"
    has_state = any(not pool.shares_slots for pool in config.pools)
    tree = Tree(
        page_bytes(config.page_size_tokens),
        backup_threshold=BACKUP_THRESHOLDS[config.write_policy] if ports.host is not None else 0,
        eviction_policy=config.eviction_policy,
        has_state=has_state,
        requires_backed_parent=not is_write_back,
    )
    tiers = Tiers(
        ports.device,
        Room(config.device_pages),
        ports.host,
        Room(config.host_pages),
        ports.side.get("mamba"),
        Room(config.side_pool_slots if has_state else 0),
    )
    host = (
        HostMemory(tree, tiers, own_probes, is_write_back=is_write_back) if ports.host is not None else None
    )
    agreement = parts.agreement(transport, pp_rank)
    prefetches = _prefetches(config, ports, tree, host, agreement, own_probes, pp_rank)
    cache = Cache(
        tree,
        tiers,
        ports.engine,
        own_probes,
        parts.reservations(),
        host=host,
        prefetches=prefetches,
        is_write_back=is_write_back,
        load_back_min_tokens=config.load_back_min_tokens,
        digest_key=digest_key,
        pause=ports.clock.idle,
    )
    scheduler = Scheduler(
        cache=cache,
        admission=Admission(cache, own_probes, config=config),
        event_round=EventRound(
            cache,
            transport,
            agreement,
            own_probes,
            is_decider=pp_rank == 0,
            has_stages=config.topology.pp > 1,
            digest=digest,
        ),
        transport=transport,
        ledger=ledger,
        probes=own_probes,
        source=ports.source,
        clock=ports.clock,
        pp_rank=pp_rank,
        config=config,
        digest_key=digest_key,
        on_end=prefetches.queues.close if prefetches is not None else _nothing,
        lanes=[own for lane, own in probes.items() if lane != SCHEDULER],
    )
    lanes: dict[str, Coroutine[Any, Any, None]] = {SCHEDULER: scheduler.run()}
    if prefetches is not None:
        assert ports.storage is not None
        lanes |= _background_lanes(config, ports, ports.storage, prefetches.queues, probes, ledger)
    return Rank(scheduler, lanes)


def _prefetches(
    config: Config,
    ports: Ports,
    tree: Tree,
    host: HostMemory | None,
    agreement: Agreement,
    probes: Probes,
    pp_rank: int,
) -> Prefetches | None:
    if config.storage.backend == "none":
        return None
    assert host is not None and ports.storage is not None, "an external tier without host or port"
    return Prefetches(
        config.storage,
        tree,
        host,
        Queues(ports.signal),
        ports.storage,
        agreement,
        ports.transports[SCHEDULER],
        ports.clock,
        probes,
        pools=config.pools,
        decides_deadline=pp_rank == 0,
        has_stages=config.topology.pp > 1,
    )


def _background_lanes(
    config: Config,
    ports: Ports,
    storage: Storage,
    queues: Queues,
    probes: Mapping[str, Probes],
    ledger: Ledger,
) -> dict[str, Coroutine[Any, Any, None]]:
    pools = config.pools
    page_tokens = page_bytes(config.page_size_tokens) // TOKEN_BYTES
    prefetch = PrefetchLane(
        queues,
        storage,
        ports.transports["prefetch"],
        probes["prefetch"],
        pools=pools,
        page_tokens=page_tokens,
    )
    io = IoLane(
        queues, storage, ledger.host, probes["io"], config.storage, pools=pools, page_tokens=page_tokens
    )
    sync = SyncLane(queues, ports.transports["sync"], probes["sync"], page_tokens=page_tokens)
    backup = BackupLane(queues, storage, ledger.host, probes["backup"], config.storage, pools=pools)
    return {"prefetch": prefetch.run(), "io": io.run(), "sync": sync.run(), "backup": backup.run()}


def _nothing() -> None:
    """Nobody else to end."""
