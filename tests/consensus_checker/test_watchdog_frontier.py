from __future__ import annotations

from pathlib import Path

import pytest

from consensus_checker.finding import Finding
from consensus_checker.rules.watchdog_frontier import find
from tests.support.foreign_lines import dossier, timed_out, watchdog

Named = tuple[int, tuple[int, ...], tuple[int, ...]]


def named(finding: Finding) -> Named:
    return finding.code, finding.culprit, finding.victims


def findings(folder: Path, text: str) -> list[Finding]:
    return [claim.finding for claim in find(dossier(folder, server=text))]


def counters(*ranks: tuple[int, int], group: str = "PG ID 0 PG GUID 0(default_pg)") -> str:
    return "".join(watchdog(rank, *own, group=group) for rank, own in enumerate(ranks))


def test_the_rank_that_enqueued_least_did_not_join(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, counters((5123, 5119), (5120, 5119), (5123, 5119), (5123, 5119)))
    assert named(found) == (11, (1,), (0, 2, 3))
    assert (found.level, found.basis) == ("medium", ("counters of 4 ranks",))
    assert found.summary == "rank 1 did not join #5121 of group default_pg, in which ranks 0, 2-3 wait"
    assert [(entry.file, entry.record, entry.supports) for entry in found.evidence[:2]] == [
        ("server.log", 2, "culprit 1"),
        ("server.log", 1, "victim 0"),
    ]


def test_the_rank_that_alone_went_on_is_odd_and_not_all_others(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, counters((7, 6), (6, 6), (6, 6), (6, 6), (6, 6), (6, 6), (6, 6), (6, 6)))
    assert named(found) == (11, (0,), (1, 2, 3, 4, 5, 6, 7))
    assert found.summary == "rank 0 called #7 of group default_pg, which nobody else did"


def test_two_of_two_are_a_tie(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, counters((7, 6), (6, 6)))
    assert (named(found), found.unknown) == ((20, (), ()), (0, 1))


def test_a_work_that_others_completed_was_joined(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, counters((9, 7), (7, 6), (9, 7), (9, 7)))
    assert named(found) == (12, (1,), (0, 2, 3))


def test_all_have_joined_and_nobody_gets_further(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, counters((9, 7), (9, 7), (9, 7)))
    assert named(found) == (13, (), (0, 1, 2))
    assert found.summary == "all of ranks 0-2 have joined #9 of group default_pg, and nobody completes #8"


def test_one_device_is_behind_the_others(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, counters((9, 9), (9, 7), (9, 9)))
    assert named(found) == (12, (1,), (0, 2))


@pytest.mark.parametrize("own", [(-1, -1), (412, 412)])
def test_a_group_that_nobody_waits_in_says_nothing(tmp_path: Path, own: tuple[int, int]) -> None:
    assert findings(tmp_path, counters(own, own, own)) == []


def test_counters_that_were_never_set_are_left_out(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, counters((9, 7), (94_527_319_283_712, 7), (8, 7), (9, 7)))
    assert (found.culprit, found.unknown, found.silent) == ((), (2,), (1,))


def test_where_a_rank_is_missing_the_one_behind_may_wait_for_it(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, watchdog(0, 9, 7) + watchdog(1, 8, 7) + watchdog(3, 9, 7))
    assert (found.culprit, found.unknown, found.silent, found.level) == ((), (1,), (2,), "low")


def test_stages_of_a_pipeline_are_apart_legally(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, counters((9, 7), (8, 7), (9, 7), group="PG ID 3 PG GUID 5(pp)"))
    assert (named(found), found.unknown) == ((20, (), ()), (1,))


def test_a_group_with_messages_is_counted_otherwise(tmp_path: Path) -> None:
    group = "PG ID 3 PG GUID 5(mixed)"
    text = counters((9, 7), (8, 7), (9, 7), group=group) + timed_out(1, 4, "SEND", group=group)
    assert [named(found) for found in findings(tmp_path, text)] == [(20, (), ())]


def test_one_name_for_two_groups_is_no_group(tmp_path: Path) -> None:
    text = "".join(
        watchdog(rank, count, 1, group="PG 3").replace(f"Rank {rank}]", f"Rank {rank % 2}]")
        for rank, count in enumerate((9, 9, 5, 5))
    )
    assert findings(tmp_path, text) == []


def test_the_newest_line_of_a_rank_counts(tmp_path: Path) -> None:
    assert findings(tmp_path, counters((9, 9), (5, 5), (9, 9)) + watchdog(1, 9, 9)) == []


def test_who_stands_between_waits_too(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, counters((9, 6), (8, 6), (7, 6), (9, 6), (9, 6)))
    assert named(found) == (11, (2,), (0, 1, 3, 4))


def test_what_others_completed_without_it_may_be_a_broadcast(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, counters((9, 8), (6, 6), (9, 8), (9, 8)))
    assert (named(found), found.unknown) == ((20, (), ()), (1,))


def test_two_groups_that_name_different_ranks_name_nobody(tmp_path: Path) -> None:
    events = counters((26, 25), (27, 25), (27, 25), group="PG ID 2 PG GUID 7(events)")
    main = counters((40, 39), (39, 39), (40, 39), group="PG ID 1 PG GUID 5(main)")
    assert [(named(found), found.unknown) for found in findings(tmp_path, events + main)] == [
        ((20, (), (1, 2)), (0,)),
        ((20, (), (0, 2)), (1,)),
    ]


def test_two_groups_that_name_one_rank_name_it(tmp_path: Path) -> None:
    events = counters((26, 25), (26, 25), (25, 25), group="PG ID 2 PG GUID 7(events)")
    main = counters((39, 39), (39, 39), (40, 39), group="PG ID 1 PG GUID 5(main)")
    assert [found.culprit for found in findings(tmp_path, events + main)] == [(2,), (2,)]
