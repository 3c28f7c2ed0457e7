from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from hicache.core import SIDE_POOLS, SidePool
from hicache.errors import StorageError
from hicache.loop import Loop
from hicache.ports import Found
from hicache.schedule import Schedule
from hicache.sim.faults import Fault, FaultPlan
from hicache.sim.storage import FaultyBackend, SimStorage
from hicache.topology import Topology

ABCD = ["a", "b", "c", "d"]


@dataclass
class Shelf:
    """A backend that fits on a screen."""

    pages: dict[tuple[str, str], bytes] = field(default_factory=dict)
    is_open: bool = False

    def open(self) -> None:
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    def exists(self, name: str) -> bool:
        return ("kv", name) in self.pages

    def get(self, pool: str, name: str) -> bytes | None:
        return self.pages.get((pool, name))

    def set(self, pool: str, name: str, page: bytes) -> bool:
        self.pages[pool, name] = page
        return True

    def batch_exists(self, hashes: Sequence[str], *, prefix: Sequence[str]) -> int:
        return next((index for index, name in enumerate(hashes) if not self.exists(name)), len(hashes))

    def batch_exists_v2(
        self, hashes: Sequence[str], pools: Sequence[SidePool], *, prefix: Sequence[str]
    ) -> Found:
        pages = self.batch_exists(hashes, prefix=prefix)
        states = [index + 1 for index, name in enumerate(hashes) if ("mamba", name) in self.pages]
        return Found(pages, {pool.name: pages for pool in pools}, states)

    def batch_get(self, pool: str, hashes: Sequence[str], *, prefix: Sequence[str]) -> list[bytes | None]:
        return [self.get(pool, name) for name in hashes]

    def batch_set(
        self, pool: str, hashes: Sequence[str], pages: Sequence[bytes], *, prefix: Sequence[str]
    ) -> list[bool]:
        return [self.set(pool, name, page) for name, page in zip(hashes, pages, strict=True)]

    def clear(self) -> int:
        self.pages.clear()
        return 0

    def get_stats(self) -> dict[str, int]:
        return {"pages": len(self.pages)}


def full_shelf() -> Shelf:
    return Shelf({("kv", name): name.encode() for name in ABCD})


def faulty(*texts: str, shelf: Shelf | None = None) -> tuple[FaultyBackend, Shelf, list[str]]:
    plan = FaultPlan([Fault.parse(text, Topology()) for text in texts])
    shelf = shelf or full_shelf()
    return FaultyBackend(shelf, plan.storage(0)), shelf, plan.fired


def exists(backend: FaultyBackend) -> int:
    return backend.batch_exists(ABCD, prefix=())


def get(backend: FaultyBackend) -> list[bytes | None]:
    return backend.batch_get("kv", ABCD, prefix=())


def test_without_faults_it_is_the_backend_it_wraps() -> None:
    backend, shelf, _ = faulty()
    backend.open()
    assert shelf.is_open
    assert (exists(backend), get(backend)) == (4, [b"a", b"b", b"c", b"d"])
    assert backend.exists("c")
    assert not backend.exists("x")
    assert backend.get("kv", "b") == b"b"
    assert backend.set("kv", "x", b"x")
    assert backend.get_stats() == {"pages": 5}
    backend.close()
    assert not shelf.is_open


def test_a_failing_call_changes_nothing() -> None:
    backend, shelf, _ = faulty("storage_fail:rank=0,call=set,nth=1")
    with pytest.raises(StorageError):
        backend.batch_set("kv", ["x"], [b"x"], prefix=())
    assert ("kv", "x") not in shelf.pages


def test_a_short_get_has_nothing_for_the_last_pages() -> None:
    backend, _, fired = faulty("storage_short:rank=0,nth=1,pages=3")
    assert get(backend) == [b"a", None, None, None]
    assert get(backend) == [b"a", b"b", b"c", b"d"]
    assert fired == ["storage_short on rank 0: get 1"]


def test_a_short_lookup_and_a_short_write_lose_the_last_pages_too() -> None:
    backend, shelf, _ = faulty(
        "storage_short:rank=0,call=exists,nth=1,pages=1", "storage_short:rank=0,call=set,nth=1,pages=1"
    )
    assert exists(backend) == 3
    assert backend.batch_set("kv", ["x", "y"], [b"x", b"y"], prefix=()) == [True, False]
    assert ("kv", "y") not in shelf.pages


def test_a_call_cannot_be_shorter_than_nothing() -> None:
    backend, _, _ = faulty(
        "storage_short:rank=0,call=exists,nth=1,pages=9", "storage_short:rank=0,call=get,nth=1,pages=9"
    )
    assert exists(backend) == 0
    assert get(backend) == [None] * 4


def test_a_lost_shard_is_a_hole_in_the_middle_until_it_is_written_again() -> None:
    backend, _, fired = faulty("shard_missing:rank=0,nth=2")
    assert exists(backend) == 4
    assert exists(backend) == 2
    assert get(backend) == [b"a", b"b", None, b"d"]
    assert exists(backend) == 2
    backend.batch_set("kv", ["c"], [b"c"], prefix=())
    assert exists(backend) == 4
    assert fired == ["shard_missing on rank 0: page c"]


def test_where_nothing_is_stored_no_shard_is_lost() -> None:
    backend, _, fired = faulty("shard_missing:rank=0,nth=1", shelf=Shelf())
    assert exists(backend) == 0
    assert fired == []


def test_a_cut_lookup_offers_no_length_beyond_it() -> None:
    shelf = full_shelf()
    shelf.pages |= {("mamba", "b"): b"", ("mamba", "d"): b""}
    backend, _, _ = faulty("storage_short:rank=0,call=exists,nth=1,pages=2", shelf=shelf)
    found = backend.batch_exists_v2(ABCD, [SIDE_POOLS["mamba"]], prefix=())
    assert found == Found(2, {"mamba": 4}, [2])


# Time


def turns(call: Coroutine[Any, Any, Any]) -> tuple[int, Any]:
    """Turns the call waits, and what it returns."""
    results: list[Any] = []

    async def lane() -> None:
        results.append(await call)

    loop = Loop(Schedule())
    loop.spawn("storage", lane())
    count = -1

    def look() -> None:
        nonlocal count
        count += 1

    loop.run(on_switch=look)
    (parked,) = [task.waits_for.reason for task in loop.parked if task.waits_for] or [""]
    loop.close()
    return count, results[0] if results else parked


def sim(*texts: str, answers: list[int] | None = None, polls_max: int = 0) -> SimStorage:
    plan = FaultPlan([Fault.parse(text, Topology()) for text in texts])
    return SimStorage(
        full_shelf(), [SIDE_POOLS["mamba"]], Schedule(answers=answers or []), polls_max, plan.storage(0)
    )


def test_a_dull_call_takes_no_time() -> None:
    assert turns(sim(polls_max=3).get("kv", ["a"], prefix=())) == (0, [b"a"])


def test_chance_and_faults_take_time() -> None:
    storage = sim("storage_slow:rank=0,call=get,nth=1,steps=4", answers=[2], polls_max=3)
    assert turns(storage.get("kv", ["a"], prefix=())) == (6, [b"a"])


def test_a_call_fails_after_its_time_and_not_before() -> None:
    storage = sim("storage_fail:rank=0,call=set,nth=1", answers=[3], polls_max=3)

    async def failing() -> str:
        try:
            await storage.set("kv", ["x"], [b"x"], prefix=())
        except StorageError as error:
            return str(error)
        return ""

    assert turns(failing()) == (3, "set 1 on rank 0: fails as storage_fail says")


def test_a_call_that_never_returns_parks_its_lane() -> None:
    storage = sim("storage_never:rank=0,call=exists,nth=1")
    assert turns(storage.exists(ABCD, pools=(), prefix=())) == (0, "storage exists that does not return")


def test_a_lookup_asks_for_side_pools_only_where_there_are_some() -> None:
    storage = sim()
    assert turns(storage.exists(ABCD, pools=(), prefix=()))[1] == Found(4)
    assert turns(storage.exists(ABCD, pools=("mamba",), prefix=()))[1] == Found(4, {"mamba": 4}, [])
