"""What hooks look at besides the arguments of one call: which step it is, what was sent, who waits for whom.

Owns what two calls of one server process have to do with each other. One object for the process; it is made
before anything is recorded, and every expression of a point may ask it. It changes nothing that it looks at.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence
from threading import get_ident
from typing import Any

from consensus_checker import sglang_kinds as kinds
from consensus_checker.payload import REQUEST_ID
from consensus_checker.sglang_place import PIPELINE_GROUP, REPLICA_GROUP, STAGE_GROUP
from tracer.keyed import Digest
from tracer.record import BACKEND, MAIN_LANE, Outcome, Place
from tracer.tracer import Tracer

# A key of a whole context is looked at in so many places at each match; at its insert all of it is.
SAMPLES = 32
TAIL = 8
# Requests in the queue whose ids go into its digest.
WAITING_MAX = 64
# A lane that has been in one place for so long when the server ends will not have come out of it.
HUNG_S = 10.0
STEP_RECORDS_MAX = 1 << 14
# Where each lane finds its work.
QUEUES = {
    "prefetch": "prefetch_queue",
    "io": "prefetch_buffer",
    "sync": "prefetch_sync_queue",
    "backup": "backup_queue",
}


class See:
    """Looks for the hooks of one process.

    Attributes:
        round: which event round it is, from 1.
        waiting: digest of the queue when that round began, or None.
        threads: id of a thread -> its lane.
    """

    def __init__(self) -> None:
        self.round = 0
        self.waiting: Any = None
        self.threads: dict[int, str] = {}
        self._lanes: Mapping[str, Tracer] = {}
        self._busy_since_s: dict[str, float] = {}
        self._cache: Any = None
        self._states: dict[str, Any] = {}

    def begin(self, lanes: Mapping[str, Tracer], place: Place, digest: Digest) -> None:
        """A recording begins."""
        self._lanes = lanes
        self._main = lanes[MAIN_LANE]
        self._digest = digest
        self._place = place
        self._seqs: dict[str, int] = {}
        self._busy_since_s.clear()
        # Requests that have been recorded: their ids, and what a log calls them.
        self._known: dict[str, str] = {}
        # Request -> up to which token it has been computed.
        self._computed: dict[str, int] = {}
        self._order = 0
        self._vector: Any = None
        self._waiting_of: list[str] = []
        self.round, self.waiting = 0, None
        self._is_idle, self._seq_after = False, -1
        # Of the loop's last pass the round, and of this step the first record.
        self._looped_at = 0
        self._main.begin_step(0)
        self._seq_at = self._main.seq
        self._request = self._main.emitter(kinds.REQUEST)
        self._retract = self._main.emitter(kinds.RETRACT)
        self._admit = self._main.emitter(kinds.ADMIT)
        self._forward = self._main.emitter(kinds.FORWARD)
        self._enter = self._main.emitter(kinds.MEETING, phase="enter")
        self._leave = self._main.emitter(kinds.MEETING, phase="leave")
        self._adopted = self._main.emitter(kinds.ADOPTED)
        self._states = {name: lane.emitter(kinds.LANE_STATE) for name, lane in lanes.items()}

    # Values.

    def key(self, key: Any, count: int) -> str:
        """Digest of some of a key's `count` tokens, those at its end among them, and of its namespace."""
        ids = key.token_ids
        some = ids[0 : count : count // SAMPLES or 1] + ids[count - TAIL if count > TAIL else 0 : count]
        data = some.tobytes() if type(some) is array else array("q", some).tobytes()
        space = b"" if key.extra_key is None else self._namespace(key)
        return self._digest(data + space if space else data)

    def whole_key(self, key: Any) -> str:
        """Digest of all tokens of a key, and of its namespace."""
        tokens = self._tokens(key.token_ids, len(key))
        space = self._namespace(key)
        return self._digest(tokens) if not space else self._digest(bytes(tokens) + space)

    def _tokens(self, ids: Any, count: int) -> memoryview:
        whole = ids if type(ids) is array else array("q", ids)
        return memoryview(whole).cast("B")[: count * whole.itemsize]

    def _namespace(self, key: Any) -> bytes:
        extra, salt = getattr(key, "extra_key", None), getattr(key, "cache_salt", None)
        return b"" if extra is None and salt is None else f"\0{extra}\0{salt}".encode()

    def request(self, req: Any) -> str:
        """The request's id; where it is seen for the first time, it is recorded first."""
        if req is None:
            return ""
        name = self._known.get(req.rid)
        return name if name is not None else self._receive(req)

    def _receive(self, req: Any) -> str:
        if self._main.seq - self._seq_at > STEP_RECORDS_MAX:
            # A loop that nobody knows: what waits for the end of a step must not grow for ever.
            self._next_step(is_idle=False)
        name = self._known[req.rid] = self._named(req.rid)
        ids, space = req.origin_input_ids, self._namespace(req)
        self._request(
            self._order,
            name,
            self._digest(space) if space else "",
            self._digest(self._tokens(ids, len(ids))),
            getattr(req, "priority", None),
            len(ids),
        )
        self._order += 1
        return name

    def _named(self, rid: str) -> str:
        """An id as it is; a client may have called its request anything: other text by its digest."""
        is_id = not rid or REQUEST_ID.fullmatch(rid)
        return rid if is_id else f"text-{self._digest(rid.encode())}"

    def released(self, req: Any) -> None:
        """A request has given its room back: for good, or to be computed again."""
        if req.finished_reason is None:
            self._retract(self.rid(req), len(req.output_ids))
            return
        self._known.pop(req.rid, None)
        self._computed.pop(self.rid(req), None)

    def computed(self, req: Any, up_to: int) -> None:
        """A part of a prompt has been computed; with the first one, what of it was cached where."""
        rid, total = self.rid(req), len(req.origin_input_ids)
        before = self._computed.get(rid)
        if before is None:
            before = req.prefix_len
            from_host = min(req.host_loaded_length, before)
            stored = min(req.fulfilled_storage_hit_len(before), from_host)
            self._admit(rid, "admitted", before - from_host, from_host - stored, stored, total - before)
        after = min(up_to, total)
        self._computed[rid] = max(before, after)
        if after > before:
            self._forward("extend", after - before, [rid], [after - before])

    def members(self, reqs: Sequence[Any]) -> list[Any]:
        """How many requests a batch has, and which, in its order."""
        return [len(reqs), self._digest("\0".join(req.rid for req in reqs).encode())]

    def verdict(self, has_worked: Any) -> str:
        return "done" if has_worked else "refused"

    def reason(self, req: Any) -> str:
        return type(req.finished_reason).__name__

    def rid(self, value: Any) -> str:
        """Of a request, of its handle, or of what is done for it; "" where there is none."""
        value = getattr(value, "handle", value)
        found = getattr(value, "rid", None)
        if found is None:
            found = getattr(value, "request_id", value)
        return (self._known.get(found) or self._named(found)) if type(found) is str else ""

    def attempt(self, value: Any) -> int:
        return int(getattr(getattr(value, "handle", value), "attempt_id", 0))

    def node(self, value: Any) -> Any:
        """A node's number: it is counted alike on every rank."""
        return value if value is None or type(value) is int else getattr(value, "id", None)

    def nodes(self, queue: Sequence[Any]) -> list[int]:
        return [node for op in queue for node in op.node_ids]

    def device_pages(self, controller: Any, queue: Sequence[Any]) -> int:
        return int(sum(len(op.device_indices) for op in queue) // controller.page_size)

    def device_tokens(self, result: Any) -> int:
        """Of a match; before 0.5.20 it had the slots themselves."""
        try:
            return int(result.device_prefix_len)
        except AttributeError:
            return len(result.device_indices)

    def ready(self, controller: Any, queue: str) -> int | None:
        """How many of a queue are ready here."""
        found = getattr(controller, queue, None)
        return None if found is None else int(found.qsize())

    def name(self, value: Any) -> str:
        """An enumeration's member as its name; text as it is; nothing as nothing."""
        if value is None or type(value) is str:
            return value or ""
        return str(getattr(value, "name", None) or type(value).__name__).lower()

    def at(self, values: Sequence[int], index: int) -> int | None:
        return values[index] if index < len(values) else None

    # Room that is left, in pages: a fact of one rank.

    def host_free(self, cache: Any) -> int | None:
        controller = cache.cache_controller
        if controller is None:
            return None
        return int(controller.mem_pool_host.available_size() // cache.page_size)

    def device_free(self, cache: Any) -> int:
        return int(cache.token_to_kv_pool_allocator.available_size() // cache.page_size)

    def pool_free(self, group: Any, pool: Any) -> int:
        own = group.get_entry(pool).host_pool
        return int(own.available_size() // own.page_size)

    # Prefetches.

    def outcomes(self, cache: Any) -> dict[str, int]:
        return dict(getattr(cache, "_prefetch_outcome_stats", {}))

    def outcome(self, cache: Any, before: Mapping[str, int]) -> str:
        """Which count has gone up; one that is a part of another comes behind it."""
        now = getattr(cache, "_prefetch_outcome_stats", {})
        for name in ("issued", "declined_too_short", "declined_rate_limited"):
            if now.get(name, 0) != before.get(name, 0):
                return name
        return "ongoing"

    def pages_read(self, result: Any) -> int | None:
        """What one rank's store has given; newer versions do not return it."""
        return result if type(result) is int else None

    def op(self, cache: Any, request: Any) -> int | None:
        """Number of the prefetch that is under way for a request."""
        found = cache.ongoing_prefetch.get(request)
        operation = getattr(found, "operation", None)
        return getattr(operation, "id", None)

    def room(self, hit_tokens: int, slots: Any) -> str:
        if slots is None:
            return "host_capacity"
        return "allocated" if len(slots) >= hit_tokens else "partial"

    def loaded(self, cache: Any, operation: Any) -> int:
        key = getattr(operation, "handle", getattr(operation, "request_id", None))
        return int(cache.prefetch_loaded_tokens_by_reqid.get(key, 0))

    # Steps. One goes from one event round to the next.

    def _note_waiting(self, scheduler: Any) -> None:
        queue = scheduler.waiting_queue
        rids = [req.rid for req in queue[:WAITING_MAX]]
        if rids != self._waiting_of:
            self._waiting_of = rids
            self.waiting = [len(queue), self._digest("\0".join(rids).encode())]
        elif self.waiting is None or self.waiting[0] != len(queue):
            self.waiting = [len(queue), self._digest("\0".join(rids).encode())]

    def begin_round(self, cache: Any) -> int:
        self._cache = cache
        self._next_step(is_idle=self._is_idle and self._main.seq == self._seq_after)
        self.round += 1
        self._is_idle = False
        return self.round

    def loops(self, scheduler: Any) -> None:
        """The scheduler's loop begins anew. A server without a host tier has no rounds: this is its step."""
        self._note_waiting(scheduler)
        if self.round == self._looped_at and self._main.seq != self._seq_at:
            self._next_step(is_idle=False)
        self._looped_at = self.round

    def _next_step(self, *, is_idle: bool) -> None:
        self._main.end_step(is_idle=is_idle)
        self._main.begin_step(self._main.step + 1)
        self._seq_at = self._main.seq

    def agreed(self, result: Any) -> None:
        """What the group has agreed on: how many of each queue are taken."""
        counts = [result[0], result[1], *result[2]]
        self._is_idle = not any(counts)
        if len(self._pipeline) > 1:
            self._adopted("events", self._vector_digest(counts))

    def end_round(self) -> None:
        self._seq_after = self._main.seq

    def note_vector(self, cache: Any, data: Any) -> None:
        """This rank's own counts; the later stages have none."""
        self._vector = data.tolist() if cache.pp_rank == 0 else None

    def forget_vector(self) -> None:
        self._vector = None

    def vote(self, cache: Any) -> bool | None:
        """What this rank's own clock said, where it was asked."""
        return bool(self._vector) if type(self._vector) is int else None

    def local(self, index: int, is_there: Any = True) -> int | None:
        vector = self._vector
        return vector[index] if is_there and type(vector) is list and index < len(vector) else None

    # Meetings.

    @property
    def _pipeline(self) -> Sequence[int]:
        return next(
            (ranks for name, ranks in self._place.groups.items() if name.startswith(PIPELINE_GROUP)), ()
        )

    def meet_attention(self, op: Any, tensor: Any) -> tuple[Any, ...] | None:
        """Axis, purpose, reduction, size, group and number of the call that this stage's ranks make."""
        return self._met(STAGE_GROUP, "events", op, tensor)

    def meet_storage(self, op: Any, tensor: Any, groups: Sequence[Any]) -> tuple[Any, ...] | None:
        if not groups:
            return None
        purpose = "hits" if self.threads.get(get_ident()) == "prefetch" else "progress"
        return self._met(REPLICA_GROUP, purpose, op, tensor)

    def _met(self, prefix: str, channel: str, op: Any, tensor: Any) -> tuple[Any, ...] | None:
        names = (name for name in self._place.groups if name.startswith(prefix) and name.endswith(channel))
        group = next(names, None)
        if group is None:
            return None
        reduce = str(op).rpartition(".")[2].lower()
        purpose = "deadline" if reduce == "max" and channel == "events" else channel
        return "tp", purpose, reduce, tensor.numel(), group, self._next(group)

    def _next(self, group: str) -> int:
        seq = self._seqs.get(group, 0)
        self._seqs[group] = seq + 1
        return seq

    def enter_pipeline(self, cache: Any, data: Any) -> None:
        """A later stage waits for the one before it."""
        if cache.pp_rank > 0 and cache.pp_size > 1:
            self._received = self._link(cache, cache.pp_rank - 1, data)
            self._enter("pp", *self._received, self._pipeline[cache.pp_rank - 1], None)

    def leave_pipeline(self, cache: Any, data: Any) -> None:
        if cache.pp_size <= 1:
            return
        value = self._vector_digest(_counts(data))
        if cache.pp_rank > 0:
            self._leave("pp", *self._received, self._pipeline[cache.pp_rank - 1], value)
        if cache.pp_rank + 1 < cache.pp_size:
            sent = self._link(cache, cache.pp_rank, data)
            peer = self._pipeline[cache.pp_rank + 1]
            self._enter("pp", *sent, peer, None)
            self._leave("pp", *sent, peer, value)

    def _link(self, cache: Any, sender: int, data: Any) -> tuple[Any, ...]:
        name = next(name for name in self._place.groups if name.startswith(PIPELINE_GROUP))
        group = f"{name}:{sender}"
        op = "send" if sender == cache.pp_rank else "recv"
        purpose = "events" if data.numel() > 1 else "deadline"
        return purpose, op, "", data.numel(), group, self._next(group)

    def _vector_digest(self, counts: Sequence[int]) -> str:
        return self._digest(array("q", counts).tobytes())

    # Lanes.

    def at_work(self, lane: str) -> None:
        """A lane begins something, which follows from what the scheduler did up to here."""
        self._lanes[lane].step = self._main.step
        self._busy_since_s[lane] = time.monotonic()

    def rests(self, lane: str) -> None:
        self._busy_since_s.pop(lane, None)

    def state(self, lane: str, state: str, op: Any) -> None:
        """Record what a lane is at: in a store, or at the end of its work."""
        if state == BACKEND:
            self.at_work(lane)
        else:
            self.rests(lane)
        self._states[lane](state, op)

    def outcome_of(self, lane: str) -> Outcome:
        """How a lane ends that nobody gives work any more: what it was in the middle of is not missing."""
        since_s = self._busy_since_s.get(lane)
        if since_s is not None:
            return "hung" if time.monotonic() - since_s >= HUNG_S else "stopped"
        controller = getattr(self._cache, "cache_controller", None)
        queue = getattr(controller, QUEUES[lane], None)
        is_due = queue is not None and bool(queue.qsize())
        # What has been read is agreed on next: who waits for that has not completed either.
        is_due = is_due or (lane == "sync" and self.outcome_of("io") != "completed")
        return "stopped" if is_due else "completed"


def _counts(data: Any) -> list[int]:
    """Of a round's vector the counts: behind them stands a digest, twice."""
    values = data.tolist()
    if type(values) is int:
        return [values]
    return list(values[:-2] if len(values) > 2 else values)
