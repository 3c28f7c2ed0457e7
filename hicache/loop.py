"""A coroutine loop of our own: one thread, no clock, every switch decided by the Schedule.

`async` means one thing here: this may meet another rank or wait for bytes. A lane that can go on goes
on; a lane that waits is parked on a `Signal`. When nobody can go on and somebody is still parked, the
run hangs, and the loop says who stands where instead of waiting for a timeout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from hicache.schedule import Schedule

Item = TypeVar("Item")


class Signal:
    """Something to wait for, fired once with a value."""

    __slots__ = ("_loop", "is_fired", "reason", "value", "waiter")

    def __init__(self, loop: Loop | None, reason: str = "") -> None:
        self._loop = loop
        self.reason = reason
        self.is_fired = False
        self.value: Any = None
        self.waiter: Task | None = None

    def fire(self, value: Any = None) -> None:
        assert not self.is_fired, f"signal fired twice: {self.reason}"
        self.is_fired = True
        self.value = value
        if self.waiter is not None and self._loop is not None:
            self._loop.wake(self.waiter)

    def __await__(self) -> Generator[Signal, None, Any]:
        if not self.is_fired:
            yield self
        return self.value


def never(reason: str) -> Signal:
    """What a lane awaits that has understood that nothing will ever happen: it stays parked."""
    return Signal(None, reason)


class Mailbox(Generic[Item]):
    """What one lane of a rank hands to another, in order. Only lanes of the same rank may touch it.

    Args:
        signal: makes what a waiting lane parks on; `Loop.signal`.
        name: what the loop says a parked lane waits for.
    """

    __slots__ = ("_items", "_name", "_signal", "_waiting", "put_count", "taken_count")

    def __init__(self, signal: Callable[[str], Signal], name: str) -> None:
        self._signal = signal
        self._name = name
        self._items: deque[Item] = deque()
        self._waiting: Signal | None = None
        self.put_count = 0
        self.taken_count = 0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        self._items.append(item)
        self.put_count += 1
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            waiting.fire()

    async def get(self) -> Item:
        """The oldest item; waits until there is one. One lane at a time may wait."""
        while not self._items:
            assert self._waiting is None, f"two lanes wait for {self._name}"
            self._waiting = self._signal(f"{self._name} #{self.taken_count}")
            await self._waiting
        self.taken_count += 1
        return self._items.popleft()


class _Pause:
    """Let others run, then go on."""

    __slots__ = ()

    def __await__(self) -> Generator[None, None, None]:
        yield None


PAUSE = _Pause()


class Task:
    """One lane of one rank."""

    __slots__ = ("coroutine", "error", "is_finished", "name", "waits_for")

    def __init__(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        self.name = name
        self.coroutine = coroutine
        self.is_finished = False
        self.error: BaseException | None = None
        self.waits_for: Signal | None = None


class Loop:
    """Runs tasks until all have finished, one has failed, or none can go on."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.tasks: list[Task] = []
        self._runnable: list[Task] = []

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, None]) -> Task:
        task = Task(name, coroutine)
        self.tasks.append(task)
        self._runnable.append(task)
        return task

    def wake(self, task: Task) -> None:
        task.waits_for = None
        self._runnable.append(task)

    def signal(self, reason: str = "") -> Signal:
        return Signal(self, reason)

    def run(self, *, on_switch: Callable[[], None] | None = None) -> None:
        """Run until nobody can go on. The first error of a task ends the run and is kept on the task.

        Args:
            on_switch: called before each lane goes on, for progress.
        """
        runnable = self._runnable
        choose = self.schedule.choose
        while runnable:
            if on_switch is not None:
                on_switch()
            count = len(runnable)
            task = runnable.pop(choose(count, "run") if count > 1 else 0)
            try:
                waits_for = task.coroutine.send(None)
            except StopIteration:
                task.is_finished = True
                continue
            except Exception as error:
                # A rank that dies takes the run with it, as a process under torchrun would; its
                # peers stay parked where they are, which is what their logs should show.
                task.error = error
                return
            if waits_for is None or waits_for.is_fired:
                runnable.append(task)
            else:
                assert waits_for.waiter is None, f"two lanes wait for {waits_for.reason}"
                task.waits_for = waits_for
                waits_for.waiter = task

    @property
    def parked(self) -> list[Task]:
        """Tasks that have neither finished nor failed."""
        return [task for task in self.tasks if not task.is_finished and task.error is None]

    def close(self) -> None:
        """Drop what is parked without running it further."""
        for task in self.tasks:
            task.coroutine.close()
