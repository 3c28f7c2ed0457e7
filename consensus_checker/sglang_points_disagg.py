"""What is looked at where prefill and decode are servers of their own: polls, queues, prefixes, restores.

Compared along tp and cp only: what a stage polls is its own, and a later stage may come to it another time. A
poll is agreed on before anybody acts, so what was asked is a fact, and what was agreed on is compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from consensus_checker import sglang_kinds as kinds
from consensus_checker.sglang_hooks import Point
from consensus_checker.sglang_paths import DEVICE_FREE, DISAGGREGATED, MET

PACKAGE = "sglang.srt.disaggregation."
# Functions of a module, which others have under the same name.
UTILS = f"{PACKAGE}utils."
BOOTSTRAP = f"{PACKAGE}prefill.PrefillBootstrapQueue."
PREFILL = f"{PACKAGE}prefill.SchedulerDisaggregationPrefillMixin."
PREALLOC = f"{PACKAGE}decode.DecodePreallocQueue."
TRANSFER = f"{PACKAGE}decode.DecodeTransferQueue."
RESTORE = f"{PACKAGE}decode_hicache_mixin.DecodeHiCacheTransferMixin."
STAGES = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin."

POLLS: Sequence[Point] = (
    Point(
        UTILS + "all_reduce_flags",
        kinds.MEETING,
        before={"_h_meet": "_see.meet_flags(flags, group, op)"},
        call=MET,
        values=MET,
        when="_h_meet is not None",
        phases=("enter", "leave"),
        part=DISAGGREGATED,
    ),
    Point(
        UTILS + "poll_and_all_reduce_attn_cp_tp_group",
        kinds.PD_POLL,
        {"polls": "list(result)", "own_polls": "_see.transfers.own_polls"},
        before={"_h_none": "_see.transfers.begin_polls()"},
        when="_see.transfers.has_changed('stage', result)",
        part=DISAGGREGATED,
    ),
    *(
        Point(
            TRANSFER + name,
            kinds.PD_POLL,
            {"polls": "list(result)", "own_polls": "_see.transfers.own_polls"},
            before={"_h_none": "_see.transfers.begin_polls()"},
            when="_see.transfers.has_changed('transfer', result)",
            part=DISAGGREGATED,
        )
        for name in ("_poll_with_metadata_gate", "_poll_with_staging")
    ),
    # The first stage's polls, handed on.
    Point(
        UTILS + "pp_sync_polls",
        None,
        before={"_h_none": "_see.enter_polls(pp_rank, pp_size)"},
        after=("_see.leave_polls(pp_rank, pp_size, result)",),
        axis="pp",
        part=DISAGGREGATED,
    ),
)

QUEUES: Sequence[Point] = (
    *(
        Point(
            path,
            kinds.PD_QUEUE,
            {
                "queue": f"'{queue}'",
                "length": "_h_length",
                "rids": "_see.transfers.moved(result, 0)",
                "failed": "_see.transfers.moved(result, 1)",
            },
            before={"_h_length": length},
            # A poll that moves nothing is a pass of the loop in which nothing happened.
            when="_see.transfers.has_moved(result)",
            part=DISAGGREGATED,
        )
        for path, queue, length in (
            (BOOTSTRAP + "pop_bootstrapped", "bootstrap", "len(self.queue)"),
            (
                PREFILL + "process_disagg_prefill_inflight_queue",
                "inflight",
                "len(self.disagg_prefill_inflight_queue)",
            ),
            (PREALLOC + "pop_preallocated", "prealloc", "len(self.queue)"),
            (PREALLOC + "resume_retracted_reqs", "retracted", "len(self.retracted_queue)"),
            (TRANSFER + "pop_transferred", "transfer", "len(self.queue)"),
        )
    ),
    # What the stages before this one have found ready, and this one too: sets, which have no order.
    *(
        Point(
            STAGES + name,
            kinds.PD_RING,
            {
                "ring": f"'{ring}'",
                "rids": "_see.transfers.ring(result, 0)",
                "failed": "_see.transfers.ring(result, 1)",
            },
            when="_see.transfers.has_moved(result)",
            part=DISAGGREGATED,
        )
        for name, ring in (
            ("_pp_pd_get_prefill_transferred_ids", "prefill_transferred"),
            ("_pp_pd_get_retract_ids", "retracted"),
            ("_pp_pd_get_prealloc_ids", "prealloc"),
            ("_pp_pd_get_decode_transferred_ids", "decode_transferred"),
        )
    ),
)

# How much of a prompt the decode side has already, as it promises and as the prefill side is told.
PREFIXES: Sequence[Point] = (
    Point(
        PREALLOC + "_send_kv_metadata",
        kinds.PD_PREFIX,
        {
            "side": "'decode'",
            "rid": "_see.rid(decode_req.req)",
            "decode_prefix_len": "metadata_kwargs.get('decode_prefix_len')",
            "pages": "_see.transfers.pages_sent(kv_indices, page_size)",
        },
        part=DISAGGREGATED,
    ),
    Point(
        BOOTSTRAP + "finalize_bootstrap",
        kinds.PD_PREFIX,
        {
            "side": "'prefill'",
            "rid": "_see.rid(req)",
            "decode_prefix_len": "_see.transfers.without_cp(req.start_send_idx)",
        },
        when="result",
        part=DISAGGREGATED,
    ),
    Point(
        RESTORE + "_try_hicache_queue_load_back",
        kinds.PD_RESTORE,
        {
            "rid": "_see.rid(dr.req)",
            "decode_prefix_len": "dr.prefix_match.decode_prefix_len",
            "verdict": "'queued' if result else _see.transfers.restored(dr)",
            "device_pages_free": DEVICE_FREE,
        },
        # Until its prefetch is there it is asked each time.
        when="result or _see.transfers.restored(dr) == 'failed'",
        part=DISAGGREGATED,
    ),
    Point(
        RESTORE + "_commit_hicache_local_restore_to_req",
        kinds.PD_RESTORE,
        {
            "rid": "_see.rid(decode_req.req)",
            "decode_prefix_len": "decode_req.prefix_match.decode_prefix_len",
            "verdict": "'committed'",
            "device_pages_free": DEVICE_FREE,
        },
        when="decode_req.prefix_match is not None and decode_req.prefix_match.needs_local_restore",
        part=DISAGGREGATED,
    ),
)

OUTCOMES: Sequence[Point] = tuple(
    Point(
        path,
        kinds.PD_TRANSFER,
        {"rid": f"_see.rid({req})", "outcome": f"'{outcome}'"},
        part=DISAGGREGATED,
    )
    for path, req, outcome in (
        (TRANSFER + "_commit_transfer_to_req", "decode_req.req", "received"),
        (TRANSFER + "_abort_failed_transfer", "decode_req.req", "not_received"),
        (TRANSFER + "_defer_release", "decode_req.req", "held"),
        (PREFILL + "handle_inflight_transfer_failure", "req", "not_sent"),
        (PREFILL + "handle_bootstrap_failure", "req", "not_bootstrapped"),
        (PREFILL + "optimistic_release_and_requeue", "req", "yielded"),
    )
)

DISAGG: Sequence[Point] = (*POLLS, *QUEUES, *PREFIXES, *OUTCOMES)
