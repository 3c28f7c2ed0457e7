"""Functions of SGLang's own classes, called with small stand-ins for what is around them: one rank of two.

    PEERS/bin/python point_calls.py RANK PORT OUT

Run in SGLang's environment by `test_points`. Ranks poll and clear differently where they may; whatever they
agree on goes through gloo. Writes two logs: of two ranks beside each other (OUT/tp), of two stages (OUT/pp).
"""

# mypy: ignore-errors
import json
import os
import sys
import tempfile
from functools import partial
from types import SimpleNamespace as Thing
from unittest.mock import MagicMock

RANK, PORT, OUT = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
sys.path.insert(0, os.path.join(os.environ["HICACHE_RIG"], "rig"))
os.environ["HICACHE_TRACE"] = "full"

import stack  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)

import sglang.srt.managers.scheduler  # noqa: E402, F401

from consensus_checker import sglang_plugin as plugin  # noqa: E402

CALLED = []


def main():
    import shims

    plugin.entry()
    shims.install()
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path="dummy", device="cpu", tp_size=2, page_size=16, served_model_name="calls")
    stack.groups(RANK, 2, PORT, args)
    world = torch.distributed.group.WORLD
    alone = [torch.distributed.new_group([rank]) for rank in (0, 1)][RANK]
    os.environ["HICACHE_TRACE_DIR"] = f"{OUT}/tp"
    plugin.configure([Thing(unique_name="tp:0", ranks=[0, 1])])
    assert plugin.enabled(), "it is not recorded"
    for call in (scheduler, commands, prefill, decode, restore, rings, drafts, pools):
        call(world, alone)
    plugin.shutdown()
    os.environ["HICACHE_TRACE_DIR"] = f"{OUT}/pp"
    plugin.configure([Thing(unique_name="tp:0", ranks=[RANK]), Thing(unique_name="pp:0", ranks=[0, 1])])
    assert plugin.enabled(), "stages are not recorded"
    stages()
    plugin.shutdown()
    errors = {hook.point.short: hook.error for hook in plugin._hooks.found.values() if hook.error}
    with open(f"{OUT}/rank{RANK}.json", "w") as file:
        json.dump({"errors": errors, "called": CALLED, "missing": plugin._hooks.missing}, file)
    torch.distributed.barrier()
    os._exit(0)


def request(rid, **more):
    quiet = MagicMock()
    more = {"cache_request_handle": None, "return_routed_experts": False, "bootstrap_room": 7, **more}
    return Thing(
        rid=rid,
        origin_input_ids=list(range(64)),
        output_ids=[1, 2],
        time_stats=quiet,
        finished_reason=None,
        bootstrap_host="host",
        return_logprob=False,
        priority=None,
        extra_key=None,
        grammar=None,
        is_retracted=False,
        pending_bootstrap=False,
        finished=lambda: False,
        **more,
    )


def scheduler(world, alone):
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.scheduler import NextBatchPlan, Scheduler
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    own = object.__new__(Scheduler)
    own.scheduler_stage_metrics = None
    own.session_controller, own.flush_wrapper = MagicMock(), MagicMock()
    own.external_corpus_manager = own.rust_server = None
    own._request_dispatcher = lambda req: None
    own.process_input_requests([])
    own.process_input_requests([AbortReq(rid="r1"), AbortReq(rid="r2")])
    CALLED.append("receive")

    batch = MagicMock(
        forward_mode=ForwardMode.EXTEND,
        reqs=[request("r1"), request("r2")],
        extend_num_tokens=48,
        extend_lens=[16, 32],
    )
    running = MagicMock(reqs=[])
    running.batch_size.return_value = 0
    own.process_pending_chunked_abort = own._process_hicache_events = lambda: None
    own.dllm_config = own.chunked_req = None
    own.enable_hisparse = own.require_mlp_sync = False
    own._should_defer_prefill = lambda batch: False
    own._arm_prefill_decode_interval = lambda batch: None
    own.dp_attn_adapter = MagicMock()
    own.dp_attn_adapter.maybe_prepare_mlp_sync_batch.side_effect = lambda batch, **more: batch
    own.dp_attn_adapter.maybe_convert_decode_to_extend.side_effect = lambda batch: batch
    own.ngram_embedding_manager = MagicMock()
    own.ngram_embedding_manager.prepare_for_forward.side_effect = lambda batch, **more: batch
    own.waiting_queue = []
    for planned in (batch, None):
        own.get_new_batch_prefill = lambda running, planned=planned: NextBatchPlan(planned, running)
        running.is_empty.return_value = True
        own.get_next_batch_to_run(running_batch=running, last_batch=None)
    CALLED.append("plan")

    ready = MagicMock(forward_mode=ForwardMode.PREBUILT, reqs=[request("r3")], extend_num_tokens=0)
    own.metrics_reporter, own.profiler_manager = MagicMock(), MagicMock()
    own.forward_ct, own._sched_idled, own.scripted_scheduler_hook = 0, False, None
    own.forward_sleep_time = None
    own._run_batch_prebuilt = lambda batch: None
    own.run_batch(ready)
    CALLED.append("batch")


def commands(world, alone):
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    own = object.__new__(Scheduler)
    own.is_fully_idle = lambda **more: False
    own._engine_paused, own.waiting_queue, own.running_batch = False, [], Thing(reqs=[])
    own.enable_hierarchical_cache = False
    own.flush_cache()
    own.attach_hicache_storage_wrapped(None)
    own.detach_hicache_storage_wrapped(None)
    cache = object.__new__(UnifiedRadixCache)
    # The store of one rank has nothing to clear.
    cache._storage_attachment = None if RANK else Thing(clear=lambda: True)
    cache.storage_existence_cache = MagicMock()
    cache.clear_storage_backend()
    cache.linker, cache._reset_full = None, lambda: None
    cache.reset()
    CALLED.append("command")


def poller(*polls):
    """Another poll each time it is asked, and the last one from then on."""
    left = list(polls)
    return Thing(
        poll=lambda: left.pop(0) if len(left) > 1 else left[0],
        init=lambda pages, index: None,
        pop_decode_prefix_len=lambda: 32,
        failure_exception=lambda: None,
        clear=lambda: None,
        kv_mgr=None,
        get_transfer_metric=lambda: None,
        require_staging=False,
        abort_notified=False,
        send_metadata=lambda *args, **more: None,
    )


def prefill(world, alone):
    from sglang.srt.disaggregation import prefill as module
    from sglang.srt.disaggregation.base import KVPoll

    module.release_kv_cache = lambda *args, **more: None
    module.maybe_release_metadata_buffer = lambda *args, **more: None
    mixin = module.SchedulerDisaggregationPrefillMixin
    server = MagicMock(attn_tp_cpu_group=world, attn_cp_cpu_group=alone)
    server.metrics_reporter.enable_metrics = False
    server.token_to_kv_pool_allocator.page_size = 16
    server.handle_bootstrap_failure = partial(mixin.handle_bootstrap_failure, server)
    server.handle_inflight_transfer_failure = partial(mixin.handle_inflight_transfer_failure, server)
    queue = object.__new__(module.PrefillBootstrapQueue)
    queue.pp_size, queue.scheduler, queue.scheduler_stage_metrics = 1, server, None
    queue.ensure_metadata_buffer = lambda req: True
    queue.can_prefill_before_bootstrap = lambda req: False
    # One rank is ready a poll before the other, which nobody acts on.
    polls = [KVPoll.WaitingForInput, KVPoll.WaitingForInput]
    early = [KVPoll.Bootstrapping, KVPoll.WaitingForInput]
    more = {"kv": Thing(holds_kv=False, holds_mamba=False), "to_finish": None}
    queue.queue = [
        request("p1", disagg_kv_sender=poller(*(early if RANK else polls)), metadata_buffer_index=0, **more),
        request("p2", disagg_kv_sender=poller(KVPoll.Failed), metadata_buffer_index=0, **more),
    ]
    for req in queue.queue:
        req.pending_bootstrap = True
    for _ in range(3):
        queue.pop_bootstrapped()
    assert queue.queue == []
    late = [KVPoll.Transferring, KVPoll.Success]
    server.disagg_prefill_inflight_queue = [
        request(
            "p3",
            disagg_kv_sender=poller(*(late if RANK else late[1:])),
            return_routed_experts=False,
            cache_request_handle=None,
        ),
        request("p4", disagg_kv_sender=poller(KVPoll.Failed), cache_request_handle=None),
    ]
    for _ in range(2):
        mixin.process_disagg_prefill_inflight_queue(server)
    assert server.disagg_prefill_inflight_queue == []
    CALLED.append("prefill")


def decode(world, alone):
    from sglang.srt.disaggregation import decode as module
    from sglang.srt.disaggregation.base import KVPoll

    queue = object.__new__(module.DecodeTransferQueue)
    queue.scheduler_stage_metrics = None
    queue.scheduler = MagicMock(enable_decode_hicache=False, enable_hisparse=False)
    queue.scheduler.metrics_reporter.enable_metrics = False
    queue.gloo_group, queue.enable_staging, queue.tp_rank = world, False, RANK
    queue.enable_host_receive = queue.enable_deferred_kv_release = False
    queue.metadata_buffers, queue.tree_cache = MagicMock(), MagicMock()
    # The metadata of one rank come a poll later.
    rooms = iter([0, 5, 5, 5] if RANK else [5] * 4)
    queue.metadata_buffers.bootstrap_room.__getitem__.side_effect = lambda at: Thing(item=lambda: next(rooms))
    queue.req_to_metadata_buffer_idx_allocator = MagicMock()
    queue._deferred_releases, queue.deferred_kv_release_timeout = [], 1.0
    module.release_kv_cache = lambda *args, **more: None
    done = Thing(req=request("d1"), kv_receiver=poller(KVPoll.Success), metadata_buffer_index=1)
    lost = Thing(req=request("d2"), kv_receiver=poller(KVPoll.Failed), metadata_buffer_index=2)
    lost.hicache_restore_status, lost.prefix_match, lost.hicache_restore_lock = None, None, None
    queue.queue = [done, lost]
    commit = module.DecodeTransferQueue._commit_transfer_to_req
    queue._commit_transfer_to_req = lambda one: None
    for _ in range(2):
        queue.pop_transferred()
    assert queue.queue == []
    queue._defer_release(Thing(req=request("d3"), kv_receiver=poller(0), metadata_buffer_index=3))
    CALLED.append("decode")

    waiting = object.__new__(module.DecodePreallocQueue)
    waiting.scheduler_stage_metrics = None
    waiting.req_to_metadata_buffer_idx_allocator = MagicMock()
    waiting.req_to_metadata_buffer_idx_allocator.alloc.return_value = 4
    waiting._transfer_page_indices = lambda one, indices, page_size: indices
    waiting.transfer_queue = MagicMock(enable_staging=False)
    waiting._num_published_destinations = 0
    promised = Thing(req=request("d4"), kv_receiver=poller(0), is_rebootstrap=False)
    waiting._send_kv_metadata(promised, list(range(40)), 16, None, decode_prefix_len=32)
    waiting._resolve_pending_reqs = lambda: None
    waiting.queue, waiting.pp_size, waiting.gloo_group, waiting.tp_rank = [], 1, world, RANK
    waiting.retracted_queue, waiting.token_to_kv_pool_allocator = [], MagicMock()
    waiting._uses_swa_reservation = lambda: False
    waiting._allocatable_token_budgets = lambda **more: 1000
    waiting.resume_retracted_reqs()
    CALLED.append("prealloc")
    assert callable(commit)


def restore(world, alone):
    from sglang.srt.disaggregation import decode_hicache_mixin as module

    module._req_radix_key = lambda *args: None
    match = module.DecodePrefixMatch(
        prefix_indices=list(range(16)),
        l2_host_hit_length=16,
        l3_storage_hit_length=0,
        last_device_node=1,
    )
    cache = MagicMock()
    cache.tree_core.is_eagle = False
    cache.match_prefix.return_value = Thing(
        last_device_node=1, best_match_node=2, host_hit_length=16, device_prefix_len=16
    )
    cache.lock.return_value = Thing(node=2)
    cache.path_device_indices.return_value = list(range(32))
    queue = Thing(tree_cache=cache, scheduler_stage_metrics=None)
    for loaded in (16, 0):
        one = Thing(req=request(f"h{loaded}", last_node=1, lock=None), prefix_match=match)
        one.hicache_restore_status = module.HiCacheRestoreResult.PENDING
        one.req.kv = Thing(req_pool_idx=0)
        cache.init_load_back.return_value = (loaded, 2)
        module.DecodeHiCacheTransferMixin._try_hicache_queue_load_back(queue, one)
        if loaded:
            module.DecodeHiCacheTransferMixin._commit_hicache_local_restore_to_req(queue, one)
    CALLED.append("restore")


def rings(world, alone):
    from sglang.srt.disaggregation.base import KVPoll
    from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin

    server = MagicMock(attn_tp_cpu_group=world, attn_cp_cpu_group=alone)
    server.get_rids = partial(SchedulerPPMixin.get_rids, server)
    server._route_aborts_to_bad = SchedulerPPMixin._route_aborts_to_bad
    server.pp_group.is_first_rank = False
    # What came from the stage before, in an order of its own on each rank.
    server._pp_recv_pyobj_from_prev_stage.return_value = ["b", "a"] if RANK else ["a", "b"]
    server.disagg_prefill_inflight_queue = [
        request(rid, disagg_kv_sender=poller(KVPoll.Success)) for rid in "abc"
    ]
    SchedulerPPMixin._pp_pd_get_prefill_transferred_ids(server)
    found = [Thing(req=request(rid), kv_receiver=poller(KVPoll.Success)) for rid in "abc"]
    server.disagg_decode_transfer_queue.queue = found
    SchedulerPPMixin._pp_pd_get_decode_transferred_ids(server)
    server.disagg_decode_prealloc_queue.retracted_queue = [request("a", retraction_mb_id=None)]
    SchedulerPPMixin._pp_pd_get_retract_ids(server, 0)
    server.disagg_decode_prealloc_queue.queue = [
        Thing(req=request("a"), kv_receiver=poller(KVPoll.WaitingForInput)),
        Thing(req=request("b"), kv_receiver=poller(KVPoll.Failed)),
    ]
    server._pp_recv_pyobj_from_prev_stage.return_value = [["a"], []]
    SchedulerPPMixin._pp_pd_get_prealloc_ids(server)
    CALLED.append("rings")


def drafts(world, alone):
    from sglang.srt.managers.scheduler_components.batch_result_processor import (
        SchedulerBatchResultProcessor as Results,
    )
    from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController

    plugin._hooks.install(is_last=True)
    plugin._hooks.bind(plugin._session)
    own = object.__new__(Results)
    object.__setattr__(own, "metrics_reporter", MagicMock())
    object.__setattr__(own, "model_worker", MagicMock())
    reqs = [request("s1"), request("s2")]
    for req in reqs:
        req.kv = Thing(kv_committed_len=0)
        req.spec_verify_ct = req.spec_num_correct_drafts = 0
        req.update_spec_correct_drafts_histogram = lambda count: None
    batch = Thing(reqs=reqs, has_grammar=False)
    result = Thing(
        next_token_ids=torch.arange(8),
        accept_lens=torch.tensor([3, 1]),
        speculative_output_stride=4,
        num_non_draft_tokens_per_req=1,
        block_accept_lens=None,
        cap_lens=None,
        grammar_advanced=False,
    )
    assert own._resolve_spec_v2_tokens(result, batch) == [[0, 1, 2], [4]]
    worker = MagicMock(speculative_num_steps=3)
    control = AdaptiveController(worker, Thing(on_verify_complete=lambda drafts, size: 5))
    control.register(Thing(speculative_num_steps=5))
    control.on_verify_complete([2, 0], 2)
    CALLED.append("drafts")


def pools(world, alone):
    from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
    from sglang.srt.mem_cache.allocator.page_interleave import PageInterleavePoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    states = MambaSlotAllocator(4, "cpu")
    states.free(states.alloc(3))
    assert states.alloc(9) is None
    tokens = TokenToKVPoolAllocator(32, torch.float32, "cpu", None, False)
    tokens.free(tokens.alloc(5))
    by_turns = PageInterleavePoolAllocator(64, 16, 2, torch.float32, "cpu", None, False)
    by_turns.alloc_cyclic(1, 48)
    CALLED.append("pools")


def stages():
    from sglang.srt.disaggregation import utils

    store = torch.distributed.distributed_c10d._get_default_store()
    group = Thing(
        send_object=lambda data, **more: store.set("polls", json.dumps(data)) or [],
        recv_object=lambda **more: json.loads(store.get("polls")),
    )
    assert utils.pp_sync_polls([1, 2] if RANK == 0 else None, group, RANK, 2, []) == [1, 2]
    CALLED.append("stages")


if __name__ == "__main__":
    tempfile.tempdir = OUT
    main()
