from __future__ import annotations

import pytest

from hicache.loop import PAUSE, Loop, Signal
from hicache.schedule import Schedule


def test_the_schedule_decides_who_goes_on() -> None:
    def order(answers: list[int]) -> list[str]:
        loop = Loop(Schedule(answers=answers))
        seen: list[str] = []

        async def lane(name: str) -> None:
            for _ in range(2):
                seen.append(name)
                await PAUSE

        for name in "abc":
            loop.spawn(name, lane(name))
        loop.run()
        return seen

    assert order([]) == ["a", "b", "c", "a", "b", "c"]
    assert order([2, 0, 1]) == ["c", "a", "c", "b", "a", "b"]


def test_a_lane_waits_for_its_signal_and_gets_the_value() -> None:
    loop = Loop(Schedule())
    signal = loop.signal("ready")
    got: list[object] = []

    async def wait() -> None:
        got.append(await signal)

    async def fire() -> None:
        signal.fire("value")

    loop.spawn("wait", wait())
    loop.spawn("fire", fire())
    loop.run()
    assert got == ["value"]


def test_a_run_in_which_nobody_can_go_on_says_who_stands_where() -> None:
    loop = Loop(Schedule())

    async def wait(signal: Signal) -> None:
        await signal

    task = loop.spawn("wait", wait(loop.signal("never")))
    loop.run()
    assert loop.parked == [task]
    assert task.waits_for is not None
    assert task.waits_for.reason == "never"
    loop.close()


def test_an_error_ends_the_run_and_stays_with_its_lane() -> None:
    loop = Loop(Schedule())
    seen: list[str] = []

    async def fail() -> None:
        raise ValueError("no")

    async def after() -> None:
        seen.append("after")

    task = loop.spawn("fail", fail())
    loop.spawn("after", after())
    loop.run()
    assert isinstance(task.error, ValueError)
    assert seen == []
    loop.close()


def test_firing_a_signal_twice_is_a_programmers_error() -> None:
    signal = Loop(Schedule()).signal("once")
    signal.fire()
    with pytest.raises(AssertionError, match="fired twice: once"):
        signal.fire()


def test_two_lanes_on_one_signal_are_a_programmers_error() -> None:
    loop = Loop(Schedule())
    signal = loop.signal("shared")

    async def wait() -> None:
        await signal

    loop.spawn("first", wait())
    loop.spawn("second", wait())
    with pytest.raises(AssertionError, match="two lanes wait for shared"):
        loop.run()
    loop.close()
