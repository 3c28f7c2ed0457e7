"""Breaking a tie by taking the decision again."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from consensus_checker.check import check
from consensus_checker.reenact import Question
from tests.support.history import history

TIE = "0 match:r1=64 backup:7=64\n1 match:r1=64 backup:7=0"


def finding(answer: Mapping[int, bool], text: str = TIE) -> tuple[object, ...]:
    asked: list[Question] = []

    def reenact(question: Question) -> Mapping[int, bool]:
        asked.append(question)
        return answer

    found = check(history(text), reenact=reenact).finding
    return found.culprit, found.unknown, found.level, found.basis[0], len(asked)


def test_the_rank_that_contradicts_its_own_inputs_is_the_odd_one() -> None:
    assert finding({0: True, 1: False}) == ((1,), (), "high", "reenact, against tie 1:1", 1)
    assert finding({0: False, 1: True}) == ((0,), (), "high", "reenact, against tie 1:1", 1)


@pytest.mark.parametrize("answer", [{}, {0: True}, {1: False}, {0: False, 1: False}, {0: True, 1: True}])
def test_an_answer_that_does_not_tell_them_apart_names_nobody(answer: dict[int, bool]) -> None:
    assert finding(answer)[:4] == ((), (0, 1), "undetermined", "tie 1:1")


def test_where_both_follow_the_verdict_says_so() -> None:
    found = check(history(TIE), reenact=lambda question: {0: True, 1: True}).finding
    assert found.basis == ("tie 1:1", "each decision follows from its own rank's inputs")


def test_it_is_asked_about_the_place_where_they_part() -> None:
    asked: list[Question] = []

    def reenact(question: Question) -> Mapping[int, bool]:
        asked.append(question)
        return {}

    check(history(TIE), reenact=reenact)
    (question,) = asked
    assert (question.scope, question.lane, question.index) == ("dp0", "scheduler", 1)
    values = {rank: record["tokens"] for rank, record in question.records.items() if record is not None}
    assert values == {0: 64, 1: 0}


def test_a_majority_is_not_asked_about() -> None:
    text = "0 match:r1=64\n1 match:r1=64\n2 match:r1=0"
    assert finding({0: False, 2: True}, text) == ((2,), (), "medium", "majority 2/3", 0)


def test_the_sentence_says_what_the_rank_did() -> None:
    found = check(history(TIE), reenact=lambda question: {0: True, 1: False}).finding
    assert found.summary.startswith("rank 1 decided what does not follow from its own inputs, at call 1")
