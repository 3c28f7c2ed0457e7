"""What looks like trouble and is none: each has a test, here or where it says.

false alarm                                our logs                                others' evidence
addresses, clocks, sets in payloads        test_payload, test_divergence_lines     (has no payload)
slots, stages, owners, completion times    test_agreement, below                   below
skew that an agreement absorbs             below                                   test_status_lists
a snapshot of a running job                test_hearts, below                      below
ring truncation                            test_ring                               below
a rank dumped first or last                (read to their ends)                    below
only-active dumps of idle ranks            (no such thing)                         below
restarted processes                        below, test_clocks_and_restarts         below
two jobs' files in one folder              test_headers, below                     below
clocks off by minutes                      test_hearts, test_clocks_and_restarts   below
a shutdown in the middle of a vote         test_agreement, test_stall              below
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from consensus_checker.check import check
from tests.support.evidence import STACK, WATCHDOG, diagnosed, dump, put
from tests.support.hearts import beating, write_logs
from tests.support.history import history

RANKS = range(3)
ROUND = "events! events. match:r1=64 "


def code_of(folder: Path) -> int:
    told = diagnosed(folder).verdict
    assert all(one.culprit == () for one in (told.finding, *told.findings)), told.finding.summary
    return told.code


def healthy(folder: Path, *, enqueued: int = 40) -> Path:
    """Three ranks, each looked at twice; the second look is ten calls on."""
    first = {f"look1/trace_rank_{rank}": dump(enqueued, open_calls=0) for rank in RANKS}
    second = {f"look2/trace_rank_{rank}": dump(enqueued + 10, open_calls=0) for rank in RANKS}
    return put(folder, {**first, **second})


# Our logs.


def test_a_store_that_returns_two_pages_fewer_on_one_rank_is_absorbed_by_the_minimum() -> None:
    text = """
        0  query:7=6{local_pages=8}  progress:7=6{local_tokens=8}
        1  query:7=6{local_pages=6}  progress:7=6{local_tokens=6}
        2  query:7=6{local_pages=8}  progress:7=6{local_tokens=8}
    """
    assert check(history(text)).code == 0


def test_stages_and_owners_that_write_what_is_theirs_are_not_compared() -> None:
    text = """
        0  match:r1=64  main!  main.  done:1
        1  match:r1=64  main!  main.
        2  match:r1=64  events!  events.  done:2
        3  match:r1=64  events!  events.
    """
    assert check(history(text, pp=2)).code == 0


def test_logs_of_a_job_that_still_runs_accuse_nobody(tmp_path: Path) -> None:
    text = f"0 {ROUND * 9}events! #killed\n1 {ROUND * 9}events! #killed\n2 {ROUND * 9}done:1 #killed"
    folder = write_logs(tmp_path, beating(text, {0: 0.1, 1: 0.1, 2: 0.0}))
    told = diagnosed(folder).verdict
    assert (told.kind, told.code, told.finding.culprit) == ("incomplete", 4, ())
    assert [one.summary for one in told.finding.alternatives] == [
        "ranks 0-1 are in all_reduce tp0/events #9 and rank 2 is not where the logs break off: a stall, if "
        "that lasted"
    ]


def test_of_a_job_that_was_started_again_the_last_attempt_is_judged(tmp_path: Path) -> None:
    crashed = [f"{rank} match:r1={64 + (rank == 2)} #crashed" for rank in RANKS]
    fine = [f"{rank} match:r1=64" for rank in RANKS]
    for attempt, text in enumerate((crashed, fine)):
        made = beating("\n".join(text), {})
        for lane in made:
            assert isinstance(lane.header, dict)
            lane.header["attempt"] = attempt
        write_logs(tmp_path / f"attempt-{attempt}", made)
    told = diagnosed(tmp_path)
    assert (told.verdict.kind, told.verdict.code) == ("consistent", 0)
    assert told.notes == ("attempt 0 of run run-a is left out: there is attempt 1",)


def test_logs_of_two_jobs_in_two_folders_are_never_compared_with_each_other(tmp_path: Path) -> None:
    for name, tokens in (("run-a", 64), ("run-b", 128)):
        text = "\n".join(f"{rank} match:r1={tokens}" for rank in RANKS)
        write_logs(tmp_path / name, beating(text, {}, runs=dict.fromkeys(RANKS, name)))
    assert code_of(tmp_path) == 0


# Others' evidence.


def test_two_looks_at_a_job_that_goes_on_are_healthy(tmp_path: Path) -> None:
    told = diagnosed(healthy(tmp_path)).verdict
    assert (told.kind, told.code) == ("consistent", 0)
    assert told.finding.summary == (
        "nothing contradicts: 8 calls compared on ranks 0-2, and a second look shows that all of them went on"
    )


@pytest.mark.parametrize("behind", RANKS)
def test_one_look_at_a_running_job_accuses_nobody(behind: int, tmp_path: Path) -> None:
    files = {f"trace_rank_{rank}": dump(40 - (rank == behind), open_calls=0) for rank in RANKS}
    assert code_of(put(tmp_path, files)) == 4


@pytest.mark.parametrize("first", RANKS)
def test_a_rank_that_was_dumped_first_or_last_is_not_behind(first: int, tmp_path: Path) -> None:
    looks = {
        f"look{look}/trace_rank_{rank}": dump(40 + 10 * look - 4 * (rank == first), open_calls=0)
        for look in (1, 2)
        for rank in RANKS
    }
    assert code_of(put(tmp_path, looks)) in (0, 4)


def test_rings_that_hold_different_calls_are_compared_where_both_have_them(tmp_path: Path) -> None:
    files = {f"trace_rank_{rank}": dump(40, open_calls=0, kept=4 + 9 * rank) for rank in RANKS}
    assert code_of(put(tmp_path, files)) == 4


def test_idle_ranks_whose_only_active_dumps_are_empty_accuse_nobody(tmp_path: Path) -> None:
    idle = json.loads(dump(40, open_calls=0))
    idle["entries"] = []
    assert code_of(put(tmp_path, {f"trace_rank_{rank}": json.dumps(idle) for rank in RANKS})) == 4


def test_a_process_that_was_started_again_has_not_gone_back(tmp_path: Path) -> None:
    before = {f"look1/trace_rank_{rank}": dump(900, open_calls=0) for rank in RANKS}
    after = {f"look2/trace_rank_{rank}": dump(7, open_calls=0) for rank in RANKS}
    assert code_of(put(tmp_path, {**before, **after})) == 4


def test_dumps_of_two_jobs_in_one_folder_are_not_two_looks_at_one(tmp_path: Path) -> None:
    one = {f"job-a/trace_rank_{rank}": dump(40, open_calls=0) for rank in RANKS}
    two = {f"job-b/trace_rank_{rank}": dump(13, open_calls=0, group="main") for rank in RANKS}
    assert code_of(put(tmp_path, {**one, **two})) == 4


def test_groups_of_a_ranks_own_are_not_missed_elsewhere(tmp_path: Path) -> None:
    files = {
        f"trace_rank_{rank}": dump(40 if rank < 2 else 3, open_calls=0, group=group, members=members)
        for rank, group, members in (
            (0, "tp0", (0, 1)),
            (1, "tp0", (0, 1)),
            (2, "tp1", (2, 3)),
            (3, "tp1", (2, 3)),
        )
    }
    assert code_of(put(tmp_path, files)) == 4


def test_clocks_that_are_minutes_apart_do_not_matter_in_dumps(tmp_path: Path) -> None:
    def shifted(data: bytes, minutes: int) -> bytes:
        document = json.loads(data)
        for entry in document["entries"]:
            entry["time_created_ns"] += minutes * 60 * 1_000_000_000
        return json.dumps(document).encode()

    stuck = {f"trace_rank_{rank}": dump(40 - (rank == 2), open_calls=rank != 2) for rank in RANKS}
    plain = diagnosed(put(tmp_path / "plain", stuck)).verdict
    moved = {name: shifted(data, 7 * (at - 1)) for at, (name, data) in enumerate(stuck.items())}
    assert diagnosed(put(tmp_path / "moved", moved)).verdict.finding == plain.finding


def test_stacks_of_idle_schedulers_accuse_nobody(tmp_path: Path) -> None:
    idle = STACK.format(call="recv_pyobj", line=210, func="recv_requests")
    looks = {f"look{look}/rank_{rank}.txt": idle for look in (1, 2) for rank in RANKS}
    assert code_of(put(tmp_path, looks)) == 4


def test_watchdog_lines_of_a_shutdown_that_all_ranks_print_alike_accuse_nobody(tmp_path: Path) -> None:
    log = "".join(WATCHDOG.format(rank=rank, work=41, enqueued=41, completed=41) for rank in RANKS)
    assert code_of(put(tmp_path, {"server.log": log})) in (4, 20)
