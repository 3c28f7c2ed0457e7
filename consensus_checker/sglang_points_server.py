"""What is looked at of the scheduler itself: what it receives, what it runs, and an operator's commands."""

from __future__ import annotations

from collections.abc import Sequence

from consensus_checker import sglang_kinds as kinds
from consensus_checker.sglang_hooks import Point
from consensus_checker.sglang_paths import CACHE, FORMER, FORMER_CACHE, POOLS, SCHEDULER, SPECULATIVE, UNIFIED

# Of the scheduler itself: what it received, what it runs, and an operator's commands.
SERVER: Sequence[Point] = (
    # Before anything comes of them.
    Point(
        SCHEDULER + "process_input_requests",
        kinds.RECEIVE,
        call={
            "count": "len(recv_reqs)",
            "rids": "_see.received(recv_reqs)",
            "types": "_see.types(recv_reqs)",
        },
        when="recv_reqs",
        phases=("", ""),
    ),
    Point(
        SCHEDULER + "get_next_batch_to_run",
        kinds.PLAN,
        {
            "mode": "_see.name(_h_batch.forward_mode)",
            "rids": "_see.members(_h_batch.reqs)",
            "tokens": "_h_batch.extend_num_tokens",
            "extend": "_see.lengths(_h_batch)",
            "waiting_count": "len(self.waiting_queue)",
            "device_pages_free": "_see.device_room",
        },
        after=("(_h_batch := _see.planned(result))",),
        when="_h_batch is not None",
    ),
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
    # Of the caches' own: a store's clearing may fail on one rank, where another has cleared the same files.
    *(
        Point(
            cache + "clear_storage_backend",
            kinds.COMMAND,
            {"verb": "'clear'", "verdict": "'asked'", "outcome": "_see.verdict(result)"},
            part=part,
        )
        for cache, part in ((CACHE, UNIFIED), (FORMER_CACHE, FORMER))
    ),
    Point(CACHE + "reset", kinds.COMMAND, {"verb": "'reset'", "verdict": "'done'"}, part=UNIFIED),
    *(
        Point(
            f"sglang.srt.mem_cache.allocator.unified_hybrid_swa.{owner}.evict_to_free_tokens",
            kinds.EVICT_TO_FREE,
            {"tokens": "num_tokens", "verdict": "result"},
            part=POOLS,
        )
        for owner in ("UnifiedSWATokenToKVPoolAllocator", "UnifiedMambaSWATokenToKVPoolAllocator")
    ),
)

RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
ADAPTIVE = "sglang.srt.speculative.adaptive_runtime_state.AdaptiveController."

# Of a draft: how many of its tokens were taken, and how many it is to propose next.
DECODED: Sequence[Point] = (
    Point(
        RESULTS + "_resolve_spec_v2_tokens",
        kinds.ACCEPT,
        {
            "rids": "_see.members(batch.reqs)",
            "drafts_accepted": "list(result.num_correct_drafts_per_req_cpu)",
            "tokens": "sum(map(len, _h_returned))",
            "content": "_see.outputs(_h_returned)",
        },
        part=SPECULATIVE,
    ),
    Point(
        ADAPTIVE + "_activate",
        kinds.SPEC_STEPS,
        {"steps": "speculative_num_steps"},
        part=SPECULATIVE,
    ),
)
