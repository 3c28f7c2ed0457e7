"""Faults of our own in a real server, as a plugin beside ours: one thing goes otherwise on one rank, once.

`tests.peers.rig.with_faults` puts it into an environment. It comes first, so that its functions are below
ours, as if the server itself were wrong. TEST_FAULT names the fault, TEST_FAULT_AT which call, and
TEST_FAULT_RANK whose.
"""

# mypy: ignore-errors
import os
import time


def entry():
    fault = os.environ.get("TEST_FAULT")
    if fault:
        FAULTS[fault]()


def is_due(seen=[0]):  # noqa: B006  one fault in a process
    import torch

    if torch.distributed.get_rank() != int(os.environ["TEST_FAULT_RANK"]):
        return False
    seen[0] += 1
    if seen[0] != int(os.environ["TEST_FAULT_AT"]):
        return False
    print(f"TEST fault fires: {os.environ['TEST_FAULT']}", flush=True)
    return True


def around(path, wrap):
    from importlib import import_module

    module, owner, name = path.rsplit(".", 2)
    found = getattr(import_module("sglang.srt." + module), owner)
    function = getattr(found, name)
    while getattr(function, "__globals__", {}).get("__name__", "").endswith("rank_consensus_checker"):
        function = function.__wrapped__
    setattr(found, name, wrap(function))


CACHE = "mem_cache.unified_radix_cache.UnifiedRadixCache."
CONTROLLER = "managers.cache_controller.HiCacheController."
HYBRID = "mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController."
FILES = "mem_cache.hicache_storage.HiCacheFile."


def hung_read():
    def wrap(function):
        def batch_get(self, keys, target_locations=None, target_sizes=None):
            if is_due():
                time.sleep(1e6)
            return function(self, keys, target_locations, target_sizes)

        return batch_get

    around(FILES + "batch_get", wrap)


def dead_sync_thread():
    def wrap(function):
        def _reduce_prefetch_ack(self, ack):
            if is_due():
                raise LookupError("a fault of the test")
            return function(self, ack)

        return _reduce_prefetch_ack

    around(HYBRID + "_reduce_prefetch_ack", wrap)


def extra_touch():
    """Nodes that were used a while ago become the ones used last, in each of the next 20 matches."""

    def wrap(function):
        def match_prefix(self, params):
            result = function(self, params)
            KEYS.append(params.key)
            if is_due():
                TOUCHES.extend(range(20))
            if TOUCHES:
                TOUCHES.pop()
                function(self, type(params)(key=KEYS[max(0, len(KEYS) - 9)]))
            return result

        return match_prefix

    around(CACHE + "match_prefix", wrap)


KEYS, TOUCHES = [], []


def local_counts():
    """One ack fewer than the group has agreed on."""

    def wrap(function):
        def _sync_hicache_ready_counts(self):
            writes, *rest = function(self)
            return (writes - 1 if writes and is_due() else writes, *rest)

        return _sync_hicache_ready_counts

    around(CACHE + "_sync_hicache_ready_counts", wrap)


def skipped_prefetch():
    def wrap(function):
        def prefetch_from_storage(self, request, last_host_node_id, new_input_tokens, *rest, **more):
            if is_due():
                return None
            return function(self, request, last_host_node_id, new_input_tokens, *rest, **more)

        return _with_signature(prefetch_from_storage, function)

    around(CACHE + "prefetch_from_storage", wrap)


def leaked_page():
    """A page of the device is taken and never given back."""

    def wrap(function):
        def alloc(self, need_size):
            if is_due():
                function(self, self.page_size)
            return function(self, need_size)

        return alloc

    around("mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.alloc", wrap)


def early_flush():
    """A backup goes off on its own, in a transfer that the other ranks merge with the next one."""

    def wrap(function):
        def _execute_kv_backup(self, node_id, device_value, comp_xfers, sidecar_xfers):
            result = function(self, node_id, device_value, comp_xfers, sidecar_xfers)
            if is_due():
                self.cache_controller.start_writing()
            return result

        return _execute_kv_backup

    around(CACHE + "_execute_kv_backup", wrap)


def reordered_queue():
    def wrap(function):
        def _process_hicache_events(self, should_retry_storage_prefetch=True):
            if len(self.waiting_queue) > 1 and is_due():
                self.waiting_queue.reverse()
            return function(self, should_retry_storage_prefetch)

        return _process_hicache_events

    around("managers.scheduler.Scheduler._process_hicache_events", wrap)


def other_tokens():
    """A prompt that differs in one token: a request that was not received alike."""

    def wrap(function):
        def insert(self, params):
            if len(params.key) > 100 and is_due():
                params.key.token_ids[50] += 1
            return function(self, params)

        return insert

    around(CACHE + "insert", wrap)


def raising_hooks():
    """No fault of the server: every look of our own plugin raises, at every call, on every rank."""
    from dataclasses import replace

    from consensus_checker import sglang_hooks, sglang_points

    raised = {}

    def fail(self, error):
        raised[self.point.path] = raised.get(self.point.path, 0) + 1
        if sum(raised.values()) % 1000 == 0:
            often = sum(times >= 1000 for times in raised.values())
            text = f"TEST {len(raised)} hooks have raised {sum(raised.values())} times"
            print(f"{text}, {often} of them 1000 times", flush=True)

    sglang_hooks.Hook.fail = fail
    # Half of them before the call, half behind it.
    sglang_points.POINTS = tuple(
        replace(point, before={"_h_none": "1 // 0"}, call=None)
        if number % 2 or point.values is None
        else replace(point, call=None, values=dict.fromkeys(point.values, "1 // 0"))
        for number, point in enumerate(sglang_points.POINTS)
    )


def _with_signature(function, like):
    import inspect

    function.__signature__ = inspect.signature(like)
    return function


FAULTS = {
    own.__name__: own
    for own in (
        hung_read,
        dead_sync_thread,
        extra_touch,
        local_counts,
        skipped_prefetch,
        leaked_page,
        early_flush,
        reordered_queue,
        other_tokens,
        raising_hooks,
    )
}
