"""Copies of page tags in simulated time: a copy is done after a number of polls, by chance or by fault.

Copies of one queue run side by side: a poll that finds one unfinished is time for those behind it too, so a
later copy may be done before an earlier one. Who drains acks must not mind.
"""

from __future__ import annotations

from collections.abc import Callable

from hicache.core import Queue, Transfer
from hicache.ledger import Ledger
from hicache.loop import PAUSE
from hicache.probes import Probes
from hicache.schedule import Schedule

# (queue, how many of that queue came before) -> extra polls.
Delay = Callable[[Queue, int], int]


class SimEngine:
    """Moves tags between tiers of one rank. Implements `ports.Engine`.

    The bytes move when the copy is done, not when it is submitted: whoever reuses a slot too early, or
    reads one too early, finds the wrong tag there.

    Args:
        polls_max: a copy takes up to this many polls beyond the first, as the schedule says.
        delay: extra polls that a fault adds.
    """

    def __init__(
        self, ledger: Ledger, schedule: Schedule, probes: Probes, *, polls_max: int, delay: Delay
    ) -> None:
        self._ledger = ledger
        self._schedule = schedule
        self._probes = probes
        self._polls_max = polls_max
        self._delay = delay
        # Copies under way, oldest first.
        self._moving: dict[Queue, list[Transfer]] = {"write": [], "load": []}
        self._polls_left: dict[int, int] = {}
        self._submitted: dict[Queue, int] = {"write": 0, "load": 0}

    def submit(self, transfer: Transfer) -> None:
        queue = transfer.queue
        polls = self._schedule.choose(self._polls_max + 1, "transfer") if self._polls_max else 0
        self._polls_left[transfer.op] = polls + self._delay(queue, self._submitted[queue])
        self._submitted[queue] += 1
        self._moving[queue].append(transfer)

    def ready(self, transfer: Transfer) -> bool:
        if transfer.is_done or self._advance(transfer):
            return True
        moving = self._moving[transfer.queue]
        # A copy, as those that are done now leave the list.
        for behind in moving[moving.index(transfer) + 1 :]:
            self._advance(behind)
        return False

    async def wait(self, transfer: Transfer) -> None:
        while not self.ready(transfer):
            await PAUSE

    def _advance(self, transfer: Transfer) -> bool:
        """One poll's worth of time for one copy; returns whether it is done now."""
        if self._polls_left[transfer.op] > 0:
            self._polls_left[transfer.op] -= 1
            return False
        self._move(transfer)
        return True

    def _move(self, transfer: Transfer) -> None:
        del self._polls_left[transfer.op]
        self._moving[transfer.queue].remove(transfer)
        ledger = self._ledger
        source, target = ledger.device, ledger.host
        if transfer.queue == "load":
            source, target = target, source
        target.write(transfer.target, source.read(transfer.source), writer=transfer.op)
        transfer.is_done = True
        self._probes.transfer_done(transfer.op, transfer.queue)
