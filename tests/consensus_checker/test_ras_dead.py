from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from consensus_checker.claim import Claim
from consensus_checker.rules.ras_dead import find
from tests.support.foreign_lines import dossier, poll

EARLY, LATE = "2031-02-03 04:05:06", "2031-02-03 04:05:21"
FINE = {0: 9, 1: 9, 2: 9}


def claims(folder: Path, *polls: dict[str, Any]) -> list[Claim]:
    return find(dossier(folder, ras="\n".join(map(json.dumps, polls))))


def missing(*, dead: bool) -> Mapping[int, Mapping[str, bool]]:
    return {3: {"unresponsive": True, "considered_dead": dead}}


def test_who_is_considered_dead_is_dead(tmp_path: Path) -> None:
    (claim,) = claims(tmp_path, poll(EARLY, FINE, missing(dead=True)))
    assert (
        *(claim.finding.code, claim.finding.culprit, claim.finding.level),
        claim.needs_second_look,
    ) == (14, (3,), "high", False)


def test_one_poll_without_an_answer_needs_another(tmp_path: Path) -> None:
    (claim,) = claims(tmp_path, poll(EARLY, FINE, missing(dead=False)))
    assert claim.needs_second_look


def test_no_answer_twice_is_no_process_to_wait_for(tmp_path: Path) -> None:
    (claim,) = claims(tmp_path, *(poll(time, FINE, missing(dead=False)) for time in (EARLY, LATE)))
    assert (claim.finding.culprit, claim.finding.level, claim.needs_second_look) == ((3,), "medium", False)


def test_half_of_a_job_without_an_answer_is_nobody(tmp_path: Path) -> None:
    half = {rank: {"unresponsive": True, "considered_dead": True} for rank in (2, 3)}
    (claim,) = claims(tmp_path, poll(EARLY, {0: 9, 1: 9}, half))
    assert (claim.finding.culprit, claim.finding.unknown) == ((), (2, 3))


def test_an_event_names_a_process(tmp_path: Path) -> None:
    event = {"timestamp": EARLY, "group": "lifecycle", "event": "PEER_DEAD", "peer": "::1", "host": "h"}
    (claim,) = claims(tmp_path, event | {"pid": 301, "cuda_devs": "0", "nvml_devs": "0"})
    assert (
        claim.finding.culprit,
        claim.finding.summary,
    ) == ((), "pid 301 on h is dead, says an event of NCCL's monitor")


def test_a_job_that_answers_is_alive(tmp_path: Path) -> None:
    assert claims(tmp_path, poll(EARLY, FINE), poll(LATE, FINE)) == []
