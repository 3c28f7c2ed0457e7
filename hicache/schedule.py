"""The only source of chance, recorded so that it can be replayed.

`choose(n, site)` answers which lane runs, how many polls a transfer takes and where a fault strikes.
**0 is the dull choice** everywhere: the first lane in line, a copy that is done at its first poll, no
fault. So a shorter or smaller list is a duller run, and past its end every answer is 0.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence

from hicache.errors import ConfigError

# One answer is at most this; larger n would not fit the recorded list.
CHOICES_MAX = 1 << 16
# A place behind this is no choice of any run.
PLACES_MAX = 1 << 22


class Schedule:
    """Answers from a seed, or from a list."""

    def __init__(self, *, seed: int | None = None, answers: Iterable[int] = ()) -> None:
        self.seed = seed
        self.answers = array("H")
        self._random = random.Random(seed) if seed is not None else None
        listed = list(answers)
        # What makes the run what it is, known before anything was chosen.
        self.given = f"seed:{seed}" if seed is not None else _list_text(listed)
        self._next = iter(listed)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read what `str(schedule)` printed: `seed:7` or `list:0,2,1`; or `at:41=2,57=1`, the rest 0.

        Raises:
            ConfigError: none of these forms, or an answer outside 0..65535.
        """
        form, _, rest = text.partition(":")
        try:
            if form == "seed" and rest.isascii():
                return cls(seed=int(rest))
            if form == "list":
                answers = [int(part) for part in rest.split(",") if part]
                if all(0 <= answer < CHOICES_MAX for answer in answers):
                    return cls(answers=answers)
            if form == "at":
                return cls(answers=_at(rest))
        except ValueError:
            pass
        raise ConfigError(
            f"--schedule {text[:60]!r}: expected seed:N, list:0,2,1 with answers 0..65535, or at:41=2,57=1"
        )

    def choose(self, n: int, site: str) -> int:
        """An answer in 0..n-1. `site` says what is being decided; it does not change the answer."""
        assert 1 <= n <= CHOICES_MAX, f"choose({n}) at {site}"
        if self._random is not None:
            # Two calls of choose must not share bits, and randrange is five times slower than this.
            answer = self._random.getrandbits(24) % n
        else:
            answer = next(self._next, 0) % n
        self.answers.append(answer)
        return answer

    def __str__(self) -> str:
        """The form that `parse` reads; the seed where there is one."""
        if self.seed is not None:
            return f"seed:{self.seed}"
        return _list_text(self.answers)


def _at(text: str) -> list[int]:
    """Answers by place.

    Raises:
        ValueError: a place or an answer that can't be one.
    """
    answers: list[int] = []
    for part in filter(None, text.split(",")):
        place, _, answer = part.partition("=")
        if not (0 <= int(place) < PLACES_MAX and 0 <= int(answer) < CHOICES_MAX):
            raise ValueError(part)
        answers += [0] * (int(place) + 1 - len(answers))
        answers[int(place)] = int(answer)
    return answers


def sparse_text(answers: Sequence[int]) -> str:
    """The choices that are not dull, by place: the shortest form of a schedule that has few of them."""
    return "at:" + ",".join(f"{place}={answer}" for place, answer in enumerate(answers) if answer)


def _list_text(answers: Sequence[int]) -> str:
    """A list without its dull end, which goes without saying."""
    end = len(answers)
    while end and answers[end - 1] == 0:
        end -= 1
    return "list:" + ",".join(map(str, answers[:end]))
