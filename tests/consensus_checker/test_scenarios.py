"""Scenarios of the external tier and of the scheduler, each as one rank's log beside its peers'.

Every one has its healthy twin: what a correct runtime may do on one rank alone accuses nobody.
"""

from __future__ import annotations

import pytest

from consensus_checker.check import check
from consensus_checker.finding import Finding
from tests.support.history import history, lanes


def finding_of(text: str, *, pp: int = 1) -> Finding:
    return check(history(text, pp=pp)).finding


def first_of(finding: Finding) -> tuple[object, ...]:
    first = finding.first_divergence
    assert first is not None, finding
    return finding.culprit, first.lane, first.kind, first.call, first.index


def ranks(count: int, usual: dict[str, str], odd: dict[str, str], *, at: int = 2) -> str:
    """The same lanes on every rank, some of them otherwise on rank `at`."""
    return "\n".join(
        f"{rank}/{lane}  {odd.get(lane, text) if rank == at else text}"
        for rank in range(count)
        for lane, text in usual.items()
    )


ASKED = {
    "scheduler": "match:r1=0 submit:r1=128 match:r2=0 submit:r2=192 match:r3=0 submit:r3=64 | hit:1=128",
    "prefetch": "hits! hits. query:1=2 hits! hits. query:2=3 hits! hits. query:3=1",
}


def test_a_submission_that_one_rank_skips_is_missing_there_and_shifts_its_lane() -> None:
    skipped = {
        "scheduler": "match:r1=0 submit:r1=128 match:r2=0 match:r3=0 submit:r3=64 | hit:1=128 #hung",
        "prefetch": "hits! hits. query:1=2 hits! hits. query:2=1 state:idle #hung",
    }
    usual = {
        "scheduler": f"{ASKED['scheduler']} #hung",
        "prefetch": "hits! hits. query:1=2 hits! hits. query:2=1 hits! #hung",
    }
    verdict = check(history(ranks(4, usual, skipped)))
    finding = verdict.finding
    assert first_of(finding) == ((2,), "scheduler", "missing", "prefetch_submit", 3)
    # The collective is paired with another prefetch's, in silence, until one is left over.
    assert finding.consequence == ("stall", 11)
    assert finding.victim is not None
    assert (finding.victim.ranks, finding.victim.where) == ((0, 1, 3), "all_reduce tp0/hits #2")
    assert check(history(ranks(4, ASKED, {}))).code == 0


def test_a_lane_that_is_one_prefetch_behind_is_seen_by_the_prefetch_that_it_names() -> None:
    usual = {"prefetch": "query:1=2 query:2=3 query:3=1"}
    finding = finding_of(ranks(4, usual, {"prefetch": "query:1=2 query:3=3 query:4=1"}))
    assert first_of(finding) == ((2,), "prefetch", "value", "query", 1)
    assert finding.first_divergence is not None
    assert [
        (diff.field, diff.majority, dict(diff.values)) for diff in finding.first_divergence.field_diff
    ] == [("op", 2, {2: 3})]


def test_a_store_that_has_fewer_pages_on_one_rank_is_absorbed_by_the_minimum() -> None:
    usual = {
        "scheduler": "submit:r1=256 | hit:1=128",
        "prefetch": "hits! hits. query:1=2{local_pages=4}",
        "io": "read:1=2{local_tokens=128}",
        "sync": "progress! progress. progress:1=64{local_tokens=128}",
    }
    short = {
        "prefetch": "hits! hits. query:1=2{local_pages=2}",
        "io": "read:1=2{local_tokens=64}",
        "sync": "progress! progress. progress:1=64{local_tokens=64}",
    }
    assert check(history(ranks(4, usual, short))).kind == "consistent"


def test_a_side_pool_that_one_rank_lacks_is_absorbed_by_the_minimum_too() -> None:
    usual = {"prefetch": "hits! hits. query:1=0{local_pages=4}", "scheduler": "hit:1=0{host_pages_free=9}"}
    assert check(history(ranks(4, usual, {"prefetch": "hits! hits. query:1=0{local_pages=0}"}))).code == 0


def test_a_rank_that_takes_its_own_hit_and_not_the_least_is_named_with_what_it_saw() -> None:
    past = "query:1=4{local_pages=4} query:2=4{local_pages=4} "
    usual = {"prefetch": past + "query:3=2{local_pages=2}"}
    finding = finding_of(ranks(4, usual, {"prefetch": past + "query:3=4{local_pages=4}"}))
    assert (finding.culprit, finding.trigger and finding.trigger.fact) == ((2,), "local_pages")


def test_a_read_that_never_returns_is_where_its_peers_wait_for_its_progress() -> None:
    usual = {
        "scheduler": "poll:r1=wait #hung",
        "io": "state:backend=7 read:7=2 state:idle #hung",
        "sync": "state:collective=7 progress! #hung",
    }
    stuck = {"io": "state:backend=7 #hung", "sync": "state:idle #hung"}
    finding = finding_of(ranks(4, usual, stuck))
    assert (finding.code, finding.culprit, finding.victims) == (11, (2,), (0, 1, 3))
    assert "its io lane is in the backend with op 7" in finding.summary


@pytest.mark.parametrize("end", ["", "#hung"])
def test_a_lane_that_leaves_out_what_is_left_after_an_error_is_the_odd_one(end: str) -> None:
    usual = {
        "io": f"read:1=128 read:1=128 read:1=40 read:2=64 {end}",
        "sync": "progress! progress. progress:1=8192 " * 3 + f"progress! progress. progress:2=4096 {end}",
    }
    early = {
        "io": f"read:1=128 read:2=64 {end}",
        "sync": f"progress! progress. progress:1=8192 progress! progress. progress:2=8192 {end}",
    }
    verdict = check(history(ranks(4, usual, early)))
    assert first_of(verdict.finding) == ((2,), "io", "value", "read", 1)
    assert [finding.culprit for finding in verdict.findings] == [(2,)]


def test_an_abort_that_only_one_stage_heard_of_parts_the_stages() -> None:
    heard, unheard = "match:r1=0 abort:r1=waiting match:r2=0 admit:r2=1", "match:r1=0 match:r2=0 admit:r2=1"
    finding = finding_of(f"0 {heard}\n1 {heard}\n2 {unheard}\n3 {unheard}", pp=2)
    assert first_of(finding) == ((), "scheduler", "missing", "abort", 1)
    assert (finding.unknown, finding.basis[0]) == ((0, 1, 2, 3), "tie 2:2")
    alone = finding_of(f"0 {heard}\n1 {heard}\n2 {heard}\n3 {unheard}", pp=2)
    assert first_of(alone) == ((3,), "scheduler", "missing", "abort", 1)


def test_a_hit_that_one_rank_counts_twice_after_a_retraction_shows_before_the_backup_it_causes() -> None:
    text = "insert? insert=1 retract:r1=4 match:r1=0 insert? {} match:r2=0"
    usual, twice = text.format("insert=0"), text.format("backup:17=64 insert=1")
    finding = finding_of(f"0 {usual}\n1 {usual}\n2 {twice}")
    assert first_of(finding)[:3] == ((2,), "scheduler", "extra")
    quiet = finding_of(f"0 {usual}\n1 {usual}\n2 {text.format('insert=1')}")
    assert first_of(quiet) == ((2,), "scheduler", "value", "insert", 5)
    assert quiet.first_divergence is not None
    assert quiet.first_divergence.field_diff[0].field == "nodes_counted"


def test_a_rank_that_leaves_the_admission_loop_early_is_named_and_not_those_that_poll_on() -> None:
    past = "poll:r1=wait events! events. poll:r2=wait events! events. admit:r1=1 | " * 3
    on = past + "poll:r1=wait events! events. poll:r2=wait events! #hung"
    left = past + "poll:r1=wait events! events. admit:r1=1 main! #hung"
    finding = finding_of(f"0 {on}\n1 {on}\n2 {left}\n3 {on}")
    # It admits where the others go on asking, and what they admit they never come to.
    assert first_of(finding) == ((2,), "scheduler", "extra", "admit", 24)
    assert finding.consequence == ("stall", 11)
    assert finding.victim is not None
    assert (finding.victim.ranks, finding.victim.where) == ((0, 1, 3), "all_reduce tp0/events #7")


def test_a_deadline_is_the_first_stages_to_decide() -> None:
    text = "0 poll:r1=end{elapsed_ns=9}\n1 poll:r1=end{elapsed_ns=9}\n2 poll:r1=wait\n3 poll:r1=end"
    finding = finding_of(text, pp=2)
    assert (finding.culprit, finding.basis[0]) == ((2,), "leader pp0")


def test_a_clock_that_runs_late_on_one_rank_is_no_difference() -> None:
    assert check(lanes("0 poll:r1=wait{elapsed_ns=4}\n1 poll:r1=wait{elapsed_ns=900}")).code == 0
