"""Our logs and others' evidence: one finding where they are about the same ranks, two where they are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from consensus_checker.finding import Alternative, Evidence, Finding, Victim
from consensus_checker.history import History
from consensus_checker.linking import joined
from consensus_checker.own_evidence import Own
from consensus_checker.verdict import Coverage, Verdict
from consensus_checker.weigh import Weighed

NOTHING = Finding("nothing_compared", 4, "coverage", "nothing", "undetermined")
DIVERGED = Finding(
    "divergence",
    10,
    "agreement",
    "rank 3 left the majority",
    "high",
    ("majority 3/4",),
    culprit=(3,),
    evidence=(Evidence("rank0003.scheduler.000.jsonl", 9, "culprit 3"),),
)
TIE = replace(DIVERGED, summary="they part", culprit=(), unknown=(0, 1), level="undetermined", evidence=())
STALLED = Finding(
    "stall",
    11,
    "fr_not_joined",
    "rank 3 did not join",
    "medium",
    culprit=(3,),
    victims=(0, 1, 2),
    victim=Victim((0, 1, 2), "all_reduce #412 of tp", 0, None),
    evidence=(Evidence("dump_3", 0, "culprit 3"), Evidence("dump_0", 0, "victim 0")),
)


def own(finding: Finding, *, is_closed: bool = False) -> Own:
    coverage = Coverage(4, 4, (), (), 9, None, ())
    return Own(Verdict(finding, coverage), History.of([]), "runs/last", is_closed)


def join(first: Finding | None, *claims: Finding, **more: Any) -> tuple[Finding, list[Finding]]:
    is_closed = more.pop("is_closed", False)
    return joined(
        own(first, is_closed=is_closed) if first is not None else None,
        Weighed(claims),
        NOTHING,
        alive=more.pop("alive", frozenset()),
    )


def test_a_stall_that_misses_the_rank_that_had_left_is_one_sentence_with_it() -> None:
    finding, rest = join(DIVERGED, STALLED)
    assert finding.summary == ("rank 3 left the majority; ranks 0-2 wait for it in all_reduce #412 of tp")
    assert (finding.code, finding.culprit, finding.victims) == (10, (3,), (0, 1, 2))
    assert finding.consequence == ("stall", 11)
    assert finding.basis == ("majority 3/4", "also fr_not_joined")
    assert rest == []


def test_a_stall_that_misses_another_rank_is_a_finding_of_its_own() -> None:
    other = replace(STALLED, culprit=(1,), victims=(0, 2, 3))
    finding, rest = join(DIVERGED, other)
    assert (finding, rest) == (DIVERGED, [other])


def test_a_stall_of_which_the_odd_rank_is_only_silent_follows_from_the_divergence_too() -> None:
    silent = replace(STALLED, culprit=(), silent=(3,), level="low")
    finding, rest = join(DIVERGED, silent)
    assert (finding.consequence, rest) == (("stall", 11), [])


def test_evidence_of_another_kind_breaks_a_tie_of_two_ranks() -> None:
    claim = replace(STALLED, culprit=(1,), victims=(0,), evidence=(Evidence("dump_1", 0, "culprit 1"),))
    finding, _ = join(TIE, claim)
    assert (finding.culprit, finding.unknown, finding.level) == ((1,), (), "medium")
    assert finding.summary.startswith("they part; fr_not_joined names rank 1")
    assert "also fr_not_joined" in finding.basis


def test_a_guess_breaks_no_tie() -> None:
    claim = replace(STALLED, culprit=(1,), victims=(0,), level="low")
    assert join(TIE, claim)[0].culprit == ()


def test_where_own_logs_are_cut_others_evidence_decides() -> None:
    cut = Finding("incomplete", 4, "coverage", "equal as far as the logs go", "undetermined")
    assert join(cut, STALLED)[0] == STALLED
    assert join(cut)[0] == cut


def test_sound_and_complete_logs_against_a_sure_accusation_are_undetermined() -> None:
    fine = Finding("consistent", 0, "coverage", "no rank diverged", "high")
    finding, rest = join(fine, STALLED, is_closed=True)
    assert (finding.code, finding.rule, finding.culprit, finding.unknown) == (20, "contradiction", (), (3,))
    assert rest == [STALLED]


def test_sound_and_complete_logs_outweigh_a_guess() -> None:
    fine = Finding("consistent", 0, "coverage", "no rank diverged", "high")
    finding, rest = join(fine, replace(STALLED, level="low"), is_closed=True)
    assert (finding.code, rest) == (0, [])
    assert finding.ruled_out == (("rank 3 did not join", "every rank closed its log as completed"),)


def test_where_logs_name_nobody_others_evidence_may_among_the_ranks_in_doubt() -> None:
    unheard = Finding("undetermined", 20, "stall_not_joined", "3 left no log", "undetermined", unknown=(3,))
    assert join(unheard, STALLED)[0] == STALLED
    elsewhere = replace(STALLED, culprit=(1,))
    assert join(unheard, elsewhere)[0] == unheard


def test_a_rank_whose_heart_stopped_and_that_a_later_stack_shows_is_not_dead() -> None:
    dead = Finding("dead", 14, "dead", "rank 3 said nothing more", "medium", culprit=(3,))
    seen = replace(STALLED, rule="stack_not_joined", summary="rank 3 stands in hash_pages")
    finding, _ = join(dead, seen, alive=frozenset({3}))
    assert (finding.code, finding.summary) == (11, "rank 3 stands in hash_pages")
    assert "also dead: its heart had stopped" in finding.basis
    assert join(dead, seen)[0].code == 14


def test_what_the_system_says_of_a_process_goes_before_what_its_heart_makes_likely() -> None:
    dead = Finding("dead", 14, "dead", "rank 3 said nothing more", "medium", culprit=(3,))
    stopped = replace(dead, rule="process_state", summary="rank 3: its process is stopped", level="high")
    finding, rest = join(dead, stopped)
    assert (finding.summary, finding.level, rest) == ("rank 3: its process is stopped", "high", [])


def test_what_looked_like_a_stall_in_one_look_is_nothing_where_the_next_shows_progress() -> None:
    moved = replace(NOTHING, kind="consistent", code=0)
    one_look = replace(NOTHING, kind="incomplete", rule="one_look", summary="one look")
    assert joined(None, Weighed((one_look,)), moved) == (moved, [])
    assert joined(None, Weighed((one_look,)), NOTHING) == (one_look, [])


def test_where_logs_of_a_job_that_goes_on_break_off_is_no_stall() -> None:
    stall = Alternative("rank 0 is in a call where the logs break off", "stall_not_joined")
    cut = replace(NOTHING, kind="incomplete", alternatives=(stall,))
    moved = replace(NOTHING, kind="consistent", code=0)
    finding, _rest = joined(own(cut), Weighed(()), moved)
    assert (finding.code, finding.alternatives) == (4, ())
    assert finding.ruled_out == (("a stall", "two looks show that every rank went on"),)
    assert joined(own(cut), Weighed(()), NOTHING)[0] == cut


def test_without_own_logs_the_first_claim_is_the_verdict_and_without_claims_what_there_is() -> None:
    assert join(None, STALLED, DIVERGED) == (STALLED, [DIVERGED])
    assert join(None) == (NOTHING, [])
