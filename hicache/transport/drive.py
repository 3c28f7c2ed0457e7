"""One rank's lanes on a thread of its own, in real time.

Lanes are coroutines, as in the simulator, and switch only where they wait. What takes real time (a
collective, a storage call) runs on a `Worker`, a thread for blocking calls, and comes back through the
loop's inbox. Nothing in `control/` can tell this loop from the simulator's.

    lanes --await--> OutsideSignal <--inbox-- Worker thread, or another rank's thread

Three things end a loop before its lanes have ended: a lane raises; a wait is older than `timeout_s`; or
nothing in this process can make anything happen any more (`Watch`), which is a hang that need not be waited
for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal

from hicache.core import SidePool
from hicache.loop import Loop, Signal, Task
from hicache.ports import Found
from hicache.schedule import Schedule
from hicache.storage.backend import Backend

# Lanes that only let others run: the processor is given away for so long.
PAUSE_S = 0.0001
# A round of lanes that took this long has done something, and the next may follow at once.
WORK_NS = 50_000
# What a scheduler with nothing to do waits before it looks again.
IDLE_S = 0.0007
# A wait that is told, once, in case it never ends.
SOFT_S = 10.0
CHECK_S = 0.25

End = Literal["hung", "stopped"]


class OutsideSignal(Signal):
    """A signal that any thread may fire; its lane goes on in its own loop."""

    __slots__ = ("is_told", "loop", "since_ns")

    def __init__(self, loop: DriveLoop, reason: str) -> None:
        super().__init__(loop, reason)
        self.loop = loop
        self.since_ns = time.monotonic_ns()
        self.is_told = False

    def fire(self, value: Any = None) -> None:
        self.loop.post(self, value)

    def arrive(self, value: Any) -> None:
        """In the loop's own thread: hand the value over."""
        super().fire(value)


class Watch:
    """Counts what can still make something happen in this process: loops at work, blocking calls under way.

    When nothing can, every loop of the process hangs, and is told so at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy = 0
        self._loops: list[DriveLoop] = []

    def add(self, loop: DriveLoop) -> None:
        with self._lock:
            self._loops.append(loop)
            self._busy += 1

    def remove(self, loop: DriveLoop, *, has_failed: bool) -> None:
        """This loop has ended. A rank that dies takes the others with it, as a process would."""
        with self._lock:
            self._loops.remove(loop)
            if has_failed:
                for other in self._loops:
                    other.stop("stopped", "another rank has failed")
            self._wake(loop)
            self._less()

    def begin_call(self) -> None:
        with self._lock:
            self._busy += 1

    def end_call(self) -> None:
        with self._lock:
            self._less()

    def post(self, loop: DriveLoop, item: tuple[OutsideSignal, Any]) -> None:
        with self._lock:
            self._wake(loop)
            loop.inbox.put(item)

    def fall_asleep(self, loop: DriveLoop) -> bool:
        """This loop has nothing to do but to wait for its inbox; False when something is in there."""
        with self._lock:
            if loop.inbox:
                return False
            loop.is_asleep = True
            self._less()
            return True

    def wake(self, loop: DriveLoop) -> None:
        with self._lock:
            self._wake(loop)

    def _wake(self, loop: DriveLoop) -> None:
        if loop.is_asleep:
            loop.is_asleep = False
            self._busy += 1

    def _less(self) -> None:
        self._busy -= 1
        if self._busy == 0:
            for loop in self._loops:
                loop.stop("hung", "")


class Inbox:
    """What comes from other threads, or from a signal handler, for one loop to take.

    `queue.SimpleQueue` would do, but a timed `get` of it can wait for ever when its time is over at once
    (CPython 3.11 and 3.12: a deadline that has passed becomes a negative timeout).
    """

    __slots__ = ("_bell", "_items")

    def __init__(self) -> None:
        self._items: deque[tuple[OutsideSignal, Any] | _Stop] = deque()
        # Rung is unlocked.
        self._bell = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: tuple[OutsideSignal, Any] | _Stop) -> None:
        self._items.append(item)
        # Rung already, by another thread or just now: once is enough.
        with suppress(RuntimeError):
            self._bell.release()

    def take(self) -> tuple[OutsideSignal, Any] | _Stop:
        return self._items.popleft()

    def wait(self, seconds: float) -> None:
        """Return when something has come, or when the time is over, or for no reason at all."""
        if not self._items:
            self._bell.acquire(timeout=seconds)


@dataclass(frozen=True, slots=True)
class _Stop:
    """The end of a loop, in line with what else comes from outside."""

    end: End
    reason: str


class DriveLoop(Loop):
    """Runs the lanes of one rank until all have finished, one has failed, or it is stopped.

    Args:
        watch: shared by all loops of the process.
        timeout_s: a wait for another rank or for storage that is older ends the run as hung.
        tell: gets one sentence about a wait that has become long.

    Attributes:
        end: why it stopped although no lane failed: `hung`, `stopped` (from outside), or "".
        end_reason: in words.
    """

    def __init__(self, watch: Watch, *, timeout_s: float, tell: Callable[[str], None] | None = None) -> None:
        # Lanes take turns, and nothing is chosen.
        super().__init__(Schedule())
        self.inbox = Inbox()
        self.is_asleep = False
        self.end: End | Literal[""] = ""
        self.end_reason = ""
        self._watch = watch
        self._timeout_ns = int(timeout_s * 1e9)
        self._tell = tell
        self._paused: list[Task] = []
        self._timers: list[tuple[int, Signal]] = []
        self._last_check_ns = time.monotonic_ns()
        # Now, and not when it runs: a process that starts its loops one by one is at work meanwhile.
        watch.add(self)

    def outside(self, reason: str) -> OutsideSignal:
        """A signal for another thread to fire."""
        return OutsideSignal(self, reason)

    def post(self, signal: OutsideSignal, value: Any) -> None:
        """From any thread: `signal` fires with `value`."""
        self._watch.post(self, (signal, value))

    def stop(self, end: End, reason: str) -> None:
        """From any thread, or from a signal handler: end once what has come before has been handed over.

        The first reason stays.
        """
        self.inbox.put(_Stop(end, reason))

    async def sleep(self, seconds: float) -> None:
        signal = self.signal("a moment")
        self._timers.append((time.monotonic_ns() + int(seconds * 1e9), signal))
        await signal

    def run(self, *, on_switch: Callable[[], None] | None = None) -> None:
        try:
            while not self.end and self._turn(on_switch):
                pass
        finally:
            self._watch.remove(self, has_failed=any(task.error is not None for task in self.tasks))

    def _turn(self, on_switch: Callable[[], None] | None) -> bool:
        """Let every lane that can go on do so once, or wait for the inbox; False at the end."""
        self._take_inbox()
        now_ns = time.monotonic_ns()
        self._fire_timers(now_ns)
        if now_ns - self._last_check_ns > CHECK_S * 1e9:
            self._check_waits(now_ns)
        runnable, self._runnable = self._runnable, []
        for task in runnable:
            if on_switch is not None:
                on_switch()
            if not self._resume(task):
                return False
        if not self._runnable:
            if not self._paused and all(task.is_finished for task in self.tasks):
                return False
            if not self._paused or time.monotonic_ns() - now_ns < WORK_NS:
                self._wait(is_pausing=bool(self._paused))
        self._runnable += self._paused
        self._paused.clear()
        return True

    def _resume(self, task: Task) -> bool:
        """Run one lane up to its next wait; False when it raised."""
        try:
            waits_for = task.coroutine.send(None)
        except StopIteration:
            task.is_finished = True
            return True
        except Exception as error:
            task.error = error
            return False
        if waits_for is None:
            self._paused.append(task)
        elif waits_for.is_fired:
            self._runnable.append(task)
        else:
            assert waits_for.waiter is None, f"two lanes wait for {waits_for.reason}"
            task.waits_for = waits_for
            waits_for.waiter = task
        return True

    def _wait(self, *, is_pausing: bool) -> None:
        """Give the processor away until something comes, a timer is due, or it is time to check."""
        seconds = PAUSE_S if is_pausing else CHECK_S
        if self._timers:
            due_s = (min(due_ns for due_ns, _ in self._timers) - time.monotonic_ns()) / 1e9
            seconds = max(0.0, min(seconds, due_s))
        is_asleep = not self._timers and not is_pausing and self._watch.fall_asleep(self)
        self.inbox.wait(seconds)
        if is_asleep:
            self._watch.wake(self)

    def _take_inbox(self) -> None:
        while self.inbox:
            self._arrived(self.inbox.take())

    def _arrived(self, item: tuple[OutsideSignal, Any] | _Stop) -> None:
        if not isinstance(item, _Stop):
            signal, value = item
            signal.arrive(value)
        elif not self.end:
            self.end, self.end_reason = item.end, item.reason

    def _fire_timers(self, now_ns: int) -> None:
        if not self._timers:
            return
        due = [signal for due_ns, signal in self._timers if due_ns <= now_ns]
        self._timers = [(due_ns, signal) for due_ns, signal in self._timers if due_ns > now_ns]
        for signal in due:
            signal.fire()

    def _check_waits(self, now_ns: int) -> None:
        """Tell of long waits, and end the run at one that is too long."""
        self._last_check_ns = now_ns
        for task in self.tasks:
            signal = task.waits_for
            if not isinstance(signal, OutsideSignal):
                continue
            waited_ns = now_ns - signal.since_ns
            limit = f"--timeout {self._timeout_ns / 1e9:g} seconds"
            if waited_ns >= self._timeout_ns:
                self.stop("hung", f"waited for {signal.reason} longer than {limit}")
            elif waited_ns >= SOFT_S * 1e9 and not signal.is_told and self._tell is not None:
                signal.is_told = True
                self._tell(f"{task.name} waits for {signal.reason} for {waited_ns / 1e9:.0f} s now; {limit}")


class Failure:
    """What a blocking call raised, on its way to the lane that asked for it."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


async def outcome(signal: Signal) -> Any:
    """Wait for a signal; a failure that comes is raised here."""
    value = await signal
    if isinstance(value, Failure):
        raise value.error
    return value


class Worker:
    """A thread that makes blocking calls one after the other, in the order in which they were asked for."""

    def __init__(self, name: str, loop: DriveLoop, watch: Watch) -> None:
        self._loop = loop
        self._watch = watch
        self._calls: SimpleQueue[tuple[Callable[[], Any], OutsideSignal] | None] = SimpleQueue()
        # A call that never returns must not keep the process.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def ask(self, call: Callable[[], Any], reason: str) -> OutsideSignal:
        """Have `call` made; await the `outcome` of what is returned."""
        signal = self._loop.outside(reason)
        self._watch.begin_call()
        self._calls.put((call, signal))
        return signal

    def close(self) -> None:
        """Make no call after those that were asked for."""
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, signal = item
            try:
                value = call()
            except BaseException as error:
                value = Failure(error)
            signal.fire(value)
            self._watch.end_call()


class RealClock:
    """This machine's monotonic time, from the start of the run. Implements `ports.Clock`."""

    __slots__ = ("_loop", "_start_ns")

    is_real = True

    def __init__(self, loop: DriveLoop) -> None:
        self._loop = loop
        self._start_ns = time.monotonic_ns()

    def now_ns(self) -> int:
        return time.monotonic_ns() - self._start_ns

    async def idle(self) -> None:
        await self._loop.sleep(IDLE_S)


# What a call of the external tier suffers: seconds before it is made, or None if it never is.
Hold = Callable[[Literal["exists", "get", "set"]], float | None]


class ThreadedStorage:
    """The external tier behind blocking calls, each verb on a thread of its own. Implements `ports.Storage`.

    A lane's calls follow each other; a slow read does not hold up a lookup or a write.

    Args:
        pools: the run's side pools.
        hold: how long a call is held up.
    """

    def __init__(
        self,
        backend: Backend,
        pools: Sequence[SidePool],
        loop: DriveLoop,
        watch: Watch,
        *,
        hold: Hold = lambda call: 0.0,
    ) -> None:
        self._backend = backend
        self._pools = {pool.name: pool for pool in pools}
        self._hold = hold
        self._loop = loop
        self._workers = {
            verb: Worker(f"storage {verb}", loop, watch) for verb in ("exists", "get", "set", "open")
        }

    async def exists(self, hashes: Sequence[str], *, pools: Sequence[str], prefix: Sequence[str]) -> Found:
        await self._held("exists")
        backend = self._backend
        if not pools:
            found = await self._ask("exists", lambda: Found(backend.batch_exists(hashes, prefix=prefix)))
        else:
            side = [self._pools[name] for name in pools]
            found = await self._ask("exists", lambda: backend.batch_exists_v2(hashes, side, prefix=prefix))
        assert isinstance(found, Found)
        return found

    async def get(self, pool: str, hashes: Sequence[str], *, prefix: Sequence[str]) -> list[bytes | None]:
        await self._held("get")
        pages = await self._ask("get", lambda: self._backend.batch_get(pool, hashes, prefix=prefix))
        assert isinstance(pages, list)
        return pages

    async def set(
        self, pool: str, hashes: Sequence[str], pages: Sequence[bytes], *, prefix: Sequence[str]
    ) -> list[bool]:
        await self._held("set")
        done = await self._ask("set", lambda: self._backend.batch_set(pool, hashes, pages, prefix=prefix))
        assert isinstance(done, list)
        return done

    async def open(self) -> None:
        await self._ask("open", self._backend.open)

    async def close(self) -> None:
        await self._ask("open", self._backend.close)

    async def _held(self, call: Literal["exists", "get", "set"]) -> None:
        seconds = self._hold(call)
        if seconds is None:
            # From outside, so that it has a limit like any other wait.
            await self._loop.outside(f"storage {call} that does not return")
        elif seconds:
            await self._loop.sleep(seconds)

    async def _ask(self, verb: str, call: Callable[[], Any]) -> Any:
        return await outcome(self._workers[verb].ask(call, f"storage {verb}"))
