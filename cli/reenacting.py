"""The runtime's part in a verdict: a decision taken again, to break a tie. Imports the runtime when asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from consensus_checker.reenact import Question, Reenact
    from tracer.log import LaneLog


def reenacting(lanes: Sequence[LaneLog]) -> Reenact:
    """What `check` asks where two sides are equally many: whose record follows from its own log.

    Only decisions of the scheduler are taken again, and only from logs of this runtime.
    """

    def answer(question: Question) -> Mapping[int, bool]:
        from hicache.rank import SCHEDULER
        from hicache.sim.reenact import reenact

        answers: dict[int, bool] = {}
        if question.lane != SCHEDULER:
            return answers
        for rank, record in question.records.items():
            place = None if record is None else int(record["seq"])
            done = reenact(lanes, rank, until_seq=place)
            if done.limits:
                continue
            if done.difference is None:
                if done.is_reached:
                    answers[rank] = True
            elif done.difference.seq == place:
                answers[rank] = False
            # What has gone another way before says nothing of this place.
        return answers

    return answer
