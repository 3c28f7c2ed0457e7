"""Runs that are watched while they run: the runtime knows no checker, so the two meet here.

    hicache run --mode gloo      python -m cli.watched, once a rank    watchers meet in the job's own store
    hicache run --mode threads   one process                           watchers meet in a store in memory

With `SGLANG_ENABLE_RANK_CONSENSUS_CHECKER` set. What a watcher finds is told while the run goes on; what it
does then is said by `HICACHE_CHECKER_POLICY`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from consensus_checker.live import Watcher
    from hicache.job import Observed

MODULE = "cli.watched"
# What a watched rank imports while it runs.
AHEAD = ("consensus_checker.consensus", "consensus_checker.live")


def is_asked_for() -> bool:
    """Whether the environment asks for the checker."""
    from consensus_checker.consensus import is_asked_for

    return is_asked_for()


class Speaker:
    """Says on stderr what watchers have found, while the run goes on; once, for all ranks say the same."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, text: str) -> None:
        if text in self._said:
            return
        self._said.add(text)
        # In one write, and never the run's trouble: stderr may be closed.
        with suppress(OSError):
            os.write(2, f"\n{text}\n\n".encode() if "\n" in text else f"hicache: {text}\n".encode())


def watching() -> Callable[[Observed], Watcher]:
    """What makes a watcher for each rank of one run, started."""
    from consensus_checker.consensus import POLICY, POLICY_VARIABLE
    from consensus_checker.live import LocalStore, Watcher

    shared = LocalStore()

    def watch(observed: Observed) -> Watcher:
        watcher = Watcher(
            store=observed.store if observed.store is not None else shared,
            rank=observed.rank,
            members=observed.members,
            lanes=observed.lanes,
            header=observed.header,
            folder=observed.folder,
            policy=os.environ.get(POLICY_VARIABLE) or POLICY,
            tell=observed.say,
        )
        watcher.start()
        return watcher

    return watch


def main() -> None:
    """One rank of a run, watched: what `hicache.worker` does, with the same words."""
    from hicache.worker import run_process

    run_process(watching())


if __name__ == "__main__":
    main()
