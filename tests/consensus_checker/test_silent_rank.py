from __future__ import annotations

from pathlib import Path

from consensus_checker.finding import Finding
from consensus_checker.rules.silent_rank import find
from tests.support.foreign_lines import GLOO_CLOSED, GLOO_RESET, GLOO_TIMEOUT, dossier, timed_out

FINE = "INFO step 7\nINFO step 8\n"


def findings(folder: Path, **logs: str) -> list[Finding]:
    return [claim.finding for claim in find(dossier(folder, **logs))]


def test_the_only_rank_that_says_nothing_is_whom_all_others_waited_for(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, rank_0=GLOO_TIMEOUT, rank_1=FINE, rank_2=GLOO_TIMEOUT)
    assert (found.code, found.culprit, found.victims, found.level) == (11, (1,), (0, 2), "low")
    assert (
        found.evidence[0].file,
        found.evidence[0].record,
        found.evidence[0].supports,
    ) == ("rank_1.log", 2, "culprit 1: its log ends")


def test_an_empty_log_is_a_log(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, rank_0=GLOO_TIMEOUT, rank_1="", rank_2=GLOO_TIMEOUT)
    assert (found.code, found.culprit) == (11, (1,))


def test_who_was_ended_may_have_had_no_time_to_speak(tmp_path: Path) -> None:
    ended = "Sending process 4242 closing signal SIGTERM\n"
    logs = {"rank_0": GLOO_TIMEOUT, "rank_1": FINE, "rank_2": GLOO_TIMEOUT}
    (found,) = findings(tmp_path, launcher=ended, **logs)
    assert (found.code, found.culprit, found.silent) == (20, (), (1,))


def test_closed_connections_alone_name_nobody(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, rank_0=GLOO_CLOSED, rank_1=FINE, rank_2=GLOO_RESET)
    assert (found.code, found.culprit, found.silent, found.level) == (14, (), (1,), "low")


def test_of_two_ranks_either_may_be_it(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, rank_0=GLOO_TIMEOUT, rank_1=FINE)
    assert (found.code, found.culprit, found.victims, found.silent) == (20, (), (0,), (1,))


def test_one_that_waits_while_all_others_are_silent_names_nobody(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, rank_0=GLOO_TIMEOUT, rank_1=FINE, rank_2=FINE)
    assert (found.code, found.culprit, found.silent) == (20, (), (1, 2))


def test_where_all_report_nobody_is_silent(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, rank_0=GLOO_TIMEOUT, rank_1=GLOO_TIMEOUT, rank_2=GLOO_CLOSED)
    assert (found.code, found.culprit, found.silent) == (20, (), ())


def test_a_log_that_is_not_here_leaves_it_open(tmp_path: Path) -> None:
    (claim,) = find(dossier(tmp_path, rank_0=GLOO_TIMEOUT, rank_1=FINE, rank_3=GLOO_TIMEOUT))
    assert (claim.finding.code, claim.finding.culprit, claim.missing) == (20, (), (2,))


def test_ranks_of_one_servers_log_are_told_by_their_prefixes(tmp_path: Path) -> None:
    text = "".join(f"[2031-02-03 04:05:06 TP{rank}] ready\n" for rank in range(4))
    text += "".join(timed_out(rank, 41) for rank in (0, 1, 3))
    (found,) = findings(tmp_path, server=text)
    assert (found.code, found.culprit, found.victims) == (11, (2,), (0, 1, 3))


def test_a_healthy_job_has_nothing_to_report(tmp_path: Path) -> None:
    assert findings(tmp_path, rank_0=FINE, rank_1=FINE, rank_2=FINE) == []
