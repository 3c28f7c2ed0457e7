"""SIGTERM as an end like that by Ctrl-C: what was begun is put away, half a database and its folder too."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from cli.errors import TERMINATED, tell


class SigtermError(KeyboardInterrupt):
    """This process was told to end."""


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """End what is inside at the first SIGTERM, and then the command; a second one can't cut that short.

    Raises:
        typer.Exit: SIGTERM has come.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SigtermError

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except SigtermError:
        tell("stopped by SIGTERM")
        raise typer.Exit(TERMINATED) from None
    finally:
        signal.signal(signal.SIGTERM, before)
