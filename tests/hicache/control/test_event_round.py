"""Who may count what, and what happens to a backup that one rank could not reserve."""

from __future__ import annotations

from hicache.agentic import AgenticSpec
from hicache.config import Config
from hicache.control.agreement import ReserveThenVote
from hicache.topology import Topology
from tests.support.runs import agentic_plan, of_kind, run_in_memory

SPEC = AgenticSpec(conversations=3, rounds=4, max_context=2000, output=16, shared_prefix=64)


def test_the_ballot_counts_leading_reservations_only() -> None:
    vote = ReserveThenVote()
    assert [vote.ballot(reserved) for reserved in ([], [True, True], [True, False, True], [False])] == [
        0,
        2,
        1,
        0,
    ]


def test_the_second_stage_applies_what_the_first_counted_and_waits_for_its_own_copy() -> None:
    """Backup A is done on both stages, backup B still in flight on stage 1: both apply two acks.

    stage 0   A done  B done    -> agrees on 2, sends it on -> applies A, B
    stage 1   A done  B moving  -> receives 2, waits for B  -> applies A, B
    """
    config = Config(topology=Topology(pp=2), concurrency=1, transfer_polls_max=0)
    faults = [
        "delay_done:rank=0,queue=write,op=1,steps=1",
        "delay_done:rank=1,queue=write,op=2,steps=40",
    ]
    _, rows = run_in_memory(agentic_plan(config, SPEC, faults=faults))
    acks = {
        rank: [(row["step"], row["op"]) for row in of_kind(rows[rank], "transfer_ack")] for rank in (0, 1)
    }
    assert acks[0] == acks[1]
    second = next(row for row in of_kind(rows[1], "transfer_done") if row["op"] == 2)
    agreed = next(
        row
        for row in of_kind(rows[1], "event_round")
        if row["phase"] == "return" and row["seq"] < second["seq"] and row["step"] == second["step"]
    )
    assert agreed["writes_agreed"] > 0, "stage 1 saw B done only after it had been told to apply it"


def test_a_backup_that_one_rank_could_not_reserve_is_cancelled_on_all() -> None:
    config = Config(topology=Topology(tp=3), host_pages=100, concurrency=1, transfer_polls_max=0)
    _, rows = run_in_memory(agentic_plan(config, SPEC, faults=["alloc_fail:rank=1,pool=host,nth=2"]))
    cancelled = {rank: of_kind(rows[rank], "backup_cancel") for rank in rows}
    assert [len(found) for found in cancelled.values()] == [1, 1, 1]
    assert {row["node"] for found in cancelled.values() for row in found} == {cancelled[0][0]["node"]}
    assert [cancelled[rank][0]["reserved"] for rank in range(3)] == [True, False, True]
    node = cancelled[0][0]["node"]
    again = [row for row in of_kind(rows[1], "write_backup") if row["node"] == node]
    assert [row["tokens"] > 0 for row in again] == [True, True], "it is backed up when it is next inserted"


def test_every_rank_joins_every_round_also_when_it_has_nothing_to_report() -> None:
    config = Config(topology=Topology(tp=2), concurrency=1)
    result, rows = run_in_memory(agentic_plan(config, SPEC))
    for rank in (0, 1):
        meetings = [
            row
            for row in of_kind(rows[rank], "meeting")
            if row["purpose"] == "event_round" and row["phase"] == "leave"
        ]
        assert len(meetings) == result.steps - 1, "one a step, but for the last, which only says goodbye"
