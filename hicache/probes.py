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
    compared=("order", "rid", "input_tokens", "output_tokens"),
    info=("conversation", "arrival_ms"),
)

MATCH = Kind(
    "match",
    "decision",
    agree=REPLICA,
    compared=("rid", "node", "host_tokens", "device_tokens"),
    local=("device_pages_free", "host_pages_free", "writes_in_flight"),
    # First page of the prompt that no tier could give, or "" when every usable page was found.
    info=("miss_digest", "usable_tokens"),
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
    compared=("pages_wanted", "pages_freed", "nodes"),
    local=("device_pages_free", "device_pages_evictable", "host_pages_free"),
    info=("demoted_digests", "dropped_digests"),
)

EVICT_HOST = Kind(
    "evict_host",
    "decision",
    agree=REPLICA,
    compared=("pages_wanted", "pages_freed", "nodes"),
    local=("host_pages_free", "device_pages_free", "writes_in_flight"),
    info=("dropped_digests",),
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

INSERT = Kind(
    "insert",
    "decision",
    agree=REPLICA,
    compared=("rid", "node", "duplicate_pages", "tokens", "new_tokens"),
    local=("device_pages_free", "host_pages_free", "writes_in_flight"),
    info=("new_digests",),
)

WRITE_BACKUP = Kind(
    "write_backup",
    "decision",
    agree=REPLICA,
    compared=("node", "pages", "tokens"),
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
# adopt stage 0's counts and never poll their own.
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
        "loads_agreed",
        "backups_agreed",
        "writes_agreed",
    ),
    local=("writes_done", "loads_done", "backups_reserved", "host_pages_free", "device_pages_free"),
    leader="pp",
    led=("writes_agreed", "loads_agreed", "backups_agreed"),
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
TRANSFER_ACK = Kind(
    "transfer_ack",
    "transfer",
    agree=REPLICA,
    compared=("op", "queue", "nodes", "pages"),
)

# Phases `enter` and `leave`. `purpose` is what the caller meant; a collective library pairs calls
# by order alone and never sees it. `reduce` is empty where nothing is reduced.
MEETING = Kind(
    "meeting",
    "meeting",
    agree=STAGE,
    compared=("axis", "purpose", "op", "reduce", "numel"),
    info=("group", "group_seq", "peer"),
)

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

KINDS = (
    REQUEST,
    MATCH,
    LOAD_BACK,
    ADMIT,
    EVICT,
    EVICT_HOST,
    BATCH,
    FORWARD,
    INSERT,
    WRITE_BACKUP,
    BACKUP_CANCEL,
    EVENT_ROUND,
    FINISH,
    TRANSFER_ENQUEUE,
    TRANSFER_DONE,
    TRANSFER_ACK,
    MEETING,
    POOL_AUDIT,
    WRONG_PAGE,
)

Emit = Callable[..., None]


class Emitters(Protocol):
    """What the runtime needs from a tracer; `tracer.Tracer` is one."""

    step: int

    def emitter(self, kind: Kind, *, phase: str = "", fields: Sequence[str] | None = None) -> Emit: ...


class Probes:
    """One lane's writers, one a kind. Each takes its kind's fields by position, in `Kind.fields` order."""

    __slots__ = (
        "admit",
        "backup_cancel",
        "batch",
        "event_round_call",
        "event_round_return",
        "evict",
        "evict_host",
        "finish",
        "forward",
        "insert",
        "load_back",
        "match",
        "meeting_enter",
        "meeting_leave",
        "pool_audit",
        "request",
        "tracer",
        "transfer_ack",
        "transfer_done",
        "transfer_enqueue",
        "write_backup",
        "wrong_page",
    )

    def __init__(self, tracer: Emitters) -> None:
        self.tracer = tracer
        self.request = tracer.emitter(REQUEST)
        self.match = tracer.emitter(MATCH)
        self.load_back = tracer.emitter(LOAD_BACK)
        self.admit = tracer.emitter(ADMIT)
        self.evict = tracer.emitter(EVICT)
        self.evict_host = tracer.emitter(EVICT_HOST)
        self.batch = tracer.emitter(BATCH)
        self.forward = tracer.emitter(FORWARD)
        self.insert = tracer.emitter(INSERT)
        self.write_backup = tracer.emitter(WRITE_BACKUP)
        self.backup_cancel = tracer.emitter(BACKUP_CANCEL)
        self.event_round_call = tracer.emitter(EVENT_ROUND, phase="call", fields=EVENT_ROUND_CALL)
        self.event_round_return = tracer.emitter(EVENT_ROUND, phase="return", fields=EVENT_ROUND_RETURN)
        self.finish = tracer.emitter(FINISH)
        self.transfer_enqueue = tracer.emitter(TRANSFER_ENQUEUE)
        self.transfer_done = tracer.emitter(TRANSFER_DONE)
        self.transfer_ack = tracer.emitter(TRANSFER_ACK)
        self.meeting_enter = tracer.emitter(MEETING, phase="enter")
        self.meeting_leave = tracer.emitter(MEETING, phase="leave")
        self.pool_audit = tracer.emitter(POOL_AUDIT)
        self.wrong_page = tracer.emitter(WRONG_PAGE)


def silent(*_fields: Any) -> None:
    """The writer of a probe that is switched off."""
