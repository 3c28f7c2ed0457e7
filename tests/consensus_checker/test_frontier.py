"""Who did not join, by flight recorders: the smallest dumps that say it, and those that must not."""

from __future__ import annotations

from dataclasses import replace

from consensus_checker.claim import Claim
from consensus_checker.rules.frontier import find
from tests.support.recorded import dossier
from tracer.importers.dossier import At, Call, Group, Progress


def told(claims: list[Claim]) -> list[tuple[object, ...]]:
    return [
        (claim.finding.rule, claim.finding.code, claim.finding.culprit, claim.finding.unknown)
        for claim in claims
    ]


def test_a_rank_that_has_called_less_than_the_open_call_did_not_join() -> None:
    dumps = dossier("""
        0  tp: 41 42 43~
        1  tp: 41 42 43~
        2  tp: 41 42
    """)
    (claim,) = find(dumps)
    finding = claim.finding
    assert (finding.rule, finding.code, finding.culprit, finding.victims) == (
        "fr_not_joined",
        11,
        (2,),
        (0, 1),
    )
    assert finding.summary == "rank 2 did not join all_reduce #43 of tp"
    assert (finding.evidence[0].file, finding.evidence[0].record, finding.evidence[0].supports) == (
        "dump_2",
        1,
        "culprit 2: called 42, ended 42 of tp",
    )
    assert finding.level == "medium"
    assert not claim.needs_second_look


def test_the_call_that_a_group_stands_at_is_the_oldest_open_one() -> None:
    # Rank 1 has not called 45 either, and stands in 43 with the others.
    dumps = dossier("""
        0  tp: 42 43~ 44~ 45~
        1  tp: 42 43~ 44~
        2  tp: 42
    """)
    assert told(find(dumps)) == [("fr_not_joined", 11, (2,), ())]


def test_nobody_who_waits_accuses_nobody() -> None:
    dumps = dossier("""
        0  tp: 41 42 43
        1  tp: 41 42
        2  tp: 41
    """)
    assert find(dumps) == []


def test_a_watchdog_that_gave_the_call_up_makes_it_sure() -> None:
    dumps = dossier("""
        0  tp: 41 42 43!
        1  tp: 41 42 43!
        2  tp: 41 42
    """)
    (claim,) = find(dumps)
    assert (claim.finding.level, claim.finding.culprit) == ("high", (2,))
    assert "the library's watchdog has given it up" in claim.finding.basis


def test_as_many_missing_as_waiting_name_nobody() -> None:
    dumps = dossier("""
        0  tp: 42 43~
        1  tp: 42
    """)
    (claim,) = find(dumps)
    assert (claim.finding.culprit, claim.finding.unknown, claim.finding.victims) == ((), (1,), (0,))
    assert [one.summary for one in claim.finding.alternatives] == ["rank 0 made a call too many in tp"]


def test_one_that_waits_alone_may_have_made_the_call_too_many() -> None:
    dumps = dossier("""
        0  tp: 42
        1  tp: 42 43~
        2  tp: 42
        3  tp: 42
    """)
    (claim,) = find(dumps)
    assert (claim.finding.level, claim.finding.culprit, claim.finding.unknown) == (
        "undetermined",
        (),
        (0, 2, 3),
    )


def test_who_waits_in_an_inner_group_is_explained_by_it() -> None:
    # Half of the world is missing; only rank 3 has no excuse.
    dumps = dossier("""
        0  tp0: 8 | world: 5 6~
        1  tp0: 8 | world: 5 6~
        2  tp1: 8 9~ | world: 5
        3  tp1: 8 | world: 5
    """)
    assert told(find(dumps)) == [("fr_not_joined", 11, (3,), ())]


def test_a_rank_missed_in_an_outer_group_only_is_not_named_beside_one_missed_inside() -> None:
    dumps = dossier("""
        0  tp: 8 9~ | world: 5 6~
        1  tp: 8 9~ | world: 5 6~
        2  tp: 8 | world: 5
        3  world: 5
        4  world: 5 6~
    """)
    (claim,) = find(dumps)
    assert (claim.finding.culprit, claim.finding.unknown) == ((2,), (3,))


def test_ranks_that_wait_for_each_other_are_a_circle_without_a_culprit() -> None:
    dumps = dossier("""
        0  a: 8 9~ | b: 5
        1  a: 8 9~ | b: 5
        2  a: 8 | b: 5 6~
    """)
    assert told(find(dumps)) == [("fr_not_joined", 11, (), (0, 1, 2))]


def test_what_ended_anywhere_was_joined_by_all() -> None:
    # Rank 0's dump is from before: it has been in 44 since.
    dumps = dossier("""
        0  tp: 41 42
        1  tp: 43 44 45
        2  tp: 43 44 45
    """)
    assert find(dumps) == []


def test_an_old_dump_is_no_laggard() -> None:
    dumps = dossier("""
        0  tp: 41 42
        1  tp: 43 44 45~
        2  tp: 43 44
        3  tp: 43 44 45~
        4  tp: 43 44 45~
    """)
    (claim,) = find(dumps)
    assert (claim.finding.culprit, claim.finding.silent) == ((2,), (0,))
    assert claim.needs_second_look


def test_a_broadcast_that_ended_at_its_source_does_not_prove_that_all_joined() -> None:
    dumps = dossier("""
        0  tp: 41 42:broadcast 43~
        1  tp: 41 42:broadcast~
        2  tp: 41
        3  tp: 41 42:broadcast 43~
    """)
    (claim,) = find(dumps)
    assert claim.finding.culprit == (2,)
    assert "rank 2 did not join broadcast #42 of tp" in claim.finding.summary


def test_a_gloo_call_that_failed_counts_as_ended_and_proves_nothing() -> None:
    # 43 ended with an error on ranks 0 and 1; rank 2 never came.
    dumps = dossier(
        """
        0  tp: 42 43
        1  tp: 42 43
        2  tp: 42
    """,
        backend="gloo",
    )
    assert find(dumps) == []


def test_one_look_at_gloo_needs_a_second() -> None:
    dumps = dossier(
        """
        0  tp: 42 43~
        1  tp: 42 43~
        2  tp: 42
    """,
        backend="gloo",
    )
    (claim,) = find(dumps)
    assert claim.needs_second_look


def test_two_equal_looks_show_that_it_stands() -> None:
    dumps = dossier(
        """
        0  tp: 42 43~
        0  tp: 42 43~
        1  tp: 42 43~
        2  tp: 42
    """,
        backend="gloo",
    )
    (claim,) = find(dumps)
    assert (claim.needs_second_look, claim.finding.level, claim.finding.culprit) == (False, "high", (2,))


def test_a_dump_and_its_conversion_are_one_look() -> None:
    dumps = dossier(
        """
        0  tp: 42 43~
        0  tp: 42 43~
        1  tp: 42 43~
        2  tp: 42
    """,
        backend="gloo",
        forms=("pickle", "lines", "pickle", "pickle"),
    )
    (claim,) = find(dumps)
    assert claim.needs_second_look


def test_two_looks_that_show_progress_clear_a_rank() -> None:
    dumps = dossier("""
        0  tp: 42 43~
        1  tp: 42 43~
        2  tp: 41
        2  tp: 41 42
    """)
    assert find(dumps) == []


def test_a_rank_without_a_dump_is_named_where_the_others_wait_for_exactly_it() -> None:
    dumps = dossier(
        """
        0  tp: 42 43~
        1  tp: 42 43~
    """,
        members={"tp": [0, 1, 2]},
    )
    (claim,) = find(dumps)
    assert (claim.finding.level, claim.finding.culprit, claim.missing) == ("low", (2,), (2,))
    assert [one.rule for one in claim.finding.alternatives] == ["fr_all_joined", "fr_not_joined"]


def test_of_two_ranks_without_a_dump_neither_is_named() -> None:
    dumps = dossier(
        """
        0  tp: 42 43~
        1  tp: 42 43~
    """,
        members={"tp": [0, 1, 2, 3]},
    )
    (claim,) = find(dumps)
    assert (claim.finding.code, claim.finding.culprit, claim.finding.silent) == (20, (), (2, 3))


def test_a_rank_that_may_wait_for_one_without_a_dump_is_not_named() -> None:
    # 2 did not join in `ep`; in `tp` it may wait for 3, of which there is nothing.
    dumps = dossier(
        """
        0  ep: 7 8~
        1  ep: 7 8~
        2  ep: 7 | tp: 3 4~
    """,
        members={"tp": [2, 3], "ep": [0, 1, 2, 3]},
    )
    (claim,) = find(dumps)
    assert (claim.finding.culprit, claim.finding.unknown, claim.finding.silent) == ((), (2,), (3,))


def test_a_dump_without_a_call_is_of_a_rank_that_waits_nowhere() -> None:
    dumps = dossier(
        """
        0  tp: 42 43~
        1  tp: 42 43~
        2  -
    """,
        members={"tp": [0, 1, 2]},
    )
    (claim,) = find(dumps)
    assert (claim.finding.level, claim.finding.culprit) == ("medium", (2,))
    assert "how many calls rank 2 made is not known, only that none is open" in claim.finding.basis


def test_a_state_tells_of_a_group_whose_calls_are_not_in_the_dump() -> None:
    # Only what is active was dumped, and of rank 2 nothing is.
    dumps = dossier("""
        0  35: 43~
        1  35: 43~
        2  35=42/42
    """)
    (claim,) = find(dumps)
    assert claim.finding.culprit == (2,)
    assert claim.finding.evidence[0].supports == "culprit 2: called 42, ended 42 of 35"


def test_a_point_to_point_call_between_them_keeps_a_rank_from_being_named() -> None:
    dumps = dossier("""
        0  world: 42 43~
        1  world: 42 43~
        2  world: 42
    """)
    receive = Call(8, "recv 1<-0", "recv", "scheduled", False, True, At(2, 9))
    pair = Progress(Group("pp", "", (0, 2)), -1, -1, -1, -1, -1, At(2, 9), p2p=(receive,))
    dumps.dumps[2] = replace(dumps.dumps[2], groups=(*dumps.dumps[2].groups, pair))
    (claim,) = find(dumps)
    assert (claim.finding.culprit, claim.finding.unknown) == ((), (2,))
    assert "rank 2: a send or receive between it and rank 0 is open as well" in claim.finding.basis


def test_a_state_counts_sends_as_well_and_says_nothing_where_a_group_has_both() -> None:
    # 44 is the number of rank 1's last receive: it has not joined 43 for that.
    dumps = dossier("""
        0  35: 42 43~
        1  35=44/44 | 36: 5
        2  35: 42 43~
    """)
    send = Call(18, "send 0->1", "send", "scheduled", False, True, At(0, 9))
    mixed = replace(dumps.dumps[0].groups[0], p2p=(send,))
    dumps.dumps[0] = replace(dumps.dumps[0], groups=(mixed,))
    (claim,) = find(dumps)
    assert (claim.finding.culprit, claim.finding.level) == ((1,), "medium")
    assert "how many calls rank 1 made is not known, only that none is open" in claim.finding.basis


def test_a_state_of_minus_one_with_calls_in_the_ring_is_ignored() -> None:
    dumps = dossier("""
        0  tp: 41 42 43~
        1  tp: 41 42 43~
        2  tp: 41 42
    """)
    frozen = [
        replace(one, groups=tuple(replace(group, started=-1) for group in one.groups)) for one in dumps.dumps
    ]
    dumps.dumps[:] = frozen
    assert told(find(dumps)) == [("fr_not_joined", 11, (2,), ())]


def test_all_that_joined_and_do_not_end_is_no_ranks_fault() -> None:
    dumps = dossier("""
        0  tp: 42 43~
        1  tp: 42 43~
        2  tp: 42 43~
    """)
    (claim,) = find(dumps)
    assert (claim.finding.rule, claim.finding.code, claim.finding.culprit) == ("fr_all_joined", 13, ())
    assert claim.finding.level == "medium"


def test_where_no_dump_says_who_the_members_are_all_that_told_may_not_be_all() -> None:
    text = """
        0  tp: 42 43~
        1  tp: 42 43~
    """
    (claim,) = find(dossier(text.rstrip() + text, members={"tp": []}, backend="gloo"))
    assert (claim.finding.code, claim.finding.level) == (13, "low")
    assert (
        claim.finding.summary == "all that left a dump have joined all_reduce #43 of tp, and it does not end"
    )
    assert [one.rule for one in claim.finding.alternatives] == ["fr_not_joined", "fr_mismatch"]


def test_a_device_that_has_not_done_what_others_have_done_is_behind() -> None:
    dumps = dossier("""
        0  tp: 41 42 43~
        1  tp: 41 42~ 43~
        2  tp: 41 42 43~
    """)
    assert told(find(dumps)) == [("fr_device_behind", 12, (1,), ())]


def test_a_call_that_ended_on_some_alone_takes_a_second_look() -> None:
    text = """
        0  tp: 41 42
        1  tp: 41 42~
        2  tp: 41 42
    """
    (claim,) = find(dossier(text))
    assert (claim.finding.rule, claim.finding.culprit, claim.needs_second_look) == (
        "fr_device_behind",
        (1,),
        True,
    )
    (again,) = find(dossier(text.rstrip() + text))
    assert (again.finding.culprit, again.finding.level, again.needs_second_look) == ((1,), "high", False)


def test_where_it_ended_on_one_alone_nobody_is_named() -> None:
    (claim,) = find(dossier("0  tp: 41 42\n1  tp: 41 42~\n2  tp: 41 42~"))
    assert (claim.finding.code, claim.finding.culprit, claim.finding.unknown) == (12, (), (1, 2))


def test_not_joined_goes_before_a_device_behind() -> None:
    dumps = dossier("""
        0  tp: 41 42 43~
        1  tp: 41 42~ 43~
        2  tp: 41 42 43~
        3  tp: 41 42
    """)
    (claim,) = find(dumps)
    assert (claim.finding.rule, claim.finding.culprit) == ("fr_not_joined", (3,))
    assert [one.rule for one in claim.finding.alternatives] == ["fr_device_behind"]


def test_a_gloo_state_that_lags_by_one_is_not_behind() -> None:
    dumps = dossier(
        """
        0  tp: 41 42 43~
        0  tp: 41 42 43~
        1  tp: 41 42 43~
    """,
        backend="gloo",
    )
    assert told(find(dumps)) == [("fr_all_joined", 13, (), ())]


def test_dumps_of_one_rank_that_contradict_each_other_name_nobody() -> None:
    # Two jobs' files in one folder: each dump of rank 2 is further in one group.
    dumps = dossier("""
        0  a: 42 43~ | b: 7
        1  a: 42 43~ | b: 7
        2  a: 42 | b: 3
        2  a: 40 | b: 7
    """)
    (claim,) = find(dumps)
    assert (claim.finding.culprit, claim.finding.silent) == ((), (2,))
    assert "rank 2: of two of its dumps each is further in some group" in claim.finding.basis


def test_gloo_dumps_without_members_are_compared_by_name() -> None:
    dumps = dossier(
        """
        0  tp: 42 43~
        0  tp: 42 43~
        1  tp: 42 43~
        2  tp: 42
    """,
        backend="gloo",
        members={"tp": []},
    )
    assert told(find(dumps)) == [("fr_not_joined", 11, (2,), ())]


def test_one_rank_in_its_first_call_waits_for_those_that_never_made_one() -> None:
    dumps = dossier("""
        0  tp: 1~ | world: 1
        1  tp: 1~ | world: 1
        2  world: 1
    """, members={"tp": [0, 1, 2]})  # fmt: skip
    assert told(find(dumps)) == [("fr_not_joined", 11, (2,), ())]
