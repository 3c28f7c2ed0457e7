"""A run's configuration: validated once, immutable, units in names."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hicache.core import SIDE_POOLS, SidePool
from hicache.errors import ConfigError
from hicache.topology import Topology

PAGES_MAX = 1 << 40

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
EvictionPolicy = Literal["lru", "lfu", "fifo", "filo", "mru", "priority", "slru", "tlru"]
PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]
StorageBackend = Literal["none", "memory", "file"]

# Distinct inserting requests that make a node worth a backup; 0 never on insert.
BACKUP_THRESHOLDS: dict[WritePolicy, int] = {
    "write_through": 1,
    "write_through_selective": 2,
    "write_back": 0,
}


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """The external tier and how it is read ahead.

    Attributes:
        backend: `none` for no external tier at all.
        attached: whether it is attached when the run starts; else a command attaches it later.
        directory: of the file backend.
        fsync: whether a file is on disk before its page counts as written.
        prefetch_policy: when a prefetch that has not ended may be cut short at admission.
        prefetch_threshold_tokens: shorter spans and shorter hits are not fetched.
        prefetch_timeout_base_s, prefetch_timeout_per_ki_token_s: the deadline of policy `timeout` is
            base + pages asked for x (page size / 1024 x per_ki_token), from the first blocked admission.
        prefetch_capacity_fraction: of the host's tokens that prefetches may occupy.
        retry_poll_interval: scheduling passes between a miss and its next try; 0 never tries again.
        retry_max_attempts: tries of one request.
        pass_prefix_keys: whether the backend is told the hashes of the pages before.
        batch_pages: pages of one read or write call.
        polls_max: in the simulator, a call takes up to this many turns, by chance, on each rank for itself.
    """

    backend: StorageBackend = "none"
    attached: bool = True
    directory: str = ""
    fsync: bool = False
    prefetch_policy: PrefetchPolicy = "timeout"
    prefetch_threshold_tokens: int = 256
    prefetch_timeout_base_s: float = 1.0
    prefetch_timeout_per_ki_token_s: float = 0.25
    prefetch_capacity_fraction: float = 0.5
    retry_poll_interval: int = 8
    retry_max_attempts: int = 8
    pass_prefix_keys: bool = False
    batch_pages: int = 128
    polls_max: int = 3

    def __post_init__(self) -> None:
        if self.prefetch_threshold_tokens < 0:
            raise ConfigError(
                f"prefetch_threshold {self.prefetch_threshold_tokens}: expected 0 or more tokens"
            )
        if self.batch_pages < 1:
            raise ConfigError(f"storage batch of {self.batch_pages} pages: expected at least 1")
        if not 0 < self.prefetch_capacity_fraction <= 1:
            raise ConfigError(
                f"prefetch capacity {self.prefetch_capacity_fraction}: expected above 0, at most 1"
            )
        for name in ("prefetch_timeout_base_s", "prefetch_timeout_per_ki_token_s"):
            if not 0 <= getattr(self, name) < 1e6:
                raise ConfigError(
                    f"{name.removesuffix('_s')} {getattr(self, name)}: expected 0..1000000 seconds"
                )
        if self.retry_poll_interval < 0 or self.retry_max_attempts < 0 or not 0 <= self.polls_max <= 1000:
            raise ConfigError("storage retries and polls are whole numbers from 0 on")
        if self.backend == "file" and not self.directory:
            raise ConfigError("--hicache-storage-backend file needs a folder (file_storage_path)")


@dataclass(frozen=True, slots=True)
class Config:
    """What every rank of a run agrees on before it starts.

    Attributes:
        page_size_tokens: tokens a page; every key, match and insert is a multiple of it.
        device_pages, host_pages: capacity of a tier on each rank; 0 means no limit.
        hierarchical_cache: whether there is a host tier at all.
        concurrency: requests in flight in one replica; 1 is strictly one after the other.
        cache_output: whether generated tokens take pages and enter the tree.
        decode_steps: a request's decode takes one step, or one step a token.
        transfer_polls_max: a copy takes up to this many polls more than its first, by chance and on
            each rank for itself; 0 makes every copy done at its first poll.
        load_back_min_tokens: a shorter host hit is recomputed instead.
        write_policy: when a node is copied to the host; `write_back` only when it leaves the device.
        chunked_prefill_tokens: prompt tokens of one prefill batch; a longer prompt is computed in chunks.
            0 is no limit.
        decode_reserve_percent: share of its answer that a request has pages set aside for when it is
            admitted. Below 100 a decode may run out, and then somebody is retracted.
        priority_scheduling: higher `Request.priority` is admitted first, then who came first.
        side_pools: names of pools beside the KV pages, of `core.SIDE_POOLS`.
        side_pool_slots: host slots of each side pool that has its own; 0 means no limit.
        in_band_digest: the event round carries a running digest of all compared decisions.
        meeting_guard: every meeting carries its purpose and its number, and the first that is paired
            wrongly ends the run.
    """

    topology: Topology = field(default_factory=Topology)
    page_size_tokens: int = 64
    device_pages: int = 0
    host_pages: int = 0
    hierarchical_cache: bool = True
    write_policy: WritePolicy = "write_through"
    eviction_policy: EvictionPolicy = "lru"
    storage: StorageConfig = field(default_factory=StorageConfig)
    concurrency: int = 8
    cache_output: bool = True
    decode_steps: Literal["one", "all"] = "all"
    transfer_polls_max: int = 2
    load_back_min_tokens: int = 10
    chunked_prefill_tokens: int = 0
    decode_reserve_percent: int = 100
    priority_scheduling: bool = False
    side_pools: tuple[str, ...] = ()
    side_pool_slots: int = 0
    in_band_digest: bool = False
    meeting_guard: bool = False
    seed: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.page_size_tokens <= 1 << 20:
            raise ConfigError(f"--page-size {self.page_size_tokens}: expected 1..1048576 tokens")
        for name in ("device_pages", "host_pages"):
            if not 0 <= getattr(self, name) <= PAGES_MAX:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} {getattr(self, name)}: expected 0 (no limit) to {PAGES_MAX}")
        if self.concurrency < 1:
            raise ConfigError(f"--concurrency {self.concurrency}: at least one request must be in flight")
        if not 0 <= self.transfer_polls_max <= 1000:
            raise ConfigError(f"transfer polls {self.transfer_polls_max}: expected 0..1000")
        if self.chunked_prefill_tokens < 0 or 0 < self.chunked_prefill_tokens < self.page_size_tokens:
            raise ConfigError(
                f"--chunked-prefill-size {self.chunked_prefill_tokens}: expected 0 (no limit) or "
                f"at least one page of {self.page_size_tokens} tokens"
            )
        if not 0 <= self.decode_reserve_percent <= 100:
            raise ConfigError(f"decode reserve {self.decode_reserve_percent} %: expected 0..100")
        for name in self.side_pools:
            if name not in SIDE_POOLS:
                raise ConfigError(f"--side-pools {name}: expected some of {', '.join(SIDE_POOLS)}")
        if len(set(self.side_pools)) < len(self.side_pools):
            raise ConfigError(f"--side-pools {','.join(self.side_pools)}: a pool is named twice")
        if self.storage.backend != "none" and not self.hierarchical_cache:
            raise ConfigError("--hicache-storage-backend needs the host tier; drop --no-hierarchical-cache")
        if self.write_policy == "write_back" and not self.hierarchical_cache:
            raise ConfigError(
                "--hicache-write-policy write_back needs the host tier; drop --no-hierarchical-cache"
            )

    @property
    def pools(self) -> tuple[SidePool, ...]:
        """The side pools that nodes carry, in the order of `core.POOL_NAMES`."""
        return tuple(SIDE_POOLS[name] for name in SIDE_POOLS if name in self.side_pools)

    def describe(self) -> dict[str, Any]:
        """Plain values for `run.json` and the log's header; both ways of saying the tensor size."""
        plain = asdict(self)
        sizes = plain.pop("topology")
        world = self.topology
        return {
            **sizes,
            "world_size": world.world_size,
            # SGLang's --tp-size counts a whole stage under DP attention; ours is the attention size.
            "sglang_tp_size": world.dp * world.cp * world.tp,
            **plain,
        }

    def digest(self, *extra: str) -> str:
        """16 hex characters over the configuration and whatever else makes a run what it is."""
        text = json.dumps([self.describe(), *extra], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
