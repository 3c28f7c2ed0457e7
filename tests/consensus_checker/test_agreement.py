"""The agreement rule: who is odd, how the calls part, and what a cut log may never do."""

from __future__ import annotations

import pytest

from consensus_checker.check import check
from tests.support.history import cut, history, lanes


def summary(text: str, *, pp: int = 1) -> tuple[object, ...]:
    finding = check(history(text, pp=pp)).finding
    first = finding.first_divergence
    assert first is not None, finding
    return finding.culprit, first.kind, first.call, first.index


def test_equal_histories_are_consistent() -> None:
    verdict = check(history("0 match:r1=64 round=1\n1 match:r1=64 round=1"))
    assert (verdict.kind, verdict.code, verdict.coverage.compared_calls) == ("consistent", 0, 2)
    assert verdict.coverage.decisions_compared_fraction == 1.0


def test_a_rank_with_another_value_is_named_by_the_majority() -> None:
    text = """
        0  match:r1=64  backup:17=64  evict:3=2
        1  match:r1=64  backup:17=64  evict:3=2
        2  match:r1=64  backup:17=0   evict:4=2
    """
    assert summary(text) == ((2,), "value", "write_backup", 1)


def test_a_call_that_one_rank_lacks_is_missing() -> None:
    text = """
        0  match:r1=64  backup:17=64  match:r2=0  evict:3=2
        1  match:r1=64  match:r2=0  evict:3=2
        2  match:r1=64  backup:17=64  match:r2=0  evict:3=2
    """
    assert summary(text) == ((1,), "missing", "write_backup", 1)


def test_a_call_of_the_same_kind_that_one_rank_lacks_is_missing_too() -> None:
    text = """
        0  match:r1=0  match:r2=0  match:r3=0  match:r4=0  match:r5=0
        1  match:r1=0  match:r2=0  match:r3=0  match:r4=0  match:r5=0
        2  match:r2=0  match:r3=0  match:r4=0  match:r5=0
    """
    assert summary(text) == ((2,), "missing", "match", 0)


def test_a_call_that_one_rank_makes_alone_is_extra() -> None:
    text = """
        0  match:r1=64  evict:9=1  match:r2=0  evict:3=2
        1  match:r1=64  match:r2=0  evict:3=2
        2  match:r1=64  match:r2=0  evict:3=2
    """
    assert summary(text) == ((0,), "extra", "evict", 1)


def test_a_completed_log_that_ends_early_lacks_the_call() -> None:
    text = "0 match:r1=64 evict:3=2\n1 match:r1=64 evict:3=2\n2 match:r1=64"
    assert summary(text) == ((2,), "missing", "evict", 1)


def test_calls_in_another_order_are_order() -> None:
    text = """
        0  match:r1=64  backup:17=64  evict:3=2  admit:r1=1
        1  match:r1=64  backup:17=64  evict:3=2  admit:r1=1
        2  match:r1=64  evict:3=2  backup:17=64  match:r9=1
    """
    assert summary(text) == ((2,), "order", "evict", 1)


def test_a_rank_that_stays_away_from_a_meeting_is_named_with_the_open_call() -> None:
    text = """
        0  round?  events!  #hung
        1  round?  events!  #hung
        2  round?  round=0  main!  #hung
    """
    assert summary(text) == ((2,), "collective", "event_round", 1)


def test_a_meeting_with_another_purpose_is_collective() -> None:
    text = "0 events!  events.\n1 events!  events.\n2 main!  main."
    assert summary(text) == ((2,), "collective", "meeting", 0)


def test_two_against_two_is_a_tie() -> None:
    text = "0 match:r1=64\n1 match:r1=0\n2 match:r1=64\n3 match:r1=0"
    verdict = check(history(text))
    assert (verdict.finding.culprit, verdict.finding.unknown, verdict.code) == ((), (0, 1, 2, 3), 10)
    assert verdict.finding.level == "undetermined"
    assert verdict.finding.basis == ("tie 2:2",)


def test_the_first_stage_leads_where_the_kind_says_so() -> None:
    text = "0 round=1\n1 round=1\n2 round=2\n3 round=2"
    finding = check(history(text, pp=4)).finding
    # Stage 3 has what stage 2 handed it.
    assert (finding.culprit, finding.victims, finding.basis[0]) == ((2,), (3,), "leader pp0")


def test_a_leader_alone_against_all_is_not_acquitted() -> None:
    text = "0 round=1\n1 round=2\n2 round=2\n3 round=2"
    finding = check(history(text, pp=4)).finding
    # It went by another value than it sent, or stage 1 by another than it got; 2 and 3 were handed theirs.
    assert (finding.culprit, finding.unknown, finding.victims) == ((), (0, 1), (2, 3))
    assert finding.level == "undetermined"


def test_a_leader_decides_nothing_inside_its_own_stage() -> None:
    text = "0 round=1\n1 round=2\n2 round=2\n3 round=2"
    finding = check(history(text, pp=2)).finding
    assert (
        finding.culprit,
        finding.basis[0],
        finding.first_divergence.scope if finding.first_divergence else None,
    ) == ((0,), "majority 3/4", "dp0")


def test_other_kinds_have_no_leader() -> None:
    finding = check(history("0 match:r1=1\n1 match:r1=2\n2 match:r1=2", pp=3)).finding
    assert finding.culprit == (0,)


def test_stages_may_enter_different_meetings() -> None:
    text = """
        0  match:r1=64  events!  events.  main!8  main.8
        1  match:r1=64  events!  events.  main!8  main.8
        2  match:r1=64  main!4  main.4
        3  match:r1=64  main!4  main.4
    """
    assert check(history(text, pp=2)).code == 0


def test_ranks_of_one_stage_enter_the_same_meetings() -> None:
    text = """
        0  match:r1=64  events!  events.
        1  match:r1=64  events!  events.
        2  match:r1=64  main!4  main.4
        3  match:r1=64  main!8  main.8
    """
    finding = check(history(text, pp=2)).finding
    assert finding.first_divergence is not None
    assert (
        finding.first_divergence.scope,
        finding.first_divergence.kind,
        finding.unknown,
    ) == ("dp0.pp1", "collective", (2, 3))


def test_a_decision_seen_from_two_scopes_is_one_finding_by_the_wider_vote() -> None:
    text = "0 match:r1=64\n1 match:r1=64\n2 match:r1=64\n3 match:r1=0"
    verdict = check(history(text, pp=2))
    assert (
        verdict.finding.culprit,
        verdict.finding.basis[0],
        verdict.findings,
    ) == ((3,), "majority 3/4", ())


def test_the_earlier_of_two_places_wins() -> None:
    text = """
        0  events!  events.   match:r1=64
        1  events!8  events.8  match:r1=64
        2  match:r1=64
        3  match:r1=0
    """
    verdict = check(history(text, pp=2))
    assert [
        finding.first_divergence.scope
        for finding in (verdict.finding, *verdict.findings)
        if finding.first_divergence
    ] == ["dp0.pp0", "dp0"]


def test_local_completion_times_and_physical_slots_may_differ() -> None:
    text = """
        0  backup:17=64{slot=4}  done:1  round?{writes_done=1}  round=1  done:2
        1  done:1  backup:17=64{slot=9}  round?{writes_done=2}  done:2  round=1
    """
    verdict = check(history(text))
    assert verdict.code == 0


def test_a_shutdown_in_the_middle_of_a_vote_accuses_nobody() -> None:
    text = "0 match:r1=64 round? events!\n1 match:r1=64 round? events!\n2 match:r1=64"
    assert check(history(text)).finding.culprit == ()


DIVERGENT = """
    0  match:r1=64  backup:17=64{host_pages_free=5}  round?  events!  events.  round=1  match:r2=64
    1  match:r1=64  backup:17=64{host_pages_free=5}  round?  events!  events.  round=1  match:r2=64
    2  match:r1=64  backup:17=64{host_pages_free=5}  round?  events!  events.  round=1  match:r2=64
    3  match:r1=64  backup:17=0{host_pages_free=0}  round?  events!  events.  round=1  match:r2=0
"""


def test_a_cut_log_never_accuses_another_rank() -> None:
    whole = lanes(DIVERGENT)
    lengths = [len(lane.entries) for lane in whole]
    for first in range(4):
        for second in range(4):
            for count in range(lengths[first] + 1):
                for other in range(lengths[second] + 1):
                    finding = check(cut(whole, {first: count, second: other})).finding
                    assert finding.culprit in ((), (3,)), (first, count, second, other, finding)
                    assert finding.code in (4, 10)


@pytest.mark.parametrize("count", range(8))
def test_all_logs_cut_alike_are_incomplete_or_right(count: int) -> None:
    finding = check(cut(lanes(DIVERGENT), dict.fromkeys(range(4), count))).finding
    expected: tuple[object, ...] = (10, (3,)) if count >= 2 else (4, ())
    assert expected == (finding.code, finding.culprit)


def test_an_equal_cut_log_is_incomplete_not_consistent() -> None:
    verdict = check(history("0 match:r1=64 evict:3=1\n1 match:r1=64 #cut"))
    assert (verdict.kind, verdict.code, verdict.coverage.truncated) == ("incomplete", 4, (1,))
    assert verdict.coverage.decisions_compared_fraction == 0.5


def test_missing_votes_weaken_a_majority_but_never_turn_it_around() -> None:
    text = (
        "0 backup:1=64{host_pages_free=9}\n1 backup:1=64{host_pages_free=9}\n3 backup:1=0{host_pages_free=0}"
    )
    short = check(history(text, world_size=4)).finding
    assert (short.culprit, short.level) == ((3,), "medium")
    few = check(history("0 match:r1=64\n3 match:r1=0\n4 match:r1=0", world_size=5)).finding
    assert (few.culprit, few.unknown) == ((), (0, 3, 4))


def test_renamed_requests_give_the_same_verdict() -> None:
    text = "0 match:r1=64 admit:r1=1\n1 match:r1=64 admit:r1=1\n2 match:r1=64 admit:r1=2"
    one, two = (check(history(drawn)).to_text() for drawn in (text, text.replace("r1", "zz")))
    assert one != two
    assert one == two.replace("zz", "r1")


def test_a_leader_leads_nothing_but_its_led_fields() -> None:
    text = "0 round=1:2\n1 round=1:3\n2 round=1:3\n3 round=1:3"
    finding = check(history(text, pp=4)).finding
    assert (finding.culprit, finding.basis[0]) == ((0,), "majority 3/4")


def test_a_later_stage_that_differs_in_its_own_way_is_unclear() -> None:
    finding = check(history("0 round=1\n1 round=2\n2 round=3\n3 round=1", pp=4)).finding
    assert (finding.culprit, finding.victims, finding.unknown) == ((1,), (), (2,))


def test_only_the_rank_that_adopted_wrongly_is_accused_in_its_stage() -> None:
    text = "0 round=1\n1 round=1\n2 round=1\n3 round=2\n4 round=1\n5 round=2"
    finding = check(history(text, pp=3)).finding
    assert (finding.culprit, finding.victims) == ((3,), (5,))


def test_a_stage_that_was_not_heard_may_have_been_the_first_to_differ() -> None:
    finding = check(history("0 round=1\n2 round=2\n3 round=2", pp=4, world_size=4)).finding
    assert (finding.culprit, finding.unknown, finding.level) == ((), (0, 2, 3), "undetermined")


def test_a_leader_that_was_not_heard_to_the_full_lowers_the_confidence() -> None:
    text = "0 round=1\n2 round=1\n3 round=2"
    finding = check(history(text, pp=2, world_size=4)).finding
    assert (finding.culprit, finding.basis[0], finding.level) == ((3,), "leader pp0", "low")


def test_the_leaders_own_ranks_are_counted_among_themselves() -> None:
    text = "0 round=1\n1 round=1\n2 round=2\n3 round=1\n4 round=1\n5 round=2"
    finding = check(history(text, pp=2)).finding
    # Rank 5 has what rank 2 handed it.
    assert (finding.culprit, finding.victims) == ((2,), (5,))
    assert finding.basis[0] == "majority 2/3 of leader pp0"


def test_two_leaders_that_differ_are_both_unknown_and_who_follows_them_is_not() -> None:
    finding = check(history("0 round=1\n1 round=2\n2 round=1\n3 round=2", pp=2)).finding
    assert (finding.culprit, finding.unknown, finding.victims) == ((), (0, 1), (2, 3))


def test_a_call_that_the_others_make_later_is_out_of_order_and_else_one_too_many() -> None:
    later = "admit:r1=1 evict:3=2 match:r4=1 match:r5=1"
    text = f"0 match:r1=1 {later}\n1 match:r1=1 {later}\n2 match:r1=1 evict:3=2 finish:r7=1 match:r8=1"
    assert summary(text) == ((2,), "order", "evict", 1)
    alone = text.replace("2 match:r1=1 evict:3=2", "2 match:r1=1 evict:9=2")
    assert summary(alone) == ((2,), "extra", "evict", 1)


def test_values_of_several_odd_ranks_are_each_told() -> None:
    text = "0 match:r1=64\n1 match:r1=64\n2 match:r1=64\n3 match:r1=0\n4 match:r1=32"
    finding = check(history(text)).finding
    assert finding.summary.endswith("tokens 0 on rank 3, 32 on rank 4 instead of 64")


def test_a_call_in_which_the_others_hang_is_missing_and_not_what_came_instead_extra() -> None:
    text = "\n".join(
        f"{rank}  match:r1=1 | " + ("admit:r1=1 main! #hung" if rank == 1 else "round? events! #hung")
        for rank in range(4)
    )
    finding = check(history(text)).finding
    assert finding.first_divergence is not None
    assert (finding.culprit, finding.first_divergence.kind, finding.first_divergence.call) == (
        (1,),
        "missing",
        "event_round",
    )


def test_counters_that_shift_do_not_hide_that_a_call_was_left_out() -> None:
    # `tokens` of what follows counts the calls before it, as an op's number does.
    good = "match:r1=1 submit:r1=1 abort:r2=2 submit:r2=2 abort:r3=3 submit:r3=3 round? events! #hung"
    bad = "match:r1=1 abort:r2=1 submit:r2=1 abort:r3=2 submit:r3=2 round? events! #hung"
    finding = check(history(f"0 {good}\n1 {good}\n2 {bad}")).finding
    assert finding.first_divergence is not None
    assert (finding.first_divergence.kind, finding.first_divergence.call) == ("missing", "prefetch_submit")
