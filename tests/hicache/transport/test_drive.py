from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from hicache.core import SIDE_POOLS, SidePool
from hicache.errors import StorageError
from hicache.loop import PAUSE, Mailbox, never
from hicache.ports import Found
from hicache.transport.drive import DriveLoop, RealClock, ThreadedStorage, Watch, Worker, outcome
from tests.support.lanes import run_in_threads


def drive(*, timeout_s: float = 20.0, tell: Any = None) -> tuple[DriveLoop, Watch]:
    watch = Watch()
    return DriveLoop(watch, timeout_s=timeout_s, tell=tell), watch


def test_lanes_take_turns_and_hand_things_to_each_other() -> None:
    loop, _ = drive()
    box: Mailbox[int] = Mailbox(loop.signal, "numbers")
    got: list[int] = []

    async def take() -> None:
        while len(got) < 3:
            got.append(await box.get())

    async def put() -> None:
        for number in range(3):
            box.put(number)
            await PAUSE

    loop.spawn("take", take())
    loop.spawn("put", put())
    loop.run()
    assert (got, loop.end) == ([0, 1, 2], "")


def test_a_lane_gets_what_another_thread_fires() -> None:
    loop, watch = drive()
    got: list[object] = []

    async def wait() -> None:
        signal = loop.outside("news")
        watch.begin_call()
        threading.Timer(0.02, lambda: (signal.fire("value"), watch.end_call())).start()
        got.append(await signal)

    loop.spawn("wait", wait())
    loop.run()
    assert got == ["value"]


def test_other_lanes_run_while_one_waits_for_a_blocking_call() -> None:
    loop, watch = drive()
    worker = Worker("slow", loop, watch)
    may_end = threading.Event()
    order: list[str] = []

    async def slow() -> None:
        order.append(await outcome(worker.ask(lambda: may_end.wait(10) and "answer", "an answer")))

    async def quick() -> None:
        await PAUSE
        order.append("quick")
        may_end.set()

    loop.spawn("slow", slow())
    loop.spawn("quick", quick())
    loop.run()
    worker.close()
    assert order == ["quick", "answer"]


def test_calls_of_a_worker_are_made_in_the_order_in_which_they_were_asked_for() -> None:
    loop, watch = drive()
    worker = Worker("one", loop, watch)
    made: list[int] = []

    async def ask() -> None:
        signals = [worker.ask(lambda number=number: made.append(number), "x") for number in range(20)]
        for signal in reversed(signals):
            await outcome(signal)

    loop.spawn("ask", ask())
    loop.run()
    assert made == list(range(20))


def test_what_a_blocking_call_raises_is_raised_in_its_lane() -> None:
    loop, watch = drive()
    worker = Worker("one", loop, watch)

    def fail() -> None:
        raise ValueError("no")

    async def ask() -> None:
        await outcome(worker.ask(fail, "x"))

    task = loop.spawn("ask", ask())
    loop.run()
    assert str(task.error) == "no"


def test_a_process_in_which_nothing_can_happen_any_more_hangs_at_once() -> None:
    watch = Watch()
    loops = [DriveLoop(watch, timeout_s=1000) for _ in range(3)]

    async def wait(loop: DriveLoop) -> None:
        await loop.outside("something that nobody fires")

    for loop in loops:
        loop.spawn("wait", wait(loop))
    start = time.monotonic()
    run_in_threads(loops)
    assert time.monotonic() - start < 10
    assert [loop.end for loop in loops] == ["hung"] * 3


def test_a_lane_that_knows_that_nothing_will_come_is_a_hang_as_well() -> None:
    loop, _ = drive(timeout_s=1000)

    async def wait() -> None:
        await never("nothing for 5000 steps")

    task = loop.spawn("wait", wait())
    loop.run()
    assert (loop.end, task.waits_for is not None and task.waits_for.reason) == (
        "hung",
        "nothing for 5000 steps",
    )


def test_a_wait_that_is_too_long_hangs_although_other_lanes_go_on() -> None:
    loop, watch = drive(timeout_s=0.3)
    worker = Worker("slow", loop, watch)
    clock = RealClock(loop)
    may_end = threading.Event()

    async def slow() -> None:
        await outcome(worker.ask(lambda: may_end.wait(10), "all_reduce tp0/main #7"))

    async def busy() -> None:
        while True:
            await clock.idle()

    loop.spawn("slow", slow())
    loop.spawn("busy", busy())
    loop.run()
    may_end.set()
    assert (loop.end, loop.end_reason) == (
        "hung",
        "waited for all_reduce tp0/main #7 longer than --timeout 0.3 seconds",
    )


def test_a_long_wait_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.transport.drive.SOFT_S", 0.05)
    told: list[str] = []
    loop, watch = drive(timeout_s=5.0, tell=told.append)
    worker = Worker("slow", loop, watch)
    may_end = threading.Event()

    async def slow() -> None:
        await outcome(worker.ask(lambda: may_end.wait(0.8), "recv pp0/main:0 #3"))

    loop.spawn("rank 1 scheduler", slow())
    loop.run()
    assert told == ["rank 1 scheduler waits for recv pp0/main:0 #3 for 0 s now; --timeout 5 seconds"]


def test_a_rank_that_fails_ends_the_others() -> None:
    watch = Watch()
    one, other = (DriveLoop(watch, timeout_s=1000) for _ in range(2))

    async def fail() -> None:
        raise AssertionError("books do not match")

    async def wait() -> None:
        await other.outside("a call of the other rank")

    one.spawn("fail", fail())
    other.spawn("wait", wait())
    run_in_threads([one, other])
    assert (other.end, other.end_reason) == ("stopped", "another rank has failed")


def test_a_loop_can_be_stopped_from_outside_and_the_first_reason_stays() -> None:
    loop, _ = drive()

    async def busy() -> None:
        while True:
            await PAUSE

    loop.spawn("busy", busy())
    threading.Timer(0.02, lambda: (loop.stop("stopped", "first"), loop.stop("hung", "second"))).start()
    loop.run()
    assert (loop.end, loop.end_reason) == ("stopped", "first")


def test_lanes_that_only_let_others_run_leave_the_processor_alone() -> None:
    loop, _ = drive()

    async def pause() -> None:
        until = time.monotonic() + 0.4
        while time.monotonic() < until:
            await PAUSE

    loop.spawn("pause", pause())
    start = time.thread_time()
    loop.run()
    assert time.thread_time() - start < 0.3


def test_real_time_goes_on_while_a_lane_is_idle() -> None:
    loop, _ = drive()
    clock = RealClock(loop)
    times: list[int] = []

    async def idle() -> None:
        times.append(clock.now_ns())
        await clock.idle()
        times.append(clock.now_ns())

    loop.spawn("idle", idle())
    loop.run()
    assert times[1] - times[0] >= 700_000


class Shelf:
    """A backend whose calls say on which thread they are made."""

    def __init__(self) -> None:
        self.threads: dict[str, str] = {}
        self.is_open = False

    def open(self) -> None:
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    def batch_exists(self, hashes: Sequence[str], *, prefix: Sequence[str]) -> int:
        self.threads["exists"] = threading.current_thread().name
        return len(hashes) - 1

    def batch_exists_v2(
        self, hashes: Sequence[str], pools: Sequence[SidePool], *, prefix: Sequence[str]
    ) -> Found:
        return Found(len(hashes), {pool.name: 1 for pool in pools})

    def batch_get(self, pool: str, hashes: Sequence[str], *, prefix: Sequence[str]) -> list[bytes | None]:
        self.threads["get"] = threading.current_thread().name
        raise StorageError(f"{pool} of {len(hashes)} pages is out of reach")

    def batch_set(
        self, pool: str, hashes: Sequence[str], pages: Sequence[bytes], *, prefix: Sequence[str]
    ) -> list[bool]:
        self.threads["set"] = threading.current_thread().name
        return [True] * len(pages)


def test_each_verb_of_storage_has_a_thread_of_its_own_and_failures_come_back() -> None:
    loop, watch = drive()
    shelf: Any = Shelf()
    storage = ThreadedStorage(shelf, [SIDE_POOLS["draft"]], loop, watch)
    got: list[Any] = []

    async def use() -> None:
        await storage.open()
        got.append(shelf.is_open)
        got.append(await storage.exists(["a", "b"], pools=(), prefix=()))
        got.append(await storage.exists(["a", "b"], pools=("draft",), prefix=()))
        got.append(await storage.set("kv", ["a"], [b"x"], prefix=()))
        try:
            await storage.get("kv", ["a"], prefix=())
        except StorageError as error:
            got.append(str(error))

    loop.spawn("use", use())
    loop.run()
    assert got == [True, Found(1), Found(2, {"draft": 1}), [True], "kv of 1 pages is out of reach"]
    assert len(set(shelf.threads.values()) - {threading.current_thread().name}) == 3


def test_a_storage_call_that_never_returns_leaves_its_lane_waiting() -> None:
    loop, watch = drive()
    shelf: Any = Shelf()
    storage = ThreadedStorage(shelf, [], loop, watch, hold=lambda call: None if call == "exists" else 0.0)

    async def use() -> None:
        await storage.exists(["a"], pools=(), prefix=())

    task = loop.spawn("use", use())
    loop.run()
    assert (loop.end, task.waits_for is not None and task.waits_for.reason) == (
        "hung",
        "storage exists that does not return",
    )
