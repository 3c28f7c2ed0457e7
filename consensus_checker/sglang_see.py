"""What hooks look at besides the arguments of one call: which step it is, what was sent, who waits for whom.

Owns what two calls of one server process have to do with each other. One object for the process; it is made
before anything is recorded, and every expression of a point may ask it. It changes nothing that it looks at.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from threading import get_ident
from typing import Any

from consensus_checker import sglang_kinds as kinds
from consensus_checker.payload import REQUEST_ID
from consensus_checker.sglang_place import PIPELINE_GROUP, POLLS, REPLICA_GROUP, STAGE_GROUP
from consensus_checker.sglang_transfers import Transfers
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
# Counts of a cache, of which one goes up where a prefetch is asked for.
OUTCOMES = ("issued", "declined_too_short", "declined_rate_limited")
# Kinds of meetings that are remembered.
PLACES_MAX = 256
# Names of types that a record of what came has.
TYPES_MAX = 8
NONE_OF_STORAGE: tuple[Any, ...] = (None, None, None, None, [])
# Of a page's digest, so many characters. Of a page with fewer tokens there is none: digests of single tokens
# would be a cipher that counting breaks.
PAGE_CHARS = 12
PAGE_TOKENS_MIN = 16
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
        host_room, device_room: free pages as they were last looked at, or counted since; None: not yet.
        freed_tokens, freed_host_pages: what was given back between the last two rounds, of the device's pool
            and of the host's main one.
        transfers: what there is to look at between a prefill and a decode server.
    """

    def __init__(self) -> None:
        self.round = 0
        self.waiting: Any = None
        self.threads: dict[int, str] = {}
        self._lanes: Mapping[str, Tracer] = {}
        self._busy_since_s: dict[str, float] = {}
        self._cache: Any = None
        self._states: dict[str, Any] = {}
        self.host_room: int | None = None
        self.device_room: int | None = None
        self.freed_tokens = self.freed_host_pages = 0
        self._freed_tokens = self._freed_host_pages = 0
        self.transfers = Transfers()

    def begin(
        self, lanes: Mapping[str, Tracer], place: Place, digest: Digest, *, page_tokens: int = 0
    ) -> None:
        """A recording begins.

        Args:
            page_tokens: of a page, where what pages hold is to be told apart; 0 where it is not.
        """
        self._lanes = lanes
        self._page_tokens = page_tokens if page_tokens >= PAGE_TOKENS_MIN else 0
        self._main = lanes[MAIN_LANE]
        self._digest = digest
        self._place = place
        pipelines = (ranks for name, ranks in place.groups.items() if name.startswith(PIPELINE_GROUP))
        self._pipeline: Sequence[int] = next(pipelines, ())
        self._seqs: dict[str, int] = {}
        self._busy_since_s.clear()
        # Requests that have been recorded: their ids, and what a log calls them.
        self._known: dict[str, str] = {}
        # Request -> up to which token it has been computed.
        self._computed: dict[str, int] = {}
        # What a meeting is called: by whom it is, for what, and how it is reduced.
        # Found by the reduction's number, for torch hashes one slowly: it lives on here, with its number.
        self._places: dict[Any, tuple[Any, tuple[str, str, str, str] | None]] = {}
        self.transfers.begin(digest, place)
        self.host_room = self.device_room = None
        self.freed_tokens = self.freed_host_pages = 0
        self._freed_tokens = self._freed_host_pages = 0
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

    def _pages(self, ids: Any, count: int) -> str | None:
        """Digests of the whole pages of so many tokens, one behind the other."""
        if not self._page_tokens:
            return None
        tokens = self._tokens(ids, count)
        size = self._page_tokens * (len(tokens) // count) if count else 1
        digest = self._digest
        last = len(tokens) - size + 1
        return "".join([digest(tokens[at : at + size])[:PAGE_CHARS] for at in range(0, last, size)])

    def pages_put_out(self, req: Any) -> str | None:
        """Those of what a request has put out, from the page on in which its prompt ends."""
        if not self._page_tokens:
            return None
        ids = req.origin_input_ids
        own = ids[len(ids) // self._page_tokens * self._page_tokens :]
        found = array("q", [*own, *req.output_ids])
        return self._pages(found, len(found))

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
            self._pages(ids, len(ids)),
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
        found = value
        if type(found) is not str:
            try:
                found = value.rid
            except AttributeError:
                value = getattr(value, "handle", value)
                found = getattr(value, "rid", None) or getattr(value, "request_id", None)
        return (self._known.get(found) or self._named(found)) if type(found) is str else ""

    def attempt(self, value: Any) -> int:
        try:
            return int(value.attempt_id)
        except AttributeError:
            return int(getattr(getattr(value, "handle", None), "attempt_id", 0))

    def node(self, value: Any) -> Any:
        """A node's number: it is counted alike on every rank."""
        return value if value is None or type(value) is int else getattr(value, "id", None)

    def nodes(self, queue: Sequence[Any]) -> list[int]:
        return [node for op in queue for node in op.node_ids]

    def device_pages(self, controller: Any, queue: Sequence[Any]) -> int:
        if not queue:
            return 0
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

    # Room that is left, in pages: a fact of one rank. To ask a pool takes a while, so it is asked where room
    # is taken and once a round; what is given back is counted.

    def look_at_room(self, cache: Any) -> None:
        controller, size = cache.cache_controller, cache.page_size
        if controller is not None:
            self.host_room = int(controller.mem_pool_host.available_size() // size)
        self.device_room = int(cache.token_to_kv_pool_allocator.available_size() // size)

    def pool_free(self, group: Any, pool: Any) -> int:
        own = group.get_entry(pool).host_pool
        return int(own.available_size() // own.page_size)

    def host_has(self, pool: Any, pages: int) -> None:
        """So much is left of a host pool; of one beside the main one nobody keeps count."""
        if pool is None:
            self.host_room = pages

    def host_gets_back(self, pool: Any, pages: int) -> int | None:
        """What was free before."""
        if pool is not None:
            return None
        self._freed_host_pages += pages
        before = self.host_room
        if before is not None:
            self.host_room = before + pages
        return before

    def device_has(self, pages: int) -> None:
        self.device_room = pages

    def device_gets_back(self, tokens: int, page_size: int) -> int | None:
        """What is free behind it."""
        self._freed_tokens += tokens
        if self.device_room is not None:
            self.device_room += -(-tokens // page_size)
        return self.device_room

    # Prefetches.

    def outcomes(self, cache: Any) -> tuple[int, ...]:
        stats = getattr(cache, "_prefetch_outcome_stats", None)
        return tuple(stats.get(name, 0) for name in OUTCOMES) if stats else ()

    def outcome(self, cache: Any, before: Sequence[int]) -> str:
        """Which count has gone up; one that is a part of another comes behind it."""
        now = self.outcomes(cache)
        before = before or (0,) * len(now)
        return next(
            (name for name, new, old in zip(OUTCOMES, now, before, strict=True) if new != old), "ongoing"
        )

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
        self.freed_tokens, self.freed_host_pages = self._freed_tokens, self._freed_host_pages
        self._freed_tokens = self._freed_host_pages = 0
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

    def in_flight(self, cache: Any) -> tuple[int, ...]:
        """How much is under way."""
        names = ("ongoing_write_through", "ongoing_load_back", "ongoing_prefetch", "ongoing_backup")
        return tuple(len(getattr(cache, name, ())) for name in names)

    def end_former_round(self, cache: Any, before: tuple[int, ...]) -> None:
        """End that of a cache which says nowhere how much is agreed on; its record comes behind."""
        self._is_idle = before == self.in_flight(cache)
        self._seq_after = self._main.seq + 1

    def of_storage(self, counts: Sequence[int]) -> tuple[Any, ...]:
        """Of agreed counts: hits, acks of prefetches, of backups, releases, and releases of side pools.

        Three of them, without acks of prefetches, in 0.5.18.
        """
        if len(counts) > 3:
            return (*counts[:4], list(counts[4:]))
        return (counts[0], None, *counts[1:], []) if len(counts) == 3 else NONE_OF_STORAGE

    def own_counts(self, count: int) -> tuple[Any, ...]:
        """This rank's own: of writes, of loads, and `count` of storage. Later stages have none."""
        vector = self._vector
        if type(vector) is not list:
            return None, None, NONE_OF_STORAGE
        return vector[0], vector[1], self.of_storage(vector[2 : 2 + count])

    def forget_vector(self) -> None:
        self._vector = None

    def vote(self, cache: Any) -> bool | None:
        """What this rank's own clock said, where it was asked."""
        return bool(self._vector) if type(self._vector) is int else None

    # Meetings.

    def meet_attention(self, op: Any, tensor: Any) -> tuple[Any, ...] | None:
        """Axis, purpose, reduction, size, group and number of the call that this stage's ranks make."""
        # It is reduced in place: these are this rank's own counts.
        vector = self._vector = tensor.tolist()
        numel = len(vector) if type(vector) is list else 1
        return self._met(STAGE_GROUP, "events", op, numel)

    def meet_storage(self, op: Any, tensor: Any, groups: Sequence[Any]) -> tuple[Any, ...] | None:
        if not groups:
            return None
        purpose = "hits" if self.threads.get(get_ident()) == "prefetch" else "progress"
        return self._met(REPLICA_GROUP, purpose, op, tensor.numel())

    def meet_flags(self, flags: Sequence[int], group: Any, op: Any) -> tuple[Any, ...] | None:
        """The same of polls of transfers; with the first of a poll it is known what this rank polled."""
        self.transfers.note_polls(flags)
        return self._met(group, POLLS, op, len(flags)) if flags else None

    def _met(self, prefix: Any, channel: str, op: Any, numel: int) -> tuple[Any, ...] | None:
        key = prefix, channel, id(op)
        try:
            _, found = self._places[key]
        except KeyError:
            found = self._place_of(prefix, channel, op)
            if len(self._places) >= PLACES_MAX:
                # A version that makes a reduction anew for each call would fill it for ever.
                self._places.clear()
            self._places[key] = op, found
        if found is None:
            return None
        axis, purpose, reduce, group = found
        return axis, purpose, reduce, numel, group, self._next(group)

    def _place_of(self, prefix: Any, channel: str, op: Any) -> tuple[str, str, str, str] | None:
        groups = self._place.groups
        reduce = str(op).rpartition(".")[2].lower()
        if channel == POLLS:
            ranks = _ranks_of(prefix)
            name = next((one for one in groups if one.endswith(POLLS) and tuple(groups[one]) == ranks), None)
            return None if name is None else (name[:2], "polls" if reduce == "min" else "holds", reduce, name)
        names = (name for name in groups if name.startswith(prefix) and name.endswith(channel))
        group = next(names, None)
        purpose = "deadline" if reduce == "max" and channel == "events" else channel
        return None if group is None else ("tp", purpose, reduce, group)

    def _next(self, group: str) -> int:
        seq = self._seqs.get(group, 0)
        self._seqs[group] = seq + 1
        return seq

    def enter_pipeline(self, cache: Any, data: Any) -> None:
        """A later stage waits for the one before it."""
        self._enter_stage(cache.pp_rank, cache.pp_size, *_shape(data))

    def leave_pipeline(self, cache: Any, data: Any) -> None:
        if cache.pp_size > 1:
            value = self._vector_digest(_counts(data))
            self._leave_stage(cache.pp_rank, cache.pp_size, *_shape(data), value)

    def enter_polls(self, pp_rank: int, pp_size: int) -> None:
        """The same for polls; how many there are the later stages know only when they have come."""
        self._enter_stage(pp_rank, pp_size, "polls", 0)

    def leave_polls(self, pp_rank: int, pp_size: int, polls: Sequence[int]) -> None:
        if pp_size > 1:
            self._leave_stage(pp_rank, pp_size, "polls", 0, self._vector_digest(list(polls)))

    def _enter_stage(self, pp_rank: int, pp_size: int, purpose: str, numel: int) -> None:
        if pp_rank > 0 and pp_size > 1:
            self._received = self._link(pp_rank, pp_rank - 1, purpose, numel)
            self._enter("pp", *self._received, self._pipeline[pp_rank - 1], None)

    def _leave_stage(self, pp_rank: int, pp_size: int, purpose: str, numel: int, value: str) -> None:
        if pp_rank > 0:
            self._leave("pp", *self._received, self._pipeline[pp_rank - 1], value)
        if pp_rank + 1 < pp_size:
            sent = self._link(pp_rank, pp_rank, purpose, numel)
            peer = self._pipeline[pp_rank + 1]
            self._enter("pp", *sent, peer, None)
            self._leave("pp", *sent, peer, value)

    def _link(self, pp_rank: int, sender: int, purpose: str, numel: int) -> tuple[Any, ...]:
        name = next(name for name in self._place.groups if name.startswith(PIPELINE_GROUP))
        group = f"{name}:{sender}"
        op = "send" if sender == pp_rank else "recv"
        return purpose, op, "", numel, group, self._next(group)

    def _vector_digest(self, counts: Sequence[int]) -> str:
        return self._digest(array("q", counts).tobytes())

    # What a scheduler receives and plans.

    def received(self, reqs: Sequence[Any]) -> str:
        """Digest of what has come, in its order."""
        texts = [f"{type(req).__name__} {getattr(one, 'rid', None)}" for req in reqs for one in _single(req)]
        return self._digest("\0".join(texts).encode())

    def types(self, reqs: Sequence[Any]) -> list[str]:
        return list(dict.fromkeys(type(req).__name__ for req in reqs))[:TYPES_MAX]

    def planned(self, plan: Any) -> Any:
        """The batch that is to run, or None; before 0.5.20 it was itself what was given back."""
        return getattr(plan, "batch_to_run", plan)

    def lengths(self, batch: Any) -> list[Any] | None:
        """How many requests of a batch are extended, and by how many tokens each."""
        lengths = getattr(batch, "extend_lens", None)
        if not lengths or not batch.extend_num_tokens:
            return None
        return [len(lengths), self._vector_digest(list(lengths))]

    def outputs(self, tokens: Sequence[Sequence[int]]) -> str:
        """Digest of the tokens of each request."""
        return self._vector_digest([number for own in tokens for number in (len(own), *own)])

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

    def work_done(self, lane: str) -> int | None:
        """How much a lane was ever given, if all of that is done; None while it may be at some of it.

        Nothing is counted by the lane itself: between two functions that are looked at it is at work too.
        Only where its thread waits in its queue, and that is empty, it has nothing in hand.
        """
        controller = getattr(self._cache, "cache_controller", None)
        work = getattr(controller, QUEUES[lane], None)
        given = 0 if work is None else int(getattr(work, "unfinished_tasks", 0))
        ident = next((ident for ident, name in self.threads.items() if name == lane), None)
        if work is not None and (work.qsize() or (ident is not None and not _waits_for_work(ident))):
            return None
        # What has been read is agreed on next: who waits for that has not completed either.
        return None if lane == "sync" and self.work_done("io") is None else given

    def outcome_of(self, lane: str, work_done: int | None) -> Outcome:
        """How a lane ends that nobody gives work any more: what it was in the middle of is not missing.

        Args:
            work_done: when it was still recorded. Work that came after that, and is done, left no record.
        """
        since_s = self._busy_since_s.get(lane)
        if since_s is not None:
            return "hung" if time.monotonic() - since_s >= HUNG_S else "stopped"
        if lane == "sync" and self._busy_since_s.get("io") is not None:
            return "stopped"
        return "completed" if work_done is not None and self.work_done(lane) == work_done else "stopped"


def _waits_for_work(ident: int) -> bool:
    """Whether a thread waits in a queue's `get`: behind that wait it may have an item that no queue has."""
    frame = sys._current_frames().get(ident)
    caller = frame.f_back if frame is not None else None
    if frame is None or caller is None:
        return False
    return frame.f_code is _WAIT and caller.f_code is _GET


_WAIT, _GET = threading.Condition.wait.__code__, queue.Queue.get.__code__


def _counts(data: Any) -> list[int]:
    """Of a round's vector the counts: behind them stands a digest, twice."""
    values = data.tolist()
    if type(values) is int:
        return [values]
    return list(values[:-2] if len(values) > 2 else values)


def _shape(data: Any) -> tuple[str, int]:
    numel = data.numel()
    return ("events" if numel > 1 else "deadline"), numel


def _single(req: Any) -> Sequence[Any]:
    """Several that came as one."""
    batch = getattr(req, "batch", None)
    return batch if isinstance(batch, list) else (req,)


def _ranks_of(group: Any) -> tuple[int, ...]:
    """Of a process group, which torch knows; of anything else none."""
    torch = sys.modules.get("torch")
    try:
        return tuple(torch.distributed.get_process_group_ranks(group))  # type: ignore[union-attr]
    except Exception:
        return ()
