from __future__ import annotations

import hashlib

import pytest

from hicache.control.keys import chain_digests, chain_hashes, hash_names, namespace, pack, page_hash

# Worked out beside SGLang's scheme, page size 4: hicache-semantics 1.10.
FIRST = "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72"
SECOND = "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6"
BIGRAM = "f721fe42aac11dcbfd1a17f24cc5765a0d5b6bc264d1c0b6581d775a7344c11f"
SEED_OF_EXTRA_KEY = "d13976d7b0b5b60f1cbc0f855ef7ec6508f443565049355270b55bbffeeeed33"
FIRST_UNDER_EXTRA_KEY = "db64201913c44015e033ddb4fee172b3e10a92a087bb8dfa3556f8059222766f"
SEED_OF_SALT = "c825a7fb5423c8a6cc5990d09f8ca69181b05fdffd804c10db403e9e52699f6b"
WIDE = "78d75f49fa8980773b1f1c416945b61a856cb7105842533c233f43408273f936"


def digests(tokens: list[int], *, first_page: int = 0, previous: bytes = b"", key: bytes = b"k") -> bytes:
    return chain_digests(pack(tokens), first_page=first_page, page_size_bytes=16, previous=previous, key=key)


def hashes(tokens: list[int], *, first_page: int = 0, previous: bytes = b"") -> bytes:
    return chain_hashes(pack(tokens), first_page=first_page, page_size_bytes=16, previous=previous)


def test_tokens_are_packed_as_little_endian_u32() -> None:
    assert pack([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"


def test_a_token_that_is_no_u32_is_not_packed() -> None:
    with pytest.raises(OverflowError):
        pack([2**32])


# Digests


def test_a_page_that_is_not_full_has_no_digest() -> None:
    assert len(digests([1] * 11)) == 2 * 8


def test_a_digest_stands_for_the_page_and_all_before_it() -> None:
    same_page_after = digests([1, 1, 1, 1, 5, 5, 5, 5])
    other_page_before = digests([2, 2, 2, 2, 5, 5, 5, 5])
    assert same_page_after[8:] != other_page_before[8:]


def test_a_chain_of_digests_can_be_continued_where_another_ended() -> None:
    whole = digests(list(range(12)))
    assert digests(list(range(12)), first_page=1, previous=whole[:8]) == whole[8:]


def test_another_key_gives_other_digests() -> None:
    assert digests([1] * 4) != digests([1] * 4, key=b"other")


def test_a_digest_is_a_keyed_blake2b_of_the_one_before_and_the_page() -> None:
    page = pack([1, 2, 3, 4])
    expected = hashlib.blake2b(b"before" + page, digest_size=8, key=b"k").digest()
    assert digests([1, 2, 3, 4], previous=b"before") == expected


def test_another_namespace_gives_other_digests() -> None:
    assert digests([1] * 4, previous=namespace("a", "")) != digests([1] * 4, previous=namespace("b", ""))


# Hashes


def test_the_chain_of_plain_pages_is_the_one_that_stores_know() -> None:
    assert hash_names(hashes([1, 2, 3, 4, 5, 6, 7, 8])) == [FIRST, SECOND]


def test_one_page_has_the_hash_that_it_has_in_a_chain() -> None:
    first = page_hash([1, 2, 3, 4])
    assert [first.hex(), page_hash([5, 6, 7, 8], first).hex()] == [FIRST, SECOND]


def test_a_bigram_page_is_pairs_of_neighbours() -> None:
    assert page_hash([1, 2, 3, 4, 5], is_bigram=True).hex() == BIGRAM


def test_a_chain_of_hashes_can_be_continued_where_another_ended() -> None:
    assert hashes([9, 9, 9, 9, 5, 6, 7, 8], first_page=1, previous=bytes.fromhex(FIRST)).hex() == SECOND


def test_a_page_that_is_not_full_has_no_hash() -> None:
    assert hash_names(hashes([1, 2, 3, 4, 5, 6, 7])) == [FIRST]


def test_an_extra_key_seeds_the_chain() -> None:
    seed = namespace("tenantA", "")
    assert seed.hex() == SEED_OF_EXTRA_KEY
    assert hashes([1, 2, 3, 4], previous=seed).hex() == FIRST_UNDER_EXTRA_KEY
    assert page_hash([1, 2, 3, 4], seed).hex() == FIRST_UNDER_EXTRA_KEY


def test_a_salt_seeds_the_chain() -> None:
    assert namespace("", "s").hex() == SEED_OF_SALT


def test_nothing_seeds_the_chain_where_neither_is_given() -> None:
    assert namespace("", "") == b""


def test_what_is_an_extra_key_here_is_not_a_salt_there() -> None:
    found = [namespace("ab", ""), namespace("", "ab"), namespace("a", "b"), namespace("b", "a")]
    assert len(set(found)) == 4


def test_a_namespace_is_its_tag_and_two_parts_with_their_lengths() -> None:
    parts = b"\x01" + b"\x02\0\0\0\0\0\0\0" + "é".encode() + b"\x00"
    assert namespace("é", "") == hashlib.sha256(b"sglang-cache-namespace-v1" + parts).digest()


def test_a_page_with_a_token_above_u32_is_marked_and_has_wider_words() -> None:
    assert page_hash([1, 2, 3, 2**32]).hex() == WIDE


def test_the_largest_u32_is_not_wide() -> None:
    assert page_hash([2**32 - 1] * 4) == hashlib.sha256(b"\xff" * 16).digest()


def test_a_wide_bigram_page_has_wide_pairs() -> None:
    words = b"".join(word.to_bytes(8, "little") for word in (1, 2**32, 2**32, 3))
    assert page_hash([1, 2**32, 3], is_bigram=True) == hashlib.sha256(b"\xff" + words).digest()


@pytest.mark.parametrize("token", [-1, 2**63])
def test_a_token_out_of_range_has_no_hash(token: int) -> None:
    with pytest.raises(ValueError, match=f"token {token}"):
        page_hash([1, 2, 3, token])


def test_names_of_no_pages_are_none() -> None:
    assert hash_names(b"") == []
