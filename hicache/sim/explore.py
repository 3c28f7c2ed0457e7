"""Many schedules of one plan, to find one that breaks a property; then the dullest that still breaks it.

A schedule is a list of answers, 0 the dull one, and past its end every answer is 0. Two ways through them:

    seeds         answers by chance, one run a seed
    preemptions   all dull but one, then all dull but two: every choice of the run, in its order

A breaking schedule is made duller as long as it breaks the property in the same way: first shorter, then with
stretches of it set to 0, then with smaller answers. What is left are the choices that matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hicache.schedule import Schedule

# What is wrong with a run, in words by which two runs are told apart; None where nothing is.
Broken = Callable[[Schedule], "str | None"]
Tick = Callable[[int], None]


class Noting(Schedule):
    """A schedule that keeps how many answers each choice had, in `sizes`."""

    def __init__(self, answers: Sequence[int]) -> None:
        super().__init__(answers=answers)
        self.sizes: list[int] = []

    def choose(self, n: int, site: str) -> int:
        self.sizes.append(n)
        return super().choose(n, site)


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule that breaks the property.

    Attributes:
        how: what is wrong.
        answers: without their dull end.
        runs: that were made until it was found.
    """

    how: str
    answers: tuple[int, ...]
    runs: int


def by_seeds(broken: Broken, seeds: Sequence[int], *, tick: Tick | None = None) -> Found | None:
    """The first seed whose run is broken."""
    for number, seed in enumerate(seeds, start=1):
        schedule = Schedule(seed=seed)
        how = broken(schedule)
        if tick is not None:
            tick(number)
        if how is not None:
            return Found(how, trimmed(schedule.answers), number)
    return None


def by_preemptions(
    broken: Broken, *, bound: int, runs_max: int, tick: Tick | None = None
) -> tuple[Found | None, bool]:
    """The first broken run with at most `bound` choices that are not dull; and whether all were tried."""
    runs = 0
    for runs, changes in enumerate(_changes(broken, bound), start=1):
        if runs > runs_max:
            return None, False
        answers = _list_of(changes)
        how = broken(Schedule(answers=answers))
        if tick is not None:
            tick(runs)
        if how is not None:
            return Found(how, trimmed(answers), runs), True
    return None, True


def _changes(broken: Broken, bound: int) -> Iterator[dict[int, int]]:
    """Place -> answer: nothing, then every single change, then every pair of them, in order of place.

    How many answers a choice has is known from the run before it: that with all changes but the last one.
    """
    yield {}
    level: list[dict[int, int]] = [{}]
    for _ in range(bound):
        deeper: list[dict[int, int]] = []
        for changes in level:
            noting = Noting(_list_of(changes))
            broken(noting)
            first = max(changes, default=-1) + 1
            for place, size in enumerate(noting.sizes[first:], start=first):
                for answer in range(1, size):
                    more = {**changes, place: answer}
                    deeper.append(more)
                    yield more
        level = deeper


def shrink(broken: Broken, found: Found, *, runs_max: int, tick: Tick | None = None) -> Found:
    """A duller schedule that is broken in the same way; the dullest that `runs_max` runs have shown."""
    best = list(found.answers)
    runs = 0

    def is_still(answers: Sequence[int]) -> bool:
        nonlocal runs
        runs += 1
        if tick is not None:
            tick(runs)
        return broken(Schedule(answers=answers)) == found.how

    def keep(answers: Sequence[int]) -> bool:
        nonlocal best
        if runs >= runs_max or tuple(answers) == tuple(best) or not is_still(answers):
            return False
        best = list(trimmed(answers))
        return True

    while runs < runs_max:
        before = list(best)
        _shorten(lambda: best, keep)
        _quieten(lambda: best, keep)
        _lessen(lambda: best, keep)
        if best == before:
            break
    return Found(found.how, tuple(best), found.runs + runs)


def _shorten(best: Callable[[], list[int]], keep: Callable[[Sequence[int]], bool]) -> None:
    """Cut the end off: half of it, a quarter of it, down to one answer."""
    step = len(best()) // 2
    while step:
        while len(best()) >= step and keep(best()[: len(best()) - step]):
            pass
        step //= 2


def _quieten(best: Callable[[], list[int]], keep: Callable[[Sequence[int]], bool]) -> None:
    """Set stretches to 0, the later ones first, halves of what matters before quarters of it."""
    places = _loud(best())
    parts = 2
    while places:
        width = max(1, -(-len(places) // parts))
        for first in range((len(places) - 1) // width * width, -1, -width):
            stretch = set(places[first : first + width])
            keep([0 if at in stretch else answer for at, answer in enumerate(best())])
        if width == 1:
            return
        places = _loud(best())
        parts *= 2


def _lessen(best: Callable[[], list[int]], keep: Callable[[Sequence[int]], bool]) -> None:
    """Try the smallest answers first at each place that is left."""
    for place in _loud(best()):
        answers = best()
        if place >= len(answers):
            continue
        for less in range(1, answers[place]):
            if keep([less if at == place else answer for at, answer in enumerate(answers)]):
                break


def _loud(answers: Sequence[int]) -> list[int]:
    return [at for at, answer in enumerate(answers) if answer]


def _list_of(changes: Mapping[int, int]) -> list[int]:
    answers = [0] * (max(changes, default=-1) + 1)
    for place, answer in changes.items():
        answers[place] = answer
    return answers


def trimmed(answers: Sequence[int]) -> tuple[int, ...]:
    """Without the dull end, which goes without saying."""
    end = len(answers)
    while end and not answers[end - 1]:
        end -= 1
    return tuple(answers[:end])
