from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace

import pytest

from hicache.agentic import Agentic, AgenticSpec
from hicache.core import Abort, Request
from hicache.errors import ConfigError
from hicache.workload import FrontDoor
from tests.hicache.test_workload import read_all


def test_a_conversation_grows_by_equal_steps_and_repeats_itself() -> None:
    spec = AgenticSpec(conversations=1, rounds=4, max_context=420, output=10, shared_prefix=20)
    requests = read_all(Agentic(spec))
    assert [request.input_tokens for request in requests] == [120, 220, 320, 420]
    for earlier, later in itertools.pairwise(requests):
        assert later.tokens.startswith(earlier.tokens + earlier.output)


def test_conversations_share_their_prefix_and_nothing_more() -> None:
    spec = AgenticSpec(conversations=2, rounds=1, max_context=100, output=10, shared_prefix=20)
    first, second = read_all(Agentic(spec))
    assert first.tokens[:80] == second.tokens[:80]
    assert first.tokens[80:84] != second.tokens[80:84]


def test_a_conversation_waits_for_its_answer() -> None:
    workload = Agentic(AgenticSpec(conversations=1, rounds=2, max_context=200, output=10, shared_prefix=0))
    first = workload.next()
    assert first is not None
    assert workload.next() is None
    assert not workload.is_exhausted
    workload.finished(first.rid)
    assert workload.next() is not None


def test_a_seed_gives_the_same_conversations_whoever_answers_faster() -> None:
    spec = AgenticSpec(conversations=3, rounds=3)
    one_by_one = {request.rid: request for request in read_all(Agentic(spec))}
    workload = Agentic(spec)
    together: dict[str, Request] = {}
    while not workload.is_exhausted:
        batch = list(iter(workload.next, None))
        for request in reversed(batch):
            together[request.rid] = request
            workload.finished(request.rid)
    assert together == one_by_one


def test_a_specification_is_read_by_its_keys() -> None:
    spec = AgenticSpec.parse("conversations=32,rounds=86,max-context=160000,output=20,aborts=0,think=0")
    assert (spec.conversations, spec.rounds, spec.max_context, spec.output) == (32, 86, 160_000, 20)


@pytest.mark.parametrize(
    "text",
    [
        "conversations=0",
        "rounds=x",
        "colour=3",
        "rounds=8,max-context=8",
        "output=4096",
        "shared-prefix=5000",
        "aborts=101",
        "aborts=x",
        "priorities=0",
        "namespaces=0",
        "think=1001",
        "conversations",
        "rounds=99999999999",
    ],
)
def test_a_specification_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--agentic"):
        AgenticSpec.parse(text)


def test_a_specification_reads_back_its_own_text() -> None:
    text = "conversations=4,rounds=3,aborts=20,priorities=3,namespaces=2,think=5"
    spec = AgenticSpec.parse(text)
    assert (spec.aborts, spec.priorities, spec.namespaces, spec.think) == (20, 3, 2, 5)
    assert AgenticSpec.parse(spec.text()) == spec


def test_what_came_later_is_not_in_the_text_of_a_specification_that_does_not_use_it() -> None:
    """Run ids are made of it."""
    assert AgenticSpec().text() == (
        "conversations=6,rounds=8,max-context=4096,output=32,shared-prefix=256,seed=1"
    )
    assert AgenticSpec(think=3).text().endswith("seed=1,think=3")


def test_the_conversations_of_a_seed_stay_what_they_were() -> None:
    digest = hashlib.sha256()
    for spec in (AgenticSpec(), AgenticSpec(conversations=3, rounds=3, seed=4)):
        digest.update(spec.text().encode())
        for request in read_all(Agentic(spec)):
            digest.update(request.rid.encode() + request.tokens + request.output)
    assert digest.hexdigest()[:16] == "390ad737f01db1b1"


def test_clients_that_go_away_change_nothing_that_is_said() -> None:
    spec = AgenticSpec(conversations=2, rounds=3)
    said = [request.tokens for request in read_all(Agentic(spec))]
    assert [request.tokens for request in read_all(Agentic(replace(spec, aborts=100)))] == said


def test_priorities_and_namespaces_go_by_conversation() -> None:
    spec = AgenticSpec(conversations=5, rounds=1, priorities=2, namespaces=4)
    requests = read_all(Agentic(spec))
    assert [request.priority for request in requests] == [0, 1, 0, 1, 0]
    assert [(request.extra_key, request.cache_salt) for request in requests] == [
        ("", ""),
        ("tenant-1", ""),
        ("", "salt-2"),
        ("tenant-3", "salt-3"),
        ("", ""),
    ]


def drive(spec: AgenticSpec, answer_after: int) -> tuple[dict[str, int], list[Request]]:
    """Polls from a request to its client's leaving, and all requests, where answers take so many polls."""
    workload = Agentic(spec)
    sent: dict[str, int] = {}
    left: dict[str, int] = {}
    requests: list[Request] = []
    for poll in range(10_000):
        left |= {abort.rid: poll - sent[abort.rid] for abort in workload.poll()}
        for rid in [rid for rid, at in sent.items() if at + answer_after == poll]:
            workload.finished(rid)
        while (request := workload.next()) is not None:
            sent[request.rid] = poll
            requests.append(request)
    assert workload.is_exhausted
    return left, requests


def test_who_goes_away_and_when_does_not_hang_on_how_fast_answers_come() -> None:
    spec = AgenticSpec(conversations=6, rounds=8, aborts=30, output=16)
    fast, _ = drive(spec, 1)
    slow, _ = drive(spec, 50)
    assert fast == slow
    assert 5 <= len(fast) <= 25
    assert set(fast.values()) <= set(range(1, 41))
    assert len(set(fast.values())) > 4


def test_after_an_abort_the_conversation_goes_on_without_the_answer() -> None:
    workload = Agentic(AgenticSpec(conversations=1, rounds=2, max_context=200, output=10, shared_prefix=0))
    first = workload.next()
    assert first is not None
    workload.aborted(first.rid)
    second = workload.next()
    assert second is not None
    assert (second.rid, second.input_tokens) == ("c0.t2", 200)
    assert second.tokens.startswith(first.tokens)
    assert not second.tokens.startswith(first.tokens + first.output)


@pytest.mark.parametrize(("think", "expected"), [(0, [1, 2, 3]), (1, [1, 3, 5]), (4, [1, 6, 11])])
def test_a_conversation_thinks_for_so_many_polls_before_its_next_turn(
    think: int, expected: list[int]
) -> None:
    door = FrontDoor(Agentic(AgenticSpec(conversations=1, rounds=3, think=think)), 1)
    seen = []
    for poll in range(1, 20):
        for request in door.poll():
            assert isinstance(request, Request)
            seen.append(poll)
            door.finished(request.rid, is_served=True)
    assert seen == expected


def test_every_client_that_goes_away_is_told_of_once() -> None:
    workload = Agentic(AgenticSpec(conversations=3, rounds=1, aborts=100, output=4))
    for _ in range(3):
        assert workload.next() is not None
    aborts = [abort for _ in range(40) for abort in workload.poll()]
    assert sorted(aborts, key=lambda abort: abort.rid) == [Abort("c0.t1"), Abort("c1.t1"), Abort("c2.t1")]
