"""What becomes of claims: contradicted, agreed with, looked at once, in causal order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from consensus_checker.claim import Claim
from consensus_checker.finding import Evidence, Finding
from consensus_checker.weigh import weigh, with_evidence


def claim(rule: str, code: int, culprit: tuple[int, ...] = (), *, file: str = "", **more: Any) -> Claim:
    kinds = {0: "consistent", 10: "divergence", 11: "stall", 14: "dead", 16: "mismatch", 20: "undetermined"}
    about = {name: more.pop(name) for name in ("cleared", "needs_second_look", "missing") if name in more}
    evidence = tuple(Evidence(file or f"{rule}.txt", 3, f"culprit {rank}") for rank in culprit)
    finding = Finding(
        kinds[code],  # type: ignore[arg-type]
        code,
        rule,
        f"{rule} speaks",
        more.pop("level", "medium"),
        culprit=culprit,
        evidence=evidence,
        **more,
    )
    return Claim(finding, **about)


def brief(*claims: Claim) -> list[tuple[object, ...]]:
    return [(one.rule, one.code, one.culprit, one.level) for one in weigh(claims).findings]


def test_nothing_claimed_is_nothing_found() -> None:
    assert weigh(()).findings == ()


def test_a_rank_that_one_claim_accuses_and_another_clears_is_named_by_nobody() -> None:
    (accused, other) = weigh(
        (
            claim("frontier", 11, (2,)),
            claim("stacks", 20, cleared={2: "it waits in all_reduce"}, level="undetermined"),
        )
    ).findings
    assert (accused.kind, accused.code, accused.culprit, accused.unknown) == ("undetermined", 20, (), (2,))
    assert accused.summary == (
        "frontier names rank 2, and other evidence clears it: stacks clears rank 2: it waits in all_reduce"
    )
    assert [one.summary for one in accused.alternatives] == ["frontier speaks"]
    assert [one.supports for one in accused.evidence] == ["unknown 2"]
    assert other.rule == "stacks"


def test_of_several_accused_those_that_are_not_cleared_stay_accused_less_surely() -> None:
    claims = (claim("frontier", 11, (2, 5), level="high"), claim("stacks", 20, cleared={5: "it waits"}))
    assert brief(*claims)[0] == ("frontier", 11, (2,), "medium")


def test_a_rule_does_not_contradict_itself() -> None:
    assert brief(claim("frontier", 11, (2,), cleared={2: "elsewhere"})) == [("frontier", 11, (2,), "medium")]


def test_evidence_of_another_kind_that_names_the_same_rank_makes_it_surer() -> None:
    first, second = weigh((claim("frontier", 11, (2,)), claim("stacks", 11, (2,)))).findings
    assert (first.level, first.basis, second.level) == ("high", ("also stacks",), "high")


def test_that_nothing_is_heard_of_a_rank_is_one_witness_however_many_say_so() -> None:
    claims = (claim("frontier", 11, (2,), silent=(2,)), claim("stacks", 11, (2,), silent=(2,)))
    assert [level for *_, level in brief(*claims)] == ["medium", "medium"]
    seen = (claim("frontier", 11, (2,), silent=(2,)), claim("stacks", 11, (2,)))
    assert [level for *_, level in brief(*seen)] == ["high", "high"]


def test_a_rank_of_which_one_hears_nothing_is_not_accused_where_another_sees_it_wait() -> None:
    waits = claim("frontier", 11, victims=(0,), level="undetermined")
    seen = replace(waits, finding=replace(waits.finding, evidence=(Evidence("dump_0", 1, "victim 0"),)))
    accused = claim("silent", 11, (0,), silent=(0,))
    assert [one.culprit for one in weigh((accused, seen)).findings] == [(), ()]


def test_two_rules_over_one_file_are_one_witness() -> None:
    claims = (claim("frontier", 11, (2,), file="dump_2"), claim("votes", 11, (2,), file="dump_2"))
    assert [level for *_, level in brief(*claims)] == ["medium", "medium"]


def test_two_stalls_that_accuse_different_ranks_as_surely_accuse_nobody() -> None:
    assert [entry[1:] for entry in brief(claim("frontier", 11, (2,)), claim("stacks", 11, (0,)))] == [
        (20, (), "undetermined"),
        (20, (), "undetermined"),
    ]


def test_the_surer_of_two_stalls_that_accuse_different_ranks_stands() -> None:
    claims = (claim("stacks", 11, (0,), level="medium"), claim("frontier", 11, (2,), level="high"))
    assert brief(*claims)[0] == ("frontier", 11, (2,), "high")


def test_one_look_at_a_live_job_accuses_nobody() -> None:
    (finding,) = weigh((claim("stacks", 11, (2,), needs_second_look=True, victims=(0, 1)),)).findings
    assert (finding.kind, finding.code, finding.rule) == ("incomplete", 4, "one_look")
    assert (finding.culprit, finding.victims, finding.unknown) == ((), (), (2,))
    assert [one.summary for one in finding.alternatives] == ["stacks speaks"]


def test_one_look_counts_where_evidence_that_needs_none_names_the_same_rank() -> None:
    claims = (claim("stacks", 11, (2,), needs_second_look=True), claim("frontier", 11, (2,)))
    assert {entry[1:3] for entry in brief(*claims)} == {(11, (2,))}


def test_claims_come_in_causal_order() -> None:
    claims = (
        claim("a", 11, (1,)),
        claim("b", 20),
        claim("c", 14, (1,)),
        claim("d", 16),
        claim("e", 10, (1,)),
    )
    assert [code for _, code, *_ in brief(*claims)] == [14, 10, 16, 11, 20]


def test_what_is_only_guessed_comes_behind_what_is_seen() -> None:
    claims = (claim("silent", 14, (1,), level="low"), claim("frontier", 11, (2,)))
    assert [code for _, code, *_ in brief(*claims)] == [11, 14]


def test_a_mismatch_that_names_nobody_goes_before_the_stall_that_follows_from_it() -> None:
    claims = (claim("frontier", 11, (0, 2)), claim("mismatch", 16, level="undetermined"))
    assert [code for _, code, *_ in brief(*claims)] == [16, 11]


def test_ranks_that_some_evidence_lacks_are_collected() -> None:
    claims = (claim("frontier", 11, (2,), missing=(7,)), claim("stacks", 11, (2,), missing=(5, 7)))
    assert weigh(claims).missing == (5, 7)


def test_every_rank_that_is_named_has_a_line_of_evidence() -> None:
    finding = claim("frontier", 11, (2,), victims=(0, 1), silent=(7,)).finding
    completed = with_evidence(finding, lambda rank: "no evidence of this rank")
    assert [one.supports for one in completed.evidence] == [
        "culprit 2",
        "victim 0: no evidence of this rank",
        "victim 1: no evidence of this rank",
        "silent 7: no evidence of this rank",
    ]


def test_a_line_may_stand_for_several_ranks() -> None:
    several = (Evidence("a", 1, "victim 0-2, 4"), Evidence("b", 2, "culprit 3"))
    finding = Finding("stall", 11, "r", "s", "low", culprit=(3,), victims=(0, 1, 2, 4), evidence=several)
    assert with_evidence(finding, str) == finding
