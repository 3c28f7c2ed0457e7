"""Work on a database that Ctrl-C can end, however often somebody presses it."""

from __future__ import annotations

import os
import signal
from threading import Event
from typing import Any, cast

import pytest

from tracer.locked import interruptibly


class Stubborn:
    """A connection that hears the third interrupt, while its user presses Ctrl-C again each time."""

    def __init__(self) -> None:
        self.ended = Event()
        self.heard = 0

    def work(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert self.ended.wait(30)

    def interrupt(self) -> None:
        self.heard += 1
        os.kill(os.getpid(), signal.SIGINT)
        if self.heard == 3:
            self.ended.set()


def test_an_impatient_second_interrupt_does_not_leave_the_work_alone() -> None:
    connection = Stubborn()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interruptibly(cast(Any, connection), connection.work)
    assert (connection.heard, connection.ended.is_set()) == (3, True)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_that_comes_with_the_end_of_the_work_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt):
        interruptibly(cast(Any, None), lambda: signal.raise_signal(signal.SIGINT))
