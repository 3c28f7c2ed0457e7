from __future__ import annotations

from pathlib import Path

from consensus_checker.finding import Finding
from consensus_checker.rules.process_died import find
from tests.support.foreign_lines import GLOO_CLOSED, GLOO_RESET, GLOO_SIZES, dossier

OWN = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nIndexError: pop from empty list\n'
LOST = f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n{GLOO_CLOSED}'


def findings(folder: Path, **logs: str) -> list[Finding]:
    return [claim.finding for claim in find(dossier(folder, **logs))]


def report(rank: int, code: int, pid: int) -> str:
    return f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: {pid})\n"


def test_a_killed_process_is_named_by_the_launchers_report(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, launcher=report(1, -9, 4242), rank_0=GLOO_CLOSED, rank_2=GLOO_RESET)
    assert (found.code, found.culprit, found.victims, found.level) == (14, (1,), (0, 2), "medium")
    assert found.summary == "the process of rank 1 ended: SIGKILL"


def test_a_crash_is_surer_than_a_kill(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, launcher=report(1, -11, 4242), rank_0=GLOO_CLOSED, rank_2=GLOO_RESET)
    assert (found.culprit, found.level) == ((1,), "high")


def test_who_was_told_to_end_did_not_die(tmp_path: Path) -> None:
    text = "Sending process 4242 closing signal SIGTERM\n" + report(1, -9, 4242) + report(2, -15, 4243)
    assert findings(tmp_path, launcher=text, rank_0=GLOO_CLOSED) == []


def test_who_gloo_aborted_did_not_die_of_its_own(tmp_path: Path) -> None:
    assert findings(tmp_path, launcher=report(1, -6, 4242), rank_0=GLOO_RESET, rank_1=GLOO_SIZES) == []


def test_an_abort_without_a_rank_may_be_anybodys(tmp_path: Path) -> None:
    assert findings(tmp_path, launcher=report(1, -6, 4242), stderr=GLOO_SIZES, rank_0=GLOO_RESET) == []


def test_who_lost_the_others_and_aborts_is_a_victim(tmp_path: Path) -> None:
    assert findings(tmp_path, launcher=report(1, -6, 4242), rank_1=GLOO_CLOSED, rank_2=GLOO_CLOSED) == []


def test_an_abort_after_an_error_of_its_own_says_both(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, launcher=report(1, -6, 4242), rank_0=LOST, rank_1=OWN, rank_2=LOST)
    assert (found.culprit, found.summary) == ((1,), "the process of rank 1 ended: SIGABRT, after IndexError")


def test_an_error_of_its_own_ends_a_rank_and_the_others_lose_it(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, rank_0=LOST, rank_1=OWN, rank_2=LOST)
    assert (found.code, found.culprit, found.victims, found.level) == (14, (1,), (0, 2), "medium")
    assert found.summary == "the process of rank 1 ended: IndexError"


def test_who_raises_because_of_others_and_again_is_a_victim(tmp_path: Path) -> None:
    assert findings(tmp_path, rank_0=LOST + OWN, rank_1=LOST, rank_2=LOST) == []


def test_an_error_on_half_of_the_ranks_is_nobodys(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, rank_0=OWN, rank_1=OWN, rank_2=LOST, rank_3=LOST)
    assert (found.culprit, found.unknown) == ((), (0, 1))


def test_an_error_that_nobody_lost_anything_by_is_left_alone(tmp_path: Path) -> None:
    assert findings(tmp_path, rank_0=OWN, rank_1="INFO fine\n") == []
