"""Where in SGLang the classes are that the plugin looks at, and what a thread's lane is called."""

from __future__ import annotations

CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache."
# Of versions up to 0.5.18: the cache of models with plain attention. 0.5.20 has it, and makes none.
FORMER_MODULE = "sglang.srt.mem_cache.hiradix_cache"
FORMER_CACHE = f"{FORMER_MODULE}.HiRadixCache."
HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController."
CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController."
HOST_POOLS = "sglang.srt.mem_cache.pool_host.group.HostPoolGroup."
ALLOCATORS = "sglang.srt.mem_cache.allocator."
PAGED = f"{ALLOCATORS}paged.PagedTokenToKVPoolAllocator."
FILE_STORE = "sglang.srt.mem_cache.hicache_storage.HiCacheFile."
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."

PREFETCH, IO, SYNC, BACKUP = "prefetch", "io", "sync", "backup"
LANES = (PREFETCH, IO, SYNC, BACKUP)

# Points of the cache that the server has made; of the other one nothing is missing. The former's pools were
# in one place or another.
UNIFIED, FORMER, FORMER_POOLS = "unified", "former", "former_pools"
# Points of what most servers do not run.
DISAGGREGATED, SPECULATIVE, POOLS = "disaggregated", "speculative", "pools"
EXTRA = frozenset({DISAGGREGATED, SPECULATIVE, POOLS})

# Free pages as they were last looked at: physically at each round and each allocation, counted in between.
HOST_FREE = "_see.host_room"
DEVICE_FREE = "_see.device_room"
# What was there when somebody asked for room: behind the call all ranks may have the same again.
ROOMS = {"_h_device": DEVICE_FREE, "_h_host": HOST_FREE}

# What is read of a meeting, when it is entered and when it is left.
MET = {
    "axis": "_h_meet[0]",
    "purpose": "_h_meet[1]",
    "op": "'all_reduce'",
    "reduce": "_h_meet[2]",
    "numel": "_h_meet[3]",
    "group": "_h_meet[4]",
    "group_seq": "_h_meet[5]",
}
