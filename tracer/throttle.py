"""How much of a loop's time recording may take, and what gives when it takes more.

Owns one number: of so many windows of steps one is written. It is the step that decides, so that ranks which
have come to the same number write the same windows.

    one in 4   steps 0..63 written | 64..255 left out | 256..319 written | ...
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import msgspec

WINDOW_STEPS = 64
ONE_IN_MAX = 64
# How long is looked at before anything changes.
LOOK_NS = 500_000_000
CALIBRATION = 300


class Throttle:
    """Says which steps are written.

    Args:
        share_max: the part of the loop's time that recording may take, 0..1.
        record_ns: what a record costs; measured when None.
    """

    __slots__ = (
        "_clock",
        "_record_ns",
        "_records",
        "_since_ns",
        "_steps",
        "has_throttled",
        "one_in",
        "share",
        "share_max",
    )

    def __init__(
        self,
        share_max: float,
        *,
        record_ns: float | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        assert 0 < share_max < 1, f"a share of {share_max} is not between 0 and 1"
        self.share_max = share_max
        self.share = 0.0
        self.one_in = 1
        self.has_throttled = False
        self._record_ns = record_ns if record_ns is not None else measured_ns()
        self._clock = clock
        self._records = self._steps = 0
        self._since_ns = clock()

    def is_written(self, step: int) -> bool:
        return is_written(step, self.one_in)

    def look(self, records: int) -> bool:
        """A step with so many records has ended; whether `one_in` is another now."""
        self._records += records
        self._steps += 1
        elapsed_ns = self._clock() - self._since_ns
        # Less than a whole round of windows says only whether its steps were written or not.
        is_round = self.one_in == 1 or self._steps >= self.one_in * WINDOW_STEPS
        if elapsed_ns < LOOK_NS or not is_round:
            return False
        before = self.one_in
        self.share = self._records * self._record_ns / elapsed_ns
        self._records = self._steps = 0
        self._since_ns += elapsed_ns
        if self.share > self.share_max:
            self.one_in = min(2 * self.one_in, ONE_IN_MAX)
            self.has_throttled = True
        elif self.one_in > 1 and 4 * self.share < self.share_max:
            # Twice as much would still be only half of what is allowed: no going to and fro.
            self.one_in //= 2
        return self.one_in != before


def is_written(step: int, one_in: int) -> bool:
    """Whether a step stands in a log of which one window in `one_in` is written."""
    return step // WINDOW_STEPS % one_in == 0


@cache
def measured_ns() -> float:
    """What a line of average size costs here: the best of three short loops."""
    encode = msgspec.json.Encoder().encode
    line = msgspec.defstruct("line", [(name, int) for name in "abcdefghijkl"], gc=False)
    room = bytearray(1 << 10)
    best = 0
    for _ in range(3):
        start = time.perf_counter_ns()
        for number in range(CALIBRATION):
            data = encode(line(number, number, time.monotonic_ns(), *range(9)))
            room[: len(data)] = data
        spent = time.perf_counter_ns() - start
        best = min(best, spent) if best else spent
    return best / CALIBRATION
