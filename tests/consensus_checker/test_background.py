"""Helper lanes that never came back, where all decisions are equal."""

from __future__ import annotations

from consensus_checker import skip
from consensus_checker.background import dead_lanes
from consensus_checker.check import check
from consensus_checker.finding import Finding
from consensus_checker.hearts import last_beats
from consensus_checker.history import History
from tests.support.hearts import Pauses, beating

MAIN = "match:r1=64 match:r2=64 #killed"
READS = "state:backend=6 read:6=2 state:idle "


def found(
    io: dict[int, str], still_s: float, *, pauses: Pauses | None = None, main: str = MAIN
) -> list[Finding]:
    text = "\n".join(f"{rank} {main}\n{rank}/io {words}" for rank, words in io.items())
    made = beating(text, dict.fromkeys(io, still_s), pauses=pauses)
    history = History.of(made)
    check(history)
    return dead_lanes(history, skip.ending(history), last_beats(made))


def test_a_read_that_hangs_on_one_rank_is_named_with_its_op_and_its_age() -> None:
    stuck = {0: f"{READS}#killed", 1: f"{READS}state:backend=7 #killed"}
    (finding,) = found(stuck, 41.0)
    assert (finding.kind, finding.code, finding.rule) == ("frozen", 15, "dead_lane")
    assert (finding.culprit, finding.unknown, finding.level) == ((1,), (), "medium")
    assert finding.summary == (
        "the io lane of rank 1 never came back from the store with op 7: 41.0 s; the longest before was 0.0 s"
    )
    assert [(one.file, one.record, one.supports) for one in finding.evidence] == [
        ("rank0001.io.000.jsonl", 4, "culprit 1")
    ]


def test_a_read_that_is_as_slow_as_reads_were_before_is_not_told() -> None:
    stuck = {0: f"{READS}#killed", 1: f"{READS}state:backend=7 #killed"}
    slow_before: Pauses = {(0, "io"): {2: 20.0}}
    assert found(stuck, 41.0, pauses=slow_before) == []


def test_where_every_ranks_read_hangs_the_store_is_at_fault_and_no_rank_is_named() -> None:
    (finding,) = found(dict.fromkeys((0, 1), f"{READS}state:backend=7 #killed"), 41.0)
    assert (finding.culprit, finding.unknown, finding.level) == ((), (0, 1), "low")


def test_a_lane_that_is_idle_for_hours_is_healthy() -> None:
    assert found(dict.fromkeys((0, 1), f"{READS}#killed"), 10_000.0) == []


def test_a_thread_that_ended_on_one_rank_while_its_rank_went_on_is_named() -> None:
    ended = {0: f"{READS}#killed", 1: "state:backend=6 read:6=2 state:ended #killed"}
    later: Pauses = {(rank, "scheduler"): {2: 30.0} for rank in (0, 1)}
    (finding,) = found(ended, 0.0, pauses=later)
    assert (finding.rule, finding.culprit) == ("dead_lane", (1,))
    assert finding.summary == "the io lane of rank 1 has ended, and its rank went on without it"


def test_threads_that_ended_on_all_ranks_were_told_to() -> None:
    later: Pauses = {(rank, "scheduler"): {2: 30.0} for rank in (0, 1)}
    assert found(dict.fromkeys((0, 1), f"{READS}state:ended #killed"), 0.0, pauses=later) == []


def test_a_lane_that_closed_its_log_as_completed_is_done() -> None:
    assert found({0: f"{READS}#killed", 1: f"{READS}state:backend=7"}, 41.0) == []
