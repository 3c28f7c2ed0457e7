"""What is looked at of the external tier: prefetches and backups, on the scheduler and on its threads."""

from __future__ import annotations

from collections.abc import Sequence

from consensus_checker import sglang_kinds as kinds
from consensus_checker.sglang_hooks import Point
from consensus_checker.sglang_paths import (
    BACKUP,
    CACHE,
    CONTROLLER,
    FILE_STORE,
    HOST_FREE,
    HYBRID,
    IO,
    MET,
    PREFETCH,
    SYNC,
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
        call=MET,
        values=MET,
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
