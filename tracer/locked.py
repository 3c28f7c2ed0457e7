"""The lock around a database, the memory it may take, and work on it that Ctrl-C can end.

Owns what a connection may do: within its memory, with what it holds, and nothing else.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, TypeVar

from tracer.load import quoted

if TYPE_CHECKING:
    import duckdb

# Each thread that reads logs holds two of their longest lines, however short these are.
THREADS_MAX = 8
# How long an interrupted query gets to end; it looks every few thousand rows.
INTERRUPT_SECONDS = 5.0
INTERRUPT_PAUSE_SECONDS = 0.05

# Of this process, on Linux; elsewhere only what the database counts is limited.
STATUS = Path("/proc/self/status")
# What a query takes beside the memory that the database counts: stacks, and the rows that it hands over.
UNCOUNTED_BYTES = 512 * 1024 * 1024
UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

T = TypeVar("T")


def lock(connection: duckdb.DuckDBPyConnection, exports: Path) -> None:
    """Leave no way out of the database but the folder of exports, which no SELECT can write to."""
    connection.execute(f"SET allowed_directories = [{quoted(str(exports) + '/')}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def settle(connection: duckdb.DuckDBPyConnection, memory_limit: str, *, spill: str) -> None:
    connection.execute(f"SET memory_limit = {quoted(memory_limit)}")
    connection.execute(f"SET threads = {min(os.cpu_count() or 1, THREADS_MAX)}")
    connection.execute(f"SET temp_directory = {quoted(spill)}")
    # No local variable may pose as a table, and nobody's home is named.
    connection.execute("SET python_enable_replacements = false")
    connection.execute("SET autoinstall_known_extensions = false")
    connection.execute("SET autoload_known_extensions = false")
    connection.execute("SET allow_persistent_secrets = false")
    connection.execute("SET secret_directory = ''")
    connection.execute("SET enable_progress_bar = false")


@contextmanager
def bounded(memory_limit: str) -> Iterator[None]:
    """Let the process take no more than that beside what it has.

    The database counts the pages and tables that it holds, but not one value while it is made: a text of 4 GB
    or a list of a billion numbers would be the end of a small machine.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if not STATUS.exists():
        yield
        return
    limit = _data_bytes() + _bytes(memory_limit) + UNCOUNTED_BYTES
    limit = min([limit, *(each for each in (soft, hard) if each != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int:
    """What counts against that limit; Linux alone says it."""
    found = re.search(r"VmData:\s+(\d+) kB", STATUS.read_text(encoding="ascii", errors="replace"))
    assert found, f"no VmData in {STATUS}"
    return int(found[1]) * 1024


def _bytes(limit: str) -> int:
    """A memory limit as a number."""
    found = re.fullmatch(r"(\d+)\s*([KMGT]?)B", limit)
    assert found, f"memory limit {limit!r}"
    number: int = int(found[1]) * 1000 ** UNITS[found[2]]
    return number


class StuckError(Exception):
    """The database was interrupted and did not stop."""


def interruptibly(connection: duckdb.DuckDBPyConnection, work: Callable[[], T]) -> T:
    """Do `work` on a connection in another thread, while this one can hear Ctrl-C.

    Raises:
        KeyboardInterrupt: it came, and the database has stopped.
        StuckError: it came, and the database went on; the connection must not be touched again.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    done = Event()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    worker = Thread(target=run, name="hicache query", daemon=True)
    with noted_interrupts() as heard:
        try:
            worker.start()
            # Without an end the wait could not be left: what notes an interrupt can wake nobody.
            while not done.wait(INTERRUPT_PAUSE_SECONDS):
                if heard:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            if worker.ident is not None and not _stopped(connection, done):
                raise StuckError from None
            raise
    if heard:
        raise KeyboardInterrupt
    if errors:
        raise errors[0]
    return results[0]


@contextmanager
def noted_interrupts() -> Iterator[list[int]]:
    """Ctrl-C as an entry of a list, however often it comes: an impatient second one must not get in between.

    A connection that is left at work can't even be closed, and ends the process in an abort.
    """
    heard: list[int] = []
    is_raised = callable(signal.getsignal(signal.SIGINT))
    if not is_raised or threading.current_thread() is not threading.main_thread():
        yield heard
        return
    before = signal.signal(signal.SIGINT, lambda number, _frame: heard.append(number))
    try:
        yield heard
    finally:
        signal.signal(signal.SIGINT, before)


def _stopped(connection: duckdb.DuckDBPyConnection, done: Event) -> bool:
    """Interrupt until the work has ended: what comes between two statements, or before the first, is lost."""
    for _try in range(int(INTERRUPT_SECONDS / INTERRUPT_PAUSE_SECONDS)):
        connection.interrupt()
        if done.wait(INTERRUPT_PAUSE_SECONDS):
            return True
    return False
