"""The kinds of record that the plugin writes in a real SGLang server.

Names and fields are those of this project's own runtime wherever the thing is the same, so that what reads
its logs reads these. What SGLang counts in tokens is counted in pages here where the name says so.

Which ranks must agree, on which fields, and what explains a difference, is said here and nowhere else. What
may differ between healthy ranks is never compared: how many acks are ready, what one rank's store holds, how
long anything takes.
"""

from __future__ import annotations

from tracer.record import LANE_STATE as LANE_STATE_NAME
from tracer.record import Kind

REPLICA = ("tp", "cp", "pp")
STAGE = ("tp", "cp")

REQUEST = Kind(
    "request",
    "event",
    agree=REPLICA,
    compared=("order", "rid", "namespace", "content", "priority", "input_tokens"),
    given=("rid", "namespace", "content", "priority", "input_tokens"),
    # Digest by digest what its whole pages hold, of a full trace: what makes prompts of the same shape.
    info=("pages",),
)
# What came in one pass of the loop, in its order: requests, and an operator's commands.
RECEIVE = Kind("receive", "event", agree=REPLICA, compared=("count", "rids", "types"))
MATCH = Kind(
    "match",
    "decision",
    agree=REPLICA,
    compared=("rid", "content", "tokens", "node", "best_node", "kv_tokens", "host_tokens", "device_tokens"),
    given=("rid", "content", "tokens"),
)
INSERT = Kind(
    "insert",
    "decision",
    agree=REPLICA,
    compared=("content", "tokens", "node", "owned_tokens", "prefix_tokens"),
    local=("device_pages_free", "host_pages_free", "writes_in_flight"),
    given=("content", "tokens"),
)
# What of a prompt was cached where, told when its first part has been computed; and each part that is.
ADMIT = Kind(
    "admit",
    "decision",
    agree=REPLICA,
    compared=("rid", "verdict", "device_tokens", "host_tokens", "storage_tokens", "extend_tokens"),
    result="extend_tokens",
)
FORWARD = Kind(
    "forward", "event", agree=REPLICA, compared=("mode", "tokens"), info=("rids", "computed_tokens")
)
CHECKPOINT_INSERT = Kind("checkpoint_insert", "decision", agree=REPLICA, compared=("rid", "up_to"))
ADVANCE = Kind("advance_unpublished", "decision", agree=REPLICA, compared=("rid",))
FINISH = Kind("finish", "event", agree=REPLICA, compared=("rid", "reason", "output_tokens"), info=("pages",))
# A running request gives its room back and will be computed again.
RETRACT = Kind("retract", "decision", agree=REPLICA, compared=("rid", "output_tokens"))
ABORT = Kind("abort", "event", agree=REPLICA, compared=("rid", "place"))

# Slots of the host pool, and of the device pool. What is given back between two rounds is a sum in the
# second; by itself it is recorded where there are no rounds, and of side pools.
ALLOC_HOST = Kind(
    "alloc_host",
    "decision",
    agree=REPLICA,
    compared=("pool", "pages_wanted", "pages", "owner"),
    local=("host_pages_free", "writes_in_flight"),
    result="pages",
    needs={"host_pages_free": "pages_wanted"},
)
FREE_HOST = Kind("free_host", "event", agree=REPLICA, compared=("pool", "pages"), local=("host_pages_free",))
ALLOC = Kind(
    "alloc",
    "decision",
    agree=REPLICA,
    compared=("purpose", "pages_wanted", "pages"),
    local=("device_pages_free",),
    result="pages",
    needs={"device_pages_free": "pages_wanted"},
)
# Pages that the ranks of a context own by turns: at whose turn each chain begins.
OWN_PAGES = Kind(
    "own_pages",
    "decision",
    agree=REPLICA,
    compared=("owners", "tokens", "tokens_wanted"),
    local=("owner_pages_free",),
    result="tokens",
)
FREE = Kind("free", "event", agree=REPLICA, compared=("purpose", "tokens"), local=("device_pages_free",))

WRITE_BACKUP = Kind(
    "write_backup",
    "decision",
    agree=REPLICA,
    compared=("node", "pages", "tokens"),
    local=("host_pages_free", "device_pages_free", "write_queue_len"),
    result="tokens",
    needs={"host_pages_free": "pages"},
)
LOAD_BACK = Kind(
    "load_back",
    "decision",
    agree=REPLICA,
    compared=("rid", "node", "pages", "tokens"),
    local=("device_pages_free", "host_pages_free", "loads_in_flight"),
    result="tokens",
)
LOAD_NODE = Kind("load_node", "decision", agree=REPLICA, compared=("node", "is_loaded"))
EVICT = Kind(
    "evict",
    "decision",
    agree=REPLICA,
    compared=("pages_wanted", "pages_freed"),
    local=("device_pages_free", "host_pages_free"),
)
EVICT_FOR_ALLOC = Kind(
    "evict_for_alloc", "decision", agree=REPLICA, compared=("pages_wanted", "is_quota", "pages_freed")
)
# One victim; the last step of a walk has none.
EVICT_NODE = Kind(
    "evict_node",
    "decision",
    agree=REPLICA,
    compared=("component", "node", "has_progressed"),
    local=("device_pages_free",),
)
EVICT_LEAF = Kind("evict_leaf", "decision", agree=REPLICA, compared=("node", "action"))
EVICT_HOST = Kind(
    "evict_host",
    "decision",
    agree=REPLICA,
    compared=("component", "pages_wanted", "pages_freed"),
    local=("host_pages_free",),
)
EVICT_TO_FREE = Kind("evict_to_free_tokens", "decision", agree=REPLICA, compared=("tokens", "verdict"))

# Phase `call` before the group meets, `return` with what it agreed on. Later stages adopt stage 0's counts.
EVENT_ROUND = Kind(
    "event_round",
    "decision",
    agree=REPLICA,
    compared=(
        "round",
        "writes_in_flight",
        "loads_in_flight",
        "prefetches_in_flight",
        "storage_backups_in_flight",
        "evictable_pages",
        "protected_pages",
        "occupied_tokens",
        "waiting",
        "freed_tokens",
        "freed_host_pages",
        "digest",
        "loads_agreed",
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
        "hits_ready": "hits_agreed",
        "prefetch_acks_ready": "prefetch_acks_agreed",
        "storage_acks_ready": "storage_acks_agreed",
        "releases_ready": "releases_agreed",
        "side_releases_ready": "side_releases_agreed",
    },
    counters=("round",),
)
ACKS = Kind("acks", "decision", agree=REPLICA, compared=("queue", "count"), local=("left",))

TRANSFER_ENQUEUE = Kind(
    "transfer_enqueue",
    "transfer",
    agree=REPLICA,
    compared=("queue", "slot", "nodes", "pages"),
)
TRANSFER_ACK = Kind("transfer_ack", "transfer", agree=REPLICA, compared=("queue", "node"))

MEETING = Kind(
    "meeting",
    "meeting",
    agree=STAGE,
    compared=("axis", "purpose", "op", "reduce", "numel"),
    info=("group", "group_seq", "peer", "value"),
    counters=("group_seq",),
)
ADOPTED = Kind("adopted", "note", info=("purpose", "value"))

PREFETCH_SUBMIT = Kind(
    "prefetch_submit",
    "decision",
    agree=REPLICA,
    compared=("rid", "attempt", "op", "node", "outcome", "occupied_tokens", "tokens"),
    local=("host_pages_free", "hits_ready", "prefetch_acks_ready"),
)
PREFETCH_HIT = Kind(
    "prefetch_hit",
    "decision",
    agree=REPLICA,
    compared=("rid", "attempt", "op", "outcome", "hit_tokens", "tokens"),
    local=("host_pages_free", "hits_ready", "prefetch_acks_ready"),
    result="tokens",
)
PREFETCH_POLL = Kind(
    "prefetch_poll",
    "decision",
    agree=REPLICA,
    compared=("rid", "attempt", "policy", "verdict"),
    local=("hits_ready", "prefetch_acks_ready"),
    leader="pp",
    led=("verdict",),
)
# Before it, where time is what ends a prefetch: whether it has come to that.
PREFETCH_VOTE = Kind(
    "prefetch_vote",
    "decision",
    agree=REPLICA,
    compared=("rid", "attempt", "verdict"),
    local=("is_late",),
    leader="pp",
    led=("verdict",),
)
PREFETCH_INSERT = Kind(
    "prefetch_insert",
    "decision",
    agree=REPLICA,
    compared=("rid", "attempt", "op", "outcome", "completed_tokens", "matched_tokens", "loaded_tokens"),
    local=("host_pages_free",),
    result="loaded_tokens",
)
PREFETCH_OUTCOME = Kind("prefetch_outcome", "event", agree=REPLICA, compared=("rid", "attempt", "outcome"))
PREFETCH_RETRY = Kind("prefetch_retry", "decision", agree=REPLICA, compared=("rid", "cause", "tries"))
STORAGE_BACKUP = Kind(
    "storage_backup",
    "decision",
    agree=REPLICA,
    compared=("node", "storage_backups_in_flight"),
    local=("host_pages_free", "storage_acks_ready"),
)

# Of the threads that work for the scheduler, each with a lane of its own.
QUERY = Kind(
    "query",
    "decision",
    agree=REPLICA,
    compared=("rid", "attempt", "op", "agreed_pages"),
    local=("local_pages",),
    result="agreed_pages",
)
PROGRESS = Kind(
    "progress",
    "event",
    agree=REPLICA,
    compared=("rid", "attempt", "ack", "agreed_tokens"),
    local=("local_tokens",),
    result="agreed_tokens",
)
READ = Kind(
    "read", "event", agree=REPLICA, compared=("rid", "attempt", "op", "pages"), local=("local_pages",)
)
STORAGE_WRITE = Kind(
    "storage_write", "event", agree=REPLICA, compared=("op", "pages"), local=("written_pages",)
)
# Calls of a store differ legally: their number under `best_effort`, and what they find.
STORE_CALL = Kind("store_call", "note", info=("call", "keys", "found"))
LANE_STATE = Kind(LANE_STATE_NAME, "note", info=("state", "op"))
# What is to run next; where nothing is, there is none.
PLAN = Kind(
    "plan",
    "decision",
    agree=REPLICA,
    compared=("mode", "rids", "tokens", "extend"),
    local=("waiting_count", "device_pages_free"),
)
BATCH = Kind(
    "batch", "decision", agree=REPLICA, compared=("mode", "rids", "tokens"), local=("waiting_count",)
)
COMMAND = Kind("command", "decision", agree=REPLICA, compared=("verb", "verdict"), local=("outcome",))
# Of a draft's tokens how many were taken, request by request, and a digest of what was put out; how many it
# is to propose from here on.
ACCEPT = Kind("accept", "decision", agree=STAGE, compared=("rids", "drafts_accepted", "tokens", "content"))
SPEC_STEPS = Kind("spec_steps", "decision", agree=STAGE, compared=("steps",))

# Where prefill and decode are servers of their own. What one rank polls may differ; what is agreed on not.
PD_POLL = Kind(
    "pd_poll",
    "decision",
    agree=STAGE,
    compared=("polls",),
    local=("own_polls",),
    feeds={"own_polls": "polls"},
)
PD_QUEUE = Kind("pd_queue", "decision", agree=STAGE, compared=("queue", "length", "rids", "failed"))
PD_RING = Kind("pd_ring", "decision", agree=STAGE, compared=("ring", "rids", "failed"))
PD_PREFIX = Kind("pd_prefix", "decision", agree=STAGE, compared=("side", "rid", "decode_prefix_len", "pages"))
PD_RESTORE = Kind(
    "pd_restore",
    "decision",
    agree=STAGE,
    compared=("rid", "decode_prefix_len", "verdict"),
    local=("device_pages_free",),
)
PD_TRANSFER = Kind("pd_transfer", "event", agree=STAGE, compared=("rid", "outcome"))
# What SGLang's own checker is told, or what it compares of a function that the plugin does not know.
ASSERT_SAME = Kind("assert_same", "decision", agree=REPLICA, compared=("format", "message"))
