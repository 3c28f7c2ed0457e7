from __future__ import annotations

import pytest

from hicache.ledger import FORWARD, TierTags, WrongPage, split_digests


def tag(letter: str) -> bytes:
    return letter.encode() * 8


def test_what_was_written_is_read() -> None:
    tags = TierTags()
    tags.write([3, 1], [tag("a"), tag("b")], writer=FORWARD)
    assert tags.read([1, 3]) == [tag("b"), tag("a")]
    assert tags.check([3, 1], tag("a") + tag("b")) is None


def test_a_wrong_page_is_named_with_its_slot_and_its_writer() -> None:
    tags = TierTags()
    tags.write([0, 1, 2], [tag("a"), tag("b"), tag("c")], writer=FORWARD)
    tags.write([1], [tag("x")], writer=7)
    found = tags.check([0, 1, 2], tag("a") + tag("b") + tag("c"))
    assert found == WrongPage(1, 1, tag("x"), tag("b"), 7)


def test_a_slot_that_was_never_written_is_wrong() -> None:
    found = TierTags().check([5], tag("a"))
    assert found is not None
    assert (found.slot, found.found) == (5, b"\0" * 8)


def test_reading_another_number_of_pages_than_expected_is_a_programmers_error() -> None:
    tags = TierTags()
    tags.write([0], [tag("a")], writer=FORWARD)
    with pytest.raises(AssertionError, match="1 slots read, 16 bytes"):
        tags.check([0], tag("a") + tag("b"))


def test_digests_are_split_by_page() -> None:
    assert split_digests(tag("a") + tag("b")) == [tag("a"), tag("b")]
