from __future__ import annotations

import pytest

from hicache.errors import ConfigError
from hicache.schedule import Schedule


def ask(schedule: Schedule, count: int = 50) -> list[int]:
    return [schedule.choose(5, "test") for _ in range(count)]


def test_a_seed_gives_the_same_answers_again() -> None:
    assert ask(Schedule(seed=3)) == ask(Schedule(seed=3))
    assert ask(Schedule(seed=3)) != ask(Schedule(seed=4))


def test_a_recorded_schedule_replays_itself() -> None:
    first = Schedule(seed=3)
    answers = ask(first)
    assert ask(Schedule(answers=first.answers)) == answers


def test_past_the_end_of_a_list_every_answer_is_0() -> None:
    assert ask(Schedule(answers=[4, 3]), 5) == [4, 3, 0, 0, 0]


@pytest.mark.parametrize("text", ["seed:7", "list:0,2,1", "list:"])
def test_a_schedule_prints_what_it_reads(text: str) -> None:
    schedule = Schedule.parse(text)
    ask(schedule, 3)
    assert str(schedule) == text


def test_trailing_dull_answers_are_not_printed() -> None:
    schedule = Schedule.parse("list:1,0,0")
    ask(schedule, 10)
    assert str(schedule) == "list:1"


@pytest.mark.parametrize("text", ["7", "seed:x", "list:1,x", "list:70000", "list:-1", ""])
def test_a_schedule_that_is_neither_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected seed:N"):
        Schedule.parse(text)


def test_an_answer_of_a_list_is_taken_modulo_the_choices() -> None:
    assert Schedule(answers=[7]).choose(5, "test") == 2


def test_a_list_says_what_was_given_before_anything_is_chosen() -> None:
    assert Schedule(answers=[1, 0, 2, 0]).given == "list:1,0,2"
    assert Schedule(seed=4).given == "seed:4"
