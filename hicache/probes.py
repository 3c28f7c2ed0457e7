"""Every kind of record the runtime writes. Read this to know the log.

Each kind says which ranks must agree on it (`agree`), on which fields (`compared`), and which of
its fields are facts that one rank alone knows (`local`). The checker reads these declarations from
the log's header and nothing else, so a decision that is not declared here cannot be checked.

Units: `tokens` and `pages` are counts; `node`, `op` and `round` are ids that every rank counts
alike; digests are keyed, 16 hex characters a page, never a hash that could be looked up.

By convention the compared fields end with the number that says most, which is what a screen shows. A
decision is recorded when it is taken, before what follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tracer.record import Kind

# One replica's ranks take the same decisions in the same order.
REPLICA = ("tp", "cp", "pp")
# Stages of a pipeline enter different collectives; the ranks of one stage enter the same ones.
STAGE = ("tp", "cp")

REQUEST = Kind(
    "request",
    "event",
    agree=REPLICA,
    # Keyed digests: `namespace` of extra key and salt, or ""; `content` of prompt and answer.
    compared=("order", "rid", "namespace", "content", "priority", "input_tokens", "output_tokens"),
    info=("conversation", "arrival_ms"),
)

# `place` is the queue in which the abort has found the request: waiting, running, chunked, or "" where
# it is not known any more.
ABORT = Kind("abort", "event", agree=REPLICA, compared=("rid", "place"))

MATCH = Kind(
    "match",
    "decision",
    agree=REPLICA,
    # `purpose` is submit (before a prefetch) or admit. `kv_tokens` is what the KV pages alone would give; it
    # is more than host and device tokens where a side pool's state is missing.
    compared=("rid", "purpose", "node", "kv_tokens", "host_tokens", "device_tokens"),
    local=("device_pages_free", "host_pages_free", "writes_in_flight"),
    # First page of the prompt that no tier could give, or "" when every usable page was found; and the last
    # page that was found, "" at the root. Where the KV alone would give more, the last page of that.
    info=("miss_digest", "usable_tokens", "hit_digest", "kv_digest"),
)

LOAD_BACK = Kind(
    "load_back",
    "decision",
    agree=REPLICA,
    compared=("rid", "node", "declined", "pages", "tokens"),
    local=("device_pages_free", "host_pages_free", "loads_in_flight"),
    result="tokens",
    needs={"device_pages_free": "pages"},
)

ADMIT = Kind(
    "admit",
    "decision",
    agree=REPLICA,
    compared=(
        "rid",
        "verdict",
        "pages",
        "device_tokens",
        "host_tokens",
        "storage_tokens",
        "extend_tokens",
    ),
    local=("device_pages_free", "device_pages_evictable", "host_pages_free", "running_count"),
    # No need is declared: what is not free may be evicted.
    result="extend_tokens",
)

EVICT = Kind(
    "evict",
    "decision",
    agree=REPLICA,
    # Why a victim was lost and not demoted: write_through_unbacked_eviction, host_pressure, or "".
    compared=("pages_wanted", "drop_reason", "pages_freed", "nodes"),
    local=("device_pages_free", "device_pages_evictable", "host_pages_free"),
    info=("demoted_digests", "dropped_digests"),
)

EVICT_HOST = Kind(
    "evict_host",
    "decision",
    agree=REPLICA,
    compared=("pages_wanted", "states_freed", "pages_freed", "nodes"),
    local=("host_pages_free", "device_pages_free", "host_pages_used"),
    info=("dropped_digests",),
)

# Under write_back: the host gives up pages that the device holds too. `digest` runs over all of them.
RECLAIM = Kind(
    "reclaim",
    "decision",
    agree=REPLICA,
    compared=("node", "digest", "pages"),
    local=("host_pages_free", "device_pages_free", "host_pages_used"),
)

# Slots taken: what for, and the agreed counts before.
ALLOC = Kind(
    "alloc",
    "decision",
    agree=REPLICA,
    compared=("purpose", "evictable_pages", "protected_pages", "pages"),
    local=("device_pages_free", "host_pages_free", "writes_in_flight"),
)

# A running request gives its pages back and waits again.
RETRACT = Kind(
    "retract",
    "decision",
    agree=REPLICA,
    compared=("rid", "attempt", "output_tokens", "pages"),
    local=("device_pages_free", "host_pages_free", "running_count"),
)

BATCH = Kind(
    "batch",
    "decision",
    agree=REPLICA,
    compared=("mode", "rids", "tokens"),
    local=("waiting_count", "running_count", "device_pages_free"),
)

FORWARD = Kind(
    "forward",
    "event",
    agree=REPLICA,
    compared=("mode", "tokens"),
    info=("rids", "computed_tokens"),
)

# Phase `call` before the walk, phase `return` behind it; the backups that it asks for lie between.
INSERT = Kind(
    "insert",
    "decision",
    agree=REPLICA,
    compared=("rid", "owned_pages", "node", "nodes_counted", "duplicate_pages", "tokens", "new_tokens"),
    local=("device_pages_free", "host_pages_free", "writes_in_flight"),
    # Pages that were on no tier, and the page before them, "" at the root.
    info=("new_digests", "parent_digest"),
)
INSERT_CALL = ("rid", "owned_pages", "tokens", "device_pages_free", "host_pages_free", "writes_in_flight")
INSERT_RETURN = (
    "rid",
    "node",
    "nodes_counted",
    "duplicate_pages",
    "new_tokens",
    "new_digests",
    "parent_digest",
)

WRITE_BACKUP = Kind(
    "write_backup",
    "decision",
    agree=REPLICA,
    # `reason` is threshold, eviction or side_pool.
    compared=("node", "reason", "pages", "tokens"),
    local=("host_pages_free", "device_pages_free", "write_queue_len"),
    result="tokens",
    needs={"host_pages_free": "pages"},
)

BACKUP_CANCEL = Kind(
    "backup_cancel",
    "decision",
    agree=REPLICA,
    compared=("node", "pages"),
    local=("reserved", "host_pages_free", "write_queue_len"),
)

# Written twice: phase `call` before the group meets, with the state that all ranks should have in
# common and with what this rank alone sees; phase `return` with what the group agreed. A lock or a page
# that was lost on one rank shows here one round later, not when somebody needs it. Later pipeline stages
# adopt stage 0's counts and never poll their own. `digest` is a running one: of reclaims, or with
# --in-band-digest of every compared decision.
EVENT_ROUND = Kind(
    "event_round",
    "decision",
    agree=REPLICA,
    compared=(
        "round",
        "writes_in_flight",
        "loads_in_flight",
        "write_queue_len",
        "nodes_created",
        "evictable_pages",
        "protected_pages",
        "backed_pages",
        "host_locks",
        # Free pages as the group counts them; null where there is no limit.
        "device_pages_available",
        "host_pages_available",
        # Counted since the start: prefetches submitted, hits and acks consumed, tokens they occupy.
        "prefetches_submitted",
        "hits_consumed",
        "prefetch_acks_consumed",
        "storage_backups_submitted",
        "occupied_tokens",
        "digest",
        "loads_agreed",
        "backups_agreed",
        "hits_agreed",
        "prefetch_acks_agreed",
        "storage_acks_agreed",
        "releases_agreed",
        "side_releases_agreed",
        "writes_agreed",
    ),
    local=(
        "writes_done",
        "loads_done",
        "backups_reserved",
        "hits_ready",
        "prefetch_acks_ready",
        "storage_acks_ready",
        "releases_ready",
        "side_releases_ready",
        "host_pages_free",
        "device_pages_free",
    ),
    leader="pp",
    led=(
        "loads_agreed",
        "backups_agreed",
        "hits_agreed",
        "prefetch_acks_agreed",
        "storage_acks_agreed",
        "releases_agreed",
        "side_releases_agreed",
        "writes_agreed",
    ),
    feeds={
        "writes_done": "writes_agreed",
        "loads_done": "loads_agreed",
        "backups_reserved": "backups_agreed",
        "hits_ready": "hits_agreed",
        "prefetch_acks_ready": "prefetch_acks_agreed",
        "storage_acks_ready": "storage_acks_agreed",
        "releases_ready": "releases_agreed",
        "side_releases_ready": "side_releases_agreed",
    },
    counters=("round",),
)
# Without storage the fields of storage are left out, not written as null: most of a log is event rounds.
STORAGE_STATE = (
    "prefetches_submitted",
    "hits_consumed",
    "prefetch_acks_consumed",
    "storage_backups_submitted",
    "occupied_tokens",
    "hits_ready",
    "prefetch_acks_ready",
    "storage_acks_ready",
    "releases_ready",
    "side_releases_ready",
)
STORAGE_AGREED = (
    "hits_agreed",
    "prefetch_acks_agreed",
    "storage_acks_agreed",
    "releases_agreed",
    "side_releases_agreed",
)
EVENT_ROUND_CALL = (
    "round",
    "writes_in_flight",
    "loads_in_flight",
    "write_queue_len",
    "nodes_created",
    "evictable_pages",
    "protected_pages",
    "backed_pages",
    "host_locks",
    "device_pages_available",
    "host_pages_available",
    "digest",
    "writes_done",
    "loads_done",
    "backups_reserved",
    "host_pages_free",
    "device_pages_free",
)
EVENT_ROUND_RETURN = ("round", "writes_agreed", "loads_agreed", "backups_agreed")

FINISH = Kind(
    "finish",
    "event",
    agree=REPLICA,
    compared=("rid", "reason", "output_tokens"),
)

# The same transfer seen three times. `done` means that the bytes have moved, which each rank sees
# in its own time; `ack` means that the control plane has applied it, on every rank in one order.
TRANSFER_ENQUEUE = Kind(
    "transfer_enqueue",
    "transfer",
    agree=REPLICA,
    compared=("op", "queue", "nodes", "pages"),
)
TRANSFER_DONE = Kind("transfer_done", "transfer", info=("op", "queue"))
# `locks` are the device locks left on each anchor.
TRANSFER_ACK = Kind(
    "transfer_ack",
    "transfer",
    agree=REPLICA,
    compared=("op", "queue", "nodes", "locks", "pages"),
)

# Phases `enter` and `leave`. `purpose` is what the caller meant; a collective library pairs calls
# by order alone and never sees it. `reduce` is empty where nothing is reduced. `value`, where a vector has
# gone from one stage to the next, is its digest.
MEETING = Kind(
    "meeting",
    "meeting",
    agree=STAGE,
    compared=("axis", "purpose", "op", "reduce", "numel"),
    info=("group", "group_seq", "peer", "value"),
    counters=("group_seq",),
)
MEETING_FIELDS = tuple(name for name in MEETING.fields if name != "value")
# With stages: the digest of the vector that this rank goes by from here on, to be held against the `value`
# that it was sent and the one that it has sent.
ADOPTED = Kind("adopted", "note", info=("purpose", "value"))

# Reading ahead from the external tier. A prefetch is decided by the scheduler (`prefetch_submit`), measured
# by the prefetch lane (`query`), taken over by the scheduler (`prefetch_hit`), read by the io lane (`read`),
# agreed on by the sync lane (`progress`) and applied by the scheduler (`prefetch_ack`, `prefetch_insert`).
# A request that waits for it asks at admission (`prefetch_poll`). `outcome` is a word of
# `control.prefetch.OUTCOMES`.
PREFETCH_SUBMIT = Kind(
    "prefetch_submit",
    "decision",
    agree=REPLICA,
    compared=("rid", "attempt", "op", "node", "pages", "outcome", "occupied_tokens", "tokens"),
    local=("host_pages_free", "hits_ready", "prefetch_acks_ready"),
)

QUERY = Kind(
    "query",
    "decision",
    agree=REPLICA,
    compared=("op", "rid", "attempt", "pages", "publish_seq", "agreed_pages"),
    local=("local_pages", "local_boundaries", "error"),
    result="agreed_pages",
)

PREFETCH_HIT = Kind(
    "prefetch_hit",
    "decision",
    agree=REPLICA,
    compared=("op", "rid", "attempt", "consume_seq", "outcome", "hit_tokens", "tokens"),
    local=("host_pages_free", "is_reserved", "hits_ready", "prefetch_acks_ready"),
    result="tokens",
)

READ = Kind(
    "read",
    "event",
    agree=REPLICA,
    compared=("op", "batch", "pages"),
    local=("local_tokens", "error"),
)

# `ack` is progress, pool_hits or completed. The acks of one prefetch are as many on every rank.
PROGRESS = Kind(
    "progress",
    "event",
    agree=REPLICA,
    compared=("op", "ack", "publish_seq", "agreed_tokens"),
    local=("local_tokens",),
    result="agreed_tokens",
)

PREFETCH_ACK = Kind(
    "prefetch_ack",
    "event",
    agree=REPLICA,
    compared=("op", "ack", "consume_seq", "is_current", "tokens"),
)

PREFETCH_INSERT = Kind(
    "prefetch_insert",
    "decision",
    agree=REPLICA,
    compared=("op", "rid", "node", "outcome", "completed_tokens", "matched_tokens", "loaded_tokens"),
    local=("host_pages_free", "hits_ready", "prefetch_acks_ready"),
    info=("new_digests",),
    result="loaded_tokens",
)

# Stage 0 decides whether the deadline has passed; the others adopt.
PREFETCH_POLL = Kind(
    "prefetch_poll",
    "decision",
    agree=REPLICA,
    compared=("rid", "attempt", "op", "policy", "completed_tokens", "verdict"),
    local=("elapsed_ns", "is_late", "hits_ready", "prefetch_acks_ready"),
    leader="pp",
    led=("verdict",),
)

# What became of tokens that were asked for and not given, by appendix F's outcomes.
PREFETCH_OUTCOME = Kind(
    "prefetch_outcome",
    "event",
    agree=REPLICA,
    compared=("rid", "attempt", "outcome", "reason", "tokens"),
)

PREFETCH_RETRY = Kind(
    "prefetch_retry",
    "decision",
    agree=REPLICA,
    compared=("rid", "attempt", "cause", "verdict", "due_step", "tries"),
    local=("host_pages_free", "hits_ready", "prefetch_acks_ready"),
)

RELEASE = Kind(
    "release",
    "event",
    agree=REPLICA,
    compared=("pool", "slots"),
    local=("host_pages_free",),
)

# Writing on to the external tier: decided at a write's ack, written by the backup lane, acknowledged.
STORAGE_BACKUP = Kind(
    "storage_backup",
    "decision",
    agree=REPLICA,
    compared=("op", "node", "pages"),
    local=("host_pages_free", "storage_acks_ready", "backups_in_flight"),
)

STORAGE_WRITE = Kind(
    "storage_write",
    "event",
    agree=REPLICA,
    compared=("op", "pages"),
    local=("written_pages", "side_written", "error"),
)

STORAGE_ACK = Kind(
    "storage_ack",
    "event",
    agree=REPLICA,
    compared=("op", "nodes", "pages"),
    local=("written_pages",),
)

# An operator's command and what came of it, on all ranks or on none.
COMMAND = Kind(
    "command",
    "decision",
    agree=REPLICA,
    compared=("verb", "reason", "verdict"),
    local=("is_ready", "error", "host_pages_free"),
)

# What a lane is at, for people and for heartbeats: idle (its queue is empty), backend, collective, ended.
LANE_STATE = Kind("lane_state", "note", info=("state", "op"))

# Agreed on before the first request: the least that any rank has; 0 is no limit.
CAPACITY = Kind("capacity", "event", agree=REPLICA, compared=("pool", "pages"), local=("own_pages",))

POOL_AUDIT = Kind(
    "pool_audit",
    "event",
    agree=REPLICA,
    compared=("pool", "available", "evictable", "protected", "total"),
)

WRONG_PAGE = Kind(
    "wrong_page",
    "anomaly",
    info=("rid", "page_index", "slot", "writer", "found", "expected"),
)

# The meeting guard: ranks in one call that meant different things.
MISPAIRED = Kind(
    "mispaired",
    "anomaly",
    info=("group", "group_seq", "purpose", "others"),
)

KINDS = (
    CAPACITY,
    REQUEST,
    ABORT,
    MATCH,
    PREFETCH_SUBMIT,
    PREFETCH_HIT,
    PREFETCH_ACK,
    PREFETCH_INSERT,
    PREFETCH_POLL,
    PREFETCH_OUTCOME,
    PREFETCH_RETRY,
    QUERY,
    READ,
    PROGRESS,
    RELEASE,
    STORAGE_BACKUP,
    STORAGE_WRITE,
    STORAGE_ACK,
    LOAD_BACK,
    ADMIT,
    EVICT,
    EVICT_HOST,
    RECLAIM,
    ALLOC,
    RETRACT,
    BATCH,
    FORWARD,
    INSERT,
    WRITE_BACKUP,
    BACKUP_CANCEL,
    EVENT_ROUND,
    FINISH,
    COMMAND,
    TRANSFER_ENQUEUE,
    TRANSFER_DONE,
    TRANSFER_ACK,
    MEETING,
    ADOPTED,
    POOL_AUDIT,
    LANE_STATE,
    MISPAIRED,
    WRONG_PAGE,
)

Emit = Callable[..., None]


class Emitters(Protocol):
    """What the runtime needs from a tracer; `tracer.Tracer` is one."""

    step: int

    def emitter(self, kind: Kind, *, phase: str = "", fields: Sequence[str] | None = None) -> Emit: ...
    def begin_step(self, step: int) -> None: ...
    def end_step(self, *, is_idle: bool) -> None: ...


class Probes:
    """One lane's writers, one a kind. Each takes its kind's fields by position, in `Kind.fields` order."""

    __slots__ = (
        "abort",
        "admit",
        "adopted",
        "alloc",
        "backup_cancel",
        "batch",
        "capacity",
        "command",
        "event_round_call",
        "event_round_call_storage",
        "event_round_return",
        "event_round_return_storage",
        "evict",
        "evict_host",
        "finish",
        "forward",
        "insert_call",
        "insert_return",
        "lane_state",
        "load_back",
        "match",
        "meeting_enter",
        "meeting_leave",
        "meeting_leave_value",
        "mispaired",
        "pool_audit",
        "prefetch_ack",
        "prefetch_hit",
        "prefetch_insert",
        "prefetch_outcome",
        "prefetch_poll",
        "prefetch_retry",
        "prefetch_submit",
        "progress",
        "query",
        "read",
        "reclaim",
        "release",
        "request",
        "retract",
        "storage_ack",
        "storage_backup",
        "storage_write",
        "tracer",
        "transfer_ack",
        "transfer_done",
        "transfer_enqueue",
        "write_backup",
        "wrong_page",
    )

    def __init__(self, tracer: Emitters) -> None:
        self.tracer = tracer
        self.capacity = tracer.emitter(CAPACITY)
        self.request = tracer.emitter(REQUEST)
        self.abort = tracer.emitter(ABORT)
        self.match = tracer.emitter(MATCH)
        self.prefetch_submit = tracer.emitter(PREFETCH_SUBMIT)
        self.prefetch_hit = tracer.emitter(PREFETCH_HIT)
        self.prefetch_ack = tracer.emitter(PREFETCH_ACK)
        self.prefetch_insert = tracer.emitter(PREFETCH_INSERT)
        self.prefetch_poll = tracer.emitter(PREFETCH_POLL)
        self.prefetch_outcome = tracer.emitter(PREFETCH_OUTCOME)
        self.prefetch_retry = tracer.emitter(PREFETCH_RETRY)
        self.query = tracer.emitter(QUERY)
        self.read = tracer.emitter(READ)
        self.progress = tracer.emitter(PROGRESS)
        self.release = tracer.emitter(RELEASE)
        self.storage_backup = tracer.emitter(STORAGE_BACKUP)
        self.storage_write = tracer.emitter(STORAGE_WRITE)
        self.storage_ack = tracer.emitter(STORAGE_ACK)
        self.load_back = tracer.emitter(LOAD_BACK)
        self.admit = tracer.emitter(ADMIT)
        self.evict = tracer.emitter(EVICT)
        self.evict_host = tracer.emitter(EVICT_HOST)
        self.reclaim = tracer.emitter(RECLAIM)
        self.alloc = tracer.emitter(ALLOC)
        self.retract = tracer.emitter(RETRACT)
        self.batch = tracer.emitter(BATCH)
        self.forward = tracer.emitter(FORWARD)
        self.insert_call = tracer.emitter(INSERT, phase="call", fields=INSERT_CALL)
        self.insert_return = tracer.emitter(INSERT, phase="return", fields=INSERT_RETURN)
        self.write_backup = tracer.emitter(WRITE_BACKUP)
        self.backup_cancel = tracer.emitter(BACKUP_CANCEL)
        self.event_round_call = tracer.emitter(EVENT_ROUND, phase="call", fields=EVENT_ROUND_CALL)
        self.event_round_return = tracer.emitter(EVENT_ROUND, phase="return", fields=EVENT_ROUND_RETURN)
        self.event_round_call_storage = tracer.emitter(
            EVENT_ROUND, phase="call", fields=(*EVENT_ROUND_CALL, *STORAGE_STATE)
        )
        self.event_round_return_storage = tracer.emitter(
            EVENT_ROUND, phase="return", fields=(*EVENT_ROUND_RETURN, *STORAGE_AGREED)
        )
        self.finish = tracer.emitter(FINISH)
        self.command = tracer.emitter(COMMAND)
        self.transfer_enqueue = tracer.emitter(TRANSFER_ENQUEUE)
        self.transfer_done = tracer.emitter(TRANSFER_DONE)
        self.transfer_ack = tracer.emitter(TRANSFER_ACK)
        self.meeting_enter = tracer.emitter(MEETING, phase="enter", fields=MEETING_FIELDS)
        self.meeting_leave = tracer.emitter(MEETING, phase="leave", fields=MEETING_FIELDS)
        self.meeting_leave_value = tracer.emitter(MEETING, phase="leave")
        self.adopted = tracer.emitter(ADOPTED)
        self.pool_audit = tracer.emitter(POOL_AUDIT)
        self.lane_state = tracer.emitter(LANE_STATE)
        self.mispaired = tracer.emitter(MISPAIRED)
        self.wrong_page = tracer.emitter(WRONG_PAGE)


def silent(*_fields: Any) -> None:
    """The writer of a probe that is switched off."""
