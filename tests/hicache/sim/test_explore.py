"""Schedules searched and shrunk, on small made-up properties whose answers are known."""

from __future__ import annotations

import pytest

from hicache.errors import ConfigError
from hicache.schedule import Schedule, sparse_text
from hicache.sim.explore import Found, by_preemptions, by_seeds, shrink, trimmed


def draws(schedule: Schedule, count: int, n: int = 3) -> list[int]:
    return [schedule.choose(n, "run") for _ in range(count)]


def needs(*places: int, count: int = 40) -> object:
    """Broken where each of these places has an answer that is not the dull one."""

    def broken(schedule: Schedule) -> str | None:
        answers = draws(schedule, count)
        return "apart" if all(answers[place] for place in places) else None

    return broken


def test_the_first_seed_that_breaks_is_found_with_its_answers() -> None:
    found = by_seeds(needs(5, 17), range(1, 200))
    assert found is not None
    assert found.answers[5] and found.answers[17]
    assert draws(Schedule(seed=found.runs), 40)[: len(found.answers)] == list(found.answers)


def test_nothing_is_found_where_nothing_breaks() -> None:
    assert by_seeds(lambda schedule: None, range(1, 5)) is None
    assert by_preemptions(lambda schedule: None, bound=1, runs_max=50) == (None, True)


def test_what_is_left_are_the_choices_that_matter() -> None:
    broken = needs(5, 17, 30)
    found = by_seeds(broken, range(1, 500))
    assert found is not None
    shrunk = shrink(broken, found, runs_max=200)
    assert [at for at, answer in enumerate(shrunk.answers) if answer] == [5, 17, 30]
    assert {answer for answer in shrunk.answers if answer} == {1}
    assert shrunk.how == "apart"


def test_a_schedule_that_is_broken_in_another_way_is_not_taken_for_the_same() -> None:
    def broken(schedule: Schedule) -> str | None:
        answers = draws(schedule, 10)
        return ("both" if answers[7] else "one") if answers[3] else None

    shrunk = shrink(broken, Found("both", (2, 2, 2, 2, 2, 2, 2, 2), 1), runs_max=100)
    assert shrunk.answers == (0, 0, 0, 1, 0, 0, 0, 1)


def test_shrinking_ends_when_its_runs_are_used_up() -> None:
    made = 0

    def broken(schedule: Schedule) -> str | None:
        nonlocal made
        made += 1
        return "apart" if sum(draws(schedule, 60)) > 3 else None

    shrink(broken, Found("apart", (2,) * 60, 1), runs_max=7)
    assert made <= 7


def test_preemptions_try_one_change_then_two() -> None:
    found, is_all = by_preemptions(needs(2, count=4), bound=1, runs_max=100)
    assert (found, is_all) == (Found("apart", (0, 0, 1), 1 + 2 * 2 + 1), True)
    assert by_preemptions(needs(1, 3, count=4), bound=1, runs_max=100) == (None, True)
    found, _ = by_preemptions(needs(1, 3, count=4), bound=2, runs_max=100)
    assert found is not None
    assert found.answers == (0, 1, 0, 1)


def test_preemptions_say_when_not_all_were_tried() -> None:
    assert by_preemptions(needs(39), bound=1, runs_max=10) == (None, False)


def test_a_sparse_schedule_is_read_as_it_is_written() -> None:
    answers = [0, 0, 2, 0, 1, 0]
    assert sparse_text(answers) == "at:2=2,4=1"
    assert draws(Schedule.parse("at:2=2,4=1"), 6) == answers
    assert draws(Schedule.parse("at:"), 2) == [0, 0]
    assert trimmed(answers) == (0, 0, 2, 0, 1)


@pytest.mark.parametrize("text", ["at:1", "at:x=1", "at:-1=2", "at:1=99999", "at:99999999999=1", "at:1=2=3"])
def test_a_sparse_schedule_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Schedule.parse(text)
