"""First screens and proofs as whole texts, at width 80 and without colour."""

from __future__ import annotations

from dataclasses import replace

import pytest

from consensus_checker.check import check
from consensus_checker.explain import proof
from consensus_checker.history import History
from consensus_checker.screen import LINES_MAX, first_screen
from tests.support.golden import assert_golden
from tests.support.history import history, lanes, ring
from tracer.record import Kind

BACKUP_REFUSED = """
    0  match:r1=64  backup:17=64{host_pages_free=5}  match:r2=0  |  round?  events!  #hung
    1  match:r1=64  backup:17=64{host_pages_free=5}  match:r2=0  |  round?  events!  #hung
    2  match:r1=64  backup:17=64{host_pages_free=5}  match:r2=0  |  round?  events!  #hung
    3  match:r1=64  backup:17=0{host_pages_free=0}   match:r2=0  |  main!  #hung
"""
MEETING_SKIPPED = """
    0  round?{writes_done=1}  events!  events.  round=1  |  round?{writes_done=1}  events!  #hung
    1  round?{writes_done=1}  events!  events.  round=1  |  round?{writes_done=2}  events!  #hung
    2  round?{writes_done=1}  events!  events.  round=1  |  round?{writes_done=0}  round=0  |  main!  #hung
"""
ROUND = "round?{writes_done=0} events! events. round=0 | "
WRONG_MAJORITY = "\n".join(
    f"{rank}  {ROUND * 4}round?{{writes_done={int(rank == 2)}}} "
    + ("events! #hung" if rank == 2 else "round=0 match:r1=1 main! #hung")
    for rank in range(4)
)
EIGHT = "\n".join(f"{rank}  match:r1=64  admit:r1={1 if rank == 5 else 2}" for rank in range(8))

STORE_STUCK = "\n".join(
    f"{rank}  poll:r1=wait round? events! events. round=0 #hung\n"
    + (
        f"{rank}/io  state:backend=7 #hung\n{rank}/sync  state:idle #hung"
        if rank == 2
        else f"{rank}/io  state:backend=7 read:7=2 state:idle #hung\n"
        f"{rank}/sync  state:collective=7 progress! #hung"
    )
    for rank in range(4)
)
MISPAIRED = """
    0  round?  mispaired:events{purpose=event_round}  #crashed
    1  round?  mispaired:events{purpose=event_round}  #crashed
    2  round?  mispaired:events{purpose=poll}  #crashed
"""

CASES = {
    "store_stuck": (STORE_STUCK, None),
    "mispaired": (MISPAIRED, None),
    "dead": ("0 match:r1=64 events! #stopped\n1 match:r1=64 events! #stopped\n2 match:r1=64 #killed", None),
    "backup_refused": (BACKUP_REFUSED, None),
    "meeting_skipped": (MEETING_SKIPPED, None),
    "tie": ("0 backup:17=64{host_pages_free=5}\n1 backup:17=0{host_pages_free=0}", None),
    "many_ranks": (EIGHT, None),
    "wrong_majority": (WRONG_MAJORITY, None),
    "alone": ("0 match:r1=64", None),
    "dropped": ("0 match:r1=64 evict:1=1\n1 match:r1=64 #drops:evict", None),
    "stalled": ("0 match:r1=64 events! #hung\n1 match:r1=64 events! #hung\n2 match:r1=64 #hung", None),
    "incomplete": ("0 match:r1=64 evict:3=1\n1 match:r1=64 #cut", 4),
    "consistent": ("0 match:r1=64 round=1\n1 match:r1=64 round=1", None),
}


def test_a_ring_that_agrees_says_from_where_it_was_compared() -> None:
    text = "\n".join(f"{rank}  " + " ".join(f"match:r{at}=64" for at in range(40)) for rank in range(2))
    told = History.of(ring(lanes(text), {0: 20, 1: 21}))
    assert first_screen(check(told, path="runs/last"), told) == [
        "CONSISTENT  no rank diverged: 19 calls compared on 2 ranks, of ranks 0-1 only",
        "          what a ring has kept: dp0 scheduler from call 21 on",
        "          confidence medium | coverage 2/2",
        "          (all logs complete at their end)",
        "",
        "  unsure  of ranks 0-1 the oldest records are gone, a ring has dropped them",
        "  next    hicache hits runs/last",
    ]


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_screen_and_the_proof_read_as_agreed(name: str) -> None:
    text, world_size = CASES[name]
    told = history(text, world_size=world_size)
    verdict = check(told, path="runs/last")
    screen = first_screen(verdict, told)
    assert len(screen) <= LINES_MAX
    lines = [*screen, "", "-" * 80, "", *proof(verdict.finding, told)]
    assert [line for line in lines if len(line) > 80 or line != line.rstrip()] == []
    assert_golden(f"checker_{name}.txt", "\n".join(lines) + "\n")


def test_the_query_shows_the_call_and_its_fact() -> None:
    told = history(BACKUP_REFUSED)
    (query, _why), _hits = check(told, path="runs/last").next
    assert query == (
        'hicache query runs/last "SELECT rank, seq, tokens, host_pages_free FROM records '
        "WHERE kind = 'write_backup' AND step = 0 ORDER BY seq, rank\""
    )


def test_a_name_that_sql_would_misread_is_not_queried() -> None:
    drawn = lanes("0 match:r1=64\n1 match:r1=64\n2 match:r1=0")
    kind = Kind("match", "decision", agree=("tp",), compared=("rid", "Group; --"))
    logs = [
        replace(
            lane,
            kinds={"match": kind},
            entries=[
                {("Group; --" if name == "tokens" else name): value for name, value in entry.items()}
                for entry in lane.entries
            ],
        )
        for lane in drawn
    ]
    verdict = check(logs)
    assert verdict.code == 10
    assert "FROM decisions WHERE step BETWEEN 0 AND 1" in verdict.next[0][0]
