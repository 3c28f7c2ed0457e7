"""The rules for evidence that other programs wrote; each is a module of `consensus_checker.rules`."""

from __future__ import annotations

from typing import cast

from consensus_checker.claim import ForeignRule
from consensus_checker.rules import (
    call_mismatch,
    frontier,
    gloo_abort,
    leak_line,
    library_report,
    line_mismatch,
    process_died,
    process_state,
    ras_counts,
    ras_dead,
    scheduler_watchdog,
    silent_rank,
    stack_cache_reduction,
    stack_frozen,
    stack_gil_held,
    stack_in_storage,
    stack_missing_thread,
    stack_not_joined,
    stack_same_place,
    stack_split,
    stage_batches,
    status_lists,
    watchdog_frontier,
)

FOREIGN_RULES = cast(
    tuple[ForeignRule, ...],
    (
        process_died,
        process_state,
        ras_dead,
        call_mismatch,
        line_mismatch,
        gloo_abort,
        frontier,
        watchdog_frontier,
        ras_counts,
        library_report,
        status_lists,
        stage_batches,
        stack_cache_reduction,
        stack_not_joined,
        stack_gil_held,
        stack_in_storage,
        stack_missing_thread,
        stack_split,
        stack_frozen,
        stack_same_place,
        scheduler_watchdog,
        silent_rank,
        leak_line,
    ),
)
