# ---- What follows is the same in every such file: it drives SGLang's own cache, and needs nothing else. ----
# mypy: ignore-errors
# ruff: noqa: F821, B905
"""Drives SGLang's own cache, one rank after the other, with what two ranks of a server were given.

Owns the text of a test file below its data, and is never imported by this project. There is no GPU, no model
and no second process: what other ranks and the store said is in the steps, and every answer that only a
machine can give (a copy is done, a page was read) is given at once.
"""

import faulthandler
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from array import array
from types import SimpleNamespace

# A thread of the cache that has not come to rest by then will not.
REST_S = 60.0
# A rank that takes so long for all of its steps is blocked.
BLOCKED_S = 900.0
# Name of a call that none has returned from.
RAISED = "raised"
# What a request's tokens begin with that no page in the log tells of.
UNKNOWN = 1 << 40


def test_the_ranks_decide_alike():
    """Fails at the first call in which two ranks part; passes once they do not."""
    parted = compare(STEPS)
    assert parted is None, parted.text


# ---- One rank ----


class Server:
    """One rank's cache, and what it was asked to do so far.

    Attributes:
        calls: name of each decision, what it was about, and the step that it was taken in.
        now: the step that is being taken.
        odd: what goes otherwise in it on this rank.
    """

    def __init__(self, rank, store):
        self.rank, self.store = rank, store
        self.calls, self.counts = [], {}
        self.now, self.odd = {}, {}
        self.requests, self.running, self.pins = {}, {}, {}
        self.kept = []
        self.thread = threading.get_ident()
        self.build()

    def build(self):
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
        from sglang.srt.runtime_context import get_parallel
        from torch import float32

        page, parallel = SERVER["page_tokens"], get_parallel()
        slots = SERVER["device_pages"] * page
        kv = MHATokenToKVPool(
            size=slots,
            page_size=page,
            dtype=float32,
            head_num=1,
            head_dim=4,
            layer_num=2,
            device="cpu",
            enable_memory_saver=False,
        )
        self.device = PagedTokenToKVPoolAllocator(
            slots, page, dtype=float32, device="cpu", kvcache=kv, need_sort=False
        )
        longest = max([sum(one["tokens"]) for one in REQUESTS.values()], default=0)
        self.rows = ReqToTokenPool(
            len(REQUESTS) + 8, longest + 4 * page, device="cpu", enable_memory_saver=False
        )
        given = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.device,
            page_size=page,
            tp_cache_group=parallel.tp_group.cpu_group,
            attn_cp_cache_group=parallel.attn_cp_group.cpu_group,
            attn_tp_cache_group=parallel.attn_tp_group.cpu_group,
            pp_cache_group=parallel.pp_group.cpu_group,
            pp_rank=0,
            pp_size=1,
            tree_components=(ComponentType.FULL,),
        )
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = self.store
        self.cache = UnifiedRadixCache(given)
        self.cache.init_hicache(arguments(), given)
        self.controller = self.cache.cache_controller
        self.watch_threads()
        scheduler = object.__new__(Scheduler)
        scheduler.tree_cache = self.cache
        scheduler.waiting_queue = []
        scheduler.enable_hierarchical_cache = True
        scheduler.enable_hicache_storage = SERVER["has_storage"]
        scheduler.enable_lmcache = scheduler.enable_unified_cache_external_linker = False
        self.scheduler = scheduler
        # As much host memory as that rank had: what is there beyond is kept.
        pool = self.controller.mem_pool_host
        beyond = pool.available_size() // page - SERVER["host_pages"]
        if beyond > 0:
            self.kept.append(pool.alloc(beyond * page))

    def watch_threads(self):
        """Count what goes into the queues of the threads beside the scheduler, and what has come of it."""
        cc = self.controller
        if not SERVER["has_storage"]:
            self.asked = self.answered = ()
            return

        def counted(queue, name, counts=lambda item: item is not None):
            put = queue.put

            def put_and_count(item, *rest, **more):
                self.counts[name] = self.counts.get(name, 0) + bool(counts(item))
                return put(item, *rest, **more)

            queue.put = put_and_count
            return name

        self.asked = (
            counted(cc.prefetch_queue, "queries"),
            counted(cc.prefetch_buffer, "reads"),
            counted(cc.backup_queue, "writes"),
        )
        self.answered = (
            counted(cc.prefetch_hit_queue, "hits"),
            counted(cc.ack_prefetch_queue, "progress", lambda ack: ack.completed_req),
            counted(cc.ack_backup_queue, "backups"),
        )

    def rest(self):
        """Wait until the threads have done what they were asked for."""
        until = time.monotonic() + REST_S
        while any(
            self.counts.get(asked, 0) != self.counts.get(answered, 0)
            for asked, answered in zip(self.asked, self.answered)
        ):
            if time.monotonic() > until:
                raise TimeoutError(f"threads of the cache did not come to rest: {self.counts}")
            time.sleep(0.0005)

    def close(self):
        self.cache.shutdown()

    # Steps.

    def take(self, step):
        self.now, self.odd = step, step.get("odd", {}).get(str(self.rank), {})
        self.seen = {}
        if hold := self.odd.get("hold_pages"):
            self.kept.append(plain(self.device, "alloc")(hold * SERVER["page_tokens"]))
        getattr(self, "do_" + step["do"])(step)

    def do_arrive(self, step):
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        about = REQUESTS[step["rid"]]
        prompt, output = about["tokens"]
        tokens = tokens_of(step["rid"])
        request = Req(
            rid=step["rid"],
            origin_input_text="",
            origin_input_ids=array("q", tokens[:prompt]),
            sampling_params=SamplingParams(max_new_tokens=max(1, output)),
            vocab_size=1 << 31,
        )
        self.requests[step["rid"]] = request
        self.scheduler.waiting_queue.append(request)
        if SERVER["has_storage"]:
            self.scheduler._prefetch_kvcache(request)

    def do_round(self, step):
        self.rest()
        done = step["done"][str(self.rank)]
        for queue, count in zip((self.controller.ack_write_queue, self.controller.ack_load_queue), done):
            for index, ack in enumerate(queue):
                ack.finish_event.is_done = index < count
        if "order" in self.odd:
            self.reorder(self.odd["order"])
        self.scheduler._process_hicache_events()

    def reorder(self, rids):
        """Those first, in this order; the whole queue backwards where that changes nothing."""
        waiting = self.scheduler.waiting_queue
        before = list(waiting)
        waiting.sort(key=lambda request: rids.index(request.rid) if request.rid in rids else len(rids))
        if waiting == before:
            waiting.reverse()

    def do_poll(self, step):
        self.rest()
        if step["rid"] in self.requests:
            self.cache.check_prefetch_progress(self.requests[step["rid"]].cache_request_handle)

    def do_match(self, step):
        request = self.requests.get(step["rid"])
        if request is None or request not in self.scheduler.waiting_queue:
            return
        if SERVER["has_storage"]:
            self.rest()
            self.cache.check_prefetch_progress(request.cache_request_handle)
            got, start = self.cache.pop_prefetch_loaded_span(request.cache_request_handle)
            if got > 0:
                request.storage_hit_length, request.storage_hit_start = got, start
        request.init_next_round_input(self.cache)
        if SERVER["has_storage"] and self.scheduler._prefetch_after_device_hit_loss(request):
            return
        if step["admit"]:
            self.admit(request)

    def admit(self, request):
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        cache = self.cache
        pin = cache.lock(request.last_node)
        if request.needs_host_load_back():
            best = request.best_match_node
            host_pin, path_pin = cache.inc_host_lock_ref(best).to_dec_params(), cache.lock(best)
            wanted = InitLoadBackParams(best, request.host_hit_length, req=request)
            loaded, request.last_node = cache.init_load_back(wanted)
            cache.unlock(path_pin)
            cache.dec_host_lock_ref(best, host_pin)
            request.host_loaded_length = loaded
            request.prefix_len += loaded
        request.kv.cache_protected_len = request.prefix_len
        request.lock = cache.lock(request.last_node)
        cache.unlock(pin)
        if SERVER["has_storage"]:
            fulfilled = request.fulfilled_storage_hit_len(request.prefix_len)
            cache.finish_storage_prefetch_admission(
                request.cache_request_handle, fulfilled_tokens=fulfilled, reason=None
            )
        self.scheduler.waiting_queue.remove(request)
        self.running[request.rid] = request

    def do_load(self, step):
        self.cache.ready_to_load_host_cache()

    def do_prefill(self, step):
        from sglang.srt.mem_cache import common
        from torch import int32

        request = self.running.get(step["rid"])
        if request is None or request.kv.kv_allocated_len:
            return
        page, prompt = SERVER["page_tokens"], len(request.origin_input_ids)
        total = max(prompt, REQUESTS[request.rid]["computed"] or 0)
        grow = -(-total // page) * page - request.prefix_len
        room = self.device.available_size() + self.cache.full_evictable_size()
        if grow > room:
            raise NoRoomError(f"{request.rid} needs {grow} tokens, {room} are there")
        self.rows.alloc([request])
        common.evict_from_tree_cache(self.cache, grow)
        slots = self.device.alloc(grow)
        row = self.rows.req_to_token[request.kv.req_pool_idx]
        row[: request.prefix_len] = self.cache.prefix_device_indices(request).to(int32)
        row[request.prefix_len : total] = slots[: total - request.prefix_len].to(int32)
        request.kv.kv_allocated_len = total
        request.kv.kv_committed_len = request.extend_end = prompt
        common.checkpoint_kv_cache(request, self.cache)

    def do_finish(self, step):
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH
        from sglang.srt.mem_cache import common

        request = self.running.get(step["rid"])
        if request is None or not request.kv.kv_allocated_len:
            return
        del self.running[step["rid"]]
        prompt, output = REQUESTS[request.rid]["tokens"]
        request.output_ids.extend(tokens_of(request.rid)[prompt : prompt + output])
        request.kv.kv_committed_len = request.kv.kv_allocated_len
        request.finished_reason = FINISH_LENGTH(length=output)
        common.release_kv_cache(request, self.cache, checkpoint=True)

    def do_flush(self, step):
        self.cache.flush_pending_backups()

    # Answers.

    def agreed(self, data):
        """What the group has agreed on, in place of this rank's own."""
        if data.numel() == 1:
            data.fill_(int(self.now.get("vote", False)))
            return
        for index, count in enumerate(self.now.get("agreed", ())):
            if index < data.numel() - 2:
                data[index] = min(int(data[index]), count)

    def is_due(self, deed, call):
        """Whether this call is the one of its kind in this step that goes otherwise on this rank."""
        index = self.seen[call] = self.seen.get(call, -1) + 1
        return self.odd.get(deed) == index


class NoRoomError(Exception):
    """A request was admitted that has no room: a step that the cache's owner would not have taken."""


def tokens_of(rid):
    """A request's tokens: those of equal pages are equal, others occur nowhere else."""
    about, page = REQUESTS[rid], SERVER["page_tokens"]
    ids = [first + index for first, count in about["pages"] for index in range(count)]
    tokens = [1 + number * page + index for number in ids for index in range(page)]
    more = sum(about["tokens"]) - len(tokens)
    number = UNKNOWN + (list(REQUESTS).index(rid) << 20)
    return [*tokens, *range(number, number + max(0, more))]


# ---- The cache, without a GPU and without other ranks ----


class Event:
    """A device's event that is done when the step says so."""

    def __init__(self, *_, **__):
        self.is_done = True

    def query(self):
        return self.is_done

    def synchronize(self):
        self.is_done = True

    def record(self, *_):
        self.is_done = False

    def wait(self, *_):
        pass

    wait_event = wait


def copied(src_layers, dst_layers, src_indices, dst_indices, page_size=None):
    for source, target in zip(src_layers, dst_layers):
        target[dst_indices.long()] = source[src_indices.long()]


def arguments():
    from sglang.srt.server_args import ServerArgs

    extra = {"prefetch_threshold": SERVER["prefetch_threshold"]} if SERVER["prefetch_threshold"] else {}
    more = {
        name: SERVER[name]
        for name in (
            "hicache_write_policy",
            "hicache_storage_prefetch_policy",
            "hicache_storage_prefetch_retry_poll_interval",
            "hicache_storage_prefetch_retry_max_attempts",
            "radix_eviction_policy",
        )
        if SERVER.get(name) is not None
    }
    return ServerArgs(
        model_path="none",
        served_model_name="none",
        device="cpu",
        page_size=SERVER["page_tokens"],
        enable_hierarchical_cache=True,
        hicache_size=0,
        hicache_ratio=max(1.0, (SERVER["host_pages"] + 1) / SERVER["device_pages"]),
        hicache_io_backend="direct",
        hicache_mem_layout="layer_first",
        hicache_storage_backend="file" if SERVER["has_storage"] else None,
        hicache_storage_backend_extra_config=json.dumps(extra) if SERVER["has_storage"] else None,
        **more,
    )


NOW = []
ORIGINALS = {}


def plain(owner, name):
    """A method as SGLang has it, bound."""
    return ORIGINALS[type(owner), name].__get__(owner)


def prepare():
    """Once in a process: import the server, make groups of one rank, and look at what decides."""
    if ORIGINALS:
        return
    os.environ.update(CUDA_VISIBLE_DEVICES="", HICACHE_TRACE="off", SGLANG_ENABLE_RANK_CONSENSUS_CHECKER="0")
    import logging

    import torch

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    import sglang.srt.distributed.parallel_state as parallel_state
    import sglang.srt.managers.scheduler  # noqa: F401  ahead of the cache, as in a server
    import sglang.srt.mem_cache.l2_transfer as l2
    import sglang.srt.mem_cache.pool_host.base as host_base
    import sglang.srt.mem_cache.pool_host.mha as mha
    from sglang.srt.runtime_context import SpawnRanks, publish

    mha.transfer_kv_direct = copied
    streams = {"Stream": torch.cpu.Stream, "stream": torch.cpu.stream}
    l2.device_module = SimpleNamespace(__name__="torch.cpu", Event=Event, **streams)
    host_base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    pinned = mha.MHATokenToKVPoolHost.__init__
    pinned.__defaults__ = tuple(False if value is True else value for value in pinned.__defaults__)
    make = parallel_state.init_model_parallel_group

    def on_cpu(*rest, **more):
        return make(*rest, **{**more, "use_pynccl": False, "use_custom_allreduce": False})

    parallel_state.init_model_parallel_group = on_cpu
    parallel_state.set_custom_all_reduce(False)
    publish(arguments(), role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, distributed_init_method=where, local_rank=0, backend="gloo"
    )
    parallel_state.initialize_model_parallel(backend="gloo")
    watch()


def watch():
    """Let each function that decides say so, and each that asks another rank be answered by the step."""
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.pool_host.group import HostPoolGroup
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache as Cache

    page = SERVER["page_tokens"]

    def around(owner, name, wrap):
        inner = getattr(owner, name)
        ORIGINALS[owner, name] = inner

        def outer(self, *rest, **more):
            if not NOW:
                return inner(self, *rest, **more)
            return wrap(NOW[0], lambda: inner(self, *rest, **more), self, *rest, **more)

        setattr(owner, name, outer)

    def says(owner, name, call, about):
        """Keep what a call came to, with the words of the log."""

        def wrap(server, inner, *rest, **more):
            result = inner()
            if threading.get_ident() == server.thread:
                told = about(result, *rest, **more)
                if told is not None:
                    server.calls.append((call, told, server.now))
            return result

        around(owner, name, wrap)

    # Answers of others.

    def reduced(server, inner, cache, data, *_):
        server.agreed(data)

    def counted(server, inner, cache):
        found = inner()
        if (counts := server.odd.get("counts")) is not None:
            whole = [found[0], found[1], *found[2]]
            whole[: len(counts)] = map(min, whole, counts)
            found = (whole[0], whole[1], tuple(whole[2:]), *found[3:])
        server.calls.append(("event_round return", {"agreed": [found[0], found[1], *found[2]]}, server.now))
        return found

    def hits(server, inner, controller, operation, count):
        found = inner()
        return min(found, HITS.get(_of(operation), found))

    def completed(server, inner, cache, operation):
        known = COMPLETED.get(_of(operation))
        if known is not None and known < operation.completed_tokens:
            operation.completed_tokens = known
        result = inner()
        loaded = cache.prefetch_loaded_tokens_by_reqid.get(operation.handle, 0)
        about = {"rid": operation.handle.rid, "completed_tokens": operation.completed_tokens}
        server.calls.append(("prefetch_insert", {**about, "loaded_tokens": loaded}, server.now))
        return result

    around(Cache, "_all_reduce", reduced)
    around(Cache, "_sync_hicache_ready_counts", counted)
    around(HybridCacheController, "_sync_prefetch_hit_query", hits)
    around(Cache, "_handle_prefetch_result", completed)

    # What went otherwise on one rank.

    def alloc_host(server, inner, pool, *rest, **more):
        wanted = rest[0] if rest else more["need_size"]
        result = None if server.is_due("refuse_host_alloc", "alloc_host") else inner()
        about = {"pages_wanted": -(-wanted // page), "pages": 0 if result is None else len(result) // page}
        server.calls.append(("alloc_host", about, server.now))
        return result

    def submit(server, inner, cache, request, node, tokens, *rest, **more):
        before = dict(cache._prefetch_outcome_stats)
        result = None if server.is_due("skip_prefetch", "prefetch_submit") else inner()
        after = cache._prefetch_outcome_stats
        outcome = sorted(name for name in after if after[name] != before.get(name, 0))
        about = {"rid": request.rid, "node": node, "tokens": len(tokens), "outcome": outcome}
        server.calls.append(("prefetch_submit", about, server.now))
        return result

    def insert(server, inner, cache, params):
        order, place = server.odd.get("other_token", (-1, 0))
        server.seen["insert"] = server.seen.get("insert", -1) + 1
        if server.seen["insert"] == order:
            # A copy: the request keeps its own.
            ids = array("q", params.key.token_ids)
            ids[min(place, len(params.key) - 1)] += 1 << 50
            params.key.token_ids = ids
        result = inner()
        about = {"content": content(params.key), "tokens": len(params.key), "node": result.last_device_node}
        server.calls.append(("insert", {**about, "prefix_tokens": result.prefix_len}, server.now))
        return result

    def write_backup(server, inner, cache, node, values, *rest):
        result = inner()
        if server.is_due("flush_in_backup", "write_backup"):
            cache.cache_controller.start_writing()
        tokens = len(values)
        about = {"node": node, "pages": -(-tokens // page), "tokens": 0 if result is None else tokens}
        server.calls.append(("write_backup", about, server.now))
        return result

    def alloc(server, inner, pool, wanted, *rest, **more):
        result = None if server.is_due("refuse_alloc", "alloc") else inner()
        about = {"pages_wanted": wanted // page, "pages": 0 if result is None else len(result) // page}
        server.calls.append(("alloc", about, server.now))
        return result

    around(PagedTokenToKVPoolAllocator, "alloc", alloc)
    around(HostPoolGroup, "alloc", alloc_host)
    around(Cache, "prefetch_from_storage", submit)
    around(Cache, "insert", insert)
    around(Cache, "_execute_kv_backup", write_backup)

    # Decisions.

    def polls(server, inner, cache, request):
        # Whose prefetch is over, or never was, is admitted without a question.
        is_open = request in cache.ongoing_prefetch
        result = inner()
        if is_open:
            about = {"rid": request.rid, "verdict": "end" if result else "wait"}
            server.calls.append(("prefetch_poll", about, server.now))
        return result

    def begins(server, inner, cache):
        about = {
            "writes_in_flight": len(cache.ongoing_write_through),
            "loads_in_flight": len(cache.ongoing_load_back),
            "prefetches_in_flight": len(cache.ongoing_prefetch),
            "storage_backups_in_flight": len(cache.ongoing_backup),
            "evictable_pages": cache.full_evictable_size() // page,
            "protected_pages": cache.full_protected_size() // page,
            "waiting": [request.rid for request in server.scheduler.waiting_queue],
        }
        server.calls.append(("event_round call", about, server.now))
        return inner()

    def enqueues(queue):
        def wrap(server, inner, controller):
            nodes = [node for op in getattr(controller, queue + "_queue") for node in op.node_ids]
            result = inner()
            if nodes:
                server.calls.append(("transfer_enqueue", {"queue": queue, "nodes": nodes}, server.now))
            return result

        return wrap

    says(
        Cache,
        "_can_terminate_prefetch",
        "prefetch_vote",
        lambda result, cache, operation: {
            "rid": operation.handle.rid,
            "verdict": "end" if result else "wait",
        },
    )
    around(Cache, "check_prefetch_progress", polls)
    around(Cache, "check_hicache_events", begins)
    around(HiCacheController, "start_writing", enqueues("write"))
    around(HiCacheController, "start_loading", enqueues("load"))
    says(
        Cache,
        "match_prefix",
        "match",
        lambda result, cache, params: {
            "rid": getattr(params.req, "rid", None),
            "content": content(params.key),
            "tokens": len(params.key),
            "node": result.last_device_node,
            "best_node": result.best_match_node,
            "device_tokens": result.device_prefix_len,
            "host_tokens": result.host_hit_length,
        },
    )
    says(
        Cache,
        "init_load_back",
        "load_back",
        lambda result, cache, params: {
            "rid": getattr(params.req, "rid", None),
            "node": params.best_match_node,
            "pages": params.host_hit_length // page,
            "tokens": None if result is None else result[0],
        },
    )
    says(
        Cache,
        "_evict",
        "evict",
        lambda result, cache, params, *_: {
            "pages_wanted": -(-params.num_tokens // page),
            "pages_freed": result.num_tokens_evicted // page,
        },
    )
    says(
        Cache,
        "_evict_device_next_node",
        "evict_node",
        lambda result, cache, *_, **__: {"node": result[0], "has_progressed": result[1]},
    )
    says(
        Cache,
        "_evict_device_leaf",
        "evict_leaf",
        lambda result, cache, node, *_, **__: {"node": node, "action": "write_back" if result else "free"},
    )
    says(
        Cache,
        "evict_host",
        "evict_host",
        lambda result, cache, wanted, *_, **__: {
            "pages_wanted": -(-wanted // page),
            "pages_freed": result // page,
        },
    )
    says(
        HybridCacheController,
        "allocate_storage_hit",
        "prefetch_hit",
        lambda result, controller, operation, hit, *_, **__: {
            "rid": operation.handle.rid,
            "hit_tokens": hit,
            "tokens": 0 if result[0] is None else len(result[0]),
        },
    )
    says(
        Cache,
        "revoke_pending_prefetch",
        "prefetch_outcome",
        lambda result, cache, request: {"rid": request.rid, "outcome": "revoked"},
    )
    says(Cache, "write_backup_storage", "storage_backup", lambda result, cache, node: {"node": node})
    says(Cache, "_finish_write_through_ack", "transfer_ack", lambda result, cache, node: {"node": node})


def _of(operation):
    return f"{operation.handle.rid}/{operation.handle.attempt_id}"


def content(key):
    """Of a key's tokens; equal on two ranks only if they are."""
    ids = array("q", key.token_ids[: len(key)])
    return hash(ids.tobytes()) & 0xFFFFFFFF


# ---- Two ranks ----


class Parted:
    """The first call in which two ranks differ; `calls` of both, None for one that made no further."""

    def __init__(self, index, ranks, calls):
        self.index, self.ranks, self.calls = index, ranks, calls

    @property
    def names(self):
        return [call and call[0] for call in self.calls]

    @property
    def differing(self):
        """Name of what differs: fields of one call, or of two that are not the same."""
        if None in self.calls or len(set(self.names)) > 1:
            return sorted(str(name) for name in self.names)
        (name, one, _), (_, two, _) = self.calls
        return [name, *sorted(field for field in one if one[field] != two.get(field))]

    @property
    def text(self):
        lines = [f"ranks {self.ranks[0]} and {self.ranks[1]} part at call {self.index}:"]
        for rank, call in zip(self.ranks, self.calls):
            if call is None:
                lines.append(f"  rank {rank}: no further call")
                continue
            name, about, step = call
            fields = "  ".join(f"{field}={value}" for field, value in about.items())
            lines.append(f"  rank {rank}: {name}  {fields}")
            odd = step.get("odd", {}).get(str(rank))
            where = f"    in step {step['do']} {step.get('rid', '')}".rstrip()
            lines.append(where + (f", in which this rank's log has {json.dumps(odd)}" if odd else ""))
        return "\n".join(lines)


def compare(steps):
    """Drive one rank after the other; where they part first, or None."""
    prepare()
    both = [calls_of(rank, steps) for rank in RANKS]
    for index in range(max(map(len, both))):
        pair = [calls[index] if index < len(calls) else None for calls in both]
        if pair[0] is None or pair[1] is None or pair[0][:2] != pair[1][:2]:
            return Parted(index, RANKS, pair)
    if both[0] and both[0][-1][0] == RAISED:
        _, about, step = both[0][-1]
        raise RuntimeError(f"both ranks raised {about['error']} in step {step['do']} {step.get('rid', '')}")
    return None


def calls_of(rank, steps):
    store = tempfile.mkdtemp(prefix="case-")
    server = None
    try:
        server = Server(rank, store)
        NOW[:] = [server]
        # Where it blocks for ever, all threads say where they are, and the process ends.
        faulthandler.dump_traceback_later(BLOCKED_S, exit=True)
        for step in steps:
            if rank in step.get("ranks", (rank,)):
                try:
                    server.take(step)
                except NoRoomError:
                    raise
                except Exception as error:
                    # One rank that raises where the other does not has parted from it.
                    text = f"{type(error).__name__}: {error}"[:300]
                    server.calls.append((RAISED, {"error": text}, step))
                    break
        return server.calls
    finally:
        faulthandler.cancel_dump_traceback_later()
        NOW.clear()
        if server is not None:
            server.close()
        shutil.rmtree(store, ignore_errors=True)


# ---- Smaller ----


def shrunk(steps, said):
    """Fewer steps, in which the ranks part in the same call: whole requests first, then single steps."""
    want = compare(steps)
    tried = 0

    def still(own):
        nonlocal tried
        tried += 1
        try:
            found = compare(own)
        except Exception:
            return False
        return found is not None and found.differing == want.differing

    def less(parts, steps_of):
        """Leave out runs of `parts`, half of them at first, then single ones."""
        size = max(1, len(parts) // 2)
        while parts:
            at = 0
            while at < len(parts):
                fewer = parts[:at] + parts[at + size :]
                if still(steps_of(fewer)):
                    parts = fewer
                else:
                    at += size
            if size == 1:
                break
            size = max(1, size // 2)
            said(f"{len(parts)} left after {tried} runs")
        return parts

    every = list(dict.fromkeys(step["rid"] for step in steps if "rid" in step))
    kept = less(every, lambda rids: [s for s in steps if "rid" not in s or s["rid"] in rids])
    steps = [step for step in steps if "rid" not in step or step["rid"] in kept]
    numbers = less(list(range(len(steps))), lambda some: [steps[number] for number in some])
    return [steps[number] for number in numbers]


def rewritten(steps):
    """This file with other steps, and only with the requests that are in them."""
    rids = {step.get("rid") for step in steps}
    requests = {rid: about for rid, about in REQUESTS.items() if rid in rids}
    with open(__file__, encoding="utf-8") as file:
        text = file.read()
    head, _, rest = text.partition("# ---- Steps ----\n")
    _, _, body = rest.partition("# ---- End of steps ----\n")
    own = f"REQUESTS = {listed(requests)}\nSTEPS = {listed(steps)}\n"
    return f"{head}# ---- Steps ----\n{own}# ---- End of steps ----\n{body}"


def listed(values):
    """Python text with one value a line."""
    if isinstance(values, dict):
        return "{\n" + "".join(f"    {key!r}: {value!r},\n" for key, value in values.items()) + "}"
    return "[\n" + "".join(f"    {value!r},\n" for value in values) + "]"


def main(words):
    parted = compare(STEPS)
    if parted is None:
        print("the ranks decide alike")
        return 0
    rids = {step["rid"] for step in STEPS if "rid" in step}
    print(parted.text)
    if "--shrink" not in words:
        return 1
    steps = shrunk(STEPS, lambda text: print("  " + text, file=sys.stderr, flush=True))
    left = {step["rid"] for step in steps if "rid" in step}
    print(f"shrunk from {len(rids)} requests and {len(STEPS)} steps to {len(left)} and {len(steps)}")
    with open(__file__ + ".new", "w", encoding="utf-8") as file:
        file.write(rewritten(steps))
    os.replace(__file__ + ".new", __file__)
    print(compare(steps).text)
    return 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # Threads of the server's libraries need not be waited for.
    os._exit(code)
