"""The functions of SGLang that are looked at, and what is read of each. Facts of 0.5.12 to 0.5.23.

Expressions see the function's own parameters, `result`, and `_see`: the session of `sglang_session`, which
keeps what two functions have to do with each other. Records are written at a function's return, so that the
innermost decision comes first.

The stock checker compares a part of `match_prefix`, `insert`, `evict`, and of some more; what it compares of
them is here too, by digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from consensus_checker import sglang_kinds as kinds
from consensus_checker.sglang_hooks import Point
from consensus_checker.sglang_paths import (
    BACKUP,
    CACHE,
    CONTROLLER,
    DEVICE_FREE,
    HOST_FREE,
    HOST_POOLS,
    HYBRID,
    IO,
    MET,
    PAGED,
    PREFETCH,
    ROOMS,
    SCHEDULER,
    SYNC,
    UNIFIED,
)
from consensus_checker.sglang_points_disagg import DISAGG
from consensus_checker.sglang_points_former import FORMER_TREE
from consensus_checker.sglang_points_pools import SIDE_POOLS
from consensus_checker.sglang_points_server import DECODED, SERVER
from consensus_checker.sglang_points_storage import BACKGROUND, STORAGE
from tracer.record import MAIN_LANE


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

ROUND: Sequence[Point] = (
    Point(
        SCHEDULER + "_process_hicache_events",
        None,
        before={"_h_none": "_see.loops(self)"},
    ),
    Point(
        CACHE + "check_hicache_events",
        kinds.EVENT_ROUND,
        before={"_h_round": "_see.begin_round(self)", "_h_none": "_see.look_at_room(self)"},
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
            "freed_tokens": "_see.freed_tokens",
            "freed_host_pages": "_see.freed_host_pages",
            "host_pages_free": HOST_FREE,
            "device_pages_free": DEVICE_FREE,
        },
        after=("_see.end_round()",),
    ),
    Point(
        CACHE + "_sync_hicache_ready_counts",
        kinds.EVENT_ROUND,
        {
            "round": "_see.round",
            "writes_agreed": "result[0]",
            "loads_agreed": "result[1]",
            "hits_agreed": "_h_taken[0]",
            "prefetch_acks_agreed": "_h_taken[1]",
            "storage_acks_agreed": "_h_taken[2]",
            "releases_agreed": "_h_taken[3]",
            "side_releases_agreed": "_h_taken[4]",
            "writes_done": "_h_ready[0]",
            "loads_done": "_h_ready[1]",
            "hits_ready": "_h_ready[2][0]",
            "prefetch_acks_ready": "_h_ready[2][1]",
            "storage_acks_ready": "_h_ready[2][2]",
            "releases_ready": "_h_ready[2][3]",
        },
        phases=("", "return"),
        after=(
            "(_h_taken := _see.of_storage(result[2]))",
            "(_h_ready := _see.own_counts(len(result[2])))",
            "_see.agreed(result)",
        ),
    ),
    Point(
        CACHE + "_all_reduce_attn_groups",
        kinds.MEETING,
        before={"_h_meet": "_see.meet_attention(op, tensor)"},
        call=MET,
        values=MET,
        when="_h_meet is not None",
        phases=("enter", "leave"),
    ),
    Point(
        CACHE + "_pp_sync",
        None,
        before={"_h_none": "_see.enter_pipeline(self, data)"},
        after=("_see.leave_pipeline(self, data)",),
        axis="pp",
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
            "node": "_see.node(getattr(result, 'last_device_node', None))",
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
            "pages": "_see.pages_put_out(req)",
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
            "pages": "-(-_h_tokens // self.page_size)",
            "tokens": "0 if result is None else _h_tokens",
            "host_pages_free": "_h_host",
            "device_pages_free": DEVICE_FREE,
            "write_queue_len": "len(self.cache_controller.write_queue)",
        },
        before={"_h_host": HOST_FREE, "_h_tokens": "len(device_value)"},
    ),
    Point(
        HOST_POOLS + "alloc",
        kinds.ALLOC_HOST,
        {
            "pool": "_see.name(pool)",
            "pages_wanted": "-(-need_size // self.page_size)",
            "pages": "_h_pages",
            "host_pages_free": "_h_free",
            "owner": "start_owner",
        },
        before={"_h_free": "_see.pool_free(self, pool)"},
        after=(
            "(_h_pages := 0 if result is None else len(result) // self.page_size)",
            "_see.host_has(pool, _h_free - _h_pages)",
        ),
    ),
    Point(
        HOST_POOLS + "free",
        kinds.FREE_HOST,
        {"pool": "_see.name(pool)", "pages": "_h_pages", "host_pages_free": "_h_free"},
        before={
            "_h_pages": "len(indices) // self.page_size",
            "_h_free": "_see.host_gets_back(pool, _h_pages)",
        },
        when="not _see.round or pool is not None",
    ),
    Point(
        CACHE + "init_load_back",
        kinds.LOAD_BACK,
        {
            "rid": "_see.rid(params.req)",
            "node": "_see.node(params.best_match_node)",
            "pages": "params.host_hit_length // self.page_size",
            "tokens": "None if result is None else result[0]",
            "device_pages_free": "_h_device",
            "host_pages_free": "_h_host",
            "loads_in_flight": "len(self.ongoing_load_back)",
        },
        before=ROOMS,
    ),
    Point(CACHE + "load_back", kinds.LOAD_NODE, {"node": "_see.node(node_id)", "is_loaded": "result"}),
    Point(
        CACHE + "_evict",
        kinds.EVICT,
        {
            "pages_wanted": "-(-params.num_tokens // self.page_size)",
            "pages_freed": "result.num_tokens_evicted // self.page_size",
            "device_pages_free": "_h_device",
            "host_pages_free": "_h_host",
        },
        before=ROOMS,
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
            "pages": "_h_pages",
            "device_pages_free": "_h_free",
        },
        before={"_h_free": "self.available_size() // self.page_size"},
        after=(
            "(_h_pages := 0 if result is None else len(result) // self.page_size)",
            "_see.device_has(_h_free - _h_pages)",
        ),
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
            "tokens": "_h_tokens",
            "device_pages_free": "_h_free",
        },
        before={
            "_h_tokens": "free_index.numel()",
            "_h_free": "_see.device_gets_back(_h_tokens, self.page_size)",
        },
        when="not _see.round",
    ),
)


# What only the newer cache has: itself, its controller and its pools.
OWN = (CACHE, HYBRID, HOST_POOLS, f"{CONTROLLER}_all_reduce")


def _of_newer(points: Sequence[Point]) -> tuple[Point, ...]:
    return tuple(replace(point, part=UNIFIED) if point.path.startswith(OWN) else point for point in points)


POINTS: Sequence[Point] = (
    *_of_newer((*ROUND, *TREE, *DEVICE, *STORAGE, *BACKGROUND)),
    *SERVER,
    *FORMER_TREE,
    *SIDE_POOLS,
    *DECODED,
    *DISAGG,
)
