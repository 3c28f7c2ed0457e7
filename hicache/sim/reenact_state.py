"""What a rank's control plane holds at a step: tree, pools, locks, queues, made again from its log.

The same run as `reenact`, stopped behind the last record of a step. Where a decision on the way does not come
out again, the state is that in front of it, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hicache.control.cache import Cache, InFlight
from hicache.control.node import Node
from hicache.sim.reenact import Reenacted, prepared
from tracer.log import LaneLog


@dataclass(frozen=True, slots=True)
class NodeState:
    """One edge of the tree; pages are counted from the root.

    Attributes:
        tiers: `D` for the device, `H` for the host; both, one, or none of them.
        locks, host_locks: who keeps it where it is.
        is_pending: its backup is queued or under way.
    """

    node: int
    parent: int
    first_page: int
    pages: int
    tiers: str
    locks: int
    host_locks: int
    hits: int
    is_pending: bool


@dataclass(frozen=True, slots=True)
class Pool:
    """Pages of a tier as the group counts them; None where there is no limit."""

    name: str
    capacity: int | None
    free: int | None
    evictable: int | None
    protected: int | None


@dataclass(frozen=True, slots=True)
class State:
    """One rank at the end of a step.

    Attributes:
        step: of the last record that was done again; earlier than asked where it was stopped.
        queues: name -> what is in it, oldest first, as plain values; `vote` are backups that wait for the
            next event round.
        done: how the run up to here went.
        wanted: the step that was asked for.
        log_end: the last step of its log; None where that can't be done again.
        is_whole: whether its log goes to the end of its run.
    """

    rank: int
    step: int
    nodes: tuple[NodeState, ...]
    pools: tuple[Pool, ...]
    queues: dict[str, list[dict[str, Any]]]
    done: Reenacted
    wanted: int = 0
    log_end: int | None = None
    is_whole: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "step": self.step,
            "nodes": [asdict(each) for each in self.nodes],
            "pools": [asdict(each) for each in self.pools],
            "queues": self.queues,
            "undetermined": self.undetermined or None,
        }

    @property
    def undetermined(self) -> str:
        """Why this is not the state at the step that was asked for; empty where it is."""
        if self.done.limits:
            return self.done.limits
        part = self.done.difference
        if part is None:
            if self.log_end is not None and self.is_short:
                return f"rank {self.rank}: its log ends with step {self.log_end:,}, where this is the state"
            return ""
        return (
            f"rank {self.rank}: record {part.seq:,} at step {part.step:,} does not follow from its inputs; "
            "this is the state in front of it"
        )

    @property
    def is_short(self) -> bool:
        """Whether the log ends before that step, or is cut within it."""
        if self.log_end is None or self.log_end < self.wanted:
            return True
        return self.log_end == self.wanted and bool(self.done.cut)

    @property
    def is_comparable(self) -> bool:
        """Whether this is the end of the step, and not some place in it where the rank or its log stopped."""
        if self.done.difference is not None or self.log_end is None:
            return False
        return self.log_end > self.wanted or (self.log_end == self.wanted and self.is_whole)


def replicas(lanes: Iterable[LaneLog]) -> dict[int, int]:
    """Rank -> its replica, whose ranks have one tree; ranks that do not say so are in 0."""
    return {lane.rank: lane.coordinates.get("dp", 0) for lane in lanes}


def states_at(lanes: Sequence[LaneLog], ranks: Sequence[int], step: int) -> list[State]:
    """Ranks of a replica at the same place: the end of a step, or where the first of them goes no further.

    That is in front of the first decision that does not follow, or at the end of a log.
    """
    found = [state_at(lanes, rank, step) for rank in ranks]
    short = [each.done.agreed for each in found if not each.is_comparable and each.log_end is not None]
    if not short:
        return found
    first = min(short)
    return [
        each if each.done.agreed == first else state_at(lanes, each.rank, step, until_agreed=first)
        for each in found
    ]


def state_at(lanes: Iterable[LaneLog], rank: int, step: int, *, until_agreed: int | None = None) -> State:
    """The state of one rank at the end of a step, or behind so many records that the replica agrees on."""
    ready = prepared(lanes, rank, until_step=step, until_agreed=until_agreed)
    if isinstance(ready, Reenacted):
        return State(rank, -1, (), (), {}, ready, step)
    done = ready.run()
    cache = ready.cache
    assert cache is not None
    nodes = tuple(
        _node(node) for node in sorted(cache.tree.walk(), key=lambda node: (node.end_page, node.id))
    )
    pools = tuple(_pools(cache))
    return State(
        rank, ready.last_step, nodes, pools, _queues(cache), done, step, ready.log_end, ready.is_whole
    )


def _node(node: Node) -> NodeState:
    tiers = "".join(name for name, slots in (("D", node.device), ("H", node.host)) if slots is not None)
    return NodeState(
        node.id,
        node.parent.id if node.parent is not None else 0,
        node.first_page,
        node.page_count,
        tiers,
        node.lock_count,
        node.host_lock_count,
        node.hit_count,
        node.write_pending,
    )


def _pools(cache: Cache) -> Iterable[Pool]:
    tiers, tree = cache.tiers, cache.tree
    room = tiers.device_room
    yield Pool("device", room.page_count or None, room.available, tree.evictable_pages, tree.protected_pages)
    if cache.host is not None:
        room = tiers.host_room
        yield Pool("host", room.page_count or None, room.available, None, None)


def _queues(cache: Cache) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {
        "vote": [
            {"nodes": [node.id for node in queued.nodes], "pages": queued.page_count}
            for queued in cache.write_queue
        ],
        "write": [_moving(moving) for moving in cache.writes],
        "load": [_moving(moving) for moving in cache.loads],
    }
    if cache.prefetches is not None:
        found["prefetch"] = [
            {"op": each.op, "rid": each.handle[0], "pages": each.pages_asked, "read": each.completed_pages}
            for each in cache.prefetches.unfinished
        ]
        found["backup"] = [
            {"op": each.op, "nodes": [each.node_id], "pages": len(each.slots)}
            for each in cache.prefetches.backups
        ]
    return found


def _moving(moving: InFlight) -> dict[str, Any]:
    transfer = moving.transfer
    nodes = [node.id for node in moving.nodes]
    return {"op": transfer.op, "nodes": nodes, "pages": len(transfer.source), "done": transfer.is_done}
