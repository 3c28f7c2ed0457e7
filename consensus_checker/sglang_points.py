"""The functions of SGLang that are looked at, and what is read of each. Facts of 0.5.12 to 0.5.23.

Expressions see the function's own parameters, `result`, and `_see`: the session of `sglang_session`, which
keeps what two functions have to do with each other. Records are written at a function's return, so that the
innermost decision comes first.

The stock checker compares a part of `match_prefix`, `insert`, `evict`, and of some more; what it compares of
them is here too, by digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from consensus_checker import sglang_kinds as kinds
from consensus_checker.sglang_hooks import Point
from tracer.record import MAIN_LANE

CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache."
HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController."
CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController."
HOST_POOLS = "sglang.srt.mem_cache.pool_host.group.HostPoolGroup."
PAGED = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator."
FILE_STORE = "sglang.srt.mem_cache.hicache_storage.HiCacheFile."
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."

PREFETCH, IO, SYNC, BACKUP = "prefetch", "io", "sync", "backup"
LANES = (PREFETCH, IO, SYNC, BACKUP)


@dataclass(frozen=True, slots=True)
class Thread:
    """A function that a thread runs as long as it lives, and the lane of that thread."""

    path: str
    lane: str


THREADS: Sequence[Thread] = (
    Thread(SCHEDULER + "run_event_loop", MAIN_LANE),
    Thread(CONTROLLER + "prefetch_thread_func", PREFETCH),
    Thread(CONTROLLER + "prefetch_io_aux_func", IO),
    Thread(CONTROLLER + "prefetch_sync_thread_func", SYNC),
    Thread(HYBRID + "prefetch_sync_thread_func", SYNC),
    Thread(CONTROLLER + "backup_thread_func", BACKUP),
    Thread(HYBRID + "backup_thread_func", BACKUP),
)

HOST_FREE = "_see.host_free(self)"
DEVICE_FREE = "_see.device_free(self)"

ROUND: Sequence[Point] = (
    Point(
        SCHEDULER + "_process_hicache_events",
        None,
        before={"_h_none": "_see.loops(self)"},
    ),
    Point(
        CACHE + "check_hicache_events",
        kinds.EVENT_ROUND,
        before={"_h_round": "_see.begin_round(self)"},
        call={
            "round": "_h_round",
            "writes_in_flight": "len(self.ongoing_write_through)",
            "loads_in_flight": "len(self.ongoing_load_back)",
            "prefetches_in_flight": "len(self.ongoing_prefetch)",
            "storage_backups_in_flight": "len(self.ongoing_backup)",
            "evictable_pages": "self.full_evictable_size() // self.page_size",
            "protected_pages": "self.full_protected_size() // self.page_size",
            "occupied_tokens": "getattr(self.cache_controller, 'prefetch_tokens_occupied', 0)",
            "waiting": "_see.waiting",
            "host_pages_free": HOST_FREE,
            "device_pages_free": DEVICE_FREE,
        },
        after=("_see.end_round()",),
    ),
    Point(CACHE + "_all_reduce", None, before={"_h_none": "_see.note_vector(self, data)"}),
    Point(
        CACHE + "_sync_hicache_ready_counts",
        kinds.EVENT_ROUND,
        {
            "round": "_see.round",
            "writes_agreed": "result[0]",
            "loads_agreed": "result[1]",
            "hits_agreed": "_see.at(result[2], 0)",
            "prefetch_acks_agreed": "_see.at(result[2], 1)",
            "storage_acks_agreed": "_see.at(result[2], 2)",
            "releases_agreed": "_see.at(result[2], 3)",
            "side_releases_agreed": "list(result[2][4:])",
            "writes_done": "_see.local(0)",
            "loads_done": "_see.local(1)",
            "hits_ready": "_see.local(2, result[2])",
            "prefetch_acks_ready": "_see.local(3, result[2])",
            "storage_acks_ready": "_see.local(4, result[2])",
            "releases_ready": "_see.local(5, result[2])",
        },
        phases=("", "return"),
        after=("_see.agreed(result)",),
    ),
    Point(
        CACHE + "_all_reduce_attn_groups",
        kinds.MEETING,
        before={"_h_meet": "_see.meet_attention(op, tensor)"},
        call={
            "axis": "_h_meet[0]",
            "purpose": "_h_meet[1]",
            "op": "'all_reduce'",
            "reduce": "_h_meet[2]",
            "numel": "_h_meet[3]",
            "group": "_h_meet[4]",
            "group_seq": "_h_meet[5]",
        },
        values={
            "axis": "_h_meet[0]",
            "purpose": "_h_meet[1]",
            "op": "'all_reduce'",
            "reduce": "_h_meet[2]",
            "numel": "_h_meet[3]",
            "group": "_h_meet[4]",
            "group_seq": "_h_meet[5]",
        },
        when="_h_meet is not None",
        phases=("enter", "leave"),
    ),
    Point(
        CACHE + "_pp_sync",
        None,
        before={"_h_none": "_see.enter_pipeline(self, data)"},
        after=("_see.leave_pipeline(self, data)",),
    ),
    Point(
        CACHE + "_finish_write_through_ack",
        kinds.TRANSFER_ACK,
        {"queue": "'write'", "node": "_see.node(ack_id)"},
    ),
    Point(
        CACHE + "writing_check",
        kinds.ACKS,
        {"queue": "'write'", "count": "finish_count", "left": "len(self.cache_controller.ack_write_queue)"},
        when="finish_count or write_back",
    ),
    Point(
        CACHE + "loading_check",
        kinds.ACKS,
        {"queue": "'load'", "count": "finish_count", "left": "len(self.cache_controller.ack_load_queue)"},
        when="finish_count",
    ),
    Point(
        CONTROLLER + "start_writing",
        kinds.TRANSFER_ENQUEUE,
        {"queue": "'write'", "slot": "None", "nodes": "_h_nodes", "pages": "_h_pages"},
        before={
            "_h_nodes": "_see.nodes(self.write_queue)",
            "_h_pages": "_see.device_pages(self, self.write_queue)",
        },
        when="_h_nodes",
    ),
    Point(
        CONTROLLER + "start_loading",
        kinds.TRANSFER_ENQUEUE,
        {"queue": "'load'", "slot": "result", "nodes": "_h_nodes", "pages": "_h_pages"},
        before={
            "_h_nodes": "_see.nodes(self.load_queue)",
            "_h_pages": "_see.device_pages(self, self.load_queue)",
        },
        when="_h_nodes",
    ),
)

TREE: Sequence[Point] = (
    Point(
        CACHE + "match_prefix",
        kinds.MATCH,
        {
            "rid": "_see.request(params.req)",
            "content": "_see.key(params.key, _h_tokens)",
            "tokens": "_h_tokens",
            "node": "_see.node(result.last_device_node)",
            "best_node": "_see.node(result.best_match_node)",
            "kv_tokens": "getattr(result, 'full_kv_hit_length', None)",
            "host_tokens": "result.host_hit_length",
            "device_tokens": "_see.device_tokens(result)",
        },
        # Some trees turn a key into another view of itself.
        before={"_h_tokens": "len(params.key)"},
    ),
    Point(
        CACHE + "insert",
        kinds.INSERT,
        {
            "content": "_see.whole_key(params.key)",
            "tokens": "len(params.key)",
            "node": "_see.node(result.last_device_node)",
            "owned_tokens": "params.prev_prefix_len",
            "prefix_tokens": "result.prefix_len",
            "device_pages_free": DEVICE_FREE,
            "host_pages_free": HOST_FREE,
            "writes_in_flight": "len(self.ongoing_write_through)",
        },
    ),
    Point(
        CACHE + "checkpoint",
        kinds.CHECKPOINT_INSERT,
        {"rid": "_see.rid(req)", "up_to": "up_to"},
        before={"_h_none": "_see.computed(req, up_to)"},
    ),
    Point(CACHE + "advance_unpublished_req", kinds.ADVANCE, {"rid": "_see.rid(req)"}),
    Point(
        CACHE + "on_release",
        kinds.FINISH,
        {
            "rid": "_see.rid(req)",
            "reason": "_see.reason(req)",
            "output_tokens": "len(req.output_ids)",
        },
        when="req.finished_reason is not None",
        after=("_see.released(req)",),
    ),
    Point(CACHE + "release_aborted_request", kinds.ABORT, {"rid": "_see.rid(request)", "place": "''"}),
    Point(
        CACHE + "_execute_kv_backup",
        kinds.WRITE_BACKUP,
        {
            "node": "_see.node(node_id)",
            "pages": "-(-len(device_value) // self.page_size)",
            "tokens": "0 if result is None else len(device_value)",
            "host_pages_free": "_h_host",
            "device_pages_free": DEVICE_FREE,
            "write_queue_len": "len(self.cache_controller.write_queue)",
        },
        before={"_h_host": HOST_FREE},
    ),
    Point(
        HOST_POOLS + "alloc",
        kinds.ALLOC_HOST,
        {
            "pool": "_see.name(pool)",
            "pages_wanted": "-(-need_size // self.page_size)",
            "pages": "0 if result is None else len(result) // self.page_size",
            "host_pages_free": "_h_free",
        },
        before={"_h_free": "_see.pool_free(self, pool)"},
    ),
    Point(
        HOST_POOLS + "free",
        kinds.FREE_HOST,
        {"pool": "_see.name(pool)", "pages": "len(indices) // self.page_size", "host_pages_free": "_h_free"},
        before={"_h_free": "_see.pool_free(self, pool)"},
    ),
    Point(
        CACHE + "init_load_back",
        kinds.LOAD_BACK,
        {
            "rid": "_see.rid(params.req)",
            "node": "_see.node(params.best_match_node)",
            "pages": "params.host_hit_length // self.page_size",
            "tokens": "None if result is None else result[0]",
            "device_pages_free": DEVICE_FREE,
            "host_pages_free": HOST_FREE,
            "loads_in_flight": "len(self.ongoing_load_back)",
        },
    ),
    Point(CACHE + "load_back", kinds.LOAD_NODE, {"node": "_see.node(node_id)", "is_loaded": "result"}),
    Point(
        CACHE + "_evict",
        kinds.EVICT,
        {
            "pages_wanted": "-(-params.num_tokens // self.page_size)",
            "pages_freed": "result.num_tokens_evicted // self.page_size",
            "device_pages_free": DEVICE_FREE,
            "host_pages_free": HOST_FREE,
        },
    ),
    Point(
        CACHE + "evict_for_alloc",
        kinds.EVICT_FOR_ALLOC,
        {
            "pages_wanted": "-(-params.num_tokens // self.page_size)",
            "is_quota": "allocation_reclaim_satisfied is not None",
            "pages_freed": "result.num_tokens_evicted // self.page_size",
        },
    ),
    Point(
        CACHE + "_evict_device_next_node",
        kinds.EVICT_NODE,
        {
            "component": "_see.name(component_type)",
            "node": "_see.node(result[0])",
            "has_progressed": "result[1]",
            "device_pages_free": DEVICE_FREE,
        },
    ),
    Point(
        CACHE + "_evict_device_leaf",
        kinds.EVICT_LEAF,
        {"node": "_see.node(node_id)", "action": "'free' if result is None else 'write_back'"},
    ),
    Point(CACHE + "_demote", kinds.EVICT_LEAF, {"node": "_see.node(node_id)", "action": "'demote'"}),
    Point(
        CACHE + "_drop_subtree_no_host",
        kinds.EVICT_LEAF,
        {"node": "_see.node(node_id)", "action": "'drop' if result else 'keep'"},
    ),
    Point(
        CACHE + "evict_host",
        kinds.EVICT_HOST,
        {
            "component": "_see.name(component_type)",
            "pages_wanted": "-(-num_tokens // self.page_size)",
            "pages_freed": "result // self.page_size",
            "host_pages_free": "_h_host",
        },
        before={"_h_host": HOST_FREE},
    ),
)

DEVICE: Sequence[Point] = (
    Point(
        PAGED + "alloc",
        kinds.ALLOC,
        {
            "purpose": "'pages'",
            "pages_wanted": "need_size // self.page_size",
            "pages": "0 if result is None else len(result) // self.page_size",
            "device_pages_free": "_h_free",
        },
        before={"_h_free": "self.available_size() // self.page_size"},
    ),
    # How many pages of these two are new, the requests' lengths say: the tokens are compared.
    Point(
        PAGED + "alloc_extend",
        kinds.ALLOC,
        {
            "purpose": "'extend'",
            "pages": "0 if result is None else len(result)",
            "device_pages_free": "_h_free",
        },
        before={"_h_free": "self.available_size() // self.page_size"},
    ),
    Point(
        PAGED + "alloc_decode",
        kinds.ALLOC,
        {
            "purpose": "'decode'",
            "pages": "0 if result is None else len(result)",
            "device_pages_free": "_h_free",
        },
        before={"_h_free": "self.available_size() // self.page_size"},
    ),
    Point(
        PAGED + "free_segment",
        kinds.FREE,
        {
            "purpose": "'segment'",
            "tokens": "len(free_index)",
            "device_pages_free": "self.available_size() // self.page_size",
        },
    ),
)

STORAGE: Sequence[Point] = (
    Point(
        CACHE + "prefetch_from_storage",
        kinds.PREFETCH_SUBMIT,
        {
            "rid": "_see.rid(request)",
            "attempt": "_see.attempt(request)",
            "node": "_see.node(last_host_node_id)",
            "op": "_see.op(self, request)",
            "outcome": "_see.outcome(self, _h_stats)",
            "occupied_tokens": "self.cache_controller.prefetch_tokens_occupied",
            "tokens": "len(new_input_tokens)",
            "host_pages_free": HOST_FREE,
            "hits_ready": "_see.ready(self.cache_controller, 'prefetch_hit_queue')",
            "prefetch_acks_ready": "_see.ready(self.cache_controller, 'ack_prefetch_queue')",
        },
        before={"_h_stats": "_see.outcomes(self)"},
        when="self.enable_storage",
    ),
    Point(
        HYBRID + "allocate_storage_hit",
        kinds.PREFETCH_HIT,
        {
            "rid": "_see.rid(operation)",
            "attempt": "_see.attempt(operation)",
            "op": "operation.id",
            "outcome": "_see.room(hit_tokens, result[0])",
            "hit_tokens": "hit_tokens",
            "tokens": "0 if result[0] is None else len(result[0])",
            "host_pages_free": "_h_free",
            "hits_ready": "_see.ready(self, 'prefetch_hit_queue')",
            "prefetch_acks_ready": "_see.ready(self, 'ack_prefetch_queue')",
        },
        before={"_h_free": "_see.pool_free(self.mem_pool_host, None)"},
    ),
    Point(
        CACHE + "_handle_prefetch_result",
        kinds.PREFETCH_INSERT,
        {
            "rid": "_see.rid(operation)",
            "attempt": "_see.attempt(operation)",
            "op": "operation.id",
            "outcome": "'loaded' if operation.completed_tokens else 'nothing_completed'",
            "completed_tokens": "operation.completed_tokens",
            "matched_tokens": "operation.completed_tokens - _see.loaded(self, operation)",
            "loaded_tokens": "_see.loaded(self, operation)",
            "host_pages_free": HOST_FREE,
        },
    ),
    Point(
        CACHE + "revoke_pending_prefetch",
        kinds.PREFETCH_OUTCOME,
        {"rid": "_see.rid(request)", "attempt": "_see.attempt(request)", "outcome": "'revoked'"},
    ),
    Point(
        CACHE + "check_prefetch_progress",
        kinds.PREFETCH_POLL,
        {
            "rid": "_see.rid(request)",
            "attempt": "_see.attempt(request)",
            "policy": "_see.name(self.prefetch_stop_policy)",
            "verdict": "'end' if result else 'wait'",
            "hits_ready": "_see.ready(self.cache_controller, 'prefetch_hit_queue')",
            "prefetch_acks_ready": "_see.ready(self.cache_controller, 'ack_prefetch_queue')",
        },
        before={"_h_is_open": "request in self.ongoing_prefetch"},
        when="_h_is_open",
    ),
    Point(
        CACHE + "_can_terminate_prefetch",
        kinds.PREFETCH_VOTE,
        {
            "rid": "_see.rid(operation)",
            "attempt": "_see.attempt(operation)",
            "verdict": "'end' if result else 'wait'",
            "is_late": "_see.vote(self)",
        },
        before={"_h_none": "_see.forget_vector()"},
    ),
    Point(
        CACHE + "write_backup_storage",
        kinds.STORAGE_BACKUP,
        {
            "node": "_see.node(node_id)",
            "storage_backups_in_flight": "len(self.ongoing_backup)",
            "host_pages_free": HOST_FREE,
            "storage_acks_ready": "_see.ready(self.cache_controller, 'ack_backup_queue')",
        },
        when="self.enable_storage",
    ),
)

BACKGROUND: Sequence[Point] = (
    Point(
        HYBRID + "_storage_hit_query",
        None,
        lanes=(PREFETCH,),
        before={"_h_none": "_see.state('prefetch', 'backend', operation.id)"},
        after=("_see.state('prefetch', 'idle', None)",),
        raised="_see.state('prefetch', 'idle', None)",
    ),
    # A query is not asked where the prefetch has been ended; what the ranks agree on is, always.
    Point(
        HYBRID + "_sync_prefetch_hit_query",
        kinds.QUERY,
        {
            "rid": "_see.rid(operation)",
            "attempt": "_see.attempt(operation)",
            "op": "operation.id",
            "agreed_pages": "result // self.page_size",
            "local_pages": "storage_hit_count // self.page_size",
        },
        lanes=(PREFETCH,),
        before={"_h_none": "_see.at_work('prefetch')"},
        after=("_see.rests('prefetch')",),
    ),
    Point(
        CONTROLLER + "_all_reduce",
        kinds.MEETING,
        lanes=(PREFETCH, SYNC),
        before={"_h_meet": "_see.meet_storage(op, tensor, groups)"},
        call={
            "axis": "_h_meet[0]",
            "purpose": "_h_meet[1]",
            "op": "'all_reduce'",
            "reduce": "_h_meet[2]",
            "numel": "_h_meet[3]",
            "group": "_h_meet[4]",
            "group_seq": "_h_meet[5]",
        },
        values={
            "axis": "_h_meet[0]",
            "purpose": "_h_meet[1]",
            "op": "'all_reduce'",
            "reduce": "_h_meet[2]",
            "numel": "_h_meet[3]",
            "group": "_h_meet[4]",
            "group_seq": "_h_meet[5]",
        },
        when="_h_meet is not None",
        phases=("enter", "leave"),
    ),
    Point(
        HYBRID + "_page_transfer",
        kinds.READ,
        {
            "rid": "_see.rid(operation)",
            "attempt": "_see.attempt(operation)",
            "op": "operation.id",
            "pages": "_h_pages",
            "local_pages": "_see.pages_read(result)",
        },
        lanes=(IO,),
        # The scheduler may shorten the list once the read is over.
        before={
            "_h_pages": "len(operation.hash_value)",
            "_h_none": "_see.state('io', 'backend', operation.id)",
        },
        after=("_see.state('io', 'idle', None)",),
        raised="_see.state('io', 'idle', None)",
    ),
    Point(
        HYBRID + "_reduce_prefetch_ack",
        kinds.PROGRESS,
        {
            "rid": "_see.rid(ack.operation)",
            "attempt": "_see.attempt(ack.operation)",
            "ack": "'completed' if ack.completed_req else 'progress'",
            "agreed_tokens": "ack.completed_tokens",
            "local_tokens": "_h_local",
        },
        lanes=(SYNC,),
        before={"_h_local": "ack.completed_tokens", "_h_none": "_see.at_work('sync')"},
        after=("_see.rests('sync')",),
    ),
    Point(
        HYBRID + "_page_backup",
        kinds.STORAGE_WRITE,
        {
            "op": "operation.id",
            "pages": "len(operation.hash_value)",
            "written_pages": "operation.completed_tokens // self.page_size",
        },
        lanes=(BACKUP,),
        before={"_h_none": "_see.state('backup', 'backend', operation.id)"},
        after=("_see.state('backup', 'idle', None)",),
        raised="_see.state('backup', 'idle', None)",
    ),
    *(
        Point(
            FILE_STORE + name,
            kinds.STORE_CALL,
            {"call": f"'{name}'", "keys": "len(keys)", "found": found},
            lanes=(PREFETCH, IO, BACKUP),
        )
        for name, found in (
            ("batch_get", "sum(value is not None for value in result)"),
            ("batch_exists", "result"),
            ("batch_set", "bool(result)"),
        )
    ),
)

# Of the scheduler itself: what it received, what it runs, and an operator's commands.
SERVER: Sequence[Point] = (
    Point(SCHEDULER + "_add_request_to_queue", None, before={"_h_none": "_see.request(req)"}),
    Point(
        SCHEDULER + "abort_request",
        kinds.ABORT,
        {"rid": "_see.rid(recv_req)", "place": "'asked'"},
    ),
    Point(
        SCHEDULER + "run_batch",
        kinds.BATCH,
        {
            "mode": "_h_mode",
            "rids": "_h_rids",
            "tokens": "_h_tokens",
            "waiting_count": "len(self.waiting_queue)",
        },
        # A batch may be changed by the time it has run.
        before={
            "_h_mode": "_see.name(batch.forward_mode)",
            "_h_rids": "_see.members(batch.reqs)",
            "_h_tokens": "batch.extend_num_tokens",
        },
    ),
    Point(
        SCHEDULER + "_retry_storage_prefetch",
        kinds.PREFETCH_RETRY,
        {"rid": "_see.rid(req)", "cause": "'due'", "tries": "req.storage_prefetch_retry_attempts"},
    ),
    Point(
        SCHEDULER + "_prefetch_after_device_hit_loss",
        kinds.PREFETCH_RETRY,
        {"rid": "_see.rid(req)", "cause": "'device_loss'", "tries": "req.storage_prefetch_retry_attempts"},
        when="result",
    ),
    Point(SCHEDULER + "flush_cache", kinds.COMMAND, {"verb": "'flush'", "verdict": "_see.verdict(result)"}),
    *(
        Point(
            SCHEDULER + f"{verb}_hicache_storage_wrapped",
            kinds.COMMAND,
            {"verb": f"'{verb}'", "verdict": "_see.verdict(result.success)"},
        )
        for verb in ("attach", "detach")
    ),
    *(
        Point(
            f"sglang.srt.mem_cache.allocator.unified_hybrid_swa.{owner}.evict_to_free_tokens",
            kinds.EVICT_TO_FREE,
            {"tokens": "num_tokens", "verdict": "result"},
        )
        for owner in ("UnifiedSWATokenToKVPoolAllocator", "UnifiedMambaSWATokenToKVPoolAllocator")
    ),
)

POINTS: Sequence[Point] = (*ROUND, *TREE, *DEVICE, *STORAGE, *BACKGROUND, *SERVER)
