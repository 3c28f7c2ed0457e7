"""What is looked at of the cache that versions up to 0.5.18 make for models with plain attention.

Only where a server has made one. What its ranks agree on is less than in newer ones: in 0.5.12 each takes the
acks of its loads by itself, so that what follows from them is not compared here.
"""

from __future__ import annotations

from collections.abc import Sequence

from consensus_checker import sglang_kinds as kinds
from consensus_checker.sglang_hooks import Point
from consensus_checker.sglang_paths import (
    BACKUP,
    CONTROLLER,
    DEVICE_FREE,
    FORMER,
    FORMER_CACHE,
    FORMER_POOLS,
    HOST_FREE,
    IO,
    MET,
    PREFETCH,
    ROOMS,
)

# Where the pools were, first in one module and then in two.
HOST_POOLS = (
    "sglang.srt.mem_cache.memory_pool_host.HostKVCache.",
    "sglang.srt.mem_cache.pool_host.base.HostKVCache.",
)
PAGED = "sglang.srt.mem_cache.allocator.PagedTokenToKVPoolAllocator."
PHYSICAL_HOST = "self.cache_controller.mem_pool_host.available_size() // self.page_size"

FORMER_TREE: Sequence[Point] = (
    Point(
        FORMER_CACHE + "check_hicache_events",
        kinds.EVENT_ROUND,
        {"round": "_h_round"},
        before={
            "_h_round": "_see.begin_round(self)",
            "_h_none": "_see.look_at_room(self)",
            "_h_in_flight": "_see.in_flight(self)",
        },
        call={
            "round": "_h_round",
            "writes_in_flight": "len(self.ongoing_write_through)",
            "waiting": "_see.waiting",
            "freed_host_pages": "_see.freed_host_pages",
            "host_pages_free": HOST_FREE,
            "device_pages_free": DEVICE_FREE,
        },
        after=("_see.end_former_round(self, _h_in_flight)",),
        phases=("call", "return"),
        part=FORMER,
    ),
    Point(
        FORMER_CACHE + "_all_reduce_attn_groups",
        kinds.MEETING,
        before={"_h_meet": "_see.meet_attention(op, tensor)"},
        call=MET,
        values=MET,
        when="_h_meet is not None",
        phases=("enter", "leave"),
        part=FORMER,
    ),
    Point(
        FORMER_CACHE + "_pp_sync",
        None,
        before={"_h_none": "_see.enter_pipeline(self, data)"},
        after=("_see.leave_pipeline(self, data)",),
        axis="pp",
        part=FORMER,
    ),
    Point(
        FORMER_CACHE + "writing_check",
        kinds.ACKS,
        {
            "queue": "'write'",
            "count": "_h_before - len(self.ongoing_write_through)",
            "left": "len(self.cache_controller.ack_write_queue)",
        },
        before={"_h_before": "len(self.ongoing_write_through)"},
        when="_h_before != len(self.ongoing_write_through)",
        part=FORMER,
    ),
    # Without such a parameter a version does not agree on it, or is not known to.
    Point(
        FORMER_CACHE + "loading_check",
        kinds.ACKS,
        {
            "queue": "'load'",
            "count": "_h_before - len(self.ongoing_load_back)",
            "left": "len(self.cache_controller.ack_load_queue)",
        },
        before={"_h_before": "len(self.ongoing_load_back)", "_h_none": "finish_count"},
        when="_h_before != len(self.ongoing_load_back)",
        part=FORMER,
    ),
    Point(
        FORMER_CACHE + "_finish_write_through_ack",
        kinds.TRANSFER_ACK,
        {"queue": "'write'", "node": "_see.node(ack_id)"},
        part=FORMER,
    ),
    Point(
        FORMER_CACHE + "match_prefix",
        kinds.MATCH,
        {
            "rid": "_see.request(params.req)",
            "content": "_see.key(params.key, _h_tokens)",
            "tokens": "_h_tokens",
            "node": "_see.node(result.last_device_node)",
            "best_node": "_see.node(result.last_host_node)",
            "host_tokens": "result.host_hit_length",
            "device_tokens": "_see.device_tokens(result)",
        },
        before={"_h_tokens": "len(params.key)"},
        part=FORMER,
    ),
    Point(
        FORMER_CACHE + "insert",
        kinds.INSERT,
        {
            "content": "_see.whole_key(params.key)",
            "tokens": "len(params.key)",
            "prefix_tokens": "result.prefix_len",
            "device_pages_free": DEVICE_FREE,
            "host_pages_free": HOST_FREE,
            "writes_in_flight": "len(self.ongoing_write_through)",
        },
        part=FORMER,
    ),
    Point(
        FORMER_CACHE + "cache_finished_req",
        kinds.FINISH,
        {"rid": "_see.rid(req)", "reason": "_see.reason(req)", "output_tokens": "len(req.output_ids)"},
        when="req.finished_reason is not None",
        after=("_see.released(req)",),
        part=FORMER,
    ),
    Point(
        FORMER_CACHE + "release_aborted_request",
        kinds.ABORT,
        {"rid": "_see.rid(request)", "place": "''"},
        part=FORMER,
    ),
    Point(
        FORMER_CACHE + "write_backup",
        kinds.WRITE_BACKUP,
        {
            "node": "_see.node(node)",
            "pages": "-(-_h_tokens // self.page_size)",
            "tokens": "int(result)",
            "host_pages_free": "_h_host",
            "device_pages_free": DEVICE_FREE,
            "write_queue_len": "len(self.cache_controller.write_queue)",
        },
        before={"_h_host": PHYSICAL_HOST, "_h_tokens": "len(node.value)"},
        # Nobody has asked for room where what comes before has no backup either.
        when="result or write_back or node.parent is self.root_node or node.parent.backuped",
        part=FORMER,
    ),
    Point(
        FORMER_CACHE + "load_back",
        kinds.LOAD_NODE,
        {"node": "_see.node(node)", "is_loaded": "result is not None"},
        part=FORMER,
    ),
    Point(
        FORMER_CACHE + "init_load_back",
        kinds.LOAD_BACK,
        {
            "rid": "_see.rid(params.req)",
            "node": "_see.node(params.best_match_node)",
            "pages": "params.host_hit_length // self.page_size",
            "tokens": "None if result is None else len(result[0])",
            "device_pages_free": "_h_device",
            "host_pages_free": "_h_host",
        },
        before=ROOMS,
        part=FORMER,
    ),
    Point(
        FORMER_CACHE + "evict",
        kinds.EVICT,
        {
            "pages_wanted": "-(-params.num_tokens // self.page_size)",
            "pages_freed": "result.num_tokens_evicted // self.page_size",
            "device_pages_free": "_h_device",
            "host_pages_free": "_h_host",
        },
        before=ROOMS,
        part=FORMER,
    ),
    *(
        Point(
            FORMER_CACHE + name,
            kinds.EVICT_LEAF,
            {"node": f"_see.node({node})", "action": action},
            part=FORMER,
        )
        for name, node, action in (
            ("_evict_backuped", "node", "'demote'"),
            ("_evict_regular", "node", "'free'"),
            ("_drop_subtree_no_host", "root", "'drop' if result else 'keep'"),
        )
    ),
    Point(
        FORMER_CACHE + "evict_host",
        kinds.EVICT_HOST,
        {
            "component": "''",
            "pages_wanted": "-(-num_tokens // self.page_size)",
            "pages_freed": f"{PHYSICAL_HOST} - _h_host",
            "host_pages_free": "_h_host",
        },
        before={"_h_host": PHYSICAL_HOST},
        part=FORMER,
    ),
    Point(
        FORMER_CACHE + "prefetch_from_storage",
        kinds.PREFETCH_SUBMIT,
        {
            "rid": "_see.rid(request)",
            "node": "_see.node(last_host_node_id)",
            "outcome": "'issued' if request in self.ongoing_prefetch else 'declined'",
            "tokens": "len(new_input_tokens)",
            "host_pages_free": HOST_FREE,
        },
        when="self.enable_storage",
        part=FORMER,
    ),
    Point(
        FORMER_CACHE + "check_prefetch_progress",
        kinds.PREFETCH_POLL,
        {
            "rid": "_see.rid(request)",
            "policy": "_see.name(self.prefetch_stop_policy)",
            "verdict": "'end' if result else 'wait'",
        },
        before={"_h_is_open": "request in self.ongoing_prefetch"},
        when="_h_is_open",
        part=FORMER,
    ),
    # What was read from the store, and how much of it others had put there meanwhile.
    Point(
        FORMER_CACHE + "_insert_helper_host",
        kinds.PREFETCH_INSERT,
        {
            "outcome": "'loaded' if _h_tokens else 'nothing_completed'",
            "completed_tokens": "_h_tokens",
            "matched_tokens": "result",
            "loaded_tokens": "_h_tokens - result",
            "host_pages_free": HOST_FREE,
        },
        before={"_h_tokens": "len(key)"},
        part=FORMER,
    ),
    Point(
        FORMER_CACHE + "_revoke_pending_prefetch",
        kinds.PREFETCH_OUTCOME,
        {"rid": "_see.rid(request)", "outcome": "'revoked'"},
        part=FORMER,
    ),
    Point(
        FORMER_CACHE + "write_backup_storage",
        kinds.STORAGE_BACKUP,
        {"node": "_see.node(node)", "host_pages_free": HOST_FREE},
        when="self.enable_storage",
        part=FORMER,
    ),
    *(
        Point(
            pool + "alloc",
            kinds.ALLOC_HOST,
            {
                "pool": "''",
                "pages_wanted": "-(-need_size // self.page_size)",
                "pages": "_h_pages",
                "host_pages_free": "_h_free",
            },
            before={"_h_free": "self.available_size() // self.page_size"},
            after=(
                "(_h_pages := 0 if result is None else len(result) // self.page_size)",
                "_see.host_has(None, _h_free - _h_pages)",
            ),
            part=FORMER_POOLS,
        )
        for pool in HOST_POOLS
    ),
    *(
        Point(
            pool + "free",
            kinds.FREE_HOST,
            {"pool": "''", "pages": "_h_pages", "host_pages_free": "_h_free"},
            before={
                "_h_pages": "len(indices) // self.page_size",
                "_h_free": "_see.host_gets_back(None, _h_pages)",
            },
            when="not _see.round",
            part=FORMER_POOLS,
        )
        for pool in HOST_POOLS
    ),
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
        part=FORMER_POOLS,
    ),
    *(
        Point(
            PAGED + name,
            kinds.ALLOC,
            {
                "purpose": f"'{name.removeprefix('alloc_')}'",
                "pages": "0 if result is None else len(result)",
                "device_pages_free": "_h_free",
            },
            before={"_h_free": "self.available_size() // self.page_size"},
            part=FORMER_POOLS,
        )
        for name in ("alloc_extend", "alloc_decode")
    ),
    # On the threads of its controller, which has no class above it here.
    Point(
        CONTROLLER + "_storage_hit_query",
        None,
        lanes=(PREFETCH,),
        before={"_h_none": "_see.state('prefetch', 'backend', operation.id)"},
        after=("_see.state('prefetch', 'idle', None)",),
        raised="_see.state('prefetch', 'idle', None)",
        part=FORMER,
    ),
    Point(
        CONTROLLER + "_all_reduce_prefetch_groups",
        kinds.MEETING,
        lanes=(PREFETCH,),
        before={"_h_meet": "_see.meet_storage(op, tensor, (op,))"},
        call=MET,
        values=MET,
        when="_h_meet is not None",
        phases=("enter", "leave"),
        part=FORMER,
    ),
    Point(
        CONTROLLER + "_page_transfer",
        kinds.READ,
        {
            "rid": "_see.rid(operation)",
            "op": "operation.id",
            "pages": "_h_pages",
            "local_pages": "_see.pages_read(result)",
        },
        lanes=(IO,),
        before={
            "_h_pages": "len(operation.hash_value)",
            "_h_none": "_see.state('io', 'backend', operation.id)",
        },
        after=("_see.state('io', 'idle', None)",),
        raised="_see.state('io', 'idle', None)",
        part=FORMER,
    ),
    Point(
        CONTROLLER + "_page_backup",
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
        part=FORMER,
    ),
)
