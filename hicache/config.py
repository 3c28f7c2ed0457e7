"""A run's configuration: validated once, immutable, units in names."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hicache.errors import ConfigError
from hicache.topology import Topology

PAGES_MAX = 1 << 40


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
    """

    topology: Topology = field(default_factory=Topology)
    page_size_tokens: int = 64
    device_pages: int = 0
    host_pages: int = 0
    hierarchical_cache: bool = True
    write_policy: Literal["write_through"] = "write_through"
    eviction_policy: Literal["lru"] = "lru"
    concurrency: int = 8
    cache_output: bool = True
    decode_steps: Literal["one", "all"] = "all"
    transfer_polls_max: int = 2
    load_back_min_tokens: int = 10
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
