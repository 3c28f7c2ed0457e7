"""Who is silent and who waits, judged from posts and from the finder's own times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from consensus_checker.live_posts import VERSION, ChainPost, Inside, LanePost, Post
from consensus_checker.live_silence import Member, View, judge
from tests.support.live import KINDS

KINDS_BY_NAME = {kind.name: kind for kind in KINDS}
AXES = ("tp",)
LONG, SHORT = 2.1, 0.3


def member(
    rank: int,
    *,
    head: int = 100,
    still_s: float = 0.0,
    age_s: float = 0.0,
    inside: Inside | None = None,
    ended: str = "",
    lanes: Mapping[str, tuple[Inside | None, float]] | None = None,
    fate: str = "",
) -> Member:
    own = {"scheduler": (inside, still_s), **(lanes or {})}
    posts = [
        LanePost(name, 41, 900, [ChainPost(AXES, head, "", [])] if name == "scheduler" else [], where)
        for name, (where, _) in own.items()
    ]
    post = Post(VERSION, rank, "s", 7, "c", {"tp": rank}, "h", 1, posts, 0, ended)
    return Member(rank, post, age_s, {name: seconds for name, (_, seconds) in own.items()}, fate)


def view(*members: Member, behind: Mapping[int, float] | None = None, **more: Any) -> View:
    by_rank = {one.rank: one for one in members}
    return View(by_rank, KINDS_BY_NAME, "scheduler", 2.0, {AXES: behind or {}}, **more)


def in_call(rid: str = "r7") -> Inside:
    call = {"kind": "load_back", "phase": "call", "rid": rid, "step": 41}
    return Inside(last=call, calls=[call])


def in_meeting(seq: int = 412, **more: Any) -> Inside:
    enter = {
        "kind": "collective",
        "phase": "enter",
        "group": "tp0/main",
        "group_seq": seq,
        "op": "all_reduce",
    }
    record = enter | more
    return Inside(last=record, meeting=record, members=[0, 1, 2, 3], entered={"tp0/main": seq})


def after(kind: str = "match", **entered: int) -> Inside:
    return Inside(last={"kind": kind, "rid": "r7", "step": 41}, entered=entered)


def test_ranks_that_are_equal_and_in_no_call_are_quiet_for_ever() -> None:
    idle = [member(rank, still_s=3600.0, inside=after()) for rank in range(4)]
    assert judge(view(*idle)) == []


def test_ranks_that_go_on_are_quiet_whatever_their_beats() -> None:
    assert judge(view(*(member(rank, head=100 + rank, age_s=rank / 10) for rank in range(4)))) == []


def test_a_rank_whose_posts_have_stopped_is_dead_or_stuck_and_its_last_call_is_told() -> None:
    (alarm,) = judge(
        view(
            member(0, still_s=LONG, inside=in_meeting()),
            member(1, still_s=LONG, inside=in_meeting()),
            member(2, still_s=2.1, age_s=2.1, inside=after(), fate="its process is gone"),
            member(3, still_s=LONG, inside=in_meeting()),
        )
    )
    found = alarm.finding
    assert (found.kind, found.code, found.culprit, found.silent) == ("dead", 14, (2,), (2,))
    assert found.victims == (0, 1, 3)
    assert found.summary == (
        "rank 2 said nothing for 2.1 s (its process is gone); its last call: match r7, step 41; "
        "ranks 0-1, 3 wait in all_reduce tp0/main #412"
    )
    assert alarm.may_abort


def test_ranks_that_die_together_are_told_together() -> None:
    first, late = member(0, still_s=2.1, age_s=2.1), member(2, still_s=2.2, age_s=2.2)
    assert judge(view(first, member(1, still_s=1.6, age_s=1.6), late)) == []
    (alarm,) = judge(view(first, member(1, still_s=0.2, age_s=0.2), late))
    assert alarm.culprits == (0, 2)
    # Not for long, for it may only be slow.
    (alarm,) = judge(view(first, member(1, still_s=1.6, age_s=1.6), member(2, still_s=2.5, age_s=2.5)))
    assert alarm.culprits == (0, 2)


@pytest.mark.parametrize(
    ("fate", "level"),
    [
        ("its process is gone", "high"),
        ("its process is stopped", "high"),
        ("its process is there and does not run its watcher", "medium"),
        ("", "medium"),
    ],
)
def test_a_process_that_is_there_may_go_on(fate: str, level: str) -> None:
    (alarm,) = judge(view(member(0), member(1, still_s=2.1, age_s=2.1, inside=after(), fate=fate)))
    assert (alarm.finding.kind, alarm.finding.level) == ("dead", level)


def test_a_rank_that_never_came_to_the_meeting_is_the_silent_one() -> None:
    waiting = [member(rank, still_s=LONG, inside=in_meeting()) for rank in (0, 1, 3)]
    (alarm,) = judge(view(*waiting, member(2, still_s=LONG, inside=after())))
    found = alarm.finding
    assert (found.kind, found.code, found.culprit, found.victims) == ("stall", 11, (2,), (0, 1, 3))
    assert found.summary == (
        "rank 2 did not come to all_reduce tp0/main #412 for 2.1 s: rank 2 is in no call, its last: "
        "match r7, step 41; ranks 0-1, 3 wait in all_reduce tp0/main #412"
    )
    assert found.victim is not None and found.victim.where == "all_reduce tp0/main #412"


def test_a_rank_that_goes_on_elsewhere_did_not_come_either() -> None:
    waiting = [member(rank, still_s=LONG, inside=in_meeting()) for rank in (0, 1, 3)]
    (alarm,) = judge(view(*waiting, member(2, head=160)))
    assert alarm.finding.culprit == (2,)
    assert "rank 2 goes on elsewhere in step 41" in alarm.finding.summary


def test_a_rank_that_has_left_the_meeting_is_not_missed_there() -> None:
    waiting = [member(rank, still_s=LONG, inside=in_meeting()) for rank in (0, 1)]
    gone = [member(rank, still_s=LONG, inside=after(**{"tp0/main": 412})) for rank in (2, 3)]
    assert judge(view(*waiting, *gone)) == []


def test_of_a_wait_that_has_just_begun_nothing_is_told() -> None:
    waiting = [member(rank, still_s=SHORT, inside=in_meeting()) for rank in (0, 1, 3)]
    assert judge(view(*waiting, member(2, still_s=LONG, inside=after()))) == []


def test_a_call_that_others_are_not_in_waits_for_them() -> None:
    waiting = [member(rank, still_s=LONG, inside=in_call()) for rank in (0, 1, 3)]
    (alarm,) = judge(view(*waiting, member(2, still_s=LONG, inside=after())))
    assert (alarm.finding.code, alarm.finding.culprit) == (11, (2,))
    assert alarm.finding.summary.startswith("rank 2 did not come to load back r7 for 2.1 s")


def test_a_call_that_all_ranks_are_in_is_a_slow_one() -> None:
    together = [member(rank, still_s=60.0, inside=in_call()) for rank in range(4)]
    assert judge(view(*together)) == []


def test_of_two_ranks_the_one_that_is_missed_is_silent_and_not_accused() -> None:
    (alarm,) = judge(view(member(0, still_s=LONG, inside=in_call()), member(1, still_s=LONG, inside=after())))
    found = alarm.finding
    assert (found.silent, found.culprit, found.unknown, found.level) == ((1,), (), (0, 1), "low")


def test_one_that_waits_alone_may_be_the_odd_one() -> None:
    others = [member(rank, still_s=LONG, inside=after()) for rank in (1, 2, 3)]
    (alarm,) = judge(view(member(0, still_s=LONG, inside=in_call()), *others))
    assert (alarm.finding.culprit, alarm.finding.unknown) == ((), (0, 1, 2, 3))


def test_a_rank_in_a_call_that_the_others_are_through_with_stands_behind() -> None:
    others = [member(rank, head=101, still_s=LONG, inside=after()) for rank in (0, 1, 2)]
    (alarm,) = judge(view(*others, member(3, still_s=LONG, inside=in_call()), behind={3: LONG}))
    found = alarm.finding
    assert (found.kind, found.code, found.culprit) == ("frozen", 15, (3,))
    assert found.summary == (
        "rank 3 stood still for 2.1 s at call 100: rank 3 is in load back r7; ranks 0-2 are 1 call further on"
    )


def test_an_idle_rank_that_skipped_a_call_stands_behind() -> None:
    others = [member(rank, head=101, still_s=LONG, inside=after()) for rank in (0, 1, 2)]
    (alarm,) = judge(view(*others, member(3, still_s=LONG, inside=after()), behind={3: LONG}))
    assert alarm.finding.culprit == (3,)


def test_a_rank_that_has_been_behind_for_a_moment_is_not_told() -> None:
    others = [member(rank, head=101) for rank in (0, 1, 2)]
    assert judge(view(*others, member(3, still_s=3600.0, inside=after()), behind={3: 0.1})) == []


def test_one_rank_that_did_more_than_all_others_is_the_odd_one() -> None:
    late = [member(rank, still_s=LONG, inside=after()) for rank in (1, 2, 3)]
    ahead = member(0, head=101, still_s=LONG, inside=after())
    (alarm,) = judge(view(ahead, *late, behind=dict.fromkeys((1, 2, 3), LONG)))
    assert (alarm.finding.culprit, alarm.may_abort) == ((0,), False)


def test_ranks_that_wait_for_each_other_are_told_by_where_they_are() -> None:
    most = [member(rank, still_s=LONG, inside=in_meeting(412)) for rank in (0, 1, 2)]
    other = member(3, still_s=LONG, inside=in_meeting(90, group="tp0/events"))
    (alarm,) = judge(view(*most, other))
    assert alarm.finding.culprit == (3,)
    assert alarm.finding.summary == (
        "ranks 0-3 wait for each other: ranks 0-2 in all_reduce tp0/main #412; "
        "rank 3 in all_reduce tp0/events #90"
    )


def test_a_receive_waits_for_its_peer_alone() -> None:
    receive = in_meeting(5, op="recv", peer=0, group="pp")
    waiting = Inside(last=receive.last, meeting=receive.meeting, entered={"pp from 0": 5})
    sent = Inside(last={"kind": "match"}, entered={"pp to 1": 4})
    (alarm,) = judge(
        view(
            member(0, still_s=LONG, inside=sent),
            member(1, still_s=LONG, inside=waiting),
            member(2, still_s=LONG, inside=after()),
        )
    )
    assert alarm.finding.silent == (0,)
    has_sent = Inside(last={"kind": "match"}, entered={"pp to 1": 5})
    assert (
        judge(view(member(0, still_s=LONG, inside=has_sent), member(1, still_s=LONG, inside=waiting))) == []
    )


def test_who_may_be_about_to_be_found_dead_is_not_called_slow_before() -> None:
    waiting = [member(rank, still_s=LONG, inside=in_meeting()) for rank in (0, 1, 3)]
    assert judge(view(*waiting, member(2, still_s=1.9, age_s=1.9, inside=after()))) == []


def test_a_rank_that_has_ended_is_neither_dead_nor_behind() -> None:
    others = [member(rank, head=101, still_s=LONG, inside=after()) for rank in (0, 1, 2)]
    done = member(3, age_s=60.0, still_s=60.0, inside=after(), ended="completed")
    assert judge(view(*others, done)) == []


@pytest.mark.parametrize("seconds", [2.1, 9.0])
def test_a_background_lane_that_is_slow_is_not_told(seconds: float) -> None:
    io = Inside(last={"kind": "lane_state", "state": "backend", "op": 17}, state="backend")
    ranks = [member(rank, lanes={"io": (io, seconds) if rank == 1 else (None, 0.0)}) for rank in range(3)]
    assert judge(view(*ranks)) == []


def test_a_background_lane_that_never_came_back_is_told_and_ends_nothing() -> None:
    io = Inside(last={"kind": "lane_state", "state": "backend", "op": 17}, state="backend")
    ranks = [member(rank, lanes={"io": (io, 10.1) if rank == 1 else (None, 0.0)}) for rank in range(3)]
    (alarm,) = judge(view(*ranks))
    assert alarm.finding.summary == "rank 1: its io lane has been in the backend with op 17 for 10.1 s"
    assert (alarm.finding.code, alarm.finding.culprit, alarm.may_abort) == (15, (), False)


def test_a_background_lane_that_is_idle_is_never_told() -> None:
    idle = Inside(last={"kind": "lane_state", "state": "idle"}, state="idle")
    assert judge(view(*(member(rank, lanes={"io": (idle, 3600.0)}) for rank in range(3)))) == []


def test_a_collective_that_all_have_joined_is_told_late_and_ends_nothing() -> None:
    assert judge(view(*(member(rank, still_s=9.0, inside=in_meeting()) for rank in range(4)))) == []
    (alarm,) = judge(view(*(member(rank, still_s=10.1, inside=in_meeting()) for rank in range(4))))
    assert (alarm.finding.code, alarm.finding.culprit, alarm.may_abort) == (13, (), False)


def test_members_that_were_never_heard_are_missed_where_others_wait_for_them() -> None:
    waiting = [member(rank, still_s=LONG, inside=in_meeting()) for rank in (0, 1, 2)]
    assert judge(view(*waiting)) == []
    (alarm,) = judge(view(*waiting, unheard=(3,)))
    assert alarm.finding.silent == (3,)
    assert "rank 3 was never heard" in alarm.finding.summary


def in_progress(seq: int, *, is_in: bool = True) -> Inside:
    enter = {"kind": "meeting", "phase": "enter", "group": "replica0/progress", "group_seq": seq}
    record = enter | {"op": "all_reduce"}
    key = "replica0/progress"
    if not is_in:
        return Inside(last=record | {"phase": "leave"}, entered={key: seq - 1}, left={key: seq - 1})
    return Inside(last=record, meeting=record, members=[0, 1, 2], entered={key: seq}, left={key: seq - 1})


def test_a_lane_in_a_store_is_told_and_who_waits_for_its_rank_is_told_with_it() -> None:
    io = Inside(last={"kind": "lane_state", "state": "backend", "op": 88}, state="backend")
    waiting = [member(rank, lanes={"sync": (in_progress(7), 10.4)}) for rank in (0, 2)]
    hung = member(1, lanes={"io": (io, 10.2), "sync": (in_progress(7, is_in=False), 10.4)})
    (alarm,) = judge(view(waiting[0], hung, waiting[1]))
    assert alarm.finding.summary == (
        "rank 1: its io lane has been in the backend with op 88 for 10.2 s; "
        "ranks 0, 2 wait in all_reduce replica0/progress #7"
    )
    assert (alarm.finding.unknown, alarm.finding.victims, alarm.culprits) == ((1,), (0, 2), (1,))


def test_who_waits_for_a_lane_that_is_about_to_be_told_is_not_told_before_it() -> None:
    io = Inside(last={"kind": "lane_state", "state": "backend", "op": 88}, state="backend")
    hung = member(1, lanes={"io": (io, 9.8), "sync": (in_progress(7, is_in=False), 10.4)})
    waiting = [member(rank, lanes={"sync": (in_progress(7), 10.4)}) for rank in (0, 2)]
    assert judge(view(waiting[0], hung, waiting[1])) == []


def test_lanes_that_wait_for_a_rank_whose_lanes_are_in_no_store_are_told_themselves() -> None:
    waiting = [member(rank, lanes={"sync": (in_progress(7), 10.4)}) for rank in (0, 2)]
    late = member(1, lanes={"sync": (in_progress(7, is_in=False), 10.4)})
    alarms = judge(view(waiting[0], late, waiting[1]))
    assert [alarm.finding.unknown for alarm in alarms] == [(0,), (2,)]


def test_of_lanes_that_do_not_wait_for_each_other_the_one_in_a_store_is_told_first() -> None:
    io = Inside(last={"kind": "lane_state", "state": "backend", "op": 88}, state="backend")
    busy = Inside(last={"kind": "lane_state", "state": "collective"}, state="collective")
    alarms = judge(view(member(0, lanes={"sync": (busy, 11.0)}), member(1, lanes={"io": (io, 10.2)})))
    assert [alarm.culprits for alarm in alarms] == [(1,), (0,)]
