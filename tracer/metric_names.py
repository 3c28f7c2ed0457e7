"""The names of the metrics: SGLang's for its cache and a few of our own, and those that no log can fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Sum and count come with them; a copy of a few pages takes microseconds, of a long prompt a second.
SECONDS = (0.0001, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)
TOKENS = (0, 64, 256, 1024, 4096, 16384, 65536, 262144)
BATCH_PAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

Type = Literal["counter", "gauge", "histogram"]
Number = int | float


@dataclass(frozen=True, slots=True)
class Metric:
    """One name of the exposition.

    Attributes:
        kinds: of records without which nobody can know it.
        needs_page: its tokens are pages times the page's size, which the header must say.
    """

    name: str
    type: Type
    help: str
    kinds: tuple[str, ...] = ()
    needs_page: bool = False
    buckets: Sequence[Number] = ()


METRICS = (
    Metric(
        "sglang:cached_tokens_total",
        "counter",
        "Prompt tokens served by a tier, at the first admission of a request.",
        ("admit",),
    ),
    Metric(
        "sglang:cache_hit_rate",
        "gauge",
        "Share of the admitted prompts' tokens that a tier has served, over the whole log.",
        ("admit",),
    ),
    Metric(
        "sglang:uncached_prompt_tokens_histogram",
        "histogram",
        "Tokens of an admitted prompt that no tier has served.",
        ("admit",),
        buckets=TOKENS,
    ),
    Metric(
        "sglang:hicache_host_used_tokens",
        "gauge",
        "Tokens in host memory at the newest event round.",
        ("event_round", "capacity"),
        needs_page=True,
    ),
    Metric(
        "sglang:hicache_host_total_tokens",
        "gauge",
        "Tokens that host memory has room for.",
        ("capacity",),
        needs_page=True,
    ),
    Metric(
        "sglang:hicache_host_mamba_used_states",
        "gauge",
        "States in host memory, as the books at the end say.",
        ("pool_audit",),
    ),
    Metric(
        "sglang:hicache_host_mamba_total_states",
        "gauge",
        "States that host memory has room for.",
        ("capacity",),
    ),
    Metric(
        "sglang:kv_evictable_tokens",
        "gauge",
        "Tokens on the device that nothing holds, at the newest event round.",
        ("event_round",),
        needs_page=True,
    ),
    Metric(
        "sglang:evicted_tokens_total",
        "counter",
        "Tokens evicted from the device, whether backed up or not.",
        ("evict",),
        needs_page=True,
    ),
    Metric("sglang:load_back_tokens_total", "counter", "Tokens copied from host to device.", ("load_back",)),
    Metric(
        "sglang:load_back_duration_seconds",
        "histogram",
        "From the enqueueing of a copy to the device until its bytes have moved.",
        ("transfer_enqueue", "transfer_done"),
        buckets=SECONDS,
    ),
    Metric(
        "sglang:hicache_backup_tokens_total",
        "counter",
        "Tokens copied from device to host.",
        ("transfer_enqueue", "transfer_done"),
        needs_page=True,
    ),
    Metric(
        "sglang:hicache_backup_duration_seconds",
        "histogram",
        "From the enqueueing of a copy to the host until its bytes have moved.",
        ("transfer_enqueue", "transfer_done"),
        buckets=SECONDS,
    ),
    Metric(
        "sglang:hicache_dropped_tokens_total",
        "counter",
        "Tokens evicted from the device without a copy on the host.",
        ("evict",),
        needs_page=True,
    ),
    Metric(
        "sglang:prefetched_tokens_total",
        "counter",
        "Tokens read from the external tier.",
        ("prefetch_insert",),
    ),
    Metric(
        "sglang:backuped_tokens_total",
        "counter",
        "Tokens that this rank has written to the external tier.",
        ("storage_ack",),
        needs_page=True,
    ),
    Metric(
        "sglang:prefetch_pgs",
        "histogram",
        "Pages of one batch read from the external tier.",
        ("read",),
        buckets=BATCH_PAGES,
    ),
    Metric(
        "sglang:backup_pgs",
        "histogram",
        "Pages of one write to the external tier.",
        ("storage_write",),
        buckets=BATCH_PAGES,
    ),
    Metric(
        "sglang:storage_prefetch_hit_tokens_total",
        "counter",
        "Tokens asked for that the external tier had on every rank.",
        ("prefetch_hit",),
    ),
    Metric(
        "sglang:storage_prefetch_unfulfilled_tokens_total",
        "counter",
        "Tokens asked for and not given.",
        ("prefetch_outcome",),
    ),
    Metric("hicache:records_total", "counter", "Records read of a lane's log."),
    Metric(
        "hicache:records_dropped_total",
        "counter",
        "Records that the writer could not write, by its trailers.",
    ),
    Metric("hicache:records_gone_total", "counter", "Records that a ring had dropped before the first one."),
    Metric("hicache:lanes", "gauge", "Lanes that left a log."),
    Metric("hicache:lanes_torn", "gauge", "Lanes whose log makes no sense from some line on."),
    Metric("hicache:lanes_cut", "gauge", "Lanes without a trailer: killed, or still running."),
    Metric("hicache:steps_idle_total", "counter", "Steps in which nothing happened, told by one record."),
    Metric(
        "hicache:collectives_total",
        "counter",
        "Calls of collectives entered, those of idle steps left out.",
        ("meeting",),
    ),
    Metric("hicache:collectives_open", "gauge", "Calls entered and never left.", ("meeting",)),
    Metric(
        "hicache:transfers_open",
        "gauge",
        "Copies enqueued and not applied at the end of the log.",
        ("transfer_enqueue", "transfer_ack"),
    ),
    Metric("hicache:requests_total", "counter", "Requests received.", ("request",)),
    Metric("hicache:requests_finished_total", "counter", "Requests that have ended.", ("finish",)),
)

# SGLang's other names for its cache, and why no log of ours can give them.
UNKNOWN = (
    ("evictions have no duration in a log", ("eviction_duration_seconds",)),
    (
        "a log counts pages, not bytes",
        (
            "load_back_bytes_total",
            "hicache_backup_bytes_total",
            "prefetch_bandwidth",
            "backup_bandwidth",
        ),
    ),
    (
        "a log does not follow these pools",
        (
            "swa_evictable_tokens",
            "mamba_evictable_tokens",
        ),
    ),
    (
        "a log does not tell these apart",
        (
            "hicache_backup_dropped_tokens_total",
            "storage_prefetch_deferred_tokens_total",
            "hicache_prefetch_aux_alloc_failed_tokens_total",
        ),
    ),
)
# Counters that have a label of their own, whose values are known when they come.
LABELLED = (
    "sglang:cached_tokens_total",
    "sglang:hicache_dropped_tokens_total",
    "sglang:storage_prefetch_unfulfilled_tokens_total",
    "hicache:records_total",
    "hicache:records_dropped_total",
    "hicache:collectives_total",
    "hicache:requests_finished_total",
)
