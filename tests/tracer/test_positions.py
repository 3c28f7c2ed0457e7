"""Bytes of a log by their place in what was written, packed or not."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tracer.pack import MEMBER_BYTES, pack
from tracer.positions import UnsearchableError, read_at, table

WRITTEN = b"".join(b"%07d\n" % number for number in range(40_000))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "rank0000.io.000.jsonl"
    path.write_bytes(WRITTEN)
    return path


@pytest.mark.parametrize(
    ("count", "start"),
    [
        (10, 0),
        (8, MEMBER_BYTES - 4),
        (200_000, 17),
        (10, len(WRITTEN) - 3),
        (10, len(WRITTEN)),
        (10, 1 << 40),
    ],
)
def test_a_packed_file_gives_the_bytes_that_were_written_there(plain: Path, count: int, start: int) -> None:
    packed = pack(plain)
    assert read_at(packed, count, start) == read_at(plain, count, start) == WRITTEN[start : start + count]
    assert table(packed).size == table(plain).size == len(WRITTEN)


def test_what_is_spoilt_ends_what_can_be_read(plain: Path) -> None:
    packed = pack(plain)
    data = bytearray(packed.read_bytes())
    data[table(packed).offsets[2] + 40] ^= 0xFF
    packed.write_bytes(data)
    assert read_at(packed, 3 * MEMBER_BYTES, 100) == WRITTEN[100 : 2 * MEMBER_BYTES]


@pytest.mark.parametrize("data", [gzip.compress(WRITTEN), WRITTEN, b""], ids=["gzip", "plain", "empty"])
def test_a_file_that_was_not_packed_here_has_no_places(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "rank0000.io.000.jsonl.gz"
    path.write_bytes(data)
    if not data:
        assert table(path).size == 0
        return
    with pytest.raises(UnsearchableError):
        table(path)


def test_a_packed_file_that_was_cut_has_no_places(plain: Path) -> None:
    packed = pack(plain)
    packed.write_bytes(packed.read_bytes()[:-50])
    with pytest.raises(UnsearchableError):
        read_at(packed, 10, 0)


def test_a_file_that_is_gone_has_no_places(tmp_path: Path) -> None:
    with pytest.raises(UnsearchableError):
        table(tmp_path / "nowhere")
