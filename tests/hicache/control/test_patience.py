from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hicache.control.active import Active
from hicache.control.patience import IDLE_STEPS_MAX, STORAGE_IDLE_STEPS_MAX, Patience
from hicache.core import Request

SOMEBODY = Active(Request("a", b"\0\0\0\0", b"", 1), 0, b"\0\0\0\0")


def prefetches(*, is_idle: bool, has_timed_waits: bool = False, ops: Sequence[int] = ()) -> Any:
    unfinished = [
        SimpleNamespace(op=op, handle=(f"r{op}", 1), completed_pages=2, pages_asked=9) for op in ops
    ]
    return SimpleNamespace(
        is_idle=is_idle,
        has_timed_waits=has_timed_waits,
        unfinished=unfinished,
        backups=[SimpleNamespace(op=4), SimpleNamespace(op=5)],
        ongoing=lambda active: unfinished[0] if unfinished else None,
    )


def patience(found: Any = None) -> Patience:
    cache: Any = SimpleNamespace(prefetches=found, writes=[1], loads=[])
    return Patience(cache, is_counted=True)


def steps(subject: Patience, blocked: Sequence[Active] = (), *, most: int = 20_000) -> int:
    """Steps without progress that are borne."""
    count = 0
    while count < most and subject.spend(blocked):
        count += 1
    return count


def test_a_rank_bears_so_many_steps_without_progress() -> None:
    assert steps(patience()) == IDLE_STEPS_MAX


def test_and_more_of_them_while_the_external_tier_is_at_work() -> None:
    assert steps(patience(prefetches(is_idle=False))) == STORAGE_IDLE_STEPS_MAX
    assert steps(patience(prefetches(is_idle=True))) == IDLE_STEPS_MAX


def test_steps_do_not_count_while_somebody_waits_for_a_deadline() -> None:
    subject = patience(prefetches(is_idle=False, has_timed_waits=True))
    assert steps(subject, [SOMEBODY], most=20_000) == 20_000
    assert steps(subject) == STORAGE_IDLE_STEPS_MAX, "nobody is blocked any more"


def test_progress_renews_it() -> None:
    subject = patience()
    steps(subject, most=4_000)
    subject.renew()
    assert steps(subject) == IDLE_STEPS_MAX


def test_it_says_who_waits_for_what_and_what_has_not_come_back() -> None:
    subject = patience(prefetches(is_idle=False, ops=(1, 2)))
    subject.spend([])
    subject.spend([])
    assert subject.why([SOMEBODY], waiting_count=3, running_count=0) == (
        "nothing for 1 steps: 3 requests waiting, 0 running, 1 writes and 0 loads in flight; "
        "r1 (attempt 1) waits for prefetch 1, 2 of 9 pages read; "
        "prefetch 2 has not come back, though r2 waits for it no more; "
        "2 backups to storage are not acknowledged, from 4 on"
    )


def test_without_an_external_tier_it_says_what_is_in_flight() -> None:
    assert (
        patience()
        .why([], waiting_count=1, running_count=2)
        .endswith("1 requests waiting, 2 running, 1 writes and 0 loads in flight")
    )
