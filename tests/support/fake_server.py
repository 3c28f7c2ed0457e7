"""A server's modules without the server: the classes that the plugin looks for, with a cache of a few lines.

with FakeServer() as server:          modules in place, the plugin fresh
    plugin.entry()
    server.run(rank)                  the same calls on every rank
"""

from __future__ import annotations

import functools
import sys
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from consensus_checker import sglang_plugin as plugin
from consensus_checker import sglang_session
from consensus_checker.sglang_session import CHECKER

SCHEDULER = "sglang.srt.managers.scheduler"
CACHE = "sglang.srt.mem_cache.unified_radix_cache"
POOLS = "sglang.srt.mem_cache.pool_host.group"
CONTROLLER = "sglang.srt.managers.cache_controller"
PAGE = 16


@dataclass
class Key:
    token_ids: array[int]
    extra_key: str | None = None
    cache_salt: str | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass
class Request:
    rid: str
    origin_input_ids: array[int]
    output_ids: list[int] = field(default_factory=list)
    priority: int = 0
    finished_reason: Any = None
    extra_key: str | None = None
    cache_salt: str | None = None

    def __repr__(self) -> str:
        raise AssertionError("somebody asked for the text of a whole request")


class Vector(list[int]):
    """What the plugin reads of a small tensor."""

    def tolist(self) -> list[int]:
        return list(self)

    def numel(self) -> int:
        return len(self)


def request(rid: str, count: int = 4 * PAGE) -> Request:
    return Request(rid, array("q", range(count)))


class FakeServer:
    """Puts the modules in place and takes them away again.

    Args:
        has_checker: this version has SGLang's own checker, and its cache is decorated with it.
        lacks: names of functions of the cache that this version has not.
        has_floor: too few known functions are too few, as in a server.
    """

    def __init__(
        self, *, has_checker: bool = True, lacks: tuple[str, ...] = (), has_floor: bool = False
    ) -> None:
        self._patch = pytest.MonkeyPatch()
        self._has_floor = has_floor
        self._has_checker = has_checker
        self._lacks = lacks
        # What the stock checker was told.
        self.told: list[str] = []
        self.warnings: list[str] = []

    def __enter__(self) -> FakeServer:
        for name in ("_hooks", "_session"):
            self._patch.setattr(plugin, name, None)
        self._patch.setattr(plugin, "tell", self.warnings.append)
        if not self._has_floor:
            # It has a handful of the functions that a server has.
            self._patch.setattr(sglang_session, "FLOOR", 0.0)
        checker = self._module(CHECKER) if self._has_checker else None
        if checker is not None:
            for name in ("configure", "shutdown", "assert_same", "enabled"):
                setattr(checker, name, functools.partial(self.told.append, name))
        self.scheduler = self._module(SCHEDULER, Scheduler=_scheduler())
        pools = self._module(POOLS, HostPoolGroup=_pools())
        threads = self._module(CONTROLLER, HiCacheController=_controller())
        self.cache = _cache(self._decorated if checker is not None else lambda function: function)
        for name in self._lacks:
            delattr(self.cache, name)
        self._module(CACHE, UnifiedRadixCache=self.cache)
        self.pools, self.threads = pools.HostPoolGroup, threads.HiCacheController
        return self

    def __exit__(self, *_: object) -> None:
        plugin.shutdown()
        self._patch.undo()

    def _module(self, name: str, **contents: Any) -> Any:
        module = ModuleType(name)
        vars(module).update(contents)
        self._patch.setitem(sys.modules, name, module)
        return module

    def _decorated(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """As the stock checker does it: the text of all arguments at every call."""
        source = (
            "def wrapper(*args, **kwargs):\n"
            "    told.append(repr(args))\n"
            "    return function(*args, **kwargs)\n"
        )
        namespace: dict[str, Any] = {"__name__": CHECKER, "told": self.told, "function": function}
        exec(source, namespace)
        wrapper: Callable[..., Any] = namespace["wrapper"]
        return functools.update_wrapper(wrapper, function)

    def run(
        self,
        rank: int,
        *,
        size: int = 2,
        requests: int = 3,
        refuse_at: int | None = None,
        rounds_skipped: tuple[int, ...] = (),
    ) -> Any:
        """What one rank does from its start to its end; its cache."""
        plugin.configure([list(range(size))], rank=rank, world_size=size)
        scheduler = self.scheduler.Scheduler(self.cache(self.pools(), refuse_at))
        for number in range(requests):
            if number not in rounds_skipped:
                scheduler._process_hicache_events()
            scheduler.serve(request(f"r{number}", (4 + number) * PAGE))
        plugin.shutdown()
        return scheduler.tree_cache


def _scheduler() -> type:
    class Scheduler:
        def __init__(self, cache: Any) -> None:
            self.tree_cache = cache
            self.waiting_queue: list[Request] = []

        def _process_hicache_events(self, should_retry_storage_prefetch: bool = True) -> None:
            self.tree_cache.check_hicache_events()

        def serve(self, req: Request) -> None:
            self.waiting_queue.append(req)
            key = Key(req.origin_input_ids)
            self.tree_cache.match_prefix(SimpleNamespace(key=key, req=req))
            self.tree_cache.insert(SimpleNamespace(key=key, prev_prefix_len=0))
            self.waiting_queue.remove(req)

    return Scheduler


def _pools() -> type:
    class HostPoolGroup:
        page_size = PAGE

        def __init__(self) -> None:
            self.free_pages = 100

        def get_entry(self, pool: Any) -> Any:
            return SimpleNamespace(host_pool=self)

        def available_size(self) -> int:
            return self.free_pages * PAGE

        def alloc(self, need_size: int, *, pool: Any = None) -> list[int] | None:
            if need_size // PAGE > self.free_pages:
                return None
            self.free_pages -= need_size // PAGE
            return list(range(need_size))

    return HostPoolGroup


def _controller() -> type:
    class HiCacheController:
        def __init__(self, work: Callable[[], None]) -> None:
            self.work = work

        def backup_thread_func(self) -> None:
            self.work()

        def start(self) -> threading.Thread:
            thread = threading.Thread(target=self.backup_thread_func)
            thread.start()
            return thread

    return HiCacheController


def _cache(decorate: Callable[[Callable[..., Any]], Callable[..., Any]]) -> type:
    class UnifiedRadixCache:
        page_size = PAGE
        pp_rank, pp_size = 0, 1
        token_to_kv_pool_allocator = SimpleNamespace(available_size=lambda: 80 * PAGE)

        def __init__(self, pools: Any, refuse_at: int | None) -> None:
            self.cache_controller = SimpleNamespace(mem_pool_host=pools, write_queue=[])
            self.ongoing_write_through: dict[int, int] = {}
            self.ongoing_load_back: dict[int, int] = {}
            self.ongoing_prefetch: dict[int, int] = {}
            self.ongoing_backup: dict[int, int] = {}
            self.nodes = 0
            self._refuse_at = refuse_at

        def full_evictable_size(self) -> int:
            return self.nodes * PAGE

        def full_protected_size(self) -> int:
            return 0

        def check_hicache_events(self) -> None:
            self._sync_hicache_ready_counts()

        def _sync_hicache_ready_counts(self) -> tuple[int, int, tuple[int, ...], tuple[str, ...]]:
            self._all_reduce(Vector([0, 0, 0, 0]), None)
            return 0, 0, (), ()

        def _all_reduce(self, data: Vector, tp_reduce_op: Any) -> None:
            pass

        @decorate
        def match_prefix(self, params: Any) -> Any:
            return SimpleNamespace(
                last_device_node=1,
                best_match_node=1,
                full_kv_hit_length=0,
                host_hit_length=0,
                device_prefix_len=0,
            )

        def insert(self, params: Any) -> Any:
            self.nodes += 1
            self._execute_kv_backup(self.nodes, params.key.token_ids, {}, ())
            return SimpleNamespace(last_device_node=self.nodes, prefix_len=0)

        def _execute_kv_backup(
            self, node_id: int, device_value: Any, comp_xfers: Any, sidecar_xfers: Any
        ) -> list[int] | None:
            if node_id == self._refuse_at:
                return None
            found: list[int] | None = self.cache_controller.mem_pool_host.alloc(len(device_value))
            return found

        def evict_host(self, num_tokens: int, component_type: str = "full") -> int:
            return num_tokens

    return UnifiedRadixCache
