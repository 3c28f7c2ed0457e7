from __future__ import annotations

from hicache.control.keys import chain_digests, pack


def chain(tokens: list[int], *, first_page: int = 0, previous: bytes = b"", key: bytes = b"k") -> bytes:
    return chain_digests(pack(tokens), first_page=first_page, page_size_bytes=16, previous=previous, key=key)


def test_tokens_are_packed_as_little_endian_u32() -> None:
    assert pack([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"


def test_a_page_that_is_not_full_has_no_digest() -> None:
    assert len(chain([1] * 11)) == 2 * 8


def test_a_digest_stands_for_the_page_and_all_before_it() -> None:
    same_page_after = chain([1, 1, 1, 1, 5, 5, 5, 5])
    other_page_before = chain([2, 2, 2, 2, 5, 5, 5, 5])
    assert same_page_after[8:] != other_page_before[8:]


def test_a_chain_can_be_continued_where_another_ended() -> None:
    whole = chain(list(range(12)))
    assert chain(list(range(12)), first_page=1, previous=whole[:8]) == whole[8:]


def test_another_key_gives_other_digests() -> None:
    assert chain([1] * 4) != chain([1] * 4, key=b"other")
