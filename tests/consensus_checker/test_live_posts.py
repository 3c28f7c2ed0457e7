"""Messages: what has no room is left out, what is not ours is nothing."""

from __future__ import annotations

import pytest

from consensus_checker.live_posts import (
    POST_BYTES_MAX,
    VERSION,
    Bulletin,
    ChainPost,
    FinderPost,
    Inside,
    LanePost,
    Post,
    decoded,
    encoded,
    meeting_key,
    place_of,
    post_bytes,
)

MARKS = [(64 * number, f"{number:016x}") for number in range(1, 89)]


def post(lanes: int, chains: int = 1, text: str = "x") -> Post:
    """A post with all that it may hold."""
    inside = Inside(last={"kind": text}, calls=[{"kind": text}] * 4)
    chain = [ChainPost((f"axis{number}",), 9_000, "f" * 16, MARKS) for number in range(chains)]
    own = [LanePost(f"lane{number}", 7, 99, chain, inside) for number in range(lanes)]
    return Post(VERSION, 3, "a" * 16, 7, "b" * 16, {"tp": 3}, "c" * 16, 123, own)


def test_a_usual_post_is_small_and_comes_back_as_it_was() -> None:
    data = post_bytes(post(1))
    assert len(data) < 3_000
    assert decoded(data, Post) == post(1)


@pytest.mark.parametrize(("lanes", "chains"), [(6, 4), (40, 16), (400, 1), (2, 400)])
def test_no_post_is_larger_than_it_may_be(lanes: int, chains: int) -> None:
    data = post_bytes(post(lanes, chains, text="x" * 2_000))
    assert len(data) <= POST_BYTES_MAX
    found = decoded(data, Post)
    assert found is not None and (found.rank, found.beat) == (3, 7)


def test_of_a_large_post_the_newest_marks_are_kept() -> None:
    found = decoded(post_bytes(post(20, 4)), Post)
    assert found is not None
    marks = found.lanes[0].chains[0].marks
    assert 0 < len(marks) < len(MARKS)
    assert marks == MARKS[-len(marks) :]


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"garbage", b"\xc1", encoded(Bulletin(VERSION, [])), b"\x93\x01"]
)
def test_what_is_no_post_is_nothing(data: bytes) -> None:
    assert decoded(data, Post) is None


def test_a_post_of_another_version_is_nothing() -> None:
    data = encoded(FinderPost(VERSION + 1, 1, 0, "s", 1))
    assert decoded(data, FinderPost) is None


def test_of_a_record_only_what_says_where_a_lane_is_goes_out() -> None:
    record = {
        "kind": "match",
        "rid": "r" * 90,
        "tokens": [1, 2],
        "text": "a prompt",
        "node": 4,
        "phase": None,
    }
    assert place_of(record) == {"kind": "match", "rid": "r" * 64, "node": 4, "phase": None}


def test_messages_are_counted_by_direction_and_peer() -> None:
    send = {"group": "pp", "op": "isend", "peer": 1}
    assert meeting_key(send) == "pp to 1"
    assert meeting_key(send, answer_to=0) == "pp from 0"
    assert meeting_key({"group": "tp0/main", "op": "all_reduce"}) == "tp0/main"
