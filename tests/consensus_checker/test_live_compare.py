"""Finding the first link that differs from digests and questions, without any thread or store."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import msgspec
import pytest

from consensus_checker.live_compare import Found, Known, first_difference, hunt
from consensus_checker.live_digests import EVERY, LINKS_KEPT, ChainDigests
from consensus_checker.live_posts import ChainPost, Question, Told
from tracer.chain import LINKS, Chain

AXES = ("tp",)


class Side:
    """One rank's chain, as its watcher follows it."""

    def __init__(self, links: Sequence[tuple[object, ...]]) -> None:
        self.chain = Chain(AXES)
        self.digests = ChainDigests(self.chain)
        for link in links:
            self.chain.links.append(link)
            if len(self.chain.links) == LINKS:
                self.digests.follow()
                self.chain.close()
        self.digests.follow()

    @property
    def post(self) -> ChainPost:
        return ChainPost(AXES, self.digests.head, self.digests.digest, self.digests.marks())

    def answer(self, question: Question) -> Told:
        if question.links is None:
            return Told(self.digests.digests_at(question.counts))
        first, links = self.digests.links(*question.links)
        return Told([], first, msgspec.json.encode(links))


def links(count: int, odd: Mapping[int, object] | None = None) -> list[tuple[object, ...]]:
    values = odd or {}
    return [("match", "", f"r{number}", values.get(number, 64)) for number in range(count)]


def known(sides: Sequence[Side]) -> Known:
    found = Known("scheduler", AXES)
    for rank, side in enumerate(sides):
        found.take(rank, side.post)
    return found


def hunted(sides: Sequence[Side]) -> tuple[Found | None, int]:
    """What is found, and how many questions that took."""
    search = hunt(known(sides), range(len(sides)))
    questions = 0
    try:
        question = next(search)
        while True:
            questions += 1
            answers = {rank: side.answer(question) for rank, side in enumerate(sides)}
            question = search.send(answers)
    except StopIteration as end:
        return end.value, questions


@pytest.mark.parametrize("count", [1, 63, 64, 65, 500, 5_000])
def test_equal_chains_are_equal_up_to_their_head(count: int) -> None:
    found = known([Side(links(count)) for _ in range(3)])
    assert found.look((0, 1, 2)) is None
    assert (found.equal, found.due((0, 1, 2))) == (count, None)


@pytest.mark.parametrize("place", [0, 1, 63, 64, 65, 900, 999])
def test_the_first_link_that_differs_is_found(place: int) -> None:
    sides = [Side(links(1_000)), Side(links(1_000, {place: 0, 999: 1})), Side(links(1_000))]
    found, questions = hunted(sides)
    assert found is not None and found.place == place
    assert questions <= 4
    assert set(found.window) == {0, 1, 2}


@pytest.mark.parametrize("seed", range(30))
def test_wherever_ranks_part_and_however_far_apart_they_are_the_place_is_found(seed: int) -> None:
    chance = random.Random(seed)
    counts = [chance.randrange(1, 20_000) for _ in range(4)]
    place = chance.randrange(min(counts))
    odd = chance.randrange(4)
    sides = [Side(links(count, {place: 7} if rank == odd else {})) for rank, count in enumerate(counts)]
    state = known(sides)
    span = state.look(range(4))
    if span is None:
        # Only the digests at the least head can tell.
        due = state.due(range(4))
        assert due is not None
        for rank, side in enumerate(sides):
            state.add(rank, side.digests.digests_at([due]))
        span = state.look(range(4))
    assert span is not None and span[0] <= place < span[1]


def test_a_rank_that_is_behind_is_held_to_what_it_has_made_and_to_no_more() -> None:
    found = known([Side(links(1_000)), Side(links(130))])
    assert found.look((0, 1)) is None
    assert (found.equal, found.due((0, 1))) == (128, 130)


def test_values_that_python_takes_for_equal_are_not() -> None:
    found, _ = hunted([Side(links(100, {50: True})), Side(links(100, {50: 1}))])
    assert found is not None and found.place == 50


def test_where_the_links_are_gone_the_range_is_what_is_left() -> None:
    sides = [Side(links(100, {3: 0})), Side(links(100))]
    search = hunt(known(sides), (0, 1))
    question = next(search)
    assert question.links is not None
    with pytest.raises(StopIteration) as end:
        search.send({0: Told([], 90, b"[]"), 1: Told([], 90, b"[]")})
    assert end.value.value == Found(None, (0, 64), {})


def test_of_links_only_those_that_two_ranks_have_can_differ() -> None:
    one, two = Told([], 10, b"[[1],[2]]"), Told([], 11, b"[[2],[3]]")
    assert first_difference({0: one, 1: two}, 10) is None
    assert first_difference({0: one, 1: Told([], 11, b"[[9]]")}, 10) == 11


def test_marks_are_few_and_two_ranks_far_apart_share_some() -> None:
    near, far = Side(links(200)), Side(links(40_000))
    assert len(far.digests.marks()) <= 8 * 11
    shared = {count for count, _ in near.digests.marks()} & {count for count, _ in far.digests.marks()}
    assert not shared
    # So the finder asks at the lower head, as long as the links are kept.
    assert far.digests.digests_at([200]) == [(200, near.digests.digest)]


def test_digests_at_any_count_are_those_that_the_head_had_there() -> None:
    side = Side([])
    heads = []
    for link in links(200):
        side.chain.links.append(link)
        side.digests.follow()
        heads.append((side.digests.head, side.digests.digest))
    assert side.digests.digests_at(range(1, 201)) == heads
    assert len({digest for _, digest in heads}) == 200


def test_links_that_were_gone_before_they_were_digested_leave_no_digests() -> None:
    chain = Chain(AXES)
    chain.links.extend(links(LINKS))
    chain.close()
    chain.links.extend(links(5))
    digests = ChainDigests(chain)
    digests.follow()
    assert (digests.lost, digests.digests_at([LINKS + 1])) == (LINKS, [])


def test_marks_of_links_that_are_gone_are_forgotten() -> None:
    side = Side(links(3 * LINKS_KEPT))
    assert len(side.digests._marks) <= 2 * LINKS_KEPT // EVERY + 1
    assert side.digests.digests_at([EVERY]) == []
