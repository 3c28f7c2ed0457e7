from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from consensus_checker.claim import Claim
from consensus_checker.rules import ras_dead
from consensus_checker.rules.ras_counts import find
from tests.support.foreign_lines import dossier, poll

EARLY, LATE = "2031-02-03 04:05:06", "2031-02-03 04:05:21"


def claims(folder: Path, *polls: dict[str, Any]) -> list[Claim]:
    return find(dossier(folder, ras="\n".join(map(json.dumps, polls))))


def test_who_stays_behind_did_not_join(tmp_path: Path) -> None:
    (claim,) = claims(tmp_path, poll(EARLY, {0: 9, 1: 8, 2: 9}), poll(LATE, {0: 9, 1: 8, 2: 9}))
    found = claim.finding
    assert (
        *(found.code, found.culprit, found.victims, found.level),
        claim.needs_second_look,
    ) == (11, (1,), (0, 2), "medium", False)
    assert found.summary == "rank 1 did not join: 8 AllReduce calls, the others 9, in communicator a1/b2"


def test_who_alone_went_on_is_odd(tmp_path: Path) -> None:
    same = {0: 9, 1: 8, 2: 8, 3: 8}
    (claim,) = claims(tmp_path, poll(EARLY, same), poll(LATE, same))
    assert (claim.finding.culprit, claim.finding.victims) == ((0,), (1, 2, 3))


def test_who_moves_is_late_at_most(tmp_path: Path) -> None:
    assert claims(tmp_path, poll(EARLY, {0: 9, 1: 7, 2: 9}), poll(LATE, {0: 9, 1: 8, 2: 9})) == []


def test_polls_too_near_are_one_look(tmp_path: Path) -> None:
    same = {0: 9, 1: 8, 2: 9}
    (claim,) = claims(tmp_path, poll(EARLY, same), poll("2031-02-03 04:05:15", same))
    assert claim.needs_second_look


def test_another_op_is_a_mismatch(tmp_path: Path) -> None:
    both = [poll(time, {0: 9, 1: 8, 2: 9}, others={0: 3, 1: 4, 2: 3}) for time in (EARLY, LATE)]
    (claim,) = claims(tmp_path, *both)
    assert (claim.finding.code, claim.finding.culprit) == (16, (1,))
    assert (
        claim.finding.summary
        == "rank 1 called Broadcast where the others called AllReduce, in communicator a1/b2"
    )


def test_messages_are_not_compared(tmp_path: Path) -> None:
    same = {0: 9, 1: 9, 2: 9}
    assert claims(tmp_path, poll(EARLY, same), poll(LATE, same)) == []


def test_of_two_members_either_may_be_it(tmp_path: Path) -> None:
    (claim,) = claims(tmp_path, poll(EARLY, {0: 9, 1: 8}), poll(LATE, {0: 9, 1: 8}))
    assert (claim.finding.culprit, claim.finding.unknown) == ((), (0, 1))


def test_who_does_not_answer_may_be_the_one(tmp_path: Path) -> None:
    missing = {3: {"unresponsive": True, "considered_dead": False}}
    both = [poll(time, {0: 9, 1: 8, 2: 9}, missing) for time in (EARLY, LATE)]
    (claim,) = claims(tmp_path, *both)
    assert (claim.finding.culprit, claim.finding.unknown) == ((), (1,))
    (dead,) = ras_dead.find(dossier(tmp_path))
    assert (dead.finding.code, dead.finding.culprit, dead.finding.level) == (14, (3,), "medium")


def test_a_smaller_communicators_members_have_ranks_of_the_whole_job(tmp_path: Path) -> None:
    def both(time: str) -> dict[str, Any]:
        whole = poll(time, dict.fromkeys(range(6), 9))
        part = poll(time, {0: 9, 1: 8, 2: 9})["communicators"][0]
        for member in part["ranks"]:
            member["pid"] += 3
        whole["communicators"].append(part | {"hash": "c3"})
        return whole

    (claim,) = claims(tmp_path, both(EARLY), both(LATE))
    assert (claim.finding.culprit, claim.finding.victims) == ((4,), (3, 5))
